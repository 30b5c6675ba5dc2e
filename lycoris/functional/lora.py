"""LoRA: see :mod:`lycoris.kernels.ops.lora`."""

from __future__ import annotations

import torch
from torch import Tensor

from .table import OPS


def lora_apply(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float | Tensor = 1.0,
    *,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * (x @ down^T) @ up^T``, without the weight it stands for.

    Source: Hu et al., 2021 (LoRA).

    Args:
        x: (..., I).
        up: (O, r), or a 1x1 convolution's (O, r, 1, 1).
        down: (r, I), or (r, I, 1, 1).
        scale: a number or a 0-d tensor, applied in fp32; alpha / r, as a rule.
        base: (..., O), added in fp32 before the one rounding of the output.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (..., O).

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["lora_apply"]((x, up, down, base), scale, backend=backend, out_dtype=out_dtype)


def lora_weight(
    up: Tensor,
    down: Tensor,
    scale: float | Tensor = 1.0,
    *,
    mid: Tensor | None = None,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * up @ down``: the weight, merged into ``base`` where one is given.

    With ``mid`` the Tucker form, ``scale * sum_pq up[o,p] mid[p,q,k] down[q,i]``.
    Sources: Hu et al., 2021 (LoRA); LyCORIS's LoCon for convolutions.

    Args:
        up: (O, r), or (O, r, 1, 1).
        down: (r, I), a convolution's (r, I, k...), or that flattened, (r, I * k);
            with ``mid``, (q, I) or (q, I, 1, 1).
        scale: a number or a 0-d tensor, applied in fp32.
        mid: (p, q, k...), p the columns of ``up`` and q the rows of ``down``.
        base: (O, I, k...), added in fp32 before the one rounding of the output.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (O, I, k...); (O, I * k) where ``down`` is flattened and no ``base`` says otherwise.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["lora_weight"]((up, down, mid, base), scale, backend=backend, out_dtype=out_dtype)
