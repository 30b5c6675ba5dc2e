"""The small matrices of a rotation, in fp64: stages multiplied, packed, and their gradients."""

# The tuples of a kernel grow.
# mypy: disable-error-code="assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import Pass

from .cayley import sum_of_shares
from .common import in_turn, kernel


@triton.jit
def _product(stage, group, groups, width):
    """Where the group's entries of the product from ``stage`` on start; see ``compose``."""
    before = tl.cast(groups, tl.int64) * width * (2 * width - (2 * width >> stage))
    return before + group.to(tl.int64) * width * (width >> stage)


@triton.jit
def _block(group, within, low, per):
    """The number of a block among a stage's: of block ``within`` of a group that has ``per``."""
    return (group // low * per + within) * low + group % low


@triton.jit
def _reversed(y, bits):
    """The number of up to 8 bits that are y's in reverse."""
    y = (y & 0x55) << 1 | (y >> 1 & 0x55)
    y = (y & 0x33) << 2 | (y >> 2 & 0x33)
    y = (y & 0x0F) << 4 | y >> 4
    return y >> (8 - bits)


@triton.jit
def _added(sums, factor, entry, mask, STEP: tl.constexpr, OWN: tl.constexpr):
    """Each of OWN sums and factor times its entry of S, which are STEP apart."""
    found = ()
    for r in tl.static_range(OWN):
        found += (sums[r] + factor * tl.load(entry + r * STEP, mask=mask, other=0.0),)
    return found


@kernel
def _compose(
    scaled, found,
    stages, first, low, width, groups, count,
    SIZE: tl.constexpr, OWN: tl.constexpr, ITEMS: tl.constexpr, COLS: tl.constexpr,
    CHUNK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Some columns of one group through every stage: a stage mixes the rows of a column.

    An item is OWN neighbouring rows, whose sums are of the same rows of the stage before: a thread
    makes them all, and loads those rows once. SIZE columns have the same blocks in every stage, and
    the same half of them in all but the last: up to that many, entries are loaded by row alone. A
    stage reads what this program stored at the one before, hence the barriers.
    """
    in_turn()
    UNIT: tl.constexpr = SIZE // 2
    TERMS: tl.constexpr = SIZE if TRANSPOSED else UNIT
    PER: tl.constexpr = (UNIT if TRANSPOSED else SIZE) // OWN  # items of one block
    group = tl.program_id(1)
    if COLS < 2 * SIZE:
        SPLIT: tl.constexpr = (SIZE + COLS - 1) // COLS
        beside = tl.program_id(0) // SPLIT
        q = tl.program_id(0) % SPLIT * COLS + tl.arange(0, COLS)[None, :]
        c = beside * SIZE + q
        inside = q < SIZE
    else:
        c = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
        beside, q = c // SIZE, c % SIZE
        inside = c < width
    y = _reversed(2 * beside, stages)
    base = _block(group, 0, low, width // SIZE).to(tl.int64)
    if not TRANSPOSED:
        # Of the last stage alone.
        near = found + _product(stages - 1, group, groups, width) + c
        block = (first + stages - 1) * tl.cast(count, tl.int64) + base + y * low
        entry = scaled + block * (SIZE * SIZE) + (2 * (q % UNIT) + q // UNIT) * SIZE
        for n0 in tl.range(0, SIZE, ITEMS):
            n = n0 + tl.arange(0, ITEMS)[:, None]
            ok = inside & (n < SIZE)
            value = tl.load(entry + 2 * (n % UNIT) + n // UNIT, mask=ok, other=0.0)
            tl.store(near + n * width, value, mask=ok)
        tl.debug_barrier()
    for at in tl.range(0, stages - 1):
        stage = at if TRANSPOSED else stages - 2 - at
        inner, half = y & ((1 << stage) - 1), y >> stage & 1
        near = found + _product(stage, group, groups, width) + c
        far = found + _product(stage + 1, group, groups, width) + c
        block = (first + stage) * tl.cast(count, tl.int64) + base + inner * low
        entries = scaled + (block * SIZE + half) * SIZE
        items = (width >> stage) // SIZE * PER
        for item0 in tl.range(0, items, ITEMS):
            item = item0 + tl.arange(0, ITEMS)[:, None]
            ok = inside & (item < items)
            known = item < items if COLS < 2 * SIZE else ok
            outer, own = item // PER, item % PER * OWN
            of_block = entries + (outer << stage).to(tl.int64) * low * (SIZE * SIZE)
            sums = ()
            if TRANSPOSED:
                rows = near + outer * SIZE * width
                of_block += 2 * own * SIZE
                for r in tl.static_range(OWN):
                    same = rows + (half * UNIT + own + r) * width
                    sums += (tl.load(same, mask=ok, other=0.0),)
                for t0 in tl.range(0, TERMS, CHUNK):
                    for step in tl.static_range(CHUNK):
                        t = t0 + step
                        mixed = tl.load(rows + (t % 2 * UNIT + t // 2) * width, mask=ok, other=0.0)
                        sums = _added(sums, mixed, of_block + t, known, 2 * SIZE, OWN)
                made = far + (outer * UNIT + own) * width
            else:
                rows = far + outer * UNIT * width
                bit, own = own // UNIT, own % UNIT
                of_block += 2 * own + bit
                mine = ok & (bit == half)
                for r in tl.static_range(OWN):
                    sums += (tl.load(rows + (own + r) * width, mask=mine, other=0.0),)
                # The column's 1 of S^T (I + N') is in this row of one outer.
                there = (q // UNIT << stages - 2 - stage) + (y >> stage + 1)
                one = tl.where(outer == there, q % UNIT, -1)
                for t0 in tl.range(0, TERMS, CHUNK):
                    for step in tl.static_range(CHUNK):
                        t = t0 + step
                        mixed = tl.load(rows + t * width, mask=ok, other=0.0)
                        mixed += tl.where(one == t, 1.0, 0.0)
                        sums = _added(sums, mixed, of_block + 2 * t * SIZE, known, 2, OWN)
                made = near + (outer * SIZE + bit * UNIT + own) * width
            for r in tl.static_range(OWN):
                tl.store(made + r * width, sums[r], mask=ok)
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
    """The products, less I, of the stages I + S of a pass from each on, or their gradients.

    ``scaled`` (m, n, b, b) holds S of every block. ``found`` (part.products,) takes the product of
    all stages, (groups, width, width), then that of all but the first, and so on; rows are inputs
    and columns outputs, so that N = S^T + N' + S^T N'. N' has entries (r, c) only where stages that
    remain lead from channel r to c: for the product from stage i on, row ``n`` of the (width >> i,
    width) that are stored is row n // unit * 2^i + y % 2^i, in units, for a column of unit y. The
    columns are in Pass's order: those beside each other are multiplied with the same entries of S.
    Where ``transposed`` the first is the gradient of the first product and the others take theirs,
    at those entries: G' = G + S G.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "SIZE": part.size,
        "OWN": plan.block_k,
        "ITEMS": plan.block_m,
        "COLS": plan.block_n,
        "CHUNK": _chunk(part.size if transposed else part.unit),
        "TRANSPOSED": transposed,
        "num_warps": plan.num_warps,
    }
    if not torch.version.hip:
        # Left alone, ptxas takes 40, and four loads of a step are on their way; with these 25.
        options["maxnreg"] = 128
    if plan.block_n < 2 * part.size:
        columns = part.width // part.size * triton.cdiv(part.size, plan.block_n)
    else:
        columns = triton.cdiv(part.width, plan.block_n)
    grid = (columns, part.groups)
    fixed = (part.stages, part.first, part.low, part.width, part.groups, scaled.shape[1])
    launch = _compose.prepare(grid, (scaled, found), options, fixed)
    return lambda scaled, found, part, transposed: launch(scaled, found)


def _chunk(count: int) -> int:
    """Terms of a sum that are loaded together: a divisor of their number."""
    return next(n for n in range(8, 0, -1) if count % n == 0)


@kernel
def _stage_gradient(
    found, grads, deltas,
    stages, first, low, width, groups, count,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """BLOCK entries of the gradients of one stage's blocks in one group."""
    in_turn()
    UNIT: tl.constexpr = SIZE // 2
    group, stage = tl.program_id(1), tl.program_id(2)
    e = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    within, k, j = e // (SIZE * SIZE), e // SIZE % SIZE, e % SIZE
    outer, inner, half = within >> stage, within & ((1 << stage) - 1), k % 2
    ok = e < width * SIZE
    grad = grads + _product(stage, group, groups, width)
    grad += ((2 * outer + j % 2) * UNIT + j // 2) * width
    after = found + _product(stage + 1, group, groups, width) + (outer * UNIT + k // 2) * width
    # I, then the columns that the row has entries in.
    y = (half << stage) + inner
    start = _reversed(y, stages) * UNIT
    own = _reversed((2 * outer << stage) + y, stages) * UNIT + k // 2
    total = tl.load(grad + own, mask=ok, other=0.0)
    sums = tl.zeros((ROWS, BLOCK), tl.float64)
    terms = tl.where(stage < stages - 1, width >> stage + 1, 0)
    for tile in tl.range(0, tl.cdiv(terms, ROWS)):
        q = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = ok & (q // 2 * 2 < terms)  # terms are even: two are loaded at once
        factor = tl.load(after + start + q, mask=inside, other=0.0)
        sums += factor * tl.load(grad + start + q, mask=inside, other=0.0)
    total += tl.sum(sums, axis=0)[None, :]
    block = (first + stage) * count + _block(group, within, low, width // SIZE)
    at = block.to(tl.int64) * (SIZE * SIZE) + e % (SIZE * SIZE)
    tl.store(deltas + at, total, mask=ok)


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

    ``found`` and ``grads`` (part.products,) are the products, less I, and their gradients, as
    ``compose`` leaves them: dS = (I + N') G^T at the block's entries.

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
    fixed = (part.stages, part.first, part.low, part.width, part.groups, deltas.shape[1])
    launch = _stage_gradient.prepare(grid, (found, grads, deltas), options, fixed)
    return lambda found, grads, deltas, part: launch(found, grads, deltas)


@kernel
def _pack(
    matrix, power, parts,
    stages, pack, groups, packs,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Some rows of one pack, in every part."""
    in_turn()
    which = tl.program_id(0)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, PADDED)[None, :]
    group = which * pack + r // WIDTH
    ok = (r // WIDTH == c // WIDTH) & (r // WIDTH < pack) & (group < groups)
    p = c % WIDTH
    column = _reversed(p // UNIT, stages) * UNIT + p % UNIT
    at = (group.to(tl.int64) * WIDTH + r % WIDTH) * WIDTH + column
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

    ``matrix`` (groups, width, width) fp64, its columns in Pass's order; ``power`` (packs,) fp32
    divides it, if given; ``parts`` (parts, packs, padded, padded) in any dtype, zero beside the
    groups, rows and columns by position.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "UNIT": part.unit,
        "WIDTH": part.width,
        "PARTS": parts.shape[0],
        "PADDED": part.padded,
        "ROWS": plan.block_m,
        "num_warps": plan.num_warps,
    }
    grid = (part.packs, part.padded // plan.block_m)
    fixed = (part.stages, part.pack, part.groups, part.packs)
    launch = _pack.prepare(grid, (matrix, power, parts), options, fixed)
    return lambda matrix, power, parts, part: launch(matrix, power, parts)


@kernel
def _unpack(
    total, out,
    shares, stages, pack, groups, packs,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the groups, each the sum of its shares in order."""
    in_turn()
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = e // WIDTH
    group, r, c = row // WIDTH, row % WIDTH, e % WIDTH
    first = group % pack * WIDTH
    at = total + (group // pack * PADDED + first + r).to(tl.int64) * PADDED + first + c
    ok = group < groups
    sums = sum_of_shares(at, shares, tl.cast(packs, tl.int64) * PADDED * PADDED, ok)
    column = _reversed(c // UNIT, stages) * UNIT + c % UNIT
    tl.store(out + row.to(tl.int64) * WIDTH + column, sums, mask=ok)


@prepared
def unpack(
    total: torch.Tensor, out: torch.Tensor, part: Pass, *, plan: Plan, policy: Policy
) -> Launch:
    """The sum of the shares of v^T g, by group.

    ``total`` (shares, packs, padded, padded) fp32, as ``gram`` leaves it; ``out`` (groups, width,
    width) fp64, its columns in Pass's order.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    options = {
        "UNIT": part.unit,
        "WIDTH": part.width,
        "PADDED": part.padded,
        "BLOCK": plan.block_n,
        "num_warps": plan.num_warps,
    }
    grid = (triton.cdiv(part.groups * part.width**2, plan.block_n),)
    fixed = (total.shape[0], part.stages, part.pack, part.groups, part.packs)
    launch = _unpack.prepare(grid, (total, out), options, fixed)
    return lambda total, out, part: launch(total, out)
