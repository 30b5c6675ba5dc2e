"""Rotations' v^T g of every pack, and g + g M^T where that fits into the same pass."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import FLUSH, Pass

from . import rotation_dense as dense
from .common import NAMES, build
from .rotation_dense_gram import gram as dense_gram
from .rotation_layout import div, fixed_of, flat, flat_or, index_macro, integers_of, layout, mod


@prepared
def gram(
    x: torch.Tensor,
    g: torch.Tensor,
    rescale: torch.Tensor | None,
    parts: torch.Tensor | None,
    power: torch.Tensor | None,
    out: torch.Tensor | None,
    total: torch.Tensor,
    part: Pass,
    base: bool,
    diff: bool,
    compute: torch.dtype,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """total[share] = x^T g of every pack, each share over a part of the tokens.

    ``x`` and ``g`` are contiguous (A, C, B) tensors, cast to ``compute``; ``total`` (splits, packs,
    padded, padded) fp32. ``out`` like x, if given, takes g M^T + (rescale - diff) * g in the same
    pass, without the second term unless ``base``; a pack is one tile then. Sums are in two levels
    where there are more than FLUSH tokens.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    if rescale is None and dense.serves(part, compute, x, g, out):
        streamed = dense_gram(x, g, parts, power, out, total, part, base, plan)
        return lambda x, g, rescale, *rest: streamed(x, g, *rest[:4])
    on_cpu = not total.is_cuda
    integers = integers_of(x, part, plan.block_k, plan.splits)
    flags = (base, rescale is not None, power is not None, diff, out is not None)
    rows = on_cpu or layout(x)[3]
    params = (
        (fixed_of(integers, on_cpu), None if on_cpu else flags, (x.dtype, g.dtype, compute)),
        0 if parts is None else parts.shape[0],
        part.padded,
        (plan.block_k, plan.block_n, plan.splits),
        (rows, policy.tf32 and not on_cpu, on_cpu),
        (32 * plan.num_warps, plan.num_stages),
    )
    if on_cpu:
        params = (params[0], None, *params[2:3], (plan.block_k, plan.block_n, None), *params[4:])  # type: ignore[assignment]
    kernel = build(gram_kernel, params, total.device)
    numbers = [v for v, f in zip(integers.values(), params[0][0], strict=True) if f is None]  # type: ignore[index]
    if on_cpu:
        pieces = 0 if parts is None else parts.shape[0]
        numbers += [*map(int, flags), pieces, plan.splits]

    def launch(
        x: torch.Tensor,
        g: torch.Tensor,
        rescale: torch.Tensor | None,
        parts: torch.Tensor | None,
        power: torch.Tensor | None,
        out: torch.Tensor | None,
        total: torch.Tensor,
        *_: Any,
    ) -> None:
        factors = total if rescale is None else rescale.float()
        if parts is None:  # of the right type, and not read
            parts = x if x.dtype is compute else total
        kernel(
            *(flat(x), flat(g), flat(factors), flat(parts), flat_or(power, total)),
            *(flat_or(out, x), flat(total), *numbers),
        )

    return launch


def gram_kernel(
    call: tuple[Any, Any, tuple[torch.dtype, ...]],
    count: int | None,
    padded: int,
    blocks: tuple[int, int, int | None],
    how: tuple[bool, bool, bool],
    launch: tuple[int, int],
) -> Any:
    """One tile of one share of one pack's x^T g, and its tokens' g M^T + base if asked for.

    Integers of None, and then flags, are arguments.
    """
    import tilelang.language as T

    fixed, flags, dtypes = call
    x_dtype, g_dtype, compute = (NAMES[dtype] for dtype in dtypes)
    block_t, block_n, splits_ = blocks
    rows, tf32, on_cpu = how
    threads = launch[0]
    columns = padded // block_n
    fused = compute == "float32" and not tf32 and not on_cpu
    one_tile = columns == 1
    shape = (block_t, block_n) if rows else (block_n, block_t)
    every = FLUSH // block_t
    index = index_macro(T, padded)

    @T.macro
    def load(
        source: Any, tile_s: Any, channels: Any, origin: Any, t0: Any, tokens: Any, z0: Any,
        token_step: Any, channel_step: Any,
    ) -> None:  # fmt: skip
        for a, b in T.Parallel(*shape):
            i = a if rows else b
            c = channels[z0 + (b if rows else a)]
            if t0 + i < tokens and c >= 0:
                at = origin + i * token_step + T.cast(c, "int64") * channel_step
                tile_s[a, b] = T.cast(source[at], compute)
            else:
                tile_s[a, b] = T.cast(0, compute)

    @T.macro
    def body(
        x: Any, g: Any, rescale: Any, parts: Any, power: Any, out: Any, total: Any,
        integers: Any, given: Any, pieces: Any, splits: Any,
    ) -> None:  # fmt: skip
        tiles, per, tokens, share, outer_step, token_step, channel_step = integers[:7]
        unit, stages, low, width, pack, groups, packs = integers[7:]
        based, rescaled, scaled, diff, both = given
        with T.Kernel(packs * columns * columns, splits, threads=threads) as (pid, split):
            xs = T.alloc_shared(shape, compute)
            gs = T.alloc_shared(shape, compute)
            sums = T.alloc_fragment((block_n, block_n), "float32")
            upper = T.alloc_fragment((block_n, block_n), "float32")
            which = div(pid, columns * columns)
            zj = mod(div(pid, columns), columns) * block_n
            zc = mod(pid, columns) * block_n
            ms = T.alloc_shared((block_n, block_n) if one_tile else (1, 1), compute)
            acc = T.alloc_fragment((block_t, block_n) if one_tile else (1, 1), "float32")
            staged = T.alloc_shared((block_t, block_n) if one_tile else (1, 1), "float32")
            channels = T.alloc_shared((padded,), "int32")
            index(channels, which, unit, stages, low, width, pack, groups)
            T.clear(sums)
            T.clear(upper)
            for step in T.serial(share):
                tile = split * share + step
                if tile < tiles:
                    t0 = mod(tile, per) * block_t
                    outer = T.cast(div(tile, per), "int64") * outer_step
                    origin = outer + T.cast(t0, "int64") * token_step
                    load(x, xs, channels, origin, t0, tokens, zj, token_step, channel_step)
                    load(g, gs, channels, origin, t0, tokens, zc, token_step, channel_step)
                    if fused:
                        for kk in T.serial(block_t):
                            for i, j in T.Parallel(block_n, block_n):
                                sums[i, j] += (xs[kk, i] if rows else xs[i, kk]) * (
                                    gs[kk, j] if rows else gs[j, kk]
                                )
                    else:
                        T.gemm(xs, gs, sums, transpose_A=rows, transpose_B=not rows)
                    if one_tile:
                        if both:
                            T.clear(acc)
                            for piece in T.serial(pieces):
                                which_part = (pieces - 1 - piece) * packs + which
                                start = T.cast(which_part, "int64") * (padded * padded)
                                for a, b in T.Parallel(block_n, block_n):  # M^T
                                    ms[a, b] = parts[start + b * padded + a]
                                if fused:
                                    for kk in T.serial(block_n):
                                        for i, j in T.Parallel(block_t, block_n):
                                            acc[i, j] += (gs[i, kk] if rows else gs[kk, i]) * ms[
                                                kk, j
                                            ]
                                else:
                                    T.gemm(gs, ms, acc, transpose_A=not rows)
                            T.copy(acc, staged)
                            for a, b in T.Parallel(*shape):
                                i = a if rows else b
                                z = b if rows else a
                                c = channels[z]
                                if t0 + i < tokens and c >= 0:
                                    at = origin + i * token_step + T.cast(c, "int64") * channel_step
                                    if scaled:
                                        staged[i, z] *= power[which]
                                    if based:
                                        own = T.cast(g[at], "float32")
                                        if rescaled:
                                            less = rescale[c] - T.cast(diff, "float32")
                                            staged[i, z] += less * own
                                        elif staged[i, z] == 0:  # keeps the sign of a zero
                                            staged[i, z] = own
                                        else:
                                            staged[i, z] += own
                                    out[at] = T.cast(staged[i, z], x_dtype)
                    if mod(step, every) == every - 1:
                        for i, j in T.Parallel(block_n, block_n):
                            upper[i, j] += sums[i, j]
                            sums[i, j] = 0
            start = T.cast(split * packs + which, "int64") * (padded * padded)
            for i, j in T.Parallel(block_n, block_n):
                total[start + (zj + i) * padded + zc + j] = upper[i, j] + sums[i, j]

    sizes = [T.dynamic(name, "int64") for name in ("nx", "ng", "nr", "np", "ni", "no", "nt")]
    nx, ng, nr, np, ni, no, nt = sizes

    if on_cpu:

        @T.prim_func
        def gram(
            x: T.Tensor((nx,), x_dtype),
            g: T.Tensor((ng,), g_dtype),
            rescale: T.Tensor((nr,), "float32"),
            parts: T.Tensor((np,), compute),
            power: T.Tensor((ni,), "float32"),
            out: T.Tensor((no,), x_dtype),
            total: T.Tensor((nt,), "float32"),
            tiles: T.int32, per: T.int32, tokens: T.int32, share: T.int32,
            outer_step: T.int32, token_step: T.int32, channel_step: T.int32,
            unit: T.int32, stages: T.int32, low: T.int32, width: T.int32, pack: T.int32,
            groups: T.int32, packs: T.int32, based: T.int32, rescaled: T.int32,
            scaled: T.int32, diff: T.int32, both: T.int32, pieces: T.int32, splits: T.int32,
        ) -> None:  # fmt: skip
            body(
                x, g, rescale, parts, power, out, total,
                (tiles, per, tokens, share, outer_step, token_step, channel_step,
                 unit, stages, low, width, pack, groups, packs),
                (based != 0, rescaled != 0, scaled != 0, diff, both != 0), pieces, splits,
            )  # fmt: skip

    else:
        given = (*flags[:3], int(flags[3]), flags[4])

        @T.prim_func
        def gram(  # type: ignore[no-redef]
            x: T.Tensor((nx,), x_dtype),
            g: T.Tensor((ng,), g_dtype),
            rescale: T.Tensor((nr,), "float32"),
            parts: T.Tensor((np,), compute),
            power: T.Tensor((ni,), "float32"),
            out: T.Tensor((no,), x_dtype),
            total: T.Tensor((nt,), "float32"),
            tiles: T.int32,
            per: T.int32,
            tokens: T.int32,
            share: T.int32,
        ) -> None:
            integers = (tiles, per, tokens, share, *fixed[4:])
            body(x, g, rescale, parts, power, out, total, integers, given, count, splits_)

    return gram
