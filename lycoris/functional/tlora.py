"""T-LoRA: see :mod:`lycoris.kernels.ops.tlora`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import check_tensor
from .table import OPS


def _row(op: str, name: str, t: Tensor) -> Tensor:
    """(1, r), as T-LoRA's files and modules hold it, as (r,)."""
    return t.squeeze(0) if check_tensor(op, name, t).dim() == 2 else t


def _rows(op: str, mask: Tensor) -> Tensor:
    return mask[None] if check_tensor(op, "mask", mask).dim() == 1 else mask


def tlora_weight(
    q: Tensor,
    p: Tensor,
    lam: Tensor,
    q0: Tensor,
    p0: Tensor,
    lam0: Tensor,
    mask: Tensor,
    scale: float | Tensor = 1.0,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``scale * (p diag(lam o mask) q - p0 diag(lam0 o mask) q0)``.

    Exactly 0 where q, p and lam equal q0, p0 and lam0 (and have their dtypes). p diag(lam o mask)
    is made in fp32 and rounded once to the compute dtype; both products meet in one fp32
    difference, rounded once. Source: Soboleva et al., 2025 (T-LoRA).

    Args:
        q: (r, I).
        p: (O, r).
        lam: (r,) or (1, r).
        q0: (r, I), what q was at the start; as p0, lam0 and the mask, it gets no gradient.
        p0: (O, r).
        lam0: (r,) or (1, r).
        mask: (r,) or (1, r), of a floating-point dtype: ones and zeros, as a rule.
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
    name = "tlora_weight"
    first, before = _row(name, "lam", lam), _row(name, "lam0", lam0)
    operands = (q, p, first, q0, p0, before, _rows(name, mask))
    return OPS[name](operands, scale, backend=backend, out_dtype=out_dtype)


def tlora_apply(
    x: Tensor,
    q: Tensor,
    p: Tensor,
    lam: Tensor,
    q0: Tensor,
    p0: Tensor,
    lam0: Tensor,
    mask: Tensor,
    scale: float | Tensor = 1.0,
    *,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``x`` times :func:`tlora_weight` transposed, without that weight; a mask for each sample.

    ``(x @ q^T) o lam o mask`` is made in fp32 and rounded once to the compute dtype. Exactly 0
    at the start, as is the gradient of x.

    Args:
        x: (..., I).
        q: (r, I).
        p: (O, r).
        lam: (r,) or (1, r).
        q0: (r, I), what q was at the start; as p0, lam0 and the mask, it gets no gradient.
        p0: (O, r).
        lam0: (r,) or (1, r).
        mask: (r,) or (1, r), or (B, r) for x (B, ..., I), of a floating-point dtype.
        scale: a number or a 0-d tensor, applied in fp32.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (..., O).

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    name = "tlora_apply"
    first, before = _row(name, "lam", lam), _row(name, "lam0", lam0)
    operands = (x, q, p, first, q0, p0, before, _rows(name, mask))
    return OPS[name](operands, scale, backend=backend, out_dtype=out_dtype)
