"""The skinny GEMM that all of LoRA is made of: h = x down^T, y = base + s h up^T, and gradients."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import TL_DTYPE, in_turn, input_precision, inside_of, kernel, launch_options


@triton.jit
def _tile(
    a, b, base, scale, out,
    pid, M, N, K, share,
    stride_am, stride_ak, stride_bk, stride_bn,
    stride_ym, stride_yn, stride_os, stride_om, stride_on,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
    OF_N: tl.constexpr, OF_B: tl.constexpr, OF_OUT: tl.constexpr,
):  # fmt: skip
    """One output tile of one share of K.

    FLUSH: elements of K between two additions to the second level; 0 has one level only. OF_N,
    OF_B, OF_OUT: powers of two that divide N and the rows of b and out.
    """
    # These change nothing. They let the compiler see that a row of 4 or 8 is one access, without
    # which b, copied by single elements, would not be on its way ahead of the products.
    N = N // OF_N * OF_N
    stride_bk = stride_bk // OF_B * OF_B
    stride_om = stride_om // OF_OUT * OF_OUT
    # Neighbours share a row of tiles: the long operand is read once and rows are written whole.
    tiles_n = tl.cdiv(N, BLOCK_N)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rk = tl.arange(0, BLOCK_K)
    ok_m = inside_of(rm, M, EVEN_M)[:, None]
    ok_n = inside_of(rn, N, EVEN_N)[None, :]

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
        ok_k = inside_of(rk, left - k, EVEN_K)
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
    OF_N: tl.constexpr, OF_B: tl.constexpr, OF_OUT: tl.constexpr,
):  # fmt: skip
    in_turn()
    _tile(
        a, b, base, scale, out,
        tl.program_id(0), M, N, K, share,
        stride_am, stride_ak, stride_bk, stride_bn,
        stride_ym, stride_yn, stride_os, stride_om, stride_on,
        COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, ONE_STEP, FLUSH,
        OF_N, OF_B, OF_OUT,
    )  # fmt: skip


@kernel
def _matmul_pair(
    a, b, scale, out, a2, b2, scale2, out2,
    tiles, N,
    M, K, share,
    stride_am, stride_ak, stride_bk, stride_bn,
    stride_os, stride_om, stride_on,
    M2, K2, share2,
    stride_am2, stride_ak2, stride_bk2, stride_bn2,
    stride_os2, stride_om2, stride_on2,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    OF_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_K: tl.constexpr, ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
    OF_B: tl.constexpr, OF_OUT: tl.constexpr,
    EVEN_M2: tl.constexpr, EVEN_K2: tl.constexpr, ONE_STEP2: tl.constexpr, FLUSH2: tl.constexpr,
    OF_B2: tl.constexpr, OF_OUT2: tl.constexpr,
):  # fmt: skip
    """The tiles of one product, then those of the other: two bodies, each with its own layouts."""
    in_turn()
    pid = tl.program_id(0)
    if pid < tiles:
        _tile(
            a, b, None, scale, out,
            pid, M, N, K, share,
            stride_am, stride_ak, stride_bk, stride_bn,
            0, 0, stride_os, stride_om, stride_on,
            COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_M, EVEN_N, EVEN_K, ONE_STEP, FLUSH,
            OF_N, OF_B, OF_OUT,
        )  # fmt: skip
    else:
        _tile(
            a2, b2, None, scale2, out2,
            pid - tiles, M2, N, K2, share2,
            stride_am2, stride_ak2, stride_bk2, stride_bn2,
            0, 0, stride_os2, stride_om2, stride_on2,
            COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
            EVEN_M2, EVEN_N, EVEN_K2, ONE_STEP2, FLUSH2, OF_N, OF_B2, OF_OUT2,
        )  # fmt: skip


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
    fixed = (
        *(m, n, k, _share(k, plan)),
        *(*a.stride(), *b.stride()),
        *((0, 0) if base is None else base.stride()),
        *_strides(out),
    )
    options = _options(n, k, plan, policy) | _loop(m, k, plan) | _rows(b, out)
    grid = (_tiles(m, n, plan), plan.splits)
    return _matmul.prepare(grid, (a, b, base, scale, out), options, fixed)


@prepared
def matmul_pair(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    a2: torch.Tensor,
    b2: torch.Tensor,
    scale2: float | torch.Tensor,
    out2: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Two products like :func:`matmul`'s, without a base, in one launch.

    Both have N columns and one Plan.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, k), n, (m2, k2) = a.shape, b.shape[1], a2.shape
    tiles, tiles2 = _tiles(m, n, plan), _tiles(m2, n, plan)
    fixed = (
        *(tiles, n),
        *(m, k, _share(k, plan), *a.stride(), *b.stride(), *_strides(out)),
        *(m2, k2, _share(k2, plan), *a2.stride(), *b2.stride(), *_strides(out2)),
    )
    options = _options(n, min(k, k2), plan, policy) | _loop(m, k, plan) | _rows(b, out)
    second = _loop(m2, k2, plan) | _rows(b2, out2)
    options |= {f"{name}2": value for name, value in second.items()}
    args = (a, b, scale, out, a2, b2, scale2, out2)
    return _matmul_pair.prepare((tiles + tiles2, plan.splits), args, options, fixed)


def _tiles(m: int, n: int, plan: Plan) -> int:
    return triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.block_n)


def _share(k: int, plan: Plan) -> int:
    """The elements of K in each split: whole tiles."""
    return triton.cdiv(k, plan.splits * plan.block_k) * plan.block_k


def _strides(out: torch.Tensor) -> tuple[int, ...]:
    return out.stride() if out.dim() == 3 else (0, *out.stride())


def _loop(m: int, k: int, plan: Plan) -> dict[str, Any]:
    """What a product's sizes settle about its loop."""
    return {
        "EVEN_M": m % plan.block_m == 0,
        "EVEN_K": k % plan.block_k == 0,
        "ONE_STEP": plan.splits == 1 and k <= plan.block_k,
        "FLUSH": max(CHUNK, plan.block_k) if _share(k, plan) > CHUNK else 0,
    }


def _rows(b: torch.Tensor, out: torch.Tensor) -> dict[str, int]:
    """What divides the rows of both, where their elements are neighbours."""
    of_b, of_out = (gcd(16, t.stride(-2)) if t.stride(-1) == 1 else 1 for t in (b, out))
    return {"OF_B": of_b, "OF_OUT": of_out}


def _options(n: int, k: int, plan: Plan, policy: Policy) -> dict[str, Any]:
    return {
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, k),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_N": n % plan.block_n == 0,
        "OF_N": gcd(16, n),
        **launch_options(plan),
    }
