"""DoRA: the gradient of W + s up down, tile by tile, contracted with up and down."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import kernel
from .dora import _along, _merged, _number, _options, _read, _unit, precision

Tensor = torch.Tensor
Number = float | torch.Tensor


@triton.jit
def _gradient(
    weight, grad, up, down, factor, norm, made, group, rows, columns, ok_m, ok_n, N, L,
    R: tl.constexpr, BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of W + s up down: made[0] * grad + made[1] * its unit vector."""
    tile = _merged(weight, None, up, down, factor, rows, columns, ok_m, ok_n, N, R,
                   COMPUTE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
    if BY_COLUMN:
        line = columns // group
        ok = ok_n
    else:
        line = rows
        ok = ok_m
    length = tl.load(norm + line, mask=ok, other=0.0)
    value = _unit(tile, length, BY_COLUMN) * _along(
        tl.load(made + L + line, mask=ok, other=0.0), BY_COLUMN
    )
    if grad is not None:
        g = _read(grad, rows, columns, ok_m[:, None] & ok_n[None, :], N)
        value += g * _along(tl.load(made + line, mask=ok, other=0.0), BY_COLUMN)
    return value


@kernel
def _contract_rows(
    weight, grad, up, down, factor, norm, made, grad_weight, out, group,
    O, N, L, R: tl.constexpr,
    BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (O, r) = s * gradient @ down^T, and the gradient itself into grad_weight."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok_m = rows < O
    ok_r = rank < R
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK_N)
        ok_n = columns < N
        value = _gradient(weight, grad, up, down, factor, norm, made, group, rows, columns,
                          ok_m, ok_n, N, L, R, BY_COLUMN, COMPUTE, PRECISION,
                          BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        if grad_weight is not None:
            if tl.program_id(1) == 0:
                at = rows.to(tl.int64)[:, None] * N + columns[None, :]
                kept = value.to(grad_weight.dtype.element_ty)
                tl.store(grad_weight + at, kept, mask=ok_m[:, None] & ok_n[None, :])
        if out is not None:
            d = tl.load(
                down + rank.to(tl.int64)[None, :] * N + columns[:, None],
                mask=ok_n[:, None] & ok_r[None, :], other=0.0,
            )  # fmt: skip
            # A dot of its own: one chain over all columns would lose low bits.
            total += tl.dot(value, d.to(COMPUTE).to(tl.float32), input_precision=WIDE)
    if out is not None:
        at = rows.to(tl.int64)[:, None] * R + rank[None, :]
        total *= _number(factor)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=ok_m[:, None] & ok_r[None, :])


@kernel
def _contract_columns(
    weight, grad, up, down, factor, norm, made, out, group,
    O, N, L, R: tl.constexpr,
    BY_COLUMN: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out (r, N) = s * up^T @ gradient."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    ok_n = columns < N
    ok_r = rank < R
    total = tl.zeros((BLOCK_R, BLOCK_N), tl.float32)
    for start in tl.range(0, O, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        ok_m = rows < O
        value = _gradient(weight, grad, up, down, factor, norm, made, group, rows, columns,
                          ok_m, ok_n, N, L, R, BY_COLUMN, COMPUTE, PRECISION,
                          BLOCK_M, BLOCK_N, BLOCK_R)  # fmt: skip
        u = tl.load(
            up + rows.to(tl.int64)[None, :] * R + rank[:, None],
            mask=ok_r[:, None] & ok_m[None, :], other=0.0,
        )  # fmt: skip
        total += tl.dot(u.to(COMPUTE).to(tl.float32), value, input_precision=WIDE)
    at = rank.to(tl.int64)[:, None] * N + columns[None, :]
    total *= _number(factor)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok_r[:, None] & ok_n[None, :])


def _contraction(plan: Plan, policy: Policy, rank: int, length: int, group: int) -> dict[str, Any]:
    wide = {"BY_COLUMN": int(group > 0)} | _options(plan, policy, rank)
    return wide | {"WIDE": precision(policy, length, wide=True)}


@prepared
def contract_rows(
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    down: Tensor,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    grad_weight: Tensor | None,
    out: Tensor | None,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (O, r) = factor * G @ down^T, with G the gradient of M as :func:`rescale_back` says.

    G is also stored into ``grad_weight`` (O, N) where that is wanted. Without ``grad`` its first
    term is absent. G is not rounded; sums are fp32, in two levels.
    """
    (n_out, width), rank = weight.shape, up.shape[1]
    options = _contraction(plan, policy, rank, width, group)
    grid = (triton.cdiv(n_out, plan.block_m), triton.cdiv(rank, options["BLOCK_R"]))
    args = (weight, grad, up, down, factor, norm, made, grad_weight, out, group)
    return _contract_rows.prepare(grid, args, options, (n_out, width, norm.shape[0]))


@prepared
def contract_columns(
    weight: Tensor,
    grad: Tensor | None,
    up: Tensor,
    down: Tensor,
    factor: Number,
    norm: Tensor,
    made: Tensor,
    out: Tensor,
    group: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (r, N) = factor * up^T @ G; see :func:`contract_rows`."""
    (n_out, width), rank = weight.shape, up.shape[1]
    options = _contraction(plan, policy, rank, n_out, group)
    grid = (triton.cdiv(width, plan.block_n), triton.cdiv(rank, options["BLOCK_R"]))
    args = (weight, grad, up, down, factor, norm, made, out, group)
    return _contract_columns.prepare(grid, args, options, (n_out, width, norm.shape[0]))
