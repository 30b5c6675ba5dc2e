"""Pointwise ops: a scale along one axis (IA3), a scaled sum, and a merge in place.

Source: Liu et al., "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than
In-Context Learning", 2022 (IA3). No operand enters a matrix product: all are read as they are,
used in fp32, and each result is rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan
from ..schedule import Schedule
from ..spec import Attribute, Bound, Case, Cost, Operand, OpSpec, Round, Sizes, register

#: Fewer elements than this behind the axis are columns of one row, so that rows stay long.
_INNER = 32

# ----------------------------------------------------------------------------- ia3_scale


def _scale_shapes(present: frozenset[str], axis: int, diff: bool) -> Mapping[str, str]:
    inner = "".join(f" B{i}" for i in range(-1 - axis))
    return {"v": f"... C{inner}", "scale": "C", "out": f"... C{inner}"}


def _scale_formula(
    t: SimpleNamespace, scale: float | Tensor, rnd: Round, *, axis: int, diff: bool
) -> Tensor:
    factor = (scale * t.scale).reshape(-1, *[1] * (-1 - axis))
    return t.v * (factor if diff else 1 + factor)


@lru_cache(maxsize=4096)
def _tiles(rows: int, columns: int, by_rows: bool, units: int, longest: int = 256) -> Plan:
    """Tiles of the pointwise kernels over a matrix; ``splits``: parts of the sums of a gradient.

    A GPU's are 16 bytes a thread and row, of ``longest`` columns at most; its splits, 4 programs a
    multiprocessor: enough loads in flight, and few partial sums.
    """
    if not units:
        return Plan(16, 64, 1, splits=2)
    block_n = min(longest, max(32, plan.power_of_2(columns)))
    block_m = 4096 // block_n
    along, across = (columns, rows) if by_rows else (rows, columns)
    step, block = (block_n, block_m) if by_rows else (block_m, block_n)
    splits = max(1, min(-(-along // step), 4 * units // -(-across // block)))
    # No part is a longer chain than the second level's rule allows.
    return Plan(block_m, block_n, 1, 4, 1, max(splits, -(-along // (plan.CHUNK * step))))


def _matrix(v: Tensor, channels: int) -> tuple[bool, tuple[int, int]]:
    """How kernels see (A, C, B...): whether a row is a channel, and the rows and columns."""
    inner = prod(v.shape[2:])
    if inner < _INNER:
        return False, (v.shape[0], channels * inner)
    return True, (v.shape[0] * channels, inner)


def _scale_forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    *,
    axis: int,
    diff: bool,
) -> None:
    by_rows, shape = _matrix(t.v, t.scale.shape[0])
    tiles = _tiles(*shape, by_rows, plan.multiprocessors(run.device))
    name = "scale_rows" if by_rows else "scale_columns"
    run.launch("scale", name, t.v.view(shape), t.scale, scale, out.view(shape), diff, tiles=tiles)


def _scale_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    *,
    axis: int,
    diff: bool,
) -> None:
    if grads.scale is None:  # the forward pass of grad
        _scale_forward(
            run, SimpleNamespace(v=grad, scale=t.scale), scale, grads.v, saved, axis=axis, diff=diff
        )
        return
    channels = t.scale.shape[0]
    by_rows, shape = _matrix(t.v, channels)
    # Few sums a thread, each of many rows: two tensors of 16 bits are then read fastest.
    longest = 1024 if not by_rows and grad.itemsize == t.v.itemsize == 2 else 256
    tiles = _tiles(*shape, by_rows, plan.multiprocessors(run.device), longest)
    partials = run.empty((tiles.splits, shape[0 if by_rows else 1]), torch.float32)
    name = "gradients_of_rows" if by_rows else "gradients_of_columns"
    run.launch(
        "scale",
        name,
        grad.view(shape),
        t.v.view(shape),
        t.scale,
        scale,
        None if grads.v is None else grads.v.view(shape),
        partials,
        diff,
        tiles=tiles,
    )
    parts = partials.view((-1, channels) if by_rows else (tiles.splits, channels, -1))
    run.add_up((parts, grads.scale))


def _scale_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    return {"out": 1, "v": 1, "scale": prod(d.values()) // d["C"]}


def _scale_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(5 * itemsize * prod(d.values()), 4 * prod(d.values()))


def _scale_adjust(values: dict[str, Tensor], case: Case) -> None:
    if case.fill == "cancellation":  # 1 + multiplier * scale nearly vanishes
        noise = 1 + values["scale"] / 16
        values["scale"] = -noise / case.scale
    elif case.fill not in ("integers", "zero_factor"):
        values["scale"] *= 0.25


# -------------------------------------------------------------------- add_scaled, merge_


def _add_shapes(present: frozenset[str]) -> Mapping[str, str]:
    return {"delta": "...", "base": "...", "out": "..."}


def _add_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    out = scale * t.delta
    return out if t.base is None else t.base + out


@lru_cache(maxsize=4096)
def _flat_tiles(size: int, units: int) -> Plan:
    return Plan(1, 4096 if units else 1024, 1, 4, 1)


def _add_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    tiles = _flat_tiles(out.numel(), plan.multiprocessors(run.device))
    run.launch("scale", "add", t.delta, t.base, scale, out, tiles=tiles)


def _add_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    _add_forward(run, SimpleNamespace(delta=grad, base=None), scale, grads.delta, saved)


def _add_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    return Cost(5 * itemsize * d["T"], 3 * d["T"])


def _merge_shapes(present: frozenset[str]) -> Mapping[str, str]:
    return {"weight": "...", "delta": "...", "out": "..."}


def _merge_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    # Eager rounds once too: merging is exact to a rounding on every backend.
    weight, delta = (a if a.dtype is torch.float64 else a.float() for a in (t.weight, t.delta))
    return weight + scale * delta


def _merge_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    tiles = _flat_tiles(out.numel(), plan.multiprocessors(run.device))
    run.launch("scale", "merge", out, t.delta, scale, tiles=tiles)


def _merge_backward(*args: Any) -> None:
    raise AssertionError("nothing is recorded for a call in place")


# --------------------------------------------------------------------------------- specs

_LAST: Sizes = {"T": (2, 32), "C": 48}
_INSIDE: Sizes = {"T": (2,), "C": 24, "B0": 5, "B1": 8}
_FIRST: Sizes = {"T": (), "C": 40, "B0": 3, "B1": 17}
_FLAT: Sizes = {"T": (40, 37)}


def _at(axis: int, **more: Any) -> dict[str, Any]:
    return {"attributes": {"axis": axis, **more}, "mixes": "few"}


_SCALE_CASES = (
    Case("plain", _LAST),
    Case("integers", _LAST, "integers", 2.0, exact=True),
    Case("diff", {"T": 67, "C": 71}, attributes={"diff": True}, mixes="few"),
    Case("channels", {"T": 3, "C": 16, "B0": 3, "B1": 3}, **_at(-3)),
    Case("images", _INSIDE, **_at(-3)),
    Case("rows", _FIRST, **_at(-3, diff=True)),
    Case("integers rows", _FIRST, "integers", 2.0, exact=True, **_at(-3)),
    Case("primes", {"T": (3, 7), "C": 61, "B0": 37}, **_at(-2)),
    Case("one row", {"T": (), "C": 509}, mixes="few"),
    Case("many rows", {"T": 509, "C": 5}, mixes="few"),
    Case("one nonzero", _LAST, "one_hot", mixes="few"),
    Case("cancellation", _LAST, "cancellation", 0.5, mixes="few"),
    Case("subnormal", _LAST, "subnormal", mixes="few"),
    Case("near overflow", _LAST, "near_overflow", 0.0055, mixes="few"),
    Case("zero scale", _LAST, "zero_factor", mixes="few"),
    Case("strided", _LAST, layout="strided", mixes="few"),
    Case("expanded", _LAST, layout="expanded", mixes="few"),
    Case("no tokens", {"T": (3, 0), "C": 48}, mixes="few"),
    Case("llm", {"T": (2, 4096), "C": 4096}, device="cuda"),
    Case("gpu ragged", {"T": 4099, "C": 3071}, device="cuda", mixes="few"),
    Case("gpu conv", {"T": (), "C": 1280, "B0": 640, "B1": 9}, device="cuda", **_at(-3)),
    Case("gpu images", {"T": 8, "C": 321, "B0": 64, "B1": 64}, device="cuda", **_at(-3)),
)

_BASE = ("base",)
_ADD_CASES = (
    Case("plain", _FLAT, present=_BASE),
    Case("integers", _FLAT, "integers", 2.0, _BASE, exact=True),
    Case("primes", {"T": (61, 37)}, present=_BASE, mixes="few"),
    Case("one element", {"T": ()}, present=_BASE, mixes="few"),
    Case("one nonzero", _FLAT, "one_hot", present=_BASE, mixes="few"),
    Case("cancellation", _FLAT, "cancellation", present=_BASE, mixes="few"),
    Case("subnormal", _FLAT, "subnormal", present=_BASE, mixes="few"),
    Case("near overflow", _FLAT, "near_overflow", 0.0055, present=_BASE, mixes="few"),
    Case("zero delta", _FLAT, "zero_factor", present=_BASE, mixes="few"),
    Case("large delta", _FLAT, "large", present=_BASE, mixes="few"),
    Case("strided", _FLAT, layout="strided", present=_BASE, mixes="few"),
    Case("expanded", _FLAT, layout="expanded", present=_BASE, mixes="few"),
    Case("empty", {"T": (0, 8)}, present=_BASE, mixes="few"),
    Case("llm", {"T": (4096, 4096)}, present=_BASE, device="cuda"),
    Case("gpu ragged", {"T": (4099, 3071)}, present=_BASE, device="cuda", mixes="few"),
)
_MERGE_CASES = (
    Case("plain", _FLAT),
    Case("integers", _FLAT, "integers", 2.0, exact=True),
    Case("primes", {"T": (61, 37)}, mixes="few"),
    Case("one element", {"T": ()}, mixes="few"),
    Case("one nonzero", _FLAT, "one_hot", mixes="few"),
    Case("cancellation", _FLAT, "cancellation", mixes="few"),
    Case("subnormal", _FLAT, "subnormal", mixes="few"),
    Case("near overflow", _FLAT, "near_overflow", 0.0055, mixes="few"),
    Case("zero delta", _FLAT, "zero_factor", mixes="few"),
    Case("large delta", _FLAT, "large", mixes="few"),
    Case("strided", _FLAT, layout="strided", mixes="few"),
    Case("empty", {"T": (0, 8)}, mixes="few"),
    Case("llm", {"T": (4096, 4096)}, device="cuda"),
    Case("gpu ragged", {"T": (4099, 3071)}, device="cuda", mixes="few"),
)

IA3_SCALE = register(
    OpSpec(
        name="ia3_scale",
        family="scale",
        operands=(Operand("v", role="wide", side="model"), Operand("scale", role="wide")),
        shapes=_scale_shapes,
        formula=_scale_formula,
        forward=_scale_forward,
        backward=_scale_backward,
        reductions=_scale_reductions,
        cost=_scale_cost,
        bound=Bound(half=4.0, fp32=3.0),
        cases=_SCALE_CASES,
        factor="multiplier",
        attributes=(Attribute("axis", "int", -1), Attribute("diff", "bool", False)),
        unit="output",
        adjust=_scale_adjust,
        doc="v * (1 + s * scale[c]); diff: v * s * scale[c]",
    )
)

ADD_SCALED = register(
    OpSpec(
        name="add_scaled",
        family="scale",
        operands=(
            Operand("delta", role="wide"),
            Operand("base", role="wide", optional=True, additive=True, side="model"),
        ),
        shapes=_add_shapes,
        formula=_add_formula,
        forward=_add_forward,
        backward=_add_backward,
        # Of two terms: scored at the sum's rms, where they may cancel.
        reductions=lambda d: {"out": 2, "delta": 1},
        cost=_add_cost,
        bound=Bound(half=8.0, fp32=3.0),
        cases=_ADD_CASES,
        unit="output",
        doc="[base +] s * delta",
    )
)

MERGE = register(
    OpSpec(
        name="merge_",
        family="scale",
        operands=(
            Operand("weight", role="wide", differentiable=False, side="model"),
            Operand("delta", role="wide", differentiable=False),
        ),
        shapes=_merge_shapes,
        formula=_merge_formula,
        forward=_merge_forward,
        backward=_merge_backward,
        reductions=lambda d: {"out": 2},
        cost=lambda d, itemsize: Cost(3 * itemsize * d["T"], 2 * d["T"]),
        bound=Bound(half=8.0, fp32=3.0),
        cases=_MERGE_CASES,
        unit="output",
        inplace="weight",
        factor="multiplier",
        doc="weight += s * delta, in place",
    )
)
