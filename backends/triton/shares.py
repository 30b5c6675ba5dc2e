"""Sums of partial sums: the second level of a reduction, each result rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import kernel


@triton.jit
def _sum(parts, out, pid, count, size, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Some elements of one sum: BLOCK_M shares at once, each lane's in order, then the lanes'."""
    column = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (column < size)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, count * width, BLOCK_M):
        share = (first + tl.arange(0, BLOCK_M))[:, None]
        at = ((share // width).to(tl.int64) * size + column[None, :]) * width + share % width
        total += tl.load(parts + at, mask=inside & (share < count * width), other=0.0)
    tl.store(out + column, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < size)


@kernel
def _add_up(
    parts, out, parts2, out2,
    blocks, count, size, width, count2, size2, width2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M2: tl.constexpr, BLOCK_N2: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if parts2 is None:
        _sum(parts, out, pid, count, size, width, BLOCK_M, BLOCK_N)
    elif pid < blocks:
        _sum(parts, out, pid, count, size, width, BLOCK_M, BLOCK_N)
    else:
        _sum(parts2, out2, pid - blocks, count2, size2, width2, BLOCK_M2, BLOCK_N2)


@prepared
def add_up(
    parts: torch.Tensor,
    out: torch.Tensor,
    parts2: torch.Tensor | None,
    out2: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (size,) = the sum of ``parts`` (count, size, width) over both other dimensions.

    In fp32, in an order that depends on shapes and Plan alone. ``out2`` is that of ``parts2``,
    where there is one. Tensors are contiguous and no sum has 2^31 terms. M of ``plan`` is how many
    terms of a sum are added at once, K the same for ``parts2``, and N the elements of a tile.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    count, size, width = parts.shape
    count2, size2, width2 = (0, 0, 1) if parts2 is None else parts2.shape
    columns, columns2 = plan.block_n // plan.block_m, plan.block_n // plan.block_k
    blocks = triton.cdiv(size, columns)
    options = {
        "BLOCK_M": plan.block_m,
        "BLOCK_N": columns,
        "BLOCK_M2": plan.block_k,
        "BLOCK_N2": columns2,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    fixed = (blocks, count, size, width, count2, size2, width2)
    grid = (blocks + triton.cdiv(size2, columns2),)
    return _add_up.prepare(grid, (parts, out, parts2, out2), options, fixed)
