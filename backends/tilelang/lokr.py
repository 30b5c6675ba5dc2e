"""LoKr's weight and its gradient.

A half is read, or made from its pair, a tile at a time: neither it nor the Kronecker product is
ever stored. Every kernel has one list of parameters; one that a variant has no use for is another
tensor of the call, and never read.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .lokr_common import (
    Half,
    Scale,
    factor_of,
    is_exact,
    operand,
    product_of,
    stored,
    threads_of,
)


def _kron_params(
    w1: torch.Tensor, w1_b: Half, w2: torch.Tensor, w2_b: Half, plan: Plan, policy: Policy
) -> tuple[Any, ...]:
    """Sizes, tiles and dtypes that both kernels of the weight depend on."""
    on_cpu = not w1.is_cuda
    b = w1.shape[1] if w1_b is None else w1_b.shape[1]
    d = w2.shape[1] if w2_b is None else w2_b.shape[1]
    ranks = (0 if w1_b is None else w1.shape[1], 0 if w2_b is None else w2.shape[1])
    sizes: tuple[Any, ...] = (w1.shape[0], b, w2.shape[0], d, *ranks)
    if on_cpu:  # nothing is compiled in, so that a build serves every shape
        sizes = (None, None, None, None, *(None if rank else 0 for rank in ranks))
    return (
        sizes,
        (plan.block_m, plan.block_n, plan.block_k),
        (stored(w1, policy.compute), stored(w2, policy.compute), policy.compute),
        plan.splits,
        is_exact(policy, on_cpu),
        threads_of(plan, on_cpu, (plan.block_m, plan.block_n)),
        "int64" if on_cpu else "int32",
    )


def _halves(T: Any, sizes: tuple[Any, ...], dtypes: tuple[Any, ...], index: str) -> tuple[Any, ...]:
    """a, b, c, d, both ranks, the weight's rows and columns, and the types of the halves."""
    A, B, C, D, R1, R2 = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("a", "b", "c", "d", "p", "r"), sizes, strict=True)
    )
    O, N = (T.dynamic("o", index), T.dynamic("n", index)) if sizes[0] is None else (A * C, B * D)
    shapes_1 = ((A, B), (A, B)) if sizes[4] == 0 else ((A, R1), (R1, B))
    shapes_2 = ((C, D), (C, D)) if sizes[5] == 0 else ((C, R2), (R2, D))
    types = [T.Tensor(shape, NAMES[dtypes[0]]) for shape in shapes_1]
    types += [T.Tensor(shape, NAMES[dtypes[1]]) for shape in shapes_2]
    return A, B, C, D, R1, R2, O, N, *types


def _readers(
    T: Any, low: tuple[bool, bool], blocks: tuple[int, int, int], compute: str, exact: bool
) -> tuple[Any, Any]:
    """Macros: a tile of W2 into shared memory, and one element of W1, both in fp32."""
    (low_1, low_2), (block_m, block_n, block_k) = low, blocks
    product = product_of(T, exact)

    @T.macro
    def w2_tile(w2: Any, w2_b: Any, tile: Any, C: Any, D: Any, R2: Any, by: Any, bx: Any) -> None:
        if low_2:
            left = T.alloc_shared((block_m, block_k), compute)
            right = T.alloc_shared((block_k, block_n), compute)
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(total)
            for step in T.serial(T.ceildiv(R2, block_k)):
                T.copy(w2[by * block_m, step * block_k], left)
                T.copy(w2_b[step * block_k, bx * block_n], right)
                T.clear(part)
                product(part, left, right, block_m, block_n, block_k, False, False)
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            T.copy(total, tile)
        else:
            for i, j in T.Parallel(block_m, block_n):
                row = by * block_m + i
                column = bx * block_n + j
                tile[i, j] = T.if_then_else(
                    T.And(row < C, column < D),
                    T.cast(T.cast(w2[row, column], compute), "float32"),
                    T.float32(0),
                )

    @T.macro
    def w1_element(w1: Any, w1_b: Any, factor: Any, R1: Any, a: Any, b: Any) -> None:
        if low_1:
            factor[0] = 0
            for k in T.serial(R1):
                factor[0] += T.cast(T.cast(w1[a, k], compute), "float32") * T.cast(
                    T.cast(w1_b[k, b], compute), "float32"
                )
        else:
            factor[0] = T.cast(T.cast(w1[a, b], compute), "float32")

    return w2_tile, w1_element


@prepared
def kron(
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    w2_b: Half,
    base: torch.Tensor | None,
    scale: Scale,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (a * c, b * d) = [base +] scale * kron(W1 (a, b), W2 (c, d)).

    A half is ``w`` where ``w_b`` is None, else the product of the pair, summed in fp32 from values
    cast to ``policy.compute`` and not rounded. M and N of ``plan`` are c and d, K is w2's rank;
    each split takes a contiguous share of W1's elements. ``base`` is contiguous, as ``out`` is.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    kernel = build(
        kron_kernel,
        (
            *_kron_params(w1, w1_b, w2, w2_b, plan, policy),
            None if base is None else stored(base, torch.float32),
            out.dtype,
            isinstance(scale, torch.Tensor),
        ),
        out.device,
    )
    compute = policy.compute

    def launch(
        w1: torch.Tensor,
        w1_b: Half,
        w2: torch.Tensor,
        w2_b: Half,
        base: torch.Tensor | None,
        scale: Scale,
        out: torch.Tensor,
    ) -> None:
        halves = (w1, w1 if w1_b is None else w1_b, w2, w2 if w2_b is None else w2_b)
        added = out if base is None else operand(base, torch.float32)
        kernel(*(operand(half, compute) for half in halves), added, factor_of(scale), out)

    return launch


def kron_kernel(
    sizes: tuple[Any, ...],
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    splits: int,
    exact: bool,
    threads: int,
    index: str,
    base_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    scale_by_tensor: bool,
) -> Any:
    """The prim_func behind :func:`kron`; a size of None stays symbolic, a rank of 0 is no pair."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    A, B, C, D, R1, R2, O, N, *types = _halves(T, sizes, dtypes, index)
    w1_type, w1_b_type, w2_type, w2_b_type = types
    low = sizes[4] != 0, sizes[5] != 0
    compute = NAMES[dtypes[2]]
    block_m, block_n, _ = blocks
    share = T.ceildiv(A * B, splits)
    w2_tile, w1_element = _readers(T, low, blocks, compute, exact)
    base_type = T.Tensor((O, N), NAMES[out_dtype if base_dtype is None else base_dtype])
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((O, N), NAMES[out_dtype])

    @T.macro
    def body(w1: Any, w1_b: Any, w2: Any, w2_b: Any, base: Any, scale: Any, out: Any) -> None:
        grid = T.ceildiv(D, block_n), T.ceildiv(C, block_m), splits
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            tile = T.alloc_shared((block_m, block_n), "float32")
            factor = T.alloc_local((1,), "float32")
            w2_tile(w2, w2_b, tile, C, D, R2, by, bx)
            for step in T.serial(share):
                pair = bz * share + step
                if pair < A * B:
                    a = pair // B
                    b = pair % B
                    w1_element(w1, w1_b, factor, R1, a, b)
                    for i, j in T.Parallel(block_m, block_n):
                        row = by * block_m + i
                        column = bx * block_n + j
                        if row < C and column < D:
                            value = factor[0] * (
                                tile[i, j] * (scale[0] if scale_by_tensor else scale)
                            )
                            if base_dtype is not None:
                                value += T.cast(base[a * C + row, b * D + column], "float32")
                            out[a * C + row, b * D + column] = value

    @T.prim_func
    def kron(
        w1: w1_type,  # type: ignore[valid-type]
        w1_b: w1_b_type,  # type: ignore[valid-type]
        w2: w2_type,  # type: ignore[valid-type]
        w2_b: w2_b_type,  # type: ignore[valid-type]
        base: base_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        out: out_type,  # type: ignore[valid-type]
    ) -> None:
        body(w1, w1_b, w2, w2_b, base, scale, out)

    return kron


@prepared
def kron_grad(
    grad: torch.Tensor,
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    w2_b: Half,
    scale: Scale,
    w1_parts: torch.Tensor | None,
    w2_parts: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """fp32 partial sums of the gradients of W1 and of W2; see :func:`kron`.

    ``w1_parts`` is (tiles of W2, a, b) and ``w2_parts`` (splits, c, d), each scaled; None where no
    gradient is wanted. ``grad`` (a * c, b * d) is contiguous and read once.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    kernel = build(
        kron_grad_kernel,
        (
            *_kron_params(w1, w1_b, w2, w2_b, plan, policy),
            stored(grad, torch.float32),
            (w1_parts is not None, w2_parts is not None),
            isinstance(scale, torch.Tensor),
            1 if not grad.is_cuda else plan.num_stages,
        ),
        grad.device,
    )
    compute = policy.compute

    def launch(
        grad: torch.Tensor,
        w1: torch.Tensor,
        w1_b: Half,
        w2: torch.Tensor,
        w2_b: Half,
        scale: Scale,
        w1_parts: torch.Tensor | None,
        w2_parts: torch.Tensor | None,
    ) -> None:
        some = w1_parts if w2_parts is None else w2_parts
        halves = (w1, w1 if w1_b is None else w1_b, w2, w2 if w2_b is None else w2_b)
        parts = (some if part is None else part for part in (w1_parts, w2_parts))
        tensors = (operand(half, compute) for half in halves)
        kernel(operand(grad, torch.float32), *tensors, factor_of(scale), *parts)  # type: ignore[arg-type]

    return launch


def kron_grad_kernel(
    sizes: tuple[Any, ...],
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    splits: int,
    exact: bool,
    threads: int,
    index: str,
    grad_dtype: torch.dtype,
    wanted: tuple[bool, bool],
    scale_by_tensor: bool,
    stages: int,
) -> Any:
    """The prim_func behind :func:`kron_grad`; see :func:`kron_kernel`."""
    import tilelang.language as T

    A, B, C, D, R1, R2, O, N, *types = _halves(T, sizes, dtypes, index)
    w1_type, w1_b_type, w2_type, w2_b_type = types
    low = sizes[4] != 0, sizes[5] != 0
    compute = NAMES[dtypes[2]]
    block_m, block_n, _ = blocks
    want_1, want_2 = wanted
    share = T.ceildiv(A * B, splits)
    w2_tile, w1_element = _readers(T, low, blocks, compute, exact)
    tiles = (
        T.dynamic("tiles", index)
        if sizes[0] is None
        else T.ceildiv(C, block_m) * T.ceildiv(D, block_n)
    )
    grad_type = T.Tensor((O, N), NAMES[grad_dtype])
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    shape_1, shape_2 = (tiles, A, B), (splits, C, D)
    # A type of its own for each: parameters of one type object would become one buffer.
    parts_1 = T.Tensor(shape_1 if want_1 else shape_2, "float32")
    parts_2 = T.Tensor(shape_2 if want_2 else shape_1, "float32")
    # The last share may be shorter: its other steps repeat a pair, and count for nothing.

    @T.macro
    def body(
        grad: Any, w1: Any, w1_b: Any, w2: Any, w2_b: Any, scale: Any, w1_parts: Any, w2_parts: Any
    ) -> None:
        grid = T.ceildiv(D, block_n), T.ceildiv(C, block_m), splits
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            tile = T.alloc_shared((block_m, block_n), "float32")
            got = T.alloc_shared((block_m, block_n), NAMES[grad_dtype])
            sums = T.alloc_fragment((block_m, block_n), "float32")
            products = T.alloc_fragment((block_m, block_n), "float32")
            row_sums = T.alloc_fragment((block_m,), "float32")
            whole = T.alloc_fragment((1,), "float32")
            factor = T.alloc_local((1,), "float32")
            if want_1:
                w2_tile(w2, w2_b, tile, C, D, R2, by, bx)
            T.clear(sums)
            for step in T.Pipelined(share, num_stages=stages):
                pair = bz * share + step
                a = T.min(pair, A * B - 1) // B
                b = T.min(pair, A * B - 1) % B
                T.copy(grad[a * C + by * block_m, b * D + bx * block_n], got)
                if want_2:
                    w1_element(w1, w1_b, factor, R1, a, b)
                    for i, j in T.Parallel(block_m, block_n):
                        # Beyond the last pair nothing is added, not even 0 times an infinity.
                        sums[i, j] += T.if_then_else(
                            pair < A * B, factor[0] * T.cast(got[i, j], "float32"), T.float32(0)
                        )
                if want_1:
                    for i, j in T.Parallel(block_m, block_n):
                        # What lies beyond the tile's edge belongs to another element of W1.
                        products[i, j] = T.if_then_else(
                            T.And(by * block_m + i < C, bx * block_n + j < D),
                            T.cast(got[i, j], "float32") * tile[i, j],
                            T.float32(0),
                        )
                    T.reduce_sum(products, row_sums, dim=1)
                    T.reduce_sum(row_sums, whole, dim=0)
                    if pair < A * B:
                        for i in T.Parallel(1):
                            w1_parts[by * T.ceildiv(D, block_n) + bx, a, b] = whole[i] * (
                                scale[0] if scale_by_tensor else scale
                            )
            if want_2:
                for i, j in T.Parallel(block_m, block_n):
                    row = by * block_m + i
                    column = bx * block_n + j
                    if row < C and column < D:
                        w2_parts[bz, row, column] = sums[i, j] * (
                            scale[0] if scale_by_tensor else scale
                        )

    @T.prim_func
    def kron_grad(
        grad: grad_type,  # type: ignore[valid-type]
        w1: w1_type,  # type: ignore[valid-type]
        w1_b: w1_b_type,  # type: ignore[valid-type]
        w2: w2_type,  # type: ignore[valid-type]
        w2_b: w2_b_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        w1_parts: parts_1,  # type: ignore[valid-type]
        w2_parts: parts_2,  # type: ignore[valid-type]
    ) -> None:
        body(grad, w1, w1_b, w2, w2_b, scale, w1_parts, w2_parts)

    return kron_grad
