"""Running an op's formula: in the working dtype, in fp64 as the oracle, or with its roundings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    cast = {}
    for o in spec.operands:
        t = flat[o.name]
        if t is not None and not o.differentiable:
            t = t.detach()
        cast[o.name] = t.to(policy.compute) if t is not None and o.role == "mma" else t
    device = next(t.device for t in flat.values() if t is not None)
    if isinstance(scale, Tensor) and policy.compute is not torch.float64:
        scale = scale.float()
    if autocast_dtype(device.type) is None:
        return spec.formula(SimpleNamespace(**cast), scale, rnd, **attributes).to(policy.output)
    with torch.autocast(device.type, enabled=False):
        return spec.formula(SimpleNamespace(**cast), scale, rnd, **attributes).to(policy.output)


@contextmanager
def recording() -> Iterator[None]:
    """Lets autograd record, also inside a library op's body, which runs below autograd."""
    keys = torch._C.DispatchKey
    included = torch._C._dispatch_tls_local_include_set()
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.ADInplaceOrView, keys.AutogradOther):
        excluded = excluded.remove(key)
    with torch.enable_grad(), torch._C._ForceDispatchKeyGuard(included, excluded):
        yield


@dataclass(frozen=True, slots=True)
class Formula:
    """One call's formula: the op in plain PyTorch, differentiable to any order."""

    spec: OpSpec
    binding: Binding
    policy: Policy
    attributes: Mapping[str, Any]

    def output(self, operands: Sequence[Tensor | None], scale: float | Tensor) -> Tensor:
        """The output, contiguous, in the shape the caller sees."""
        flat = flatten(self.spec, self.binding, operands)
        out = run_formula(self.spec, flat, scale, self.policy, self.attributes)
        return out.reshape(self.binding.out_shape).contiguous()

    def gradients(
        self,
        grad: Tensor,
        operands: Sequence[Tensor | None],
        scale: float | Tensor,
        needs: Sequence[bool],
        *,
        create_graph: bool,
    ) -> list[Tensor | None]:
        """The gradients that are needed; None elsewhere."""
        with torch.enable_grad() if create_graph else recording():
            # Views: an operand that appears twice, or depends on another, stays two variables.
            views: list[Tensor | None] = [
                None
                if t is None
                else t.view_as(t)
                if create_graph
                else t.detach().requires_grad_(need)
                for t, need in zip(operands, needs, strict=True)
            ]
            out = self.output(views, scale)
            wanted = [i for i, need in enumerate(needs) if need]
            found = torch.autograd.grad(
                out,
                [v for i in wanted if (v := views[i]) is not None],
                grad,
                create_graph=create_graph,
            )
        grads: list[Tensor | None] = [None] * len(operands)
        for i, value in zip(wanted, found, strict=True):
            grads[i] = value
        return grads
