"""What surrounds a convolution: small matrices times the channels, pixel by pixel.

Samples keep their layout, (channels, pixels), in every product, so that the pixels are read and
written in whole rows and nothing is transposed in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import TL_DTYPE, in_turn, input_precision, inside_of, kernel, launch_options


@kernel
def _mix(
    a, b, base, scale, out,
    M, K, S, G, stride_ag, stride_am, stride_ak,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_S: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """One tile of one sample: all of its channels of a tile of pixels are neighbours."""
    in_turn()
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_s = tl.cdiv(S, BLOCK_S)
    pid = tl.program_id(0)
    rm = pid % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
    pid = pid // tiles_m
    rs = pid % tiles_s * BLOCK_S + tl.arange(0, BLOCK_S)
    sample = (pid // tiles_s).to(tl.int64)
    rk = tl.arange(0, BLOCK_K)
    ok_m = inside_of(rm, M, EVEN_M)[:, None]
    ok_s = inside_of(rs, S, EVEN_S)[None, :]

    a += sample % G * stride_ag
    b += sample * K * S
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(S, tl.int64) * BLOCK_K
    rm64 = rm.to(tl.int64)[:, None]
    rs64 = rs.to(tl.int64)[None, :]
    tile_a = rm64 * stride_am + rk.to(tl.int64)[None, :] * stride_ak
    tile_b = rk.to(tl.int64)[:, None] * S + rs64

    part = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    if FLUSH:
        total = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    # A constant trip count of one removes the loop and its pipeline.
    for k in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K):
        ok_k = inside_of(rk, K - k, EVEN_K)
        x = tl.load(a + tile_a, mask=ok_m & ok_k[None, :], other=0.0).to(COMPUTE)
        y = tl.load(b + tile_b, mask=ok_k[:, None] & ok_s, other=0.0).to(COMPUTE)
        part = tl.dot(x, y, part, input_precision=PRECISION)
        a += step_a
        b += step_b
        if FLUSH:
            if (k + BLOCK_K) % FLUSH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_S), tl.float32)
    acc = part
    if FLUSH:
        acc += total

    if scale.dtype.is_ptr():
        acc *= tl.load(scale)
    else:
        acc *= scale
    inside = ok_m & ok_s
    tile = sample * M * S + rm64 * S + rs64
    if base is not None:
        acc += tl.load(base + tile, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + tile, acc.to(out.dtype.element_ty), mask=inside)


@kernel
def _contract(
    p, q, scale, out,
    M, K, S, G, steps, share,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_S: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_S: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """One tile of one group's sum, over one share of the steps: BLOCK_S pixels of one sample each.

    FLUSH: steps between two additions to the second level; 0 has one level only.
    """
    in_turn()
    tiles_k = tl.cdiv(K, BLOCK_K)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_k
    pid = tl.program_id(0)
    group = (pid // tiles).to(tl.int64)
    rm = pid % tiles // tiles_k * BLOCK_M + tl.arange(0, BLOCK_M)
    rk = pid % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    rs = tl.arange(0, BLOCK_S)
    ok_m = inside_of(rm, M, EVEN_M)[:, None]
    ok_k = inside_of(rk, K, EVEN_K)[None, :]
    rm64 = rm.to(tl.int64)[:, None]
    rk64 = rk.to(tl.int64)[None, :]
    tile_p = rm64 * S + rs[None, :]
    tile_q = rk64 * S + rs[:, None]

    split = tl.program_id(1)
    first = split * share
    per_sample = tl.cdiv(S, BLOCK_S)
    part = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    if FLUSH:
        total = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for i in tl.range(0, tl.minimum(share, steps - first)):
        step = first + i
        sample = (step // per_sample).to(tl.int64) * G + group
        s = step % per_sample * BLOCK_S
        ok_s = inside_of(rs, S - s, EVEN_S)
        at_p = p + (sample * M * S + s)
        at_q = q + (sample * K * S + s)
        x = tl.load(at_p + tile_p, mask=ok_m & ok_s[None, :], other=0.0).to(COMPUTE)
        y = tl.load(at_q + tile_q, mask=ok_s[:, None] & ok_k, other=0.0).to(COMPUTE)
        part = tl.dot(x, y, part, input_precision=PRECISION)
        if FLUSH:
            if (i + 1) % FLUSH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    acc = part
    if FLUSH:
        acc += total
    if scale.dtype.is_ptr():
        acc *= tl.load(scale)
    else:
        acc *= scale
    groups = tl.num_programs(0) // tiles
    at_out = out + (split.to(tl.int64) * groups + group) * M * K
    tl.store(at_out + rm64 * K + rk64, acc.to(out.dtype.element_ty), mask=ok_m & ok_k)


@prepared
def mix(
    a: torch.Tensor,
    b: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out[i] = [base[i] +] scale * (a[i % G] @ b[i]) for every sample i.

    ``a``: (G, M, K), any strides. ``b``: (B, K, S), ``base`` and ``out``: (B, M, S), contiguous;
    G divides B. a and b are cast to ``policy.compute``, sums are fp32, in two levels where K is
    longer than ``CHUNK``; ``out`` is rounded once. ``scale``: a float, or a 0-d fp32 tensor.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (groups, m, k), (batch, _, pixels) = a.shape, b.shape
    options = {
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, k),
        "BLOCK_M": plan.block_m,
        "BLOCK_S": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_M": m % plan.block_m == 0,
        "EVEN_S": pixels % plan.block_n == 0,
        "EVEN_K": k % plan.block_k == 0,
        "ONE_STEP": k <= plan.block_k,
        "FLUSH": max(CHUNK, plan.block_k) if k > CHUNK else 0,
        **launch_options(plan),
    }
    tiles = triton.cdiv(m, plan.block_m) * triton.cdiv(pixels, plan.block_n)
    fixed = (m, k, pixels, groups, *a.stride())
    return _mix.prepare((tiles * batch,), (a, b, base, scale, out), options, fixed)


@prepared
def contract(
    left: torch.Tensor,
    right: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out[:, g] = partial sums of scale * (left[i] @ right[i]^T) over the samples i = g mod G.

    ``left``: (B, M, S), ``right``: (B, K, S), ``out``: (splits, G, M, K), contiguous; G divides B.
    Each split sums a contiguous share of the samples' pixels, in fp32, in two levels where that is
    longer than ``CHUNK``. Operands are cast to ``policy.compute``.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (batch, m, pixels), k = left.shape, right.shape[1]
    splits, groups = out.shape[:2]
    steps = batch // groups * triton.cdiv(pixels, plan.block_k)
    share = triton.cdiv(steps, splits)
    options = {
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, batch // groups * pixels),
        "BLOCK_M": plan.block_m,
        "BLOCK_K": plan.block_n,
        "BLOCK_S": plan.block_k,
        "EVEN_M": m % plan.block_m == 0,
        "EVEN_K": k % plan.block_n == 0,
        "EVEN_S": pixels % plan.block_k == 0,
        "FLUSH": CHUNK // plan.block_k if share * plan.block_k > CHUNK else 0,
        **launch_options(plan),
    }
    tiles = triton.cdiv(m, plan.block_m) * triton.cdiv(k, plan.block_n)
    fixed = (m, k, pixels, groups, steps, share)
    return _contract.prepare((tiles * groups, splits), (left, right, scale, out), options, fixed)
