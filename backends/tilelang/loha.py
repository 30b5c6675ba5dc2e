"""LoHa: the elementwise product of two low-rank weights, generated tile by tile.

A tile of the weight exists on chip only: stored once (``weight``), multiplied with x
(``dense_product``), or multiplied into a tile of the weight's gradient (``factor_grads``). At a
small rank the products of khatri_rao.py make it a LoRA. loha_kernels.py holds the kernels.
"""

from typing import Any

import torch
from torch import Tensor

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from . import loha_kernels as kernels
from .common import build, compact


def _settings(plan: Plan, policy: Policy, device: torch.device) -> tuple[Any, ...]:
    """Tiles, compute dtype, and how to run them; on a CPU one thread and no pipeline."""
    blocks = (plan.block_m, plan.block_n, plan.block_k)
    if device.type == "cpu":
        return blocks, policy.compute, False, 32, 1
    # A warp takes two mma tiles of 8 x 8 at least.
    warps = min(plan.num_warps, plan.block_m * min(blocks) // 128)
    return blocks, policy.compute, policy.tf32, 32 * warps, plan.num_stages


def _sizes(device: torch.device, *sizes: int) -> tuple[int | None, ...]:
    """Sizes to compile in: none on a CPU, so that one build serves every shape."""
    return tuple(None if device.type == "cpu" else size for size in sizes)


def _factor(scale: float | Tensor) -> float | Tensor:
    return scale.reshape(1) if isinstance(scale, Tensor) else scale


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
        KernelBuildError: the kernel can't be built.
    """
    (m, rank), n = w1_a.shape, w1_b.shape[1]
    kernel = build(
        kernels.weight_kernel,
        (
            _sizes(out.device, m, n, rank),
            (w1_a.dtype, None if base is None else base.dtype, out.dtype),
            isinstance(scale, Tensor),
            *_settings(plan, policy, out.device),
        ),
        out.device,
    )

    def launch(
        w1_a: Tensor,
        w1_b: Tensor,
        w2_a: Tensor,
        w2_b: Tensor,
        base: Tensor | None,
        scale: float | Tensor,
        out: Tensor,
    ) -> None:
        tensors = (w1_a, w1_b, w2_a, w2_b, out if base is None else base)
        kernel(*map(compact, tensors), _factor(scale), compact(out))

    return launch


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
        KernelBuildError: the kernel can't be built.
    """
    (m, rank), n = w1_a.shape, w1_b.shape[1]
    device = part_a.device
    kernel = build(
        kernels.factor_grads_kernel,
        (
            _sizes(device, m, n, rank),
            _sizes(device, *part_a.shape[1:3], part_b.shape[1]),
            (grad.dtype, None if x is None else x.dtype, w1_a.dtype),
            isinstance(scale, Tensor),
            *_settings(plan, policy, device),
            plan.strip(n),
        ),
        device,
    )

    def launch(
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
    ) -> None:
        tensors = (grad, grad if x is None else x, w1_a, w1_b, w2_a, w2_b, part_a, part_b)
        kernel(*map(compact, tensors), _factor(scale), start)

    return launch


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
        KernelBuildError: the kernel can't be built.
    """
    k, (rank, n) = a.shape[1], q1.shape
    # A vector is contiguous both ways: whichever way the other factor lies.
    transposed = not (p1.is_contiguous() and q1.is_contiguous())
    kernel = build(
        kernels.dense_product_kernel,
        (
            _sizes(out.device, n, k, rank),
            (a.dtype, p1.dtype, None if base is None else base.dtype, out.dtype),
            transposed,
            isinstance(scale, Tensor),
            *_settings(plan, policy, out.device),
        ),
        out.device,
    )

    def launch(
        a: Tensor,
        p1: Tensor,
        q1: Tensor,
        p2: Tensor,
        q2: Tensor,
        base: Tensor | None,
        scale: float | Tensor,
        out: Tensor,
    ) -> None:
        factors = [t.t() if transposed else t for t in (p1, q1, p2, q2)]
        tensors = (a, *factors, out if base is None else base)
        kernel(*map(compact, tensors), _factor(scale), compact(out))

    return launch
