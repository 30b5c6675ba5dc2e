"""Rotations whose packs are neighbouring channels, without gaps: tiles are copied, not gathered.

The kernels of :mod:`.rotate` and :mod:`.rotation_gram` look up the channel of every element; these
serve a first pass in 16 bits whose packs are full, which is every power of two people use.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.plan import Plan
from lycoris.kernels.rotation import Pass

from .common import NAMES, build


def serves(part: Pass, compute: torch.dtype, *streams: torch.Tensor | None) -> bool:
    """Whether the packs are full and contiguous, and every stream (A, C, B) can be copied."""
    whole = part.low == 1 and part.full and compute is not torch.float32
    return whole and all(
        t is None
        or (t.dtype is compute and (t.shape[2] == 1 or t.shape[2] % 8 == 0) and t.numel() > 0)
        for t in streams
    )


def _shape(x: torch.Tensor) -> tuple[int | None, int | None, int | None, bool]:
    """Sizes (A, C, B) that a kernel is made for; None for what stays symbolic."""
    _, c, b = x.shape
    if not x.is_cuda:
        return None, None, 1 if b == 1 else None, b == 1
    return None, c, b, b == 1


def _as_rows(t: torch.Tensor) -> torch.Tensor:
    """(A, C, 1) as (A, C); others as they are."""
    return t.view(t.shape[:2]) if t.shape[2] == 1 else t


def rotate(
    x: torch.Tensor,
    base: torch.Tensor | None,
    parts: torch.Tensor,
    power: torch.Tensor | None,
    out: torch.Tensor,
    part: Pass,
    transposed: bool,
    plan: Plan,
) -> Any:
    """A launch of (x, base, parts, power, out) for :func:`.rotate.rotate`, without the rest."""
    on_cpu = not out.is_cuda
    count, packs, padded, _ = parts.shape
    flags = (base is not None, base is x, power is not None, transposed)
    params = (
        (*_shape(x), None if on_cpu else packs),
        (count, padded),
        (plan.block_m, plan.block_n, plan.block_k),
        (x.dtype, out.dtype),
        flags,
        (1 if on_cpu else 32 * plan.num_warps, 1 if on_cpu else plan.num_stages),
    )
    kernel = build(rotate_kernel, params, out.device)

    def launch(
        x: torch.Tensor,
        base: torch.Tensor | None,
        parts: torch.Tensor,
        power: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        streams = (_as_rows(x), _as_rows(x if base is None else base), parts)
        kernel(*streams, *(() if power is None else (power,)), _as_rows(out))

    return launch


def _sizes(T: Any, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    index = "int64" if shape[1] is None else "int32"  # on a CPU nothing is compiled in
    return tuple(
        T.dynamic(name, index) if size is None else size
        for name, size in zip("acbp", (*shape[:3], shape[4]), strict=True)
    )


def rotate_kernel(
    shape: tuple[Any, ...],
    matrix: tuple[int, int],
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, bool, bool, bool],
    launch: tuple[int, int],
) -> Any:
    """A tile of tokens by channels of one pack.

    ``shape``: A, C, B, whether a token's channels are contiguous (B = 1), packs. ``matrix``: parts,
    and their width. Where the channels are not contiguous the product is that of the transposes.
    """
    import tilelang.language as T

    A, C, B, P = _sizes(T, shape)
    rows = shape[3]
    count, padded = matrix
    block_t, block_n, block_k = blocks
    compute, out_dtype = (NAMES[d] for d in dtypes)
    based, own, scaled, transposed = flags
    threads, stages = launch
    steps = padded // block_k
    # The tile of x is what is added to it where it holds the whole pack.
    held = own and steps == 1 and block_n == padded
    x_tile = (block_t, block_k) if rows else (block_k, block_t)
    tile_shape = (block_t, block_n) if rows else (block_n, block_t)
    m_tile = (block_n, block_k) if transposed else (block_k, block_n)
    stream = (A, C) if rows else (A, C, B)
    columns = T.ceildiv(C, block_n)
    per = T.ceildiv(A, block_t) if rows else T.ceildiv(B, block_t)

    @T.macro
    def load(source: Any, target: Any, outer: Any, t0: Any, c0: Any) -> None:
        if rows:
            T.copy(source[t0, c0], target)
        else:
            T.copy(source[outer, c0, t0], target)

    @T.macro
    def matrices(parts: Any, ms: Any, piece: int, which: Any, z0: Any, k0: Any) -> None:
        if transposed:
            T.copy(parts[piece, which, z0, k0], ms)
        else:
            T.copy(parts[piece, which, k0, z0], ms)

    @T.macro
    def product(xs: Any, ms: Any, acc: Any) -> None:
        if rows:
            T.gemm(xs, ms, acc, transpose_B=transposed)
        else:
            T.gemm(ms, xs, acc, transpose_A=not transposed)

    @T.macro
    def body(x: Any, base: Any, parts: Any, power: Any, out: Any) -> None:
        with T.Kernel(per * columns * (1 if rows else A), threads=threads) as pid:
            xs = T.alloc_shared(x_tile, compute)
            m0 = T.alloc_shared(m_tile, compute)
            m1 = T.alloc_shared(m_tile, compute)
            m2 = T.alloc_shared(m_tile if count > 2 else (1, 1), compute)
            base_s = T.alloc_shared(tile_shape if based and not held else (1, 1), compute)
            out_s = T.alloc_shared(tile_shape, out_dtype)
            acc = T.alloc_fragment(tile_shape, "float32")
            # Neighbours share the tokens where rows are read, else the matrix.
            tile = pid // columns if rows else pid % (per * A)
            c0 = (pid % columns if rows else pid // (per * A)) * block_n
            outer = 0 if rows else tile // per
            t0 = (tile if rows else tile % per) * block_t
            which = c0 // padded
            z0 = c0 % padded
            T.clear(acc)
            for k in T.Pipelined(steps, num_stages=stages):
                load(x, xs, outer, t0, which * padded + k * block_k)
                matrices(parts, m0, 0, which, z0, k * block_k)
                matrices(parts, m1, 1, which, z0, k * block_k)
                if count > 2:
                    matrices(parts, m2, 2, which, z0, k * block_k)
                    product(xs, m2, acc)
                product(xs, m1, acc)  # the least first
                product(xs, m0, acc)
            if based and not held:
                load(base, base_s, outer, t0, c0)
            for i, j in T.Parallel(*tile_shape):
                if scaled:
                    acc[i, j] *= power[which]
                if based:
                    value = T.cast(xs[i, j] if held else base_s[i, j], "float32")
                    # Keeps the sign of a zero.
                    acc[i, j] = T.if_then_else(acc[i, j] == 0, value, acc[i, j] + value)
            T.copy(acc, out_s)
            if rows:
                T.copy(out_s, out[t0, c0])
            else:
                T.copy(out_s, out[outer, c0, t0])

    parts_type = T.Tensor((count, P, padded, padded), compute)
    if scaled:

        @T.prim_func
        def rotate(
            x: T.Tensor(stream, compute),
            base: T.Tensor(stream, compute),
            parts: parts_type,
            power: T.Tensor((P,), "float32"),
            out: T.Tensor(stream, out_dtype),
        ) -> None:
            body(x, base, parts, power, out)

    else:

        @T.prim_func
        def rotate(  # type: ignore[no-redef]
            x: T.Tensor(stream, compute),
            base: T.Tensor(stream, compute),
            parts: parts_type,
            out: T.Tensor(stream, out_dtype),
        ) -> None:
            body(x, base, parts, None, out)

    return rotate


def gram(
    x: torch.Tensor,
    g: torch.Tensor,
    parts: torch.Tensor | None,
    power: torch.Tensor | None,
    out: torch.Tensor | None,
    total: torch.Tensor,
    base: bool,
    plan: Plan,
) -> Any:
    """A launch of (x, g, parts, power, out, total) for :func:`.rotation_gram.gram`."""
    on_cpu = not total.is_cuda
    _, packs, padded, _ = total.shape
    fused = out is not None
    # The accumulators of three tiles: of 4 warps, more programs fit a multiprocessor.
    warps = 4 if fused else plan.num_warps
    params = (
        (*_shape(x), None if on_cpu else packs),
        (0 if parts is None or not fused else parts.shape[0], padded),
        (plan.block_k, plan.block_n, plan.splits),
        None if on_cpu else _share(x, plan),
        x.dtype,
        (base and fused, power is not None and fused),
        (1 if on_cpu else 32 * warps, 1 if on_cpu else plan.num_stages),
    )
    kernel = build(gram_kernel, params, total.device)

    def launch(
        x: torch.Tensor,
        g: torch.Tensor,
        parts: torch.Tensor | None,
        power: torch.Tensor | None,
        out: torch.Tensor | None,
        total: torch.Tensor,
    ) -> None:
        streams = (_as_rows(x), _as_rows(g), total)
        if out is None or parts is None:
            kernel(*streams)
        else:
            power_ = () if power is None else (power,)
            kernel(*streams, parts, *power_, _as_rows(out))

    return launch


def _share(x: torch.Tensor, plan: Plan) -> int:
    """Tiles of tokens to a share: few different numbers, since a kernel is made for each.

    A pipeline that also stores lowers over a constant number of steps only.
    """
    a, _, b = x.shape
    tiles = -(-a // plan.block_k) if b == 1 else a * -(-b // plan.block_k)
    least = -(-tiles // plan.splits)
    power = 1 << (least - 1).bit_length()
    return 3 * power // 4 if 3 * power // 4 >= least else power


def gram_kernel(
    shape: tuple[Any, ...],
    matrix: tuple[int, int],
    blocks: tuple[int, int, int],
    steps: int | None,
    dtype: torch.dtype,
    flags: tuple[bool, bool],
    launch: tuple[int, int],
) -> Any:
    """One tile of one share of a pack's x^T g, and with ``matrix`` parts its tokens' g M^T + g.

    ``steps``: tiles of tokens to a share; None for as many as it takes. Every step's product is
    added in a second level, while the next step's tiles arrive.
    """
    import tilelang.language as T

    A, C, B, P = _sizes(T, shape)
    rows = shape[3]
    count, padded = matrix
    block_t, block_n, splits = blocks
    compute = NAMES[dtype]
    based, scaled = flags
    threads, stages = launch
    columns = padded // block_n
    tile_shape = (block_t, block_n) if rows else (block_n, block_t)
    stream = (A, C) if rows else (A, C, B)
    per = T.ceildiv(A, block_t) if rows else T.ceildiv(B, block_t)
    tiles = per if rows else per * A
    share = T.ceildiv(tiles, splits) if steps is None else steps
    fused = count > 0
    depth = stages if steps is None else min(stages, steps)
    m_tile = (block_n, block_n) if fused else (1, 1)

    @T.macro
    def load(source: Any, target: Any, tile: Any, c0: Any) -> None:
        if rows:
            T.copy(source[tile * block_t, c0], target)
        else:
            T.copy(source[tile // per, c0, tile % per * block_t], target)

    @T.macro
    def product(gs: Any, ms: Any, acc: Any) -> None:  # g M^T, or M g where channels come first
        if rows:
            T.gemm(gs, ms, acc, transpose_B=True)
        else:
            T.gemm(ms, gs, acc)

    @T.macro
    def body(x: Any, g: Any, total: Any, parts: Any, power: Any, out: Any) -> None:
        with T.Kernel(P * columns * columns, splits, threads=threads) as (pid, split):
            xs = T.alloc_shared(tile_shape, compute)
            gs = T.alloc_shared(tile_shape, compute)
            part = T.alloc_fragment((block_n, block_n), "float32")
            sums = T.alloc_fragment((block_n, block_n), "float32")
            m0 = T.alloc_shared(m_tile, compute)
            m1 = T.alloc_shared(m_tile, compute)
            m2 = T.alloc_shared(m_tile if count > 2 else (1, 1), compute)
            acc = T.alloc_fragment(tile_shape if fused else (1, 1), "float32")
            out_s = T.alloc_shared(tile_shape if fused else (1, 1), compute)
            which = pid // (columns * columns)
            zi = pid // columns % columns * block_n
            zj = pid % columns * block_n
            if fused:
                T.copy(parts[0, which, 0, 0], m0)
                T.copy(parts[1, which, 0, 0], m1)
                if count > 2:
                    T.copy(parts[2, which, 0, 0], m2)
            T.clear(part)
            T.clear(sums)
            for step in T.Pipelined(share, num_stages=depth):
                # A tile beyond the last is read as zeros and stored nowhere.
                tile = split * share + step
                load(x, xs, tile, which * padded + zi)
                load(g, gs, tile, which * padded + zj)
                for i, j in T.Parallel(block_n, block_n):
                    sums[i, j] += part[i, j]
                    part[i, j] = 0
                T.gemm(xs, gs, part, transpose_A=rows, transpose_B=not rows)
                if fused:
                    T.clear(acc)
                    if count > 2:
                        product(gs, m2, acc)
                    product(gs, m1, acc)
                    product(gs, m0, acc)
                    for i, j in T.Parallel(*tile_shape):
                        if scaled:
                            acc[i, j] *= power[which]
                        if based:
                            value = T.cast(gs[i, j], "float32")
                            acc[i, j] = T.if_then_else(acc[i, j] == 0, value, acc[i, j] + value)
                    T.copy(acc, out_s)
                    if rows:
                        T.copy(out_s, out[tile * block_t, which * padded])
                    else:
                        T.copy(out_s, out[tile // per, which * padded, tile % per * block_t])
            for i, j in T.Parallel(block_n, block_n):
                sums[i, j] += part[i, j]
            T.copy(sums, total[split, which, zi, zj])

    total_type = T.Tensor((splits, P, padded, padded), "float32")
    parts_type = T.Tensor((max(1, count), P, padded, padded), compute)
    if not fused:

        @T.prim_func
        def gram(
            x: T.Tensor(stream, compute), g: T.Tensor(stream, compute), total: total_type
        ) -> None:
            body(x, g, total, None, None, None)

    elif scaled:

        @T.prim_func
        def gram(  # type: ignore[no-redef]
            x: T.Tensor(stream, compute),
            g: T.Tensor(stream, compute),
            total: total_type,
            parts: parts_type,
            power: T.Tensor((P,), "float32"),
            out: T.Tensor(stream, compute),
        ) -> None:
            body(x, g, total, parts, power, out)

    else:

        @T.prim_func
        def gram(  # type: ignore[no-redef]
            x: T.Tensor(stream, compute),
            g: T.Tensor(stream, compute),
            total: total_type,
            parts: parts_type,
            out: T.Tensor(stream, compute),
        ) -> None:
            body(x, g, total, parts, None, out)

    return gram
