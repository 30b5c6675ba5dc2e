"""LoKr: see :mod:`lycoris.kernels.ops.lokr` and :mod:`lycoris.kernels.ops.lokr_apply`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..kernels.checks import check_integer, check_tensor
from .table import OPS

#: A half: itself, or the two factors of which it is the product.
Half = Tensor | tuple[Tensor, Tensor]
#: w2 may also be a Tucker triple: (w2_a, w2_b, t2).
Triple = tuple[Tensor, Tensor, Tensor]
_Flat = tuple[Tensor | None, ...]


def factorization(dimension: int, factor: int = -1) -> tuple[int, int]:
    """Splits a dimension into two factors, as LyCORIS sizes LoKr's halves: (w1's, w2's).

    The first is the largest divisor of the dimension that is neither above ``factor`` nor above the
    square root: 1 for a prime, and with ``factor`` -1 the split closest to square.
    Source: LyCORIS's ``factorization``, by what it computes: the table in its docstring has
    360 -> (12, 30) for factor 16 where the function returns (15, 24).

    Args:
        dimension: at least 1.
        factor: the largest first factor, or -1 for no limit.

    Raises:
        TypeError: either is no int.
        ValueError: either is out of range.
    """
    if check_integer("factorization", "dimension", dimension) < 1:
        raise ValueError(f"factorization: dimension is {dimension}; expected at least 1")
    if check_integer("factorization", "factor", factor) < 1 and factor != -1:
        raise ValueError(f"factorization: factor is {factor}; expected -1 or at least 1")
    limit = math.isqrt(dimension)
    if factor != -1:
        limit = min(limit, factor)
    first = next(m for m in range(limit, 0, -1) if dimension % m == 0)
    return first, dimension // first


def lokr_weight(
    w1: Half,
    w2: Half | Triple,
    scale: float | Tensor = 1.0,
    *,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * kron(W1, W2)``: the weight, merged into ``base`` where one is given.

    Element (i * c + j, m * d + n, k) is ``scale * W1[i, m] * W2[j, n, k]``. A half that is given by
    its factors is made a tile at a time and never stored. Source: Yeh et al., 2023 (LyCORIS, LoKr).

    Args:
        w1: (a, b), or a pair (a, p), (p, b) of that product.
        w2: (c, d), a convolution's (c, d, k...), or a pair (c, r), (r, d, k...), the second also
            flattened, (r, d * k); or a Tucker triple (w2_a (r, c), w2_b (r, d), t2 (r, r, k...)):
            W2[j, n, k] = sum_pq t2[p, q, k] w2_a[p, j] w2_b[q, n].
        scale: a number or a 0-d tensor, applied in fp32: alpha / rank, as a rule, where the rank is
            that of the factored half (the Tucker core's r too), and 1 where both halves are dense.
        base: (a * c, b * d, k...), added in fp32 before the one rounding of the output.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (a * c, b * d, k...); (a * c, b * d * k) where a pair's w2_b is flattened and no ``base``
        says otherwise.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8), or a half is
            neither a tensor nor a tuple of them.
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    halves = _flatten("lokr_weight", w1, w2)
    w2_b, core = halves[5:7]
    if base is not None and check_tensor("lokr_weight", "base", base).dim() > 2:
        size = math.prod(base.shape[2:])
        if (
            isinstance(w2_b, Tensor)
            and core is None
            and w2_b.dim() == 2
            and size
            and w2_b.shape[1] % size == 0
        ):
            w2_b = w2_b.unflatten(1, (w2_b.shape[1] // size, *base.shape[2:]))
            halves = (*halves[:5], w2_b, core)
    return OPS["lokr_weight"]((*halves, base), scale, backend=backend, out_dtype=out_dtype)


def lokr_apply(
    x: Tensor,
    w1: Half,
    w2: Half | Triple,
    scale: float | Tensor = 1.0,
    *,
    base: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale * x @ kron(W1, W2)^T``, without the weight it stands for.

    Y[i, j] = scale * sum_mn W1[i, m] x[m, n] W2[j, n], in two products with a rounding to the
    compute dtype between them; which half comes first is
    :func:`lycoris.kernels.ops.lokr_apply.w2_first`'s rule. Through a factored W2 x goes by its
    rank: W2's second factor, W1, W2's first factor, each step rounded; a factored W1 is rounded
    where it enters. A Tucker triple is folded, and the call computed, in fp32. The fused backends
    mix several tokens in one tile: one that isn't finite may make its neighbours' outputs NaN.
    Source: Yeh et al., 2023 (LyCORIS, LoKr).

    Args:
        x: (..., b * d).
        w1: (a, b), or a pair (a, p), (p, b) of that product.
        w2: (c, d), or a pair (c, r), (r, d), or a Tucker triple (w2_a (r, c), w2_b (r, d),
            t2 (r, r)); the last of each may have trailing dimensions of 1.
        scale: a number or a 0-d tensor, applied in fp32; see :func:`lokr_weight`.
        base: (..., a * c), added in fp32 before the one rounding of the output.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (..., a * c).

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8), or a half is
            neither a tensor nor a tuple of them.
        ValueError: a shape, device or scale does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    halves = _flatten("lokr_apply", w1, w2)
    return OPS["lokr_apply"]((x, *halves, base), scale, backend=backend, out_dtype=out_dtype)


def _flatten(op: str, w1: Half, w2: Half | Triple) -> _Flat:
    """(w1, w1_a, w1_b, w2, w2_a, w2_b, t2), None where a form has no such tensor."""
    first = _parts(op, "w1", w1, (2,))
    second = _parts(op, "w2", w2, (2, 3))
    return (*first[:3], *second)


def _parts(op: str, name: str, half: object, counts: tuple[int, ...]) -> _Flat:
    if isinstance(half, Tensor):
        return half, None, None, None
    forms = " or ".join(str(n) for n in counts)
    if not isinstance(half, tuple | list):
        raise TypeError(
            f"{op}: {name} is {type(half).__name__}; expected a tensor or {forms} tensors"
        )
    if len(half) not in counts:
        raise ValueError(f"{op}: {name} has {len(half)} parts; expected a tensor or {forms}")
    return None, *half, *([None] * (3 - len(half)))
