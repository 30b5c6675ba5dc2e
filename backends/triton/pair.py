"""Two low-rank products that meet in one store, and the diagonal between T-LoRA's factors."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import TL_DTYPE, in_turn, input_precision, inside_of, kernel, launch_options


@triton.jit
def _dot(
    a, b, ok_m, ok_n, rm, rn, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """A tile of a @ b, in fp32; with FLUSH, in two levels."""
    rk = tl.arange(0, BLOCK_K)
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    a += rm.to(tl.int64)[:, None] * stride_am + rk.to(tl.int64)[None, :] * stride_ak
    b += rk.to(tl.int64)[:, None] * stride_bk + rn.to(tl.int64)[None, :] * stride_bn
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLUSH:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, BLOCK_K if ONE_STEP else K, BLOCK_K):
        ok_k = inside_of(rk, K - k, EVEN_K)
        x = tl.load(a, mask=ok_m & ok_k[None, :], other=0.0).to(COMPUTE)
        y = tl.load(b, mask=ok_k[:, None] & ok_n, other=0.0).to(COMPUTE)
        part = tl.dot(x, y, part, input_precision=PRECISION)
        a += step_a
        b += step_b
        if FLUSH:
            if (k + BLOCK_K) % FLUSH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLUSH:
        part += total
    return part


@kernel
def _product(
    a, b, a0, b0, scale, out,
    M, N, K, K0,
    stride_am, stride_ak, stride_bk, stride_bn,
    stride_cm, stride_ck, stride_dk, stride_dn,
    stride_om, stride_on,
    SUBTRACT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """One output tile. Both accumulators are made alike, so that equal operands cancel exactly."""
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m = inside_of(rm, M, EVEN_M)[:, None]
    ok_n = inside_of(rn, N, EVEN_N)[None, :]
    acc = _dot(
        a, b, ok_m, ok_n, rm, rn, K, stride_am, stride_ak, stride_bk, stride_bn,
        COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, ONE_STEP, FLUSH,
    )  # fmt: skip
    acc0 = _dot(
        a0, b0, ok_m, ok_n, rm, rn, K0, stride_cm, stride_ck, stride_dk, stride_dn,
        COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, ONE_STEP, FLUSH,
    )  # fmt: skip
    if SUBTRACT:
        acc -= acc0
    else:
        acc += acc0
    if scale.dtype.is_ptr():
        acc *= tl.load(scale)
    else:
        acc *= scale
    tile = rm.to(tl.int64)[:, None] * stride_om + rn.to(tl.int64)[None, :] * stride_on
    tl.store(out + tile, acc.to(out.dtype.element_ty), mask=ok_m & ok_n)


@prepared
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a0: torch.Tensor,
    b0: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    subtract: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = scale * (a @ b + a0 @ b0), or of the difference where ``subtract``; rounded once.

    ``a`` (M, K), ``b`` (K, N), ``a0`` (M, L), ``b0`` (L, N): strided views, each fp16, bf16 or
    fp32, cast to ``policy.compute``. Both sums are fp32 and made in one order, in two levels where
    they are longer than ``CHUNK``, so that equal products give exactly 0. ``scale``: a float, or a
    0-d fp32 tensor on the device.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, n), k, k0 = out.shape, a.shape[1], a0.shape[1]
    block_m, block_n, block_k = plan.block_m, plan.block_n, plan.block_k
    strides = (s for t in (a, b, a0, b0, out) for s in t.stride())
    options = {
        "SUBTRACT": subtract,
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, max(k, k0)),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN_M": m % block_m == 0,
        "EVEN_N": n % block_n == 0,
        "EVEN_K": k % block_k == 0 and k0 % block_k == 0,
        "ONE_STEP": max(k, k0) <= block_k,
        "FLUSH": max(CHUNK, block_k) if max(k, k0) > CHUNK else 0,
        **launch_options(plan),
    }
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n),)
    fixed = (m, n, k, k0, *strides)
    launch = _product.prepare(grid, (a, b, a0, b0, scale, out), options, fixed)
    return lambda *args: launch(*args[:-1])


@kernel
def _diagonal(
    a, lam, mask, out,
    M, R, rows,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[m, r] = a[m, r] * lam[r] * mask[m // rows, r]."""
    in_turn()
    tiles_n = tl.cdiv(R, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = rn < R
    inside = (rm < M)[:, None] & ok_n[None, :]
    row = rm.to(tl.int64)[:, None]
    factor = tl.load(lam + rn, mask=ok_n, other=0.0).to(tl.float32)[None, :]
    chosen = tl.load(mask + row // rows * R + rn[None, :], mask=inside, other=0.0).to(tl.float32)
    tile = row * R + rn[None, :]
    value = tl.load(a + tile, mask=inside, other=0.0).to(tl.float32) * (factor * chosen)
    tl.store(out + tile, value.to(out.dtype.element_ty), mask=inside)


@prepared
def diagonal(
    a: torch.Tensor,
    lam: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = a * lam * mask, in fp32, rounded once.

    ``a`` and ``out`` (M, r), ``lam`` (r,), ``mask`` (samples, r), whose row i is that of the i-th
    M / samples rows of ``a``; all dense.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    m, rank = out.shape
    options = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "num_warps": plan.num_warps}
    grid = (triton.cdiv(m, plan.block_m) * triton.cdiv(rank, plan.block_n),)
    return _diagonal.prepare(grid, (a, lam, mask, out), options, (m, rank, m // mask.shape[0]))


@kernel
def _diagonal_gradient(
    a, b, mask, partials,
    M, R, rows, share,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A share of the sum over m of a[m, r] * b[m, r] * mask[m // rows, r]."""
    in_turn()
    first = tl.program_id(1).to(tl.int64) * share
    rn = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_n = rn < R
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, tl.minimum(M - first, share).to(tl.int32), BLOCK_M):
        row = (first + at + tl.arange(0, BLOCK_M))[:, None]
        inside = (row < M) & (row < first + share) & ok_n[None, :]
        x = tl.load(a + row * R + rn[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(b + row * R + rn[None, :], mask=inside, other=0.0).to(tl.float32)
        z = tl.load(mask + row // rows * R + rn[None, :], mask=inside, other=0.0)
        total += x * y * z.to(tl.float32)
    part = partials + tl.program_id(1).to(tl.int64) * R + rn
    tl.store(part, tl.sum(total, 0), mask=ok_n)


@prepared
def diagonal_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    partials: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """partials[s] = the sum over a share of the rows of a * b * mask, in fp32.

    ``a`` and ``b`` (M, r), ``mask`` as in :func:`diagonal`, ``partials`` (splits, r)
    fp32; all dense. Shares are contiguous and multiples of ``plan.block_m``.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, rank), splits = a.shape, partials.shape[0]
    share = triton.cdiv(m, splits * plan.block_m) * plan.block_m
    options = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "num_warps": plan.num_warps}
    fixed = (m, rank, m // mask.shape[0], share)
    grid = (triton.cdiv(rank, plan.block_n), splits)
    return _diagonal_gradient.prepare(grid, (a, b, mask, partials), options, fixed)
