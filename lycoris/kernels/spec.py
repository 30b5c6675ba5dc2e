"""OpSpec: the whole contract of an op, from which everything else is generated.

Validation, fakes, autograd, the parity suite, benchmark rows and the CLI read nothing but the
OpSpec. A backend reads nothing of it: it only gets tensors, a Plan and a Policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from .shapes import Binding, Groups, bind

#: Marks a declared rounding in a formula: rounds the value and, going back, its gradient.
Round = Callable[..., Tensor]


#: Sizes of the shape symbols; a tuple for one that stands for several dimensions.
Sizes = Mapping[str, int | tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor operand.

    ``role`` is ``mma`` (cast to the compute dtype) or ``wide`` (read as it is, used in fp32).
    ``additive`` marks a term of the output itself, whose gradient is the output's: it is never
    saved and no kernel touches its gradient. ``side`` says whose dtype it carries: the
    ``model``'s (x, the original weight) or the ``adapter``'s.
    """

    name: str
    role: Literal["mma", "wide"] = "mma"
    optional: bool = False
    differentiable: bool = True
    additive: bool = False
    side: Literal["model", "adapter"] = "adapter"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A static, non-tensor argument: ``kind`` is its torch.library schema type.

    A list is given as a tuple.
    """

    name: str
    kind: Literal["int", "bool", "str", "float", "float?", "int[]"]
    default: Any


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor the forward pass keeps for the backward pass, by its shape symbols."""

    name: str
    shape: str
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Bound:
    """The declared worst error in ULP against the oracle.

    ``half`` bounds 16-bit compute. fp32 compute is bounded by ``fp32 * (2 + sqrt(min(K, 512)))``,
    K the longest reduction of the tensor.
    """

    half: float
    fp32: float

    def limit(self, compute: torch.dtype, reduction: int) -> float:
        """The bound for one output or gradient, in ULP of ``compute``."""
        if compute is torch.float32:
            return self.fp32 * (2.0 + min(reduction, 512) ** 0.5)
        return self.half


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work of a call: bytes moved once each way, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True, slots=True)
class Case:
    """One parity case: sizes of the shape symbols, and how the operands are filled.

    ``fill``: ``random``, ``large`` (a delta of the base's size), ``integers``, ``one_hot``,
    ``cancellation``, ``subnormal``, ``near_overflow``, ``zero_factor``. ``layout``:
    ``contiguous``, ``strided``, ``expanded``.
    ``exact``: the correctly rounded oracle is expected, element by element.
    ``mixes``: every dtype mix, or a ``few`` that show each dtype once: for a variant that is told
    apart by its shapes.
    """

    name: str
    sizes: Sizes
    fill: str = "random"
    scale: float = 0.7
    present: tuple[str, ...] = ()
    layout: str = "contiguous"
    attributes: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = False
    device: Literal["any", "cpu", "cuda"] = "any"
    mixes: Literal["all", "few"] = "all"


@dataclass(frozen=True)
class OpSpec:
    """The contract of one op.

    Attributes:
        name: the public name in :mod:`lycoris.functional`.
        family: the file that holds its kernels, in ``ops/`` and in every backend.
        operands: in the order of the kernels' and the library op's arguments.
        shapes: present optional operands (and the attributes, by name) -> shape of each operand
            and of ``out`` (see :mod:`lycoris.kernels.shapes`).
        formula: ``(t, scale, rnd, **attributes) -> out`` in differentiable PyTorch, on flattened
            operands. Oracle, model and eager are this one function in three dtypes.
        forward: ``(run, t, scale, out, saved, **attributes)`` launches kernels; see
            :class:`lycoris.kernels.schedule.Schedule`.
        backward: ``(run, grad, t, saved, scale, grads, **attributes)``; ``grads`` holds None where
            no gradient is wanted.
        reductions: dims -> the longest reduction of ``out`` and of each gradient.
        cost: ``(dims, itemsize of the output) -> Cost`` of forward plus backward.
        bound: the declared error.
        cases: the parity cases.
        fold: optional fp32 prologue ``(t) -> replacements``: small operands folded into one before
            any kernel runs, differentiated by PyTorch. A folded call computes in fp32.
        fold_with: the optional operand whose presence calls for the fold.
        positive: shape symbols that may not be 0.
        derive: (sizes of the symbols bound so far, and the attributes by name) -> further symbols
            with their sizes, which ``out`` and the additive operands may have, or ``reductions``
            and ``cost`` read. Raises ValueError where the sizes don't go together.
        unit: ``compute`` (matrix products) or ``output`` (pointwise: scored per element, except
            what ``reductions`` says is a sum, in ULP of the dtype it is stored in).
        inplace: the operand that the output is stored in, with its dtype. A call changes it and
            returns it; nothing is recorded for a backward pass, and no operand is differentiable.
        factor: the name of the scale, in errors and in the library op.
        tiny: the operands whose product a subnormal case puts below the normal numbers, while no
            intermediate is; by default the first and the second.
        adjust: turns operands drawn for a case, in fp64 by name, into ones that make sense
            together, in place: a norm that is one, a mask of zeros and ones.
        doc: what it computes, as one line of formulas.
        conditions: of the sizes, beyond what the shapes say.
    """

    name: str
    family: str
    operands: tuple[Operand, ...]
    shapes: Callable[..., Mapping[str, str]]
    formula: Callable[..., Tensor]
    forward: Callable[..., None]
    backward: Callable[..., None]
    reductions: Callable[[Mapping[str, int]], Mapping[str, int]]
    cost: Callable[[Mapping[str, int], int], Cost]
    bound: Bound
    cases: tuple[Case, ...]
    fold: Callable[[SimpleNamespace], Mapping[str, Tensor | None]] | None = None
    fold_with: str = ""
    saved: tuple[Saved, ...] = ()
    attributes: tuple[Attribute, ...] = ()
    positive: tuple[str, ...] = ()
    derive: Callable[..., Groups] | None = None
    unit: Literal["compute", "output"] = "compute"
    inplace: str = ""
    factor: str = "scale"
    adjust: Callable[[dict[str, Tensor], Case], None] | None = None
    tiny: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    doc: str = ""
    conditions: str = ""

    def target(self, operands: Sequence[Tensor | None]) -> Tensor:
        """The operand that a call in place changes."""
        found = operands[[o.name for o in self.operands].index(self.inplace)]
        assert found is not None
        return found

    def named(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """Every attribute by name: the given ones, defaults for the others."""
        return {a.name: attributes.get(a.name, a.default) for a in self.attributes}

    def bind(
        self, operands: Sequence[Tensor | None], attributes: Mapping[str, Any] | None = None
    ) -> Binding:
        """Checks every operand's shape and binds the shape symbols.

        Raises:
            ValueError: an operand's shape does not fit; the message names it, its shape and
                what was expected.
        """
        actual = {
            o.name: tuple(t.shape)
            for o, t in zip(self.operands, operands, strict=True)
            if t is not None
        }
        given = self.named(attributes or {})
        optional = frozenset(o.name for o in self.operands if o.optional)
        return bind(
            self.name,
            self.shapes(optional & actual.keys(), **given),
            actual,
            self.positive,
            partial(self.derive, **given) if self.derive is not None else None,
            frozenset(o.name for o in self.operands if o.additive),
        )


#: Every op by its public name, in the order of registration.
SPECS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    """Adds an op to the table everything is generated from.

    Raises:
        ValueError: the name is taken.
    """
    if spec.name in SPECS:
        raise ValueError(f"an op named {spec.name!r} is registered already")
    SPECS[spec.name] = spec
    return spec
