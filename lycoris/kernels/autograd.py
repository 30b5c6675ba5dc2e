"""One op, callable: built from an OpSpec, with one autograd.Function for eager calls.

Eager calls launch directly, without a torch.library boundary. Traced calls, and calls under a
dispatch mode, go to the library op of :mod:`lycoris.kernels.library`. Under torch.func transforms
the formula runs in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import config, registry
from .call import (
    Call,
    Operands,
    Scale,
    check_operands,
    check_scale,
    check_target,
    first_tensor,
    resolve_policy,
)
from .library import LibraryOp
from .precision import Policy, autocast_dtype, tf32_allowed
from .spec import OpSpec

_CACHE_LIMIT = 4096


class _Fused(torch.autograd.Function):
    """The autograd.Function of every op; each Op names a subclass of its own after itself."""

    @staticmethod
    def forward(ctx: Any, call: Call, scale: Scale, *operands: Tensor | None) -> Tensor:
        out, saved = call.forward(operands, scale)
        kept = [
            None if o.additive else t for o, t in zip(call.spec.operands, operands, strict=True)
        ]
        by_tensor = isinstance(scale, Tensor)
        # A scale tensor is saved as the operands are: changed in place before the backward pass,
        # it is an error.
        ctx.save_for_backward(*kept, scale if by_tensor else None, *saved)
        ctx.call, ctx.scale = call, None if by_tensor else scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        spec = call.spec
        count = len(spec.operands)
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them anew at every access
        kept, saved = tensors[:count], tensors[count + 1 :]
        scale = tensors[count] if ctx.scale is None else ctx.scale
        needs = [
            need and not o.additive
            for o, need in zip(spec.operands, ctx.needs_input_grad[2:], strict=True)
        ]
        record = torch.is_grad_enabled()
        # With is_grads_batched, grad stands for several: it has no memory of its own.
        if any(needs) and (record or _is_special(grad) or _is_batched(grad)):
            grads = call.formula.gradients(grad, kept, scale, needs, create_graph=record)
        else:
            grads = call.backward(grad, kept, saved, scale, needs)
        for i, operand in enumerate(spec.operands):
            if operand.additive and ctx.needs_input_grad[2 + i]:
                grads[i] = grad  # autograd casts it to the operand's dtype
        return (None, None, *grads)


def _is_batched(t: Tensor) -> bool:
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(t) or functorch.is_legacy_batchedtensor(t)


def _is_special(t: Tensor | None) -> bool:
    """Whether a tensor may have no memory of its own: a subclass that dispatches for itself."""
    if t is None or type(t) is Tensor:
        return False
    return type(t).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


#: Every Op by its name, for copies and pickles: an Op is made once a process.
_OPS: dict[str, Op] = {}


def _by_name(name: str) -> Op:
    return _OPS[name]


class Op:
    """The callable of one OpSpec.

    A copy of it is itself, and it is pickled by its name.
    """

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.library = LibraryOp(spec, self.prepare)
        self.function: Any = type(spec.name, (_Fused,), {"__doc__": spec.doc})
        self._calls: dict[tuple[Any, ...], Call] = {}
        frozen = [not o.differentiable for o in spec.operands]
        #: Whether each operand gets no gradient, be one asked for; empty where all get one.
        self._frozen = frozen if any(frozen) and not spec.inplace else []
        _OPS[spec.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _by_name, (self.spec.name,)

    def __call__(
        self,
        operands: Operands,
        scale: Scale = 1.0,
        *,
        attributes: Sequence[Any] = (),
        backend: str | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Runs the op.

        Args:
            operands: in the OpSpec's order, None for an absent optional one.
            scale: a number or a 0-d tensor.
            attributes: static arguments in the OpSpec's order.
            backend: overrides the selection.
            out_dtype: overrides the stored dtype.

        Raises:
            TypeError: an operand is no tensor or has a dtype outside the policy, or the backend
                is no name.
            ValueError: a shape, device or scale does not fit, or the backend is unknown.
            BackendError: the named backend can't serve the call.
        """
        if backend is not None:
            registry.check_name(self.spec.name, backend)
        override = backend or registry.context_override()
        if self._frozen:
            operands = [
                t.detach() if frozen and isinstance(t, Tensor) and t.requires_grad else t
                for t, frozen in zip(operands, self._frozen, strict=True)
            ]
        first = first_tensor(operands)
        kind = "cpu" if first is None else first.device.type
        autocast = autocast_dtype(kind)
        if torch.compiler.is_compiling() or (
            torch._C._len_torch_dispatch_stack() and not torch._C._are_functorch_transforms_active()
        ):
            return self.library(operands, scale, attributes, out_dtype, autocast, override or "")
        call = self.prepare(operands, attributes, override, out_dtype, autocast)
        if type(scale) is not float or scale != scale:
            scale = call.ready_scale(check_scale(self.spec, scale))
        plain = (
            call.runs_formula
            or torch._C._are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or torch.jit.is_tracing()
            or any(map(_is_special, operands))
        )
        if self.spec.inplace:
            check_target(self.spec, operands)
            with torch.no_grad():
                if plain:
                    return call.formula_in_place(operands, scale)
                return call.forward(operands, scale)[0]
        if plain:
            return call.formula.output(operands, scale)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
            return self.function.apply(call, scale, *operands)
        return call.forward(operands, scale)[0]

    def prepare(
        self,
        operands: Operands,
        attributes: Sequence[Any],
        override: str | None,
        out_dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
        policy: Policy | None = None,
    ) -> Call:
        """The Call for these operands and settings, made once per key.

        ``policy`` is given where it is resolved already: a backward pass lacks the additive
        operands, whose dtypes count.
        """
        attributes = [tuple(a) if isinstance(a, list) else a for a in attributes]
        try:
            key = (
                override,
                config.snapshot(self.spec.name),
                registry.generation,
                out_dtype,
                autocast,
                policy,
                tf32_allowed(),
                tuple(attributes),
                *[None if t is None else (t.shape, t.dtype, t.device, t.layout) for t in operands],
            )
            found = self._calls.get(key)
        except (AttributeError, RuntimeError):  # no dense tensor: the checks below say so
            key, found = (), None
        if found is not None:
            return found
        device = check_operands(self.spec, operands)
        policy = policy or resolve_policy(self.spec, operands, device, out_dtype, autocast)
        named = dict(zip((a.name for a in self.spec.attributes), attributes, strict=True))
        call = Call(self.spec, operands, policy, device, named, override)
        if len(self._calls) >= _CACHE_LIMIT:
            self._calls.clear()
        self._calls[key] = call
        return call
