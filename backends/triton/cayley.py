"""The Cayley solve of a rotation's blocks, D = R - I = 2 (I - Q)^-1 Q, and back; all in fp64."""

# The tuples of a kernel grow.
# mypy: disable-error-code="assignment,misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel


@triton.jit
def _entries(source, factor, block, r, c, SIZE, size, FIRST: tl.constexpr):
    """Entries (r, c) of [I - Q | 2 Q], c up to 2 * size; the identity beyond the block's size.

    SIZE, a multiple of the tile, is where 2 Q's columns start. ``source`` is B where FIRST, with Q
    = factor * (B - B^T), else both halves, of ``size`` columns each.
    """
    right = c >= SIZE
    col = tl.where(right, c - SIZE, c)
    ok = (block >= 0) & (r < size) & (col < size)
    unit = tl.where((r == col) & ~right, 1.0, 0.0).to(tl.float64)
    if FIRST:
        q = tl.load(source + (block * size + r) * size + col, mask=ok, other=0.0).to(tl.float64)
        q -= tl.load(source + (block * size + col) * size + r, mask=ok, other=0.0).to(tl.float64)
        q *= factor
        return tl.where(right, 2.0 * q, -q) + unit
    else:
        at = (block * size + r) * (2 * size) + col + tl.where(right, size, 0)
        return tl.where(ok, tl.load(source + at, mask=ok, other=0.0), unit)


@triton.jit
def _side_by_side(count, NB: tl.constexpr, TILE: tl.constexpr):
    """The blocks of a program, -1 beyond the last, and their rows and columns."""
    which = tl.program_id(0) * NB + tl.arange(0, NB)
    which = tl.where(which < count, which, -1).to(tl.int64)
    t = tl.arange(0, TILE)
    return which[:, None, None], t[None, :, None], t[None, None, :]


@triton.jit
def _of_column(row, j, k):
    """Entry k of a row of each block, along the row."""
    return tl.gather(row, j * 0 + k, 1)


@triton.jit
def _inverse_less_identity(rows, j, TILE: tl.constexpr):
    """(I + V)^-1 - I of the rows of V: no digit is lost to I, however small V is.

    ``rows`` are those of NB blocks, (NB, TILE) each, and ``j`` their columns. A step inverts one
    pivot of the tableau, of which the diagonal alone is kept less I, and turns the rows, so that
    the next pivot's is the first. Beyond a block, V is zero and stays so.
    """
    inverse = 1.0 / (1.0 + _of_column(rows[0], j, 0))
    for k in tl.range(0, TILE):
        here = j == k
        row = rows[0] * inverse
        factor = tl.where(here, inverse, row)
        turned = ()
        for i in tl.static_range(1, TILE):
            turned += (tl.where(here, 0.0, rows[i]) - _of_column(rows[i], j, k) * factor,)
        turned += (tl.where(here, -row, row),)
        # Here, so that it is on its way beside the sums above.
        inverse = 1.0 / (1.0 + _of_column(turned[0], j, (k + 1) % TILE))
        rows = turned
    return rows


@kernel
def _eliminate(
    source, held, target,
    count, size, step, tiles,
    NB: tl.constexpr, TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """One step of a block Gauss-Jordan elimination, for one tile of [I - Q | 2 Q].

    A block of ONE tile needs no right half: D = 2 ((I - Q)^-1 - I). No pivot is small: I - Q and
    its Schur complements have a symmetric part of at least I.
    """
    in_turn()
    block, i, j = _side_by_side(count, NB, TILE)
    factor = tl.full((1, 1, 1), 1.0, tl.float64)
    if held is not None:
        factor *= tl.load(held)
    if ONE:
        one = tl.reshape(block, (NB, 1))
        c = tl.broadcast_to(tl.arange(0, TILE)[None, :], (NB, TILE))
        rows = ()
        for k in tl.static_range(TILE):
            ok = (one >= 0) & (k < size) & (c < size)
            upper = tl.load(source + (one * size + k) * size + c, mask=ok, other=0.0)
            lower = tl.load(source + (one * size + c) * size + k, mask=ok, other=0.0)
            q = upper.to(tl.float64) - lower.to(tl.float64)
            rows += (-q * tl.reshape(factor, (1, 1)),)
        rows = _inverse_less_identity(rows, c, TILE)
        for k in tl.static_range(TILE):
            ok = (one >= 0) & (k < size) & (c < size)
            tl.store(target + (one * size + k) * size + c, 2.0 * rows[k], mask=ok)
        return
    SIZE = tiles * TILE
    at = step * TILE
    # The inverse of the tile on the diagonal, in place.
    p = _entries(source, factor, block, at + i, at + j, SIZE, size, FIRST)
    for k in tl.range(0, TILE):
        col = tl.sum(tl.where(j == k, p, 0.0), axis=2)[:, :, None]
        row = tl.sum(tl.where(i == k, p, 0.0), axis=1)[:, None, :]
        pivot = 1.0 / tl.sum(tl.where(j == k, row, 0.0), axis=2)[:, :, None]
        row *= pivot
        rest = tl.where(j == k, -col * pivot, p - col * row)
        p = tl.where(i == k, tl.where(j == k, pivot, row), rest)
    # This tile's columns of the rows that are eliminated: y = p @ [I - Q | 2 Q].
    c = (step + 1 + tl.program_id(2)) * TILE + j
    rows = _entries(source, factor, block, at + i, c, SIZE, size, FIRST)
    y = tl.zeros((NB, TILE, TILE), tl.float64)
    for k in tl.range(0, TILE):
        col = tl.sum(tl.where(j == k, p, 0.0), axis=2)[:, :, None]
        y += col * tl.sum(tl.where(i == k, rows, 0.0), axis=1)[:, None, :]
    r = tl.program_id(1) * TILE + i
    value = y
    if tl.program_id(1) != step:
        value = _entries(source, factor, block, r, c, SIZE, size, FIRST)
        cols = _entries(source, factor, block, r, at + j, SIZE, size, FIRST)
        for k in tl.range(0, TILE):
            col = tl.sum(tl.where(j == k, cols, 0.0), axis=2)[:, :, None]
            value -= col * tl.sum(tl.where(i == k, y, 0.0), axis=1)[:, None, :]
    right = c >= SIZE
    col = tl.where(right, c - SIZE, c)
    ok = (block >= 0) & (r < size) & (col < size)
    if LAST:
        tl.store(target + (block * size + r) * size + col, value, mask=ok)
    else:
        shift = tl.where(right, size, 0)
        tl.store(target + (block * size + r) * (2 * size) + col + shift, value, mask=ok)


@prepared
def eliminate(
    blocks: torch.Tensor,
    held: torch.Tensor | None,
    source: torch.Tensor | None,
    target: torch.Tensor,
    step: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Step ``step`` of the solve D = 2 (I - Q)^-1 Q for every block, Q = held * (B - B^T).

    ``blocks`` (n, s, s) hold B in any dtype, ``held`` is 0-d and fp64, or 1. A step eliminates
    ``plan.block_n`` columns of [I - Q | 2 Q]; between steps that is kept as (n, s, 2 s), fp64. The
    first has no source; the last one's ``target`` (n, s, s) takes D. fp64, so that growth of the
    entries, up to the square of Q, costs no digit that fp32 has.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    count, size, _ = blocks.shape
    tiles = triton.cdiv(size, plan.block_n)
    options = {
        "NB": plan.block_m,
        "TILE": plan.block_n,
        "FIRST": source is None,
        "LAST": step == tiles - 1,
        "ONE": tiles == 1,
        "num_warps": plan.num_warps,
    }
    grid = (triton.cdiv(count, plan.block_m), tiles, 2 * tiles - step - 1)
    args = (blocks if source is None else source, held, target)
    launch = _eliminate.prepare(grid, args, options, (count, size, step, tiles))
    return lambda blocks, held, source, target, step: launch(
        blocks if source is None else source, held, target
    )


@triton.jit
def sum_of_shares(at, shares, step, ok):
    """The fp64 sum of what ``at`` and every ``step`` after it points at, in order."""
    sums = tl.zeros(at.shape, tl.float64)
    for first in tl.range(0, shares, 4):
        for share in tl.static_range(4):  # loaded together
            inside = ok & (first + share < shares)
            sums += tl.load(at, mask=inside, other=0.0).to(tl.float64)
            at += step
    return sums


@kernel
def _cayley_gradient(
    delta, total, out,
    count, size, shares, packs, pack, padded,
    NB: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """out = Z - Z^T with Z = 2 N^T dD N^T, N = I + D / 2, of NB blocks; of one where DOT."""
    in_turn()
    block, i, j = _side_by_side(count, NB, TILE)
    start = block * size * size
    at = start + i * size + j
    ok = (block >= 0) & (i < size) & (j < size)
    first = block % pack * size
    held = total + (block // pack * padded + first + i) * padded + first + j
    middle = sum_of_shares(held, shares, tl.cast(packs, tl.int64) * padded * padded, ok)
    if DOT:
        unit = tl.where(i == j, 1.0, 0.0).to(tl.float64)
        n = tl.load(delta + at, mask=ok, other=0.0) * 0.5 + unit
        turned = tl.trans(tl.reshape(n, (TILE, TILE)))
        half = tl.dot(turned, tl.reshape(middle, (TILE, TILE)), out_dtype=tl.float64)
        z = tl.dot(half, turned, out_dtype=tl.float64)[None, :, :]
    else:
        half = tl.zeros((NB, TILE, TILE), tl.float64)
        z = tl.zeros((NB, TILE, TILE), tl.float64)
        ok_i, ok_j = (block >= 0) & (i < size), (block >= 0) & (j < size)
        for k in tl.range(0, TILE):  # unrolled, it spills on sm_80
            # Row k of N by rows of the result, row k of dD by its columns.
            n = tl.load(delta + start + k * size + i, mask=ok_i & (k < size), other=0.0) * 0.5
            n += tl.where(i == k, 1.0, 0.0).to(tl.float64)
            half += n * tl.sum(tl.where(i == k, middle, 0.0), axis=1)[:, None, :]
        for k in tl.static_range(TILE):
            n = tl.load(delta + start + j * size + k, mask=ok_j & (k < size), other=0.0) * 0.5
            n += tl.where(j == k, 1.0, 0.0).to(tl.float64)
            z += tl.sum(tl.where(j == k, half, 0.0), axis=2)[:, :, None] * n
    value = 2.0 * (z - tl.permute(z, (0, 2, 1)))
    tl.store(out + at, value.to(tl.float32).to(out.dtype.element_ty), mask=ok)


@prepared
def cayley_gradient(
    delta: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    pack: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradient of B from that of D, for blocks of one tile: dQ - dQ^T with dD = 2 N dQ N.

    ``delta`` (n, s, s) holds D, fp64; ``out`` is like it, in any dtype. dD is the sum over the
    shares of ``total`` (shares, packs, padded, padded), fp32 or fp64, with ``pack`` blocks on the
    diagonal of each matrix. N = (I - Q)^-1 = I + D / 2.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    count, size, _ = delta.shape
    options = {
        "NB": plan.block_m,
        "TILE": plan.block_n,
        # Triton has no fp64 products for AMD, nor for tiles below 16.
        "DOT": plan.block_m == 1 and plan.block_n >= 16 and torch.version.hip is None,
        "num_warps": plan.num_warps,
    }
    grid = (triton.cdiv(count, plan.block_m),)
    fixed = (count, size, total.shape[0], total.shape[1], pack, total.shape[2])
    launch = _cayley_gradient.prepare(grid, (delta, total, out), options, fixed)
    return lambda delta, total, out, pack: launch(delta, total, out)
