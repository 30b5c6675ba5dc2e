"""Rotations whose packs are neighbouring channels: tiles are copied, not gathered.

The kernels of :mod:`.rotate` and :mod:`.rotation_gram` look up the channel of every element; these
serve a first pass in 16 bits. Where a pack does not fill its matrix, the copy holds the next
pack's channels too: they are set to zero, since even a zero of M would pass on a NaN.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# The forms of a prim_func share its name, hence each no-redef below.
# mypy: disable-error-code="valid-type"
from math import gcd
from typing import Any

import torch

from lycoris.kernels.plan import Plan
from lycoris.kernels.rotation import Pass

from .common import NAMES, build


def serves(part: Pass, compute: torch.dtype, *streams: torch.Tensor | None) -> bool:
    """Whether the packs are contiguous, and every stream (A, C, B) can be copied."""
    return (
        part.low == 1
        and compute is not torch.float32
        and all(
            t is None
            or (t.dtype is compute and (t.shape[2] == 1 or t.shape[2] % 8 == 0) and t.numel() > 0)
            for t in streams
        )
    )


def shape_of(x: torch.Tensor) -> tuple[int | None, int | None, int | None, bool]:
    """Sizes (A, C, B) that a kernel is made for; None for what stays symbolic."""
    _, c, b = x.shape
    if not x.is_cuda:
        return None, None, 1 if b == 1 else None, b == 1
    return None, c, b, b == 1


def as_rows(t: torch.Tensor) -> torch.Tensor:
    """(A, C, 1) as (A, C); others as they are."""
    return t.view(t.shape[:2]) if t.shape[2] == 1 else t


def copies(
    T: Any, rows: bool, span: int, padded: int, stream: tuple[Any, Any, Any], tile: tuple[int, int]
) -> tuple[Any, Any, Any]:
    """Macros that copy a tile (tokens, positions) of one pack from and to (A, C, B).

    All take a global and a shared tensor, the outer index, the first token, the pack, and the
    tile's first position in it. A pack has ``span`` channels, and ``padded`` positions. The first
    macro fills what is beyond the span with whatever lies there, the second, which is not
    asynchronous, with zeros; the third leaves it out.
    """
    A, C, B = stream
    tokens, positions = tile
    # What divides the rows of a pack moves at once; of symbolic sizes nothing is known.
    vector = (gcd(span, C, 8) if isinstance(C, int) else 1) if rows else gcd(tokens, 8)
    vectors = (positions if rows else tokens) // vector

    @T.macro
    def load(source: Any, target: Any, outer: Any, t0: Any, which: Any, z0: Any) -> None:
        if rows:
            T.copy(source[t0, which * span + z0], target)
        else:
            T.copy(source[outer, which * span + z0, t0], target)

    @T.macro
    def load_alone(source: Any, target: Any, outer: Any, t0: Any, which: Any, z0: Any) -> None:
        c0 = which * span + z0
        if span == padded:
            load(source, target, outer, t0, which, z0)
        elif rows:
            for i, k, e in T.Parallel(tokens, vectors, vector):
                z = k * vector
                inside = t0 + i < A and z0 + z < span and c0 + z < C
                zero = T.cast(0, target.dtype)
                target[i, z + e] = T.if_then_else(inside, source[t0 + i, c0 + z + e], zero)
        else:
            for z, k, e in T.Parallel(positions, vectors, vector):
                t = k * vector
                inside = t0 + t < B and z0 + z < span and c0 + z < C
                zero = T.cast(0, target.dtype)
                target[z, t + e] = T.if_then_else(inside, source[outer, c0 + z, t0 + t + e], zero)

    @T.macro
    def store(target: Any, source: Any, outer: Any, t0: Any, which: Any, z0: Any) -> None:
        c0 = which * span + z0
        if span == padded:
            if rows:
                T.copy(source, target[t0, c0])
            else:
                T.copy(source, target[outer, c0, t0])
        elif rows:
            for i, k, e in T.Parallel(tokens, vectors, vector):
                z = k * vector
                if t0 + i < A and z0 + z < span and c0 + z < C:
                    target[t0 + i, c0 + z + e] = source[i, z + e]
        else:
            for z, k, e in T.Parallel(positions, vectors, vector):
                t = k * vector
                if t0 + t < B and z0 + z < span and c0 + z < C:
                    target[outer, c0 + z, t0 + t + e] = source[z, t + e]

    return load, load_alone, store


def share_of(x: torch.Tensor, plan: Plan, block: int) -> int:
    """Tiles of ``block`` tokens to a share: few different numbers, since a kernel is made for each.

    A pipeline that also stores lowers over a constant number of steps only.
    """
    a, _, b = x.shape
    tiles = -(-a // block) if b == 1 else a * -(-b // block)
    least = -(-tiles // plan.splits)
    power = 1 << (least - 1).bit_length()
    return 3 * power // 4 if 3 * power // 4 >= least else power


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
    streamed = plan.splits > 1 and plan.block_k == padded and part.full
    params = (
        (*shape_of(x), None if on_cpu else packs),
        (count, padded, part.pack * part.width),
        (plan.block_m, plan.block_n, plan.block_k),
        (plan.splits, None if on_cpu else share_of(x, plan, plan.block_m)) if streamed else None,
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
        streams = (as_rows(x), as_rows(x if base is None else base), parts)
        kernel(*streams, *(() if power is None else (power,)), as_rows(out))

    return launch


def sizes(T: Any, shape: tuple[Any, ...]) -> tuple[Any, ...]:
    index = "int64" if shape[1] is None else "int32"  # on a CPU nothing is compiled in
    return tuple(
        T.dynamic(name, index) if size is None else size
        for name, size in zip("acbp", (*shape[:3], shape[4]), strict=True)
    )


def rotate_kernel(
    shape: tuple[Any, ...],
    matrix: tuple[int, int, int],
    blocks: tuple[int, int, int],
    shares: tuple[int, int | None] | None,
    dtypes: tuple[torch.dtype, torch.dtype],
    flags: tuple[bool, bool, bool, bool],
    launch: tuple[int, int],
) -> Any:
    """Tiles of tokens by channels of one pack.

    ``shape``: A, C, B, whether a token's channels are contiguous (B = 1), packs. ``matrix``: parts,
    their width, and channels of a pack. ``shares`` of the tokens, and tiles of each (None: as many
    as it takes): a program keeps its columns of the matrix and streams a share; without, it takes
    one tile. Where the channels are not contiguous the product is that of the transposes.
    """
    import tilelang.language as T

    A, C, B, P = sizes(T, shape)
    rows = shape[3]
    count, padded, span = matrix
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
    columns = P * (padded // block_n)
    per = T.ceildiv(A, block_t) if rows else T.ceildiv(B, block_t)

    tiles = per if rows else per * A
    streamed = shares is not None
    splits, share = shares or (tiles, 1)
    share = T.ceildiv(tiles, splits) if share is None else share
    depth = stages if shares is None or shares[1] is None else min(stages, shares[1])

    arrive, load, _ = copies(T, rows, span, padded, (A, C, B), (block_t, block_k))
    _, load_base, store = copies(T, rows, span, padded, (A, C, B), (block_t, block_n))

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
    def products(xs: Any, m0: Any, m1: Any, m2: Any, acc: Any) -> None:  # the least first
        if count > 2:
            product(xs, m2, acc)
        product(xs, m1, acc)
        product(xs, m0, acc)

    @T.macro
    def finish(
        xs: Any, base: Any, base_s: Any, power: Any, out: Any, out_s: Any, acc: Any, tile: Any,
        which: Any, z0: Any,
    ) -> None:  # fmt: skip
        outer = 0 if rows else tile // per
        t0 = (tile if rows else tile % per) * block_t
        if based and not held:
            load_base(base, base_s, outer, t0, which, z0)
        for i, j in T.Parallel(*tile_shape):
            if scaled:
                acc[i, j] *= power[which]
            if based:
                value = T.cast(xs[i, j] if held else base_s[i, j], "float32")
                # Keeps the sign of a zero.
                acc[i, j] = T.if_then_else(acc[i, j] == 0, value, acc[i, j] + value)
        T.copy(acc, out_s)
        store(out, out_s, outer, t0, which, z0)

    @T.macro
    def body(x: Any, base: Any, parts: Any, power: Any, out: Any) -> None:
        with T.Kernel(splits * columns, threads=threads) as pid:
            xs = T.alloc_shared(x_tile, compute)
            m0 = T.alloc_shared(m_tile, compute)
            m1 = T.alloc_shared(m_tile, compute)
            m2 = T.alloc_shared(m_tile if count > 2 else (1, 1), compute)
            base_s = T.alloc_shared(tile_shape if based and not held else (1, 1), compute)
            out_s = T.alloc_shared(tile_shape, out_dtype)
            acc = T.alloc_fragment(tile_shape, "float32")
            # Tensor cores cut what they add to a sum: as many parts as fp32 has digits keep them in
            # sums of their own, a step each.
            sums = T.alloc_fragment(tile_shape, "float32") if count > 2 else acc
            # Neighbours share the tokens where rows are read, else the matrix.
            first = pid // columns if rows else pid % splits
            column = pid % columns if rows else pid // splits
            which = column // (padded // block_n)
            z0 = column % (padded // block_n) * block_n
            if streamed:
                matrices(parts, m0, 0, which, z0, 0)
                matrices(parts, m1, 1, which, z0, 0)
                if count > 2:
                    matrices(parts, m2, 2, which, z0, 0)
                for step in T.Pipelined(share, num_stages=depth):
                    # A tile beyond the last is read as zeros and stored nowhere.
                    tile = first * share + step
                    outer = 0 if rows else tile // per
                    arrive(x, xs, outer, (tile if rows else tile % per) * block_t, which, 0)
                    T.clear(acc)
                    products(xs, m0, m1, m2, acc)
                    finish(xs, base, base_s, power, out, out_s, acc, tile, which, z0)
            else:
                outer = 0 if rows else first // per
                t0 = (first if rows else first % per) * block_t
                T.clear(acc)
                for k in T.Pipelined(steps, num_stages=min(stages, steps)):
                    load(x, xs, outer, t0, which, k * block_k)
                    matrices(parts, m0, 0, which, z0, k * block_k)
                    matrices(parts, m1, 1, which, z0, k * block_k)
                    if count > 2:
                        matrices(parts, m2, 2, which, z0, k * block_k)
                    if count > 2:
                        T.clear(sums)
                    products(xs, m0, m1, m2, sums)
                    if count > 2:
                        for i, j in T.Parallel(*tile_shape):
                            acc[i, j] += sums[i, j]
                finish(xs, base, base_s, power, out, out_s, acc, first, which, z0)

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
