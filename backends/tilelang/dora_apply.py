"""DoRA on activations: the up-projection with its rescaling, and the sums over tokens going back.

The norm, its gradient and the two products with x are kernels of ``dora`` and ``lora``.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .dora_tiles import Number, call, is_tensor, name, ratio, threads_of

Tensor = torch.Tensor
_FINISH = 128  # columns of a block


def layer_kernel(
    sizes: tuple[int | None, int | None, int | None],
    blocks: tuple[int, int, int],
    dtypes: tuple[Any, ...],
    by_tensor: bool,
    fused: bool,
    summed: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`expand` and :func:`reduce`.

    A program owns columns; with ``summed`` it goes through a share of the tokens, else one tile.
    """
    import tilelang.language as T

    named = zip(("n", "r", "p"), sizes, strict=True)
    N, R, P = (T.dynamic(n, index) if size is None else size for n, size in named)
    M = T.dynamic("m", index)
    block_m, block_n, block_r = blocks
    g_dtype, y_dtype, u_dtype, m_dtype, out_dtype, more_dtype, h_dtype, compute = dtypes
    f32 = "float32"
    rows = T.ceildiv(T.ceildiv(M, block_m), P) if summed else 1
    grid_y = P if summed else T.ceildiv(M, block_m)
    g_type, y_type = T.Tensor((M, N), g_dtype), T.Tensor((M, N), y_dtype)
    # Without sums no product is needed, and hidden is base once more.
    h_type = T.Tensor((M, N), y_dtype) if h_dtype is None else T.Tensor((M, R), h_dtype)
    u_type = T.Tensor((N, R), u_dtype)
    m_type, n_type = T.Tensor((N,), m_dtype), T.Tensor((N,), f32)
    s_type = T.Tensor((1,), f32) if by_tensor else T.float32
    # So is a result that is not wanted.
    out_type = T.Tensor((M, N), y_dtype if out_dtype is None else out_dtype)
    more_type = T.Tensor((M, N), y_dtype if more_dtype is None else more_dtype)
    partial_type = T.Tensor((P, N), f32)

    @T.prim_func
    def layer(
        grad: g_type, base: y_type, hidden: h_type, up: u_type, magnitude: m_type, norm: n_type,
        scale: s_type, out: out_type, more: more_type, partial: partial_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(N, block_n), grid_y, threads=threads) as (bx, by):
            hidden_s = T.alloc_shared((block_m, block_r), compute)
            up_s = T.alloc_shared((block_n, block_r), compute)
            product = T.alloc_fragment((block_m, block_n), f32)
            incoming = T.alloc_fragment((block_m, block_n), g_dtype)
            layer = T.alloc_fragment((block_m, block_n), y_dtype)
            factor = T.alloc_fragment((block_n,), f32)
            total = T.alloc_fragment((block_n,), f32)
            part = T.alloc_fragment((block_n,), f32)
            s = scale[0] if by_tensor else scale
            column = bx * block_n
            if summed:
                T.clear(total)
            for j in T.Parallel(block_n):
                factor[j] = 0
                if column + j < N:
                    factor[j] = ratio(T, T.cast(magnitude[column + j], f32), norm[column + j])
            for step in T.serial(rows):
                row = (by * rows + step) * block_m
                if summed:
                    T.copy(grad[row, column], incoming)
                if h_dtype is not None:
                    T.clear(product)
                    for r in T.serial(T.ceildiv(R, block_r)):
                        T.copy(hidden[row, r * block_r], hidden_s)
                        T.copy(up[column, r * block_r], up_s)
                        if fused:
                            for i, j in T.Parallel(block_m, block_n):
                                for q in T.serial(block_r):
                                    product[i, j] += hidden_s[i, q] * up_s[j, q]
                        else:
                            T.gemm(hidden_s, up_s, product, transpose_B=True)
                    T.copy(base[row, column], layer)
                    for i, j in T.Parallel(block_m, block_n):
                        product[i, j] = T.cast(layer[i, j], f32) + s * product[i, j]
                if summed:
                    if out_dtype is not None or more_dtype is not None:
                        for i, j in T.Parallel(block_m, block_n):
                            if row + i < M and column + j < N:
                                value = factor[j] * T.cast(incoming[i, j], f32)
                                if out_dtype is not None:
                                    out[row + i, column + j] = value
                                if more_dtype is not None:
                                    more[row + i, column + j] = value
                    if h_dtype is not None:
                        for i, j in T.Parallel(block_m, block_n):
                            product[i, j] *= T.cast(incoming[i, j], f32)
                        T.reduce_sum(product, part, dim=0)
                        for j in T.Parallel(block_n):
                            total[j] += part[j]
                else:
                    for i, j in T.Parallel(block_m, block_n):
                        if row + i < M and column + j < N:
                            out[row + i, column + j] = factor[j] * product[i, j]
            if summed and h_dtype is not None:
                for j in T.Parallel(block_n):
                    if column + j < N:
                        partial[by, column + j] = total[j]

    return layer


def finish_kernel(
    sizes: tuple[int | None, int | None],
    dtypes: tuple[str, str | None],
    has_made: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`finish`."""
    import tilelang.language as T

    P, N = (
        T.dynamic(n, index) if size is None else size for n, size in zip("pn", sizes, strict=True)
    )
    m_dtype, gm_dtype = dtypes
    f32 = "float32"
    partial_type, m_type, n_type = (
        T.Tensor((P, N), f32),
        T.Tensor((N,), m_dtype),
        T.Tensor((N,), f32),
    )
    gm_type = T.Tensor((N,), f32 if gm_dtype is None else gm_dtype)
    made_type = T.Tensor((2, N) if has_made else (N,), f32)

    @T.prim_func
    def finish(
        partial: partial_type, magnitude: m_type, norm: n_type, grad_magnitude: gm_type,
        made: made_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(N, _FINISH), threads=threads) as bx:
            total = T.alloc_fragment((_FINISH,), f32)
            for j in T.Parallel(_FINISH):
                total[j] = 0
                if bx * _FINISH + j < N:
                    for split in T.serial(P):
                        total[j] += partial[split, bx * _FINISH + j]
                    total[j] = ratio(T, total[j], norm[bx * _FINISH + j])
                    if gm_dtype is not None:
                        grad_magnitude[bx * _FINISH + j] = total[j]
                    if has_made:
                        m = T.cast(magnitude[bx * _FINISH + j], f32)
                        made[1, bx * _FINISH + j] = -total[j] * ratio(T, m, norm[bx * _FINISH + j])

    return finish


def _layer(
    grad: Tensor,
    base: Tensor,
    hidden: Tensor | None,
    up: Tensor,
    magnitude: Tensor,
    scale: Number,
    out: Tensor | None,
    more: Tensor | None,
    splits: int,
    plan: Plan,
    policy: Policy,
) -> Any:
    on_cpu = not base.is_cuda
    parts = max(1, splits)
    compute = "float32" if on_cpu else NAMES[policy.compute]
    dtypes = (*map(name, (grad, base, up, magnitude, out, more, hidden)), compute)
    params = (
        (None,) * 3 if on_cpu else (*up.shape, parts),
        (plan.block_m, plan.block_n, plan.block_k),
        dtypes,
        *is_tensor(scale),
        on_cpu or (policy.compute is torch.float32 and not policy.tf32),
        splits > 0,
        threads_of(base, plan),
        "int64" if on_cpu else "int32",
    )
    return build(layer_kernel, params, base.device)


@prepared
def expand(
    base: Tensor,
    hidden: Tensor,
    up: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    scale: Number,
    out: Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (M, N) = (magnitude / norm) o (base + scale * hidden @ up^T), 0 where the norm is 0.

    ``hidden`` (M, r) in compute, ``up`` (N, r) is cast to it; all row-major.
    """
    kernel = _layer(base, base, hidden, up, magnitude, scale, out, None, 0, plan, policy)
    unused = norm.new_empty((1, norm.shape[0]))

    def launch(
        base: Tensor, hidden: Tensor, up: Tensor, magnitude: Tensor, norm: Tensor, scale: Number,
        out: Tensor,
    ) -> None:  # fmt: skip
        inputs = [base, base, hidden, up, magnitude, norm, scale]
        call(kernel, policy, inputs, [out, base, unused], (3,))

    return launch


@prepared
def reduce(
    grad: Tensor,
    base: Tensor,
    hidden: Tensor | None,
    up: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    scale: Number,
    scaled: Tensor | None,
    grad_base: Tensor | None,
    partial: Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """scaled = grad_base = (magnitude / norm) o grad, each rounded to its dtype, where wanted.

    ``partial`` (splits, N), fp32: the sums over tokens, a share each, of
    grad o (base + scale * hidden @ up^T).
    """
    source = hidden if partial is not None else None
    splits = plan.splits
    kernel = _layer(
        grad, base, source, up, magnitude, scale, scaled, grad_base, splits, plan, policy
    )
    unused = norm.new_empty((splits, norm.shape[0])) if partial is None else None

    def launch(
        grad: Tensor, base: Tensor, hidden: Tensor | None, up: Tensor, magnitude: Tensor,
        norm: Tensor, scale: Number, scaled: Tensor | None, grad_base: Tensor | None,
        partial: Tensor | None,
    ) -> None:  # fmt: skip
        inputs = [grad, base, base if partial is None else hidden, up, magnitude, norm, scale]
        outputs = [
            base if scaled is None else scaled,
            base if grad_base is None else grad_base,
            unused if partial is None else partial,
        ]
        call(kernel, policy, inputs, outputs, (3,))

    return launch


@prepared
def finish(
    partial: Tensor,
    magnitude: Tensor,
    norm: Tensor,
    grad_magnitude: Tensor | None,
    made: Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """From the sums over tokens, the magnitude's gradient and, going through the norm, made[1].

    ``made`` (2, N): the gradient of W + s up down is made[1] * its unit rows; made[0] is not set.
    """
    on_cpu = not partial.is_cuda
    params = (
        (None, None) if on_cpu else tuple(partial.shape),
        (name(magnitude), name(grad_magnitude)),
        made is not None,
        32 if on_cpu else _FINISH,
        "int64" if on_cpu else "int32",
    )
    kernel = build(finish_kernel, params, partial.device)

    def launch(
        partial: Tensor, magnitude: Tensor, norm: Tensor, grad_magnitude: Tensor | None,
        made: Tensor | None,
    ) -> None:  # fmt: skip
        outputs = [norm if t is None else t for t in (grad_magnitude, made)]
        call(kernel, policy, [partial, magnitude, norm], outputs)

    return launch
