"""The skinny GEMM that all of LoRA is made of: h = x down^T, y = base + s h up^T, and gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import kernel

_TL_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: Below this K a TF32 triple misses the fp32 bound (K = 1: 1.05 ULP rms, 0.76 allowed).
_MIN_TRIPLE = 16


@triton.jit
def _inside(index, size, EVEN: tl.constexpr):
    """index < size; a constant, which removes the mask, where no tile is cut."""
    if EVEN:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < size


@kernel
def _matmul(
    a, b, base, scale, out,
    M, N, K, share,
    stride_am, stride_ak, stride_bk, stride_bn,
    stride_ym, stride_yn, stride_os, stride_om, stride_on,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """One output tile of one share of K.

    FLUSH: elements of K between two additions to the second level; 0 has one level only.
    """
    # Neighbours share a row of tiles: the long operand is read once and rows are written whole.
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    ok_m = _inside(rm, M, EVEN_M)[:, None]
    ok_n = _inside(rn, N, EVEN_N)[None, :]

    split = tl.program_id(1)
    start = split.to(tl.int64) * share
    left = tl.minimum(K - start, share).to(tl.int32)
    a += start * stride_ak
    b += start * stride_bk
    step_a = tl.cast(stride_ak, tl.int64) * BLOCK_K
    step_b = tl.cast(stride_bk, tl.int64) * BLOCK_K
    tile_a = rm.to(tl.int64)[:, None] * stride_am + rk.to(tl.int64)[None, :] * stride_ak
    tile_b = rk.to(tl.int64)[:, None] * stride_bk + rn.to(tl.int64)[None, :] * stride_bn

    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLUSH:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # A constant trip count of one removes the loop and its pipeline.
    for k in tl.range(0, BLOCK_K if ONE_STEP else left, BLOCK_K):
        ok_k = _inside(rk, left - k, EVEN_K)
        x = tl.load(a + tile_a, mask=ok_m & ok_k[None, :], other=0.0).to(COMPUTE)
        y = tl.load(b + tile_b, mask=ok_k[:, None] & ok_n, other=0.0).to(COMPUTE)
        part = tl.dot(x, y, part, input_precision=PRECISION)
        a += step_a
        b += step_b
        if FLUSH:
            # Branches on the loop counter keep this one loop, which a nest of two would not
            # leave pipelined, and the sum cannot be folded back into the chain of dots.
            if (k + BLOCK_K) % FLUSH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = part
    if FLUSH:
        acc += total

    if scale.dtype.is_ptr():
        acc *= tl.load(scale)
    else:
        acc *= scale
    rm64 = rm.to(tl.int64)[:, None]
    rn64 = rn.to(tl.int64)[None, :]
    inside = ok_m & ok_n
    if base is not None:
        tile_y = rm64 * stride_ym + rn64 * stride_yn
        acc += tl.load(base + tile_y, mask=inside, other=0.0).to(tl.float32)
    tile_out = split.to(tl.int64) * stride_os + rm64 * stride_om + rn64 * stride_on
    tl.store(out + tile_out, acc.to(out.dtype.element_ty), mask=inside)


@prepared
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] scale * (a @ b).

    ``a`` (M, K), ``b`` (K, N), ``base`` (M, N): strided views, each fp16, bf16 or fp32. a and b
    are cast to ``policy.compute``; sums are fp32, in two levels where K is longer than ``CHUNK``.
    ``scale``: a float, or a 0-d fp32 tensor on the device. ``out``: (M, N), rounded once; with
    ``plan.splits`` > 1, (splits, M, N) fp32 partial sums over contiguous shares of K, each
    scaled; ``base`` is then the caller's to add, and must be None.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n, block_k, splits = plan.block_m, plan.block_n, plan.block_k, plan.splits
    share = triton.cdiv(k, splits * block_k) * block_k
    if policy.compute is torch.float32 and not policy.tf32:
        precision = "ieee" if k < _MIN_TRIPLE or torch.version.hip else "tf32x3"  # AMD has no TF32
    else:
        precision = "tf32"
    fixed = (
        *(m, n, k, share),
        *a.stride(),
        *b.stride(),
        *((0, 0) if base is None else base.stride()),
        *(out.stride() if splits > 1 else (0, *out.stride())),
    )
    options = {
        "COMPUTE": _TL_DTYPE[policy.compute],
        "PRECISION": precision,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "EVEN_M": m % block_m == 0,
        "EVEN_N": n % block_n == 0,
        "EVEN_K": k % block_k == 0,
        "ONE_STEP": splits == 1 and k <= block_k,
        "FLUSH": max(CHUNK, block_k) if share > CHUNK else 0,
        "num_warps": plan.num_warps,
        # AMD's shared memory is a third of NVIDIA's.
        "num_stages": min(plan.num_stages, 2) if torch.version.hip else plan.num_stages,
    }
    grid = (triton.cdiv(m, block_m) * triton.cdiv(n, block_n), splits)
    return _matmul.prepare(grid, (a, b, base, scale, out), options, fixed)
