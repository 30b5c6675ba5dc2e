"""DoRA: see :mod:`lycoris.kernels.ops.dora` and :mod:`lycoris.kernels.ops.dora_apply`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..kernels.checks import as_float, check_flag, check_number, check_tensor
from .table import OPS

Axis = Literal["out", "in"]


def _flat_magnitude(op: str, weight: Tensor, magnitude: Tensor, axis: str) -> Tensor:
    """The magnitude as (n,), from any shape that says which axis it belongs to.

    Raises:
        TypeError: an operand is no tensor.
        ValueError: the axis or a shape does not fit; a (1, n) for the rows of a square weight, say,
            would broadcast along its columns.
    """
    if axis not in ("out", "in"):
        raise ValueError(f"{op}: axis is {axis!r}; expected 'out' or 'in'")
    check_tensor(op, "weight", weight)
    check_tensor(op, "magnitude", magnitude)
    if weight.dim() < 2:
        raise ValueError(f"{op}: weight has shape {tuple(weight.shape)}; expected (O, I, *k)")
    place = 0 if axis == "out" else 1
    n, shape = weight.shape[place], tuple(magnitude.shape)
    ones = (1,) * (len(shape) - 1 - place)
    if shape != (n,) and (len(shape) <= place or shape != (1,) * place + (n, *ones)):
        wanted = f"({n},) or ({n}, 1, ...)" if axis == "out" else f"({n},) or (1, {n}, 1, ...)"
        raise ValueError(
            f"{op}: magnitude has shape {shape}; expected {wanted}, one for each of weight's "
            f"{'rows' if axis == 'out' else 'input channels'} (axis={axis!r})"
        )
    return magnitude if len(shape) == 1 else magnitude.reshape(n)


def dora_weight(
    weight: Tensor,
    magnitude: Tensor,
    *,
    delta: Tensor | None = None,
    multiplier: float | Tensor = 1.0,
    axis: Axis = "out",
    detach_norm: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``M * (multiplier * (magnitude / norm(M) - 1) + 1)`` with ``M = weight [+ delta]``.

    The norm is taken over each row of M (``axis="out"``: all but the first dimension), or over each
    input channel (``axis="in"``: all but the second). It is scaled by the largest element, so that
    one of 1e-30 survives fp32; where it is 0, magnitude / norm and its derivatives are 0.
    A NaN makes its whole line NaN.
    Sources: Liu et al., 2024 (DoRA); LyCORIS's ``wd_on_out``.

    Args:
        weight: (O, I), or a convolution's (O, I, k...); read as it is.
        magnitude: one value a line: (O,), (O, 1, ...) for ``axis="out"``; (I,), (1, I, 1, ...) for
            ``axis="in"``.
        delta: of weight's shape, added in fp32.
        multiplier: a number or a 0-d tensor: 0 gives M, 1 the rescaled M.
        axis: ``"out"`` or ``"in"``.
        detach_norm: whether the norm is a constant to the gradients, as in HF PEFT.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        weight's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device, axis or multiplier does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    magnitude = _flat_magnitude("dora_weight", weight, magnitude, axis)
    return OPS["dora_weight"](
        (weight, magnitude, delta),
        multiplier,
        attributes=(axis, check_flag("dora_weight", "detach_norm", detach_norm)),
        backend=backend,
        out_dtype=out_dtype,
    )


def dora_lora_weight(
    weight: Tensor,
    magnitude: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float | Tensor = 1.0,
    *,
    multiplier: float = 1.0,
    axis: Axis = "out",
    detach_norm: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`dora_weight` with ``delta = scale * up @ down``, which is never stored.

    Nor is its gradient: that of M is contracted with the factors tile by tile, unrounded.
    Source: Liu et al., 2024 (DoRA).

    Args:
        weight: (O, I), or a convolution's (O, I, k...); read as it is.
        magnitude: as in :func:`dora_weight`.
        up: (O, r), or (O, r, 1, 1).
        down: (r, I), a convolution's (r, I, k...), or that flattened, (r, I * k).
        scale: of the delta; a number or a 0-d tensor, applied in fp32.
        multiplier: a number; part of the compiled call, unlike ``scale``.
        axis: ``"out"`` or ``"in"``.
        detach_norm: whether the norm is a constant to the gradients, as in HF PEFT.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        weight's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device, axis or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    name = "dora_lora_weight"
    magnitude = _flat_magnitude(name, weight, magnitude, axis)
    multiplier = as_float(name, "multiplier", check_number(name, "multiplier", multiplier))
    if axis == "in" and check_tensor(name, "down", down).dim() > 2:
        if down.shape[1:] != weight.shape[1:]:
            raise ValueError(
                f"{name}: down has shape {tuple(down.shape)}; expected (r, *N) with "
                f"N = {tuple(weight.shape[1:])}, from weight"
            )
        down = down.flatten(1)
    return OPS[name](
        (weight, up, down, magnitude),
        scale,
        attributes=(axis, multiplier, check_flag(name, "detach_norm", detach_norm)),
        backend=backend,
        out_dtype=out_dtype,
    )


def dora_apply(
    base: Tensor,
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    magnitude: Tensor,
    scale: float | Tensor = 1.0,
    *,
    detach_norm: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``c o (base + scale * (x @ down^T) @ up^T)``, c = magnitude / norm(weight + scale up down).

    The norm is by row, and weight + scale up down exists in tiles on chip only. Gradients are exact
    for every operand, through the norm too unless ``detach_norm``.
    Source: Liu et al., 2024 (DoRA).

    Args:
        base: (..., O): the frozen layer's output, x @ weight^T without its bias.
        x: (..., I).
        weight: (O, I), or a 1x1 convolution's (O, I, 1, 1); read as it is.
        up: (O, r), or (O, r, 1, 1).
        down: (r, I), or (r, I, 1, 1).
        magnitude: (O,) or (O, 1, ...).
        scale: a number or a 0-d tensor, applied in fp32; alpha / r, as a rule.
        detach_norm: whether the norm is a constant to the gradients, as in HF PEFT.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (..., O).

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    magnitude = _flat_magnitude("dora_apply", weight, magnitude, "out")
    return OPS["dora_apply"](
        (x, up, down, weight, magnitude, base),
        scale,
        attributes=(check_flag("dora_apply", "detach_norm", detach_norm),),
        backend=backend,
        out_dtype=out_dtype,
    )
