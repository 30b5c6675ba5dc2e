"""LoKr of two small halves applied to x: both products, and all their gradients, in one pass."""

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
def _fused(
    x, w1, w1_b, w2, base, scale, out,
    T, A, B, C, D, rank, group, stride_r, stride_k, stride_p, stride_c,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Tiles of whole tokens: z = x w2^T, then w1 z, w1 standing on the diagonal once a token."""
    in_turn()
    row = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    same = ((row // A)[:, None] == (row // B)[None, :]) & (row < group * B)[None, :]
    mixer = _half(
        w1, w1_b, rank, (row % A)[:, None], (row % B)[None, :], same,
        (stride_r, stride_k, stride_p, stride_c), COMPUTE, PRECISION, BLOCK_R,
    ).to(COMPUTE)  # fmt: skip
    at = c[None, :] * D + d[:, None]
    w2_t = tl.load(w2 + at, mask=(d < D)[:, None] & (c < C)[None, :], other=0.0).to(COMPUTE)
    at_x = row[:, None] * D + d[None, :]
    at_y = row[:, None] * C + c[None, :]
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, group), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * group
        left = tl.minimum(T - token, group).to(tl.int32)
        ok_x = (row < left * B)[:, None] & (d < D)[None, :]
        part = tl.load(x + token * B * D + at_x, mask=ok_x, other=0.0).to(COMPUTE)
        hidden = tl.dot(part, w2_t, input_precision=PRECISION).to(COMPUTE)
        y = _scaled(tl.dot(mixer, hidden, input_precision=PRECISION), scale)
        ok_y = (row < left * A)[:, None] & (c < C)[None, :]
        if base is not None:
            y += tl.load(base + token * A * C + at_y, mask=ok_y, other=0.0).to(tl.float32)
        tl.store(out + token * A * C + at_y, y.to(out.dtype.element_ty), mask=ok_y)


@kernel
def _fused_grad(
    g, x, mixer, mixer_b, w2, scale, gx, w1_parts, w2_parts,
    T, A, B, C, D, rank, group, stride_r, stride_k, stride_p, stride_c,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Every gradient from the same tiles, a program's summed in one chain: see the Plan's rule."""
    in_turn()
    row = tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    same = ((row // B)[:, None] == (row // A)[None, :]) & (row < group * A)[None, :]
    mixer_t = _half(
        mixer, mixer_b, rank, (row % B)[:, None], (row % A)[None, :], same,
        (stride_r, stride_k, stride_p, stride_c), COMPUTE, PRECISION, BLOCK_R,
    ).to(COMPUTE)  # fmt: skip
    ok_w = (c < C)[:, None] & (d < D)[None, :]
    at_w = c[:, None] * D + d[None, :]
    half = tl.load(w2 + at_w, mask=ok_w, other=0.0).to(COMPUTE)
    at_x = row[:, None] * D + d[None, :]
    at_g = row[:, None] * C + c[None, :]
    total_1 = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    total_2 = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T, group), tl.num_programs(0)):
        token = tl.cast(tile, tl.int64) * group
        left = tl.minimum(T - token, group).to(tl.int32)
        ok_x = (row < left * B)[:, None] & (d < D)[None, :]
        ok_g = (row < left * A)[:, None] & (c < C)[None, :]
        grad = tl.load(g + token * A * C + at_g, mask=ok_g, other=0.0).to(COMPUTE)
        part = tl.load(x + token * B * D + at_x, mask=ok_x, other=0.0).to(COMPUTE)
        if w1_parts is not None:
            hidden = tl.dot(part, tl.trans(half), input_precision=PRECISION).to(COMPUTE)
            total_1 += tl.dot(grad, tl.trans(hidden), input_precision=PRECISION)
        if gx is not None or w2_parts is not None:
            mixed = _scaled(tl.dot(mixer_t, grad, input_precision=PRECISION), scale).to(COMPUTE)
            if gx is not None:
                back = tl.dot(mixed, half, input_precision=PRECISION)
                tl.store(gx + token * B * D + at_x, back.to(gx.dtype.element_ty), mask=ok_x)
            if w2_parts is not None:
                total_2 += tl.dot(tl.trans(mixed), part, input_precision=PRECISION)
    if w1_parts is not None:
        # (token of the tile, a, b): the blocks of one token lie on the diagonal.
        place = tl.program_id(0).to(tl.int64) * group + row // A
        at = (place[:, None] * A + (row % A)[:, None]) * B + (row % B)[None, :]
        own = ((row // A)[:, None] == (row // B)[None, :]) & (row < group * A)[:, None]
        tl.store(w1_parts + at, _scaled(total_1, scale), mask=own)
    if w2_parts is not None:
        at_part = tl.program_id(0).to(tl.int64) * C * D + at_w
        tl.store(w2_parts + at_part, total_2, mask=ok_w)


@prepared
def fused(
    x: torch.Tensor,
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (T * a, c) = [base +] scale * W1 (a, b) @ rnd(x (T * b, d) @ w2 (c, d)^T), by token.

    W1 is ``w1`` where ``w1_b`` is None, else ``w1 @ w1_b``, rounded to ``policy.compute``. N and K
    of ``plan`` hold all of c and d, M as many tokens' rows as fit; at most ``splits`` programs take
    the tiles in turn. Compute is 16-bit; tensors are contiguous.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (a, b, rank), (c, d) = _sizes(w1, w1_b), w2.shape
    group = plan.block_m // max(a, b)
    tokens = x.shape[0] // b
    grid = (min(plan.splits, triton.cdiv(tokens, group)),)
    fixed = (tokens, a, b, c, d, rank, group, *_strides(w1, w1_b))
    options = _options(plan, policy, rank, b, d, rank) | launch_options(plan)
    return _fused.prepare(grid, (x, w1, w1_b, w2, base, scale, out), options, fixed)


@prepared
def fused_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    mixer: torch.Tensor,
    mixer_b: Half,
    w2: torch.Tensor,
    scale: float | torch.Tensor,
    gx: torch.Tensor | None,
    w1_parts: torch.Tensor | None,
    w2_parts: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradient of x, and fp32 partial sums of those of W1 and w2; see :func:`fused`.

    ``gx`` (T * b, d); ``w1_parts`` (programs * tokens of a tile, a, b); ``w2_parts``
    (programs, c, d); None where no gradient is wanted. ``mixer`` (b, a), or the pair of that
    product, is W1 transposed. x and ``grad`` (T * a, c) are read once.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (b, a, rank), (c, d) = _sizes(mixer, mixer_b), w2.shape
    group = plan.block_m // max(a, b)
    tokens = x.shape[0] // b
    grid = (min(plan.splits, triton.cdiv(tokens, group)),)
    fixed = (tokens, a, b, c, d, rank, group, *_strides(mixer, mixer_b))
    options = _options(plan, policy, rank, a, b, c, d, rank) | launch_options(plan)
    args = (grad, x, mixer, mixer_b, w2, scale, gx, w1_parts, w2_parts)
    return _fused_grad.prepare(grid, args, options, fixed)
