"""DoRA: the gradient of W + s up down, tile by tile, contracted with up and down.

A tile of the gradient is fp32 and not rounded before its products. In bf16 it is split into bf16
parts, whose products with a factor are exact: two carry it to 2^-17, three to all of its 24 bits.
fp16 lacks the range for such parts: there, as in fp32, the product is one of fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel
from .dora import _along, _merged, _number, _read, _unit, factor_options, precision, tile_options

Tensor = torch.Tensor
Number = float | torch.Tensor


@triton.jit
def _gradient(
    weight, grad, delta, up, down, factor, norm, made, group, rows, columns, ok_m, ok_n, N, L,
    R: tl.constexpr, BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of M: made[0] * grad + made[1] * its unit vector."""
    tile = _merged(weight, delta, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                   COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
    if BY_COLUMN:
        line = columns // group
        ok = ok_n
    else:
        line = rows
        ok = ok_m
    length = tl.load(norm + line, mask=ok, other=0.0)
    value = _unit(tile, length, BY_COLUMN) * _along(
        tl.load(made + L + line, mask=ok, other=0.0), BY_COLUMN
    )
    if grad is not None:
        g = _read(grad, rows, columns, ok_m[:, None] & ok_n[None, :], N)
        value += g * _along(tl.load(made + line, mask=ok, other=0.0), BY_COLUMN)
    return value


@triton.jit
def _split(value, COMPUTE: tl.constexpr):
    """Three parts in COMPUTE that add up to an fp32 value; those not used cost nothing."""
    high = value.to(COMPUTE)
    rest = value - high.to(tl.float32)
    middle = rest.to(COMPUTE)
    low = (rest - middle.to(tl.float32)).to(COMPUTE)
    return high, middle, low


@triton.jit
def _times(high, middle, low, factor, PARTS: tl.constexpr):
    """The sum of the parts, times a factor; the least first, which loses nothing to the others."""
    if PARTS == 3:
        product = tl.dot(middle, factor, tl.dot(low, factor))
    else:
        product = tl.dot(middle, factor)
    return tl.dot(high, factor, product)


@triton.jit
def _times_parts(factor, high, middle, low, PARTS: tl.constexpr):
    """A factor times the sum of the parts; the least first."""
    if PARTS == 3:
        product = tl.dot(factor, middle, tl.dot(factor, low))
    else:
        product = tl.dot(factor, middle)
    return tl.dot(factor, high, product)


@kernel
def _contract(
    weight, grad, up, down, factor, norm, made, grad_weight, part_up, part_down, group,
    O, N, L, steps, R: tl.constexpr,
    BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, RANK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    block, strip, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rm, rn = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    rank = chunk * RANK + tl.arange(0, RANK)
    ok_r = rank < R
    DOWNWARDS: tl.constexpr = part_up is None and part_down is not None
    s = _number(factor)
    total = tl.zeros((RANK if DOWNWARDS else BLOCK_M, BLOCK_N if DOWNWARDS else RANK), tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        place = strip * steps + step
        rows = (place if DOWNWARDS else block) * BLOCK_M + rm
        columns = (block if DOWNWARDS else place) * BLOCK_N + rn
        ok_m, ok_n = rows < O, columns < N
        value = _gradient(weight, grad, None, up, down, factor, norm, made, group, rows, columns,
                          ok_m, ok_n, N, L, R, BY_COLUMN, COMPUTE, PRECISION,
                          BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        if grad_weight is not None:
            if chunk == 0:
                at = rows.to(tl.int64)[:, None] * N + columns[None, :]
                kept = value.to(grad_weight.dtype.element_ty)
                tl.store(grad_weight + at, kept, mask=ok_m[:, None] & ok_n[None, :])
        if PARTS > 1:
            high, middle, low = _split(value, COMPUTE)
        # Each product is a sum of its own: one chain over all columns would lose low bits.
        if part_down is not None:
            # up^T, not the tile, is turned: its product is stored along its rows, and with a small
            # rank it is none of warp groups, which would read a turned tile from registers.
            u = tl.load(
                up + rows.to(tl.int64)[None, :] * R + rank[:, None],
                mask=ok_r[:, None] & ok_m[None, :], other=0.0,
            ).to(COMPUTE)  # fmt: skip
            if PARTS > 1:
                sums = _times_parts(u, high, middle, low, PARTS)
            else:
                sums = tl.dot(u.to(tl.float32), value, input_precision=WIDE)
            if DOWNWARDS:
                total += sums
            else:
                at = (block.to(tl.int64) * R + rank)[:, None] * N + columns[None, :]
                tl.store(part_down + at, s * sums, mask=ok_r[:, None] & ok_n[None, :])
        if part_up is not None:
            d = tl.load(
                down + rank.to(tl.int64)[None, :] * N + columns[:, None],
                mask=ok_n[:, None] & ok_r[None, :], other=0.0,
            ).to(COMPUTE)  # fmt: skip
            if PARTS > 1:
                total += _times(high, middle, low, d, PARTS)
            else:
                total += tl.dot(value, d.to(tl.float32), input_precision=WIDE)
    if DOWNWARDS:
        columns = block * BLOCK_N + rn
        at = (strip.to(tl.int64) * R + rank)[:, None] * N + columns[None, :]
        tl.store(part_down + at, s * total, mask=ok_r[:, None] & (columns < N)[None, :])
    elif part_up is not None:
        rows = block * BLOCK_M + rm
        at = (strip * O.to(tl.int64) + rows)[:, None] * R + rank[None, :]
        tl.store(part_up + at, s * total, mask=(rows < O)[:, None] & ok_r[None, :])


def _parts(policy: Policy, *factors: Tensor) -> int:
    """How many 16-bit parts carry the gradient into a product; 1 means fp32 itself."""
    if policy.compute is not torch.bfloat16:
        return 1
    return 3 if any(t.dtype is torch.float32 for t in factors) else 2


@prepared
def contract(
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    down: Tensor,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    grad_weight: Tensor | None,
    part_up: Tensor | None,
    part_down: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Partial sums of factor * G @ down^T and factor * up^T @ G, in one pass over G.

    G (O, N), the gradient of M as ``rescale_back`` says, is not rounded; it is also stored into
    ``grad_weight`` where that is wanted. Without ``grad`` its first term is absent. A program goes
    along ``plan.splits`` strips of columns, of rows where only ``part_down`` is wanted. fp32
    ``part_up`` (strips, O, r); ``part_down`` (tiles along O, r, N), or (strips, r, N) alone.
    """
    (n_out, width), rank = weight.shape, up.shape[1]
    tiles_m, tiles_n = triton.cdiv(n_out, plan.block_m), triton.cdiv(width, plan.block_n)
    blocks, along = (tiles_n, tiles_m) if part_up is None and part_down is not None else (
        tiles_m, tiles_n
    )  # fmt: skip
    options = tile_options(plan) | factor_options(plan, policy, up)
    rank_tile = min(
        128 if policy.compute.itemsize == 2 else 32, max(16, triton.next_power_of_2(rank))
    )
    options |= {
        "BY_COLUMN": int(group > 0),
        "WIDE": precision(policy, min(plan.block_m, plan.block_n), wide=True),
        "PARTS": _parts(policy, up, down),
        "RANK": rank_tile,
    }
    none = part_up is None and part_down is None
    grid = (blocks, plan.splits, 1 if none else triton.cdiv(rank, rank_tile))
    args = (weight, grad, up, down, factor, norm, made, grad_weight, part_up, part_down, group)
    fixed = (n_out, width, norm.shape[0], triton.cdiv(along, plan.splits))
    return _contract.prepare(grid, args, options, fixed)
