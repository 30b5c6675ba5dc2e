"""Running an op's formula: in the working dtype, in fp64 as the oracle, or with its roundings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .precision import Policy, autocast_dtype
from .shapes import Binding
from .spec import OpSpec, Round


def flatten(
    spec: OpSpec, binding: Binding, operands: Sequence[Tensor | None]
) -> dict[str, Tensor | None]:
    """The operands by name, in the shapes the kernels and the formula see."""
    flat = binding.flat
    return {
        o.name: t if t is None or t.shape == flat[o.name] else t.reshape(flat[o.name])
        for o, t in zip(spec.operands, operands, strict=True)
    }


def keep(value: Tensor, **_: Any) -> Tensor:
    """No rounding: the oracle's ``rnd``, and eager's, whose dtype rounds by itself."""
    return value


def run_formula(
    spec: OpSpec,
    flat: Mapping[str, Tensor | None],
    scale: float | Tensor,
    policy: Policy,
    attributes: Mapping[str, Any],
    rnd: Round = keep,
) -> Tensor:
    """The formula on flattened operands, ``mma`` operands cast to the compute dtype.

    Autocast is off inside: the policy has made every cast that is due.

    Returns:
        The flattened output in ``policy.output``, differentiable in every operand.
    """
    cast = {
        o.name: t.to(policy.compute) if t is not None and o.role == "mma" else t
        for o, t in ((o, flat[o.name]) for o in spec.operands)
    }
    device = next(t.device for t in flat.values() if t is not None)
    if isinstance(scale, Tensor) and policy.compute is not torch.float64:
        scale = scale.float()
    if autocast_dtype(device.type) is None:
        return spec.formula(SimpleNamespace(**cast), scale, rnd, **attributes).to(policy.output)
    with torch.autocast(device.type, enabled=False):
        return spec.formula(SimpleNamespace(**cast), scale, rnd, **attributes).to(policy.output)
