"""DoRA: a weight whose rows, or input columns, have a learnt length.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024; the norm per input column
is LyCORIS's ``wd_on_out=False``.

A line is what shares one magnitude: a row of the weight, or an input channel's columns. Kernels
see the weight as (O, N) and are told how many neighbouring columns make a line; 0 for rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import (
    Attribute,
    Bound,
    Case,
    Cost,
    Operand,
    OpSpec,
    Round,
    Saved,
    Sizes,
    register,
)
from .dora_lines import Lines

AXIS = Attribute("axis", "str", "out")
DETACH = Attribute("detach_norm", "bool", False)

# ------------------------------------------------------------------------------- formula


def wide(t: Tensor) -> Tensor:
    """fp32 at least: norms are computed in it."""
    return t if t.dtype is torch.float64 else t.float()


def line_norm(merged: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The Euclidean norm over ``dims``, kept; its derivative is 0 where it is 0."""
    top = merged.detach().abs().amax(dims, keepdim=True)
    top = torch.where((top > 0) & (top < math.inf), top, 1)
    # Scaled by the largest: the squares of a row of 1e-30 would vanish.
    total = (merged / top).square().sum(dims, keepdim=True)
    none = total == 0  # a NaN is not, so that it reaches the whole line
    return torch.where(none, 0, torch.where(none, 1, total).sqrt()) * top


def ratio(magnitude: Tensor, norm: Tensor) -> Tensor:
    """magnitude / norm; 0, with derivatives of 0, where the norm is 0."""
    none = norm == 0
    return torch.where(none, 0, magnitude / torch.where(none, 1, norm))


def rescaled(
    merged: Tensor, magnitude: Tensor, multiplier: float | Tensor, axis: str, detach_norm: bool
) -> Tensor:
    dims = (1,) if axis == "out" else (0, 2)
    norm = line_norm(merged, dims)
    if detach_norm:
        norm = norm.detach()
    # Exactly 1 where magnitude and norm are equal, and magnitude / norm where multiplier is 1.
    factor = multiplier * ratio(wide(magnitude).reshape(norm.shape), norm) + (1 - multiplier)
    return merged * factor


def _weight_formula(
    t: SimpleNamespace, scale: float | Tensor, rnd: Round, *, axis: str, detach_norm: bool
) -> Tensor:
    merged = wide(t.weight) if t.delta is None else wide(t.weight) + wide(t.delta)
    return rescaled(merged, t.magnitude, scale, axis, detach_norm)


# ---------------------------------------------------------------------------------- plans


def rows_plan(run: Schedule, weight: Tensor) -> Plan:
    """Tiles of a kernel whose programs own ``block_m`` whole rows."""
    if not plan.multiprocessors(run.device):  # simulated: one plan, so that there is one build
        return Plan(16, 32, 16, num_stages=1)
    rows, columns = weight.shape
    # Rows that start at odd addresses are copied ahead 4 bytes at a time, which costs registers.
    stages = 2 if columns % 8 == 0 else 1
    # A row that fits into registers is read once; a longer one the second time from the cache.
    block_n = plan.power_of_2(columns)
    block_n = block_n if block_n <= 8192 else 2048
    block_m = min(max(1, 4096 // block_n), 16, plan.power_of_2(rows)) if columns <= block_n else 1
    return Plan(block_m, block_n, 0, 8 if block_n > 4096 else 4, stages)


# ------------------------------------------------------------------------------ schedules


def flat(t: Tensor | None) -> Tensor | None:
    """A weight as (O, N)."""
    return None if t is None else t.flatten(1)


def group_of(weight: Tensor, axis: str) -> int:
    return 0 if axis == "out" else weight.shape[2]


def _weight_forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    *,
    axis: str,
    detach_norm: bool,
) -> None:
    group, weight = group_of(t.weight, axis), t.weight.flatten(1)
    delta, out = flat(t.delta), out.flatten(1)
    if group:
        merged = Lines(run, (weight, delta, None, None, 0.0), group)
        merged.rescale(t.magnitude, scale, saved.norm, out)
        return
    args = (weight, t.magnitude, delta, scale, saved.norm, out)
    run.launch("dora", "rescale", *args, tiles=rows_plan(run, weight))


def _weight_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    *,
    axis: str,
    detach_norm: bool,
) -> None:
    group, weight = group_of(t.weight, axis), t.weight.flatten(1)
    delta, grad = flat(t.delta), grad.flatten(1)
    made = (flat(grads.weight), flat(grads.delta), grads.magnitude)
    if group:
        merged = Lines(run, (weight, delta, None, None, 0.0), group)
        merged.rescale_back(grad, t.magnitude, scale, saved.norm, made, detach_norm)
        return
    args = (grad, weight, t.magnitude, delta, scale, saved.norm, *made, detach_norm)
    run.launch("dora", "rescale_back", *args, tiles=rows_plan(run, weight))


# ----------------------------------------------------------------------------------- specs


LINES = 'with axis="in" a line is an input channel, and the magnitude (I)'


def weight_shapes(present: frozenset[str], *, axis: str, **_: Any) -> Mapping[str, str]:
    if axis not in ("out", "in"):
        raise ValueError(f"dora: axis is {axis!r}; expected 'out' or 'in'")
    whole, line = ("O N+", "O") if axis == "out" else ("O I k*", "I")
    return {"weight": whole, "delta": whole, "magnitude": line, "out": whole}


def lines_of(sizes: Groups, *, axis: str, **_: Any) -> Groups:
    """The symbol of the lines."""
    return {"L": sizes["O" if axis == "out" else "I"]}


def length_of(d: Mapping[str, int]) -> int:
    return d["N"] if "N" in d else d["O"] * d["k"]


def width_of(d: Mapping[str, int]) -> int:
    return d["N"] if "N" in d else d["I"] * d["k"]


def _weight_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    return {"out": 1} | dict.fromkeys(("weight", "delta", "magnitude"), length_of(d))


def _weight_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    # Read, write, and backward read both and write: five matrices.
    size = d["O"] * width_of(d)
    return Cost(5 * itemsize * size, 12 * size)


def set_magnitude(values: dict[str, Tensor], case: Case, merged: Tensor, rows: bool) -> None:
    """Magnitudes near the norms, as training has them, in place of the drawn ones."""
    norm = merged.square().sum([d for d in range(merged.dim()) if d != (not rows)]).sqrt()
    drawn = values["magnitude"]
    if not drawn.any():
        return
    if case.fill == "integers":
        drawn.mul_(8)
    elif case.fill == "subnormal":
        drawn.copy_(norm * (2 + drawn.sign()) * drawn.abs().max())
    else:
        near = norm * (1 + drawn / drawn.abs().max() / 4)
        drawn.copy_(torch.where(norm > 0, near, drawn))


def _adjust(values: dict[str, Tensor], case: Case) -> None:
    weight = values["weight"]
    if case.fill == "integers":  # lines of 64 elements of 1 or -1: their norm is 8
        weight.copy_(torch.where(weight == 0, 1.0, weight))
    delta = values.get("delta")
    if delta is not None:
        if case.fill == "integers":
            delta.mul_(0)
        elif case.fill == "cancellation":
            delta.copy_(-weight * (1 + delta / 16))
    merged = weight if delta is None else weight + delta
    set_magnitude(values, case, merged, case.attributes.get("axis", "out") == "out")


_OUT: Sizes = {"O": 48, "N": 64}
_IN: Sizes = {"O": 64, "I": 48, "k": ()}
BY_IN = {"axis": "in"}

_WEIGHT_CASES = (
    Case("plain", _OUT),
    Case("delta", _OUT, present=("delta",)),
    Case("by input", _IN, attributes=BY_IN),
    Case("primes", {"O": 37, "N": 101}, present=("delta",), mixes="few"),
    Case("primes by input", {"O": 101, "I": 37, "k": ()}, attributes=BY_IN, mixes="few"),
    Case("conv", {"O": 24, "N": (10, 3, 3)}, mixes="few"),
    Case(
        "conv by input",
        {"O": 24, "I": 10, "k": (3, 3)},
        attributes=BY_IN,
        present=("delta",),
        mixes="few",
    ),
    Case("patches", {"O": 19, "I": 3, "k": (9, 11)}, attributes=BY_IN, mixes="few"),
    Case("two levels", {"O": 5, "N": 1153}, mixes="few"),
    Case("detached", _OUT, attributes={"detach_norm": True}, mixes="few"),
    Case("one column", {"O": 33, "N": 1}, mixes="few"),
    Case("integers", _OUT, "integers", 2.0, exact=True),
    Case("integers by input", _IN, "integers", 2.0, attributes=BY_IN, exact=True, mixes="few"),
    Case("one nonzero", _OUT, "one_hot", mixes="few"),
    Case("cancellation", _OUT, "cancellation", present=("delta",), mixes="few"),
    Case("subnormal", _OUT, "subnormal", mixes="few"),
    Case("near overflow", _OUT, "near_overflow", mixes="few"),
    Case("zero magnitude", _IN, "zero_factor", attributes=BY_IN, mixes="few"),
    Case("strided", _OUT, layout="strided", present=("delta",), mixes="few"),
    Case("expanded", _OUT, layout="expanded", mixes="few"),
    Case("llm", {"O": 4096, "N": 4096}, device="cuda"),
    Case(
        "llm by input",
        {"O": 4096, "I": 4096, "k": ()},
        present=("delta",),
        attributes=BY_IN,
        device="cuda",
        mixes="few",
    ),
    Case(
        "gpu conv by input",
        {"O": 1280, "I": 640, "k": (3, 3)},
        attributes=BY_IN,
        device="cuda",
        mixes="few",
    ),
    Case("gpu ragged", {"O": 1283, "N": 11003}, present=("delta",), device="cuda", mixes="few"),
)

DORA_WEIGHT = register(
    OpSpec(
        name="dora_weight",
        family="dora",
        operands=(
            Operand("weight", role="wide", side="model"),
            Operand("magnitude", role="wide"),
            Operand("delta", role="wide", optional=True),
        ),
        shapes=weight_shapes,
        formula=_weight_formula,
        forward=_weight_forward,
        backward=_weight_backward,
        reductions=_weight_reductions,
        cost=_weight_cost,
        bound=Bound(half=4.0, fp32=6.0),
        cases=_WEIGHT_CASES,
        saved=(Saved("norm", "L"),),
        attributes=(AXIS, DETACH),
        positive=("O", "N", "I", "k"),
        derive=lines_of,
        unit="output",
        adjust=_adjust,
        doc="M * (multiplier * (magnitude / norm(M) - 1) + 1), M = weight [+ delta], line by line",
        conditions=LINES,
    )
)
