"""LoKr: rows of x or of an intermediate mixed by w1, token by token, and w1's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel, launch_options
from .lokr import Half, _half, _options, _scaled, _sizes, _strides


@kernel
def _mix(
    value, w, w_b, base, scale, out,
    ROWS, N, Q, P, rank, stride_r, stride_k, stride_p, stride_c,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of rows (token, q): a product with rows (token, p), where both tokens are the same."""
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    start = (pid // tiles_n).to(tl.int64) * BLOCK_M
    token = start // Q
    first = (start - token * Q).to(tl.int32)
    steps = tl.arange(0, BLOCK_M)
    rows = first + steps
    left = tl.minimum(ROWS - start, BLOCK_M).to(tl.int32)
    ok_m = steps < left
    count = ((first + left - 1) // Q + 1) * P  # rows of the tokens that the tile touches
    columns = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = columns < N
    value += token * P * N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, count, BLOCK_K):
        inner = k + tl.arange(0, BLOCK_K)
        ok_k = inner < count
        at = inner.to(tl.int64)[:, None] * N + columns[None, :]
        x = tl.load(value + at, mask=ok_k[:, None] & ok_n[None, :], other=0.0).to(COMPUTE)
        same = (rows // Q)[:, None] == (inner // P)[None, :]
        mixer = _half(
            w, w_b, rank, (rows % Q)[:, None], (inner % P)[None, :], same,
            (stride_r, stride_k, stride_p, stride_c), COMPUTE, PRECISION, BLOCK_R,
        )  # fmt: skip
        acc += tl.dot(mixer.to(COMPUTE), x, input_precision=PRECISION)
    acc = _scaled(acc, scale)
    at = (start + steps)[:, None] * N + columns[None, :]
    inside = ok_m[:, None] & ok_n[None, :]
    if base is not None:
        acc += tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@kernel
def _mix_tokens(
    value, w, w_b, base, scale, out,
    T, N, Q, P, rank, group, stride_r, stride_k, stride_p, stride_c,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Tiles of whole tokens, in turn: one step each, with W the same for all of them."""
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    same = ((row // Q)[:, None] == (inner // P)[None, :]) & (inner < group * P)[None, :]
    mixer = _half(
        w, w_b, rank, (row % Q)[:, None], (inner % P)[None, :], same,
        (stride_r, stride_k, stride_p, stride_c), COMPUTE, PRECISION, BLOCK_R,
    ).to(COMPUTE)  # fmt: skip
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, group) * tiles_n, tl.num_programs(0)):
        token = tl.cast(tile // tiles_n, tl.int64) * group
        left = tl.minimum(T - token, group).to(tl.int32)
        columns = tile % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
        ok_n = (columns < N)[None, :]
        at = inner.to(tl.int64)[:, None] * N + columns[None, :]
        ok = (inner < left * P)[:, None] & ok_n
        x = tl.load(value + token * P * N + at, mask=ok, other=0.0).to(COMPUTE)
        y = _scaled(tl.dot(mixer, x, input_precision=PRECISION), scale)
        at = row.to(tl.int64)[:, None] * N + columns[None, :]
        ok = (row < left * Q)[:, None] & ok_n
        if base is not None:
            y += tl.load(base + token * Q * N + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + token * Q * N + at, y.to(out.dtype.element_ty), mask=ok)


@kernel
def _mix_grad(
    grad, value, scale, parts,
    T, N, Q, P, share,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile (q, p) of the sum over a share of the tokens; EVEN_K: no step crosses a token."""
    in_turn()
    tiles_n = tl.cdiv(P, BLOCK_N)
    pid = tl.program_id(0)
    q = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    p = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1).to(tl.int64) * share
    left = (tl.maximum(tl.minimum(T - token, share), 0) * N).to(tl.int32)
    grad += token * Q * N
    value += token * P * N
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, left, BLOCK_K):
        if EVEN_K:
            t = tl.zeros((BLOCK_K,), tl.int64) + k // N
            n = k % N + tl.arange(0, BLOCK_K)
            ok_k = tl.full((BLOCK_K,), True, tl.int1)
        else:
            inner = k + tl.arange(0, BLOCK_K)
            t = (inner // N).to(tl.int64)
            n = inner % N
            ok_k = inner < left
        at_g = (t[None, :] * Q + q[:, None]) * N + n[None, :]
        at_v = (t[:, None] * P + p[None, :]) * N + n[:, None]
        g = tl.load(grad + at_g, mask=(q < Q)[:, None] & ok_k[None, :], other=0.0).to(COMPUTE)
        v = tl.load(value + at_v, mask=ok_k[:, None] & (p < P)[None, :], other=0.0).to(COMPUTE)
        acc += tl.dot(g, v, input_precision=PRECISION)
    at = (tl.program_id(1).to(tl.int64) * Q + q[:, None]) * P + p[None, :]
    tl.store(parts + at, _scaled(acc, scale), mask=(q < Q)[:, None] & (p < P)[None, :])


@prepared
def mix(
    value: torch.Tensor,
    w: torch.Tensor,
    w_b: Half,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (T * q, n) = [base +] scale * W (q, p) @ value (T * p, n), token by token.

    W is ``w`` where ``w_b`` is None, else ``w @ w_b``, rounded to ``policy.compute``; both may be
    transposed. ``value``, ``base`` and ``out`` are contiguous. M and N of ``plan`` are rows and
    columns of ``out``, K rows of ``value``; where whole tokens fit, at most ``splits`` programs
    take the tiles in turn.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (q, p, rank), (rows, n) = _sizes(w, w_b), out.shape
    strides = _strides(w, w_b)
    options = _options(plan, policy, rank, p, rank) | launch_options(plan)
    args = (value, w, w_b, base, scale, out)
    group = min(plan.block_m // q, plan.block_k // p)
    if group:
        tiles = triton.cdiv(rows // q, group) * triton.cdiv(n, plan.block_n)
        sizes = (rows // q, n, q, p, rank, group, *strides)
        return _mix_tokens.prepare((min(plan.splits, tiles),), args, options, sizes)
    fixed = (rows, n, q, p, rank, *strides)
    grid = (triton.cdiv(rows, plan.block_m) * triton.cdiv(n, plan.block_n),)
    return _mix.prepare(grid, args, options, fixed)


@prepared
def mix_grad(
    grad: torch.Tensor,
    value: torch.Tensor,
    scale: float | torch.Tensor,
    parts: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """parts (splits, q, p): fp32 sums of scale * grad (T * q, n) @ value (T * p, n)^T.

    Each split sums a contiguous share of the tokens. M and N of ``plan`` are q and p; K runs over
    the tokens and n.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (_, q, p), n = parts.shape, grad.shape[1]
    tokens = value.shape[0] // p
    fixed = (tokens, n, q, p, triton.cdiv(tokens, plan.splits))
    options = _options(plan, policy, 0, tokens * n) | launch_options(plan)
    del options["BLOCK_R"]
    options["EVEN_K"] = n % plan.block_k == 0
    grid = (triton.cdiv(q, plan.block_m) * triton.cdiv(p, plan.block_n), plan.splits)
    return _mix_grad.prepare(grid, (grad, value, scale, parts), options, fixed)
