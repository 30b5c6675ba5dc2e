"""LoKr's weight and its gradient.

A half is read, or made from its pair, a tile at a time: neither it nor the Kronecker product is
ever stored. Every kernel has one list of parameters; one that a variant has no use for is another
tensor of the call, and never read.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .lokr_common import Half, Scale, factor_of, operand, stored


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
        32 if on_cpu else 32 * plan.num_warps,
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


def _readers(T: Any, low: tuple[bool, bool], blocks: tuple[int, int, int], compute: str) -> Any:
    """Macros: a tile of W2, and some elements of W1, into shared memory, in fp32.

    Of a pair by multiply-adds: a tile has fewer rows than a matrix product takes. Sums over a rank
    longer than ``CHUNK`` are made in two levels.
    """
    block_m, block_n, count = blocks

    def product(w: Any, w_b: Any, row: Any, k: Any, column: Any) -> Any:
        left, right = (T.cast(T.cast(t, compute), "float32") for t in (w[row, k], w_b[k, column]))
        return left * right

    @T.macro
    def w2_tile(
        w2: Any, w2_b: Any, tile: Any, C: Any, D: Any, R2: Any, row: Any, column: Any
    ) -> None:
        if low[1]:
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32")
            T.clear(total)
            for chunk in T.serial(T.ceildiv(R2, CHUNK)):
                T.clear(part)
                for i, j in T.Parallel(block_m, block_n):
                    if row + i < C and column + j < D:
                        for k in T.serial(T.min(R2 - chunk * CHUNK, CHUNK)):
                            part[i, j] += product(w2, w2_b, row + i, chunk * CHUNK + k, column + j)
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            T.copy(total, tile)
        else:
            for i, j in T.Parallel(block_m, block_n):
                tile[i, j] = T.if_then_else(
                    T.And(row + i < C, column + j < D),
                    T.cast(T.cast(w2[row + i, column + j], compute), "float32"),
                    T.float32(0),
                )

    @T.macro
    def w1_elements(w1: Any, w1_b: Any, factors: Any, B: Any, R1: Any, pair: Any, end: Any) -> None:
        if low[0]:
            part = T.alloc_fragment((count,), "float32")
            total = T.alloc_fragment((count,), "float32")
            T.clear(total)
            for chunk in T.serial(T.ceildiv(R1, CHUNK)):
                T.clear(part)
                for i in T.Parallel(count):
                    if pair + i < end:
                        for k in T.serial(T.min(R1 - chunk * CHUNK, CHUNK)):
                            part[i] += product(
                                w1, w1_b, (pair + i) // B, chunk * CHUNK + k, (pair + i) % B
                            )
                for i in T.Parallel(count):
                    total[i] += part[i]
            T.copy(total, factors)
        else:
            for i in T.Parallel(count):
                factors[i] = T.if_then_else(
                    pair + i < end,
                    T.cast(T.cast(w1[(pair + i) // B, (pair + i) % B], compute), "float32"),
                    T.float32(0),
                )

    return w2_tile, w1_elements


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
    cast to ``policy.compute`` and not rounded. M and N of ``plan`` are c and d, K is how many of
    W1's elements are taken at once; each split takes a contiguous share of them. ``base`` is
    contiguous, as ``out`` is.

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
    block_m, block_n, count = blocks
    steps = T.ceildiv(A * B, splits * count)  # of a share
    w2_tile, w1_elements = _readers(T, low, blocks, NAMES[dtypes[2]])
    base_type = T.Tensor((O, N), NAMES[out_dtype if base_dtype is None else base_dtype])
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((O, N), NAMES[out_dtype])

    @T.macro
    def body(w1: Any, w1_b: Any, w2: Any, w2_b: Any, base: Any, scale: Any, out: Any) -> None:
        grid = T.ceildiv(D, block_n), T.ceildiv(C, block_m), splits
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            tile = T.alloc_shared((block_m, block_n), "float32")
            factors = T.alloc_shared((count,), "float32")
            w2_tile(w2, w2_b, tile, C, D, R2, by * block_m, bx * block_n)
            for step in T.serial(steps):
                pair = (bz * steps + step) * count
                w1_elements(w1, w1_b, factors, B, R1, pair, A * B)
                for i, j in T.Parallel(block_m * count, block_n):
                    row = by * block_m + i // count
                    column = bx * block_n + j
                    at = pair + i % count
                    if row < C and column < D and at < A * B:
                        value = factors[i % count] * (
                            tile[i // count, j] * (scale[0] if scale_by_tensor else scale)
                        )
                        if base_dtype is not None:
                            value += T.cast(base[at // B * C + row, at % B * D + column], "float32")
                        out[at // B * C + row, at % B * D + column] = value

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
    threads: int,
    index: str,
    grad_dtype: torch.dtype,
    wanted: tuple[bool, bool],
    scale_by_tensor: bool,
) -> Any:
    """The prim_func behind :func:`kron_grad`; see :func:`kron_kernel`."""
    import tilelang.language as T

    A, B, C, D, R1, R2, O, N, *types = _halves(T, sizes, dtypes, index)
    w1_type, w1_b_type, w2_type, w2_b_type = types
    low = sizes[4] != 0, sizes[5] != 0
    block_m, block_n, count = blocks
    want_1, want_2 = wanted
    steps = T.ceildiv(A * B, splits * count)  # of a share
    w2_tile, w1_elements = _readers(T, low, blocks, NAMES[dtypes[2]])
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

    @T.macro
    def body(
        grad: Any, w1: Any, w1_b: Any, w2: Any, w2_b: Any, scale: Any, w1_parts: Any, w2_parts: Any
    ) -> None:
        grid = T.ceildiv(D, block_n), T.ceildiv(C, block_m), splits
        with T.Kernel(*grid, threads=threads) as (bx, by, bz):
            tile = T.alloc_shared((block_m, block_n), "float32")
            factors = T.alloc_shared((count,), "float32")
            rows = T.alloc_shared((block_m * count,), "float32")
            staged = T.alloc_shared((block_m * count, block_n), "float32")
            value = T.alloc_fragment((block_m * count, block_n), "float32")
            sums = T.alloc_fragment((block_m * count, block_n), "float32")
            row_sums = T.alloc_fragment((block_m * count,), "float32")
            if want_1:
                w2_tile(w2, w2_b, tile, C, D, R2, by * block_m, bx * block_n)
            T.clear(sums)
            for step in T.serial(steps):
                pair = (bz * steps + step) * count
                for i, j in T.Parallel(block_m * count, block_n):
                    row = by * block_m + i // count
                    column = bx * block_n + j
                    at = pair + i % count
                    # What lies beyond the tile's edge belongs to another element of W1.
                    value[i, j] = T.if_then_else(
                        T.And(T.And(row < C, column < D), at < A * B),
                        T.cast(grad[at // B * C + row, at % B * D + column], "float32"),
                        T.float32(0),
                    )
                if want_2:
                    w1_elements(w1, w1_b, factors, B, R1, pair, A * B)
                    for i, j in T.Parallel(block_m * count, block_n):
                        sums[i, j] += factors[i % count] * value[i, j]
                if want_1:
                    for i, j in T.Parallel(block_m * count, block_n):
                        value[i, j] *= tile[i // count, j]
                    T.reduce_sum(value, row_sums, dim=1)
                    T.copy(row_sums, rows)
                    for k in T.Parallel(count):
                        if pair + k < A * B:
                            for i in T.serial(1, block_m):
                                rows[k] += rows[i * count + k]
                            w1_parts[
                                by * T.ceildiv(D, block_n) + bx, (pair + k) // B, (pair + k) % B
                            ] = rows[k] * (scale[0] if scale_by_tensor else scale)
            if want_2:
                T.copy(sums, staged)
                for i, j in T.Parallel(block_m, block_n):
                    row = by * block_m + i
                    column = bx * block_n + j
                    if row < C and column < D:
                        for k in T.serial(1, count):
                            staged[i * count, j] += staged[i * count + k, j]
                        w2_parts[bz, row, column] = staged[i * count, j] * (
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
