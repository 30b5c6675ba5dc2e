"""The shapes of the benchmark matrix: layers of models people adapt, and each op's sizes for one.

An op gets its rows here with no line of its own, as long as its shape symbols are the usual ones
(``SYMBOLS``). One with others has a function in ``SIZES``; one with neither is measured on its
OpSpec's own cases. The set ``own`` is that of ``rows.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from rows import SHAPES

from lycoris.kernels import explain
from lycoris.kernels.report import Mix
from lycoris.kernels.spec import Case, OpSpec, Sizes

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Those of a training run: all bf16, a bf16 model with fp32 adapters, fp16 and fp32.
MIXES: tuple[Mix, ...] = ((B16, B16), (B16, F32), (F16, F16), (F32, F32))
QUICK_MIXES: tuple[Mix, ...] = ((B16, B16),)


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer, or with ``image`` a convolution with its kernel on images of that size.

    ``quick`` layers are those of ``--quick``.
    """

    n_out: int
    n_in: int
    rank: int
    tokens: int | tuple[int, ...] = 4096
    kernel: tuple[int, ...] = ()
    image: tuple[int, ...] = ()
    factor: int = 8
    block: int = 32
    quick: bool = False


SETS: dict[str, tuple[Layer, ...]] = {
    "llm": (
        Layer(4096, 4096, 16, 8192, quick=True),
        Layer(4096, 4096, 128, 16384),
        Layer(11008, 4096, 64, 4096),
        Layer(4096, 11008, 16, 1024),
    ),
    "sdxl": (
        Layer(1280, 1280, 4, 77, quick=True),
        Layer(1280, 1280, 64, 1024),
        Layer(640, 640, 16, 4096),
        Layer(320, 320, 16, kernel=(3, 3), image=(128, 128), quick=True),
        Layer(640, 640, 4, kernel=(3, 3), image=(64, 64)),
        Layer(1280, 1280, 64, kernel=(3, 3), image=(32, 32)),
    ),
    "flux": (
        Layer(3072, 3072, 16, 4096, quick=True),
        Layer(12288, 3072, 64, 4096),
        Layer(3072, 12288, 128, 1024),
    ),
    # What a CPU can simulate.
    "small": (
        Layer(96, 64, 4, (2, 16), factor=4, block=8, quick=True),
        Layer(53, 61, 3, 37, factor=1, block=53),
        Layer(
            24, 16, 4, kernel=(3, 3), image=(8, 8), factor=4, block=8, quick=True
        ),
    ),
}  # fmt: skip

#: What ``--shapes`` takes.
NAMES = (*SETS, "own")

#: What a shape symbol means, wherever an op uses only these.
SYMBOLS: dict[str, Callable[[Layer], int | tuple[int, ...]]] = {
    "T": lambda y: y.tokens,
    "I": lambda y: y.n_in,
    "O": lambda y: y.n_out,
    "C": lambda y: y.n_out,
    "N": lambda y: (y.n_in, *y.kernel),
    "D": lambda y: (y.n_in, *y.kernel),
    "k": lambda y: y.kernel,
    "r": lambda y: y.rank,
    "p": lambda y: y.rank,
    "q": lambda y: y.rank,
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the matrix before backends and directions: one case in one mix of one set."""

    set: str
    case: Case
    mix: Mix


def case(sizes: Sizes, present: tuple[str, ...] = (), **attributes: Any) -> Case:
    """A case named by what it is: its sizes, optional operands and attributes."""
    words = [
        f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}"
        for k, v in sizes.items()
        if v != ()
    ]
    words += [f"+{name}" for name in present]
    words += [f"{k}={v}" for k, v in attributes.items() if k in ("axis", "diff")]
    return Case(" ".join(words), sizes, present=present, attributes=attributes)


def _usual(spec: OpSpec, y: Layer) -> list[Case]:
    """The op without optional operands; none where it has other symbols or can't take the layer."""
    found = next(explain.variants(spec), None)
    if found is None or found[0]:
        return []
    names = explain.symbols(spec, found[1])
    takes_images = any(n not in SYMBOLS for n in names)
    if takes_images or ("T" in names and y.image):
        return []
    sizes = {n: SYMBOLS[n](y) for n in names}
    if y.kernel and not {"N", "k"} & set(names):
        return []
    if names == ["T"]:  # pointwise, over a weight
        sizes = {"T": (y.n_out, y.n_in, *y.kernel)}
    return [case(sizes)]


# ------------------------------------------------------- ops with symbols of their own


def _images(y: Layer, channels: int) -> dict[str, Any]:
    names = ("H", "W")
    return {"N": 1, "C": channels} | dict(zip(names, y.image, strict=True))


def _conv_attributes(y: Layer) -> dict[str, Any]:
    same = tuple(n // 2 for n in y.kernel)
    return {"stride": (1,) * len(y.kernel), "padding": same, "dilation": (1,) * len(y.kernel)}


def _conv(y: Layer) -> list[Case]:
    if not y.image:
        return []
    kernel = dict(zip(("kH", "kW"), y.kernel, strict=True))
    sizes = _images(y, y.n_in) | {"O": y.n_out, "r": y.rank, "I": y.n_in} | kernel
    return [case(sizes, **_conv_attributes(y))]


def _halves(y: Layer) -> dict[str, int]:
    """LoKr's halves: w1 (factor, factor), w2 the rest, both as near as the sizes allow."""
    a = y.factor if y.n_out % y.factor == 0 else 1
    b = y.factor if y.n_in % y.factor == 0 else 1
    return {"a": a, "b": b, "c": y.n_out // a, "d": y.n_in // b}


_PAIR, _DENSE = ("w1", "w2_a", "w2_b"), ("w1", "w2")


def _lokr_weight(y: Layer) -> list[Case]:
    sizes = _halves(y) | {"k": y.kernel}
    cases = [case(sizes | {"r": y.rank}, _PAIR)]
    if y.n_out == y.n_in == 4096:
        cases.append(case({"a": 64, "b": 64, "c": 64, "d": 64, "k": ()}, _DENSE))
    return cases


def _lokr_apply(y: Layer) -> list[Case]:
    if y.image:
        return []
    sizes: dict[str, Any] = {"T": y.tokens} | _halves(y)
    cases = [case(sizes | {"r": y.rank}, _PAIR)]
    if y.n_out == y.n_in == 4096:
        cases.append(case({"T": y.tokens, "a": 64, "b": 64, "c": 64, "d": 64}, _DENSE))
    return cases


def _lokr_conv(y: Layer) -> list[Case]:
    if not y.image:
        return []
    halves = _halves(y)
    kernel = dict(zip(("kH", "kW"), y.kernel, strict=True))
    sizes = _images(y, halves["b"] * halves["d"]) | halves | {"r": y.rank} | kernel
    return [case(sizes, _PAIR, **_conv_attributes(y))]


def _blocks(y: Layer) -> dict[str, int]:
    size = next((s for s in (y.block, 24, 16, 8, 4, 2) if y.n_out % s == 0), y.n_out)
    return {"n": y.n_out // size, "s": size, "O": y.n_out}


def _butterfly(y: Layer) -> dict[str, int] | None:
    size = min(8, y.block)
    stages = next((m for m in (6, 4, 3, 2, 1) if y.n_out % (size << (m - 1)) == 0), 0)
    if size % 2 or not stages:
        return None
    return {"m": stages, "n": y.n_out // size, "b": size, "O": y.n_out}


def _rotate_weight(y: Layer, sizes: dict[str, int] | None) -> list[Case]:
    return [case({"N": (y.n_in, *y.kernel), **sizes})] if sizes else []


def _rotate_apply(y: Layer, sizes: dict[str, int] | None) -> list[Case]:
    if y.image or not sizes:
        return []
    return [case({"T": y.tokens, "B": 1, **sizes})]


def _timed(y: Layer, apply: bool) -> list[Case]:
    """T-LoRA with one mask for all, which is a batch of one."""
    if y.kernel:
        return []
    tokens = y.tokens if isinstance(y.tokens, int) else math.prod(y.tokens)
    sizes: dict[str, Any] = {"O": y.n_out, "I": y.n_in, "r": y.rank, "b": 1}
    return [case({"T": (1, tokens), **sizes} if apply else sizes)]


#: Ops whose sizes do not follow from SYMBOLS: the cases of one layer, none where it is no layer
#: for the op.
SIZES: dict[str, Callable[[Layer], list[Case]]] = {
    "lora_conv_apply": _conv,
    "loha_conv_apply": _conv,
    "lokr_conv_apply": _lokr_conv,
    "lokr_weight": _lokr_weight,
    "lokr_apply": _lokr_apply,
    "oft_weight": lambda y: _rotate_weight(y, _blocks(y)),
    "oft_apply": lambda y: _rotate_apply(y, _blocks(y)),
    "boft_weight": lambda y: _rotate_weight(y, _butterfly(y)),
    "boft_apply": lambda y: _rotate_apply(y, _butterfly(y)),
    "tlora_weight": lambda y: _timed(y, False),
    "tlora_apply": lambda y: _timed(y, True),
}


# ---------------------------------------------------------------------------- the matrix


def _own(spec: OpSpec, name: str, quick: bool) -> list[Case]:
    """The OpSpec's own random cases: those for a GPU, in ``small`` the others."""
    device = "any" if name == "small" else "cuda"
    usable = [
        c for c in spec.cases if (c.fill, c.layout, c.device) == ("random", "contiguous", device)
    ]
    renamed = [replace(c, mixes="all") for c in usable]
    return renamed[:1] if quick else renamed[:4]


def _told(c: Case) -> Case:
    """The case with its optional operands in its name, so that rows are told apart."""
    words = "".join(f" +{name}" for name in c.present if f"+{name}" not in c.name)
    return replace(c, name=c.name + words)


def cases(spec: OpSpec, name: str, quick: bool) -> list[Case]:
    """The cases of an op in one set, no two alike."""
    fit = SIZES.get(spec.name)
    whole = [c for y in SETS[name] for c in (fit(y) if fit else _usual(spec, y))]
    if not whole:
        if any(_cases_anywhere(spec)) or name in ("sdxl", "flux"):
            return []
        return _own(spec, name, quick)
    layers = [y for y in SETS[name] if y.quick or not quick]
    found = [c for y in layers for c in (fit(y) if fit else _usual(spec, y))]
    additive = next((o.name for o in spec.operands if o.additive and o.optional), None)
    if found and additive and not quick:
        first = found[0]
        more = tuple(dict.fromkeys((*first.present, additive)))
        found.append(case(first.sizes, more, **first.attributes))
    return list({c.name: c for c in found}.values())


def _cases_anywhere(spec: OpSpec) -> Iterator[Case]:
    fit = SIZES.get(spec.name)
    for layers in SETS.values():
        for y in layers:
            yield from fit(y) if fit else _usual(spec, y)


def rows(spec: OpSpec, sets: tuple[str, ...], mixes: tuple[Mix, ...], quick: bool) -> list[Row]:
    """Every row of an op; a mix that differs from another in no operand is left out."""
    found = []
    if "own" in sets:
        found = [Row("own", _told(c), mix) for c, mix in SHAPES.get(spec.name, ()) if mix in mixes]
    for name in (n for n in sets if n != "own"):
        for c in cases(spec, name, quick):
            seen = set()
            for mix in mixes:
                sides = frozenset(
                    (o.side, mix[o.side == "adapter"])
                    for o in spec.operands
                    if not o.optional or o.name in c.present
                )
                if sides not in seen:
                    seen.add(sides)
                    found.append(Row(name, c, mix))
    return found
