"""The prim_funcs behind loha.py; a size of None stays symbolic.

fp32 without tf32 is a product of fused multiply-adds, not a matrix instruction: see lora.py.
"""

# mypy: disable-error-code="valid-type,index"
# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.plan import CHUNK

from .common import NAMES, STAGES_OF_DYNAMIC_K

Sizes = tuple[int | None, ...]


def _named(names: str, sizes: Sizes) -> list[Any]:
    import tilelang.language as T  # takes seconds: not before a kernel is built

    # Compiled-in sizes are a GPU's, whose kernels count in int32.
    index = "int32"
    pairs = zip(names.split(), sizes, strict=True)
    return [T.dynamic(name, index) if size is None else size for name, size in pairs]


def _product(fused: bool, sizes: tuple[int, int, int], a_t: bool = False, b_t: bool = False) -> Any:
    """A macro that adds a @ b, two shared tiles, to an fp32 fragment of (m, n)."""
    import tilelang.language as T

    m, n, k = sizes

    @T.macro
    def product(a_s: Any, b_s: Any, acc: Any) -> None:
        if fused:
            for kk in T.serial(k):
                for i, j in T.Parallel(m, n):
                    acc[i, j] += (a_s[kk, i] if a_t else a_s[i, kk]) * (
                        b_s[j, kk] if b_t else b_s[kk, j]
                    )
        else:
            T.gemm(a_s, b_s, acc, transpose_A=a_t, transpose_B=b_t)

    return product


def _low_rank(
    fused: bool,
    tile: tuple[int, int],
    rank: Any,
    block_r: int,
    transposed: bool = False,
) -> Any:
    """A macro that makes ``acc`` a tile of a @ b, a (M, rank) and b (rank, N) or both transposed.

    A long rank adds its parts in a second level; ``part`` is ``acc`` itself elsewhere.
    """
    import tilelang.language as T

    m, n = tile
    product = _product(fused, (m, n, block_r), transposed, transposed)
    two_level = is_long(rank, fused)

    @T.macro
    def low_rank(
        a: Any, b: Any, row: Any, column: Any, a_s: Any, b_s: Any, acc: Any, part: Any
    ) -> None:
        T.clear(acc)
        for step in T.serial(T.ceildiv(rank, block_r)):
            r0 = step * block_r
            if transposed:
                T.copy(a[r0, row], a_s)
                T.copy(b[column, r0], b_s)
            else:
                T.copy(a[row, r0], a_s)
                T.copy(b[r0, column], b_s)
            if two_level:
                T.clear(part)
            product(a_s, b_s, part)
            if two_level:
                for i, j in T.Parallel(m, n):
                    acc[i, j] += part[i, j]

    return low_rank


def is_long(size: Any, fused: bool) -> bool:
    """Whether a reduction takes a second level of sums: see lora.py."""
    return not isinstance(size, int) or size > (CHUNK // 4 if fused else CHUNK)


def weight_kernel(
    sizes: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    scale_by_tensor: bool,
    blocks: tuple[int, int, int],
    compute_dtype: torch.dtype,
    tf32: bool,
    threads: int,
    stages: int,
) -> Any:
    """The prim_func behind :func:`loha.weight`; without a base, ``base`` is not read."""
    import tilelang.language as T

    M, N, R = _named("m n r", sizes)
    block_m, block_n, block_r = blocks
    factor, base_dtype, out_dtype = (None if d is None else NAMES[d] for d in dtypes)
    compute = NAMES[compute_dtype]
    fused = compute == "float32" and not tf32
    low_rank = _low_rank(fused, (block_m, block_n), R, block_r)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32

    @T.prim_func
    def loha_weight(
        a1: T.Tensor((M, R), factor),
        b1: T.Tensor((R, N), factor),
        a2: T.Tensor((M, R), factor),
        b2: T.Tensor((R, N), factor),
        base: T.Tensor((M, N), base_dtype or out_dtype),
        scale: scale_type,  # type: ignore[valid-type]
        out: T.Tensor((M, N), out_dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            a_s = T.alloc_shared((block_m, block_r), compute)
            b_s = T.alloc_shared((block_r, block_n), compute)
            first = T.alloc_fragment((block_m, block_n), "float32")
            second = T.alloc_fragment((block_m, block_n), "float32")
            part = T.alloc_fragment((block_m, block_n), "float32")
            staged = T.alloc_shared((block_m, block_n), "float32")
            row, column = by * block_m, bx * block_n
            if is_long(R, fused):
                low_rank(a1, b1, row, column, a_s, b_s, first, part)
                low_rank(a2, b2, row, column, a_s, b_s, second, part)
            else:
                low_rank(a1, b1, row, column, a_s, b_s, first, first)
                low_rank(a2, b2, row, column, a_s, b_s, second, second)
            for i, j in T.Parallel(block_m, block_n):
                first[i, j] *= second[i, j]
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(first, staged)
            for i, j in T.Parallel(block_m, block_n):
                if row + i < M and column + j < N:
                    value = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                    if base_dtype is not None:
                        value += T.cast(base[row + i, column + j], "float32")
                    out[row + i, column + j] = value

    return loha_weight


def factor_grads_kernel(
    sizes: Sizes,
    parts: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    scale_by_tensor: bool,
    blocks: tuple[int, int, int],
    compute_dtype: torch.dtype,
    tf32: bool,
    threads: int,
    stages: int,
    strip: int,
) -> Any:
    """The prim_func behind :func:`loha.factor_grads`; without an x, ``grad`` is read in tiles."""
    import tilelang.language as T

    M, N, R = _named("m n r", sizes)
    strips, rows, tiles_m = _named("strips rows tiles_m", parts)
    tokens = T.dynamic("tokens", "int32")
    block_m, block_n, block_k = blocks
    grad_dtype, x_dtype, factor = (None if d is None else NAMES[d] for d in dtypes)
    compute = NAMES[compute_dtype]
    fused = compute == "float32" and not tf32
    by_tokens = x_dtype is not None
    low_rank = _low_rank(fused, (block_m, block_n), R, block_k)
    token_product = _product(fused, (block_m, block_n, block_k), a_t=True)
    product_a = _product(fused, (block_m, block_k, block_n), b_t=True)
    product_b = _product(fused, (block_k, block_n, block_m), a_t=True)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    grad_type = T.Tensor((tokens, M) if by_tokens else (M, N), grad_dtype)
    x_type = T.Tensor((tokens, N) if by_tokens else (M, N), x_dtype or grad_dtype)
    g_tile = (block_k, block_m) if by_tokens else (block_m, block_n)
    depth = min(stages, STAGES_OF_DYNAMIC_K)
    long_rank = is_long(R, fused)

    @T.macro
    def pull_back(
        other_a: Any, other_b: Any, a: Any, b: Any, half: int, bx: Any, by: Any, start: Any,
        delta: Any, weight: Any, part: Any, a_s: Any, b_s: Any, p_s: Any, sum_a: Any, sum_b: Any,
        part_a: Any, part_b: Any, tile: Any,
    ) -> None:  # fmt: skip
        row, column = start + by * block_m, (bx * strip + tile) * block_n
        low_rank(other_a, other_b, row, column, a_s, b_s, weight, part if long_rank else weight)
        for i, j in T.Parallel(block_m, block_n):
            p_s[i, j] = delta[i, j] * weight[i, j]
        for step in T.serial(T.ceildiv(R, block_k)):
            T.copy(a[row, step * block_k], a_s)
            T.copy(b[step * block_k, column], b_s)
            if tile == 0:
                T.clear(sum_a)
            product_a(p_s, b_s, sum_a)
            if tile == strip - 1:
                for i, j in T.Parallel(block_m, block_k):
                    if step * block_k + j < R:
                        part_a[half, bx, by * block_m + i, step * block_k + j] = sum_a[i, j]
            T.clear(sum_b)
            product_b(a_s, p_s, sum_b)
            for i, j in T.Parallel(block_k, block_n):
                if step * block_k + i < R and column + j < N:
                    earlier = T.if_then_else(
                        start > 0, part_b[half, by, step * block_k + i, column + j], 0.0
                    )
                    part_b[half, by, step * block_k + i, column + j] = sum_b[i, j] + earlier

    @T.prim_func
    def loha_factor_grads(
        grad: grad_type,  # type: ignore[valid-type]
        x: x_type,  # type: ignore[valid-type]
        a1: T.Tensor((M, R), factor),
        b1: T.Tensor((R, N), factor),
        a2: T.Tensor((M, R), factor),
        b2: T.Tensor((R, N), factor),
        part_a: T.Tensor((2, strips, rows, R), "float32"),
        part_b: T.Tensor((2, tiles_m, R, N), "float32"),
        scale: scale_type,  # type: ignore[valid-type]
        start: T.int32,
    ) -> None:
        with T.Kernel(strips, tiles_m, threads=threads) as (bx, by):
            g_s = T.alloc_shared(g_tile, compute if by_tokens else grad_dtype)
            x_s = T.alloc_shared((block_k, block_n), compute)
            a_s = T.alloc_shared((block_m, block_k), compute)
            b_s = T.alloc_shared((block_k, block_n), compute)
            p_s = T.alloc_shared((block_m, block_n), compute)
            delta = T.alloc_fragment((block_m, block_n), "float32")
            part = T.alloc_fragment((block_m, block_n), "float32")
            weight = T.alloc_fragment((block_m, block_n), "float32")
            sums_1 = T.alloc_fragment((block_m, block_k), "float32")
            sums_2 = T.alloc_fragment((block_m, block_k), "float32")
            sum_b = T.alloc_fragment((block_k, block_n), "float32")
            row = start + by * block_m
            for tile in T.serial(strip):
                column = (bx * strip + tile) * block_n
                if by_tokens:
                    T.clear(delta)
                    T.clear(part)
                    for step in T.Pipelined(T.ceildiv(tokens, block_k), num_stages=depth):
                        T.copy(grad[step * block_k, row], g_s)
                        T.copy(x[step * block_k, column], x_s)
                        for i, j in T.Parallel(block_m, block_n):
                            delta[i, j] += part[i, j]
                            part[i, j] = 0
                        token_product(g_s, x_s, part)
                    for i, j in T.Parallel(block_m, block_n):
                        delta[i, j] += part[i, j]
                else:
                    T.copy(grad[row, column], g_s)
                    for i, j in T.Parallel(block_m, block_n):
                        delta[i, j] = T.cast(g_s[i, j], "float32")
                for i, j in T.Parallel(block_m, block_n):
                    delta[i, j] *= scale[0] if scale_by_tensor else scale
                pull_back(
                    a2, b2, a1, b1, 0, bx, by, start,
                    delta, weight, part, a_s, b_s, p_s, sums_1, sum_b, part_a, part_b, tile,
                )  # fmt: skip
                pull_back(
                    a1, b1, a2, b2, 1, bx, by, start,
                    delta, weight, part, a_s, b_s, p_s, sums_2, sum_b, part_a, part_b, tile,
                )  # fmt: skip

    return loha_factor_grads


def dense_product_kernel(
    sizes: Sizes,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype],
    transposed: bool,
    scale_by_tensor: bool,
    blocks: tuple[int, int, int],
    compute_dtype: torch.dtype,
    tf32: bool,
    threads: int,
    stages: int,
) -> Any:
    """The prim_func behind :func:`loha.dense_product`; without a base, ``base`` is not read."""
    import tilelang.language as T

    N, K, R = _named("n k r", sizes)
    M = T.dynamic("m", "int32")
    block_m, block_n, block_k = blocks
    a_dtype, factor, base_dtype, out_dtype = (None if d is None else NAMES[d] for d in dtypes)
    compute = NAMES[compute_dtype]
    fused = compute == "float32" and not tf32
    low_rank = _low_rank(fused, (block_k, block_n), R, block_k, transposed)
    product = _product(fused, (block_m, block_n, block_k))
    two_level, long_rank = is_long(K, fused), is_long(R, fused)
    q_tile = (block_n, block_k) if transposed else (block_k, block_n)
    p_shape = (R, K) if transposed else (K, R)
    q_shape = (N, R) if transposed else (R, N)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32

    @T.prim_func
    def loha_dense_product(
        a: T.Tensor((M, K), a_dtype),
        p1: T.Tensor(p_shape, factor),
        q1: T.Tensor(q_shape, factor),
        p2: T.Tensor(p_shape, factor),
        q2: T.Tensor(q_shape, factor),
        base: T.Tensor((M, N), base_dtype or out_dtype),
        scale: scale_type,  # type: ignore[valid-type]
        out: T.Tensor((M, N), out_dtype),
    ) -> None:
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            x_s = T.alloc_shared((block_m, block_k), compute)
            p_s = T.alloc_shared((block_k, block_k), compute)
            q_s = T.alloc_shared(q_tile, compute)
            w_s = T.alloc_shared((block_k, block_n), compute)
            first = T.alloc_fragment((block_k, block_n), "float32")
            second = T.alloc_fragment((block_k, block_n), "float32")
            rank_part = T.alloc_fragment((block_k, block_n), "float32")
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32") if two_level else part
            staged = T.alloc_shared((block_m, block_n), "float32")
            row, column = by * block_m, bx * block_n
            T.clear(part)
            if two_level:
                T.clear(total)
            for step in T.serial(T.ceildiv(K, block_k)):
                k0 = step * block_k
                T.copy(a[row, k0], x_s)
                low_rank(p1, q1, k0, column, p_s, q_s, first, rank_part if long_rank else first)
                low_rank(p2, q2, k0, column, p_s, q_s, second, rank_part if long_rank else second)
                for i, j in T.Parallel(block_k, block_n):
                    w_s[i, j] = first[i, j] * second[i, j]
                if two_level:
                    for i, j in T.Parallel(block_m, block_n):
                        total[i, j] += part[i, j]
                        part[i, j] = 0
                product(x_s, w_s, part)
            if two_level:
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(total, staged)
            for i, j in T.Parallel(block_m, block_n):
                if row + i < M and column + j < N:
                    value = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                    if base_dtype is not None:
                        value += T.cast(base[row + i, column + j], "float32")
                    out[row + i, column + j] = value

    return loha_dense_product
