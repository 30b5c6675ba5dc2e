"""DoRA: a weight read line by line (rows, or input channels' columns), rescaled to its magnitudes.

A program owns whole lines. It reads them once where they fit into registers; else the second time
from the cache, where its own first reading left them. W + s up down exists as tiles only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import MIN_TRIPLE, TL_DTYPE, kernel

# Squares neither vanish nor overflow where the largest element is within 2^-50..2^50.
_SMALL: tl.constexpr = tl.constexpr(2.0**-50)
_LARGE: tl.constexpr = tl.constexpr(2.0**50)
_RAISE: tl.constexpr = tl.constexpr(2.0**90)
_LOWER: tl.constexpr = tl.constexpr(2.0**-90)


@triton.jit
def _power(top):
    """The power of two that brings a line whose largest element is ``top`` into range."""
    return tl.where(top < _SMALL, _RAISE, tl.where(top > _LARGE, _LOWER, 1.0))


@triton.jit
def _inverse(power):
    return tl.where(power > 1.0, _LOWER, tl.where(power < 1.0, _RAISE, 1.0))


@triton.jit
def _number(value):
    """A float, or what a 0-d tensor holds."""
    if value.dtype.is_ptr():
        return tl.load(value)
    else:
        return value


@triton.jit
def _steps(O, N, group, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many tiles cover a program's lines: GROUPS of columns, or BLOCK_M rows if 0."""
    if GROUPS == 0:
        return tl.cdiv(N, BLOCK_N)
    else:
        return tl.cdiv(O, BLOCK_M) * tl.cdiv(GROUPS * group, BLOCK_N)


@triton.jit
def _place(
    step, O, N, group, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The rows and columns of a step's tile, and which of them exist."""
    first = tl.program_id(0)
    rm = tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    if GROUPS == 0:
        rows = first * BLOCK_M + rm
        columns = step * BLOCK_N + rn
        return rows, columns, rows < O, columns < N
    else:
        width = GROUPS * group
        across = tl.cdiv(width, BLOCK_N)
        rows = step // across * BLOCK_M + rm
        place = step % across * BLOCK_N + rn
        columns = first * width + place
        return rows, columns, rows < O, (place < width) & (columns < N)


@triton.jit
def _read(source, rows, columns, inside, N):
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    return tl.load(source + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _merged(
    weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of weight [+ delta] [+ factor * up @ down], in fp32."""
    inside = ok_m[:, None] & ok_n[None, :]
    tile = _read(weight, rows, columns, inside, N)
    if delta is not None:
        tile += _read(delta, rows, columns, inside, N)
    if up is not None:
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        rr = tl.arange(0, BLOCK_R)
        for r in range(0, R, BLOCK_R):
            ok_r = rr < R - r
            u = tl.load(
                up + rows.to(tl.int64)[:, None] * R + (r + rr)[None, :],
                mask=ok_m[:, None] & ok_r[None, :], other=0.0,
            ).to(COMPUTE)  # fmt: skip
            d = tl.load(
                down + (r + rr).to(tl.int64)[:, None] * N + columns[None, :],
                mask=ok_r[:, None] & ok_n[None, :], other=0.0,
            ).to(COMPUTE)  # fmt: skip
            product = tl.dot(u, d, product, input_precision=PRECISION)
        tile += _number(factor) * product
    return tile


@triton.jit
def _largest(tile, GROUPS: tl.constexpr):
    return tl.max(tl.abs(tile), axis=1 if GROUPS == 0 else 0)


@triton.jit
def _summed(tile, GROUPS: tl.constexpr):
    return tl.sum(tile, axis=1 if GROUPS == 0 else 0)


@triton.jit
def _along(vector, GROUPS: tl.constexpr):
    """A line's value as a factor of its tile."""
    if GROUPS == 0:
        return vector[:, None]
    else:
        return vector[None, :]


@triton.jit
def _joined(value, group, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, MAX: tl.constexpr):
    """For each column, the sum (or maximum) over all columns of its group."""
    if GROUPS == 0 or GROUPS == BLOCK_N:  # a line is one row or one column
        return value
    elif GROUPS == 1:
        return tl.zeros_like(value) + (tl.max(value, axis=0) if MAX else tl.sum(value, axis=0))
    else:
        column = tl.arange(0, BLOCK_N) // group
        shared = tl.where(column[:, None] == column[None, :], value[None, :], 0.0)
        return tl.max(shared, axis=1) if MAX else tl.sum(shared, axis=1)


@triton.jit
def _unit(tile, norm, GROUPS: tl.constexpr):
    """tile / norm, line by line; 0 where the norm is 0. No intermediate overflows."""
    power = _power(norm)
    none = norm == 0.0  # a NaN is not, so that it reaches the whole line
    inverse = tl.where(none, 0.0, tl.div_rn(1.0, tl.where(none, 1.0, norm * power)))
    return tile * _along(power, GROUPS) * _along(inverse, GROUPS)


@triton.jit
def _ratio(magnitude, norm):
    none = norm == 0.0
    return tl.where(none, 0.0, tl.div_rn(magnitude, tl.where(none, 1.0, norm)))


@kernel
def _rescale(
    weight, magnitude, delta, up, down, factor, multiplier, norm, out, group,
    O, N, R: tl.constexpr,
    GROUPS: tl.constexpr, ONE_STEP: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    steps = 1 if ONE_STEP else _steps(O, N, group, GROUPS, BLOCK_M, BLOCK_N)
    rows, columns, ok_m, ok_n = _place(0, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
    tile = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if ONE_STEP:
        tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                       COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        top = _largest(tile, GROUPS)
        scaled = tile * _along(_power(top), GROUPS)
        total = _summed(scaled * scaled, GROUPS)
    else:
        top = tl.zeros((BLOCK_M if GROUPS == 0 else BLOCK_N,), tl.float32)
        total = top
        for step in tl.range(0, steps, num_stages=STAGES):
            rows, columns, ok_m, ok_n = _place(step, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
            tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                           COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            peak = tl.maximum(top, _largest(tile, GROUPS))
            change = _power(peak) * _inverse(_power(top))
            scaled = tile * _along(_power(peak), GROUPS)
            total = total * change * change + _summed(scaled * scaled, GROUPS)
            top = peak
    peak = _joined(top, group, GROUPS, BLOCK_N, True)
    change = _power(peak) * _inverse(_power(top))
    total = _joined(total * change * change, group, GROUPS, BLOCK_N, False)
    length = tl.sqrt_rn(total) * _inverse(_power(peak))

    rows, columns, ok_m, ok_n = _place(0, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
    if GROUPS == 0:
        line = rows
        ok = ok_m
        first = ok_m
    else:
        line = columns // group
        ok = ok_n
        first = ok_n & (columns % group == 0)
    tl.store(norm + line, length, mask=first)
    if out is not None:
        s = _number(multiplier)
        m = tl.load(magnitude + line, mask=ok, other=0.0).to(tl.float32)
        c = _along(s * _ratio(m, length) + (1.0 - s), GROUPS)
        for step in tl.range(0, steps, num_stages=STAGES):
            if not ONE_STEP:
                rows, columns, ok_m, ok_n = _place(step, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
                tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                               COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            at = rows.to(tl.int64)[:, None] * N + columns[None, :]
            inside = ok_m[:, None] & ok_n[None, :]
            tl.store(out + at, (tile * c).to(out.dtype.element_ty), mask=inside)


@kernel
def _rescale_back(
    grad, weight, magnitude, delta, up, down, factor, multiplier, norm,
    grad_weight, grad_delta, grad_magnitude, made, group,
    O, N, L, R: tl.constexpr,
    GROUPS: tl.constexpr, ONE_STEP: tl.constexpr, DETACH: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    steps = 1 if ONE_STEP else _steps(O, N, group, GROUPS, BLOCK_M, BLOCK_N)
    rows, columns, ok_m, ok_n = _place(0, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
    if GROUPS == 0:
        line = rows
        ok = ok_m
        first = ok_m
    else:
        line = columns // group
        ok = ok_n
        first = ok_n & (columns % group == 0)
    length = tl.load(norm + line, mask=ok, other=0.0)
    unit = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    g = unit
    radial = tl.zeros((BLOCK_M if GROUPS == 0 else BLOCK_N,), tl.float32)
    # The first pass is needed only for what it sums.
    if grad_magnitude is not None or not DETACH or ONE_STEP:
        for step in tl.range(0, steps, num_stages=STAGES):
            if not ONE_STEP:
                rows, columns, ok_m, ok_n = _place(step, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
            tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                           COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            unit = _unit(tile, length, GROUPS)
            g = _read(grad, rows, columns, ok_m[:, None] & ok_n[None, :], N)
            radial += _summed(g * unit, GROUPS)
    radial = _joined(radial, group, GROUPS, BLOCK_N, False)

    s = _number(multiplier)
    if grad_magnitude is not None:
        inner = (s * radial).to(grad_magnitude.dtype.element_ty)
        tl.store(grad_magnitude + line, inner, mask=first)
    if made is not None or grad_weight is not None or grad_delta is not None:
        m = tl.load(magnitude + line, mask=ok, other=0.0).to(tl.float32)
        ratio = _ratio(m, length)
        along = s * ratio + (1.0 - s)
        back = -s * ratio * radial
        if DETACH:
            back = radial * 0.0
        if made is not None:
            tl.store(made + line, along, mask=first)
            tl.store(made + L + line, back, mask=first)
        if grad_weight is not None or grad_delta is not None:
            for step in tl.range(0, steps, num_stages=STAGES):
                if not ONE_STEP:
                    rows, columns, ok_m, ok_n = _place(step, O, N, group, GROUPS, BLOCK_M, BLOCK_N)
                    g = _read(grad, rows, columns, ok_m[:, None] & ok_n[None, :], N)
                    tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n,
                                   N, R, COMPUTE, PRECISION, BLOCK_M, BLOCK_N,
                                   BLOCK_R)  # fmt: skip
                    unit = _unit(tile, length, GROUPS)
                value = g * _along(along, GROUPS) + unit * _along(back, GROUPS)
                at = rows.to(tl.int64)[:, None] * N + columns[None, :]
                inside = ok_m[:, None] & ok_n[None, :]
                if grad_weight is not None:
                    tl.store(grad_weight + at, value.to(grad_weight.dtype.element_ty), mask=inside)
                if grad_delta is not None:
                    tl.store(grad_delta + at, value.to(grad_delta.dtype.element_ty), mask=inside)


# -------------------------------------------------------------------------------- launchers

Tensor = torch.Tensor
Number = float | torch.Tensor


def precision(policy: Policy, length: int, wide: bool = False) -> str:
    """Triton's input_precision of a product: a triple of TF32 for operands kept in fp32."""
    if policy.tf32 or (policy.compute is not torch.float32 and not wide):
        return "tf32"
    return "ieee" if length < MIN_TRIPLE or torch.version.hip else "tf32x3"


def _options(plan: Plan, policy: Policy, rank: int) -> dict[str, Any]:
    return {
        "R": rank,
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": precision(policy, rank),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": max(16, plan.block_k),
        "STAGES": min(plan.num_stages, 2) if torch.version.hip else plan.num_stages,
        "num_warps": plan.num_warps,
        "num_stages": 1,  # of the loop over the rank: the loops over tiles say their own
    }


def _grid(weight: Tensor, group: int, plan: Plan) -> tuple[int, int, bool]:
    """Programs, groups a program (0: rows), and whether one tile holds a program's lines."""
    (n_out, width), block_n = weight.shape, plan.block_n
    if not group:
        return triton.cdiv(n_out, plan.block_m), 0, width <= block_n
    groups = max(1, block_n // group)
    one_step = n_out <= plan.block_m and groups * group <= block_n
    return triton.cdiv(width, groups * group), groups, one_step


@prepared
def rescale(
    weight: Tensor,
    magnitude: Tensor | None,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    multiplier: Number,
    norm: Tensor,
    out: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """norm = the norms of M's lines, out = M * (multiplier * (magnitude / norm - 1) + 1).

    M (O, N) is ``weight`` [+ ``delta``] [+ ``factor`` * ``up`` (O, r) @ ``down`` (r, N)], all
    row-major. A line is a row where ``group`` is 0, else ``group`` neighbouring columns.
    ``magnitude`` and ``norm`` (fp32) have one element a line. Without ``out`` only the norms.
    """
    rank = 0 if up is None else up.shape[1]
    programs, groups, one_step = _grid(weight, group, plan)
    options = {"GROUPS": groups, "ONE_STEP": one_step} | _options(plan, policy, rank)
    args = (weight, magnitude, delta, up, down, factor, multiplier, norm, out, group)
    return _rescale.prepare((programs,), args, options, weight.shape)


@prepared
def rescale_back(
    grad: Tensor,
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    multiplier: Number,
    norm: Tensor,
    grad_weight: Tensor | None,
    grad_delta: Tensor | None,
    grad_magnitude: Tensor | None,
    made: Tensor | None,
    group: int,
    detach: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Gradients of :func:`rescale`, whose operands come first, with the norms it made.

    The gradient of M is ``made[0] * grad + made[1] * M / norm``, line by line. It is stored into
    ``grad_weight`` and ``grad_delta``, where they are wanted, and its two factors into ``made``
    (2, lines), fp32. With ``detach`` the norm is taken for a constant.
    """
    rank = 0 if up is None else up.shape[1]
    programs, groups, one_step = _grid(weight, group, plan)
    options = {"GROUPS": groups, "ONE_STEP": one_step, "DETACH": detach}
    options |= _options(plan, policy, rank)
    sizes = (*weight.shape, norm.shape[0])

    operands = (grad, weight, magnitude, delta, up, down, factor, multiplier, norm)
    args = (*operands, grad_weight, grad_delta, grad_magnitude, made, group)
    launch = _rescale_back.prepare((programs,), args, options, sizes)
    return lambda *args: launch(*args[:-1])  # all but detach
