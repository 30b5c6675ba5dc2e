"""Adapters of convolutions: see :mod:`lycoris.kernels.ops.conv` and its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.checks import check_integer, check_tensor
from .table import OPS

Sizes = int | Sequence[int]
Half = Tensor | Sequence[Tensor]


def lora_conv_apply(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    scale: float | Tensor = 1.0,
    *,
    mid: Tensor | None = None,
    base: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale`` times the convolution of x with ``lora_weight(up, down, mid=mid)``.

    The down projection (with ``mid``, the core) convolves as PyTorch's convolution; the up
    projection, the scale and ``base`` are one kernel. Equal to ``F.convNd(x, weight, groups=groups,
    ...)``: with groups the factors make the weight (O, I, kernel) of a grouped convolution, so
    every group of I channels meets all of ``down``, and has O / groups rows of ``up``.
    Source: LyCORIS's LoCon.

    Args:
        x: (N, groups * I, *image), of 1 to 3 spatial dimensions, in any memory format; one that is
            not contiguous is copied.
        up: (O, r), or (O, r, 1, 1).
        down: (r, I, *kernel), or (r, I) for a 1x1 kernel; with ``mid``, (q, I) or (q, I, 1, 1).
        scale: a number or a 0-d tensor, applied in fp32.
        mid: the Tucker core (p, q, *kernel), p the columns of ``up``.
        base: (N, O, *out), added in fp32 before the one rounding of the output.
        stride: as in ``F.conv2d``.
        padding: as in ``F.conv2d``: numbers, "valid", or "same" (where the stride is 1).
        dilation: as in ``F.conv2d``.
        groups: as in ``F.conv2d``.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (N, O, *out), contiguous.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device, scale or setting does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    name = "lora_conv_apply"
    n = _dimensions(name, x, ("mid", mid) if mid is not None else ("down", down))
    if mid is not None:
        mid, kernel = _spread(mid, n), mid.shape[2:]
    else:
        down = _spread(down, n)
        kernel = down.shape[2:]
    x, attributes = _attributes(name, x, n, kernel, stride, padding, dilation, groups)
    operands = (x, up, down, mid, base)
    return OPS[name](operands, scale, attributes=attributes, backend=backend, out_dtype=out_dtype)


def loha_conv_apply(
    x: Tensor,
    w1_a: Tensor,
    w1_b: Tensor,
    w2_a: Tensor,
    w2_b: Tensor,
    scale: float | Tensor = 1.0,
    *,
    t1: Tensor | None = None,
    t2: Tensor | None = None,
    kernel_size: Sizes | None = None,
    base: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale`` times the convolution of x with ``(w1_a w1_b) o (w2_a w2_b)``.

    It runs as a LoRA of rank r^2 (Khatri-Rao): the work and the intermediate grow with r^2.
    Equal to ``F.convNd(x, weight, groups=groups, ...)`` with the weight (O, I, kernel).
    Source: Hyeon-Woo et al., 2022 (FedPara); LyCORIS's LoHa.

    Args:
        x: (N, groups * I, *image), of 1 to 3 spatial dimensions, in any memory format; one that is
            not contiguous is copied.
        w1_a: (O, r); in the Tucker form (p, O).
        w1_b: (r, I, *kernel), or flattened as files have it, (r, I * k); Tucker: (q, I).
        w2_a: like ``w1_a``.
        w2_b: like ``w1_b``.
        scale: a number or a 0-d tensor, applied in fp32.
        t1: the Tucker core (p, q, *kernel), or None.
        t2: like ``t1``.
        kernel_size: of flattened factors; by default the kernel is taken to be a square or cube.
        base: (N, O, *out), added in fp32 before the one rounding of the output.
        stride: as in ``F.conv2d``.
        padding: as in ``F.conv2d``: numbers, "valid", or "same" (where the stride is 1).
        dilation: as in ``F.conv2d``.
        groups: as in ``F.conv2d``.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (N, O, *out), contiguous.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device, scale or setting does not fit, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    name = "loha_conv_apply"
    if t1 is not None and t2 is not None:
        n = _dimensions(name, x, ("t1", t1))
        t1, t2 = _spread(t1, n), _spread(check_tensor(name, "t2", t2), n)
        _sized(name, "t1", t1, n, kernel_size)
        kernel: Sequence[int] = t1.shape[2:]
    else:
        n = _dimensions(name, x, ("w1_b", w1_b))
        groups = check_integer(name, "groups", groups)
        inputs = x.shape[1] // groups if groups > 0 else 0
        w1_b = _unflatten(name, "w1_b", w1_b, n, inputs, kernel_size)
        w2_b = _unflatten(name, "w2_b", w2_b, n, inputs, kernel_size)
        kernel = w1_b.shape[2:]
    x, attributes = _attributes(name, x, n, kernel, stride, padding, dilation, groups)
    operands = (x, w1_a, w1_b, w2_a, w2_b, t1, t2, base)
    return OPS[name](operands, scale, attributes=attributes, backend=backend, out_dtype=out_dtype)


def lokr_conv_apply(
    x: Tensor,
    w1: Half,
    w2: Half,
    scale: float | Tensor = 1.0,
    *,
    kernel_size: Sizes | None = None,
    base: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes | str = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """``[base +] scale`` times the convolution of x with ``kron(w1, w2)``.

    w2 convolves x's b blocks of d channels; then w1 mixes the blocks, in one kernel with the scale
    and ``base``. Neither the Kronecker product nor a factored half is formed. Equal to
    ``F.convNd(x, weight, groups=groups, ...)`` with the weight (a * c, b * d, kernel).
    Source: Yeh et al., 2023 (LyCORIS).

    Args:
        x: (N, groups * b * d, *image), of 1 to 3 spatial dimensions, in any memory format; one that
            is not contiguous is copied.
        w1: (a, b), or a pair (w1_a, w1_b) of (a, p) and (p, b).
        w2: (c, d, *kernel), or a pair (w2_a, w2_b) of (c, r) and (r, d, *kernel), the latter also
            flattened as files have it, (r, d * k), or a Tucker triple (w2_a, w2_b, t2) of (r, c),
            (q, d) and (r, q, *kernel).
        scale: a number or a 0-d tensor, applied in fp32.
        kernel_size: of a flattened w2_b; by default the kernel is taken to be a square or cube.
        base: (N, a * c, *out), added in fp32 before the one rounding of the output.
        stride: as in ``F.conv2d``.
        padding: as in ``F.conv2d``: numbers, "valid", or "same" (where the stride is 1).
        dilation: as in ``F.conv2d``.
        groups: as in ``F.conv2d``; it must divide a.
        out_dtype: the stored dtype; by default the promotion of the operands'.
        backend: overrides the selection for this call.

    Returns:
        (N, a * c, *out), contiguous.

    Raises:
        TypeError: a dtype is outside the policy (fp16 with bf16, integers, fp8).
        ValueError: a shape, device, scale or setting does not fit, a half has another number of
            factors, or the backend is unknown.
        BackendError: the named backend can't serve the call.
    """
    name = "lokr_conv_apply"
    first, second = _half(name, "w1", w1, (1, 2)), _half(name, "w2", w2, (1, 2, 3))
    names = ("w2",) if len(second) == 1 else ("w2_a", "w2_b", "t2")
    given = dict(zip(names, second, strict=False))
    given |= dict(zip(("w1",) if len(first) == 1 else ("w1_a", "w1_b"), first, strict=True))
    holder = names[len(second) - 1]
    n = _dimensions(name, x, (holder, given[holder]))
    if holder == "w2_b":
        blocks = first[-1].shape[-1] if first[-1].dim() else 0
        groups = check_integer(name, "groups", groups)
        inputs = x.shape[1] // (groups * blocks) if groups > 0 and blocks else 0
        given[holder] = _unflatten(name, holder, given[holder], n, inputs, kernel_size)
    else:
        given[holder] = _sized(name, holder, _spread(given[holder], n), n, kernel_size)
    kernel = given[holder].shape[2:]
    x, attributes = _attributes(name, x, n, kernel, stride, padding, dilation, groups)
    order = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
    operands = (x, *map(given.get, order), base)
    return OPS[name](operands, scale, attributes=attributes, backend=backend, out_dtype=out_dtype)


def _half(op: str, name: str, half: Half, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    if not isinstance(half, Tensor | tuple | list):
        kind = "None" if half is None else type(half).__name__
        raise TypeError(f"{op}: {name} is {kind}; expected a tensor or tensors")
    factors = (half,) if isinstance(half, Tensor) else tuple(half)
    if len(factors) not in counts:
        raise ValueError(f"{op}: {name} has {len(factors)} factors; expected {counts}")
    for factor in factors:
        if not isinstance(factor, Tensor):
            kind = type(factor).__name__
            raise TypeError(f"{op}: {name} holds a {kind}; expected a tensor or tensors")
    return factors


def _dimensions(op: str, x: Any, holder: tuple[str, Any]) -> int:
    """The number of spatial dimensions: x's, with which the kernel must agree where it shows."""
    name, weight = holder
    check_tensor(op, "x", x)
    check_tensor(op, name, weight)
    n = x.dim() - 2
    if not 1 <= n <= 3:
        raise ValueError(
            f"{op}: x has shape {tuple(x.shape)}; expected (N, C, *image) with 1 to 3 spatial "
            "dimensions"
        )
    if weight.dim() not in (2, n + 2):
        raise ValueError(
            f"{op}: {name} has shape {tuple(weight.shape)}; expected {n} spatial dimensions, "
            f"as x has, {tuple(x.shape)}"
        )
    return int(n)


def _spread(weight: Tensor, n: int) -> Tensor:
    """A matrix as the weight of a 1x1 convolution."""
    return weight[(..., *[None] * n)] if weight.dim() == 2 else weight


def _sized(op: str, name: str, weight: Tensor, n: int, kernel_size: Sizes | None) -> Tensor:
    """The weight, whose own kernel ``kernel_size`` may state once more."""
    if kernel_size is not None and weight.dim() == n + 2:
        kernel = _numbers(op, "kernel_size", kernel_size, n)
        if weight.shape[2:] != kernel:
            raise ValueError(
                f"{op}: {name} has shape {tuple(weight.shape)}; expected k = {kernel}, from "
                "kernel_size, as its last dimensions"
            )
    return weight


def _unflatten(
    op: str, name: str, weight: Any, n: int, inputs: int, kernel_size: Sizes | None
) -> Tensor:
    """(r, inputs * k) as (r, inputs, *kernel)."""
    if check_tensor(op, name, weight).dim() != 2:
        return _sized(op, name, weight, n, kernel_size)
    taps = weight.shape[1] // inputs if inputs else 0
    if kernel_size is not None:
        kernel = _numbers(op, "kernel_size", kernel_size, n)
    else:
        kernel = (round(taps ** (1 / n)),) * n
    count = 1
    for size in kernel:
        count *= size
    if min(kernel) < 1 or inputs * count != weight.shape[1]:
        raise ValueError(
            f"{op}: {name} has shape {tuple(weight.shape)}; expected (r, {inputs} * k), {inputs} "
            f"the input channels, k = {count} for a {'x'.join(map(str, kernel))} kernel (other "
            "kernels: kernel_size=)"
        )
    return weight.reshape(weight.shape[0], inputs, *kernel)


def _numbers(op: str, name: str, value: Sizes, n: int) -> tuple[int, ...]:
    """One number a spatial dimension."""
    several = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    values: Any = value if several else (value,)
    try:
        given = tuple(check_integer(op, name, v) for v in values)
    except TypeError:
        raise TypeError(f"{op}: {name} is {value!r}; expected an int or {n} of them") from None
    if len(given) == 1:
        given *= n
    if len(given) != n:
        raise ValueError(f"{op}: {name} is {value!r}; expected an int or {n} of them")
    return given


def _attributes(
    op: str,
    x: Tensor,
    n: int,
    kernel: Sequence[int],
    stride: Sizes,
    padding: Sizes | str,
    dilation: Sizes,
    groups: int,
) -> tuple[Tensor, tuple[Any, ...]]:
    """The op's attributes; x padded at its ends where "same" asks for more there."""
    strides = _numbers(op, "stride", stride, n)
    dilations = _numbers(op, "dilation", dilation, n)
    groups = check_integer(op, "groups", groups)
    if not isinstance(padding, str):
        return x, (strides, _numbers(op, "padding", padding, n), dilations, groups)
    if padding == "valid":
        return x, (strides, (0,) * n, dilations, groups)
    if padding != "same":
        raise ValueError(f'{op}: padding is {padding!r}; expected numbers, "same" or "valid"')
    if max(strides) > 1:
        raise ValueError(
            f'{op}: padding is "same" and stride is {stride!r}; expected a stride of 1'
        )
    totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
    if any(total % 2 for total in totals):  # the odd one goes to the end, as in F.conv2d
        x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
    return x, (strides, tuple(total // 2 for total in totals), dilations, groups)
