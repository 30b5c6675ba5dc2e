"""DoRA: the gradient of W + s up down, tile by tile, contracted with up and down.

A tile of the gradient is fp32 and not rounded before its products. In bf16 it is split into bf16
parts, whose products with a factor are exact: two carry it to 2^-17, three to all of its 24 bits.
fp16 lacks the range for such parts: there, as in fp32, the products are fused multiply-adds.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan, power_of_2
from lycoris.kernels.precision import Policy

from .common import build
from .dora_tiles import Number, Tiles, call, is_tensor, name, threads_of, tiles_of, width_of

Tensor = torch.Tensor


def contract_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`contract`; ``slices``: of part_up's and of part_down's."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    g_dtype, gw_dtype, slices, wanted, rank, parts, by_tensor, threads = others
    O, N, R, L, K = tiles.sizes
    strips, row_blocks = (
        T.dynamic(n, tiles.index) if size is None else size
        for n, size in zip(("strips", "blocks"), slices, strict=True)
    )
    has_up, has_down = wanted
    downwards = has_down and not has_up
    block_m, block_n, _ = tiles.blocks
    by_column, fill = tiles.by_column, tiles.merged()
    lanes = block_n if by_column else block_m
    g_type, w_type = tiles.matrix(g_dtype), tiles.matrix()
    read_dtype = tiles.weight if g_dtype is None else g_dtype
    up_type, down_type = tiles.factors()
    f_type, n_type, made_type = tiles.number(by_tensor), tiles.vector(), T.Tensor((2, L), "float32")
    gw_type = tiles.matrix(gw_dtype)
    pu_type = T.Tensor((strips, O, R), "float32") if has_up else tiles.vector()
    pd_type = T.Tensor((row_blocks, R, N), "float32") if has_down else tiles.vector()
    line_type = tiles.width()
    grid = T.ceildiv(N, block_n) if downwards else T.ceildiv(O, block_m)
    along = T.ceildiv(O, block_m) if downwards else T.ceildiv(N, block_n)
    splits = row_blocks if downwards else strips
    steps = T.ceildiv(along, splits)
    chunks = T.ceildiv(R, rank) if has_up or has_down else 1

    @T.macro
    def rest(tile: Any, part: Any) -> None:
        """Stores what a part in compute leaves of ``tile``, for the next part to carry."""
        for i, j in T.Parallel(block_m, block_n):
            tile[i, j] -= T.cast(T.cast(tile[i, j], tiles.compute), "float32")
            part[i, j] = tile[i, j]

    @T.macro
    def times_down(high: Any, middle: Any, low: Any, down_s: Any, sums: Any) -> None:
        T.clear(sums)
        if parts == 1:
            for i, r in T.Parallel(block_m, rank):
                for q in T.serial(block_n):
                    sums[i, r] += high[i, q] * T.cast(down_s[r, q], "float32")
        else:
            if parts == 3:  # the least first, which loses nothing to the others
                T.gemm(low, down_s, sums, transpose_B=True)
            T.gemm(middle, down_s, sums, transpose_B=True)
            T.gemm(high, down_s, sums, transpose_B=True)

    @T.macro
    def times_up(high: Any, middle: Any, low: Any, up_s: Any, sums: Any) -> None:
        T.clear(sums)
        if parts == 1:
            for j, r in T.Parallel(block_n, rank):
                for q in T.serial(block_m):
                    sums[j, r] += high[q, j] * T.cast(up_s[q, r], "float32")
        else:
            if parts == 3:
                T.gemm(low, up_s, sums, transpose_A=True)
            T.gemm(middle, up_s, sums, transpose_A=True)
            T.gemm(high, up_s, sums, transpose_A=True)

    @T.prim_func
    def contract(
        weight: w_type, grad: g_type, up: up_type, down: down_type, factor: f_type, norm: n_type,
        made: made_type, grad_weight: gw_type, part_up: pu_type, part_down: pd_type,
        one_line: line_type,
    ) -> None:  # fmt: skip
        with T.Kernel(grid, splits, chunks, threads=threads) as (block, strip, chunk):
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), read_dtype)
            unit = T.alloc_fragment((lanes,), "float32")
            raised = T.alloc_fragment((lanes,), "float32")
            along = T.alloc_fragment((lanes,), "float32")
            back = T.alloc_fragment((lanes,), "float32")
            carried = tiles.compute if parts > 1 else "float32"
            high = T.alloc_shared((block_m, block_n), carried)
            middle = T.alloc_shared((block_m, block_n), carried) if parts > 1 else high
            low = T.alloc_shared((block_m, block_n), carried) if parts == 3 else high
            down_s = T.alloc_shared((rank, block_n), tiles.compute)
            up_s = T.alloc_shared((block_m, rank), tiles.compute)
            total_up = T.alloc_fragment((block_m, rank), "float32")
            sums_up = T.alloc_fragment((block_m, rank), "float32")
            total_down = T.alloc_fragment((block_n, rank), "float32")
            sums_down = T.alloc_fragment((block_n, rank), "float32")
            s = factor[0] if by_tensor else factor
            if has_up:
                T.clear(total_up)
            if downwards:
                T.clear(total_down)
            for step in T.serial(steps):
                row = (strip * steps + step) * block_m if downwards else block * block_m
                column = block * block_n if downwards else (strip * steps + step) * block_n
                fill(weight, weight, up, down, s, row, column, buffers)
                for l in T.Parallel(lanes):
                    unit[l] = 0
                    along[l] = 0
                    back[l] = 0
                    if by_column:
                        if column + l < N:
                            unit[l] = norm[(column + l) // K]
                            along[l] = made[0, (column + l) // K]
                            back[l] = made[1, (column + l) // K]
                    elif row + l < O:
                        unit[l] = norm[row + l]
                        along[l] = made[0, row + l]
                        back[l] = made[1, row + l]
                    raised[l] = tiles.power(unit[l])
                    unit[l] = T.if_then_else(
                        unit[l] == 0, T.float32(0), T.float32(1) / (unit[l] * raised[l])
                    )
                if g_dtype is not None:
                    T.copy(grad[row, column], incoming)
                for i, j in T.Parallel(block_m, block_n):
                    lane = j if by_column else i
                    tile[i, j] = tile[i, j] * raised[lane] * unit[lane] * back[lane]
                    if g_dtype is not None:
                        tile[i, j] += T.cast(incoming[i, j], "float32") * along[lane]
                if gw_dtype is not None:
                    if chunk == 0:
                        for i, j in T.Parallel(block_m, block_n):
                            if row + i < O and column + j < N:
                                grad_weight[row + i, column + j] = tile[i, j]
                if has_up or has_down:
                    for i, j in T.Parallel(block_m, block_n):
                        high[i, j] = tile[i, j]
                    if parts > 1:
                        rest(tile, middle)
                    if parts == 3:
                        rest(tile, low)
                # Each product is a sum of its own: a chain over all columns would lose low bits.
                if has_up:
                    T.copy(down[chunk * rank, column], down_s)
                    times_down(high, middle, low, down_s, sums_up)
                    for i, r in T.Parallel(block_m, rank):
                        total_up[i, r] += sums_up[i, r]
                if has_down:
                    T.copy(up[row, chunk * rank], up_s)
                    times_up(high, middle, low, up_s, sums_down)
                    if downwards:
                        for j, r in T.Parallel(block_n, rank):
                            total_down[j, r] += sums_down[j, r]
                    else:
                        for r, j in T.Parallel(rank, block_n):
                            if chunk * rank + r < R and column + j < N:
                                part_down[block, chunk * rank + r, column + j] = s * sums_down[j, r]
            if has_up:
                for i, r in T.Parallel(block_m, rank):
                    if block * block_m + i < O and chunk * rank + r < R:
                        part_up[strip, block * block_m + i, chunk * rank + r] = s * total_up[i, r]
            if downwards:
                for r, j in T.Parallel(rank, block_n):
                    if chunk * rank + r < R and block * block_n + j < N:
                        part_down[strip, chunk * rank + r, block * block_n + j] = (
                            s * total_down[j, r]
                        )

    return contract


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
    shared = tiles_of(weight, None, up, norm, group, plan, policy)
    parts = 1
    if weight.is_cuda and policy.compute is torch.bfloat16:
        parts = 3 if torch.float32 in (up.dtype, down.dtype) else 2
    slices = tuple(
        plan.splits if t is None else t.shape[0] if t.is_cuda else None
        for t in (part_up, part_down)
    )
    rank = rank_tile(policy, up.shape[1]) if weight.is_cuda else 16
    # Each warp owns at least 16 rows and 8 columns of the smallest product.
    most = 32 * (min(plan.block_m, plan.block_n) // 16) * (rank // 8)
    others = (
        *(name(grad), name(grad_weight), slices, (part_up is not None, part_down is not None)),
        *(rank, parts),
        *(*is_tensor(factor), min(most, threads_of(weight, plan))),
    )
    kernel = build(contract_kernel, (shared, others), weight.device)
    one_line = width_of(weight, group)

    def launch(
        weight: Tensor, grad: Tensor | None, up: Tensor, down: Tensor, factor: Number,
        norm: Tensor, made: Tensor, grad_weight: Tensor | None, part_up: Tensor | None,
        part_down: Tensor | None, group: int,
    ) -> None:  # fmt: skip
        given = weight if grad is None else grad
        inputs = [weight, given, up, down, factor, norm, made]
        outputs = [
            weight if grad_weight is None else grad_weight,
            norm if part_up is None else part_up,
            norm if part_down is None else part_down,
            one_line,
        ]
        call(kernel, policy, inputs, outputs, (2, 3))

    return launch


def rank_tile(policy: Policy, rank: int) -> int:
    """How much of the rank one program contracts."""
    return min(128 if policy.compute.itemsize == 2 else 32, max(16, power_of_2(rank)))
