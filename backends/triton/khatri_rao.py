"""Row-wise products of two factors (Khatri-Rao), by which LoHa runs as a LoRA of rank r^2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import TL_DTYPE, in_turn, kernel


@kernel
def _pairs(
    left, right, out, N, R,
    COMPUTE: tl.constexpr, RANK_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements of the products in the order in which they lie in memory."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.cast(N, tl.int64) * R * R
    if RANK_LAST:
        n = at // (R * R)
        i = n * R + at % (R * R) // R
        j = n * R + at % R
    else:
        n = at % N
        i = at // N // R * N + n
        j = at // N % R * N + n
    x = tl.load(left + i, mask=inside, other=0.0).to(COMPUTE).to(tl.float32)
    y = tl.load(right + j, mask=inside, other=0.0).to(COMPUTE).to(tl.float32)
    tl.store(out + at, (x * y).to(out.dtype.element_ty), mask=inside)


@kernel
def _pairs_grad(
    grad, left, right, grad_left, grad_right, N, R,
    COMPUTE: tl.constexpr, RANK_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Elements of both factors' gradients in the order in which they lie in memory."""
    in_turn()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.cast(N, tl.int64) * R
    n = at // R if RANK_LAST else at % N
    i = at % R if RANK_LAST else at // N
    step = 1 if RANK_LAST else N  # from one row of a factor to the next
    across = R * step
    first = n * R if RANK_LAST else n  # row 0 of the factors at n, and of the products
    pair = n * R * R if RANK_LAST else n
    of_left = tl.zeros((BLOCK,), tl.float32)
    of_right = tl.zeros((BLOCK,), tl.float32)
    for j in tl.range(0, R):
        x = tl.load(left + first + j * step, mask=inside, other=0.0).to(COMPUTE).to(tl.float32)
        y = tl.load(right + first + j * step, mask=inside, other=0.0).to(COMPUTE).to(tl.float32)
        of_left += tl.load(grad + pair + i * across + j * step, mask=inside, other=0.0) * y
        of_right += tl.load(grad + pair + j * across + i * step, mask=inside, other=0.0) * x
    tl.store(grad_left + at, of_left.to(grad_left.dtype.element_ty), mask=inside)
    tl.store(grad_right + at, of_right.to(grad_right.dtype.element_ty), mask=inside)


@prepared
def pairs(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    rank_last: bool,
    wide: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out[p * R + q, n] = left[p, n] * right[q, n], rounded once.

    ``left`` and ``right``: (R, N), ``out``: (R * R, N), contiguous; all transposed with
    ``rank_last``. The factors are cast to ``policy.compute`` unless ``wide``.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    launch, grid = _pairs_launch(left, rank_last, wide, plan, policy, out.numel())
    prepared_launch = _pairs.prepare(grid, (left, right, out), *launch)
    return lambda left, right, out, *_: prepared_launch(left, right, out)


@prepared
def pairs_grad(
    grad: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    grad_left: torch.Tensor,
    grad_right: torch.Tensor,
    rank_last: bool,
    wide: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradients of both factors of :func:`pairs`; ``grad``: fp32, laid out as its ``out``.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    launch, grid = _pairs_launch(left, rank_last, wide, plan, policy, left.numel())
    args = (grad, left, right, grad_left, grad_right)
    prepared_launch = _pairs_grad.prepare(grid, args, *launch)
    return lambda *args: prepared_launch(*args[:5])


def _pairs_launch(
    left: torch.Tensor, rank_last: bool, wide: bool, plan: Plan, policy: Policy, count: int
) -> tuple[tuple[dict[str, object], tuple[int, int]], tuple[int]]:
    n, rank = left.shape if rank_last else left.shape[::-1]
    options = {
        "COMPUTE": TL_DTYPE[torch.float32 if wide else policy.compute],
        "RANK_LAST": rank_last,
        "BLOCK": plan.block_n,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    return (options, (n, rank)), (triton.cdiv(count, plan.block_n),)
