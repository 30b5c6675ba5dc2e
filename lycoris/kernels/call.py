"""One prepared call: checked, bound to sizes, its dtypes resolved, its backend chosen.

Preparing is the slow part and depends on shapes, dtypes and settings alone, so a Call is made
once per such key and used for every later call like it, forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import config, registry
from .errors import BackendError, KernelBuildError
from .formula import flatten, run_formula
from .precision import Policy, resolve
from .schedule import Schedule
from .shapes import Binding, parse
from .spec import OpSpec

Operands = Sequence[Tensor | None]
Scale = float | Tensor


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
        if not isinstance(t, Tensor):
            kind = "None" if t is None else type(t).__name__
            raise TypeError(f"{spec.name}: {operand.name} is {kind}; expected a tensor")
        if t.layout is not torch.strided:
            raise TypeError(f"{spec.name}: {operand.name} is {t.layout}; expected a dense tensor")
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
    return resolve(spec.name, named, out_dtype=out_dtype, autocast=autocast, device=device.type)


def check_scale(op: str, scale: Any) -> Scale:
    """Checks a scale; reads no tensor's value, so that it can be traced and never waits.

    Raises:
        TypeError: it is neither a number nor a floating-point tensor, or it requires a gradient.
        ValueError: it is a tensor that is not 0-d, or a NaN.
    """
    if isinstance(scale, Tensor):
        if scale.dim() != 0:
            raise ValueError(f"{op}: scale has shape {tuple(scale.shape)}; expected a 0-d tensor")
        if not scale.is_floating_point():
            raise TypeError(f"{op}: scale is {scale.dtype}; expected a floating-point tensor")
        if scale.requires_grad:
            raise TypeError(
                f"{op}: scale requires a gradient, which this op does not give; "
                "multiply an operand by it instead"
            )
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        if isinstance(scale, bool) or not isinstance(scale, Real):
            raise TypeError(
                f"{op}: scale is {type(scale).__name__}; expected a number or a 0-d tensor"
            )
        scale = float(scale)
    if scale != scale:  # math.isnan would break a traced graph
        raise ValueError(f"{op}: scale is NaN; expected a number")
    return scale


def _ready(t: Tensor) -> Tensor:
    # Kernels read dense rows with 16-byte accesses, and may refuse what requires a gradient.
    if t.requires_grad:
        t = t.detach()
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
        self.binding: Binding = spec.bind(operands)
        self.roles = {o.name: o.role for o in spec.operands}
        self._choose()

    def _choose(self) -> None:
        spec, dims = self.spec, self.binding.dims
        self.choice = registry.select(
            spec.name, spec.family, dims, self.policy, self.device, self.override
        )
        # A call without elements has no work for a kernel.
        self.runs_formula = not self.choice.has_kernels or 0 in dims.values()
        folds = spec.fold is not None and self.policy.name == "mma16"
        wide = replace(self.policy, compute=torch.float32) if folds else self.policy
        self.run = Schedule(self.choice.module, self.policy, self.device)
        self.run_folded = Schedule(self.choice.module, wide, self.device)

    def ready_scale(self, scale: Scale) -> Scale:
        """A checked scale as kernels take it: a float, or a 0-d fp32 tensor on the device.

        Raises:
            ValueError: a tensor on another device.
        """
        if not isinstance(scale, Tensor):
            return float(scale)
        if scale.device != self.device:
            if scale.device.type != "cpu":
                raise ValueError(
                    f"{self.spec.name}: scale is on {scale.device}; expected {self.device} or cpu"
                )
            return scale.item()  # a host tensor: no device is waited for
        double = self.policy.compute is torch.float64
        return scale.to(torch.float64 if double else torch.float32)

    # ------------------------------------------------------------------ formula

    def formula(self, operands: Operands, scale: Scale) -> Tensor:
        """The op in plain PyTorch, differentiable to any order."""
        flat = flatten(self.spec, self.binding, operands)
        out = run_formula(self.spec, flat, scale, self.policy, self.attributes)
        return out.reshape(self.binding.out_shape)

    def formula_grads(
        self,
        grad: Tensor,
        operands: Operands,
        scale: Scale,
        needs: Sequence[bool],
        *,
        create_graph: bool,
    ) -> list[Tensor | None]:
        """The gradients by differentiating the formula."""
        with torch.enable_grad():
            # Views: an operand that appears twice, or depends on another, stays two variables.
            views: list[Tensor | None] = [
                None
                if t is None
                else t.view_as(t)
                if create_graph
                else t.detach().requires_grad_(need)
                for t, need in zip(operands, needs, strict=True)
            ]
            out = self.formula(views, scale)
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

    # ------------------------------------------------------------------ kernels

    def forward(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        """The output and what the backward pass needs beside the operands; records nothing."""
        while not self.runs_formula:
            try:
                return self._launch_forward(operands, scale)
            except KernelBuildError as error:
                self._step_on(error)
        if self.spec.saved:
            return self._formula_saved(operands, scale)
        return self.formula(operands, scale), []

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
        return self.formula_grads(grad, operands, scale, needs, create_graph=False)

    def _step_on(self, error: KernelBuildError) -> None:
        name = self.choice.backend
        registry.mark_failed(
            name, self.spec.name, self.binding.dims, self.policy, self.device, str(error)
        )
        if self.override not in (None, registry.AUTO) or config.strict():
            raise BackendError(f"{name}: can't run {self.spec.name}: {error}") from error
        self._choose()  # raises where the environment names this very backend

    def _formula_saved(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        # Backward differentiates the formula afresh and reads none of these.
        return self.formula(operands, scale), [
            torch.empty(self._saved_shape(s.shape), device=self.device) for s in self.spec.saved
        ]

    def _saved_shape(self, shape: str) -> tuple[int, ...]:
        return tuple(self.binding.dims[symbol] for symbol, _ in parse(shape))

    def _kernel_operands(
        self, flat: dict[str, Tensor | None], folded: Mapping[str, Tensor | None]
    ) -> SimpleNamespace:
        if folded:  # fp32 kernels: what the policy casts is cast here
            flat = {n: t if t is None else self._cast(n, t) for n, t in flat.items()}
            flat.update(folded)
        return SimpleNamespace(**{n: t if t is None else _ready(t) for n, t in flat.items()})

    def _cast(self, name: str, t: Tensor) -> Tensor:
        t = t.detach()
        return t.to(self.policy.compute) if self.roles[name] == "mma" else t

    def _fold_sources(self, flat: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        return {n: t if t is None else self._cast(n, t).float() for n, t in flat.items()}

    def _fold(self, sources: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        assert self.spec.fold is not None
        with torch.autocast(self.device.type, enabled=False):
            return dict(self.spec.fold(SimpleNamespace(**sources)))

    def _launch_forward(self, operands: Operands, scale: Scale) -> tuple[Tensor, list[Tensor]]:
        flat = flatten(self.spec, self.binding, operands)
        folded = self._fold(self._fold_sources(flat)) if self.spec.fold else {}
        run = self.run_folded if folded else self.run
        out = run.empty(self.binding.flat["out"], self.policy.output)
        saved = [run.empty(self._saved_shape(s.shape), torch.float32) for s in self.spec.saved]
        keep = SimpleNamespace(**{s.name: t for s, t in zip(self.spec.saved, saved, strict=True)})
        with run.on_device():
            self.spec.forward(
                run, self._kernel_operands(flat, folded), scale, out, keep, **self.attributes
            )
        return out.view(self.binding.out_shape), saved

    def _launch_backward(
        self,
        grad: Tensor,
        operands: Operands,
        saved: Sequence[Tensor],
        scale: Scale,
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        names = [o.name for o in self.spec.operands]
        needed = {n for n, need in zip(names, needs, strict=True) if need}
        flat = flatten(self.spec, self.binding, operands)
        sources: dict[str, Tensor | None] = {}
        folded: dict[str, Tensor | None] = {}
        if self.spec.fold:
            with torch.enable_grad():
                sources = self._fold_sources(flat)
                for name in needed:
                    source = sources[name]
                    if source is not None:
                        source.requires_grad_()
                folded = self._fold(sources)
        run = self.run_folded if folded else self.run
        buffers: dict[str, Tensor | None] = dict.fromkeys(names)
        for operand, t in zip(self.spec.operands, operands, strict=True):
            name = operand.name
            if name in folded:
                value = folded[name]
                if value is not None and value.requires_grad:
                    buffers[name] = run.empty(tuple(value.shape), torch.float32)
            elif name in needed and t is not None:
                buffers[name] = run.empty(self.binding.flat[name], t.dtype)
        grad = grad.reshape(self.binding.flat["out"])
        if folded:
            grad = grad.to(self.policy.compute)
        keep = SimpleNamespace(**{s.name: t for s, t in zip(self.spec.saved, saved, strict=True)})
        with run.on_device():
            self.spec.backward(
                run,
                _ready(grad),
                self._kernel_operands(flat, folded),
                keep,
                scale,
                SimpleNamespace(**buffers),
                **self.attributes,
            )
        if folded:
            self._unfold(sources, folded, buffers, needed)
        return [
            None if b is None or t is None or n not in needed else b.to(t.dtype).view(t.shape)
            for n, b, t in ((n, buffers[n], t) for n, t in zip(names, operands, strict=True))
        ]

    @staticmethod
    def _unfold(
        sources: Mapping[str, Tensor | None],
        folded: Mapping[str, Tensor | None],
        buffers: dict[str, Tensor | None],
        needed: set[str],
    ) -> None:
        """Carries the folded operands' gradients back to what they were folded from, in fp32."""
        made = [(n, v) for n, v in folded.items() if v is not None and v.requires_grad]
        wanted = [n for n in folded if n in needed]
        found = (
            torch.autograd.grad(
                [v for _, v in made],
                [s for n in wanted if (s := sources[n]) is not None],
                [b for n, _ in made if (b := buffers[n]) is not None],
            )
            if made
            else ()
        )
        for n in folded:
            buffers[n] = None
        buffers.update(zip(wanted, found, strict=True))
