"""torch.library ops, their fakes and their autograd, generated from an OpSpec.

``torch.ops.lycoris.<op>`` takes the operands, the scale as a 0-d tensor (a changing float would
recompile), the attributes, the dtype overrides and the backend's name ("" for none); its body
prepares and launches exactly as an eager call does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
from .formula import Formula
from .precision import Policy, tf32_allowed
from .shapes import parse
from .spec import OpSpec

NAMESPACE = "lycoris"
_library = torch.library.Library(NAMESPACE, "DEF")

Prepare = Callable[..., Call]


class LibraryOp:
    """The forward and backward library ops of one OpSpec."""

    def __init__(self, spec: OpSpec, prepare: Prepare) -> None:
        self.spec = spec
        self.prepare = prepare
        self.count = len(spec.operands)
        operands = [
            f"Tensor{'(a!)' if o.name == spec.inplace else '?' if o.optional else ''} {o.name}"
            for o in spec.operands
        ]
        kept = [
            f"Tensor{'?' if o.optional else ''} {o.name}" for o in spec.operands if not o.additive
        ]
        factor = f"Tensor {spec.factor}"
        attributes = [f"{a.kind} {a.name}" for a in spec.attributes]
        outputs = ", ".join(["Tensor"] * (1 + len(spec.saved)))
        _library.define(
            f"{spec.name}({', '.join([*operands, factor, *attributes])}, "
            "ScalarType? out_dtype, ScalarType? autocast, str backend) -> "
            + ("()" if spec.inplace else f"({outputs})" if spec.saved else outputs)
        )
        name = f"{NAMESPACE}::{spec.name}"
        self.op = getattr(torch.ops.lycoris, spec.name)
        _library.impl(spec.name, self._forward, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self._fake, lib=_library)
        if spec.inplace:
            return
        back = ", ".join(["Tensor grad", *kept, "Tensor[] saved", factor, *attributes])
        _library.define(
            f"{spec.name}_backward({back}, ScalarType compute, ScalarType output, str backend, "
            "bool[] needs) -> Tensor[]"
        )
        backward = f"{spec.name}_backward"
        _library.impl(backward, self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{name}_backward", self._fake_backward, lib=_library)
        torch.library.register_autograd(
            name, self._autograd, setup_context=self._setup, lib=_library
        )
        self.backward_op = getattr(torch.ops.lycoris, backward)

    def __call__(
        self,
        operands: Operands,
        scale: Scale,
        attributes: Sequence[Any],
        out_dtype: torch.dtype | None,
        autocast: torch.dtype | None,
        backend: str,
    ) -> Tensor:
        scale = self._scale_tensor(operands, check_scale(self.spec, scale))
        if self.spec.inplace:
            check_target(self.spec, operands)
        result = self.op(*operands, scale, *attributes, out_dtype, autocast, backend)
        if self.spec.inplace:
            return self.spec.target(operands)
        return result[0] if self.spec.saved else result

    def _scale_tensor(self, operands: Operands, scale: Scale) -> Tensor:
        """The scale as a 0-d tensor beside the operands, without a guard on its value."""
        if isinstance(scale, Tensor):
            return scale
        first = first_tensor(operands)
        if first is None:
            check_operands(self.spec, operands)  # raises
        assert first is not None
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        return torch.ones((), dtype=dtype, device=first.device) * scale

    def _named(self, attributes: Sequence[Any]) -> dict[str, Any]:
        return dict(zip((a.name for a in self.spec.attributes), attributes, strict=True))

    # -------------------------------------------------------------------- forward

    def _split(self, args: tuple[Any, ...]) -> tuple[Operands, Tensor, list[Any], list[Any]]:
        n, m = self.count, len(self.spec.attributes)
        return args[:n], args[n], list(args[n + 1 : n + 1 + m]), list(args[n + 1 + m :])

    def _forward(self, *args: Any) -> Tensor | tuple[Tensor, ...] | None:
        operands, scale, attributes, (out_dtype, autocast, backend) = self._split(args)
        call = self.prepare(operands, attributes, backend or None, out_dtype, autocast)
        out, saved = call.forward(operands, call.ready_scale(scale))
        if self.spec.inplace:
            return None
        return (out, *saved) if self.spec.saved else out

    def _fake(self, *args: Any) -> Tensor | tuple[Tensor, ...] | None:
        operands, _, attributes, (out_dtype, autocast, _) = self._split(args)
        device = check_operands(self.spec, operands)
        policy = resolve_policy(self.spec, operands, device, out_dtype, autocast)
        binding = self.spec.bind(operands, self._named(attributes))
        if self.spec.inplace:
            return None
        out = torch.empty(binding.out_shape, dtype=policy.output, device=device)
        saved = [
            torch.empty(
                [binding.dims[symbol] for symbol, _ in parse(s.shape)],
                dtype=s.dtype,
                device=device,
            )
            for s in self.spec.saved
        ]
        return (out, *saved) if saved else out

    # ------------------------------------------------------------------- backward

    def _setup(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        operands, scale, attributes, (out_dtype, autocast, backend) = self._split(inputs)
        kept = [t for o, t in zip(self.spec.operands, operands, strict=True) if not o.additive]
        saved = list(output[1:]) if self.spec.saved else []
        ctx.save_for_backward(*kept, scale, *saved)
        device = check_operands(self.spec, operands)
        ctx.policy = resolve_policy(self.spec, operands, device, out_dtype, autocast)
        ctx.attributes, ctx.backend = attributes, backend
        ctx.additive = {
            i: t.dtype
            for i, (o, t) in enumerate(zip(self.spec.operands, operands, strict=True))
            if o.additive and t is not None
        }

    def _autograd(self, ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        spec = self.spec
        places = [i for i, o in enumerate(spec.operands) if not o.additive]
        tensors = ctx.saved_tensors  # once: checkpointing unpacks them anew at every access
        kept = tensors[: len(places)]
        scale, *saved = tensors[len(places) :]
        needs = [bool(ctx.needs_input_grad[i]) and spec.operands[i].differentiable for i in places]
        grads: list[Tensor | None] = [None] * self.count
        if any(needs) and torch.is_grad_enabled():  # create_graph under a dispatch mode
            full = self._full(kept)
            named = self._named(ctx.attributes)
            formula = Formula(spec, spec.bind(full, named), ctx.policy, named)
            wanted = dict(zip(places, needs, strict=True))
            flags = [wanted.get(i, False) for i in range(self.count)]
            grads = formula.gradients(grad, full, scale, flags, create_graph=True)
        elif any(needs):
            found = iter(
                self.backward_op(
                    grad,
                    *kept,
                    saved,
                    scale,
                    *ctx.attributes,
                    ctx.policy.compute,
                    ctx.policy.output,
                    ctx.backend,
                    needs,
                )
            )
            for i, need in zip(places, needs, strict=True):
                grads[i] = next(found) if need else None
        for i, dtype in ctx.additive.items():
            if ctx.needs_input_grad[i]:
                grads[i] = grad.to(dtype)
        # one more for the scale, the attributes and the three settings each
        return (*grads, *[None] * (1 + len(spec.attributes) + 3))

    def _full(self, kept: Sequence[Tensor | None]) -> list[Tensor | None]:
        values = iter(kept)
        return [None if o.additive else next(values) for o in self.spec.operands]

    def _backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        n, m = sum(not o.additive for o in self.spec.operands), len(self.spec.attributes)
        operands = self._full(args[:n])
        saved, scale = args[n], args[n + 1]
        attributes = args[n + 2 : n + 2 + m]
        compute, output, backend, needs = args[n + 2 + m :]
        tf32 = grad.is_cuda and compute is torch.float32 and tf32_allowed()
        policy = Policy(compute, output, tf32)
        call = self.prepare(operands, attributes, backend or None, policy=policy)
        flags = iter(needs)
        full = [not o.additive and next(flags) for o in self.spec.operands]
        grads = call.backward(grad, operands, saved, call.ready_scale(scale), full)
        return [g for g in grads if g is not None]

    def _fake_backward(self, grad: Tensor, *args: Any) -> list[Tensor]:
        n = sum(not o.additive for o in self.spec.operands)
        return [
            torch.empty(t.shape, dtype=t.dtype, device=t.device)
            for t, need in zip(args[:n], args[-1], strict=True)
            if need
        ]
