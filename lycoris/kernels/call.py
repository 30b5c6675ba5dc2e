"""One prepared call: checked, bound to sizes, its dtypes resolved, its backend chosen.

Preparing is the slow part and depends on shapes, dtypes and settings alone, so a Call is made
once per such key and used for every later call like it, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import config, registry
from .checks import as_float, check_number, check_tensor
from .errors import BackendError, KernelBuildError
from .formula import Formula, recording
from .precision import Policy, resolve
from .schedule import Schedule, Script
from .shapes import Binding, outermost_first, parse
from .spec import OpSpec

Operands = Sequence[Tensor | None]
Scale = float | Tensor


def first_tensor(operands: Operands) -> Tensor | None:
    """The first operand that is there: an optional one that leads may be absent."""
    for t in operands:
        if isinstance(t, Tensor):
            return t
    return None


def check_operands(spec: OpSpec, operands: Operands) -> torch.device:
    """Checks that the operands are dense tensors on one device, and that none is missing.

    Raises:
        TypeError: an operand is not a dense tensor.
        ValueError: the operands lie on different devices.
    """
    device: torch.device | None = None
    first = ""
    for operand, t in zip(spec.operands, operands, strict=True):
        if t is None and operand.optional:
            continue
        t = check_tensor(spec.name, operand.name, t)
        if device is None:
            device, first = t.device, operand.name
        elif t.device != device:
            raise ValueError(
                f"{spec.name}: {operand.name} is on {t.device}; expected {device}, where {first} is"
            )
    assert device is not None
    return device


def resolve_policy(
    spec: OpSpec,
    operands: Operands,
    device: torch.device,
    out_dtype: torch.dtype | None,
    autocast: torch.dtype | None,
) -> Policy:
    """The dtype policy of a call; see :func:`lycoris.kernels.precision.resolve`."""
    named = [
        (o.name, t.dtype, o.role)
        for o, t in zip(spec.operands, operands, strict=True)
        if t is not None
    ]
    policy = resolve(spec.name, named, out_dtype=out_dtype, autocast=autocast, device=device.type)
    return replace(policy, output=spec.target(operands).dtype) if spec.inplace else policy


def check_scale(spec: OpSpec, scale: Any) -> Scale:
    """Checks a scale; reads no tensor's value, so that it can be traced and never waits.

    Raises:
        TypeError: it is neither a number nor a floating-point tensor, or it requires a gradient.
        ValueError: it is a tensor that is not 0-d, or a NaN.
    """
    where = f"{spec.name}: {spec.factor}"
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise ValueError(f"{where} has shape {tuple(scale.shape)}; expected a 0-d tensor")
        if not scale.is_floating_point():
            raise TypeError(f"{where} is {scale.dtype}; expected a floating-point tensor")
        if scale.requires_grad:
            raise TypeError(
                f"{where} requires a gradient, which this op does not give; "
                "multiply an operand by it instead"
            )
        return scale
    return check_number(spec.name, spec.factor, scale, "a number or a 0-d tensor")


def check_target(spec: OpSpec, operands: Operands) -> None:
    """Checks that a call in place may change its operand without telling autograd.

    Raises:
        RuntimeError: the operand requires a gradient, and grad mode is on; or it is an inference
            tensor, outside of inference mode.
        ValueError: two of its elements may share memory.
    """
    t, where = spec.target(operands), f"{spec.name}: {spec.inplace}"
    if t.requires_grad and torch.is_grad_enabled():
        kind = "is a leaf that requires" if t.is_leaf else "requires"
        raise RuntimeError(f"{where} {kind} a gradient; change it in place under torch.no_grad()")
    traced = torch.compiler.is_compiling()  # which neither question below can be
    if not traced and t.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{where} is an inference tensor; change it in place under torch.inference_mode()"
        )
    reach = 0
    for i in reversed(outermost_first(t)):
        stride, size = t.stride(i), t.shape[i]
        if size > 1:
            if stride <= reach:
                raise ValueError(
                    f"{where} has shape {tuple(t.shape)} with strides {t.stride()}, so that "
                    "elements share memory; expected one that is not expanded"
                )
            reach += (size - 1) * stride


def _ready(t: Tensor) -> Tensor:
    # Kernels read dense rows with 16-byte accesses, and know no lazy negation or lazy zeros.
    if t.is_neg():
        t = t.resolve_neg()
    if t._is_zerotensor():
        t = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    if not t.is_contiguous():
        t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


class Call:
    """A prepared call of one op; see the module's docstring."""

    def __init__(
        self,
        spec: OpSpec,
        operands: Operands,
        policy: Policy,
        device: torch.device,
        attributes: Mapping[str, Any],
        override: str | None,
    ) -> None:
        self.spec = spec
        self.device = device
        self.policy = policy
        self.attributes = attributes
        self.override = override
        self.binding: Binding = spec.bind(operands, attributes)
        self.formula = Formula(spec, self.binding, policy, attributes)
        self.roles = {o.name: o.role for o in spec.operands}
        self.layout = [(o.name, self.binding.flat.get(o.name, ())) for o in spec.operands]
        dtypes = tuple(None if t is None else t.dtype for t in operands)
        self._form = (dtypes, tuple(attributes.items()))
        given = {o.name for o, t in zip(spec.operands, operands, strict=True) if t is not None}
        self.folds = spec.fold is not None and spec.fold_with in given
        self._choose()

    def _choose(self) -> None:
        spec, dims = self.spec, self.binding.dims
        self.choice = registry.select(
            spec.name, spec.family, dims, self.policy, self.device, self.override, self._form
        )
        # A call without elements has no work for a kernel.
        self.runs_formula = not self.choice.has_kernels or 0 in dims.values()
        folded = replace(self.policy, compute=torch.float32)
        self.kernel_policy = folded if self.folds else self.policy
        self._scripts: dict[tuple[bool, ...], Script] = {}

    def ready_scale(self, scale: Scale) -> Scale:
        """A checked scale as kernels take it: a float, or a 0-d fp32 tensor on the device.

        Raises:
            ValueError: a tensor on another device.
        """
        if not isinstance(scale, Tensor):
            return as_float(self.spec.name, self.spec.factor, scale)
        where = f"{self.spec.name}: {self.spec.factor}"
        if scale.device != self.device:
            if scale.device.type != "cpu":
                raise ValueError(f"{where} is on {scale.device}; expected {self.device} or cpu")
            return scale.item()  # a host tensor: no device is waited for
        double = self.policy.compute is torch.float64
        return scale.resolve_neg().to(torch.float64 if double else torch.float32)

    # ------------------------------------------------------------------ kernels

    def forward(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        """The output and what the backward pass needs beside the operands; records nothing."""
        while not self.runs_formula:
            try:
                return self._launch_forward(operands, scale)
            except KernelBuildError as error:
                self._step_on(error)
        if self.spec.inplace:
            return self.formula_in_place(operands, scale), []
        if self.spec.saved:
            return self._formula_saved(operands, scale)
        return self.formula.output(operands, scale), []

    def backward(
        self,
        grad: Tensor,
        operands: Operands,
        saved: Sequence[Tensor],
        scale: Scale,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """The gradients that are needed, each in its operand's shape and dtype; None elsewhere.

        ``needs`` is false for additive operands, whose gradient is ``grad``.
        """
        if not any(needs):
            return [None] * len(operands)
        while not self.runs_formula:
            try:
                return self._launch_backward(grad, operands, saved, scale, needs)
            except KernelBuildError as error:
                self._step_on(error)
        return self.formula.gradients(grad, operands, scale, needs, create_graph=False)

    def _step_on(self, error: KernelBuildError) -> None:
        name = self.choice.backend
        call = (self.spec.name, self.binding.dims, self.policy, self.device, self._form)
        registry.mark_failed(name, *call, str(error))
        if self.override not in (None, registry.AUTO) or config.strict():
            raise BackendError(f"{name}: can't run {self.spec.name}: {error}") from error
        self._choose()  # raises where the environment names this very backend

    def formula_in_place(self, operands: Operands, scale: Scale) -> Tensor:
        """The formula's output, stored in the operand that the op changes."""
        target = self.spec.target(operands)
        target.copy_(self.formula.output(operands, scale))
        return target

    def _formula_saved(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        # Backward differentiates the formula afresh and reads none of these.
        return self.formula.output(operands, scale), [
            torch.empty(self._saved_shape(s.shape), dtype=s.dtype, device=self.device)
            for s in self.spec.saved
        ]

    def _saved_shape(self, shape: str) -> tuple[int, ...]:
        return tuple(self.binding.dims[symbol] for symbol, _ in parse(shape))

    def _arrange(self, operands: Operands) -> SimpleNamespace:
        """The operands by name as kernels take them: flattened, dense and aligned."""
        t = SimpleNamespace()
        for (name, shape), value in zip(self.layout, operands, strict=True):
            if value is not None:
                if value.shape != shape:
                    value = value.reshape(shape)
                value = _ready(value)
            setattr(t, name, value)
        return t

    def _begin(self, kind: tuple[bool, ...]) -> Schedule:
        # Runs of one kind make the same launches: forward by the scale, backward by the needs too.
        return Schedule(
            self.choice.module, self.kernel_policy, self.device, self._scripts.get(kind)
        )

    def _launch_forward(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        kind = (type(scale) is float,)
        if self.spec.inplace:
            return self._launch_in_place(kind, operands, scale), []
        run, t = self._begin(kind), self._arrange(operands)
        if self.folds:
            sources = self._fold_sources(t, frozenset())
            t = SimpleNamespace(**self._cast(t) | self._fold(sources))
        # Made in the caller's shape: a view made here could not be modified in place.
        out = run.empty(self.binding.out_shape, self.policy.output)
        flat = out.view(self.binding.flat["out"])
        saved = [run.empty(self._saved_shape(s.shape), s.dtype) for s in self.spec.saved]
        keep = SimpleNamespace(**{s.name: t for s, t in zip(self.spec.saved, saved, strict=True)})
        with run.on_device():
            self.spec.forward(run, t, scale, flat, keep, **self.attributes)
        self._scripts[kind] = run.script
        return out, saved

    def _launch_in_place(self, kind: tuple[bool, ...], operands: Operands, scale: Scale) -> Tensor:
        target = self.spec.target(operands)
        memory = target.untyped_storage().data_ptr()
        # What a kernel reads must not change under it.
        apart = [
            t if t is None or t is target or t.untyped_storage().data_ptr() != memory else t.clone()
            for t in operands
        ]
        run, t = self._begin(kind), self._arrange(apart)
        flat = getattr(t, self.spec.inplace)
        with run.on_device():
            self.spec.forward(run, t, scale, flat, SimpleNamespace(), **self.attributes)
        self._scripts[kind] = run.script
        if flat.data_ptr() != target.data_ptr():  # no dense rows: the kernel worked on a copy
            target.copy_(flat.view(target.shape))
        elif not target.is_inference():
            torch.autograd.graph.increment_version(target)
        return target

    def _launch_backward(
        self,
        grad: Tensor,
        operands: Operands,
        saved: Sequence[Tensor],
        scale: Scale,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        kind = (type(scale) is float, *needs)
        run, t = self._begin(kind), self._arrange(operands)
        grads = SimpleNamespace()
        for (name, shape), value, need in zip(self.layout, operands, needs, strict=True):
            made = run.empty(shape, value.dtype) if need and value is not None else None
            setattr(grads, name, made)
        flat = self.binding.flat["out"]
        grad = grad if grad.shape == flat else grad.reshape(flat)
        sources: dict[str, Tensor | None] = {}
        folded: dict[str, Tensor | None] = {}
        if self.folds:
            needed = {n for (n, _), need in zip(self.layout, needs, strict=True) if need}
            with recording():
                sources = self._fold_sources(t, needed)
                folded = self._fold(sources)
            t = SimpleNamespace(**self._cast(t) | folded)
            for name, value in folded.items():
                wanted = value is not None and value.requires_grad
                shape = tuple(value.shape) if value is not None else ()
                setattr(grads, name, run.empty(shape, torch.float32) if wanted else None)
            grad = grad.to(self.policy.compute)
        keep = SimpleNamespace(**{s.name: t for s, t in zip(self.spec.saved, saved, strict=True)})
        with run.on_device():
            self.spec.backward(run, _ready(grad), t, keep, scale, grads, **self.attributes)
        self._scripts[kind] = run.script
        if self.folds:
            self._unfold(sources, folded, grads.__dict__)
        return [
            None if value is None or not need else self._as_gradient(getattr(grads, name), value)
            for (name, _), value, need in zip(self.layout, operands, needs, strict=True)
        ]

    @staticmethod
    def _as_gradient(made: Tensor, operand: Tensor) -> Tensor:
        if made.dtype != operand.dtype:
            made = made.to(operand.dtype)
        return made if made.shape == operand.shape else made.view(operand.shape)

    # ------------------------------------------------------------------ folding

    def _cast(self, t: SimpleNamespace) -> dict[str, Tensor | None]:
        # Folded calls run fp32 kernels: what the policy casts is cast here.
        return {
            n: v.to(self.policy.compute) if v is not None and self.roles[n] == "mma" else v
            for n, v in t.__dict__.items()
        }

    def _fold_sources(self, t: SimpleNamespace, needed: Set[str]) -> dict[str, Tensor | None]:
        return {
            n: v if v is None else v.detach().float().requires_grad_(n in needed)
            for n, v in self._cast(t).items()
        }

    def _fold(self, sources: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        assert self.spec.fold is not None
        with torch.autocast(self.device.type, enabled=False):
            return dict(self.spec.fold(SimpleNamespace(**sources)))

    @staticmethod
    def _unfold(
        sources: Mapping[str, Tensor | None],
        folded: Mapping[str, Tensor | None],
        grads: dict[str, Tensor | None],
    ) -> None:
        """Carries the folded operands' gradients back to what they were folded from, in fp32."""
        made = [n for n in folded if grads[n] is not None]
        wanted = {n: s for n in folded if (s := sources[n]) is not None and s.requires_grad}
        found = (
            torch.autograd.grad(
                [v for n in made if (v := folded[n]) is not None],
                list(wanted.values()),
                [g for n in made if (g := grads[n]) is not None],
            )
            if made
            else ()
        )
        grads.update(dict.fromkeys(folded), **dict(zip(wanted, found, strict=True)))
