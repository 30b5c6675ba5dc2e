"""The public ops, one module a family.

Every op takes its backend from ``backend=``, ``lycoris.use_backend()``, the environment, or the
device, in that order, and is differentiable to any order in every tensor operand. Sizes: O out,
I in, k spatial, r rank, T tokens (any leading dimensions).
"""

from .lora import lora_apply, lora_weight
from .table import OPS

__all__ = [
    "OPS",
    "lora_apply",
    "lora_weight",
]
