"""LoHa: see :mod:`lycoris.kernels.ops.loha`."""

from __future__ import annotations

import torch
from torch import Tensor

from .table import OPS


def loha_weight(
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    scale: float | Tensor = 1.0,
    *,
    t1: Tensor | None = None,
    t2: Tensor | None = None,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * (w1_a @ w1_b) o (w2_a @ w2_b)``, o elementwise: the weight, in one pass.

    With ``t1`` and ``t2`` the Tucker form, each half ``W[o,i,k] = sum_pq t[p,q,k] a[p,o] b[q,i]``.
    Sources: Hyeon-Woo et al., 2022 (FedPara); LyCORIS's LoHa.

    Args:
        w1_a: (O, r); with ``t1`` (p, O), as LyCORIS's files have it.
        w1_b: (r, I), a convolution's (r, I, k...), or that flattened, (r, I * k); with ``t1``
            (q, I).
        w2_a: like ``w1_a``.
        w2_b: like ``w1_b``.
        scale: a number or a 0-d tensor, applied in fp32; alpha / r, as a rule.
        t1: (p, q, k...), given together with ``t2``.
        t2: (p, q, k...).
        base: (O, I, k...), added in fp32 before the one rounding of the output.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (O, I, k...); (O, I * k) where the factors are flattened and no ``base`` says otherwise.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device or scale does not fit, only one of ``t1`` and ``t2`` is given,
            or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    return OPS["loha_weight"](
        (w1_a, w1_b, w2_a, w2_b, t1, t2, base), scale, backend=backend, out_dtype=out_dtype
    )


def loha_apply(
    x: Tensor,
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    scale: float | Tensor = 1.0,
    *,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * x @ ((w1_a @ w1_b) o (w2_a @ w2_b))^T``, without storing that weight.

    Up to rank 32 (at 4096 x 4096) it is a LoRA of rank r^2, whose factors are row-wise
    products of the four given ones; beyond, tiles of the weight are generated as they are used.
    Source: Hyeon-Woo et al., 2022 (FedPara).

    Args:
        x: (..., I).
        w1_a: (O, r), or a 1x1 convolution's (O, r, 1, 1).
        w1_b: (r, I), or (r, I, 1, 1).
        w2_a: like ``w1_a``.
        w2_b: like ``w1_b``.
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
    return OPS["loha_apply"](
        (x, w1_a, w1_b, w2_a, w2_b, base), scale, backend=backend, out_dtype=out_dtype
    )
