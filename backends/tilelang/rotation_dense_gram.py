"""v^T g of packs of neighbouring channels, and g + g M^T with it; see :mod:`.rotation_dense`."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# The forms of a prim_func share its name, hence each no-redef below.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.plan import Plan
from lycoris.kernels.rotation import Pass

from .common import NAMES, build
from .rotation_dense import as_rows, copies, shape_of, share_of, sizes


def gram(
    x: torch.Tensor,
    g: torch.Tensor,
    parts: torch.Tensor | None,
    power: torch.Tensor | None,
    out: torch.Tensor | None,
    total: torch.Tensor,
    part: Pass,
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
        (*shape_of(x), None if on_cpu else packs),
        (0 if parts is None or not fused else parts.shape[0], padded, part.pack * part.width),
        (plan.block_k, plan.block_n, plan.splits),
        None if on_cpu else share_of(x, plan, plan.block_k),
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
        streams = (as_rows(x), as_rows(g), total)
        if out is None or parts is None:
            kernel(*streams)
        else:
            power_ = () if power is None else (power,)
            kernel(*streams, parts, *power_, as_rows(out))

    return launch


def gram_kernel(
    shape: tuple[Any, ...],
    matrix: tuple[int, int, int],
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

    A, C, B, P = sizes(T, shape)
    rows = shape[3]
    count, padded, span = matrix
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
    # v^T g of a pack may hold the next pack's channels, which nothing reads; g M^T may not.
    gaps = fused and span < padded
    depth = stages if steps is None else min(stages, steps)
    m_tile = (block_n, block_n) if fused else (1, 1)

    load, _, store = copies(T, rows, span, padded, (A, C, B), (block_t, block_n))

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
            alone = T.alloc_shared(tile_shape if gaps else (1, 1), compute)
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
                outer = 0 if rows else tile // per
                t0 = (tile if rows else tile % per) * block_t
                load(x, xs, outer, t0, which, zi)
                load(g, gs, outer, t0, which, zj)
                for i, j in T.Parallel(block_n, block_n):
                    sums[i, j] += part[i, j]
                    part[i, j] = 0
                T.gemm(xs, gs, part, transpose_A=rows, transpose_B=not rows)
                if gaps:
                    for a, b in T.Parallel(*tile_shape):
                        inside = (b if rows else a) < span
                        alone[a, b] = T.if_then_else(inside, gs[a, b], T.cast(0, compute))
                if fused:
                    T.clear(acc)
                    if count > 2:
                        product(alone if gaps else gs, m2, acc)
                    product(alone if gaps else gs, m1, acc)
                    product(alone if gaps else gs, m0, acc)
                    for i, j in T.Parallel(*tile_shape):
                        if scaled:
                            acc[i, j] *= power[which]
                        if based:
                            value = T.cast(gs[i, j], "float32")
                            acc[i, j] = T.if_then_else(acc[i, j] == 0, value, acc[i, j] + value)
                    T.copy(acc, out_s)
                    store(out, out_s, outer, t0, which, 0)
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
