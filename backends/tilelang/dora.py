"""DoRA: a weight read row by row, rescaled to its magnitudes.

A program owns whole rows. It reads them once where they fit into registers; else the second time
from the cache, where its own first reading left them. dora_lines.py serves all other lines.
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
    unpower_of,
)


def rescale_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`rescale`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    m_dtype, out_dtype, by_tensor, threads = others
    O, N, *_ = tiles.sizes
    block_m, block_n, _ = tiles.blocks
    steps = T.ceildiv(N, block_n)
    once = isinstance(N, int) and block_n >= N
    fill = tiles.merged()
    w_type, d_type, s_type = tiles.matrix(), tiles.matrix(tiles.delta), tiles.number(by_tensor)
    n_type, m_type, out_type = tiles.vector(), tiles.vector(m_dtype), tiles.matrix(out_dtype)

    @T.prim_func
    def rescale(
        weight: w_type, magnitude: m_type, delta: d_type, multiplier: s_type, norm: n_type,
        out: out_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(O, block_m), threads=threads) as bx:
            buffers = tiles.buffers()
            tile = buffers[2]
            square = T.alloc_fragment((block_m, block_n), "float32")
            top = T.alloc_fragment((block_m,), "float32")
            peak = T.alloc_fragment((block_m,), "float32")
            scaling = T.alloc_fragment((block_m,), "float32")
            part = T.alloc_fragment((block_m,), "float32")
            total = T.alloc_fragment((block_m,), "float32")
            T.clear(top)
            T.clear(total)
            for step in T.serial(steps):
                fill(weight, delta, weight, weight, 0, bx * block_m, step * block_n, buffers)
                T.reduce_absmax(tile, peak, dim=1)
                for l in T.Parallel(block_m):
                    peak[l] = T.max(peak[l], top[l])
                    scaling[l] = tiles.power(peak[l])
                for i, j in T.Parallel(block_m, block_n):
                    square[i, j] = tile[i, j] * scaling[i]
                    square[i, j] = square[i, j] * square[i, j]
                T.reduce_sum(square, part, dim=1)
                for l in T.Parallel(block_m):
                    scaling[l] *= unpower_of(T, top[l])
                    total[l] = total[l] * scaling[l] * scaling[l] + part[l]
                    top[l] = peak[l]
            f = multiplier[0] if by_tensor else multiplier
            for l in T.Parallel(block_m):
                total[l] = T.sqrt(total[l]) * unpower_of(T, peak[l])
                if bx * block_m + l < O:
                    norm[bx * block_m + l] = total[l]
                    m = T.cast(magnitude[bx * block_m + l], "float32")
                    scaling[l] = ratio(T, m, total[l])
                scaling[l] = f * scaling[l] + (1 - f)
            for step in T.serial(steps):
                row, column = bx * block_m, step * block_n
                if not once:
                    fill(weight, delta, weight, weight, 0, row, column, buffers)
                for i, j in T.Parallel(block_m, block_n):
                    if row + i < O and column + j < N:
                        out[row + i, column + j] = tile[i, j] * scaling[i]

    return rescale


def rescale_back_kernel(shared: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """The prim_func behind :func:`rescale_back`."""
    import tilelang.language as T

    tiles = Tiles(*shared)
    g_dtype, m_dtype, gw_dtype, gd_dtype, gm_dtype, by_tensor, detach, threads = others
    O, N, *_ = tiles.sizes
    block_m, block_n, _ = tiles.blocks
    steps = T.ceildiv(N, block_n)
    once = isinstance(N, int) and block_n >= N
    fill = tiles.merged()
    g_type, w_type, d_type = tiles.matrix(g_dtype), tiles.matrix(), tiles.matrix(tiles.delta)
    s_type, n_type, m_type = tiles.number(by_tensor), tiles.vector(), tiles.vector(m_dtype)
    gw_type, gd_type = tiles.matrix(gw_dtype), tiles.matrix(gd_dtype)
    gm_type = tiles.vector("float32" if gm_dtype is None else gm_dtype)
    stored = gw_dtype is not None or gd_dtype is not None
    summed = not detach or gm_dtype is not None

    @T.prim_func
    def rescale_back(
        grad: g_type, weight: w_type, magnitude: m_type, delta: d_type, multiplier: s_type,
        norm: n_type, grad_weight: gw_type, grad_delta: gd_type, grad_magnitude: gm_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(O, block_m), threads=threads) as bx:
            buffers = tiles.buffers()
            tile = buffers[2]
            incoming = T.alloc_fragment((block_m, block_n), g_dtype)
            product = T.alloc_fragment((block_m, block_n), "float32")
            unit = T.alloc_fragment((block_m,), "float32")  # M * unit = M / norm
            raised = T.alloc_fragment((block_m,), "float32")
            along = T.alloc_fragment((block_m,), "float32")
            back = T.alloc_fragment((block_m,), "float32")
            part = T.alloc_fragment((block_m,), "float32")
            radial = T.alloc_fragment((block_m,), "float32")
            f = multiplier[0] if by_tensor else multiplier
            T.clear(radial)
            for l in T.Parallel(block_m):
                unit[l] = 0
                along[l] = 0
                if bx * block_m + l < O:
                    unit[l] = norm[bx * block_m + l]
                    m = T.cast(magnitude[bx * block_m + l], "float32")
                    along[l] = ratio(T, m, unit[l])
                raised[l] = tiles.power(unit[l])
                unit[l] = ratio(T, T.float32(1), unit[l] * raised[l])
            if summed or once:
                for step in T.serial(steps):
                    row, column = bx * block_m, step * block_n
                    fill(weight, delta, weight, weight, 0, row, column, buffers)
                    T.copy(grad[row, column], incoming)
                    for i, j in T.Parallel(block_m, block_n):
                        tile[i, j] *= raised[i]  # exact
                        product[i, j] = tile[i, j] * T.cast(incoming[i, j], "float32")
                    T.reduce_sum(product, part, dim=1)
                    for l in T.Parallel(block_m):
                        radial[l] += part[l]
            for l in T.Parallel(block_m):
                radial[l] = f * (radial[l] * unit[l])
                back[l] = T.float32(0) if detach else -along[l] * radial[l]
                along[l] = f * along[l] + (1 - f)
                if gm_dtype is not None:
                    if bx * block_m + l < O:
                        grad_magnitude[bx * block_m + l] = radial[l]
            if stored:
                for step in T.serial(steps):
                    row, column = bx * block_m, step * block_n
                    if not once:
                        fill(weight, delta, weight, weight, 0, row, column, buffers)
                        T.copy(grad[row, column], incoming)
                        for i, j in T.Parallel(block_m, block_n):
                            tile[i, j] *= raised[i]
                    for i, j in T.Parallel(block_m, block_n):
                        g = T.cast(incoming[i, j], "float32")
                        tile[i, j] = g * along[i] + tile[i, j] * unit[i] * back[i]
                    for i, j in T.Parallel(block_m, block_n):
                        if row + i < O and column + j < N:
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
    multiplier: Number,
    norm: Tensor,
    out: Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """norm = the norms of M's rows, out = M * (multiplier * (magnitude / norm - 1) + 1).

    M (O, N) is ``weight`` [+ ``delta``], row-major. ``magnitude`` and ``norm`` (fp32): (O,).
    """
    shared = tiles_of(weight, delta, None, norm, 0, plan, policy)
    others = (name(magnitude), name(out), *is_tensor(multiplier), threads_of(weight, plan))
    kernel = build(rescale_kernel, (shared, others), weight.device)

    def launch(
        weight: Tensor, magnitude: Tensor, delta: Tensor | None, multiplier: Number, norm: Tensor,
        out: Tensor,
    ) -> None:  # fmt: skip
        inputs = [weight, magnitude, weight if delta is None else delta, multiplier]
        call(kernel, policy, inputs, [norm, out])

    return launch


@prepared
def rescale_back(
    grad: Tensor,
    weight: Tensor,
    magnitude: Tensor,
    delta: Tensor | None,
    multiplier: Number,
    norm: Tensor,
    grad_weight: Tensor | None,
    grad_delta: Tensor | None,
    grad_magnitude: Tensor | None,
    detach: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Gradients of :func:`rescale`, whose operands come first, with the norms it made.

    The gradient of M is stored into ``grad_weight`` and ``grad_delta``, where they are wanted.
    With ``detach`` the norm is taken for a constant.
    """
    shared = tiles_of(weight, delta, None, norm, 0, plan, policy)
    dtypes = map(name, (grad, magnitude, grad_weight, grad_delta, grad_magnitude))
    others = (*dtypes, *is_tensor(multiplier), detach, threads_of(weight, plan))
    kernel = build(rescale_back_kernel, (shared, others), weight.device)

    def launch(
        grad: Tensor, weight: Tensor, magnitude: Tensor, delta: Tensor | None, multiplier: Number,
        norm: Tensor, grad_weight: Tensor | None, grad_delta: Tensor | None,
        grad_magnitude: Tensor | None, detach: bool,
    ) -> None:  # fmt: skip
        given = weight if delta is None else delta
        inputs = [grad, weight, magnitude, given, multiplier, norm]
        outputs = [
            weight if grad_weight is None else grad_weight,
            weight if grad_delta is None else grad_delta,
            norm if grad_magnitude is None else grad_magnitude,
        ]
        call(kernel, policy, inputs, outputs)

    return launch
