"""LoRA on a convolution: the down projection convolves, the up projection mixes its channels.

Source: LyCORIS's LoCon. With G groups the weight is (O, I, kernel), I a group's input channels, and
every group meets the whole down projection: its outputs take their rows of ``up``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from .. import chain
from ..chain import Link
from ..convolution import Geometry
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Attribute, Bound, Case, Cost, Operand, OpSpec, Round, register

#: The declared fp32 error: cuDNN sums a weight's gradient over the images in an order of its own,
#: in one level. Largest seen on an H200: 928 ULP at K = 8192, where the unfused run has as much.
CONV_FP32 = 48.0

#: The largest stride, padding or dilation: cuDNN takes 32 bits.
_LARGEST = 2**31 - 1
#: The symbols of the spatial dimensions, by their number.
_DIMS = {1: "W", 2: "HW", 3: "DHW"}
ATTRIBUTES = (
    Attribute("stride", "int[]", (1, 1)),
    Attribute("padding", "int[]", (0, 0)),
    Attribute("dilation", "int[]", (1, 1)),
    Attribute("groups", "int", 1),
)


def image_shapes(dimensions: int, channels: str = "C", prefix: str = "") -> str:
    """The shape of images, ``N C H W``, or with other symbols of that many dimensions."""
    return " ".join(["N", channels, *(prefix + d for d in _names(dimensions))])


def kernel_dims(dimensions: int) -> str:
    """The symbols of a convolution kernel's dimensions: ``kH kW``."""
    return " ".join("k" + d for d in _names(dimensions))


def _names(dimensions: int) -> str:
    if dimensions not in _DIMS:
        raise ValueError(f"{dimensions} spatial dimensions; expected 1, 2 or 3")
    return _DIMS[dimensions]


def derive_output(
    op: str, holder: str, sizes: Groups, channels: tuple[int, int], attributes: Mapping[str, Any]
) -> Groups:
    """The output's spatial sizes; checks that image, kernel, attributes and groups go together.

    Args:
        op: named in errors.
        holder: the operand that holds the kernel, named in errors.
        sizes: of the symbols of the image and of the kernel.
        channels: O and I of the weight (O, I, kernel).
        attributes: stride, padding, dilation and groups.

    Raises:
        ValueError: they don't go together; the message names the operands.
    """
    stride = attributes["stride"]
    dims = _names(len(stride))
    least = {"stride": 1, "padding": 0, "dilation": 1}
    for name, low in least.items():
        value = tuple(attributes[name])
        if len(value) != len(stride):
            raise ValueError(f"{op}: {name} is {value}; expected {len(stride)} numbers, as stride")
        if min(value) < low:
            raise ValueError(f"{op}: {name} is {value}; expected numbers of at least {low}")
        if max(value) > _LARGEST:
            raise ValueError(f"{op}: {name} is {value}; expected numbers of at most {_LARGEST}")
    groups, (n_out, n_in), (n_x,) = attributes["groups"], channels, sizes["C"]
    if groups < 1:
        raise ValueError(f"{op}: groups is {groups}; expected at least 1")
    if n_x != groups * n_in:
        raise ValueError(
            f"{op}: x has {n_x} channels; expected {groups * n_in}: {n_in}, from the factors, for "
            f"each of groups = {groups}"
        )
    if n_out % groups:
        raise ValueError(
            f"{op}: the factors make {n_out} output channels; expected a multiple of "
            f"groups = {groups}"
        )
    image = tuple(sizes[d][0] for d in dims)
    kernel = tuple(sizes["k" + d][0] for d in dims)
    geometry = geometry_of(image, attributes)
    out = geometry.out(kernel)
    if min(kernel) < 1 or min(out) < 1:
        raise ValueError(
            f"{op}: {holder} has a {_times(kernel)} kernel, which does not fit into x, "
            f"{_times(image)} with padding {_times(geometry.padding)} and dilation "
            f"{_times(geometry.dilation)}"
        )
    return {"o" + d: (n,) for d, n in zip(dims, out, strict=True)}


def geometry_of(image: Sequence[int], attributes: Mapping[str, Any]) -> Geometry:
    """Where the kernel meets images of these sizes."""
    stride, padding, dilation = (
        tuple(attributes[name]) for name in ("stride", "padding", "dilation")
    )
    return Geometry(stride, padding, dilation, tuple(image))


def _times(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))


def out_shape(t: SimpleNamespace, kernel: Sequence[int], channels: int, geometry: Geometry) -> Any:
    """The output's shape."""
    return (t.x.shape[0], channels, *geometry.out(kernel))


def extent(d: Mapping[str, int], prefix: str) -> int:
    """The product of the sizes of some spatial symbols: ``k``, ``o``, or none for the image."""
    return math.prod(d.get(prefix + name, 1) for name in _DIMS[3])


# ----------------------------------------------------------------------------------- lora


def _shapes(present: frozenset[str], *, stride: Sequence[int], **_: Any) -> Mapping[str, str]:
    n = len(stride)
    images = {
        "x": image_shapes(n),
        "base": image_shapes(n, "O", "o"),
        "out": image_shapes(n, "O", "o"),
    }
    kernel = kernel_dims(n)
    if "mid" in present:
        return images | {"up": "O p 1*", "mid": f"p q {kernel}", "down": "q I 1*"}
    return images | {"up": "O r 1*", "down": f"r I {kernel}"}


def _derive(sizes: Groups, **attributes: Any) -> Groups:
    holder = "mid" if "p" in sizes else "down"
    channels = (sizes["O"][0], sizes["I"][0])
    return derive_output("lora_conv_apply", holder, sizes, channels, attributes)


def _links(t: SimpleNamespace, attributes: Mapping[str, Any]) -> list[Link]:
    groups = attributes["groups"]
    batch = t.x.shape[0] * groups
    geometry = geometry_of(t.x.shape[2:], attributes)
    up = Link("up", batch, lambda w: w.reshape(groups, -1, w.shape[1]))
    if t.mid is None:
        return [chain.spatial("down", batch, geometry, t.down.shape[2:], _same), up]
    return [
        Link("down", batch, lambda w: w[None]),
        chain.spatial("mid", batch, geometry, t.mid.shape[2:], _same),
        up,
    ]


def _same(weight: Tensor) -> Tensor:
    return weight


def _formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round, **attributes: Any) -> Tensor:
    kernel = (t.down if t.mid is None else t.mid).shape[2:]
    shape = out_shape(t, kernel, t.up.shape[0], geometry_of(t.x.shape[2:], attributes))
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
    if "r" in d:
        rank, q = d["r"], 0
        extra = {}
    else:
        rank, q = d["p"], d["q"]
        extra = {"mid": pixels + d["O"] + d["I"]}
    return {
        "out": d["I"] * taps + rank + q * taps,
        "x": d["O"] + (rank + q) * taps,
        "up": pixels + d["I"] * taps + q * taps,
        "down": pixels + d["O"] + rank * taps,
        **extra,
    }


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    taps, pixels = extent(d, "k"), d["N"] * extent(d, "o")
    image = d["N"] * d["C"] * extent(d, "")
    rank = d["r"] if "r" in d else d["p"]
    factors = rank * (d["O"] + d["I"] * taps)
    if "r" not in d:
        factors = rank * d["O"] + rank * d["q"] * taps + d["q"] * d["I"]
    streams = 3 * image + 3 * pixels * d["O"]  # x twice and its gradient; y, and grad twice
    return Cost(itemsize * (streams + 3 * factors), 8 * pixels * factors)


_SIZES = {"N": 2, "C": 20, "H": 8, "W": 8, "O": 36, "r": 4, "I": 20, "kH": 3, "kW": 3}
_PRIMES = {"N": 3, "C": 13, "H": 5, "W": 7, "O": 17, "r": 3, "I": 13, "kH": 3, "kW": 2}
_POINT = _SIZES | {"kH": 1, "kW": 1}
_TUCKER = {"N": 2, "C": 24, "H": 8, "W": 8, "O": 20, "p": 5, "q": 3, "I": 24, "kH": 3, "kW": 3}
_GROUPED = _SIZES | {"C": 24, "I": 12}
_PAD = {"padding": (1, 1)}


def conv_case(name: str, sizes: Any, *args: Any, **more: Any) -> Case:
    """A case of few dtype mixes: only one shows all of them."""
    return Case(name, sizes, *args, **{"mixes": "few", "attributes": _PAD} | more)


_CASES = (
    conv_case("plain", _SIZES, mixes="all"),
    conv_case("base", _SIZES, present=("base",)),
    conv_case(
        "primes",
        _PRIMES,
        present=("base",),
        attributes={"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    ),
    conv_case("1x1", _POINT, attributes={}, present=("base",)),
    conv_case("groups", _GROUPED, attributes=_PAD | {"groups": 2, "dilation": (2, 2)}),
    conv_case("tucker", _TUCKER, present=("mid",), attributes={"stride": (2, 2)}),
    conv_case("tucker groups", _TUCKER | {"I": 12}, present=("mid",), attributes={"groups": 2}),
    conv_case(
        "1-d",
        {"N": 2, "C": 10, "W": 67, "O": 33, "r": 1, "I": 10, "kW": 3},
        attributes={"stride": (1,), "padding": (2,), "dilation": (2,)},
    ),
    conv_case(
        "3-d",
        {"N": 1, "C": 6, "D": 4, "H": 5, "W": 6, "O": 18, "r": 5, "I": 6, "kD": 2, "kH": 3}
        | {"kW": 1},
        attributes={"stride": (1, 2, 1), "padding": (0, 1, 0), "dilation": (1, 1, 1)},
    ),
    conv_case(
        "two levels",
        {"N": 1, "C": 5, "W": 1153, "O": 17, "r": 3, "I": 5, "kW": 3},
        attributes={"stride": (1,), "padding": (0,), "dilation": (1,)},
    ),
    conv_case("integers", _SIZES, "integers", 2.0, ("base",), exact=True),
    conv_case("one nonzero", _SIZES, "one_hot"),
    conv_case("cancellation", _SIZES, "cancellation", present=("base",)),
    conv_case("subnormal", _SIZES, "subnormal"),
    conv_case("near overflow", _SIZES, "near_overflow", 0.0055),
    conv_case("zero up", _SIZES, "zero_factor", present=("base",)),
    conv_case("strided", _POINT, layout="strided", attributes={"stride": (2, 2)}),
    conv_case("no images", _SIZES | {"N": 0}),
    conv_case(
        "gpu 64x64",
        {"N": 2, "C": 320, "H": 64, "W": 64, "O": 320, "r": 16, "I": 320, "kH": 3, "kW": 3},
        present=("base",),
        device="cuda",
    ),
    conv_case(
        "gpu 1x1",
        {"N": 2, "C": 1280, "H": 32, "W": 32, "O": 1280, "r": 16, "I": 1280, "kH": 1, "kW": 1},
        attributes={},
        device="cuda",
    ),
    conv_case(
        "gpu ragged",
        {"N": 3, "C": 259, "H": 31, "W": 37, "O": 131, "r": 13, "I": 259, "kH": 3, "kW": 3},
        attributes={"stride": (2, 2), "padding": (1, 1)},
        device="cuda",
    ),
    conv_case(
        "gpu tucker",
        {"N": 2, "C": 640, "H": 32, "W": 32, "O": 640, "p": 32, "q": 32, "I": 640}
        | {"kH": 3, "kW": 3},
        present=("mid",),
        device="cuda",
    ),
)

SIZES = "C = groups * I; groups divides O; 1-D to 3-D"

LORA_CONV_APPLY = register(
    OpSpec(
        name="lora_conv_apply",
        family=chain.FAMILY,
        operands=(
            Operand("x", side="model"),
            Operand("up"),
            Operand("down"),
            Operand("mid", optional=True),
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
        positive=("r", "p", "q", "I"),
        doc="[base +] s * up (down * x), * the convolution; Tucker: up (mid * (down x))",
        conditions=SIZES,
    )
)
