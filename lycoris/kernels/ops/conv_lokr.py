"""LoKr on a convolution: the large half convolves, then the small half mixes blocks of channels.

Y[(a, c)] = s * sum_b W1[a, b] (W2 * x[b])[c]: x's channels are b blocks of d, which one W2 meets as
if they were samples. Where W2 is factored its last factor comes after W1, so that everything
before it has only the rank's channels; a factored half is never formed. With G groups, which must
divide the rows of W1, a group's outputs take their rows of W1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .. import chain
from ..chain import Link
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Bound, Cost, Operand, OpSpec, Round, register
from .conv import (
    ATTRIBUTES,
    CONV_FP32,
    conv_case,
    derive_output,
    extent,
    geometry_of,
    image_shapes,
    kernel_dims,
    out_shape,
)

_NAME = "lokr_conv_apply"
_HALVES = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")


def _shapes(present: frozenset[str], *, stride: Sequence[int], **_: Any) -> Mapping[str, str]:
    kernel = kernel_dims(len(stride))
    first = {"w1": "a b"} if "w1" in present else {"w1_a": "a p", "w1_b": "p b"}
    if "w2" in present:
        second = {"w2": f"c d {kernel}"}
    elif "t2" in present:
        second = {"w2_a": "r c", "w2_b": "q d", "t2": f"r q {kernel}"}
    else:
        second = {"w2_a": "c r", "w2_b": f"r d {kernel}"}
    given = [name for name in _HALVES if name in present]
    if set(given) != {*first, *second}:
        raise ValueError(
            f"{_NAME}: got {', '.join(given) or 'no half'}; expected w1, or w1_a and w1_b; and w2, "
            "or w2_a and w2_b, or w2_a, w2_b and t2"
        )
    n = len(stride)
    images = {"base": image_shapes(n, "O", "o"), "out": image_shapes(n, "O", "o")}
    return {"x": image_shapes(n), **first, **second, **images}


def _derive(sizes: Groups, **attributes: Any) -> Groups:
    (a,), (b,), (c,), (d,) = (sizes[symbol] for symbol in "abcd")
    groups = attributes["groups"]
    if groups > 0 and a % groups:
        raise ValueError(
            f"{_NAME}: groups is {groups}, which does not divide the {a} rows of w1; such a "
            "convolution needs its weight rebuilt (lokr_weight)"
        )
    holder = "t2" if "q" in sizes else "w2_b" if "r" in sizes else "w2"
    found = derive_output(_NAME, holder, sizes, (a * c, b * d), attributes)
    return {**found, "O": (a * c,)}


def _kernel(t: SimpleNamespace) -> Sequence[int]:
    holder: Tensor = t.w2 if t.w2 is not None else t.w2_b if t.t2 is None else t.t2
    return holder.shape[2:]


def _links(t: SimpleNamespace, attributes: Mapping[str, Any]) -> list[Link]:
    groups, images = attributes["groups"], t.x.shape[0]
    rows = t.w1 if t.w1 is not None else t.w1_a
    blocks = (t.w1 if t.w1 is not None else t.w1_b).shape[1]
    batch = images * groups * blocks
    geometry, kernel = geometry_of(t.x.shape[2:], attributes), _kernel(t)
    if t.w2 is not None:
        links = [chain.spatial("w2", batch, geometry, kernel, lambda w: w)]
    elif t.t2 is None:
        links = [chain.spatial("w2_b", batch, geometry, kernel, lambda w: w)]
    else:
        links = [
            Link("w2_b", batch, lambda w: w[None]),
            chain.spatial("t2", batch, geometry, kernel, lambda w: w),
        ]
    if t.w1 is None:
        links.append(Link("w1_b", images * groups, lambda w: w[None]))
    name = "w1_a" if t.w1 is None else "w1"
    links.append(Link(name, images * groups, lambda w: w.reshape(groups, -1, w.shape[1])))
    if t.w2 is None:
        view = (lambda w: w[None]) if t.t2 is None else (lambda w: w.t()[None])
        links.append(Link("w2_a", images * rows.shape[0], view))
    return links


def _formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round, **attributes: Any) -> Tensor:
    rows = (t.w1 if t.w1 is not None else t.w1_a).shape[0]
    columns = t.w2.shape[0] if t.w2 is not None else t.w2_a.shape[t.t2 is not None]
    shape = out_shape(t, _kernel(t), rows * columns, geometry_of(t.x.shape[2:], attributes))
    return chain.formula(_links(t, attributes), t, scale, rnd, shape)


def _forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    **attributes: Any,
) -> None:
    chain.forward(run, _links(t, attributes), t, scale, out)


def _backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    **attributes: Any,
) -> None:
    chain.backward(run, _links(t, attributes), grad, t, scale, grads)


def _reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    taps, pixels = extent(d, "k"), d["N"] * extent(d, "o")
    p, r, q = d.get("p", 0), d.get("r", 0), d.get("q", 0)
    back, front = d["a"] + d["c"] + p + r, d["d"] * taps + d["b"] + p + r + q
    first = pixels * (r or d["c"]) + front + back
    second = pixels * d["b"] + front + back
    sums = {"w1": first, "w1_a": first, "w1_b": first, "w2": second, "w2_b": second, "t2": second}
    return {
        "out": front,
        "x": back + d["c"] * taps,
        **sums,
        "w2_a": pixels * d["a"] + front,
    }


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    taps, pixels = extent(d, "k"), d["N"] * extent(d, "o")
    image, n_out = d["N"] * d["C"] * extent(d, ""), d["a"] * d["c"]
    p, r, q = d.get("p", 0), d.get("r", 0), d.get("q", 0)
    small = p * (d["a"] + d["b"]) if p else d["a"] * d["b"]
    wide = r or d["c"]
    large = q * d["d"] + r * q * taps if q else wide * d["d"] * taps
    work = d["b"] * large + wide * small + (d["a"] * d["c"] * r if r else 0)
    factors = small + large + d["c"] * r
    return Cost(itemsize * (3 * image + 3 * pixels * n_out + 3 * factors), 8 * pixels * work)


_SIZES = {"N": 1, "C": 24, "H": 8, "W": 8, "a": 8, "b": 6, "c": 5, "d": 4, "kH": 3, "kW": 3}
_PRIMES = {"N": 3, "C": 11, "H": 5, "W": 7, "a": 1, "b": 1, "c": 17, "d": 11, "kH": 3, "kW": 2}
_PAIR = _SIZES | {"r": 4}
_TUCKER = _SIZES | {"H": 6, "W": 6, "r": 4, "q": 4}
_DENSE = ("w1", "w2")
_LOW = ("w1", "w2_a", "w2_b")
_STRIDED = {"stride": (2, 2)}
_BOTH = ("w1_a", "w1_b", "w2_a", "w2_b")

_CASES = (
    conv_case("plain", _SIZES, present=_DENSE, mixes="all"),
    conv_case(
        "primes",
        _PRIMES,
        present=("base", *_DENSE),
        attributes={"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    ),
    conv_case("1x1", _SIZES | {"kH": 1, "kW": 1}, attributes={}, present=("base", *_DENSE)),
    conv_case(
        "groups", _SIZES | {"C": 48}, present=_DENSE, attributes={"groups": 2, "dilation": (2, 2)}
    ),
    conv_case("low rank", _PAIR, present=("base", *_LOW)),
    # Of chains this long the unfused run rounds as much, and the first half's gradient has few
    # elements to tell by: with a scale of 0.5 its own extra rounding, of s * g, is none.
    conv_case("both low rank", _PAIR | {"p": 3}, "random", 0.5, _BOTH, attributes=_STRIDED),
    conv_case("tucker", _TUCKER, "random", 0.5, ("t2", *_LOW)),
    conv_case("all factored", _TUCKER | {"p": 3}, "random", 0.5, ("base", "t2", *_BOTH)),
    conv_case(
        "low rank groups", _PAIR | {"C": 48}, present=("base", *_LOW), attributes={"groups": 2}
    ),
    conv_case("integers", _SIZES, "integers", 2.0, ("base", *_DENSE), exact=True),
    conv_case("one nonzero", _SIZES, "one_hot", present=_DENSE),
    conv_case("cancellation", _SIZES, "cancellation", present=("base", *_DENSE)),
    conv_case("subnormal", _SIZES, "subnormal", present=_DENSE),
    conv_case("near overflow", _SIZES, "near_overflow", 0.0055, _DENSE),
    conv_case("zero w1", _SIZES, "zero_factor", present=("base", *_DENSE)),
    conv_case(
        "gpu 64x64",
        {"N": 2, "C": 320, "H": 64, "W": 64, "a": 8, "b": 8, "c": 40, "d": 40, "kH": 3, "kW": 3},
        present=("base", *_DENSE),
        device="cuda",
    ),
    conv_case(
        "gpu low rank",
        {"N": 2, "C": 640, "H": 32, "W": 32, "a": 16, "b": 16, "c": 40, "d": 40, "r": 8}
        | {"kH": 3, "kW": 3},
        present=_LOW,
        device="cuda",
    ),
    conv_case(
        "gpu ragged",
        {"N": 3, "C": 259, "H": 31, "W": 37, "a": 13, "b": 7, "c": 11, "d": 37, "kH": 3, "kW": 3},
        present=_DENSE,
        attributes={"stride": (2, 2), "padding": (1, 1)},
        device="cuda",
    ),
)

LOKR_CONV_APPLY = register(
    OpSpec(
        name=_NAME,
        family=chain.FAMILY,
        operands=(
            Operand("x", side="model"),
            *(Operand(name, optional=True) for name in _HALVES),
            Operand("base", role="wide", optional=True, additive=True, side="model"),
        ),
        shapes=_shapes,
        derive=_derive,
        attributes=ATTRIBUTES,
        formula=_formula,
        forward=_forward,
        backward=_backward,
        reductions=_reductions,
        cost=_cost,
        bound=Bound(half=24.0, fp32=CONV_FP32),
        cases=_CASES,
        positive=("a", "b", "c", "d", "p", "q", "r"),
        doc="[base +] s * kron(W1, W2) * x, * the convolution; W1 dense or a pair, W2 a triple too",
        conditions="O = a * c, and C = groups * b * d; groups divides a; 1-D to 3-D",
    )
)
