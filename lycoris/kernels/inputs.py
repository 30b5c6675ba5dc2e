"""Operands for parity cases and benchmarks, drawn as a Case says."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .call import resolve_policy
from .shapes import parse
from .spec import Case, Operand, OpSpec


@dataclass(frozen=True, slots=True)
class Inputs:
    """Operands in the OpSpec's order, the scale, and the output's incoming gradient."""

    operands: list[Tensor | None]
    scale: float
    grad: Tensor


def shape_of(shape: str, sizes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The concrete shape a notation stands for; trailing ones are left away."""
    return tuple(n for symbol, kind in parse(shape) if kind != "ones" for n in sizes[symbol])


def case_shapes(spec: OpSpec, case: Case) -> tuple[Mapping[str, str], dict[str, tuple[int, ...]]]:
    """The shapes of a case's operands and output, and the sizes of every symbol in them."""
    attributes = spec.named(case.attributes)
    sizes = {k: v if isinstance(v, tuple) else (v,) for k, v in case.sizes.items()}
    if spec.derive is not None:
        sizes |= spec.derive(sizes, **attributes)
    return spec.shapes(frozenset(case.present), **attributes), sizes


def draw(
    spec: OpSpec,
    case: Case,
    mix: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    seed: int = 0,
) -> Inputs:
    """Operands and gradient of a case, representable in their storage dtypes.

    Drawn on the CPU in fp64, so that a seed means the same everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes, sizes = case_shapes(spec, case)
    used = [o for o in spec.operands if not o.optional or o.name in case.present]
    values = {o.name: _fill(o, shape_of(shapes[o.name], sizes), case, generator) for o in used}
    grad = _noise(shape_of(shapes["out"], sizes), case, generator)
    half = torch.float16 in mix
    if case.fill == "one_hot":
        first = values[used[0].name]
        last = first.flatten()[-1:].clone()
        first.zero_().view(-1)[-1:] = last
    elif case.fill == "cancellation":
        _cancel(used, shapes, values, generator)
    elif case.fill == "subnormal":
        # The output falls below the smallest normal number of the working dtype.
        first_names, second_names = spec.tiny or ((used[0].name,), (used[1].name,))
        for name in first_names:
            values[name] *= 2.0**-8 if half else 2.0**-60
        for name in second_names:
            values[name] *= 2.0**-8 if half else 2.0**-68
    elif case.fill == "near_overflow":
        # grad @ up overflows fp16, and scale times it does not.
        grad *= 4096
        for operand in used:
            if operand.role == "mma":
                values[operand.name] *= 0.25 if operand.side == "model" else 1.0
        values[next(o.name for o in used if o.side == "adapter")] *= 16
    elif case.fill == "zero_factor":
        values[next(o.name for o in used if o.side == "adapter")].zero_()
    if spec.adjust is not None:
        spec.adjust(values, case)
    typed = {
        o.name: _place(values[o.name].to(mix[o.side == "adapter"]), case, device, first=first)
        for first, o in zip([True] + [False] * len(used), used, strict=False)
    }
    operands = [typed.get(o.name) for o in spec.operands]
    policy = resolve_policy(spec, operands, device, None, None)
    grad = grad.to(policy.compute).to(policy.output)
    return Inputs(operands, case.scale, _place(grad, case, device, first=True))


def _noise(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    if case.fill == "integers":
        return torch.randint(-1, 2, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _fill(
    operand: Operand, shape: tuple[int, ...], case: Case, generator: torch.Generator
) -> Tensor:
    value = _noise(shape, case, generator)
    if operand.side == "adapter" and case.fill not in ("integers", "large"):
        value /= math.sqrt(max(1, math.prod(shape[1:])))
    return value


def _cancel(
    used: list[Operand],
    shapes: Mapping[str, str],
    values: dict[str, Tensor],
    generator: torch.Generator,
) -> None:
    """Makes the longest contraction's second half nearly undo its first half."""
    symbols = [
        s for s, _ in parse(shapes[used[0].name]) if s not in {t for t, _ in parse(shapes["out"])}
    ]
    sign = 1.0
    for operand in used:
        tokens = [s for s, kind in parse(shapes[operand.name]) if kind != "ones"]
        if symbols and symbols[-1] in tokens and not operand.additive:
            value = values[operand.name]
            axis = tokens.index(symbols[-1]) - len(tokens)
            half = value.shape[axis] // 2
            first, second = value.narrow(axis, 0, half), value.narrow(axis, half, half)
            noise = torch.randn(second.shape, generator=generator, dtype=torch.float64)
            second.copy_(sign * first * (1 + noise / 16))
            sign = -1.0


def _place(t: Tensor, case: Case, device: torch.device, *, first: bool) -> Tensor:
    t = t.to(device)
    if case.layout == "strided" and t.dim():
        return torch.stack((t, t), -1)[..., 0]
    if case.layout == "expanded" and first and t.dim():
        return t[:1].expand(t.shape)
    return t
