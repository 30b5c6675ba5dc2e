"""The small matrices of a rotation, in fp64: stages multiplied, packed, and their gradients.

Sizes are arguments, so that one build serves every shape.
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

#: Rows that go through the stages of a butterfly together, by columns: one for each thread.
ROWS, COLS = 8, WIDEST
#: Entries of a gradient that a program sums, and shares of the rows for each.
ENTRIES, SHARES = 64, 4
#: Elements that a program packs, and its threads.
PACKED, PACKERS = 1024, 256


def _place(T: Any, c: Any, stage: Any, unit: Any) -> tuple[Any, Any, Any]:
    """Column c's block within the group, its place in it, and where the block's columns are.

    Place j of the block is column ``start + (j % 2) * step + j // 2``, for the result ``start`` and
    step = 2^stage * unit.
    """
    y = div(c, unit)
    inner, outer = y & ((T.int32(1) << stage) - 1), y >> (stage + 1)
    place = (c - y * unit) * 2 + ((y >> stage) & 1)
    return (outer << stage) + inner, place, ((outer << (stage + 1)) + inner) * unit


def _block(group: Any, within: Any, low: Any, per: Any) -> Any:
    """The number of a block among a stage's: of block ``within`` of a group that has ``per``."""
    return (div(group, low) * per + within) * low + mod(group, low)


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
        KernelBuildError: the kernel can't be built.
    """
    kernel = build(compose_kernel, (transposed, COLS), scaled.device)

    def launch(scaled: torch.Tensor, found: torch.Tensor, part: Pass, transposed: bool) -> None:
        kernel(scaled, found, part.first, part.low, part.unit)

    return launch


def compose_kernel(transposed: bool, threads: int) -> Any:
    """Some rows of one group through every stage: a stage mixes the columns of a row.

    A thread has one column, and keeps it in registers; others gather it, plus I, from ``line``.
    Of a narrow group, several rows lie side by side.
    """
    import tilelang.language as T

    names = ("every", "count", "size", "stages", "groups", "width")
    every, count, size, stages, groups, width = map(T.dynamic, names)

    @T.prim_func
    def compose(
        scaled: T.Tensor((every, count, size, size), "float64"),
        found: T.Tensor((stages, groups, width, width), "float64"),
        first: T.int32, low: T.int32, unit: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width, div(COLS, width) * ROWS), groups, threads=threads) as (
            by, group,
        ):  # fmt: skip
            T.annotate_min_blocks_per_sm(2)
            line = T.alloc_shared((ROWS, COLS), "float64")
            value = T.alloc_fragment((ROWS, COLS), "float64")
            factor = T.alloc_fragment((COLS,), "float64")
            c = T.alloc_fragment((COLS,), "int32")
            r = T.alloc_fragment((COLS,), "int32")
            ends = T.alloc_fragment((COLS,), "int32")
            block = T.alloc_fragment((COLS,), "int32")
            place = T.alloc_fragment((COLS,), "int32")
            start = T.alloc_fragment((COLS,), "int32")
            T.annotate_layout({value: T.Fragment((ROWS, COLS), forward_fn=lambda i, q: (q, i))})
            beside = div(COLS, width)
            for q in T.Parallel(COLS):
                c[q] = mod(q, width)
                r[q] = by * beside * ROWS + div(q, width)
                # Threads that are left over have no rows.
                ends[q] = T.if_then_else(q < beside * width, width, 0)
            for i, q in T.Parallel(ROWS, COLS):
                value[i, q] = 0
                if transposed:
                    if r[q] + i * beside < ends[q]:
                        value[i, q] = found[stages - 1, group, r[q] + i * beside, c[q]]
            for at in T.serial(stages - 1 if transposed else stages):
                stage = stages - 1 - at if transposed else at
                for i, q in T.Parallel(ROWS, COLS):
                    own = not transposed and c[q] == r[q] + i * beside
                    line[i, q] = value[i, q] + T.cast(own, "float64")
                for q in T.Parallel(COLS):
                    within, place[q], begin = _place(T, c[q], stage, unit)
                    block[q] = _block(group, within, low, div(width, size))
                    start[q] = begin + T.if_then_else(ends[q] > 0, q - c[q], 0)
                for k in T.serial(size):
                    for q in T.Parallel(COLS):
                        if transposed:
                            factor[q] = scaled[first + stage, block[q], k, place[q]]
                        else:
                            factor[q] = scaled[first + stage, block[q], place[q], k]
                    for i, q in T.Parallel(ROWS, COLS):
                        column = start[q] + (((k & 1) * unit) << stage) + (k >> 1)
                        value[i, q] += line[i, column] * factor[q]
                for i, q in T.Parallel(ROWS, COLS):
                    if r[q] + i * beside < ends[q]:
                        target = stage - 1 if transposed else stage
                        found[target, group, r[q] + i * beside, c[q]] = value[i, q]

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

    ``found`` and ``grads`` (stages, groups, width, width) are the products, less I, and their
    gradients, as ``compose`` leaves them: dS = (I + P')^T G at the block's entries.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    kernel = build(stage_gradient_kernel, (ENTRIES * SHARES,), found.device)

    def launch(found: torch.Tensor, grads: torch.Tensor, deltas: torch.Tensor, part: Pass) -> None:
        kernel(found, grads, deltas, part.first, part.low, part.unit)

    return launch


def stage_gradient_kernel(threads: int) -> Any:
    """ENTRIES entries of the gradients of one stage's blocks in one group."""
    import tilelang.language as T

    names = ("every", "count", "size", "stages", "groups", "width")
    every, count, size, stages, groups, width = map(T.dynamic, names)

    @T.prim_func
    def stage_gradient(
        found: T.Tensor((stages, groups, width, width), "float64"),
        grads: T.Tensor((stages, groups, width, width), "float64"),
        deltas: T.Tensor((every, count, size, size), "float64"),
        first: T.int32, low: T.int32, unit: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width * size, ENTRIES), groups, stages, threads=threads) as (
            bx, group, stage,
        ):  # fmt: skip
            share = T.alloc_fragment((SHARES, ENTRIES), "float64")
            total = T.alloc_shared((SHARES, ENTRIES), "float64")
            c = T.alloc_fragment((SHARES, ENTRIES), "int32")
            column = T.alloc_fragment((SHARES, ENTRIES), "int32")
            for s, q in T.Parallel(SHARES, ENTRIES):
                c[s, q] = div(bx * ENTRIES + q, size)
                k = mod(bx * ENTRIES + q, size)
                _, _, start = _place(T, c[s, q], stage, unit)
                column[s, q] = start + (((k & 1) * unit) << stage) + (k >> 1)
                share[s, q] = 0
                if s == 0 and c[s, q] < width:
                    share[s, q] = grads[stage, group, column[s, q], c[s, q]]  # I^T G
            if stage > 0:
                for tile in T.serial(T.ceildiv(width, SHARES)):
                    for s, q in T.Parallel(SHARES, ENTRIES):
                        r = tile * SHARES + s
                        if r < width and c[s, q] < width:
                            before = found[stage - 1, group, r, column[s, q]]
                            share[s, q] += before * grads[stage, group, r, c[s, q]]
            T.copy(share, total)
            for q in T.Parallel(ENTRIES):
                at, k = div(bx * ENTRIES + q, size), mod(bx * ENTRIES + q, size)
                if at < width:
                    within, place, _ = _place(T, at, stage, unit)
                    block = _block(group, within, low, div(width, size))
                    for s in T.serial(1, SHARES):
                        total[0, q] += total[s, q]
                    deltas[first + stage, block, place, k] = total[0, q]

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

    ``matrix`` (groups, width, width) fp64; ``power`` (packs,) fp32 divides it, if given; ``parts``
    (parts, packs, padded, padded) in any dtype, zero beside the groups.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    divided = power is not None
    kernel = build(pack_kernel, (parts.dtype, divided, PACKERS), matrix.device)
    numbers = (part.padded.bit_length() - 1, part.pack)

    def launch(
        matrix: torch.Tensor, power: torch.Tensor | None, parts: torch.Tensor, part: Pass
    ) -> None:
        given = parts.new_empty(1, dtype=torch.float32) if power is None else power
        kernel(matrix, given, parts, *numbers)

    return launch


def pack_kernel(dtype: torch.dtype, divided: bool, threads: int) -> Any:
    """PACKED elements of one pack, in every part; a pack has 2^bits columns."""
    import tilelang.language as T

    names = ("groups", "width", "powers", "pieces", "packs", "padded")
    groups, width, powers, pieces, packs, padded = map(T.dynamic, names)
    stored = NAMES[dtype]

    @T.prim_func
    def pack(
        matrix: T.Tensor((groups, width, width), "float64"),
        power: T.Tensor((powers,), "float32"),
        parts: T.Tensor((pieces, packs, padded, padded), stored),
        bits: T.int32, pack: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(padded * padded, PACKED), packs, threads=threads) as (bx, which):
            value = T.alloc_fragment((PACKED,), "float64")
            for e in T.Parallel(PACKED):
                r, c = (bx * PACKED + e) >> bits, (bx * PACKED + e) & (padded - 1)
                within = div(r, width)
                group, first = which * pack + within, within * width
                value[e] = 0
                if within < pack and group < groups and c >= first and c - first < width:
                    value[e] = matrix[group, r - first, c - first]
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
