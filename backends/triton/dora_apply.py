"""DoRA on activations: the up-projection with its rescaling, and the sums over tokens going back.

The norm, its gradient and the two products with x are kernels of ``dora`` and ``lora``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel
from .dora import _number, _ratio, precision

Tensor = torch.Tensor
Number = float | torch.Tensor


@triton.jit
def _layer(
    base, hidden, up, s, rows, columns, ok_m, ok_n, N, R: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of base + s * hidden @ up^T, in fp32."""
    product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    rr = tl.arange(0, BLOCK_R)
    for r in range(0, R, BLOCK_R):
        ok_r = rr < R - r
        h = tl.load(
            hidden + rows.to(tl.int64)[:, None] * R + (r + rr)[None, :],
            mask=ok_m[:, None] & ok_r[None, :], other=0.0,
        )  # fmt: skip
        u = tl.load(
            up + columns.to(tl.int64)[None, :] * R + (r + rr)[:, None],
            mask=ok_r[:, None] & ok_n[None, :], other=0.0,
        ).to(hidden.dtype.element_ty)  # fmt: skip
        product = tl.dot(h, u, product, input_precision=PRECISION)
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    value = tl.load(base + at, mask=ok_m[:, None] & ok_n[None, :], other=0.0).to(tl.float32)
    return value + s * product


@kernel
def _expand(
    base, hidden, up, magnitude, norm, scale, out,
    M, N, R: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    in_turn()
    tiles = tl.cdiv(N, BLOCK_N)
    rows = tl.program_id(0) // tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) % tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m = rows < M
    ok_n = columns < N
    value = _layer(base, hidden, up, _number(scale), rows, columns, ok_m, ok_n, N, R,
                   PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
    m = tl.load(magnitude + columns, mask=ok_n, other=0.0).to(tl.float32)
    value *= _ratio(m, tl.load(norm + columns, mask=ok_n, other=0.0))[None, :]
    at = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=ok_m[:, None] & ok_n[None, :])


@kernel
def _reduce(
    grad, base, hidden, up, magnitude, norm, scale, scaled, grad_base, partial,
    M, N, share, R: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    in_turn()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = columns < N
    first = tl.program_id(1) * share
    left = tl.minimum(M - first, share)
    m = tl.load(magnitude + columns, mask=ok_n, other=0.0).to(tl.float32)
    c = _ratio(m, tl.load(norm + columns, mask=ok_n, other=0.0))[None, :]
    total = tl.zeros((BLOCK_N,), tl.float32)
    s = _number(scale)
    for start in tl.range(0, left, BLOCK_M, num_stages=STAGES):
        place = start + tl.arange(0, BLOCK_M)
        rows = first + place
        ok_m = place < left
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        inside = ok_m[:, None] & ok_n[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        if partial is not None:
            value = _layer(base, hidden, up, s, rows, columns, ok_m, ok_n, N, R,
                           PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
            total += tl.sum(g * value, axis=0)
        if scaled is not None:
            tl.store(scaled + at, (c * g).to(scaled.dtype.element_ty), mask=inside)
        if grad_base is not None:
            tl.store(grad_base + at, (c * g).to(grad_base.dtype.element_ty), mask=inside)
    if partial is not None:
        tl.store(partial + tl.program_id(1) * N + columns, total, mask=ok_n)


@kernel
def _finish(
    partial, magnitude, norm, grad_magnitude, made,
    N, SPLITS, BLOCK_N: tl.constexpr,
):  # fmt: skip
    in_turn()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = columns < N
    total = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(0, SPLITS):
        total += tl.load(partial + split * N + columns, mask=ok, other=0.0)
    length = tl.load(norm + columns, mask=ok, other=0.0)
    inner = _ratio(total, length)
    if grad_magnitude is not None:
        value = inner.to(grad_magnitude.dtype.element_ty)
        tl.store(grad_magnitude + columns, value, mask=ok)
    if made is not None:
        m = tl.load(magnitude + columns, mask=ok, other=0.0).to(tl.float32)
        tl.store(made + N + columns, -inner * _ratio(m, length), mask=ok)


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
    (m, n), rank = base.shape, up.shape[1]
    options = {
        "R": rank,
        "PRECISION": precision(policy, rank),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": plan.block_k,
        "num_warps": plan.num_warps,
        "num_stages": 1,
    }
    grid = (triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.block_n),)
    args = (base, hidden, up, magnitude, norm, scale, out)
    return _expand.prepare(grid, args, options, (m, n))


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
    (m, n), rank = grad.shape, up.shape[1]
    share = triton.cdiv(m, plan.splits * plan.block_m) * plan.block_m
    options = {
        "R": rank,
        "PRECISION": precision(policy, rank),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": plan.block_k,
        "STAGES": plan.num_stages if n % 8 == 0 and not torch.version.hip else 1,
        "num_warps": plan.num_warps,
        "num_stages": 1,
    }
    grid = (triton.cdiv(n, plan.block_n), plan.splits)
    args = (grad, base, hidden, up, magnitude, norm, scale, scaled, grad_base, partial)
    return _reduce.prepare(grid, args, options, (m, n, share))


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
    splits, n = partial.shape
    options = {"BLOCK_N": 128, "num_warps": 4}
    args = (partial, magnitude, norm, grad_magnitude, made)
    return _finish.prepare((triton.cdiv(n, 128),), args, options, (n, splits))
