"""GLoRA: see :mod:`lycoris.kernels.ops.glora`."""

from __future__ import annotations

import torch
from torch import Tensor

from .table import OPS


def glora_weight(
    weight: Tensor,
    a1: Tensor,
    a2: Tensor,
    b1: Tensor,
    b2: Tensor,
    scale: float | Tensor = 1.0,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``scale * (weight @ a1 @ a2 + b1 @ b2)``: GLoRA's change of a weight.

    ``weight @ a1`` is rounded to the compute dtype; both products then share one fp32 sum and one
    rounding. Source: Chavan et al., 2023 (GLoRA).

    Args:
        weight: (O, I); differentiable, at no cost where it is frozen.
        a1: (I, r).
        a2: (r, I).
        b1: (O, q).
        b2: (q, I); q is r, as a rule.
        scale: a number or a 0-d tensor, applied in fp32.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (O, I).

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["glora_weight"](
        (weight, a1, a2, b1, b2), scale, backend=backend, out_dtype=out_dtype
    )
