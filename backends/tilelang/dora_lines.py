"""DoRA where no program holds a line: sums over parts of the lines, then a pass that rescales.

A line is a row, or an input channel's columns. All programs read tiles, however the lines lie; what
they leave, a few numbers a line and part, is added up in a fixed order.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import build
from .dora_parts import lengths_kernel, radial_kernel
from .dora_tiles import (
    Number,
    Tiles,
    call,
    is_tensor,
    name,
    ratio,
    threads_of,
    tiles_of,
    unpower_of,
    width_of,
)

Tensor = torch.Tensor


def measure_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`measure`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    g_dtype, splits, by_tensor, threads = others
    O, N, _, _, K = tiles.sizes
    S = T.dynamic("splits", tiles.index) if splits is None else splits
    block_m, block_n, _ = tiles.blocks
    by_column, lanes, dim, fill = tiles.by_column, tiles.lanes, tiles.dim, tiles.merged()
    count, depth = (N, O) if by_column else (O, N)
    steps = T.ceildiv(T.ceildiv(depth, block_m if by_column else block_n), S)
    w_type, d_type, g_type = tiles.matrix(), tiles.matrix(tiles.delta), tiles.matrix(g_dtype)
    up_type, down_type = tiles.factors()
    f_type, n_type, line_type = tiles.number(by_tensor), tiles.vector(), tiles.width()
    has_grad = g_dtype is not None
    parts_type = T.Tensor((S, count) if has_grad else (S, 2, count), "float32")

    @T.prim_func
    def measure(
        weight: w_type, grad: g_type, delta: d_type, up: up_type, down: down_type, factor: f_type,
        norm: n_type, parts: parts_type, one_line: line_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(count, lanes), S, threads=threads) as (block, split):
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), g_dtype if has_grad else tiles.weight)
            # Each thread sums what it reads: lanes are joined once, at the end.
            total = T.alloc_fragment((block_m, block_n), "float32")
            largest = total if has_grad else T.alloc_fragment((block_m, block_n), "float32")
            unit = T.alloc_fragment((lanes,), "float32")
            raised = T.alloc_fragment((lanes,), "float32")
            top = T.alloc_fragment((lanes,), "float32")
            part = T.alloc_fragment((lanes,), "float32")
            s = factor[0] if by_tensor else factor
            T.clear(total)
            if not has_grad:
                T.clear(largest)
            if has_grad:
                for l in T.Parallel(lanes):
                    unit[l] = 0
                    if block * lanes + l < count:
                        unit[l] = norm[(block * lanes + l) // K if by_column else block * lanes + l]
                    raised[l] = tiles.power(unit[l])
                    unit[l] = ratio(T, T.float32(1), unit[l] * raised[l])
            for step in T.serial(steps):
                row = (split * steps + step) * block_m if by_column else block * block_m
                column = block * block_n if by_column else (split * steps + step) * block_n
                fill(weight, delta, up, down, s, row, column, buffers)
                if has_grad:
                    T.copy(grad[row, column], incoming)
                for i, j in T.Parallel(block_m, block_n):
                    if has_grad:
                        lane = j if by_column else i
                        g = T.cast(incoming[i, j], "float32")
                        total[i, j] += g * (tile[i, j] * raised[lane] * unit[lane])
                    else:
                        # Scaled as the largest so far asks for: squares might vanish or overflow.
                        peak = T.max(largest[i, j], T.max(tile[i, j], -tile[i, j]))
                        scaling = tiles.power(peak)
                        change = scaling * unpower_of(T, largest[i, j])
                        total[i, j] = total[i, j] * change * change + (
                            tile[i, j] * scaling * (tile[i, j] * scaling)
                        )
                        largest[i, j] = peak
            if has_grad:
                T.reduce_sum(total, part, dim=dim)
                for l in T.Parallel(lanes):
                    if block * lanes + l < count:
                        parts[split, block * lanes + l] = part[l]
            else:
                T.reduce_max(largest, top, dim=dim)
                for i, j in T.Parallel(block_m, block_n):
                    last = tiles.power(top[j if by_column else i]) * unpower_of(T, largest[i, j])
                    total[i, j] = total[i, j] * last * last
                T.reduce_sum(total, part, dim=dim)
                for l in T.Parallel(lanes):
                    if block * lanes + l < count:
                        parts[split, 0, block * lanes + l] = top[l]
                        parts[split, 1, block * lanes + l] = part[l]

    return measure


def spread_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`spread`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    g_dtype, out_dtype, more_dtype, by_tensor, threads = others
    O, N, _, L, K = tiles.sizes
    block_m, block_n, _ = tiles.blocks
    by_column, lanes, fill = tiles.by_column, tiles.lanes, tiles.merged()
    has_grad = g_dtype is not None
    w_type, d_type, g_type = tiles.matrix(), tiles.matrix(tiles.delta), tiles.matrix(g_dtype)
    up_type, down_type = tiles.factors()
    f_type, n_type, line_type = tiles.number(by_tensor), tiles.vector(), tiles.width()
    made_type = T.Tensor((2, L) if has_grad else (L,), "float32")
    out_type, more_type = tiles.matrix(out_dtype), tiles.matrix(more_dtype)

    @T.prim_func
    def spread(
        weight: w_type, grad: g_type, delta: d_type, up: up_type, down: down_type, factor: f_type,
        norm: n_type, made: made_type, out: out_type, more: more_type, one_line: line_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(O, block_m), threads=threads) as (bx, by):
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), g_dtype if has_grad else tiles.weight)
            unit = T.alloc_fragment((lanes,), "float32")
            raised = T.alloc_fragment((lanes,), "float32")
            along = T.alloc_fragment((lanes,), "float32")
            back = T.alloc_fragment((lanes,), "float32")
            s = factor[0] if by_tensor else factor
            row, column = by * block_m, bx * block_n
            fill(weight, delta, up, down, s, row, column, buffers)
            for l in T.Parallel(lanes):
                along[l] = 0
                back[l] = 0
                unit[l] = 0
                if (column + l < N) if by_column else (row + l < O):
                    line = (column + l) // K if by_column else row + l
                    if has_grad:
                        unit[l] = norm[line]
                        along[l] = made[0, line]
                        back[l] = made[1, line]
                    else:
                        along[l] = made[line]
                raised[l] = tiles.power(unit[l])
                unit[l] = ratio(T, T.float32(1), unit[l] * raised[l])
            if has_grad:
                T.copy(grad[row, column], incoming)
            for i, j in T.Parallel(block_m, block_n):
                lane = j if by_column else i
                if has_grad:
                    tile[i, j] = tile[i, j] * raised[lane] * unit[lane] * back[lane]
                    tile[i, j] += T.cast(incoming[i, j], "float32") * along[lane]
                else:
                    tile[i, j] *= along[lane]
            for i, j in T.Parallel(block_m, block_n):
                if row + i < O and column + j < N:
                    if out_dtype is not None:
                        out[row + i, column + j] = tile[i, j]
                    if more_dtype is not None:
                        more[row + i, column + j] = tile[i, j]

    return spread


@prepared
def measure(
    weight: Tensor,
    grad: Tensor | None,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    norm: Tensor,
    parts: Tensor,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Sums over parts of M's lines, for :func:`lengths`; with ``grad``, for :func:`radial`.

    M (O, N) is ``weight`` [+ ``delta``] [+ ``factor`` * ``up`` (O, r) @ ``down`` (r, N)], all
    row-major. A lane is a row where ``group`` is 0, else a column, of which ``group`` neighbours
    make a line. ``parts``, fp32: (splits, 2, lanes), the largest element and the sum of squares,
    scaled by the power of two that goes with it; with ``grad`` (splits, lanes), the sums of
    grad * M / ``norm``, which has one element a line.
    """
    shared = tiles_of(weight, delta, up, norm, group, plan, policy)
    splits = parts.shape[0] if weight.is_cuda else None
    others = (name(grad), splits, *is_tensor(factor), threads_of(weight, plan))
    kernel = build(measure_kernel, (shared, others), weight.device)
    one_line = width_of(weight, group)

    def launch(
        weight: Tensor, grad: Tensor | None, delta: Tensor | None, up: Tensor | None,
        down: Tensor | None, factor: Number, norm: Tensor, parts: Tensor, group: int,
    ) -> None:  # fmt: skip
        inputs = [*_merged(weight, grad, delta, up, down), factor, norm]
        call(kernel, policy, inputs, [parts, one_line], () if up is None else (3, 4))

    return launch


def _merged(weight: Tensor, *others: Tensor | None) -> list[Tensor]:
    return [weight, *(weight if t is None else t for t in others)]


@prepared
def lengths(
    parts: Tensor,
    magnitude: Tensor,
    multiplier: Number,
    norm: Tensor,
    made: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """norm (lines), fp32, from what :func:`measure` left; ``group`` is 1 for rows.

    ``made`` (lines), fp32, where wanted: multiplier * (magnitude / norm - 1) + 1.
    """
    on_cpu = not parts.is_cuda
    sizes = (parts.shape[0], parts.shape[2], norm.shape[0], group)
    params = (
        (None,) * 4 if on_cpu else sizes,
        *(name(magnitude), made is not None, *is_tensor(multiplier)),
        "int64" if on_cpu else "int32",
    )
    kernel = build(lengths_kernel, params, parts.device)
    one_line = width_of(parts, group)

    def launch(
        parts: Tensor, magnitude: Tensor, multiplier: Number, norm: Tensor, made: Tensor | None,
        group: int,
    ) -> None:  # fmt: skip
        outputs = [norm, norm if made is None else made, one_line]
        call(kernel, policy, [parts, magnitude, multiplier], outputs)

    return launch


@prepared
def radial(
    norm: Tensor,
    parts: Tensor | None,
    magnitude: Tensor,
    multiplier: Number,
    grad_magnitude: Tensor | None,
    made: Tensor | None,
    group: int,
    detach: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The magnitude's gradient, and ``made`` (2, lines), fp32; ``group`` is 1 for rows.

    The gradient of M is made[0] * grad + made[1] * M / norm, line by line. With ``detach``, which
    takes the norm for a constant, ``made`` needs no ``parts``.
    """
    on_cpu = not norm.is_cuda
    splits, lanes = (1, norm.shape[0]) if parts is None else tuple(parts.shape)
    sizes = (splits, lanes, norm.shape[0], group)
    params = (
        tuple(None for _ in sizes) if on_cpu else sizes,
        (name(magnitude), name(grad_magnitude)),
        *(parts is not None, made is not None, *is_tensor(multiplier), detach),
        "int64" if on_cpu else "int32",
    )
    kernel = build(radial_kernel, params, norm.device)
    one_line = width_of(norm, group)

    def launch(
        norm: Tensor, parts: Tensor | None, magnitude: Tensor, multiplier: Number,
        grad_magnitude: Tensor | None, made: Tensor | None, group: int, detach: bool,
    ) -> None:  # fmt: skip
        inputs = [norm, norm if parts is None else parts, magnitude, multiplier]
        outputs = [norm if t is None else t for t in (grad_magnitude, made)]
        call(kernel, policy, inputs, [*outputs, one_line])

    return launch


@prepared
def spread(
    weight: Tensor,
    grad: Tensor | None,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    out: Tensor | None,
    more: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = more = made * M; with ``grad`` made[0] * grad + made[1] * M / norm; where wanted.

    M as for :func:`measure`; ``norm`` and the last dimension of ``made`` have an element a line.
    """
    shared = tiles_of(weight, delta, up, norm, group, plan, policy)
    dtypes = map(name, (grad, out, more))
    others = (*dtypes, *is_tensor(factor), threads_of(weight, plan))
    kernel = build(spread_kernel, (shared, others), weight.device)
    one_line = width_of(weight, group)

    def launch(
        weight: Tensor, grad: Tensor | None, delta: Tensor | None, up: Tensor | None,
        down: Tensor | None, factor: Number, norm: Tensor, made: Tensor, out: Tensor | None,
        more: Tensor | None, group: int,
    ) -> None:  # fmt: skip
        inputs = [*_merged(weight, grad, delta, up, down), factor, norm, made]
        outputs = [weight if t is None else t for t in (out, more)]
        call(kernel, policy, inputs, [*outputs, one_line], () if up is None else (3, 4))

    return launch
