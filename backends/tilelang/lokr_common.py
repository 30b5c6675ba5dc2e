"""What LoKr's kernels share: how operands reach them, and products of tiles."""

# No annotations import from __future__: TileLang evaluates annotations in its scope.

from typing import Any

import torch

from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import aligned

Half = torch.Tensor | None
Scale = float | torch.Tensor


def operand(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor as kernels read it: as it is on a GPU; on a CPU cast, so that a build serves all.

    The kernels themselves make that cast, to the compute dtype or to fp32, of what they read.
    """
    return aligned(t) if t.is_cuda else t.to(dtype).contiguous()


def stored(t: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype of :func:`operand`'s result."""
    return t.dtype if t.is_cuda else dtype


def factor_of(scale: Scale) -> Any:
    """A scale as kernels take it."""
    return scale.reshape(1) if isinstance(scale, torch.Tensor) else scale


def product_of(T: Any, exact: bool) -> Any:
    """A macro: acc += a @ b of shared tiles. Exact: multiply-adds, not TF32."""

    @T.macro
    def product(acc: Any, a: Any, b: Any, m: Any, n: Any, k: Any, a_t: Any, b_t: Any) -> None:
        if exact:
            for i, j in T.Parallel(m, n):
                for kk in T.serial(k):
                    acc[i, j] += (a[kk, i] if a_t else a[i, kk]) * (b[j, kk] if b_t else b[kk, j])
        else:
            T.gemm(a, b, acc, transpose_A=a_t, transpose_B=b_t)

    return product


def threads_of(plan: Plan, on_cpu: bool, *tiles: tuple[int, int]) -> int:
    """Threads of a block that makes products of these tiles: a warp owns 16 rows by 8 columns."""
    return 32 * (1 if on_cpu else min(plan.num_warps, *(m * n // 128 for m, n in tiles)))


def is_exact(policy: Policy, on_cpu: bool) -> bool:
    return policy.compute is torch.float32 and (on_cpu or not policy.tf32)
