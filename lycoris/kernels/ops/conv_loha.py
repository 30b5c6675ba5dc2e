"""LoHa on a convolution, as a LoRA of rank r^2 whose factors are row-wise products of LoHa's.

(w1_a w1_b) o (w2_a w2_b) is U V, where U and V hold all products of two columns of w1_a and w2_a,
and of two rows of w1_b and w2_b (Khatri-Rao). So V convolves x, U mixes its r^2 channels, and the
weight never exists. In the Tucker form w1_b stands for t1 w1_b, formed in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import chain
from ..chain import Link
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Bound, Cost, Operand, OpSpec, Round, register
from .conv import (
    ATTRIBUTES,
    CONV_FP32,
    SIZES,
    conv_case,
    derive_output,
    extent,
    geometry_of,
    image_shapes,
    kernel_dims,
    out_shape,
)
from .loha_apply import pairs_plan

_NAME = "loha_conv_apply"


def _shapes(present: frozenset[str], *, stride: Sequence[int], **_: Any) -> Mapping[str, str]:
    n = len(stride)
    tucker = present & {"t1", "t2"}
    if len(tucker) == 1:
        (given,) = tucker
        missing = "t2" if given == "t1" else "t1"
        raise ValueError(f"{_NAME}: {given} is given and {missing} is None; expected both")
    kernel = kernel_dims(n)
    a, b, core = ("p O", "q I", f"p q {kernel}") if tucker else ("O r 1*", f"r I {kernel}", "")
    cores = {"t1": core, "t2": core} if tucker else {}
    return {
        "x": image_shapes(n),
        "w1_a": a,
        "w1_b": b,
        "w2_a": a,
        "w2_b": b,
        **cores,
        "base": image_shapes(n, "O", "o"),
        "out": image_shapes(n, "O", "o"),
    }


def _derive(sizes: Groups, **attributes: Any) -> Groups:
    holder = "t1" if "p" in sizes else "w1_b"
    return derive_output(_NAME, holder, sizes, (sizes["O"][0], sizes["I"][0]), attributes)


def _kernel(t: SimpleNamespace) -> Sequence[int]:
    return (t.w1_b if t.t1 is None else t.t1).shape[2:]


def _links(t: SimpleNamespace, kernel: Sequence[int], attributes: Mapping[str, Any]) -> list[Link]:
    groups = attributes["groups"]
    batch = t.x.shape[0] * groups
    geometry = geometry_of(t.x.shape[2:], attributes)
    return [
        chain.spatial("v", batch, geometry, kernel, lambda v: v),
        Link("u", batch, lambda u: u.reshape(groups, -1, u.shape[1])),
    ]


def _down_factor(core: Tensor | None, b: Tensor) -> Tensor:
    """The (r, I, kernel) factor: b itself, or the Tucker core contracted with it."""
    return b if core is None else torch.einsum("pq...,qi->pi...", core, b)


def _formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round, **attributes: Any) -> Tensor:
    a = (t.w1_a, t.w2_a) if t.t1 is None else (t.w1_a.T, t.w2_a.T)
    b = _down_factor(t.t1, t.w1_b), _down_factor(t.t2, t.w2_b)
    u = rnd((a[0][:, :, None] * a[1][:, None, :]).flatten(1), backward=False)
    v = rnd((b[0][:, None] * b[1][None]).flatten(0, 1), backward=False)
    kernel = _kernel(t)
    shape = out_shape(t, kernel, len(u), geometry_of(t.x.shape[2:], attributes))
    full = SimpleNamespace(x=t.x, base=t.base, u=u, v=v)
    return chain.formula(_links(full, kernel, attributes), full, scale, rnd, shape)


class _Factors:
    """LoHa's factors as the product kernels take them: (O, r) and (r, I * kernel)."""

    def __init__(self, run: Schedule, t: SimpleNamespace) -> None:
        self.run = run
        self.tucker = t.t1 is not None
        self.kernel = _kernel(t)
        self.a = [w.t().contiguous() if self.tucker else w for w in (t.w1_a, t.w2_a)]
        if self.tucker:
            self.cores = [self._wide(w) for w in (t.t1, t.t2)]
            self.ends = [self._wide(w) for w in (t.w1_b, t.w2_b)]
            pairs = zip(self.cores, self.ends, strict=True)
            self.b = [_down_factor(*pair).flatten(1) for pair in pairs]
        else:
            self.b = [w.flatten(1) for w in (t.w1_b, t.w2_b)]
        self.inputs = t.w1_b.shape[1]
        self.plan = pairs_plan(run.device)

    def _wide(self, leaf: Tensor) -> Tensor:
        return leaf.to(self.run.policy.compute).float()

    def products(self) -> tuple[Tensor, Tensor]:
        """U (O, r^2) and V (r^2, I, kernel), in the compute dtype."""
        (n_out, rank), width, compute = self.a[0].shape, self.b[0].shape[1], self.run.policy.compute
        u = self.run.empty((n_out, rank * rank), compute)
        self.run.launch("khatri_rao", "pairs", *self.a, u, True, False, tiles=self.plan)
        v = self.run.empty((rank * rank, width), compute)
        self.run.launch("khatri_rao", "pairs", *self.b, v, False, self.tucker, tiles=self.plan)
        return u, v.view(rank * rank, self.inputs, *self.kernel)

    def write_a(self, grad: Tensor, grads: SimpleNamespace) -> None:
        """The gradients of w1_a and w2_a from U's."""
        wanted = grads.w1_a, grads.w2_a
        made = [self._room(g, like) for g, like in zip(wanted, self.a, strict=True)]
        self.run.launch(
            "khatri_rao", "pairs_grad", grad, *self.a, *made, True, False, tiles=self.plan
        )
        for into, found in zip(wanted, made, strict=True):
            if self.tucker and into is not None:
                into.copy_(found.t())

    def write_b(self, grad: Tensor, grads: SimpleNamespace) -> None:
        """The gradients of w1_b and w2_b, and of the Tucker cores, from V's."""
        wanted = grads.w1_b, grads.w2_b
        made = [self._room(g, like) for g, like in zip(wanted, self.b, strict=True)]
        grad = grad.flatten(1)
        args = (grad, *self.b, *made, False, self.tucker)
        self.run.launch("khatri_rao", "pairs_grad", *args, tiles=self.plan)
        if self.tucker:
            for i, (end, core) in enumerate(zip(wanted, (grads.t1, grads.t2), strict=True)):
                found = made[i].view(-1, self.inputs, *self.kernel)
                if end is not None:
                    end.copy_(torch.einsum("pi...,pq...->qi", found, self.cores[i]))
                if core is not None:
                    core.copy_(torch.einsum("pi...,qi->pq...", found, self.ends[i]))

    def _room(self, grad: Tensor | None, like: Tensor) -> Tensor:
        """Where a factor's gradient is written: its own tensor, unless that lies otherwise."""
        if grad is None or self.tucker:
            return self.run.empty(tuple(like.shape), torch.float32)
        return grad.view(like.shape)


def _forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    **attributes: Any,
) -> None:
    u, v = _Factors(run, t).products()
    full = SimpleNamespace(x=t.x, base=t.base, u=u, v=v)
    chain.forward(run, _links(full, v.shape[2:], attributes), full, scale, out)


def _backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    **attributes: Any,
) -> None:
    factors = _Factors(run, t)
    u, v = factors.products()
    tops = grads.w1_a is not None or grads.w2_a is not None
    names = ("w1_b", "w2_b", "t1", "t2")
    bottoms = any(getattr(grads, name) is not None for name in names)
    # Not rounded: each is summed further, against a factor.
    inner = SimpleNamespace(
        x=grads.x,
        u=run.empty(tuple(u.shape), torch.float32) if tops else None,
        v=run.empty(tuple(v.shape), torch.float32) if bottoms else None,
    )
    full = SimpleNamespace(x=t.x, base=None, u=u, v=v)
    chain.backward(run, _links(full, v.shape[2:], attributes), grad, full, scale, inner)
    grads.x = inner.x
    if tops:
        factors.write_a(inner.u, grads)
    if bottoms:
        factors.write_b(inner.v, grads)


def _reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    taps, pixels = extent(d, "k"), d["N"] * extent(d, "o")
    rank, core = (d["r"], 0) if "r" in d else (d["p"], d["q"])
    square = rank * rank
    a, b = pixels + d["I"] * taps + rank + core, pixels + d["O"] + rank + core
    found = {"w1_a": a, "w2_a": a, "w1_b": b + rank * taps, "w2_b": b + rank * taps}
    if core:
        found |= {"t1": b + d["I"], "t2": b + d["I"]}
    return {"out": d["I"] * taps + square + core, "x": d["O"] + square * taps + core, **found}


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    taps, pixels = extent(d, "k"), d["N"] * extent(d, "o")
    image = d["N"] * d["C"] * extent(d, "")
    rank = d["r"] if "r" in d else d["p"]
    factors = rank * (d["O"] + d["I"] * taps)
    if "r" not in d:
        factors = rank * d["O"] + rank * d["q"] * taps + d["q"] * d["I"]
    streams = 3 * image + 3 * pixels * d["O"]
    work = 8 * pixels * rank * rank * (d["O"] + d["I"] * taps)
    return Cost(itemsize * (streams + 6 * factors), work)


_SIZES = {"N": 2, "C": 12, "H": 8, "W": 8, "O": 20, "r": 3, "I": 12, "kH": 3, "kW": 3}
_PRIMES = {"N": 3, "C": 7, "H": 5, "W": 7, "O": 17, "r": 2, "I": 7, "kH": 3, "kW": 2}
_POINT = _SIZES | {"kH": 1, "kW": 1}
_TUCKER = {"N": 2, "C": 10, "H": 8, "W": 8, "O": 20, "p": 3, "q": 2, "I": 10, "kH": 3, "kW": 3}
_CORES = ("t1", "t2")

_CASES = (
    conv_case("plain", _SIZES, mixes="all"),
    conv_case(
        "primes",
        _PRIMES,
        present=("base",),
        attributes={"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)},
    ),
    conv_case("1x1", _POINT, attributes={}, present=("base",)),
    conv_case("groups", _SIZES | {"C": 24}, attributes={"groups": 2, "dilation": (2, 2)}),
    conv_case("tucker", _TUCKER, present=("base", *_CORES), attributes={"stride": (2, 2)}),
    conv_case(
        "rank 1, 1-d",
        {"N": 2, "C": 48, "W": 67, "O": 61, "r": 1, "I": 48, "kW": 5},
        attributes={"stride": (1,), "padding": (2,), "dilation": (2,)},
    ),
    conv_case("integers", _SIZES, "integers", 2.0, ("base",), exact=True),
    conv_case("one nonzero", _SIZES, "one_hot"),
    conv_case("cancellation", _SIZES, "cancellation", present=("base",)),
    conv_case("subnormal", _SIZES, "subnormal"),
    conv_case("near overflow", _SIZES, "near_overflow", 0.0055),
    conv_case("zero w1_a", _SIZES, "zero_factor", present=("base",)),
    conv_case(
        "gpu 64x64",
        {"N": 2, "C": 320, "H": 64, "W": 64, "O": 320, "r": 4, "I": 320, "kH": 3, "kW": 3},
        present=("base",),
        device="cuda",
    ),
    conv_case(
        "gpu rank 16",
        {"N": 2, "C": 640, "H": 32, "W": 32, "O": 640, "r": 16, "I": 640, "kH": 3, "kW": 3},
        device="cuda",
    ),
    conv_case(
        "gpu ragged",
        {"N": 3, "C": 259, "H": 31, "W": 37, "O": 131, "r": 5, "I": 259, "kH": 3, "kW": 3},
        attributes={"stride": (2, 2), "padding": (1, 1)},
        device="cuda",
    ),
)

LOHA_CONV_APPLY = register(
    OpSpec(
        name=_NAME,
        family=chain.FAMILY,
        operands=(
            Operand("x", side="model"),
            Operand("w1_a"),
            Operand("w1_b"),
            Operand("w2_a"),
            Operand("w2_b"),
            Operand("t1", optional=True),
            Operand("t2", optional=True),
            Operand("base", role="wide", optional=True, additive=True, side="model"),
        ),
        shapes=_shapes,
        derive=_derive,
        attributes=ATTRIBUTES,
        formula=_formula,
        forward=_forward,
        backward=_backward,
        reductions=_reductions,
        cost=_cost,
        bound=Bound(half=24.0, fp32=CONV_FP32),
        cases=_CASES,
        positive=("r", "p", "q", "I"),
        doc="[base +] s * ((w1_a w1_b) o (w2_a w2_b)) * x, * the convolution; Tucker with t1, t2",
        conditions=SIZES,
    )
)
