"""Pointwise kernels: a scale along rows or columns with its gradients, and scaled sums.

All sizes are symbolic, so that a build serves every shape: kernels see matrices whose rows are
split into groups of ``width`` neighbours, which is static and is what a thread loads at once.
``one`` is 1, or 0 for the difference to v alone.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from math import gcd
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import build
from .scale_kernels import (
    gradients_of_columns_kernel,
    gradients_of_rows_kernel,
    scale_kernel,
    sum_kernel,
)

_WIDTH = 8  # 16 bytes of a 16-bit type


def _width(on_cuda: bool, *lengths: int) -> int:
    """How many neighbours a thread takes: a CPU has one build, for every length."""
    return gcd(_WIDTH, *lengths) if on_cuda else 1


def _grouped(v: torch.Tensor) -> tuple[int, int, int]:
    width = _width(v.is_cuda, v.shape[1])
    return v.shape[0], v.shape[1] // width, width


def _number(scale: float | torch.Tensor) -> float | torch.Tensor:
    return scale.view(1) if isinstance(scale, torch.Tensor) else scale


def _params(
    v: torch.Tensor, channels: int, scale: float | torch.Tensor, by_rows: bool, plan: Plan
) -> tuple[Any, ...]:
    """What a build of the matrix kernels depends on beside dtypes."""
    on_cuda = v.is_cuda
    width = _width(on_cuda, v.shape[1])
    return (
        isinstance(scale, torch.Tensor),
        by_rows,
        on_cuda and not by_rows and v.shape[1] == channels,  # a CPU's build works that out
        (plan.block_m, plan.block_n // width, width),
        32 * plan.num_warps if on_cuda else 32,
        "int32" if on_cuda else "int64",
    )


def _scale(
    v: torch.Tensor,
    vector: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    diff: bool,
    by_rows: bool,
    plan: Plan,
) -> Launch:
    params = _params(v, vector.shape[0], scale, by_rows, plan)
    kernel = build(scale_kernel, ((v.dtype, vector.dtype, out.dtype), *params), out.device)
    shape = _grouped(v)

    def launch(
        v: torch.Tensor,
        vector: torch.Tensor,
        scale: float | torch.Tensor,
        out: torch.Tensor,
        diff: bool,
    ) -> None:
        kernel(v.view(shape), vector, _number(scale), float(not diff), out.view(shape))

    return launch


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
        KernelBuildError: the kernel can't be built.
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
    params = _params(v, vector.shape[0], scale, by_rows, plan)
    kernel = build(
        gradients_of_rows_kernel if by_rows else gradients_of_columns_kernel,
        ((grad.dtype, v.dtype, vector.dtype), grad_v is not None, *params),
        v.device,
    )
    shape, splits = _grouped(v), partials.shape[0]
    sums = (splits, shape[0]) if by_rows else (splits, *shape[1:])

    def launch(
        grad: torch.Tensor,
        v: torch.Tensor,
        vector: torch.Tensor,
        scale: float | torch.Tensor,
        grad_v: torch.Tensor | None,
        partials: torch.Tensor,
        diff: bool,
    ) -> None:
        made = () if grad_v is None else (grad_v.view(shape),)
        numbers = _number(scale), float(not diff)
        kernel(grad.view(shape), v.view(shape), vector, *numbers, *made, partials.view(sums))

    return launch


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
        KernelBuildError: the kernel can't be built.
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
        KernelBuildError: the kernel can't be built.
    """
    kernel, shape = _sum(delta, None if base is None else base.dtype, scale, out, False, plan)

    def launch(
        delta: torch.Tensor,
        base: torch.Tensor | None,
        scale: float | torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        terms = () if base is None else (base.view(shape),)
        kernel(delta.view(shape), *terms, _number(scale), out.view(shape))

    return launch


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
    kernel, shape = _sum(delta, weight.dtype, scale, weight, True, plan)

    def launch(weight: torch.Tensor, delta: torch.Tensor, scale: float | torch.Tensor) -> None:
        kernel(delta.view(shape), _number(scale), weight.view(shape))

    return launch


def _sum(
    delta: torch.Tensor,
    base: torch.dtype | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    in_place: bool,
    plan: Plan,
) -> tuple[Any, tuple[int, int]]:
    size = out.numel()
    width = _width(out.is_cuda, size)
    kernel = build(
        sum_kernel,
        (
            (delta.dtype, base, out.dtype),
            isinstance(scale, torch.Tensor),
            in_place,
            width,
            plan.block_n // width,
            32 * plan.num_warps if out.is_cuda else 32,
            "int32" if out.is_cuda else "int64",
        ),
        out.device,
    )
    return kernel, (size // width, width)
