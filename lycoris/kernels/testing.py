"""The parity runner: any backend against the fp64 oracle, in ULP, under one rule.

It is public: a third-party backend registered through the entry-point group proves itself with
``check`` or ``python -m lycoris parity --backend NAME``, under the same rule as those in the tree.
docs/numerics.md explains the rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..functional import OPS
from . import registry, ulp
from .call import resolve_policy
from .errors import BackendError
from .inputs import Inputs, draw
from .precision import HALF, Policy
from .schedule import Schedule
from .spec import SPECS, Case, OpSpec
from .ulp import Score

#: (model's dtype, adapter's dtype).
Mix = tuple[torch.dtype, torch.dtype]
#: Every mix the policy allows.
MIXES = (
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.bfloat16),
)
#: Each dtype as the model's and as the adapter's.
_FEW = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
)
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
#: Largest sizes for which agreement with the model is asked for, element by element.
_AGREEMENT_SIZE = 512


def mix_name(mix: Mix) -> str:
    """``bf16`` where both sides agree, else ``bf16/fp32``: the model's, then the adapter's."""
    return "/".join(dict.fromkeys(_SHORT[dtype] for dtype in mix))


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one output or gradient. Scores are in ULP of the dtype it works in."""

    op: str
    backend: str
    case: str
    dtypes: str
    tensor: str
    device: str
    ulp: float
    rms: float
    model_ulp: float
    model_rms: float
    floor_ulp: float
    floor_rms: float
    eager_ulp: float
    eager_rms: float
    bound: float
    headroom: float
    agreement: float
    why: str

    @property
    def passed(self) -> bool:
        """Whether every part of the rule holds."""
        return not self.why

    def as_dict(self) -> dict[str, Any]:
        """The row as plain data, with ``pass``."""
        return asdict(self) | {"pass": self.passed}


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype, forward: bool, backward: bool) -> Any:
        ctx.dtype = dtype if backward else None
        return value.to(dtype).double() if forward else value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad if ctx.dtype is None else grad.to(ctx.dtype).double()), None, None, None


def rounding(dtype: torch.dtype) -> Any:
    """The model's ``rnd``: does every declared rounding, of a value and of its gradient."""

    def rnd(value: Tensor, *, forward: bool = True, backward: bool = True) -> Tensor:
        return _Rounding.apply(value, dtype, forward, backward)

    return rnd


def _reference(
    spec: OpSpec, inputs: Inputs, policy: Policy, rnd: Any, attributes: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The formula in fp64 on operands after the policy's cast: ``out`` and every gradient."""
    leaves: dict[str, Tensor | None] = {}
    binding = spec.bind(inputs.operands, attributes)
    for operand, t in zip(spec.operands, inputs.operands, strict=True):
        if t is not None:
            t = t.detach().to(policy.compute) if operand.role == "mma" else t.detach()
            t = t.double().reshape(binding.flat[operand.name]).clone()
            t.requires_grad_(operand.differentiable)
        leaves[operand.name] = t
    out = spec.formula(SimpleNamespace(**leaves), inputs.scale, rnd, **attributes)
    names = [n for n, t in leaves.items() if t is not None and t.requires_grad]
    grad = inputs.grad.double().reshape(out.shape)
    wanted = [t for n in names if (t := leaves[n]) is not None]
    found = torch.autograd.grad(out, wanted, grad) if wanted else ()
    return {"out": out.detach(), **dict(zip(names, found, strict=True))}


def _run(
    spec: OpSpec, inputs: Inputs, backend: str, case: Case, out_dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The op on one backend: ``out`` and every gradient, in the operands' shapes."""
    leaves = [
        None
        if t is None
        else (_copied(t) if o.name == spec.inplace else t.detach()).requires_grad_(o.differentiable)
        for o, t in zip(spec.operands, inputs.operands, strict=True)
    ]
    attributes = tuple(spec.named(case.attributes).values())
    out = OPS[spec.name](
        leaves, inputs.scale, attributes=attributes, backend=backend, out_dtype=out_dtype
    )
    named = {
        o.name: t
        for o, t in zip(spec.operands, leaves, strict=True)
        if t is not None and t.requires_grad
    }
    found = torch.autograd.grad(out, list(named.values()), inputs.grad) if named else ()
    return {"out": out.detach(), **dict(zip(named, found, strict=True))}


def _copied(t: Tensor) -> Tensor:
    """``t`` in memory of its own, laid out as it is."""
    memory = t.untyped_storage().clone()
    return t.new_empty(0).set_(memory, t.storage_offset(), t.shape, t.stride())


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills every fresh output and workspace with NaN, so that an element nobody wrote shows."""
    plain = Schedule.empty

    def empty(self: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return plain(self, shape, dtype).fill_(math.nan)

    Schedule.empty = empty  # type: ignore[method-assign]
    try:
        yield
    finally:
        Schedule.empty = plain  # type: ignore[method-assign]


def _verdict(
    scores: Sequence[Score],
    bound: float,
    unit: torch.dtype,
    reduction: int,
    rounds: bool,
    agreement: float,
    elements: int,
) -> str:
    """The rule of docs/numerics.md: which parts fail, in words; empty where all hold."""
    got, model, floor, eager = scores
    if not got.finite:
        return "not finite, or not zero where all is zero"
    k = min(reduction, 512)
    limits = [("ulp", got.ulp, bound, "bound")]
    # A result stored wider than its compute dtype has a floor of nearly nothing; what fp32 itself
    # leaves, in ULP of the compute dtype, is granted then: K sums, the scale and the base.
    accumulation = math.ldexp(math.sqrt(k + 2), ulp.FORMATS[unit][0] - 24)
    # One standard deviation of the rms of so many evenly spread errors.
    factor = 1.05 + 0.45 / math.sqrt(elements or 1)
    if unit in HALF:
        if rounds:
            limits += [
                ("rms", got.rms, factor * model.rms, f"{factor:.2f} model"),
                ("ulp", got.ulp, 1.25 * model.ulp + 0.5, "1.25 model + 0.5"),
            ]
        else:
            limits += [
                (
                    "rms",
                    got.rms,
                    max(factor * floor.rms, 0.35 * accumulation),
                    f"{factor:.2f} floor",
                ),
                ("ulp", got.ulp, 1.1 * floor.ulp + 0.25, "1.1 floor + 0.25"),
            ]
        if eager.finite:
            unfused = max(factor * max(eager.rms, floor.rms), 0.35 * accumulation)
            limits.append(("rms", got.rms, unfused, f"{factor:.2f} eager"))
        if agreement < 0.9:
            return f"only {agreement:.1%} of the elements equal the model's"
    else:
        eager_rms, eager_ulp = (eager.rms, eager.ulp) if eager.finite else (0.0, 0.0)
        limits += [
            (
                "rms",
                got.rms,
                max(2 * eager_rms, factor * floor.rms, 0.35 * math.sqrt(k)),
                "fp32 rule",
            ),
            (
                "ulp",
                got.ulp,
                max(3 * eager_ulp, 1.25 * floor.ulp + 0.5, 2 * math.sqrt(k)),
                "fp32 rule",
            ),
        ]
    failed = [f"{w} {v:.3g} > {x:.3g} ({name})" for w, v, x, name in limits if v > x + 1e-12]
    return "; ".join(failed)


class Trial:
    """One case in one mix: its operands, and all that a backend's run of it is scored against.

    Args:
        op: the op's public name.
        case: one of ``SPECS[op].cases``, or one of your own.
        mix: the dtypes of the model's and of the adapter's operands.
        device: where to run.
        seed: of the operands.
    """

    def __init__(
        self, op: str, case: Case, mix: Mix, *, device: str | torch.device = "cpu", seed: int = 0
    ) -> None:
        spec = self.spec = SPECS[op]
        self.case, self.mix, self.device = case, mix, torch.device(device)
        inputs = self.inputs = draw(spec, case, mix, self.device, seed)
        policy = self._policy = resolve_policy(spec, inputs.operands, self.device, None, None)
        attributes = spec.named(case.attributes)
        self._oracle = _reference(spec, inputs, policy, lambda t, **_: t, attributes)
        self._model = _reference(spec, inputs, policy, rounding(policy.compute), attributes)
        eager = _run(spec, inputs, registry.FORMULA, case)
        self._dims = spec.bind(inputs.operands, attributes).dims
        self._reductions = spec.reductions(self._dims)
        self._stored = {
            o.name: t.dtype
            for o, t in zip(spec.operands, inputs.operands, strict=True)
            if t is not None
        } | {"out": policy.output}
        #: Scores of the model, of one rounding and of eager.
        self._others = {
            name: [
                self._score(name, self._model[name].to(self._stored[name])),
                self._score(name, exact.to(self._stored[name])),
                self._score(name, eager[name].reshape(exact.shape)),
            ]
            for name, exact in self._oracle.items()
        }

    def _unit(self, name: str) -> torch.dtype:
        """A pointwise op has no compute dtype: each tensor is as exact as what it is stored in."""
        return self._stored[name] if self.spec.unit == "output" else self._policy.compute

    def _score(self, name: str, value: Tensor) -> Score:
        # A pointwise op's reduced gradients are sums like any others.
        pointwise = self.spec.unit == "output" and self._reductions.get(name, 1) == 1
        return ulp.score(value, self._oracle[name], self._unit(name), pointwise=pointwise)

    def score(self, backend: str) -> list[Row]:
        """Runs the case on a backend, in NaN-poisoned memory, and scores its output and gradients.

        Returns:
            One row for the output and one for each gradient, passed or not.

        Raises:
            BackendError: the backend can't serve the case, or wrote into an operand.
        """
        given = self.inputs.operands
        spare = [None if t is None else _copied(t) for t in given]
        with poisoned():
            got = _run(self.spec, self.inputs, backend, self.case)
        for operand, t, kept in zip(self.spec.operands, given, spare, strict=True):
            if t is not None and kept is not None and not torch.equal(t, kept):
                self.inputs = replace(self.inputs, operands=spare)  # as the next backend gets them
                raise BackendError(f"{backend} wrote into {operand.name} of {self.spec.name}")
        largest = max(self._dims.values(), default=0)
        small = largest <= _AGREEMENT_SIZE and self.device.type == "cpu"
        return [self._row(backend, name, got[name], small) for name in self._oracle]

    def _row(self, backend: str, name: str, got: Tensor, small: bool) -> Row:
        exact, dtype, unit = self._oracle[name], self._stored[name], self._unit(name)
        value = got.reshape(exact.shape)
        perfect = self._model[name].to(dtype)
        scores = [self._score(name, value), *self._others[name]]
        same = value.to(unit) == perfect.to(unit)
        agreement = same.double().mean().item() if same.numel() else 1.0
        rounds = not torch.equal(self._model[name], exact)
        reduction = self._reductions.get(name, 1)
        bound = self.spec.bound.limit(unit, reduction)
        agreed = agreement if small else 1.0
        why = _verdict(scores, bound, unit, reduction, rounds, agreed, value.numel())
        if self.case.exact and not torch.equal(value.double(), floor := exact.to(dtype).double()):
            wrong = (value.double() != floor).sum().item()
            why = why or f"{wrong} elements differ from the correctly rounded oracle"
        if value.numel() and got.dtype != dtype:
            why = f"stored as {got.dtype}, expected {dtype}"
        mine, model, floor_score, eager = scores
        return Row(
            op=self.spec.name,
            backend=backend,
            case=self.case.name,
            dtypes=mix_name(self.mix),
            tensor=name if name == "out" else f"grad {name}",
            device=self.device.type,
            ulp=mine.ulp,
            rms=mine.rms,
            model_ulp=model.ulp,
            model_rms=model.rms,
            floor_ulp=floor_score.ulp,
            floor_rms=floor_score.rms,
            eager_ulp=eager.ulp,
            eager_rms=eager.rms,
            bound=bound,
            headroom=bound / mine.ulp if mine.ulp else math.inf,
            agreement=agreement,
            why=why,
        )


def check(
    op: str,
    backend: str,
    case: Case,
    mix: Mix,
    *,
    device: str | torch.device = "cpu",
    seed: int = 0,
) -> list[Row]:
    """One :class:`Trial` of one backend: its arguments, and :meth:`Trial.score`."""
    return Trial(op, case, mix, device=device, seed=seed).score(backend)


def cases(op: str, device: str = "cpu") -> Iterator[tuple[Case, Mix]]:
    """Every case of an op for a device type, with every dtype mix that makes a difference to it."""
    spec = SPECS[op]
    for case in spec.cases:
        if case.device not in ("any", device):
            continue
        seen = set()
        for mix in MIXES if case.mixes == "all" else _FEW:
            sides = frozenset(
                (o.side, mix[o.side == "adapter"])
                for o in spec.operands
                if not o.optional or o.name in case.present
            )
            if sides not in seen:
                seen.add(sides)
                yield case, mix


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The worst of every (op, backend, dtypes): what the table at the end of a run shows."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.backend, row.dtypes), []).append(row)
    table = []
    for (op, backend, dtypes), members in sorted(groups.items()):
        worst = min(members, key=lambda r: (r.passed, r.headroom))
        table.append(
            {
                "op": op,
                "backend": backend,
                "dtypes": dtypes,
                "ulp": worst.ulp,
                "model": worst.model_ulp,
                "floor": worst.floor_ulp,
                "eager": worst.eager_ulp,
                "bound": worst.bound,
                "headroom": worst.headroom,
                "tensors": len(members),
                "failed": sum(not r.passed for r in members),
                "worst": f"{worst.case}, {worst.tensor}",
            }
        )
    return table
