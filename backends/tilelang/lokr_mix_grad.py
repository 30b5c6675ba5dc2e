"""LoKr: the gradient of the matrix that mixes rows, summed over the tokens."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .lokr_common import Scale, factor_of, is_exact, operand, product_of, stored, threads_of


@prepared
def mix_grad(
    grad: torch.Tensor,
    value: torch.Tensor,
    scale: Scale,
    parts: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """parts (splits, q, p): fp32 sums of scale * grad (T * q, n) @ value (T * p, n)^T.

    Each split sums a contiguous share of the tokens. M and N of ``plan`` are q and p; K runs over
    the tokens and n.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu, compute = not grad.is_cuda, policy.compute
    kernel = build(
        mix_grad_kernel,
        (
            (None, None, None) if on_cpu else (*parts.shape[1:], grad.shape[1]),
            (plan.block_m, plan.block_n, plan.block_k),
            (stored(grad, compute), stored(value, compute), compute),
            isinstance(scale, torch.Tensor),
            grad.shape[1] % plan.block_k == 0,
            is_exact(policy, on_cpu),
            threads_of(plan, on_cpu, (plan.block_m, plan.block_n)),
            "int64" if on_cpu else "int32",
        ),
        grad.device,
    )

    def launch(grad: torch.Tensor, value: torch.Tensor, scale: Scale, parts: torch.Tensor) -> None:
        kernel(operand(grad, compute), operand(value, compute), factor_of(scale), parts)

    return launch


def mix_grad_kernel(
    sizes: tuple[int | None, int | None, int | None],
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    scale_by_tensor: bool,
    even: bool,
    exact: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`mix_grad`; the numbers of tokens and splits stay symbolic.

    ``even``: n is a multiple of a step, which then lies within a token.
    """
    import tilelang.language as T

    Q, P, N = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("q", "p", "n"), sizes, strict=True)
    )
    ROWS, INNER, SPLITS = (T.dynamic(name, index) for name in ("rows", "inner", "splits"))
    block_m, block_n, block_k = blocks
    grad_dtype, value_dtype, compute = (NAMES[dtype] for dtype in dtypes)
    product = product_of(T, exact)
    grad_type = T.Tensor((ROWS, N), grad_dtype)
    value_type = T.Tensor((INNER, N), value_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    parts_type = T.Tensor((SPLITS, Q, P), "float32")

    @T.macro
    def body(grad: Any, value: Any, scale: Any, parts: Any) -> None:
        grid = T.ceildiv(P, block_n), T.ceildiv(Q, block_m), SPLITS
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            left = T.alloc_shared((block_m, block_k), compute)
            right = T.alloc_shared((block_n, block_k), compute)
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32")
            share = T.ceildiv(ROWS // Q, SPLITS)
            token = bz * share
            length = T.max(T.min(share, ROWS // Q - token), 0) * N
            T.clear(total)
            for step in T.serial(T.ceildiv(length, block_k)):
                if even:
                    at = token + step * block_k // N
                    first = step * block_k % N
                    for i, k in T.Parallel(block_m, block_k):
                        left[i, k] = T.if_then_else(
                            by * block_m + i < Q,
                            T.cast(grad[at * Q + by * block_m + i, first + k], compute),
                            T.cast(0, compute),
                        )
                    for j, k in T.Parallel(block_n, block_k):
                        right[j, k] = T.if_then_else(
                            bx * block_n + j < P,
                            T.cast(value[at * P + bx * block_n + j, first + k], compute),
                            T.cast(0, compute),
                        )
                else:
                    for i, k in T.Parallel(block_m, block_k):
                        left[i, k] = T.if_then_else(
                            T.And(by * block_m + i < Q, step * block_k + k < length),
                            T.cast(
                                grad[
                                    (token + (step * block_k + k) // N) * Q + by * block_m + i,
                                    (step * block_k + k) % N,
                                ],
                                compute,
                            ),
                            T.cast(0, compute),
                        )
                    for j, k in T.Parallel(block_n, block_k):
                        right[j, k] = T.if_then_else(
                            T.And(bx * block_n + j < P, step * block_k + k < length),
                            T.cast(
                                value[
                                    (token + (step * block_k + k) // N) * P + bx * block_n + j,
                                    (step * block_k + k) % N,
                                ],
                                compute,
                            ),
                            T.cast(0, compute),
                        )
                T.clear(part)
                product(part, left, right, block_m, block_n, block_k, False, True)
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            for i, j in T.Parallel(block_m, block_n):
                if by * block_m + i < Q and bx * block_n + j < P:
                    parts[bz, by * block_m + i, bx * block_n + j] = total[i, j] * (
                        scale[0] if scale_by_tensor else scale
                    )

    @T.prim_func
    def mix_grad(
        grad: grad_type,  # type: ignore[valid-type]
        value: value_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        parts: parts_type,  # type: ignore[valid-type]
    ) -> None:
        body(grad, value, scale, parts)

    return mix_grad
