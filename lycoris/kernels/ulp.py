"""Errors in units in the last place, against an fp64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: dtype -> (significand bits with the hidden one, exponent of the smallest normal number)
FORMATS = {
    torch.float16: (11, -14),
    torch.bfloat16: (8, -126),
    torch.float32: (24, -126),
    torch.float64: (53, -1022),
}


@dataclass(frozen=True, slots=True)
class Score:
    """The largest and the root-mean-square error of a tensor, in ULP; inf where not finite."""

    ulp: float
    rms: float

    @property
    def finite(self) -> bool:
        """Whether every element was finite (and zero where the whole reference is)."""
        return math.isfinite(self.ulp)


def spacing(dtype: torch.dtype, value: float) -> float:
    """The distance between neighbours of ``dtype`` in the binade of ``value``.

    Zero and subnormal values take the format's smallest spacing.
    """
    digits, smallest = FORMATS[dtype]
    exponent = math.frexp(value)[1] - 1 if value else smallest
    return math.ldexp(1.0, max(exponent, smallest) - digits + 1)


def spacings(dtype: torch.dtype, values: Tensor) -> Tensor:
    """:func:`spacing`, element by element, as fp64."""
    digits, smallest = FORMATS[dtype]
    exponents = torch.frexp(values.double())[1].to(torch.int64) - 1
    exponents = torch.where(values == 0, smallest, exponents).clamp(min=smallest)
    return torch.ldexp(torch.ones_like(values, dtype=torch.float64), exponents - digits + 1)


def score(out: Tensor, reference: Tensor, dtype: torch.dtype, *, pointwise: bool = False) -> Score:
    """Scores ``out`` against the fp64 ``reference`` of the same shape, in ULP of ``dtype``.

    A reduction's unit is the spacing at the reference's rms; a pointwise op's is each element's
    own. A reference that is zero everywhere must be matched exactly.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != reference.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; expected {tuple(reference.shape)}")
    if out.numel() == 0:
        return Score(0.0, 0.0)
    error = (out.double() - reference).abs()
    if not bool(torch.isfinite(error).all()):
        return Score(math.inf, math.inf)
    if not bool(reference.any()):
        return Score(math.inf, math.inf) if bool(error.any()) else Score(0.0, 0.0)
    unit = spacings(dtype, reference) if pointwise else spacing(dtype, _rms(reference))
    error = error / unit
    return Score(error.max().item(), _rms(error))


def _rms(values: Tensor) -> float:
    # Scaled by the largest, so that a subnormal fp32 tensor's squares do not vanish.
    top = values.abs().max().item()
    return top * math.sqrt((values / top).square().mean().item()) if top else 0.0
