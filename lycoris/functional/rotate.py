"""OFT and BOFT: see :mod:`lycoris.kernels.ops.rotate`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import as_float, check_flag, check_integer, check_number
from .table import OPS


def _attributes(op: str, constraint: float | None, diff: bool) -> tuple[float | None, bool]:
    if constraint is not None:
        constraint = check_number(op, "constraint", constraint, "a number or None")
        if constraint < 0:
            raise ValueError(f"{op}: constraint is {constraint}; expected a number of at least 0")
        constraint = as_float(op, "constraint", constraint)
    return constraint, check_flag(op, "diff", diff)


def _on_axis(
    op: str,
    y: Tensor,
    blocks: Tensor,
    rescale: Tensor | None,
    scale: float | Tensor,
    attributes: tuple[float | None, bool],
    axis: int,
    out_dtype: torch.dtype | None,
    backend: str | None,
) -> Tensor:
    """The op on one axis: channels in the middle of a view, what follows them flattened."""
    if not isinstance(y, Tensor) or y.layout is not torch.strided:
        views = y  # the op's own check says what is wrong
    else:
        axis = check_integer(op, "axis", axis)
        if not -y.dim() <= axis < y.dim():
            raise ValueError(
                f"{op}: axis is {axis}; expected one of y's {y.dim()}, of shape {tuple(y.shape)}"
            )
        at = axis % y.dim() + 1
        views = y.unsqueeze(-1) if at == y.dim() else y.flatten(at)
    out = OPS[op](
        (views, blocks, rescale),
        scale,
        attributes=attributes,
        backend=backend,
        out_dtype=out_dtype,
    )
    return out.view(y.shape)


def oft_weight(
    weight: Tensor,
    blocks: Tensor,
    *,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    diff: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``R^T W`` on each block of the weight's rows: R's first index is contracted.

    ``Q = B - B^T`` and ``R = (I + Q)(I - Q)^-1`` of each block, solved without pivoting in fp64:
    R is orthogonal to about 1e-17 times Q's largest entry, and gradients are as exact, so that an
    entry beyond 1e9 costs digits and one beyond 1e15 leaves no rotation. A block that isn't finite
    makes its own rows NaN, and an infinite one under a constraint leaves the others no rotation. An
    element of the weight or of a gradient that isn't finite may make its column NaN in the rows of
    all blocks that are multiplied together: up to 64, or those that a butterfly's stages mix.
    Nothing hangs. Zero blocks give a finite weight back, bit for bit.

    Source: Qiu et al., 2023 (OFT), in the convention of LyCORIS's diag-oft.

    Args:
        weight: (O, I, k...), read as it is and used in fp32.
        blocks: (n, s, s) with n * s = O and s from 2 to 256.
        rescale: (O,) or (O, 1, ...), multiplies rows last, in fp32.
        constraint: where the norm of Q over all blocks is larger, Q is scaled down to it; the
            gradient goes through the norm.
        diff: return the result less ``weight``, computed without the result.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        Of the weight's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape or device does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["oft_weight"](
        (weight, blocks, rescale),
        1.0,
        attributes=_attributes("oft_weight", constraint, diff),
        backend=backend,
        out_dtype=out_dtype,
    )


def oft_apply(
    y: Tensor,
    blocks: Tensor,
    *,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    diff: bool = False,
    axis: int = -1,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`oft_weight`'s rotation of one axis of a layer's output, which it equals.

    A layer's bias is not rotated: pass y without it, and add it afterwards.

    Source: Qiu et al., 2023 (OFT), in the convention of LyCORIS's diag-oft.

    Args:
        y: any shape; the axis has O channels. It isn't transposed in memory.
        blocks: (n, s, s) with n * s = O and s from 2 to 256.
        rescale: (O,) or (O, 1, ...), multiplies channels last, in fp32.
        constraint: as for :func:`oft_weight`.
        diff: return the result less ``y``, computed without the result.
        axis: the one that holds the channels.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        Of y's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, axis or device does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    attributes = _attributes("oft_apply", constraint, diff)
    return _on_axis("oft_apply", y, blocks, rescale, 1.0, attributes, axis, out_dtype, backend)


def boft_weight(
    weight: Tensor,
    blocks: Tensor,
    *,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    multiplier: float | Tensor = 1.0,
    diff: bool = False,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """A butterfly of m rotation stages on the weight's rows: R's second index is contracted.

    Stage i views the channels as (c, 2, k) with k = 2^i * b / 2, takes them in the order
    (c, k, 2), multiplies each b of them by ``s * R + (1 - s) * I``, s the multiplier, and puts
    them back. Zero blocks give a finite weight back, bit for bit. What is large or not finite is
    treated as in :func:`oft_weight`. The result is the weight plus what the stages add, and
    exact relative to these two: a multiplier near 1/2 with large blocks leaves less than both.

    Source: Liu et al., 2023 (BOFT), in the convention of LyCORIS's boft.

    Args:
        weight: (O, I, k...), read as it is and used in fp32.
        blocks: (m, n, b, b), b even and at most 256, n * b = O, and b * 2^(m-1) divides O.
        rescale: (O,) or (O, 1, ...), multiplies rows last, in fp32.
        constraint: where the norm of Q over all blocks of all stages is larger, Q is scaled
            down to it; the gradient goes through the norm.
        multiplier: a number or a 0-d tensor.
        diff: return the result less ``weight``, computed without the result.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        Of the weight's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or multiplier does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["boft_weight"](
        (weight, blocks, rescale),
        multiplier,
        attributes=_attributes("boft_weight", constraint, diff),
        backend=backend,
        out_dtype=out_dtype,
    )


def boft_apply(
    y: Tensor,
    blocks: Tensor,
    *,
    rescale: Tensor | None = None,
    constraint: float | None = None,
    multiplier: float | Tensor = 1.0,
    diff: bool = False,
    axis: int = -1,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """:func:`boft_weight`'s rotation of one axis of a layer's output, which it equals.

    A layer's bias is not rotated: pass y without it, and add it afterwards.

    Source: Liu et al., 2023 (BOFT), in the convention of LyCORIS's boft.

    Args:
        y: any shape; the axis has O channels. It isn't transposed in memory.
        blocks: (m, n, b, b), b even and at most 256, n * b = O, and b * 2^(m-1) divides O.
        rescale: (O,) or (O, 1, ...), multiplies channels last, in fp32.
        constraint: as for :func:`boft_weight`.
        multiplier: a number or a 0-d tensor.
        diff: return the result less ``y``, computed without the result.
        axis: the one that holds the channels.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        Of y's shape.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, axis, device or multiplier does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    attributes = _attributes("boft_apply", constraint, diff)
    return _on_axis(
        "boft_apply", y, blocks, rescale, multiplier, attributes, axis, out_dtype, backend
    )
