"""The small matrices of a rotation, in fp64: stages multiplied, packed, and their gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import Pass

from .common import kernel


@triton.jit
def _place(c, stage, unit):
    """Column c's block within the group, its place in it, and where the block's columns are.

    Place j of the block is column ``start + (j % 2) * step + j // 2``: the last two results.
    """
    low = 1 << stage
    y = c // unit
    inner = y % low
    outer = y // (2 * low)
    place = c % unit * 2 + y // low % 2
    return outer * low + inner, place, (outer * 2 * low + inner) * unit, low * unit


@triton.jit
def _block(group, within, low, per):
    """The number of a block among a stage's: of block ``within`` of a group that has ``per``."""
    return (group // low * per + within) * low + group % low


@kernel
def _compose(
    scaled, found,
    stages, first, low, unit, width, groups, count,
    SIZE: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Some rows of one group through every stage: a stage mixes the columns of a row.

    A stage gathers what this program stored at the stage before, hence the barriers.
    """
    group = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLS)[None, :]
    ok = (r < width) & (c < width)
    row = found + (group.to(tl.int64) * width + r) * width
    step = tl.cast(groups, tl.int64) * width * width
    for at in tl.range(0, stages - 1 if TRANSPOSED else stages):
        if TRANSPOSED:
            stage = stages - 1 - at
            before, after, known = row + stage * step, row + (stage - 1) * step, ok
        else:
            stage = at
            before, after, known = row + (stage - 1) * step, row + stage * step, ok & (stage > 0)
        within, place, start, stride = _place(c, stage, unit)
        block = ((first + stage) * count + _block(group, within, low, width // SIZE)).to(tl.int64)
        value = tl.load(before + c, mask=known, other=0.0)
        for k in tl.range(0, SIZE):
            column = start + k % 2 * stride + k // 2
            mixed = tl.load(before + column, mask=known, other=0.0)
            if TRANSPOSED:
                entry = (block * SIZE + k) * SIZE + place
            else:
                entry = (block * SIZE + place) * SIZE + k
                mixed += tl.where(column == r, 1.0, 0.0).to(tl.float64)
            value += mixed * tl.load(scaled + entry, mask=c < width, other=0.0)
        tl.store(after + c, value, mask=ok)
        tl.debug_barrier()


@prepared
def compose(
    scaled: torch.Tensor,
    found: torch.Tensor,
    part: Pass,
    transposed: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The products, less I, of the first 1, 2, ... stages I + S of a pass, or their gradients.

    ``scaled`` (m, n, b, b) holds S of every block, ``found`` (stages, groups, width, width) takes a
    product a stage, P = P' + S + P' S; rows are inputs and columns outputs. Where ``transposed``
    its last is the gradient of the last product and the others take theirs: G' = G + G S^T.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "SIZE": part.size,
        "COLS": plan.block_n,
        "ROWS": plan.block_m,
        "TRANSPOSED": transposed,
        "num_warps": plan.num_warps,
    }
    grid = (part.groups, triton.cdiv(part.width, plan.block_m))
    shape = (part.low, part.unit, part.width, part.groups, scaled.shape[1])
    fixed = (part.stages, part.first, *shape)
    launch = _compose.prepare(grid, (scaled, found), options, fixed)
    return lambda scaled, found, part, transposed: launch(scaled, found)


@kernel
def _stage_gradient(
    found, grads, deltas,
    first, low, unit, width, groups, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of the gradients of one stage's blocks in one group."""
    group, stage = tl.program_id(1), tl.program_id(2)
    q = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, k = q // SIZE, q % SIZE
    within, place, start, stride = _place(c, stage, unit)
    column = (start + k % 2 * stride + k // 2)[None, :]
    ok = (c < width)[None, :]
    step = tl.cast(groups, tl.int64) * width * width
    grad = grads + stage * step + group.to(tl.int64) * width * width
    before = found + (stage - 1) * step + group.to(tl.int64) * width * width
    total = tl.zeros((ROWS, BLOCK), tl.float64)
    for tile in tl.range(0, tl.cdiv(width, ROWS)):
        r = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = ok & (r < width)
        mixed = tl.where(column == r, 1.0, 0.0).to(tl.float64)
        mixed += tl.load(before + r * width + column, mask=inside & (stage > 0), other=0.0)
        total += mixed * tl.load(grad + r * width + c[None, :], mask=inside, other=0.0)
    block = ((first + stage) * count + _block(group, within, low, width // SIZE)).to(tl.int64)
    tl.store(deltas + (block * SIZE + place) * SIZE + k, tl.sum(total, axis=0), mask=c < width)


@prepared
def stage_gradient(
    found: torch.Tensor,
    grads: torch.Tensor,
    deltas: torch.Tensor,
    part: Pass,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradient of every block of a pass's stages, into its place in ``deltas`` (m, n, b, b).

    ``found`` and ``grads`` (stages, groups, width, width) are the products, less I, and their
    gradients, as ``compose`` leaves them: dS = (I + P')^T G at the block's entries.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "SIZE": part.size,
        "BLOCK": plan.block_n,
        "ROWS": plan.block_k,
        "num_warps": plan.num_warps,
    }
    grid = (triton.cdiv(part.width * part.size, plan.block_n), part.groups, part.stages)
    fixed = (part.first, part.low, part.unit, part.width, part.groups, deltas.shape[1])
    launch = _stage_gradient.prepare(grid, (found, grads, deltas), options, fixed)
    return lambda found, grads, deltas, part: launch(found, grads, deltas)


@kernel
def _pack(
    matrix, power, parts,
    width, pack, groups, packs,
    PARTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of one pack, in every part."""
    which = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, PADDED)[None, :]
    group = which * pack + r // width
    ok = (r // width == c // width) & (r // width < pack) & (group < groups)
    at = (group.to(tl.int64) * width + r % width) * width + c % width
    value = tl.load(matrix + at, mask=ok, other=0.0)
    if power is not None:
        value /= tl.load(power + which).to(tl.float64)
    for k in tl.static_range(PARTS):
        piece = value.to(tl.float32).to(parts.dtype.element_ty)
        plane = (k * tl.cast(packs, tl.int64) + which) * PADDED * PADDED
        tl.store(parts + plane + r * PADDED + c, piece)
        value -= piece.to(tl.float32).to(tl.float64)


@prepared
def pack(
    matrix: torch.Tensor,
    power: torch.Tensor | None,
    parts: torch.Tensor,
    part: Pass,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """M of every group, on the diagonal of its pack, in parts of fewer digits whose sum it is.

    ``matrix`` (groups, width, width) fp64; ``power`` (packs,) fp32 divides it, if given; ``parts``
    (parts, packs, padded, padded) in any dtype, zero beside the groups.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "PARTS": parts.shape[0],
        "PADDED": part.padded,
        "ROWS": plan.block_m,
        "num_warps": plan.num_warps,
    }
    grid = (part.packs, part.padded // plan.block_m)
    fixed = (part.width, part.pack, part.groups, part.packs)
    launch = _pack.prepare(grid, (matrix, power, parts), options, fixed)
    return lambda matrix, power, parts, part: launch(matrix, power, parts)
