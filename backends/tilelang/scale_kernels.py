"""The prim_funcs behind the launchers of :mod:`.scale`."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from .common import NAMES

_PARTS = 16  # sums of a row that are added last


def scale_kernel(
    dtypes: tuple[torch.dtype, ...],
    scale_by_tensor: bool,
    by_rows: bool,
    plain: bool,
    tile: tuple[int, int, int],
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`scale_columns` and :func:`scale_rows`; ``plain``: one column each."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    M, Q, C = (T.dynamic(name, index) for name in ("m", "q", "c"))
    v_dtype, vector_dtype, out_dtype = (NAMES[dtype] for dtype in dtypes)
    block_m, groups, width = tile
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    lanes, repeats = _lanes(block_m, groups, threads)

    @T.prim_func
    def scaled(
        v: T.Tensor((M, Q, width), v_dtype),  # type: ignore[valid-type]
        vector: T.Tensor((C,), vector_dtype),  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        one: T.float32,
        out: T.Tensor((M, Q, width), out_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(Q, groups), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            factor = T.alloc_fragment((lanes, groups, width), "float32")
            if not by_rows:
                for i, g, j in T.Parallel(lanes, groups, width):
                    column = (bx * groups + g) * width + j
                    if column < Q * width:
                        factor[i, g, j] = one + T.cast(
                            vector[column if plain else column // (Q * width // C)], "float32"
                        ) * (scale[0] if scale_by_tensor else scale)  # type: ignore[index]
            for step in T.unroll(repeats):
                for i, g, j in T.Parallel(lanes, groups, width):
                    row = by * block_m + step * lanes + i
                    q = bx * groups + g
                    if row < M and q < Q:
                        if by_rows:
                            out[row, q, j] = T.cast(v[row, q, j], "float32") * (
                                one
                                + T.cast(vector[row % C], "float32")
                                * (scale[0] if scale_by_tensor else scale)  # type: ignore[index]
                            )
                        else:
                            out[row, q, j] = T.cast(v[row, q, j], "float32") * factor[i, g, j]

    return scaled


def _lanes(block_m: int, groups: int, threads: int) -> tuple[int, int]:
    """Rows of a tile that threads take at once, and how often."""
    lanes = max(1, min(block_m, threads // groups))
    return lanes, block_m // lanes


def gradients_of_columns_kernel(
    dtypes: tuple[torch.dtype, ...],
    with_grad_v: bool,
    scale_by_tensor: bool,
    by_rows: bool,
    plain: bool,
    tile: tuple[int, int, int],
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`gradients_of_columns`.

    A thread keeps its own group of columns through its share of the rows; at the end the threads
    with the same columns add up.
    """
    import tilelang.language as T

    M, Q, C, S = (T.dynamic(name, index) for name in ("m", "q", "c", "s"))
    grad_dtype, v_dtype, vector_dtype = (NAMES[dtype] for dtype in dtypes)
    block_m, groups, width = tile
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    grad_type = T.Tensor((M, Q, width), grad_dtype)
    v_type, grad_v_type = (T.Tensor((M, Q, width), v_dtype) for _ in range(2))
    vector_type = T.Tensor((C,), vector_dtype)
    partials_type = T.Tensor((S, Q, width), "float32")
    lanes, repeats = _lanes(block_m, groups, threads)

    @T.macro
    def body(
        grad: Any, v: Any, vector: Any, scale: Any, one: Any, grad_v: Any, partials: Any
    ) -> None:
        with T.Kernel(T.ceildiv(Q, groups), S, threads=threads) as (bx, by):
            factor = T.alloc_fragment((lanes, groups, width), "float32")
            total = T.alloc_fragment((lanes, groups, width), "float32")
            staged = T.alloc_shared((lanes, groups, width), "float32")
            steps = T.ceildiv(T.ceildiv(M, S), block_m)
            T.clear(total)
            for i, g, j in T.Parallel(lanes, groups, width):
                column = (bx * groups + g) * width + j
                if column < Q * width:
                    factor[i, g, j] = one + T.cast(
                        vector[column if plain else column // (Q * width // C)], "float32"
                    ) * (scale[0] if scale_by_tensor else scale)
            for step in T.serial(steps):
                for repeat in T.unroll(repeats):
                    for i, g, j in T.Parallel(lanes, groups, width):
                        row = (by * steps + step) * block_m + repeat * lanes + i
                        q = bx * groups + g
                        if row < M and q < Q:
                            value = T.cast(grad[row, q, j], "float32")
                            total[i, g, j] += value * T.cast(v[row, q, j], "float32")
                            if with_grad_v:
                                grad_v[row, q, j] = value * factor[i, g, j]
            T.copy(total, staged)
            for g, j in T.Parallel(groups, width):
                q = bx * groups + g
                if q < Q:
                    for i in T.serial(1, lanes):
                        staged[0, g, j] += staged[i, g, j]
                    partials[by, q, j] = staged[0, g, j] * (scale[0] if scale_by_tensor else scale)

    made = (grad_v_type,) if with_grad_v else ()
    return _gradients(T, body, (grad_type, v_type, vector_type, scale_type), made, partials_type)


def gradients_of_rows_kernel(
    dtypes: tuple[torch.dtype, ...],
    with_grad_v: bool,
    scale_by_tensor: bool,
    by_rows: bool,
    plain: bool,
    tile: tuple[int, int, int],
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`gradients_of_rows`: rows in parallel, then sums over threads."""
    import tilelang.language as T

    M, Q, C, S = (T.dynamic(name, index) for name in ("m", "q", "c", "s"))
    grad_dtype, v_dtype, vector_dtype = (NAMES[dtype] for dtype in dtypes)
    rows, groups, width = tile
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    grad_type = T.Tensor((M, Q, width), grad_dtype)
    v_type, grad_v_type = (T.Tensor((M, Q, width), v_dtype) for _ in range(2))
    vector_type = T.Tensor((C,), vector_dtype)
    partials_type = T.Tensor((S, M), "float32")
    parts = min(_PARTS, groups)

    @T.macro
    def body(
        grad: Any, v: Any, vector: Any, scale: Any, one: Any, grad_v: Any, partials: Any
    ) -> None:
        with T.Kernel(T.ceildiv(M, rows), S, threads=threads) as (bx, by):
            total = T.alloc_fragment((rows, groups, width), "float32")
            staged = T.alloc_shared((rows, groups, width), "float32")
            fewer = T.alloc_shared((rows, parts), "float32")
            steps = T.ceildiv(T.ceildiv(Q, S), groups)
            T.clear(total)
            for step in T.serial(steps):
                for i, g, j in T.Parallel(rows, groups, width):
                    row = bx * rows + i
                    q = (by * steps + step) * groups + g
                    if row < M and q < Q:
                        value = T.cast(grad[row, q, j], "float32")
                        total[i, g, j] += value * T.cast(v[row, q, j], "float32")
                        if with_grad_v:
                            grad_v[row, q, j] = value * (
                                one
                                + T.cast(vector[row % C], "float32")
                                * (scale[0] if scale_by_tensor else scale)
                            )
            T.copy(total, staged)
            for i, part in T.Parallel(rows, parts):
                fewer[i, part] = 0
                for k in T.serial(groups // parts):
                    for j in T.serial(width):
                        fewer[i, part] += staged[i, k * parts + part, j]
            for i in T.Parallel(rows):
                if bx * rows + i < M:
                    for part in T.serial(1, parts):
                        fewer[i, 0] += fewer[i, part]
                    partials[by, bx * rows + i] = fewer[i, 0] * (
                        scale[0] if scale_by_tensor else scale
                    )

    made = (grad_v_type,) if with_grad_v else ()
    return _gradients(T, body, (grad_type, v_type, vector_type, scale_type), made, partials_type)


def _gradients(
    T: Any, body: Any, operands: tuple[Any, ...], made: tuple[Any, ...], partials_type: Any
) -> Any:
    """The prim_func around either body, with or without a gradient of v."""
    grad_type, v_type, vector_type, scale_type = operands
    if made:
        (grad_v_type,) = made

        @T.prim_func
        def gradients(
            grad: grad_type,  # type: ignore[valid-type]
            v: v_type,  # type: ignore[valid-type]
            vector: vector_type,  # type: ignore[valid-type]
            scale: scale_type,  # type: ignore[valid-type]
            one: T.float32,
            grad_v: grad_v_type,  # type: ignore[valid-type]
            partials: partials_type,  # type: ignore[valid-type]
        ) -> None:
            body(grad, v, vector, scale, one, grad_v, partials)

    else:

        @T.prim_func
        def gradients(  # type: ignore[no-redef]
            grad: grad_type,  # type: ignore[valid-type]
            v: v_type,  # type: ignore[valid-type]
            vector: vector_type,  # type: ignore[valid-type]
            scale: scale_type,  # type: ignore[valid-type]
            one: T.float32,
            partials: partials_type,  # type: ignore[valid-type]
        ) -> None:
            body(grad, v, vector, scale, one, None, partials)

    return gradients


def sum_kernel(
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    scale_by_tensor: bool,
    in_place: bool,
    width: int,
    block: int,
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`add` and, where the base is the output, of :func:`merge`."""
    import tilelang.language as T

    Q = T.dynamic("q", index)
    delta_dtype, base_dtype, out_dtype = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    delta_type, out_type = T.Tensor((Q, width), delta_dtype), T.Tensor((Q, width), out_dtype)

    @T.macro
    def body(delta: Any, base: Any, scale: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(Q, block), threads=threads) as bx:
            for g, j in T.Parallel(block, width):
                q = bx * block + g
                if q < Q:
                    value = T.cast(delta[q, j], "float32") * (
                        scale[0] if scale_by_tensor else scale
                    )
                    if base is not None:
                        value += T.cast(base[q, j], "float32")
                    out[q, j] = value

    if base_dtype is None or in_place:

        @T.prim_func
        def sums(delta: delta_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type]
            body(delta, out if in_place else None, scale, out)

    else:
        base_type = T.Tensor((Q, width), base_dtype)

        @T.prim_func
        def sums(delta: delta_type, base: base_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type, no-redef]
            body(delta, base, scale, out)

    return sums
