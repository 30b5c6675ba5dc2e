"""The small matrices of a rotation, in fp64: stages multiplied, packed, and their gradients.

Sizes are arguments, so that one build serves every shape; on CUDA there is one for each block size
and width of a group, whose sums are unrolled, and whose divisions are shifts.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import WIDEST, Pass

from .common import NAMES, build
from .rotation_layout import div, mod

#: Columns that go through the stages of a butterfly together, rows at once: one for each thread.
COLS, ROWS = 8, 32
#: Entries of a gradient that a program sums, and neighbouring terms of each at once.
ENTRIES, SHARES = 64, 4
#: Elements that a program packs, and its threads.
PACKED, PACKERS = 1024, 256
#: Elements that a program sums shares of, and its threads.
SUMMED, ADDERS = 256, 256


def _product(T: Any, stage: Any, group: Any, groups: Any, width: Any) -> Any:
    """Where the group's entries of the product from ``stage`` on start; see ``compose``."""
    before = T.cast(groups * width, "int64") * (2 * width - ((2 * width) >> stage))
    return before + T.cast(group, "int64") * (width * (width >> stage))


def _block(group: Any, within: Any, low: Any, per: Any) -> Any:
    """The number of a block among a stage's: of block ``within`` of a group that has ``per``."""
    return (div(group, low) * per + within) * low + mod(group, low)


def _reversed(y: Any, bits: Any) -> Any:
    """The number of up to 8 bits that are y's in reverse."""
    y = ((y & 0x55) << 1) | ((y >> 1) & 0x55)
    y = ((y & 0x33) << 2) | ((y >> 2) & 0x33)
    y = ((y & 0x0F) << 4) | (y >> 4)
    return y >> (8 - bits)


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
        KernelBuildError: the kernel can't be built.
    """
    size = part.size if scaled.is_cuda else None
    kernel = build(compose_kernel, (transposed, size, ROWS * COLS), scaled.device)

    def launch(scaled: torch.Tensor, found: torch.Tensor, part: Pass, transposed: bool) -> None:
        numbers = (part.stages, part.first, part.low, part.width, part.groups, scaled.shape[1])
        kernel(scaled.view(-1), found, part.size, *numbers)

    return launch


def compose_kernel(transposed: bool, width_of_block: int | None, threads: int) -> Any:
    """Some columns of one group through every stage: a stage mixes the rows of a column."""
    import tilelang.language as T

    blocks, entries = (T.dynamic(name, "int64") for name in ("blocks", "entries"))
    # For the C target alone: CUDA's build, which knows the size of a block, warns of nothing.
    begun = not transposed and width_of_block is None

    @T.prim_func
    def compose(
        scaled: T.Tensor((blocks,), "float64"),
        found: T.Tensor((entries,), "float64"),
        given: T.int32, stages: T.int32, first: T.int32, low: T.int32, width: T.int32,
        groups: T.int32, count: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width, COLS), groups, threads=threads) as (bx, group):
            T.annotate_min_blocks_per_sm(2)
            # What the stage before left, and what this one makes.
            held = T.alloc_shared((2, WIDEST, COLS), "float64")
            value = T.alloc_fragment((ROWS, COLS), "float64")
            # Looked up, where the index of every element would divide anew.
            units = T.alloc_shared((COLS,), "int32")
            own_block = T.alloc_shared((1,), "int32")
            size = given if width_of_block is None else width_of_block
            unit = size >> 1
            for q in T.Parallel(COLS):
                units[q] = _reversed(div(bx * COLS + q, unit), stages)
            own_block[0] = _block(group, 0, low, div(width, size))
            if begun:
                # The first stage reads nothing of it, which TileLang's check of what is read before
                # it is written can't see; one element written is enough for that.
                held[0, 0, 0] = 0
            if transposed:
                for tile in T.serial(T.ceildiv(width, ROWS)):
                    for a, q in T.Parallel(ROWS, COLS):
                        n, c = tile * ROWS + a, bx * COLS + q
                        if n < width and c < width:
                            at_first = _product(T, 0, group, groups, width)
                            held[0, n, q] = found[at_first + n * width + c]
            for at in T.serial(stages - 1 if transposed else stages):
                stage = at if transposed else stages - 1 - at
                target = stage + 1 if transposed else stage
                stored = width >> target
                now = at & 1
                begin = _product(T, target, group, groups, width)
                for tile in T.serial(T.ceildiv(stored, ROWS)):
                    for a, q in T.Parallel(ROWS, COLS):
                        n, c = tile * ROWS + a, bx * COLS + q
                        value[a, q] = 0
                        if n < stored and c < width:
                            half = (units[q] >> stage) & 1
                            outer = div(n, unit if transposed else size)
                            own = mod(n, unit)
                            inner = units[q] & ((T.int32(1) << stage) - 1)
                            block = own_block[0] + ((outer << stage) + inner) * low
                            entry = T.cast((first + stage) * count + block, "int64") * (size * size)
                            if transposed:
                                value[a, q] = held[now, (2 * outer + half) * unit + own, q]
                                for j in T.serial(size):
                                    row = (2 * outer + (j & 1)) * unit + (j >> 1)
                                    factor = scaled[entry + (2 * own + half) * size + j]
                                    value[a, q] += held[now, row, q] * factor
                            else:
                                bit = div(n, unit) & 1
                                j = 2 * own + bit
                                if outer == units[q] >> (stage + 1):
                                    k = 2 * mod(c, unit) + half
                                    value[a, q] = scaled[entry + k * size + j]
                                if at > 0:
                                    if bit == half:
                                        value[a, q] += held[now, outer * unit + own, q]
                                    for i in T.serial(unit):
                                        factor = scaled[entry + (2 * i + half) * size + j]
                                        value[a, q] += held[now, outer * unit + i, q] * factor
                            found[begin + n * width + c] = value[a, q]
                    for a, q in T.Parallel(ROWS, COLS):
                        held[1 - now, tile * ROWS + a, q] = value[a, q]

    return compose


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
        KernelBuildError: the kernel can't be built.
    """
    size = part.size if found.is_cuda else None
    kernel = build(stage_gradient_kernel, (size, ENTRIES * SHARES), found.device)

    def launch(found: torch.Tensor, grads: torch.Tensor, deltas: torch.Tensor, part: Pass) -> None:
        kernel(
            *(found, grads, deltas),
            *(part.stages, part.first, part.low, part.width, part.groups),
        )

    return launch


def stage_gradient_kernel(width_of_block: int | None, threads: int) -> Any:
    """ENTRIES entries of the gradients of one stage's blocks in one group."""
    import tilelang.language as T

    every, count = map(T.dynamic, ("every", "count"))
    size = width_of_block or T.dynamic("size")
    entries = T.dynamic("entries", "int64")

    @T.prim_func
    def stage_gradient(
        found: T.Tensor((entries,), "float64"),
        grads: T.Tensor((entries,), "float64"),
        deltas: T.Tensor((every, count, size, size), "float64"),
        stages: T.int32, first: T.int32, low: T.int32, width: T.int32, groups: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width * size, ENTRIES), groups, stages, threads=threads) as (
            bx, group, stage,
        ):  # fmt: skip
            share = T.alloc_fragment((ENTRIES, SHARES), "float64")
            total = T.alloc_shared((ENTRIES, SHARES), "float64")
            unit = size >> 1
            terms = T.if_then_else(stage < stages - 1, width >> (stage + 1), 0)
            for q, s in T.Parallel(ENTRIES, SHARES):
                e = bx * ENTRIES + q
                share[q, s] = 0
                if e < width * size:
                    within = div(e, size * size)
                    k, j = mod(div(e, size), size), mod(e, size)
                    outer, inner = within >> stage, within & ((T.int32(1) << stage) - 1)
                    row = (2 * outer + (j & 1)) * unit + (j >> 1)
                    grad = _product(T, stage, group, groups, width) + row * width
                    after = _product(T, stage + 1, group, groups, width)
                    after_row = after + (outer * unit + (k >> 1)) * width
                    # The columns that the row has entries in.
                    y = ((k & 1) << stage) + inner
                    start = _reversed(y, stages) * unit + s
                    if s == 0:  # I G^T
                        own = _reversed(((2 * outer) << stage) + y, stages) * unit + (k >> 1)
                        share[q, s] = grads[grad + own]
                    for tile in T.serial(T.ceildiv(terms, SHARES)):
                        if tile * SHARES + s < terms:
                            c = start + tile * SHARES
                            share[q, s] += found[after_row + c] * grads[grad + c]
            T.copy(share, total)
            for q in T.Parallel(ENTRIES):
                e = bx * ENTRIES + q
                if e < width * size:
                    within = div(e, size * size)
                    block = _block(group, within, low, div(width, size))
                    for s in T.serial(1, SHARES):
                        total[q, 0] += total[q, s]
                    at_k, at_j = mod(div(e, size), size), mod(e, size)
                    deltas[first + stage, block, at_k, at_j] = total[q, 0]

    return stage_gradient


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
        KernelBuildError: the kernel can't be built.
    """
    divided = power is not None
    sizes = (part.unit, part.width, part.padded) if matrix.is_cuda else None
    kernel = build(pack_kernel, (parts.dtype, divided, sizes, PACKERS), matrix.device)
    numbers = (part.padded.bit_length() - 1, part.pack, part.unit, part.stages)

    def launch(
        matrix: torch.Tensor, power: torch.Tensor | None, parts: torch.Tensor, part: Pass
    ) -> None:
        given = parts.new_empty(1, dtype=torch.float32) if power is None else power
        kernel(matrix, given, parts, *numbers)

    return launch


def pack_kernel(
    dtype: torch.dtype, divided: bool, sizes: tuple[int, int, int] | None, threads: int
) -> Any:
    """PACKED elements of one pack, in every part; a pack has 2^bits columns."""
    import tilelang.language as T

    groups, powers, pieces, packs = map(T.dynamic, ("groups", "powers", "pieces", "packs"))
    width, padded = map(T.dynamic, ("width", "padded")) if sizes is None else sizes[1:]
    stored = NAMES[dtype]

    @T.prim_func
    def pack(
        matrix: T.Tensor((groups, width, width), "float64"),
        power: T.Tensor((powers,), "float32"),
        parts: T.Tensor((pieces, packs, padded, padded), stored),
        bits: T.int32, pack: T.int32, given: T.int32, stages: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(padded * padded, PACKED), packs, threads=threads) as (bx, which):
            value = T.alloc_fragment((PACKED,), "float64")
            unit = given if sizes is None else sizes[0]
            for e in T.Parallel(PACKED):
                r, c = (bx * PACKED + e) >> bits, (bx * PACKED + e) & (padded - 1)
                within = div(r, width)
                group, first = which * pack + within, within * width
                value[e] = 0
                if within < pack and group < groups and c >= first and c - first < width:
                    p = c - first
                    column = _reversed(div(p, unit), stages) * unit + mod(p, unit)
                    value[e] = matrix[group, r - first, column]
                    if divided:
                        value[e] = value[e] / T.cast(power[which], "float64")
            for piece in T.serial(pieces):
                for e in T.Parallel(PACKED):
                    r, c = (bx * PACKED + e) >> bits, (bx * PACKED + e) & (padded - 1)
                    short = T.cast(T.cast(value[e], "float32"), stored)
                    if r < padded:
                        parts[piece, which, r, c] = short
                    value[e] -= T.cast(T.cast(short, "float32"), "float64")

    return pack


@prepared
def unpack(
    total: torch.Tensor, out: torch.Tensor, part: Pass, *, plan: Plan, policy: Policy
) -> Launch:
    """The sum of the shares of v^T g, by group.

    ``total`` (shares, packs, padded, padded) fp32, as ``gram`` leaves it; ``out`` (groups, width,
    width) fp64, its columns in Pass's order.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    sizes = (part.unit, part.width, part.padded) if total.is_cuda else None
    kernel = build(unpack_kernel, (sizes, ADDERS), total.device)

    def launch(total: torch.Tensor, out: torch.Tensor, part: Pass) -> None:
        kernel(total, out, part.pack, part.unit, part.stages)

    return launch


def unpack_kernel(sizes: tuple[int, int, int] | None, threads: int) -> Any:
    """SUMMED elements of one group, each the sum of its shares in order."""
    import tilelang.language as T

    shares, packs, groups = map(T.dynamic, ("shares", "packs", "groups"))
    width, padded = map(T.dynamic, ("width", "padded")) if sizes is None else sizes[1:]

    @T.prim_func
    def unpack(
        total: T.Tensor((shares, packs, padded, padded), "float32"),
        out: T.Tensor((groups, width, width), "float64"),
        pack: T.int32, given: T.int32, stages: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width * width, SUMMED), groups, threads=threads) as (bx, group):
            sums = T.alloc_fragment((SUMMED,), "float64")
            unit = given if sizes is None else sizes[0]
            for e in T.Parallel(SUMMED):
                r, c = div(bx * SUMMED + e, width), mod(bx * SUMMED + e, width)
                sums[e] = 0
                if r < width:
                    which, start = div(group, pack), mod(group, pack) * width
                    for share in T.serial(shares):
                        sums[e] += T.cast(total[share, which, start + r, start + c], "float64")
                    column = _reversed(div(c, unit), stages) * unit + mod(c, unit)
                    out[group, r, column] = sums[e]

    return unpack
