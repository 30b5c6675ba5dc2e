"""DoRA's weight with the delta of a LoRA, which is never stored.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan, tile_count
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Attribute, Bound, Case, Cost, Operand, OpSpec, Round, Saved, Sizes, register
from .dora import (
    AXIS,
    BY_IN,
    DETACH,
    LINES,
    flat,
    group_of,
    length_of,
    lines_of,
    rescaled,
    set_magnitude,
    weight_shapes,
    wide,
    width_of,
)
from .dora_lines import SHORT, Lines, stages

MULTIPLIER = Attribute("multiplier", "float", 1.0)


def _formula(
    t: SimpleNamespace,
    scale: float | Tensor,
    rnd: Round,
    *,
    axis: str,
    multiplier: float,
    detach_norm: bool,
) -> Tensor:
    delta = wide(scale * (t.up @ t.down))
    merged = wide(t.weight) + delta.reshape(t.weight.shape)
    return rescaled(merged, t.magnitude, multiplier, axis, detach_norm)


#: Bytes of partial sums of down's gradient: where there would be more, it takes its own pass.
_PARTIALS = 2**24


def contraction(run: Schedule, columns: int, rank: int) -> Plan:
    """Tiles of the weight's gradient, each of which is contracted with the factors."""
    if not plan.multiprocessors(run.device):
        return Plan(32, 32, 16, num_stages=1)
    block_k = min(max(16, plan.power_of_2(rank)), 64)
    compute, aligned = run.policy.compute, columns % 8 == 0
    # bf16 leaves registers for tiles of the weight that are on their way; fp16's products are those
    # of fp32, which cost some, and so do rows at odd addresses.
    if compute is torch.bfloat16 and rank <= SHORT and aligned:
        return Plan(64, 64, block_k, 4, stages(run))
    return Plan(32, 64 if aligned and compute is not torch.float16 else 32, block_k, 8, 1)


def _forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    *,
    axis: str,
    multiplier: float,
    detach_norm: bool,
) -> None:
    group, weight = group_of(t.weight, axis), t.weight.flatten(1)
    merged = Lines(run, (weight, None, t.up, t.down, scale), group)
    merged.rescale(t.magnitude, multiplier, saved.norm, flat(out))


def _backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    *,
    axis: str,
    multiplier: float,
    detach_norm: bool,
) -> None:
    group, weight, grad = group_of(t.weight, axis), t.weight.flatten(1), grad.flatten(1)
    factors = (t.up, t.down, scale)
    wanted = any(g is not None for g in (grads.weight, grads.up, grads.down))
    merged = Lines(run, (weight, None, *factors), group)
    rest = (saved.norm, grads.magnitude, detach_norm, wanted)
    made = merged.radial(grad, t.magnitude, multiplier, *rest)
    if made is not None:
        gradient = (weight, grad, *factors, saved.norm, made)
        contract(run, gradient, flat(grads.weight), grads.up, grads.down, group)


def contract(
    run: Schedule,
    gradient: tuple[Any, ...],
    grad_weight: Tensor | None,
    grad_up: Tensor | None,
    grad_down: Tensor | None,
    group: int,
) -> None:
    """The gradient of W + s up down, contracted with the factors, never stored for them.

    ``gradient``: weight, incoming gradient or None, up, down, s, norms, and the two factors a line
    of :meth:`Lines.radial`. Where only the weight's gradient is wanted, it alone is made.
    """
    (n_out, columns), rank = gradient[0].shape, gradient[2].shape[1]
    tiles = contraction(run, columns, rank)
    tiles_m, tiles_n = tile_count(n_out, tiles.block_m), tile_count(columns, tiles.block_n)
    units = plan.multiprocessors(run.device)

    def strips(blocks: int, along: int) -> int:
        count = tile_count((8 if tiles.num_stages > 1 else 4) * units, blocks) if units else 2
        return tile_count(along, tile_count(along, count))  # none is empty

    def launch(splits: int, weight: Tensor | None, up: Tensor | None, down: Tensor | None) -> None:
        args = (*gradient, weight, up, down, group)
        run.launch("dora_contract", "contract", *args, tiles=replace(tiles, splits=splits))

    across, downwards = strips(tiles_m, tiles_n), strips(tiles_n, tiles_m)
    part_up = part_down = None
    together = grad_up is not None and 4 * tiles_m * rank * columns <= _PARTIALS
    if grad_up is not None:
        part_up = run.empty((across, n_out, rank), torch.float32)
    if grad_down is not None:
        slices = tiles_m if together else downwards
        part_down = run.empty((slices, rank, columns), torch.float32)
    if grad_up is not None or grad_weight is not None:
        launch(across, grad_weight, part_up, part_down if together else None)
    if grad_down is not None and not together:
        launch(downwards, None, None, part_down)
    sums = ((part_up, grad_up), (part_down, grad_down))
    run.add_up(*((p, g) for p, g in sums if p is not None and g is not None))


def _shapes(present: frozenset[str], *, axis: str, **_: Any) -> Mapping[str, str]:
    down = "r N+" if axis == "out" else "r D"
    return {**weight_shapes(present, axis=axis), "up": "O r 1*", "down": down}


def _derive(sizes: Groups, *, axis: str, **_: Any) -> Groups:
    if "D" in sizes and sizes["D"][0] != sizes["I"][0] * math.prod(sizes["k"]):
        shape = (sizes["I"][0], *sizes["k"])
        raise ValueError(
            f"dora_lora_weight: down has {sizes['D'][0]} columns; expected "
            f"{math.prod(shape)}, weight's {shape}"
        )
    return lines_of(sizes, axis=axis)


def _reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    length, width = length_of(d), width_of(d)
    return {
        "out": length + d["r"],
        "weight": length + d["r"],
        "magnitude": length + d["r"],
        "up": length + width,
        "down": length + d["O"],
    }


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    size = d["O"] * width_of(d)
    factors = d["r"] * (d["O"] + width_of(d))
    return Cost(itemsize * (5 * size + 3 * factors), size * (12 + 10 * d["r"]))


def _adjust(values: dict[str, Tensor], case: Case) -> None:
    weight = values["weight"]
    if case.fill == "integers":
        values["up"].zero_()
        weight.copy_(torch.where(weight == 0, 1.0, weight))
    delta = case.scale * (values["up"] @ values["down"].flatten(1)).reshape(weight.shape)
    if case.fill == "cancellation":
        weight.copy_(weight / 16 - delta)
    set_magnitude(values, case, weight + delta, case.attributes.get("axis", "out") == "out")


_OUT: Sizes = {"O": 48, "N": 64, "r": 4}

_CASES = (
    Case("plain", _OUT),
    Case("by input", {"O": 64, "I": 48, "k": (), "r": 4, "D": 48}, attributes=BY_IN, mixes="few"),
    Case("primes", {"O": 37, "N": 101, "r": 3}, mixes="few"),
    Case(
        "conv by input",
        {"O": 24, "I": 10, "k": (3, 3), "r": 5, "D": 90},
        attributes=BY_IN | {"multiplier": 0.625},
        mixes="few",
    ),
    Case("conv", {"O": 24, "N": (10, 3, 3), "r": 4}, mixes="few"),
    Case("rank 37", {"O": 40, "N": 64, "r": 37}, mixes="few"),
    Case("detached", _OUT, attributes={"detach_norm": True}, mixes="few"),
    Case("integers", _OUT, "integers", 2.0, exact=True, mixes="few"),
    Case("one nonzero", _OUT, "one_hot", mixes="few"),
    Case("cancellation", _OUT, "cancellation", mixes="few"),
    Case("subnormal", _OUT, "subnormal", mixes="few"),
    Case("near overflow", _OUT, "near_overflow", 0.0055, mixes="few"),
    Case("zero up", _OUT, "zero_factor", mixes="few"),
    Case("llm", {"O": 4096, "N": 4096, "r": 16}, device="cuda"),
    Case(
        "gpu ragged by input",
        {"O": 1283, "I": 331, "k": (3, 3), "r": 13, "D": 2979},
        attributes=BY_IN,
        device="cuda",
        mixes="few",
    ),
)

DORA_LORA_WEIGHT = register(
    OpSpec(
        name="dora_lora_weight",
        family="dora",
        operands=(
            Operand("weight", role="wide", side="model"),
            Operand("up"),
            Operand("down"),
            Operand("magnitude", role="wide"),
        ),
        shapes=_shapes,
        formula=_formula,
        forward=_forward,
        backward=_backward,
        reductions=_reductions,
        cost=_cost,
        bound=Bound(half=8.0, fp32=10.0),
        cases=_CASES,
        saved=(Saved("norm", "L"),),
        attributes=(AXIS, MULTIPLIER, DETACH),
        positive=("O", "N", "I", "k", "r"),
        derive=_derive,
        adjust=_adjust,
        doc="dora_weight with delta = scale * up @ down, which is never stored",
        conditions=LINES,
    )
)
