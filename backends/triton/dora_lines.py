"""DoRA where no program holds a line: sums over parts of the lines, then a pass that rescales.

A line is a row, or an input channel's columns. All programs read tiles, however the lines lie; what
they leave, a few numbers a line and part, is added up in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel
from .dora import (
    _along,
    _inverse,
    _merged,
    _number,
    _power,
    _ratio,
    _read,
    _unit,
    factor_options,
    tile_options,
)
from .dora_contract import _gradient

Tensor = torch.Tensor
Number = float | torch.Tensor


@triton.jit
def _cell(
    block, place, O, N, BY_COLUMN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The rows and columns of the tile at ``place`` along the lines of a block."""
    rows = (place if BY_COLUMN else block) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (block if BY_COLUMN else place) * BLOCK_N + tl.arange(0, BLOCK_N)
    return rows, columns, rows < O, columns < N


@kernel
def _measure(
    weight, grad, delta, up, down, factor, norm, parts, group,
    O, N, steps, lanes, R: tl.constexpr,
    BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    block, split = tl.program_id(0), tl.program_id(1)
    AXIS: tl.constexpr = 0 if BY_COLUMN else 1
    first = split * steps
    rows, columns, ok_m, ok_n = _cell(block, first, O, N, BY_COLUMN, BLOCK_M, BLOCK_N)
    lane = columns if BY_COLUMN else rows
    ok = ok_n if BY_COLUMN else ok_m
    # Each thread sums what it reads: lanes are joined once, at the end.
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if grad is not None:
        length = tl.load(norm + (lane // group if BY_COLUMN else lane), mask=ok, other=0.0)
        for step in tl.range(0, steps, num_stages=STAGES):
            rows, columns, ok_m, ok_n = _cell(
                block, first + step, O, N, BY_COLUMN, BLOCK_M, BLOCK_N
            )
            tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                           COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            g = _read(grad, rows, columns, ok_m[:, None] & ok_n[None, :], N)
            total += g * _unit(tile, length, BY_COLUMN)
        at = split.to(tl.int64) * lanes + lane
        tl.store(parts + at, tl.sum(total, axis=AXIS), mask=ok)
    else:
        largest = total
        for step in tl.range(0, steps, num_stages=STAGES):
            rows, columns, ok_m, ok_n = _cell(
                block, first + step, O, N, BY_COLUMN, BLOCK_M, BLOCK_N
            )
            tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                           COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            largest = tl.maximum(largest, tl.abs(tile))
            total += tile * tile
        top = tl.max(largest, axis=AXIS)
        power = _power(top)
        square = tl.sum(total, axis=AXIS)
        # Once more, scaled, where squares may have vanished or overflowed: hardly ever.
        odd = (power != 1.0) & (top != 0.0)
        again = tl.where(tl.max(odd.to(tl.int32), axis=0) > 0, steps, 0)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, again, num_stages=1):
            rows, columns, ok_m, ok_n = _cell(
                block, first + step, O, N, BY_COLUMN, BLOCK_M, BLOCK_N
            )
            tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                           COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            tile *= _along(power, BY_COLUMN)
            total += tile * tile
        square = tl.where(odd, tl.sum(total, axis=AXIS), square)
        at = split.to(tl.int64) * 2 * lanes + lane
        tl.store(parts + at, top, mask=ok)
        tl.store(parts + at + lanes, square, mask=ok)


@kernel
def _lengths(
    parts, magnitude, multiplier, norm, made, group,
    L, SPLITS, lanes, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    in_turn()
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = lines < L
    count = SPLITS * group
    peak = tl.zeros((BLOCK, STEP), tl.float32)
    for start in tl.range(0, count, STEP):
        part = start + tl.arange(0, STEP)
        inside = ok[:, None] & (part < count)[None, :]
        at = (part // group * 2 * lanes + part % group)[None, :] + (lines * group)[:, None]
        peak = tl.maximum(peak, tl.load(parts + at, mask=inside, other=0.0))
    power = _power(tl.max(peak, axis=1))
    total = tl.zeros((BLOCK, STEP), tl.float32)
    for start in tl.range(0, count, STEP):
        part = start + tl.arange(0, STEP)
        inside = ok[:, None] & (part < count)[None, :]
        at = (part // group * 2 * lanes + part % group)[None, :] + (lines * group)[:, None]
        change = power[:, None] * _inverse(_power(tl.load(parts + at, mask=inside, other=0.0)))
        total += tl.load(parts + at + lanes, mask=inside, other=0.0) * change * change
    length = tl.sqrt_rn(tl.sum(total, axis=1)) * _inverse(power)
    tl.store(norm + lines, length, mask=ok)
    if made is not None:
        s = _number(multiplier)
        m = tl.load(magnitude + lines, mask=ok, other=0.0).to(tl.float32)
        tl.store(made + lines, s * _ratio(m, length) + (1.0 - s), mask=ok)


@kernel
def _radial(
    norm, parts, magnitude, multiplier, grad_magnitude, made, group,
    L, SPLITS, lanes, DETACH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    in_turn()
    lines = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = lines < L
    s = _number(multiplier)
    radial = tl.zeros((BLOCK,), tl.float32)
    if parts is not None:
        count = SPLITS * group
        total = tl.zeros((BLOCK, STEP), tl.float32)
        for start in tl.range(0, count, STEP):
            part = start + tl.arange(0, STEP)
            inside = ok[:, None] & (part < count)[None, :]
            at = (part // group * lanes + part % group)[None, :] + (lines * group)[:, None]
            total += tl.load(parts + at, mask=inside, other=0.0)
        radial = tl.sum(total, axis=1)
    if grad_magnitude is not None:
        tl.store(grad_magnitude + lines, (s * radial).to(grad_magnitude.dtype.element_ty), mask=ok)
    if made is not None:
        m = tl.load(magnitude + lines, mask=ok, other=0.0).to(tl.float32)
        ratio = _ratio(m, tl.load(norm + lines, mask=ok, other=0.0))
        tl.store(made + lines, s * ratio + (1.0 - s), mask=ok)
        back = tl.zeros((BLOCK,), tl.float32) if DETACH else -s * ratio * radial
        tl.store(made + L + lines, back, mask=ok)


@kernel
def _spread(
    weight, grad, delta, up, down, factor, norm, made, out, more, group,
    O, N, L, R: tl.constexpr,
    BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    tiles = tl.cdiv(N, BLOCK_N)
    rows, columns, ok_m, ok_n = _cell(
        tl.program_id(0) // tiles, tl.program_id(0) % tiles, O, N, False, BLOCK_M, BLOCK_N
    )
    if grad is not None:
        value = _gradient(weight, grad, delta, up, down, factor, norm, made, group, rows, columns,
                          ok_m, ok_n, N, L, R, BY_COLUMN, COMPUTE, PRECISION,
                          BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
    else:
        value = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                        COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        if BY_COLUMN:
            value *= tl.load(made + columns // group, mask=ok_n, other=0.0)[None, :]
        else:
            value *= tl.load(made + rows, mask=ok_m, other=0.0)[:, None]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside = ok_m[:, None] & ok_n[None, :]
    if out is not None:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
    if more is not None:
        tl.store(more + at, value.to(more.dtype.element_ty), mask=inside)


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
    (n_out, width), splits = weight.shape, parts.shape[0]
    tiles = triton.cdiv(n_out, plan.block_m), triton.cdiv(width, plan.block_n)
    along, blocks = tiles if group else tiles[::-1]
    options = tile_options(plan) | factor_options(plan, policy, up)
    options["BY_COLUMN"] = int(group > 0)
    args = (weight, grad, delta, up, down, factor, norm, parts, group)
    fixed = (n_out, width, triton.cdiv(along, splits), parts.shape[-1])
    return _measure.prepare((blocks, splits), args, options, fixed)


_JOIN = {"BLOCK": 16, "STEP": 32, "num_warps": 4}


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
    fixed = (norm.shape[0], parts.shape[0], parts.shape[-1])
    args = (parts, magnitude, multiplier, norm, made, group)
    return _lengths.prepare((triton.cdiv(fixed[0], 16),), args, _JOIN, fixed)


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
    lanes, splits = (0, 0) if parts is None else (parts.shape[-1], parts.shape[0])
    fixed = (norm.shape[0], splits, lanes)
    args = (norm, parts, magnitude, multiplier, grad_magnitude, made, group)
    options = {"DETACH": detach, **_JOIN}
    launch = _radial.prepare((triton.cdiv(fixed[0], 16),), args, options, fixed)
    return lambda *args: launch(*args[:-1])  # all but detach


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
    n_out, width = weight.shape
    options = tile_options(plan) | factor_options(plan, policy, up)
    options["BY_COLUMN"] = int(group > 0)
    args = (weight, grad, delta, up, down, factor, norm, made, out, more, group)
    grid = (triton.cdiv(n_out, plan.block_m) * triton.cdiv(width, plan.block_n),)
    return _spread.prepare(grid, args, options, (n_out, width, norm.shape[0]))
