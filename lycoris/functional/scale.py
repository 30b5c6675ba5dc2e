"""IA3, scaled sums and merging: see :mod:`lycoris.kernels.ops.scale`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import check_flag, check_integer, check_tensor
from ..kernels.shapes import outermost_first
from .table import OPS


def _order(t: Tensor) -> list[int] | None:
    """The permutation that makes a dense tensor contiguous; None where nothing is to be done."""
    if t.is_contiguous():
        return None
    order = outermost_first(t)
    return order if t.permute(order).is_contiguous() else None


def _back(t: Tensor, order: list[int]) -> Tensor:
    return t.permute([order.index(i) for i in range(len(order))])


def ia3_scale(
    v: Tensor,
    scale: Tensor,
    *,
    axis: int = -1,
    multiplier: float | Tensor = 1.0,
    diff: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``v * (1 + multiplier * scale[c])``, c the index along ``axis``.

    Source: Liu et al., 2022 (IA3), as LyCORIS stores it: the learned vector's difference to 1.

    Args:
        v: an activation or a weight of any shape; of any dense layout, which the result keeps.
        scale: (C,), C the size of ``axis``, or that with ones around it, as (1, C, 1, 1); where it
            has as many dimensions as ``v``, C must be at ``axis``.
        axis: the dimension of ``v`` that is scaled.
        multiplier: a number or a 0-d tensor, applied in fp32.
        diff: return ``v * multiplier * scale[c]``, the difference to ``v``.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        v's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, axis, device or multiplier does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    dims = check_tensor("ia3_scale", "v", v).dim()
    axis = check_integer("ia3_scale", "axis", axis)
    if not -dims <= axis < dims:
        raise ValueError(
            f"ia3_scale: axis is {axis}; expected one of the {dims} dimensions of v, which has "
            f"shape {tuple(v.shape)}"
        )
    axis %= dims
    if check_tensor("ia3_scale", "scale", scale).dim() > 1:
        places = [i for i, n in enumerate(scale.shape) if n != 1]
        # A (C, 1) for the rows of a square weight must not scale its columns.
        if len(places) > 1 or (scale.dim() == dims and places not in ([], [axis])):
            raise ValueError(
                f"ia3_scale: scale has shape {tuple(scale.shape)}; expected ({v.shape[axis]},), "
                f"or that with ones around it, for axis {axis} of v, of shape {tuple(v.shape)}"
            )
        scale = scale.reshape(-1)
    order = _order(v)
    if order is not None:
        v, axis = v.permute(order), order.index(axis)
    attributes = (axis - dims, check_flag("ia3_scale", "diff", diff))
    out = OPS["ia3_scale"](
        (v, scale), multiplier, attributes=attributes, backend=backend, out_dtype=out_dtype
    )
    return out if order is None else _back(out, order)


def add_scaled(
    base: Tensor,
    delta: Tensor,
    scale: float | Tensor = 1.0,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``base + scale * delta`` in one pass, in fp32, rounded once.

    Args:
        base: of any shape; of any dense layout, which the result keeps where ``delta`` shares it.
        delta: base's shape.
        scale: a number or a 0-d tensor, applied in fp32.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        base's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    check_tensor("add_scaled", "base", base)
    check_tensor("add_scaled", "delta", delta)
    alike = base.shape == delta.shape and base.stride() == delta.stride()
    order = _order(base) if alike else None
    if order is not None:
        base, delta = base.permute(order), delta.permute(order)
    out = OPS["add_scaled"]((delta, base), scale, backend=backend, out_dtype=out_dtype)
    return out if order is None else _back(out, order)


def merge_(
    weight: Tensor,
    delta: Tensor,
    multiplier: float | Tensor = 1.0,
    *,
    backend: str | None = None,
) -> Tensor:
    """``weight += multiplier * delta`` in place: summed in fp32, rounded once, never recorded.

    The same call with ``-multiplier`` undoes it to that rounding: merging and unmerging again and
    again drifts no further after the first time.

    Args:
        weight: changed in place, in its own dtype; of any layout that is not expanded.
        delta: weight's shape; only read, and cloned first where it shares memory with ``weight``.
        multiplier: a number or a 0-d tensor, applied in fp32.
        backend: overrides the selection for this call.

    Returns:
        ``weight`` itself.

    Raises:
        RuntimeError: ``weight`` requires a gradient, and grad mode is on; or it is an inference
            tensor, outside of inference mode.
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or multiplier does not fit, elements of ``weight`` share
            memory, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    check_tensor("merge_", "weight", weight)
    target, delta = weight, check_tensor("merge_", "delta", delta).detach()
    order = _order(weight) if weight.shape == delta.shape else None
    if order is not None:
        target, delta = weight.permute(order), delta.permute(order)
    OPS["merge_"]((target, delta), multiplier, backend=backend)
    return weight
