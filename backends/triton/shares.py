"""Sums of partial sums: the second level of a reduction, each result rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan, sum_sizes
from lycoris.kernels.precision import Policy

from .common import in_turn, kernel


@triton.jit
def _sum(
    parts, base, out, pid, count, length, width, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Some elements of one sum: BLOCK_M shares at once, each lane's in order, then the lanes'."""
    column = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < size
    lanes = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, count * width, BLOCK_M):
        share = (first + tl.arange(0, BLOCK_M))[:, None]
        at = ((share // width).to(tl.int64) * length + column[None, :]) * width + share % width
        ok = (share < count * width) & inside[None, :]
        lanes += tl.load(parts + at, mask=ok, other=0.0)
    total = tl.sum(lanes, 0)
    if base is not None:
        total += tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + column, total.to(out.dtype.element_ty), mask=inside)


@kernel
def _add_up(
    parts, base, out, parts2, out2,
    blocks, count, length, width, size, count2, length2, width2, size2,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M2: tl.constexpr, BLOCK_N2: tl.constexpr,
):  # fmt: skip
    in_turn()
    pid = tl.program_id(0)
    if parts2 is None:
        _sum(parts, base, out, pid, count, length, width, size, BLOCK_M, BLOCK_N)
    elif pid < blocks:
        _sum(parts, base, out, pid, count, length, width, size, BLOCK_M, BLOCK_N)
    else:
        pid -= blocks
        _sum(parts2, None, out2, pid, count2, length2, width2, size2, BLOCK_M2, BLOCK_N2)


@prepared
def add_up(
    parts: torch.Tensor,
    base: torch.Tensor | None,
    out: torch.Tensor,
    parts2: torch.Tensor | None,
    out2: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] the sum of ``parts``, rounded once; ``out2`` that of ``parts2``, if given.

    ``parts`` is fp32, (count, *shape) or (count, *shape, width), and is summed over count and
    width, in fp32 and in an order that depends on shapes and Plan alone. ``out`` has that shape,
    or its first rows. ``base``, which has the shape of ``out``, is None where there are two sums.
    Every part, ``base`` and ``out`` are dense and lie in memory alike. No sum has 2^31 terms, no
    output 2^31 elements. M of ``plan`` is how many terms of a sum are added at once, K the same for
    ``parts2``, and N terms times elements of a tile.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    sizes = sum_sizes(parts, out)
    sizes2 = (0, 0, 1, 0) if parts2 is None or out2 is None else sum_sizes(parts2, out2)
    columns, columns2 = plan.block_n // plan.block_m, plan.block_n // plan.block_k
    blocks = triton.cdiv(sizes[-1], columns)
    options: dict[str, int] = {
        "BLOCK_M": plan.block_m,
        "BLOCK_N": columns,
        "BLOCK_M2": plan.block_k,
        "BLOCK_N2": columns2,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    if not torch.version.hip:
        # Left alone, ptxas takes so few registers that two loads of a step are on their way, not
        # all; 64 would do for 16 elements a thread, not for 32.
        options["maxnreg"] = 96
    grid = (blocks + triton.cdiv(sizes2[-1], columns2),)
    args = (parts, base, out, parts2, out2)
    return _add_up.prepare(grid, args, options, (blocks, *sizes, *sizes2))
