"""Ops as adapters of a frozen ``nn.Linear``: what one step of such a layer costs.

Which operand is what follows from the OpSpec: ``x`` is the layer's input, ``weight`` its frozen
weight, and ``base``, or else the operand shaped like the output, what the frozen layer returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import linear

from lycoris.kernels.inputs import Inputs
from lycoris.kernels.shapes import parse
from lycoris.kernels.spec import Case, OpSpec

Op = Callable[[list[Tensor | None]], Tensor]


def output_operand(spec: OpSpec, case: Case) -> str | None:
    """The operand that takes the frozen layer's output; None where the op adapts no layer."""
    shapes = spec.shapes(frozenset(case.present), **spec.named(case.attributes))
    names = [o.name for o in spec.operands if o.side == "model"]
    if parse(shapes["out"])[0][1] != "lead" or (
        spec.attributes and "axis" in dict(case.attributes)
    ):
        return None
    if "x" in names:
        return "base" if "base" in names else None
    # Pointwise over the whole output: the only data operand, and something else to learn.
    _, *features = [symbol for symbol, _ in parse(shapes["out"])]
    flat = bool(features) and all(case.sizes.get(symbol) == 1 for symbol in features[1:])
    alike = [n for n in names if shapes.get(n) == shapes["out"]]
    return alike[0] if flat and alike and len(names) == 1 else None


def layer_case(spec: OpSpec, case: Case) -> Case | None:
    """The case with the frozen output as its operand; None where the op adapts no layer."""
    name = output_operand(spec, case)
    if name is None:
        return None
    optional = {o.name for o in spec.operands if o.optional}
    if name not in optional or name in case.present:
        return case
    return replace(case, name=f"{case.name} +{name}", present=(*case.present, name))


@dataclass(frozen=True, slots=True)
class Frozen:
    """The operands of one step: the layer's input, its weight, and the adapter's own operands."""

    x: Tensor
    weight: Tensor
    operands: list[Tensor | None]
    grad: Tensor


def freeze(spec: OpSpec, case: Case, inputs: Inputs, sizes: dict[str, int]) -> Frozen:
    """A layer around a case's operands."""
    named = SimpleNamespace(
        **{o.name: t for o, t in zip(spec.operands, inputs.operands, strict=True)}
    )
    out = getattr(named, output_operand(spec, case) or "")
    x, weight = getattr(named, "x", None), getattr(named, "weight", None)
    n_out = sizes.get("O", out.shape[-1])
    x = out.reshape(-1, n_out) if x is None else x
    if weight is None:
        n_in = x.shape[-1]
        weight = torch.randn(n_out, n_in, device=x.device, dtype=x.dtype) / n_in**0.5
    return Frozen(x, weight, inputs.operands, inputs.grad)


def step(spec: OpSpec, case: Case, frozen: Frozen, op: Op | None) -> Callable[[], object]:
    """One forward and backward of the layer with its adapter, or alone; W stays frozen."""
    where = output_operand(spec, case)
    x, weight = frozen.x.clone().requires_grad_(), frozen.weight.clone()
    grad = frozen.grad.clone().reshape(*x.shape[:-1], weight.shape[0])
    own = [
        None
        if t is None or o.name in ("x", "weight", where)
        else t.clone().requires_grad_(o.differentiable)
        for o, t in zip(spec.operands, frozen.operands, strict=True)
    ]
    wanted = [x, *(t for t in own if t is not None and t.requires_grad)]
    names = [o.name for o in spec.operands]
    shapes = [None if t is None else t.shape for t in frozen.operands]

    def alone() -> object:
        return torch.autograd.grad(linear(x, weight), x, grad.to(x.dtype))

    def forward() -> Tensor:  # of its own, so that y is let go when it ends
        assert op is not None
        y = linear(x, weight)
        given = {"x": x, "weight": weight, where: y}
        leaves = [
            given[n].reshape(shape) if n in given and shape is not None else t
            for n, t, shape in zip(names, own, shapes, strict=True)
        ]
        return op(leaves)

    def adapted() -> object:
        out = forward()
        return torch.autograd.grad(out, wanted, grad.reshape(out.shape).to(out.dtype))

    return adapted if op is not None else alone
