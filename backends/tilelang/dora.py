"""DoRA: a weight read line by line (rows, or input channels' columns), rescaled to its magnitudes.

A program owns whole lines. It reads them once where they fit into registers; else the second time
from the cache, where its own first reading left them. W + s up down exists as tiles only.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import build
from .dora_tiles import (
    Number,
    Tensor,
    Tiles,
    call,
    is_tensor,
    name,
    ratio,
    threads_of,
    tiles_of,
    widths,
)


def rescale_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`rescale`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    m_dtype, out_dtype, factor_by_tensor, multiplier_by_tensor, threads = others
    O, N, _, _, K, W = tiles.sizes
    block_m, block_n, _ = tiles.blocks
    lanes, dim, by_column, once = tiles.lanes, tiles.dim, tiles.by_column, tiles.once
    fill, join_max, join_sum = tiles.merged(), tiles.joined(True), tiles.joined(False)
    w_type, d_type = tiles.matrix(), tiles.matrix(tiles.delta)
    up_type, down_type = tiles.factors()
    f_type, s_type = tiles.number(factor_by_tensor), tiles.number(multiplier_by_tensor)
    n_type, m_type = tiles.vector(), tiles.vector(m_dtype)
    line_type, slab_type = tiles.widths()
    out_type = tiles.matrix(out_dtype)
    has_out = out_dtype is not None

    @T.prim_func
    def rescale(
        weight: w_type, magnitude: m_type, delta: d_type, up: up_type, down: down_type,
        factor: f_type, multiplier: s_type, norm: n_type, out: out_type,
        one_line: line_type, slab: slab_type,
    ) -> None:  # fmt: skip
        with T.Kernel(tiles.grid, threads=threads) as bx:
            buffers = tiles.buffers()
            tile = buffers[2]
            square = T.alloc_fragment((block_m, block_n), "float32")
            top = T.alloc_fragment((lanes,), "float32")
            peak = T.alloc_fragment((lanes,), "float32")
            scaling = T.alloc_fragment((lanes,), "float32")
            part = T.alloc_fragment((lanes,), "float32")
            total = T.alloc_fragment((lanes,), "float32")
            copy = T.alloc_shared((lanes,), "float32")
            s = factor[0] if factor_by_tensor else factor
            T.clear(top)
            T.clear(total)
            for row_step, column_step in T.grid(tiles.row_steps, tiles.column_steps):
                row, column = tiles.place(bx, row_step, column_step)
                fill(weight, delta, up, down, s, row, column, column_step * block_n, buffers)
                T.reduce_absmax(tile, peak, dim=dim)
                for l in T.Parallel(lanes):
                    peak[l] = T.max(peak[l], top[l])
                    scaling[l] = tiles.power(peak[l])
                for i, j in T.Parallel(block_m, block_n):
                    square[i, j] = tile[i, j] * scaling[j if by_column else i]
                    square[i, j] = square[i, j] * square[i, j]
                T.reduce_sum(square, part, dim=dim)
                for l in T.Parallel(lanes):
                    scaling[l] *= tiles.unpower(top[l])
                    total[l] = total[l] * scaling[l] * scaling[l] + part[l]
                    top[l] = peak[l]
            join_max(peak, copy)
            for l in T.Parallel(lanes):
                scaling[l] = tiles.power(peak[l]) * tiles.unpower(top[l])
                total[l] = total[l] * scaling[l] * scaling[l]
            join_sum(total, copy)
            for l in T.Parallel(lanes):
                total[l] = T.sqrt(total[l]) * tiles.unpower(peak[l])
                if by_column:
                    if l < W and bx * W + l < N:
                        line = (bx * W + l) // K
                        if l % K == 0:
                            norm[line] = total[l]
                        if has_out:
                            m = T.cast(magnitude[line], "float32")
                            scaling[l] = ratio(T, m, total[l])
                elif bx * block_m + l < O:
                    norm[bx * block_m + l] = total[l]
                    if has_out:
                        m = T.cast(magnitude[bx * block_m + l], "float32")
                        scaling[l] = ratio(T, m, total[l])
            if has_out:
                f = multiplier[0] if multiplier_by_tensor else multiplier
                for l in T.Parallel(lanes):
                    scaling[l] = f * scaling[l] + (1 - f)
                for row_step, column_step in T.grid(tiles.row_steps, tiles.column_steps):
                    row, column = tiles.place(bx, row_step, column_step)
                    place = column_step * block_n
                    if not once:
                        fill(weight, delta, up, down, s, row, column, place, buffers)
                    for i, j in T.Parallel(block_m, block_n):
                        if by_column:
                            if row + i < O and place + j < W and column + j < N:
                                out[row + i, column + j] = tile[i, j] * scaling[j]
                        elif row + i < O and column + j < N:
                            out[row + i, column + j] = tile[i, j] * scaling[i]

    return rescale


def rescale_back_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`rescale_back`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    dtypes, factor_by_tensor, multiplier_by_tensor, detach, threads = others
    g_dtype, m_dtype, gw_dtype, gd_dtype, gm_dtype, has_made = dtypes
    O, N, _, L, K, W = tiles.sizes
    block_m, block_n, _ = tiles.blocks
    lanes, dim, by_column, once = tiles.lanes, tiles.dim, tiles.by_column, tiles.once
    fill, join_sum = tiles.merged(), tiles.joined(False)
    g_type, w_type, d_type = tiles.matrix(g_dtype), tiles.matrix(), tiles.matrix(tiles.delta)
    up_type, down_type = tiles.factors()
    f_type, s_type = tiles.number(factor_by_tensor), tiles.number(multiplier_by_tensor)
    n_type, m_type = tiles.vector(), tiles.vector(m_dtype)
    gw_type, gd_type = tiles.matrix(gw_dtype), tiles.matrix(gd_dtype)
    gm_type = tiles.vector("float32" if gm_dtype is None else gm_dtype)
    made_type = T.Tensor((2, L), "float32") if has_made else tiles.vector()
    line_type, slab_type = tiles.widths()
    stored = gw_dtype is not None or gd_dtype is not None
    summed = not detach or gm_dtype is not None

    @T.prim_func
    def rescale_back(
        grad: g_type, weight: w_type, magnitude: m_type, delta: d_type, up: up_type,
        down: down_type, factor: f_type, multiplier: s_type, norm: n_type, grad_weight: gw_type,
        grad_delta: gd_type, grad_magnitude: gm_type, made: made_type,
        one_line: line_type, slab: slab_type,
    ) -> None:  # fmt: skip
        with T.Kernel(tiles.grid, threads=threads) as bx:
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), g_dtype)
            product = T.alloc_fragment((block_m, block_n), "float32")
            unit = T.alloc_fragment((lanes,), "float32")  # M * unit = M / norm
            raised = T.alloc_fragment((lanes,), "float32")
            along = T.alloc_fragment((lanes,), "float32")
            back = T.alloc_fragment((lanes,), "float32")
            part = T.alloc_fragment((lanes,), "float32")
            radial = T.alloc_fragment((lanes,), "float32")
            copy = T.alloc_shared((lanes,), "float32")
            s = factor[0] if factor_by_tensor else factor
            f = multiplier[0] if multiplier_by_tensor else multiplier
            T.clear(radial)
            for l in T.Parallel(lanes):
                unit[l] = 0
                along[l] = 0
                if by_column:
                    if l < W and bx * W + l < N:
                        unit[l] = norm[(bx * W + l) // K]
                        m = T.cast(magnitude[(bx * W + l) // K], "float32")
                        along[l] = ratio(T, m, unit[l])
                elif bx * block_m + l < O:
                    unit[l] = norm[bx * block_m + l]
                    m = T.cast(magnitude[bx * block_m + l], "float32")
                    along[l] = ratio(T, m, unit[l])
                raised[l] = tiles.power(unit[l])
                unit[l] = ratio(T, T.float32(1), unit[l] * raised[l])
            if summed or once:
                for row_step, column_step in T.grid(tiles.row_steps, tiles.column_steps):
                    row, column = tiles.place(bx, row_step, column_step)
                    fill(weight, delta, up, down, s, row, column, column_step * block_n, buffers)
                    T.copy(grad[row, column], incoming)
                    for i, j in T.Parallel(block_m, block_n):
                        lane = j if by_column else i
                        tile[i, j] *= raised[lane]  # exact
                        product[i, j] = tile[i, j] * T.cast(incoming[i, j], "float32")
                    T.reduce_sum(product, part, dim=dim)
                    for l in T.Parallel(lanes):
                        radial[l] += part[l]
            join_sum(radial, copy)
            for l in T.Parallel(lanes):
                radial[l] = f * (radial[l] * unit[l])
                back[l] = T.float32(0) if detach else -along[l] * radial[l]
                along[l] = f * along[l] + (1 - f)
                if by_column:
                    if l < W and bx * W + l < N and l % K == 0:
                        if gm_dtype is not None:
                            grad_magnitude[(bx * W + l) // K] = radial[l]
                        if has_made:
                            made[0, (bx * W + l) // K] = along[l]
                            made[1, (bx * W + l) // K] = back[l]
                elif bx * block_m + l < O:
                    if gm_dtype is not None:
                        grad_magnitude[bx * block_m + l] = radial[l]
                    if has_made:
                        made[0, bx * block_m + l] = along[l]
                        made[1, bx * block_m + l] = back[l]
            if stored:
                for row_step, column_step in T.grid(tiles.row_steps, tiles.column_steps):
                    row, column = tiles.place(bx, row_step, column_step)
                    place = column_step * block_n
                    if not once:
                        fill(weight, delta, up, down, s, row, column, place, buffers)
                        T.copy(grad[row, column], incoming)
                        for i, j in T.Parallel(block_m, block_n):
                            lane = j if by_column else i
                            tile[i, j] *= raised[lane]
                    for i, j in T.Parallel(block_m, block_n):
                        lane = j if by_column else i
                        g = T.cast(incoming[i, j], "float32")
                        tile[i, j] = g * along[lane] + tile[i, j] * unit[lane] * back[lane]
                    for i, j in T.Parallel(block_m, block_n):
                        if row + i < O and column + j < N and (place + j < W or not by_column):
                            if gw_dtype is not None:
                                grad_weight[row + i, column + j] = tile[i, j]
                            if gd_dtype is not None:
                                grad_delta[row + i, column + j] = tile[i, j]

    return rescale_back


@prepared
def rescale(
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    multiplier: Number,
    norm: Tensor,
    out: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """norm = the norms of M's lines, out = M * (multiplier * (magnitude / norm - 1) + 1).

    M (O, N) is ``weight`` [+ ``delta``] [+ ``factor`` * ``up`` (O, r) @ ``down`` (r, N)], all
    row-major. A line is a row where ``group`` is 0, else ``group`` neighbouring columns.
    ``magnitude`` and ``norm`` (fp32) have one element a line. Without ``out`` only the norms.
    """
    shared = tiles_of(weight, delta, up, norm, group, plan, policy)
    numbers = is_tensor(factor, multiplier)
    others = (name(magnitude), name(out), *numbers, threads_of(weight, plan))
    kernel = build(rescale_kernel, (shared, others), weight.device)
    sizes = widths(weight, group, plan)

    def launch(
        weight: Tensor, magnitude: Tensor, delta: Tensor | None, up: Tensor | None,
        down: Tensor | None, factor: Number, multiplier: Number, norm: Tensor,
        out: Tensor | None, group: int,
    ) -> None:  # fmt: skip
        absent = weight if up is None or down is None else None
        inputs = [
            weight,
            magnitude,
            weight if delta is None else delta,
            up if absent is None else absent,
            down if absent is None else absent,
            factor,
            multiplier,
        ]
        outputs = [norm, weight if out is None else out, *sizes]
        call(kernel, policy, inputs, outputs, (3, 4) if absent is None else ())

    return launch


@prepared
def rescale_back(
    grad: Tensor,
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    up: Tensor | None,
    down: Tensor | None,
    factor: Number,
    multiplier: Number,
    norm: Tensor,
    grad_weight: Tensor | None,
    grad_delta: Tensor | None,
    grad_magnitude: Tensor | None,
    made: Tensor | None,
    group: int,
    detach: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Gradients of :func:`rescale`, whose operands come first, with the norms it made.

    The gradient of M is ``made[0] * grad + made[1] * M / norm``, line by line. It is stored into
    ``grad_weight`` and ``grad_delta``, where they are wanted, and its two factors into ``made``
    (2, lines), fp32. With ``detach`` the norm is taken for a constant.
    """
    shared = tiles_of(weight, delta, up, norm, group, plan, policy)
    dtypes = (name(grad), name(magnitude), *map(name, (grad_weight, grad_delta, grad_magnitude)))
    others = ((*dtypes, made is not None), *is_tensor(factor, multiplier), detach)
    kernel = build(
        rescale_back_kernel, (shared, (*others, threads_of(weight, plan))), weight.device
    )
    sizes = widths(weight, group, plan)

    def launch(
        grad: Tensor, weight: Tensor, magnitude: Tensor, delta: Tensor | None, up: Tensor | None,
        down: Tensor | None, factor: Number, multiplier: Number, norm: Tensor,
        grad_weight: Tensor | None, grad_delta: Tensor | None, grad_magnitude: Tensor | None,
        made: Tensor | None, group: int, detach: bool,
    ) -> None:  # fmt: skip
        absent = weight if up is None or down is None else None
        inputs = [
            grad,
            weight,
            magnitude,
            weight if delta is None else delta,
            up if absent is None else absent,
            down if absent is None else absent,
            factor,
            multiplier,
            norm,
        ]
        outputs = [
            weight if grad_weight is None else grad_weight,
            weight if grad_delta is None else grad_delta,
            norm if grad_magnitude is None else grad_magnitude,
            norm if made is None else made,
            *sizes,
        ]
        call(kernel, policy, inputs, outputs, (4, 5) if absent is None else ())

    return launch
