"""The ``torch`` backend: each op's formula in plain PyTorch, as an unfused run computes it.

It has no kernels. Core runs the formula in the working dtype and lets autograd record it, which
makes it the baseline the fused backends are measured against.
"""

from lycoris.kernels.formula import run_formula

__all__ = ["run_formula"]
