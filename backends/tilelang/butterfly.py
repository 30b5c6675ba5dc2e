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
from .rotation_layout import div, flat, mod

THREADS = 128
#: Elements of the rows that go through the stages of a butterfly together.
ROWS = 8 * WIDEST
#: Entries of a gradient that a program sums, and shares of the rows for each.
ENTRIES, SHARES = 32, 8
#: Elements that a program packs.
PACKED = 1024


def _place(T: Any, c: Any, stage: Any, unit: Any) -> tuple[Any, Any, Any, Any]:
    """Column c's block within the group, its place in it, and where the block's columns are.

    Place j of the block is column ``start + (j % 2) * step + j // 2``: the last two results.
    """
    low = T.int32(1) << stage
    y = div(c, unit)
    inner, outer = mod(y, low), div(y, 2 * low)
    place = mod(c, unit) * 2 + mod(div(y, low), 2)
    return outer * low + inner, place, (outer * 2 * low + inner) * unit, low * unit


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
    kernel = build(compose_kernel, (transposed, THREADS), scaled.device)
    shape = (part.size, part.first, part.low, part.unit, part.width, part.groups, scaled.shape[1])
    numbers = (part.stages, *shape, max(1, ROWS // part.width))

    def launch(scaled: torch.Tensor, found: torch.Tensor, part: Pass, transposed: bool) -> None:
        kernel(flat(scaled), flat(found), *numbers)

    return launch


def compose_kernel(transposed: bool, threads: int) -> Any:
    """Some rows of one group through every stage: a stage mixes the columns of a row."""
    import tilelang.language as T

    n, m = T.dynamic("n", "int64"), T.dynamic("m", "int64")

    @T.prim_func
    def compose(
        scaled: T.Tensor((n,), "float64"),
        found: T.Tensor((m,), "float64"),
        stages: T.int32, size: T.int32, first: T.int32, low: T.int32, unit: T.int32,
        width: T.int32, groups: T.int32, count: T.int32, rows: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width, rows), groups, threads=threads) as (by, group):
            before = T.alloc_shared((ROWS,), "float64")
            after = T.alloc_fragment((ROWS,), "float64")
            step = T.cast(groups, "int64") * width * width
            origin = (T.cast(group, "int64") * width + by * rows) * width
            elements = T.min(rows, width - by * rows) * width
            for e in T.Parallel(ROWS):
                before[e] = 0
                if transposed:
                    if e < elements:
                        before[e] = found[(stages - 1) * step + origin + e]
            for at in T.serial(stages - 1 if transposed else stages):
                stage = stages - 1 - at if transposed else at
                for e in T.Parallel(ROWS):
                    if e < elements:
                        row, c = div(e, width), mod(e, width)
                        within, place, start, stride = _place(T, c, stage, unit)
                        block = _block(group, within, low, div(width, size))
                        source = T.cast((first + stage) * count + block, "int64") * size * size
                        after[e] = before[e]
                        for k in T.serial(size):
                            column = start + mod(k, 2) * stride + div(k, 2)
                            mixed = before[row * width + column]
                            if transposed:
                                after[e] += mixed * scaled[source + k * size + place]
                            else:
                                own = T.if_then_else(
                                    column == by * rows + row, T.float64(1), T.float64(0)
                                )
                                after[e] += (mixed + own) * scaled[source + place * size + k]
                for e in T.Parallel(ROWS):
                    if e < elements:
                        before[e] = after[e]
                        found[(stage - (1 if transposed else 0)) * step + origin + e] = after[e]

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
    shape = (part.size, part.first, part.low, part.unit, part.width, part.groups, deltas.shape[1])
    numbers = (part.stages, *shape)

    def launch(found: torch.Tensor, grads: torch.Tensor, deltas: torch.Tensor, part: Pass) -> None:
        kernel(flat(found), flat(grads), flat(deltas), *numbers)

    return launch


def stage_gradient_kernel(threads: int) -> Any:
    """ENTRIES entries of the gradients of one stage's blocks in one group."""
    import tilelang.language as T

    n, m = T.dynamic("n", "int64"), T.dynamic("m", "int64")

    @T.prim_func
    def stage_gradient(
        found: T.Tensor((n,), "float64"),
        grads: T.Tensor((n,), "float64"),
        deltas: T.Tensor((m,), "float64"),
        stages: T.int32, size: T.int32, first: T.int32, low: T.int32, unit: T.int32,
        width: T.int32, groups: T.int32, count: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(width * size, ENTRIES), groups, stages, threads=threads) as (
            bx, group, stage,
        ):  # fmt: skip
            share = T.alloc_fragment((SHARES, ENTRIES), "float64")
            total = T.alloc_shared((SHARES, ENTRIES), "float64")
            summed = T.alloc_fragment((ENTRIES,), "float64")
            step = T.cast(groups, "int64") * width * width
            grad = stage * step + T.cast(group, "int64") * width * width
            before = grad - step
            for s, q in T.Parallel(SHARES, ENTRIES):
                c, k = div(bx * ENTRIES + q, size), mod(bx * ENTRIES + q, size)
                share[s, q] = 0
                if c < width:
                    within, place, start, stride = _place(T, c, stage, unit)
                    column = start + mod(k, 2) * stride + div(k, 2)
                    for tile in T.serial(T.ceildiv(width, SHARES)):
                        r = tile * SHARES + s
                        if r < width:
                            own = T.if_then_else(column == r, T.float64(1), T.float64(0))
                            if stage > 0:
                                own_ = own + found[before + r * width + column]
                                share[s, q] += own_ * grads[grad + r * width + c]
                            else:
                                share[s, q] += own * grads[grad + r * width + c]
            T.copy(share, total)
            for q in T.Parallel(ENTRIES):
                c, k = div(bx * ENTRIES + q, size), mod(bx * ENTRIES + q, size)
                if c < width:
                    within, place, start, stride = _place(T, c, stage, unit)
                    block = _block(group, within, low, div(width, size))
                    at = T.cast((first + stage) * count + block, "int64") * size * size
                    summed[q] = total[0, q]
                    for s in T.serial(1, SHARES):
                        summed[q] += total[s, q]
                    deltas[at + place * size + k] = summed[q]

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
    kernel = build(pack_kernel, (parts.dtype, divided, THREADS), matrix.device)
    shape = (part.padded, part.width, part.pack, part.groups, part.packs)
    numbers = (parts.shape[0], *shape)

    def launch(
        matrix: torch.Tensor, power: torch.Tensor | None, parts: torch.Tensor, part: Pass
    ) -> None:
        given = parts.new_empty(1, dtype=torch.float32) if power is None else power
        kernel(flat(matrix), given, flat(parts), *numbers)

    return launch


def pack_kernel(dtype: torch.dtype, divided: bool, threads: int) -> Any:
    """PACKED elements of every pack laid end to end, in every part."""
    import tilelang.language as T

    n, p, m = (T.dynamic(name, "int64") for name in "npm")
    stored = NAMES[dtype]

    @T.prim_func
    def pack(
        matrix: T.Tensor((n,), "float64"),
        power: T.Tensor((p,), "float32"),
        parts: T.Tensor((m,), stored),
        pieces: T.int32, padded: T.int32, width: T.int32, pack: T.int32, groups: T.int32,
        packs: T.int32,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(packs * padded * padded, PACKED), threads=threads) as bx:
            value = T.alloc_fragment((PACKED,), "float64")
            for e in T.Parallel(PACKED):
                at = bx * PACKED + e
                which = div(at, padded * padded)
                r, c = div(mod(at, padded * padded), padded), mod(at, padded)
                group = which * pack + div(r, width)
                value[e] = 0
                if (
                    div(r, width) == div(c, width)
                    and div(r, width) < pack
                    and group < groups
                    and which < packs
                ):
                    row = T.cast(group, "int64") * width + mod(r, width)
                    value[e] = matrix[row * width + mod(c, width)]
                    if divided:
                        value[e] = value[e] / T.cast(power[which], "float64")
                if which < packs:
                    for piece in T.serial(pieces):
                        short = T.cast(T.cast(value[e], "float32"), stored)
                        parts[T.cast(piece, "int64") * packs * padded * padded + at] = short
                        value[e] -= T.cast(T.cast(short, "float32"), "float64")

    return pack
