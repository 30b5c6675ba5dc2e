"""Pointwise kernels: a scale along rows or columns with its gradients, and scaled sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import in_turn, inside_of, kernel


@triton.jit
def _number(scale):
    if scale.dtype.is_ptr():
        return tl.load(scale)
    else:
        return scale


@triton.jit
def _factor(vector, index, inside, scale, DIFF: tl.constexpr):
    value = tl.load(vector + index, mask=inside, other=0.0).to(tl.float32) * scale
    if DIFF:
        return value
    else:
        return 1.0 + value


@kernel
def _scaled(
    v, vector, scale, out,
    M, N, channels, inner,
    DIFF: tl.constexpr, BY_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """One tile of out = v * (1 + scale * vector); a row, or a column, has one channel."""
    in_turn()
    tiles_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    rm = pid // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    rn = pid % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    ok_m, ok_n = inside_of(rm, M, EVEN_M), inside_of(rn, N, EVEN_N)
    if BY_ROWS:
        factor = _factor(vector, rm % channels, ok_m, _number(scale), DIFF)[:, None]
    else:
        factor = _factor(vector, rn // inner, ok_n, _number(scale), DIFF)[None, :]
    tile = rm.to(tl.int64)[:, None] * N + rn.to(tl.int64)[None, :]
    inside = ok_m[:, None] & ok_n[None, :]
    value = tl.load(v + tile, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(out + tile, value.to(out.dtype.element_ty), mask=inside)


@kernel
def _gradients(
    grad, v, vector, scale, grad_v, partials,
    M, N, channels, inner, share,
    DIFF: tl.constexpr, BY_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
):  # fmt: skip
    """grad_v, and one share of scale * sum(grad * v) for a block of rows or of columns."""
    in_turn()
    first = tl.program_id(1).to(tl.int64) * share
    number = _number(scale)
    lane_m, lane_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if BY_ROWS:
        fixed = tl.program_id(0) * BLOCK_M + lane_m
        ok_fixed = inside_of(fixed, M, EVEN_M)
        factor = _factor(vector, fixed % channels, ok_fixed, number, DIFF)[:, None]
        left = tl.minimum(N - first, share).to(tl.int32)
        tile = fixed.to(tl.int64)[:, None] * N + (first + lane_n)[None, :]
        step = tl.cast(BLOCK_N, tl.int64)
    else:
        fixed = tl.program_id(0) * BLOCK_N + lane_n
        ok_fixed = inside_of(fixed, N, EVEN_N)
        factor = _factor(vector, fixed // inner, ok_fixed, number, DIFF)[None, :]
        left = tl.minimum(M - first, share).to(tl.int32)
        tile = (first + lane_m)[:, None] * N + fixed.to(tl.int64)[None, :]
        step = tl.cast(N, tl.int64) * BLOCK_M
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in range(0, left, BLOCK_N if BY_ROWS else BLOCK_M):
        if BY_ROWS:
            inside = ok_fixed[:, None] & inside_of(lane_n, left - at, EVEN_N)[None, :]
        else:
            inside = inside_of(lane_m, left - at, EVEN_M)[:, None] & ok_fixed[None, :]
        g = tl.load(grad + tile, mask=inside, other=0.0).to(tl.float32)
        total += g * tl.load(v + tile, mask=inside, other=0.0).to(tl.float32)
        if grad_v is not None:
            tl.store(grad_v + tile, (g * factor).to(grad_v.dtype.element_ty), mask=inside)
        tile += step
    if BY_ROWS:
        part = partials + tl.program_id(1).to(tl.int64) * M + fixed
        tl.store(part, tl.sum(total, 1) * number, mask=ok_fixed)
    else:
        part = partials + tl.program_id(1).to(tl.int64) * N + fixed
        tl.store(part, tl.sum(total, 0) * number, mask=ok_fixed)


@kernel
def _sum(delta, base, scale, out, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """One piece of out = [base +] scale * delta; ``out`` may be ``base``."""
    in_turn()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = inside_of(index, size, EVEN)
    value = tl.load(delta + index, mask=inside, other=0.0).to(tl.float32) * _number(scale)
    if base is not None:
        value += tl.load(base + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, value.to(out.dtype.element_ty), mask=inside)


def _options(v: torch.Tensor, diff: bool, by_rows: bool, plan: Plan) -> dict[str, object]:
    return {
        "DIFF": diff,
        "BY_ROWS": by_rows,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "EVEN_M": v.shape[0] % plan.block_m == 0,
        "EVEN_N": v.shape[1] % plan.block_n == 0,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }


def _scale(
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    diff: bool,
    by_rows: bool,
    plan: Plan,
) -> Launch:
    (m, n), channels = v.shape, vector.shape[0]
    grid = (triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.block_n),)
    fixed = (m, n, channels, max(1, n // channels))
    launch = _scaled.prepare(grid, (v, vector, scale, out), _options(v, diff, by_rows, plan), fixed)
    return lambda v, vector, scale, out, diff: launch(v, vector, scale, out)


@prepared
def scale_columns(
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    diff: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = v * (1 + scale * vector[c]), or v * scale * vector[c] where ``diff``.

    ``v`` and ``out`` (M, N) are dense; N is a multiple of the vector's length, and column j has
    channel j // (N / length). Everything is read as it is and used in fp32, ``out`` rounded once.
    ``scale``: a float, or a 0-d fp32 tensor on the device.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    return _scale(v, vector, scale, out, diff, False, plan)


@prepared
def scale_rows(
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    diff: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """As :func:`scale_columns`, where row i has channel i % length."""
    return _scale(v, vector, scale, out, diff, True, plan)


def _back(
    grad: torch.Tensor,
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    grad_v: torch.Tensor | None,
    partials: torch.Tensor,
    diff: bool,
    by_rows: bool,
    plan: Plan,
) -> Launch:
    (m, n), channels, splits = v.shape, vector.shape[0], partials.shape[0]
    if by_rows:
        across, along, block = triton.cdiv(m, plan.block_m), n, plan.block_n
    else:
        across, along, block = triton.cdiv(n, plan.block_n), m, plan.block_m
    share = triton.cdiv(along, splits * block) * block
    fixed = (m, n, channels, max(1, n // channels), share)
    args = (grad, v, vector, scale, grad_v, partials)
    launch = _gradients.prepare((across, splits), args, _options(v, diff, by_rows, plan), fixed)
    return lambda *args: launch(*args[:-1])


@prepared
def gradients_of_columns(
    grad: torch.Tensor,
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    grad_v: torch.Tensor | None,
    partials: torch.Tensor,
    diff: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """grad_v = grad * (1 + scale * vector[c]), and partial sums of scale * grad * v, in one pass.

    As in :func:`scale_columns`; ``partials`` (splits, N) fp32 takes the sums over contiguous
    shares of the rows, one column each. ``grad_v`` may be None.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    return _back(grad, v, vector, scale, grad_v, partials, diff, False, plan)


@prepared
def gradients_of_rows(
    grad: torch.Tensor,
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    grad_v: torch.Tensor | None,
    partials: torch.Tensor,
    diff: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """As :func:`gradients_of_columns`; ``partials`` (splits, M): sums over shares of a row."""
    return _back(grad, v, vector, scale, grad_v, partials, diff, True, plan)


@prepared
def add(
    delta: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] scale * delta, in fp32, rounded once; all dense and of one length.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    return _add(delta, base, scale, out, plan)


def _add(
    delta: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    plan: Plan,
) -> Launch:
    size = out.numel()
    options = {
        "BLOCK": plan.block_n,
        "EVEN": size % plan.block_n == 0,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    grid = (triton.cdiv(size, plan.block_n),)
    return _sum.prepare(grid, (delta, base, scale, out), options, (size,))


@prepared
def merge(
    weight: torch.Tensor,
    delta: torch.Tensor,
    scale: float | torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """weight += scale * delta, in fp32, rounded once to the weight's dtype; as :func:`add`."""
    launch = _add(delta, weight, scale, weight, plan)
    return lambda weight, delta, scale: launch(delta, weight, scale, weight)
