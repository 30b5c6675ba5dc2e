"""LoHa: the elementwise product of two low-rank weights, generated tile by tile.

A tile of the weight exists in registers only: stored once (``weight``), multiplied with x
(``dense_product``), or multiplied into a tile of the weight's gradient (``factor_grads``). At a
small rank the products of khatri_rao.py make it a LoRA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import TL_DTYPE, in_turn, input_precision, inside_of, kernel

#: Products are chained here, whose errors add: below this K a TF32 triple misses the fp32 bound.
_MIN_TRIPLE = 64


def _launch_options(plan: Plan) -> dict[str, int]:
    # AMD's shared memory is a third of NVIDIA's; its warps are twice as wide, and 8 of them in a
    # block have half the registers each.
    if torch.version.hip:
        return {"num_warps": min(plan.num_warps, 4), "num_stages": min(plan.num_stages, 2)}
    return {"num_warps": plan.num_warps, "num_stages": plan.num_stages}


@triton.jit
def _tile(ptr, rows, columns, ok, stride_row, stride_column):
    """Where ``ok``, the elements at (rows, columns); zeros elsewhere."""
    offsets = (
        rows.to(tl.int64)[:, None] * stride_row + columns.to(tl.int64)[None, :] * stride_column
    )
    return tl.load(ptr + offsets, mask=ok, other=0.0)


@triton.jit
def _low_rank(
    a, b, rm, rn, ok_m, ok_n, R, stride_am, stride_ar, stride_br, stride_bn,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, BLOCK_R: tl.constexpr,
    EVEN_R: tl.constexpr, ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    """The tile (rm, rn) of a @ b in fp32; in two levels where R is longer than FLUSH.

    Where R is a constant, rows of 8 elements, too, are loaded at once.
    """
    part = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    if FLUSH:
        total = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    for r in tl.range(0, BLOCK_R if ONE_STEP else R, BLOCK_R):
        rr = r + tl.arange(0, BLOCK_R)
        ok_r = inside_of(rr, R, EVEN_R)
        x = _tile(a, rm, rr, ok_m[:, None] & ok_r[None, :], stride_am, stride_ar).to(COMPUTE)
        y = _tile(b, rr, rn, ok_r[:, None] & ok_n[None, :], stride_br, stride_bn).to(COMPUTE)
        part = tl.dot(x, y, part, input_precision=PRECISION)
        if FLUSH:
            if (r + BLOCK_R) % FLUSH == 0:
                total += part
                part = tl.zeros((rm.shape[0], rn.shape[0]), tl.float32)
    if FLUSH:
        part += total
    return part


@triton.jit
def _scaled(value, scale):
    if scale.dtype.is_ptr():
        return value * tl.load(scale)
    else:
        return value * scale


@kernel
def _weight(
    a1, b1, a2, b2, base, scale, out, M, N, R,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m, ok_n = inside_of(rm, M, EVEN_M), inside_of(rn, N, EVEN_N)
    first = _low_rank(
        a1, b1, rm, rn, ok_m, ok_n, R, R, 1, N, 1,
        COMPUTE, PRECISION, BLOCK_R, EVEN_R, ONE_STEP, FLUSH,
    )  # fmt: skip
    second = _low_rank(
        a2, b2, rm, rn, ok_m, ok_n, R, R, 1, N, 1,
        COMPUTE, PRECISION, BLOCK_R, EVEN_R, ONE_STEP, FLUSH,
    )  # fmt: skip
    acc = _scaled(first * second, scale)
    offsets = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = ok_m[:, None] & ok_n[None, :]
    if base is not None:
        acc += tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@prepared
def weight(
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    base: Tensor | None,
    scale: float | Tensor,
    out: Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] scale * (w1_a @ w1_b) o (w2_a @ w2_b), rounded once.

    ``w*_a`` (M, r), ``w*_b`` (r, N), ``base`` and ``out`` (M, N): contiguous. ``plan.block_k`` is
    along r. ``scale``: a float, or a 0-d fp32 tensor on the device.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, rank), n = w1_a.shape, w1_b.shape[1]
    options = {
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, rank, _MIN_TRIPLE),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_R": plan.block_k,
        "EVEN_M": m % plan.block_m == 0,
        "EVEN_N": n % plan.block_n == 0,
        "EVEN_R": rank % plan.block_k == 0,
        "ONE_STEP": rank <= plan.block_k,
        "FLUSH": CHUNK if rank > CHUNK else 0,
        **_launch_options(plan),
    }
    grid = (triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.block_n),)
    args = (w1_a, w1_b, w2_a, w2_b, base, scale, out)
    return _weight.prepare(grid, args, options, (m, n, rank))


@triton.jit
def _leave(part, slot, rank_columns, columns, ok, R, N, value, adds):
    """Stores (columns, rank) sums of a b factor as (rank, columns), on top of earlier ones."""
    offsets = (slot.to(tl.int64) * R + rank_columns)[None, :] * N + columns.to(tl.int64)[:, None]
    if adds:
        value += tl.load(part + offsets, mask=ok, other=0.0)
    tl.store(part + offsets, value, mask=ok)


@triton.jit
def _leave_rows(part, slot, rows, local, rank_columns, ok_r, R, value):
    """Stores (rows, rank) sums of an a factor."""
    row = slot.to(tl.int64) * rows + local
    ok = (local < rows)[:, None] & ok_r[None, :]
    tl.store(part + row[:, None] * R + rank_columns[None, :], value, mask=ok)


@kernel
def _factor_grads(
    grad, x, a1, b1, a2, b2, part_a, part_b, scale, start, tokens, M, N, rows,
    R: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, RANK_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_R: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH_R: tl.constexpr, FLUSH: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """A strip of tiles of the weight's gradient, and its part in the gradients of all four factors.

    FLUSH: tokens between two additions to the second level.
    """
    in_turn()
    tiles_m, strips = rows // BLOCK_M, tl.cdiv(N, STRIP * BLOCK_N)
    pid = tl.program_id(0)
    pid_m, pid_n = pid // strips, pid % strips
    local = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    rm = start + local
    ok_m = inside_of(rm, M, EVEN_M)
    if STRIP > 1:
        sum_1 = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        sum_2 = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for tile in tl.range(0, STRIP):
        rn = (pid_n * STRIP + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
        ok_n = inside_of(rn, N, EVEN_N)
        if x is None:
            delta = _tile(grad, rm, rn, ok_m[:, None] & ok_n[None, :], N, 1).to(tl.float32)
        else:
            delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            rk = tl.arange(0, BLOCK_K)
            for k in tl.range(0, tokens, BLOCK_K):
                rt = k + rk
                ok_t = rt < tokens
                g = _tile(grad, rm, rt, ok_m[:, None] & ok_t[None, :], 1, M).to(COMPUTE)
                y = _tile(x, rt, rn, ok_t[:, None] & ok_n[None, :], N, 1).to(COMPUTE)
                delta = tl.dot(g, y, delta, input_precision=PRECISION)
                if (k + BLOCK_K) % FLUSH == 0:
                    total += delta
                    delta = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            delta += total
        delta = _scaled(delta, scale)
        # One half after the other: three tiles in fp32 at once would not fit in registers.
        second = _low_rank(
            a2, b2, rm, rn, ok_m, ok_n, R, R, 1, N, 1,
            COMPUTE, RANK_PRECISION, BLOCK_K, EVEN_R, ONE_STEP, FLUSH_R,
        )  # fmt: skip
        grad_1 = (delta * second).to(COMPUTE)
        first = _low_rank(
            a1, b1, rm, rn, ok_m, ok_n, R, R, 1, N, 1,
            COMPUTE, RANK_PRECISION, BLOCK_K, EVEN_R, ONE_STEP, FLUSH_R,
        )  # fmt: skip
        grad_2 = (delta * first).to(COMPUTE)
        for r in tl.range(0, BLOCK_K if ONE_STEP else R, BLOCK_K, num_stages=1):
            rr = r + tl.arange(0, BLOCK_K)
            ok_r = inside_of(rr, R, EVEN_R)
            ok = ok_r[:, None] & ok_n[None, :]
            y = tl.trans(_tile(b1, rr, rn, ok, N, 1).to(COMPUTE))
            if STRIP > 1:
                sum_1 = tl.dot(grad_1, y, sum_1, input_precision=PRECISION)
            else:
                total_1 = tl.dot(grad_1, y, input_precision=PRECISION)
                _leave_rows(part_a, pid_n, rows, local, rr, ok_r, R, total_1)
            y = tl.trans(_tile(b2, rr, rn, ok, N, 1).to(COMPUTE))
            if STRIP > 1:
                sum_2 = tl.dot(grad_2, y, sum_2, input_precision=PRECISION)
            else:
                total_2 = tl.dot(grad_2, y, input_precision=PRECISION)
                _leave_rows(part_a, strips + pid_n, rows, local, rr, ok_r, R, total_2)
            ok = ok_m[:, None] & ok_r[None, :]
            ok_b = ok_n[:, None] & ok_r[None, :]
            y = _tile(a1, rm, rr, ok, R, 1).to(COMPUTE)
            total_1 = tl.dot(tl.trans(grad_1), y, input_precision=PRECISION)
            _leave(part_b, pid_m, rr, rn, ok_b, R, N, total_1, start > 0)
            y = _tile(a2, rm, rr, ok, R, 1).to(COMPUTE)
            total_2 = tl.dot(tl.trans(grad_2), y, input_precision=PRECISION)
            _leave(part_b, tiles_m + pid_m, rr, rn, ok_b, R, N, total_2, start > 0)
    if STRIP > 1:
        rr = tl.arange(0, BLOCK_K)
        ok_r = inside_of(rr, R, EVEN_R)
        _leave_rows(part_a, pid_n, rows, local, rr, ok_r, R, sum_1)
        _leave_rows(part_a, strips + pid_n, rows, local, rr, ok_r, R, sum_2)


@prepared
def factor_grads(
    grad: Tensor,
    x: Tensor | None,
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    part_a: Tensor,
    part_b: Tensor,
    scale: float | Tensor,
    start: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Partial sums of the factors' gradients over strips of tiles of a group of the weight's rows.

    The weight's gradient D, from row ``start`` on, is ``grad`` (M, N), or ``grad``^T ``x`` with
    ``grad`` (tokens, M) and ``x`` (tokens, N), never stored. ``w*_a`` (M, r), ``w*_b`` (r, N).
    With P1 = s D o W2 and P2 = s D o W1, rounded to ``policy.compute``, fp32 ``part_a``
    (2, strips, rows, r) takes P w_b^T of each of ``plan.splits`` strips of tiles along N, and
    ``part_b`` (2, row tiles, r, N) w_a^T P, added to what an earlier group left where ``start`` is
    not 0. A strip of several tiles needs a rank up to ``plan.block_k``.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, rank), n = w1_a.shape, w1_b.shape[1]
    rows = part_a.shape[2]
    strip = plan.strip(n)
    options = {
        "R": rank,
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(
            policy, min(m, n, n if x is None else x.shape[0]), _MIN_TRIPLE
        ),
        "RANK_PRECISION": input_precision(policy, rank, _MIN_TRIPLE),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_M": m % rows == 0,
        "EVEN_N": n % (plan.block_n * strip) == 0,
        "EVEN_R": rank % plan.block_k == 0,
        "ONE_STEP": rank <= plan.block_k,
        "FLUSH_R": CHUNK if rank > CHUNK else 0,
        "FLUSH": CHUNK,
        "STRIP": strip,
        **_launch_options(plan),
    }
    tokens = 0 if x is None else x.shape[0]
    args = (grad, x, w1_a, w1_b, w2_a, w2_b, part_a, part_b, scale, start)
    grid = (rows // plan.block_m * plan.splits,)
    return _factor_grads.prepare(grid, args, options, (tokens, m, n, rows))


@kernel
def _dense_product(
    a, p1, q1, p2, q2, base, scale, out, M, N, K, R, stride_pk, stride_pr, stride_qr, stride_qn,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, RANK_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EVEN_R: tl.constexpr,
    ONE_STEP: tl.constexpr, FLUSH_R: tl.constexpr, FLUSH: tl.constexpr,
):  # fmt: skip
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m, ok_n = rm < M, inside_of(rn, N, EVEN_N)
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLUSH:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        rk = k + tl.arange(0, BLOCK_K)
        ok_k = inside_of(rk, K, EVEN_K)
        x = _tile(a, rm, rk, ok_m[:, None] & ok_k[None, :], K, 1).to(COMPUTE)
        first = _low_rank(
            p1, q1, rk, rn, ok_k, ok_n, R, stride_pk, stride_pr, stride_qr, stride_qn,
            COMPUTE, RANK_PRECISION, BLOCK_K, EVEN_R, ONE_STEP, FLUSH_R,
        )  # fmt: skip
        second = _low_rank(
            p2, q2, rk, rn, ok_k, ok_n, R, stride_pk, stride_pr, stride_qr, stride_qn,
            COMPUTE, RANK_PRECISION, BLOCK_K, EVEN_R, ONE_STEP, FLUSH_R,
        )  # fmt: skip
        part = tl.dot(x, (first * second).to(COMPUTE), part, input_precision=PRECISION)
        if FLUSH:
            if (k + BLOCK_K) % FLUSH == 0:
                total += part
                part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if FLUSH:
        part += total
    acc = _scaled(part, scale)
    offsets = rm.to(tl.int64)[:, None] * N + rn[None, :]
    inside = ok_m[:, None] & ok_n[None, :]
    if base is not None:
        acc += tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=inside)


@prepared
def dense_product(
    a: Tensor,
    p1: Tensor,
    q1: Tensor,
    p2: Tensor,
    q2: Tensor,
    base: Tensor | None,
    scale: float | Tensor,
    out: Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] scale * a @ W, W = (p1 @ q1) o (p2 @ q2) rounded to compute, never stored.

    ``a`` (M, K), ``base`` and ``out`` (M, N): contiguous. ``p*`` (K, r) and ``q*`` (r, N) are all
    contiguous or all transposed.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    (m, k), (rank, n) = a.shape, q1.shape
    fixed = (m, n, k, rank, *p1.stride(), *q1.stride())
    options = {
        "COMPUTE": TL_DTYPE[policy.compute],
        "PRECISION": input_precision(policy, k, _MIN_TRIPLE),
        "RANK_PRECISION": input_precision(policy, rank, _MIN_TRIPLE),
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_N": n % plan.block_n == 0,
        "EVEN_K": k % plan.block_k == 0,
        "EVEN_R": rank % plan.block_k == 0,
        "ONE_STEP": rank <= plan.block_k,
        "FLUSH_R": CHUNK if rank > CHUNK else 0,
        "FLUSH": CHUNK if k > CHUNK else 0,
        **_launch_options(plan),
    }
    grid = (triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.block_n),)
    return _dense_product.prepare(grid, (a, p1, q1, p2, q2, base, scale, out), options, fixed)
