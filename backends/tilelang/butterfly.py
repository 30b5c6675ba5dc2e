"""The small matrices of a rotation, in fp64: stages multiplied, packed, and their gradients.

Sizes are arguments on a CPU, so that one build serves every shape. On CUDA a build knows its Pass:
an index with divisions, in 64 bits and checked, costs more than the entry that is there.
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
from .rotation_layout import block_number, div, mod, product_start, reversed_bits

#: Columns that go through the stages of a butterfly together, rows at once, and their threads.
COLS, ROWS, MIXERS = 8, 64, 256
#: Entries of a gradient that a program sums, and neighbouring terms of each at once.
ENTRIES, SHARES = 64, 4
#: Terms of a sum that a thread loads together.
TERMS = 4
#: Elements that a program packs, and its threads.
PACKED, PACKERS = 1024, 256
#: Elements that a program sums shares of, and its threads.
SUMMED, ADDERS = 1024, 256


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
    known = (part, scaled.numel()) if scaled.is_cuda else None
    kernel = build(compose_kernel, (transposed, known, MIXERS), scaled.device)

    def launch(scaled: torch.Tensor, found: torch.Tensor, part: Pass, transposed: bool) -> None:
        numbers = (part.stages, part.first, part.low, part.width, part.groups, scaled.shape[1])
        kernel(scaled.view(-1), found, part.size, *numbers)

    return launch


def compose_kernel(transposed: bool, known: tuple[Pass, int] | None, threads: int) -> Any:
    """Some columns of one group through every stage: a stage mixes the rows of a column.

    ``known``: the Pass and the number of entries of its blocks.
    """
    import tilelang.language as T

    part, blocks = known or (None, T.dynamic("blocks", "int64"))
    entries = T.dynamic("entries", "int64") if part is None else part.products
    index = "int64" if part is None else "int32"

    @T.macro
    def advance(
        at: Any, before: Any, after: Any, value: Any, units: Any, own_block: Any, scaled: Any,
        found: Any, bx: Any, group: Any, integers: Any,
    ) -> None:  # fmt: skip
        size, stages, first, low, width, groups, count = integers
        unit = size >> 1
        stage = at if transposed else stages - 1 - at
        target = stage + 1 if transposed else stage
        stored = width >> target
        begin = product_start(T, target, group, groups, width)
        for tile in T.serial(T.ceildiv(stored, ROWS)):
            # Rows beyond the last repeat it: no load waits for a branch.
            for a, q in T.Parallel(ROWS, COLS):
                n, c = T.min(tile * ROWS + a, stored - 1), bx * COLS + q
                half = (units[q] >> stage) & 1
                outer = div(n, unit if transposed else size)
                own = mod(n, unit)
                inner = units[q] & ((T.int32(1) << stage) - 1)
                block = own_block[0] + ((outer << stage) + inner) * low
                entry = T.cast((first + stage) * count + block, index) * (size * size)
                if transposed:
                    value[a, q] = before[(2 * outer + half) * unit + own, q]
                    for j in T.serial(size):
                        row = (2 * outer + (j & 1)) * unit + (j >> 1)
                        factor = scaled[entry + (2 * own + half) * size + j]
                        value[a, q] += before[row, q] * factor
                else:
                    bit = div(n, unit) & 1
                    j = 2 * own + bit
                    k = 2 * mod(c, unit) + half
                    here = outer == units[q] >> (stage + 1)
                    value[a, q] = T.if_then_else(here, scaled[entry + k * size + j], T.float64(0))
                    same = before[outer * unit + own, q]
                    value[a, q] += T.if_then_else(bit == half, same, T.float64(0))
                    for i in T.serial(unit):
                        factor = scaled[entry + (2 * i + half) * size + j]
                        value[a, q] += before[outer * unit + i, q] * factor
            for a, q in T.Parallel(ROWS, COLS):
                n, c = tile * ROWS + a, bx * COLS + q
                if n < stored and c < width:
                    found[begin + n * width + c] = value[a, q]
                    after[n, q] = value[a, q]

    @T.prim_func
    def compose(
        scaled: T.Tensor((blocks,), "float64"),
        found: T.Tensor((entries,), "float64"),
        a_size: T.int32, a_stages: T.int32, a_first: T.int32, a_low: T.int32, a_width: T.int32,
        a_groups: T.int32, a_count: T.int32,
    ) -> None:  # fmt: skip
        size = a_size if part is None else part.size
        stages = a_stages if part is None else part.stages
        first = a_first if part is None else part.first
        low = a_low if part is None else part.low
        width = a_width if part is None else part.width
        groups = a_groups if part is None else part.groups
        count = a_count if part is None else part.groups * (part.width // part.size)
        with T.Kernel(T.ceildiv(width, COLS), groups, threads=threads) as (bx, group):
            T.annotate_min_blocks_per_sm(4)
            # What the stage before left, and what this one makes.
            even = T.alloc_shared((WIDEST, COLS), "float64")
            odd = T.alloc_shared((WIDEST, COLS), "float64")
            value = T.alloc_fragment((ROWS, COLS), "float64")
            # Looked up, where the index of every element would divide anew.
            units = T.alloc_shared((COLS,), "int32")
            own_block = T.alloc_shared((1,), "int32")
            for q in T.Parallel(COLS):
                units[q] = reversed_bits(div(T.min(bx * COLS + q, width - 1), size >> 1), stages)
            own_block[0] = block_number(group, 0, low, div(width, size))
            for n, q in T.Parallel(WIDEST, COLS):
                even[n, q] = 0
                if transposed and n < width and bx * COLS + q < width:
                    at_first = product_start(T, 0, group, groups, width)
                    even[n, q] = found[at_first + n * width + bx * COLS + q]
            steps = stages - 1 if transposed else stages
            integers = (size, stages, first, low, width, groups, count)
            rest = (value, units, own_block, scaled, found, bx, group, integers)
            for pair in T.serial(T.ceildiv(steps, 2)):
                advance(2 * pair, even, odd, *rest)
                if 2 * pair + 1 < steps:
                    advance(2 * pair + 1, odd, even, *rest)

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
    known = (part, deltas.shape[0]) if found.is_cuda else None
    kernel = build(stage_gradient_kernel, (known, ENTRIES * SHARES), found.device)

    def launch(found: torch.Tensor, grads: torch.Tensor, deltas: torch.Tensor, part: Pass) -> None:
        kernel(
            *(found, grads, deltas),
            *(part.stages, part.first, part.low, part.width, part.groups),
        )

    return launch


def stage_gradient_kernel(known: tuple[Pass, int] | None, threads: int) -> Any:
    """ENTRIES entries of the gradients of one stage's blocks in one group.

    ``known``: the Pass and the number of all stages.
    """
    import tilelang.language as T

    part, every = known or (None, T.dynamic("every"))
    size, count = map(T.dynamic, ("size", "count"))
    entries = T.dynamic("entries", "int64")
    if part is not None:
        size, count, entries = part.size, part.groups * (part.width // part.size), part.products

    @T.prim_func
    def stage_gradient(
        found: T.Tensor((entries,), "float64"),
        grads: T.Tensor((entries,), "float64"),
        deltas: T.Tensor((every, count, size, size), "float64"),
        a_stages: T.int32, a_first: T.int32, a_low: T.int32, a_width: T.int32, a_groups: T.int32,
    ) -> None:  # fmt: skip
        stages = a_stages if part is None else part.stages
        first = a_first if part is None else part.first
        low = a_low if part is None else part.low
        width = a_width if part is None else part.width
        groups = a_groups if part is None else part.groups
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
                    grad = product_start(T, stage, group, groups, width) + row * width
                    after = product_start(T, stage + 1, group, groups, width)
                    after_row = after + (outer * unit + (k >> 1)) * width
                    # The columns that the row has entries in.
                    y = ((k & 1) << stage) + inner
                    start = reversed_bits(y, stages) * unit + s
                    if s == 0:  # I G^T
                        own = reversed_bits(((2 * outer) << stage) + y, stages) * unit + (k >> 1)
                        share[q, s] = grads[grad + own]
                    for tile in T.serial(T.ceildiv(terms, SHARES * TERMS)):
                        for t in T.unroll(TERMS):
                            at = (tile * TERMS + t) * SHARES
                            inside = at + s < terms
                            factor = T.if_then_else(
                                inside, found[after_row + start + at], T.float64(0)
                            )
                            share[q, s] += factor * T.if_then_else(
                                inside, grads[grad + start + at], T.float64(0)
                            )
            T.copy(share, total)
            for q in T.Parallel(ENTRIES):
                e = bx * ENTRIES + q
                if e < width * size:
                    within = div(e, size * size)
                    block = block_number(group, within, low, div(width, size))
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
    known = part if matrix.is_cuda else None
    kernel = build(pack_kernel, (parts.dtype, divided, known, PACKERS), matrix.device)
    numbers = (part.padded.bit_length() - 1, part.pack, part.unit, part.stages)

    def launch(
        matrix: torch.Tensor, power: torch.Tensor | None, parts: torch.Tensor, part: Pass
    ) -> None:
        given = parts.new_empty(1, dtype=torch.float32) if power is None else power
        kernel(matrix, given, parts, *numbers)

    return launch


def pack_kernel(dtype: torch.dtype, divided: bool, known: Pass | None, threads: int) -> Any:
    """PACKED elements of one pack, in every part; a pack has 2^bits columns."""
    import tilelang.language as T

    powers, pieces = map(T.dynamic, ("powers", "pieces"))
    groups, packs, width, padded = map(T.dynamic, ("groups", "packs", "width", "padded"))
    if known is not None:
        groups, packs, width, padded = known.groups, known.packs, known.width, known.padded
    stored = NAMES[dtype]

    @T.prim_func
    def pack(
        matrix: T.Tensor((groups, width, width), "float64"),
        power: T.Tensor((powers,), "float32"),
        parts: T.Tensor((pieces, packs, padded, padded), stored),
        a_bits: T.int32, a_pack: T.int32, a_unit: T.int32, a_stages: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(padded * padded, PACKED), packs, threads=threads) as (bx, which):
            value = T.alloc_fragment((PACKED,), "float64")
            bits = a_bits if known is None else known.padded.bit_length() - 1
            pack = a_pack if known is None else known.pack
            unit = a_unit if known is None else known.unit
            stages = a_stages if known is None else known.stages
            for e in T.Parallel(PACKED):
                r, c = (bx * PACKED + e) >> bits, (bx * PACKED + e) & (padded - 1)
                within = div(r, width)
                group, first = which * pack + within, within * width
                value[e] = 0
                if within < pack and group < groups and c >= first and c - first < width:
                    p = c - first
                    column = reversed_bits(div(p, unit), stages) * unit + mod(p, unit)
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
    kernel = build(unpack_kernel, (part if total.is_cuda else None, ADDERS), total.device)

    def launch(total: torch.Tensor, out: torch.Tensor, part: Pass) -> None:
        kernel(total, out, part.pack, part.unit, part.stages)

    return launch


def unpack_kernel(known: Pass | None, threads: int) -> Any:
    """SUMMED elements of one group, each the sum of its shares in order."""
    import tilelang.language as T

    shares = T.dynamic("shares")
    groups, packs, width, padded = map(T.dynamic, ("groups", "packs", "width", "padded"))
    if known is not None:
        groups, packs, width, padded = known.groups, known.packs, known.width, known.padded

    @T.prim_func
    def unpack(
        total: T.Tensor((shares, packs, padded, padded), "float32"),
        out: T.Tensor((groups, width, width), "float64"),
        a_pack: T.int32, a_unit: T.int32, a_stages: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width * width, SUMMED), groups, threads=threads) as (bx, group):
            T.annotate_min_blocks_per_sm(4)
            sums = T.alloc_fragment((SUMMED,), "float64")
            pack = a_pack if known is None else known.pack
            unit = a_unit if known is None else known.unit
            stages = a_stages if known is None else known.stages
            T.clear(sums)
            which, start = div(group, pack), mod(group, pack) * width
            for share in T.serial(shares):
                for e in T.Parallel(SUMMED):
                    r, c = div(bx * SUMMED + e, width), mod(bx * SUMMED + e, width)
                    if r < width:
                        sums[e] += T.cast(total[share, which, start + r, start + c], "float64")
            for e in T.Parallel(SUMMED):
                r, c = div(bx * SUMMED + e, width), mod(bx * SUMMED + e, width)
                if r < width:
                    column = reversed_bits(div(c, unit), stages) * unit + mod(c, unit)
                    out[group, r, column] = sums[e]

    return unpack
