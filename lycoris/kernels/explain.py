"""An op as data: its variants and shapes, who has kernels for it, and what a call would launch.

All of it is derived from the OpSpec, on meta tensors: nothing is allocated and nothing runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import registry
from .call import resolve_policy
from .formula import flatten
from .inputs import case_shapes, shape_of
from .precision import Policy
from .report import Mix, UsageError, incapable, is_fused
from .schedule import Schedule
from .shapes import Binding, parse, spell
from .spec import Case, OpSpec, Sizes


def variants(spec: OpSpec) -> Iterator[tuple[frozenset[str], Mapping[str, str]]]:
    """Every valid set of present optional operands, smallest first, with the shapes."""
    required = {o.name for o in spec.operands if not o.optional}
    optional = [o.name for o in spec.operands if o.optional]
    for count in range(len(optional) + 1):
        for present in map(frozenset, combinations(optional, count)):
            try:
                shapes = spec.shapes(present, **spec.named({}))
            except (KeyError, ValueError):  # operands that only go together
                continue
            if required | present <= shapes.keys():
                used = required | present | {"out"}
                yield present, {n: s for n, s in shapes.items() if n in used}


def symbols(spec: OpSpec, shapes: Mapping[str, str]) -> list[str]:
    """The shape symbols whose sizes a call needs."""
    late = {"out", *(o.name for o in spec.operands if o.additive)} if spec.derive else set()
    given = (shape for name, shape in shapes.items() if name not in late)
    found = (s for shape in given for s, kind in parse(shape) if kind != "ones")
    return list(dict.fromkeys(found))


def describe(spec: OpSpec) -> dict[str, Any]:
    """An op's operands, shapes in each variant, backends and bound."""
    shapes: dict[str, dict[str, str]] = {}
    additive = {o.name for o in spec.operands if o.additive}
    for present, named in variants(spec):
        for name, shape in named.items():
            seen = shapes.setdefault(name, {})
            own = present - {name} - additive
            if spell(shape) not in seen.values():
                seen[" and ".join(sorted(own))] = spell(shape)
    everywhere = {o.name for o in spec.operands if not o.optional} | additive | {"out"}
    for name in everywhere & shapes.keys():
        if len(shapes[name]) == 1:  # no variant has another: it depends on no other operand
            shapes[name] = {"": next(iter(shapes[name].values()))}
    backends, without = [], {}
    for name in registry.names():
        module = registry.load(name)
        if isinstance(module, ModuleType) and is_fused(name):
            found = registry.kernels(module, spec.family)
            module = found if isinstance(found, str) else module
        if isinstance(module, str):
            without[name] = module
        else:
            backends.append(name)
    operands = [
        {
            "name": o.name,
            "role": o.role,
            "side": o.side,
            "optional": o.optional,
            "differentiable": o.differentiable,
            "shapes": shapes.get(o.name, {}),
        }
        for o in spec.operands
    ]
    return {
        "name": spec.name,
        "family": spec.family,
        "doc": spec.doc,
        "conditions": spec.conditions,
        "operands": operands,
        "out": shapes.get("out", {}),
        "attributes": [asdict(a) for a in spec.attributes],
        "backends": backends,
        "without": without,
        "bound": {"half": spec.bound.half, "fp32": spec.bound.fp32},
    }


#: What is said of each operand, by ``python -m lycoris ops`` and in docs/ops.md.
OPERAND_COLUMNS = ("operand", "shape", "role", "dtype of")


def operand_rows(about: Mapping[str, Any]) -> list[dict[str, str]]:
    """The operands of an op that :func:`describe` gave, and its output, one row each, in words."""

    def spelt(shapes: Mapping[str, str]) -> str:
        return "; ".join(f"{s} with {present}" if present else s for present, s in shapes.items())

    rows = [
        {
            "operand": o["name"] + (" (optional)" if o["optional"] else ""),
            "shape": spelt(o["shapes"]),
            "role": o["role"] + ("" if o["differentiable"] else ", no gradient"),
            "dtype of": f"the {o['side']}",
        }
        for o in about["operands"]
    ]
    return [*rows, {"operand": "(out)", "shape": spelt(about["out"]), "role": "", "dtype of": ""}]


def blanks(spec: OpSpec, case: Case, mix: Mix) -> list[Tensor | None]:
    """Operands of a case as meta tensors: shapes and dtypes, no memory."""
    shapes, sizes = case_shapes(spec, case)
    return [
        torch.empty(shape_of(shapes[o.name], sizes), dtype=mix[o.side == "adapter"], device="meta")
        if not o.optional or o.name in case.present
        else None
        for o in spec.operands
    ]


def _check_dimensions(spec: OpSpec, shapes: Mapping[str, str], sizes: Sizes) -> None:
    kinds = [token for shape in shapes.values() for token in parse(shape)]
    groups = {symbol for symbol, kind in kinds if kind != "one"}
    for symbol, size in sizes.items():
        if isinstance(size, tuple) and symbol not in groups:
            given = "x".join(map(str, size))
            raise UsageError(f"{spec.name}: {symbol} is one dimension; got {symbol}={given}")


def pick_variant(spec: OpSpec, sizes: Sizes, wanted: Sequence[str] | None = None) -> list[str]:
    """The optional operands of the smallest variant that needs exactly these shape symbols.

    Args:
        spec: the op.
        sizes: of its shape symbols.
        wanted: the optional operands, where they are not to be inferred.

    Raises:
        UsageError: no variant fits; the message lists the symbols of each. Or several sizes are
            given for a symbol that is one dimension.
    """
    needs: dict[str, str] = {}
    for present, shapes in variants(spec):
        found = symbols(spec, shapes)
        if (wanted is None or present == set(wanted)) and set(found) == sizes.keys():
            _check_dimensions(spec, shapes, sizes)
            return sorted(present)
        if wanted is not None and present == set(wanted):
            raise UsageError(
                f"{spec.name} with {', '.join(wanted) or 'nothing optional'} takes the sizes "
                f"{', '.join(found)}; got {', '.join(sizes) or 'none'}"
            )
        needs.setdefault(", ".join(found), " and ".join(sorted(present)))
    if wanted is not None:
        optional = ", ".join(o.name for o in spec.operands if o.optional) or "none"
        raise UsageError(
            f"{spec.name}: no variant has {', '.join(wanted)}; optional operands: {optional}"
        )
    listed = "; or with ".join(f"{p}: {s}" if p else s for s, p in needs.items())
    raise UsageError(
        f"{spec.name}: --shape needs the sizes {listed}; got {', '.join(sizes) or 'none'}"
    )


def refusal(spec: OpSpec, backend: str, case: Case, mix: Mix, device: torch.device) -> str | None:
    """Why a backend declines a parity case, by its own capability check; None where it doesn't."""
    operands = blanks(spec, case, mix)
    policy = resolve_policy(spec, operands, device, None, None)
    return incapable(backend, spec, spec.bind(operands, case.attributes).dims, policy, device)


class _Recorder(Schedule):
    """A Schedule that notes what would be launched, on meta tensors."""

    __slots__ = ("launches", "phase")

    def __init__(self, policy: Policy, device: torch.device) -> None:
        super().__init__(sys.modules[__name__], policy, device)  # no backend is asked
        self.launches: list[dict[str, Any]] = []
        self.phase = "forward"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def kernel(self, family: str, name: str, *, optional: bool = False) -> Any:
        def launch(*args: Any, plan: Any = None, **_: Any) -> None:
            shapes = [list(a.shape) for a in args if isinstance(a, Tensor)]
            tiles = asdict(plan) if plan is not None else {}
            kernel = f"{family}.{name}"
            self.launches.append(
                {"phase": self.phase, "kernel": kernel, "shapes": shapes, "plan": tiles}
            )

        return launch


def launches(
    spec: OpSpec,
    binding: Binding,
    operands: Sequence[Tensor | None],
    policy: Policy,
    device: torch.device,
    attributes: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Every kernel a fused backend would launch for a call and all its gradients, with its plan."""
    if policy.compute is torch.float64 or 0 in binding.dims.values():
        return []  # no fused backend takes it; nothing to launch on
    t = dict(flatten(spec, binding, operands))
    if spec.fold and t.get(spec.fold_with) is not None:
        folded = spec.fold(
            SimpleNamespace(**{n: v if v is None else v.float() for n, v in t.items()})
        )
        t |= folded
        if policy.name == "mma16":
            policy = replace(policy, compute=torch.float32)
    run = _Recorder(policy, device)
    attributes = spec.named(attributes or {})
    out = run.empty(binding.flat["out"], policy.output)
    saved = SimpleNamespace(
        **{
            s.name: run.empty(tuple(binding.dims[x] for x, _ in parse(s.shape)), s.dtype)
            for s in spec.saved
        }
    )
    wanted = {o.name for o in spec.operands if o.differentiable and not o.additive}
    grads = {n: None if v is None or n not in wanted else torch.empty_like(v) for n, v in t.items()}
    spec.forward(run, SimpleNamespace(**t), 1.0, out, saved, **attributes)
    run.phase = "backward"
    if wanted:
        spec.backward(
            run, out, SimpleNamespace(**t), saved, 1.0, SimpleNamespace(**grads), **attributes
        )
    return run.launches
