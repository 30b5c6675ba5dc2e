"""LoKr's weight and its gradient.

A half is read, or made from its pair, a tile at a time: neither it nor the Kronecker product is
ever stored.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK as _CHUNK
from lycoris.kernels.plan import Plan, power_of_2
from lycoris.kernels.precision import Policy

from .common import MIN_TRIPLE, TL_DTYPE, in_turn, kernel, launch_options

Half = torch.Tensor | None
#: As kernels take it.
CHUNK = tl.constexpr(_CHUNK)
#: 16 bytes of 16 bits. Triton itself sees only whether a size is a multiple of 16.
_UNIT = 8


@triton.jit
def _half(
    w, w_b, rank, rows, columns, inside, strides,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of a half, w or w @ w_b, in fp32; 0 where not inside. rows (M, 1), columns (1, N)."""
    row_w = rows.to(tl.int64) * strides[0]
    if w_b is None:
        value = tl.load(w + row_w + columns.to(tl.int64) * strides[1], mask=inside, other=0.0)
        tile = value.to(COMPUTE).to(tl.float32)
    else:
        # Rows and columns beyond the tile's edge stay in bounds: they are multiples' remainders.
        tile = tl.zeros(inside.shape, tl.float32)
        column_w = columns.to(tl.int64) * strides[3]
        steps = tl.arange(0, BLOCK_R)
        for r in range(0, rank, BLOCK_R):
            ranks = (r + steps).to(tl.int64)
            ok = r + steps < rank
            left = tl.load(w + row_w + ranks[None, :] * strides[1], mask=ok[None, :], other=0.0)
            right = tl.load(w_b + ranks[:, None] * strides[2] + column_w, ok[:, None], other=0.0)
            tile += tl.dot(left.to(COMPUTE), right.to(COMPUTE), input_precision=PRECISION)
        tile = tl.where(inside, tile, 0.0)
    return tile


@triton.jit
def _elements(
    w, w_b, rank, rows, columns, ok_rows, ok_columns, strides,
    COMPUTE: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Elements of a half, w or w @ w_b, in fp32, by multiply-adds; 0 where either is not ok.

    rows and columns broadcast to the shape of the result. For tiles of fewer rows than a matrix
    product takes; sums are in two levels where they are longer than CHUNK.
    """
    w += rows.to(tl.int64) * strides[0]
    inside = ok_rows & ok_columns
    if w_b is None:
        value = tl.load(w + columns.to(tl.int64) * strides[1], mask=inside, other=0.0)
        tile = value.to(COMPUTE).to(tl.float32)
    else:
        w_b += columns.to(tl.int64) * strides[3]
        tile = tl.zeros(inside.shape, tl.float32)
        for first in range(0, rank, CHUNK):
            part = tl.zeros(inside.shape, tl.float32)
            for r in range(first, tl.minimum(rank, first + CHUNK), STEPS):
                for step in tl.static_range(STEPS):  # whose loads wait for none of the others
                    at = tl.cast(r + step, tl.int64)
                    left = tl.load(w + at * strides[1], mask=ok_rows & (at < rank), other=0.0)
                    right = tl.load(w_b + at * strides[2], ok_columns & (at < rank), other=0.0)
                    part += left.to(COMPUTE).to(tl.float32) * right.to(COMPUTE).to(tl.float32)
            tile += part
        # Only one of the factors is 0 beyond an edge, and the other may be an infinity.
        tile = tl.where(inside, tile, 0.0)
    return tile


@triton.jit
def _scaled(value, scale):
    if scale.dtype.is_ptr():
        value *= tl.load(scale)
    else:
        value *= scale
    return value


# --------------------------------------------------------------------------------------- weight


@kernel
def _kron(
    w1, w1_b, w2, w2_b, base, scale, out,
    A, B, C, units, rank_1, rank_2, share,
    stride_1r, stride_1k, stride_1p, stride_1c, stride_2r, stride_2k, stride_2p, stride_2c,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """One tile of w2 times a share of w1's elements, BLOCK_K of them at once."""
    in_turn()
    D = units * UNIT
    tiles_n = tl.cdiv(D, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    columns = (pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, None, :]
    inside = (rows < C) & (columns < D)
    tile = _elements(
        w2, w2_b, rank_2, rows, columns, rows < C, columns < D,
        (stride_2r, stride_2k, stride_2p, stride_2c), COMPUTE, 8,
    )  # fmt: skip
    tile = _scaled(tile, scale)
    width = tl.cast(B, tl.int64) * D
    place = rows.to(tl.int64) * width + columns
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, A * B)
    for i in range(start, end, BLOCK_K):
        pair = (i + tl.arange(0, BLOCK_K))[None, :, None]
        a = tl.minimum(pair, A * B - 1) // B
        b = tl.minimum(pair, A * B - 1) % B
        factor = _elements(
            w1, w1_b, rank_1, a, b, pair < end, pair < end,
            (stride_1r, stride_1k, stride_1p, stride_1c), COMPUTE, 8,
        )  # fmt: skip
        at = place + (a.to(tl.int64) * C * width + b.to(tl.int64) * D)
        ok = inside & (pair < end)
        value = factor * tile
        if base is not None:
            value += tl.load(base + at, mask=ok, other=0.0).to(tl.float32)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=ok)


@kernel
def _kron_grad(
    grad, w1, w1_b, w2, w2_b, scale, w1_parts, w2_parts,
    A, B, C, units, rank_1, rank_2, share,
    stride_1r, stride_1k, stride_1p, stride_1c, stride_2r, stride_2k, stride_2p, stride_2c,
    COMPUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """A tile of w2's gradient over a share of w1's elements, and what the tile adds to w1's."""
    in_turn()
    D = units * UNIT
    tiles_n = tl.cdiv(D, BLOCK_N)
    pid = tl.program_id(0)
    rows = (pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M))[:, None, None]
    columns = (pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, None, :]
    inside = (rows < C) & (columns < D)
    if w1_parts is not None:
        tile = _elements(
            w2, w2_b, rank_2, rows, columns, rows < C, columns < D,
            (stride_2r, stride_2k, stride_2p, stride_2c), COMPUTE, 8,
        )  # fmt: skip
        tile = _scaled(tile, scale)
        w1_parts += pid.to(tl.int64) * A * B
    total = tl.zeros((BLOCK_M, BLOCK_K, BLOCK_N), tl.float32)
    width = tl.cast(B, tl.int64) * D
    place = rows.to(tl.int64) * width + columns
    start = tl.program_id(1) * share
    end = tl.minimum(start + share, A * B)
    for i in range(start, end, BLOCK_K):
        lane = i + tl.arange(0, BLOCK_K)
        pair = lane[None, :, None]
        a = tl.minimum(pair, A * B - 1) // B
        b = tl.minimum(pair, A * B - 1) % B
        at = place + (a.to(tl.int64) * C * width + b.to(tl.int64) * D)
        value = tl.load(grad + at, mask=inside & (pair < end), other=0.0).to(tl.float32)
        if w2_parts is not None:
            total += value * _elements(
                w1, w1_b, rank_1, a, b, pair < end, pair < end,
                (stride_1r, stride_1k, stride_1p, stride_1c), COMPUTE, 8,
            )  # fmt: skip
        if w1_parts is not None:
            # Along the rows first, which a warp does by itself: rows may be spread over warps, and
            # whole rows would then pass through shared memory.
            tl.store(w1_parts + lane, tl.sum(tl.sum(value * tile, 2), 0), mask=lane < end)
    if w2_parts is not None:
        part = w2_parts + tl.program_id(1).to(tl.int64) * C * D
        at_part = rows.to(tl.int64) * D + columns
        tl.store(part + at_part, _scaled(tl.sum(total, 1, keep_dims=True), scale), mask=inside)


def _strides(w: torch.Tensor, w_b: Half) -> tuple[int, int, int, int]:
    return (*w.stride(), *((0, 0) if w_b is None else w_b.stride()))  # type: ignore[return-value]


def _sizes(w: torch.Tensor, w_b: Half) -> tuple[int, int, int]:
    """Rows, columns and rank of a half; a dense one has no rank."""
    return (*w.shape, 0) if w_b is None else (w.shape[0], w_b.shape[1], w_b.shape[0])


def _precision(policy: Policy, *lengths: int) -> str:
    """How matrix products are done; ``lengths`` are their reductions, where there is one (> 0)."""
    if policy.compute is torch.float32 and not policy.tf32:
        short = any(0 < length < MIN_TRIPLE for length in lengths)
        return "ieee" if short or torch.version.hip else "tf32x3"
    return "tf32"


def _tiles(plan: Plan, policy: Policy) -> dict[str, Any]:
    return {
        "COMPUTE": TL_DTYPE[policy.compute],
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
    }


def _options(plan: Plan, policy: Policy, rank: int, *lengths: int) -> dict[str, Any]:
    """Those of a kernel whose mixer is made of products."""
    return {
        **_tiles(plan, policy),
        "PRECISION": _precision(policy, *lengths),
        "BLOCK_R": min(64, max(16, power_of_2(rank))),
    }


@prepared
def kron(
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    w2_b: Half,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (a * c, b * d) = [base +] scale * kron(W1 (a, b), W2 (c, d)).

    A half is ``w`` where ``w_b`` is None, else the product of the pair, summed in fp32 from values
    cast to ``policy.compute`` and not rounded. M and N of ``plan`` are c and d, K is how many of
    W1's elements are taken at once; each split takes a contiguous share of them. ``base`` is
    contiguous, as ``out`` is.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (a, b, rank_1), (c, d, rank_2) = _sizes(w1, w1_b), _sizes(w2, w2_b)
    share = triton.cdiv(a * b, plan.splits * plan.block_k) * plan.block_k
    unit = _UNIT if d % _UNIT == 0 else 1
    fixed = (a, b, c, d // unit, rank_1, rank_2, share, *_strides(w1, w1_b), *_strides(w2, w2_b))
    options = _tiles(plan, policy) | {"UNIT": unit} | launch_options(plan)
    grid = (triton.cdiv(c, plan.block_m) * triton.cdiv(d, plan.block_n), plan.splits)
    return _kron.prepare(grid, (w1, w1_b, w2, w2_b, base, scale, out), options, fixed)


@prepared
def kron_grad(
    grad: torch.Tensor,
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    w2_b: Half,
    scale: float | torch.Tensor,
    w1_parts: torch.Tensor | None,
    w2_parts: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """fp32 partial sums of the gradients of W1 and of W2; see :func:`kron`.

    ``w1_parts`` is (tiles of W2, a, b) and ``w2_parts`` (splits, c, d), each scaled; None where no
    gradient is wanted. ``grad`` (a * c, b * d) is contiguous and read once.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (a, b, rank_1), (c, d, rank_2) = _sizes(w1, w1_b), _sizes(w2, w2_b)
    share = triton.cdiv(a * b, plan.splits * plan.block_k) * plan.block_k
    unit = _UNIT if d % _UNIT == 0 else 1
    fixed = (a, b, c, d // unit, rank_1, rank_2, share, *_strides(w1, w1_b), *_strides(w2, w2_b))
    options = _tiles(plan, policy) | {"UNIT": unit} | launch_options(plan)
    grid = (triton.cdiv(c, plan.block_m) * triton.cdiv(d, plan.block_n), plan.splits)
    args = (grad, w1, w1_b, w2, w2_b, scale, w1_parts, w2_parts)
    return _kron_grad.prepare(grid, args, options, fixed)
