"""Row-wise products of two factors (Khatri-Rao), by which LoHa runs as a LoRA of rank r^2."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# The ignores below are for those annotations, which are values where mypy wants types.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build, compact


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
        KernelBuildError: the kernel can't be built.
    """
    compute = torch.float32 if wide else policy.compute
    on_cpu = not out.is_cuda
    types = (compute, compute) if on_cpu else (left.dtype, right.dtype)
    params = (_rank(left, rank_last, on_cpu), plan.block_n, (*types, out.dtype, compute), rank_last)
    kernel = build(pairs_kernel, params, out.device)

    def launch(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, *_: bool) -> None:
        if on_cpu:  # where a cast costs less than a build
            left, right = left.to(compute), right.to(compute)
        kernel(compact(left), compact(right), compact(out.view(_products(left, rank_last))))

    return launch


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
        KernelBuildError: the kernel can't be built.
    """
    compute = torch.float32 if wide else policy.compute
    on_cpu = not grad.is_cuda
    types = (compute, compute) if on_cpu else (left.dtype, right.dtype)
    dtypes = (*types, grad_left.dtype, grad_right.dtype, compute)
    params = (_rank(left, rank_last, on_cpu), plan.block_n, dtypes, rank_last)
    kernel = build(pairs_grad_kernel, params, grad.device)

    def launch(
        grad: torch.Tensor,
        left: torch.Tensor,
        right: torch.Tensor,
        grad_left: torch.Tensor,
        grad_right: torch.Tensor,
        *_: bool,
    ) -> None:
        if on_cpu:
            left, right = left.to(compute), right.to(compute)
        grad = grad.view(_products(left, rank_last))
        kernel(*map(compact, (grad, left, right, grad_left, grad_right)))

    return launch


def _rank(factor: torch.Tensor, rank_last: bool, on_cpu: bool) -> int | None:
    return None if on_cpu else factor.shape[1 if rank_last else 0]


def _products(factor: torch.Tensor, rank_last: bool) -> tuple[int, int, int]:
    """The shape of all products of two factors, by their rank."""
    n, rank = factor.shape if rank_last else factor.shape[::-1]
    return (n, rank, rank) if rank_last else (rank, rank, n)


def pairs_kernel(
    rank: int | None, block: int, dtypes: tuple[torch.dtype, ...], rank_last: bool
) -> Any:
    """The prim_func behind :func:`pairs`; without a rank it is symbolic, as the length is."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    index = "int64" if rank is None else "int32"
    N, R = T.dynamic("n", index), T.dynamic("r", index) if rank is None else rank
    left_dtype, right_dtype, out_dtype, compute = (NAMES[dtype] for dtype in dtypes)
    factor = (N, R) if rank_last else (R, N)
    # A block stays in one row: no element has to be divided by a symbolic length.
    grid = (N, T.ceildiv(R * R, block)) if rank_last else (R * R, T.ceildiv(N, block))

    @T.prim_func
    def pairs(
        left: T.Tensor(factor, left_dtype),  # type: ignore[valid-type]
        right: T.Tensor(factor, right_dtype),  # type: ignore[valid-type]
        out: T.Tensor((N, R, R) if rank_last else (R, R, N), out_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(*grid, threads=128) as (row, part):
            for e in T.Parallel(block):
                at = part * block + e
                if rank_last:
                    if at < R * R:
                        out[row, at // R, at % R] = T.cast(
                            T.cast(left[row, at // R], compute), "float32"
                        ) * T.cast(T.cast(right[row, at % R], compute), "float32")
                elif at < N:
                    out[row // R, row % R, at] = T.cast(
                        T.cast(left[row // R, at], compute), "float32"
                    ) * T.cast(T.cast(right[row % R, at], compute), "float32")

    return pairs


def pairs_grad_kernel(
    rank: int | None, block: int, dtypes: tuple[torch.dtype, ...], rank_last: bool
) -> Any:
    """The prim_func behind :func:`pairs_grad`; sizes as in :func:`pairs_kernel`."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    index = "int64" if rank is None else "int32"
    N, R = T.dynamic("n", index), T.dynamic("r", index) if rank is None else rank
    left_dtype, right_dtype, grad_left_dtype, grad_right_dtype, compute = (
        NAMES[dtype] for dtype in dtypes
    )
    factor = (N, R) if rank_last else (R, N)
    grid = (N, T.ceildiv(R, block)) if rank_last else (R, T.ceildiv(N, block))

    @T.prim_func
    def pairs_grad(
        grad: T.Tensor((N, R, R) if rank_last else (R, R, N), "float32"),  # type: ignore[valid-type]
        left: T.Tensor(factor, left_dtype),  # type: ignore[valid-type]
        right: T.Tensor(factor, right_dtype),  # type: ignore[valid-type]
        grad_left: T.Tensor(factor, grad_left_dtype),  # type: ignore[valid-type]
        grad_right: T.Tensor(factor, grad_right_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(*grid, threads=128) as (row, part):
            of_left = T.alloc_fragment((block,), "float32")
            of_right = T.alloc_fragment((block,), "float32")
            T.clear(of_left)
            T.clear(of_right)
            for j in T.serial(R):
                for e in T.Parallel(block):
                    at = part * block + e
                    if rank_last:
                        if at < R:
                            of_left[e] += grad[row, at, j] * T.cast(
                                T.cast(right[row, j], compute), "float32"
                            )
                            of_right[e] += grad[row, j, at] * T.cast(
                                T.cast(left[row, j], compute), "float32"
                            )
                    elif at < N:
                        of_left[e] += grad[row, j, at] * T.cast(
                            T.cast(right[j, at], compute), "float32"
                        )
                        of_right[e] += grad[j, row, at] * T.cast(
                            T.cast(left[j, at], compute), "float32"
                        )
            for e in T.Parallel(block):
                at = part * block + e
                if at < (R if rank_last else N):
                    grad_left[row, at] = of_left[e]
                    grad_right[row, at] = of_right[e]

    return pairs_grad
