"""DoRA: the gradient of W + s up down, tile by tile, contracted with up and down."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import build
from .dora_tiles import Number, Tiles, call, is_tensor, name, threads_of, tiles_of, widths

Tensor = torch.Tensor


def contract_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`contract_rows` and :func:`contract_columns`.

    fp32 products are fused multiply-adds: the gradient is not rounded, and a matrix instruction
    would round it to TF32.
    """
    import tilelang.language as T

    tiles = Tiles(*shared)
    by_row, g_dtype, gw_dtype, out_dtype, by_tensor, threads = others
    O, N, R, L, K, _ = tiles.sizes
    block_m, block_n, block_r = tiles.blocks
    by_column, fill = tiles.by_column, tiles.merged(slabs=False)
    lanes = block_n if by_column else block_m
    g_type, w_type = tiles.matrix(g_dtype), tiles.matrix()
    read_dtype = tiles.weight if g_dtype is None else g_dtype
    up_type, down_type = tiles.factors()
    f_type, n_type, made_type = tiles.number(by_tensor), tiles.vector(), T.Tensor((2, L), "float32")
    gw_type = tiles.matrix(gw_dtype)
    whole = T.Tensor((O, R) if by_row else (R, N), "float32" if out_dtype is None else out_dtype)
    line_type, slab_type = tiles.widths()
    mine, steps = (O, T.ceildiv(N, block_n)) if by_row else (N, T.ceildiv(O, block_m))
    block = block_m if by_row else block_n
    part_shape = (block_m, block_r) if by_row else (block_r, block_n)
    other_shape = (block_r, block_n) if by_row else (block_m, block_r)

    @T.prim_func
    def contract(
        weight: w_type, grad: g_type, up: up_type, down: down_type, factor: f_type, norm: n_type,
        made: made_type, grad_weight: gw_type, out: whole, one_line: line_type, slab: slab_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(mine, block), T.ceildiv(R, block_r), threads=threads) as (bx, by):
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), read_dtype)
            unit = T.alloc_fragment((lanes,), "float32")
            raised = T.alloc_fragment((lanes,), "float32")
            along = T.alloc_fragment((lanes,), "float32")
            back = T.alloc_fragment((lanes,), "float32")
            value = T.alloc_shared((block_m, block_n + 4), "float32")
            factor_s = T.alloc_shared(other_shape, tiles.up)
            total = T.alloc_fragment(part_shape, "float32")
            part = T.alloc_fragment(part_shape, "float32")
            s = factor[0] if by_tensor else factor
            T.clear(total)
            for step in T.serial(steps):
                row = bx * block_m if by_row else step * block_m
                column = step * block_n if by_row else bx * block_n
                fill(weight, weight, up, down, s, row, column, 0, buffers)
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
                    if by == 0:
                        for i, j in T.Parallel(block_m, block_n):
                            if row + i < O and column + j < N:
                                grad_weight[row + i, column + j] = tile[i, j]
                if out_dtype is not None:
                    for i, j in T.Parallel(block_m, block_n):
                        value[i, j] = tile[i, j]
                    if by_row:
                        T.copy(down[by * block_r, column], factor_s)
                    else:
                        T.copy(up[row, by * block_r], factor_s)
                    T.clear(part)
                    if by_row:
                        for i, r in T.Parallel(block_m, block_r):
                            for q in T.serial(block_n):
                                part[i, r] += value[i, q] * T.cast(
                                    T.cast(factor_s[r, q], tiles.compute), "float32"
                                )
                    else:
                        for r, j in T.Parallel(block_r, block_n):
                            for q in T.serial(block_m):
                                part[r, j] += value[q, j] * T.cast(
                                    T.cast(factor_s[q, r], tiles.compute), "float32"
                                )
                    # A chain over all columns would lose low bits.
                    for i, j in T.Parallel(*part_shape):
                        total[i, j] += part[i, j]
            if out_dtype is not None:
                for i, j in T.Parallel(*part_shape):
                    if by_row:
                        if bx * block_m + i < O and by * block_r + j < R:
                            out[bx * block_m + i, by * block_r + j] = s * total[i, j]
                    elif by * block_r + i < R and bx * block_n + j < N:
                        out[by * block_r + i, bx * block_n + j] = s * total[i, j]

    return contract


def _prepare(
    by_row: bool,
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    factor: Number,
    norm: Tensor,
    grad_weight: Tensor | None,
    out: Tensor | None,
    group: int,
    plan: Plan,
    policy: Policy,
) -> Launch:
    shared = tiles_of(weight, None, up, norm, group, plan, policy)
    others = (by_row, name(grad), name(grad_weight), name(out), *is_tensor(factor))
    kernel = build(contract_kernel, (shared, (*others, threads_of(weight, plan))), weight.device)
    sizes = widths(weight, group, plan)
    unused = torch.empty(up.shape, dtype=torch.float32, device=up.device) if out is None else None

    def launch(
        weight: Tensor, grad: Tensor | None, up: Tensor, down: Tensor, factor: Number,
        norm: Tensor, made: Tensor, grad_weight: Tensor | None, out: Tensor | None,
    ) -> None:  # fmt: skip
        given = weight if grad is None else grad
        inputs = [weight, given, up, down, factor, norm, made]
        outputs = [
            weight if grad_weight is None else grad_weight,
            unused if out is None else out,
            *sizes,
        ]
        call(kernel, policy, inputs, outputs, (2, 3))

    return launch


@prepared
def contract_rows(
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    down: Tensor,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    grad_weight: Tensor | None,
    out: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (O, r) = factor * G @ down^T, with G the gradient of M as ``rescale_back`` says.

    G is also stored into ``grad_weight`` (O, N) where that is wanted. Without ``grad`` its first
    term is absent. G is not rounded; sums are fp32, in two levels.
    """
    launch = _prepare(True, weight, grad, up, factor, norm, grad_weight, out, group, plan, policy)
    return lambda *args: launch(*args[:-1])


@prepared
def contract_columns(
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    down: Tensor,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    out: Tensor,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (r, N) = factor * up^T @ G; see :func:`contract_rows`."""
    launch = _prepare(False, weight, grad, up, factor, norm, None, out, group, plan, policy)
    return lambda *args: launch(*args[:-2], None, args[-2])
