"""DoRA: a weight read row by row, rescaled to its magnitudes; and what all DoRA kernels share.

A program owns whole rows. It reads them once where they fit into registers; else the second time
from the cache, where its own first reading left them. dora_lines.py serves all other lines.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import MIN_TRIPLE, TL_DTYPE, in_turn, kernel

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
def _along(vector, BY_COLUMN: tl.constexpr):
    """A line's value as a factor of its tile."""
    if BY_COLUMN:
        return vector[None, :]
    else:
        return vector[:, None]


@triton.jit
def _unit(tile, norm, BY_COLUMN: tl.constexpr):
    """tile / norm, line by line; 0 where the norm is 0. No intermediate overflows."""
    power = _power(norm)
    none = norm == 0.0  # a NaN is not, so that it reaches the whole line
    inverse = tl.where(none, 0.0, tl.div_rn(1.0, tl.where(none, 1.0, norm * power)))
    return tile * _along(power, BY_COLUMN) * _along(inverse, BY_COLUMN)


@triton.jit
def _ratio(magnitude, norm):
    none = norm == 0.0
    return tl.where(none, 0.0, tl.div_rn(magnitude, tl.where(none, 1.0, norm)))


@triton.jit
def _row_tile(weight, delta, rows, columns, O, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of weight [+ delta], in fp32; its offsets and which of them exist."""
    inside = (rows < O)[:, None] & (columns < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tile = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if delta is not None:
        tile += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
    return tile, at, inside


@kernel
def _rescale(
    weight, magnitude, delta, multiplier, norm, out,
    O, N,
    ONE_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    width = BLOCK_N if ONE_STEP else N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    ok = rows < O
    tile, at, inside = _row_tile(weight, delta, rows, rn, O, N, BLOCK_M, BLOCK_N)
    peak = tl.max(tl.abs(tile), axis=1)
    scaled = tile * _power(peak)[:, None]
    total = tl.sum(scaled * scaled, axis=1)
    for start in tl.range(BLOCK_N, width, BLOCK_N, num_stages=STAGES):
        tile, at, inside = _row_tile(weight, delta, rows, start + rn, O, N, BLOCK_M, BLOCK_N)
        top = tl.maximum(peak, tl.max(tl.abs(tile), axis=1))
        change = _power(top) * _inverse(_power(peak))
        scaled = tile * _power(top)[:, None]
        total = total * change * change + tl.sum(scaled * scaled, axis=1)
        peak = top
    length = tl.sqrt_rn(total) * _inverse(_power(peak))
    tl.store(norm + rows, length, mask=ok)
    s = _number(multiplier)
    m = tl.load(magnitude + rows, mask=ok, other=0.0).to(tl.float32)
    c = (s * _ratio(m, length) + (1.0 - s))[:, None]
    for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
        if not ONE_STEP:
            tile, at, inside = _row_tile(weight, delta, rows, start + rn, O, N, BLOCK_M, BLOCK_N)
        tl.store(out + at, (tile * c).to(out.dtype.element_ty), mask=inside)


@kernel
def _rescale_back(
    grad, weight, magnitude, delta, multiplier, norm, grad_weight, grad_delta, grad_magnitude,
    O, N,
    ONE_STEP: tl.constexpr, DETACH: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    width = BLOCK_N if ONE_STEP else N
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = tl.arange(0, BLOCK_N)
    ok = rows < O
    length = tl.load(norm + rows, mask=ok, other=0.0)
    tile, at, inside = _row_tile(weight, delta, rows, rn, O, N, BLOCK_M, BLOCK_N)
    unit = _unit(tile, length, False)
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    radial = tl.sum(g * unit, axis=1)
    # More is needed only for what is summed.
    if grad_magnitude is not None or not DETACH:
        for start in tl.range(BLOCK_N, width, BLOCK_N, num_stages=STAGES):
            tile, at, inside = _row_tile(weight, delta, rows, start + rn, O, N, BLOCK_M, BLOCK_N)
            g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            radial += tl.sum(g * _unit(tile, length, False), axis=1)
    s = _number(multiplier)
    if grad_magnitude is not None:
        tl.store(grad_magnitude + rows, (s * radial).to(grad_magnitude.dtype.element_ty), mask=ok)
    if grad_weight is not None or grad_delta is not None:
        ratio = _ratio(tl.load(magnitude + rows, mask=ok, other=0.0).to(tl.float32), length)
        along = (s * ratio + (1.0 - s))[:, None]
        back = (-s * ratio * radial)[:, None]
        if DETACH:
            back = tl.zeros_like(back)
        for start in tl.range(0, width, BLOCK_N, num_stages=STAGES):
            if not ONE_STEP:
                tile, at, inside = _row_tile(
                    weight, delta, rows, start + rn, O, N, BLOCK_M, BLOCK_N
                )
                g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
                unit = _unit(tile, length, False)
            value = g * along + unit * back
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


def tile_options(plan: Plan) -> dict[str, Any]:
    return {
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "STAGES": min(plan.num_stages, 2) if torch.version.hip else plan.num_stages,
        "num_warps": plan.num_warps,
        "num_stages": 1,  # of the loop over the rank: the loops over tiles say their own
    }


def factor_options(plan: Plan, policy: Policy, up: Tensor | None) -> dict[str, Any]:
    """Those of tiles that :func:`_merged` makes."""
    rank = 0 if up is None else up.shape[1]
    return {
        "R": rank,
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": precision(policy, rank),
        "BLOCK_R": max(16, plan.block_k),
    }


@prepared
def rescale(
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    multiplier: Number,
    norm: Tensor,
    out: Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """norm = the norms of M's rows, out = M * (multiplier * (magnitude / norm - 1) + 1).

    M (O, N) is ``weight`` [+ ``delta``], row-major. ``magnitude`` and ``norm`` (fp32): (O,).
    """
    n_out, width = weight.shape
    options = {"ONE_STEP": width <= plan.block_n, **tile_options(plan)}
    args = (weight, magnitude, delta, multiplier, norm, out)
    return _rescale.prepare((triton.cdiv(n_out, plan.block_m),), args, options, (n_out, width))


@prepared
def rescale_back(
    grad: Tensor,
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    multiplier: Number,
    norm: Tensor,
    grad_weight: Tensor | None,
    grad_delta: Tensor | None,
    grad_magnitude: Tensor | None,
    detach: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Gradients of :func:`rescale`, whose operands come first, with the norms it made.

    The gradient of M is stored into ``grad_weight`` and ``grad_delta``, where they are wanted.
    With ``detach`` the norm is taken for a constant.
    """
    n_out, width = weight.shape
    options = {"ONE_STEP": width <= plan.block_n, "DETACH": detach, **tile_options(plan)}
    operands = (grad, weight, magnitude, delta, multiplier, norm)
    args = (*operands, grad_weight, grad_delta, grad_magnitude)
    grid = (triton.cdiv(n_out, plan.block_m),)
    launch = _rescale_back.prepare(grid, args, options, (n_out, width))
    return lambda *args: launch(*args[:-1])  # all but detach
