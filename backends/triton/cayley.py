"""The Cayley solve of a rotation's blocks, in fp64: D = R - I = 2 (I - Q)^-1 Q."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import kernel


@triton.jit
def _entries(source, block, r, c, SIZE, size, FIRST: tl.constexpr):
    """Entries (r, c) of [I - Q | 2 Q], c up to 2 * size; the identity beyond the block's size.

    SIZE, a multiple of the tile, is where 2 Q's columns start. ``source`` is Q where FIRST, else
    both halves, of ``size`` columns each.
    """
    right = c >= SIZE
    col = tl.where(right, c - SIZE, c)
    ok = (block >= 0) & (r < size) & (col < size)
    unit = tl.where((r == col) & ~right, 1.0, 0.0).to(tl.float64)
    if FIRST:
        q = tl.load(source + (block * size + r) * size + col, mask=ok, other=0.0)
        return tl.where(right, 2.0 * q, -q) + unit
    else:
        at = (block * size + r) * (2 * size) + col + tl.where(right, size, 0)
        return tl.where(ok, tl.load(source + at, mask=ok, other=0.0), unit)


@kernel
def _eliminate(
    source, target,
    count, size, step, tiles,
    NB: tl.constexpr, TILE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """One step of a block Gauss-Jordan elimination, for one tile of [I - Q | 2 Q].

    No pivot is small: I - Q and its Schur complements have a symmetric part of at least I.
    """
    which = tl.program_id(0) * NB + tl.arange(0, NB)
    which = tl.where(which < count, which, -1).to(tl.int64)
    t = tl.arange(0, TILE)
    i, j = t[None, :, None], t[None, None, :]
    block = which[:, None, None]
    SIZE = tiles * TILE
    at = step * TILE
    # The inverse of the tile on the diagonal, in place.
    p = _entries(source, block, at + i, at + j, SIZE, size, FIRST)
    for k in tl.range(0, TILE):
        col = tl.sum(tl.where(j == k, p, 0.0), axis=2)[:, :, None]
        row = tl.sum(tl.where(i == k, p, 0.0), axis=1)[:, None, :]
        pivot = 1.0 / tl.sum(tl.where(j == k, row, 0.0), axis=2)[:, :, None]
        row *= pivot
        rest = tl.where(j == k, -col * pivot, p - col * row)
        p = tl.where(i == k, tl.where(j == k, pivot, row), rest)
    # This tile's columns of the rows that are eliminated: y = p @ [I - Q | 2 Q].
    c = (step + 1 + tl.program_id(2)) * TILE + j
    rows = _entries(source, block, at + i, c, SIZE, size, FIRST)
    y = tl.zeros((NB, TILE, TILE), tl.float64)
    for k in tl.range(0, TILE):
        col = tl.sum(tl.where(j == k, p, 0.0), axis=2)[:, :, None]
        y += col * tl.sum(tl.where(i == k, rows, 0.0), axis=1)[:, None, :]
    r = tl.program_id(1) * TILE + i
    value = y
    if not ONE:
        if tl.program_id(1) != step:
            value = _entries(source, block, r, c, SIZE, size, FIRST)
            cols = _entries(source, block, r, at + j, SIZE, size, FIRST)
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
    q: torch.Tensor,
    source: torch.Tensor | None,
    target: torch.Tensor,
    step: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Step ``step`` of the solve D = 2 (I - Q)^-1 Q for every block, all fp64.

    ``q`` (n, s, s). A step eliminates ``plan.block_n`` columns of [I - Q | 2 Q]; between steps that
    is kept as (n, s, 2 s). The first has no source; the last one's ``target`` (n, s, s) takes D.
    fp64, so that growth of the entries, up to the square of Q, costs no digit that fp32 has.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    count, size, _ = q.shape
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
    args = (q if source is None else source, target)
    launch = _eliminate.prepare(grid, args, options, (count, size, step, tiles))
    return lambda q, source, target, step: launch(q if source is None else source, target)
