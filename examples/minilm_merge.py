"""Merged and unmerged layers of :mod:`minilm`, held to fp64: the last part of minilm_lora.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from minilm import Batch, Encoder, LoRALinear, adapters
from torch import Tensor, nn
from torch.nn import functional as F

from lycoris.kernels.ulp import Score, spacing, spacings


def units(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """One ULP for every element of an fp64 tensor: the spacing at the rms, or its own if larger.

    :func:`lycoris.kernels.ulp.score` takes the spacing at the rms for all. A transformer's
    activations have a few elements a hundred times as large as that, which no result in ``dtype``
    can hold to an ULP of the others.
    """
    return spacings(dtype, exact).clamp(min=spacing(dtype, exact.square().mean().sqrt().item()))


def in_ulp(error: Tensor, unit: Tensor) -> Score:
    """The largest and the rms error, element by element in ``unit``."""
    error = error.double().abs() / unit
    return Score(error.max().item(), error.square().mean().sqrt().item())


@dataclass(frozen=True)
class Agreement:
    """One layer's outputs, in ULP of the working dtype (see :func:`units`).

    ``unmerged`` and ``merged`` are errors against fp64, ``apart`` is their distance from each
    other, each with its limit. ``adapter`` is how far the layer without its adapter would be off,
    and ``peak`` the ULP of the largest element over that of the rms.
    """

    layer: str
    unmerged: Score
    merged: Score
    apart: Score
    limits: tuple[Score, Score, Score]
    adapter: Score
    peak: float

    @property
    def failures(self) -> list[str]:
        """What is beyond its limit, in words."""
        found = {"unmerged": self.unmerged, "merged": self.merged, "apart": self.apart}
        return [
            f"layer {self.layer}, {name}: {score.ulp:.3g} / {score.rms:.3g} ULP, "
            f"allowed {limit.ulp:.3g} / {limit.rms:.3g}"
            for (name, score), limit in zip(found.items(), self.limits, strict=True)
            if not (score.ulp <= limit.ulp and score.rms <= limit.rms)
        ]


@torch.no_grad()
def agreement(
    name: str, layer: LoRALinear, plain: nn.Linear, x: Tensor, unmerged: Tensor, fused: bool
) -> Agreement:
    """A layer's output with the adapter beside it, and with the adapter merged.

    Both stand for ``x (W + scale up down)^T + b`` and differ by what they round. Unmerged: the
    frozen layer's output, ``x down^T``, and the sum. Merged: every element of the weight, once
    more, and the output. So neither is the other's reference: each is held to fp64, and their
    distance has a limit of its own.

    In bf16 these roundings are nearly the whole error. A *model* of each way, fp64 with just its
    roundings done, says how far off a perfect run is, and how far apart the two are; the limits
    are the parity suite's, 1.05 of the model's rms and 1.25 of its largest error + 0.5; at most,
    the two are apart by the sum of their largest errors. In fp32 the accumulation counts, and most
    of it is PyTorch's own linear layer. Again as in the suite, each way may be off by 2 times that
    layer's rms error without any adapter and 3 times its largest, or by 0.35 sqrt(K) in rms and
    2 sqrt(K) at most, K = min(I, 512), and the two may be apart by twice that.

    Args:
        name: the layer's, for the report.
        layer: its weight (O, I), in the working dtype.
        plain: the same layer after the merge.
        x: (T, I), in the working dtype.
        unmerged: (T, O), what ``layer`` made of it.
        fused: False for the ``torch`` backend, the unfused chain, whose model rounds the product
            with ``up`` and its scaled value as well, in both ways.
    """
    dtype = layer.weight.dtype

    def rnd(value: Tensor) -> Tensor:
        return value.to(dtype).double()

    wide, weight, bias = x.double(), layer.weight.double(), layer.bias.double()
    down, up = rnd(layer.down), rnd(layer.up)
    frozen, whole = wide @ weight.T + bias, weight + layer.scale * (up @ down)
    exact = wide @ whole.T + bias
    unit = units(exact, dtype)
    if dtype is torch.float32:
        root = math.sqrt(min(x.shape[1], 512))
        plain_error = in_ulp(F.linear(x, layer.weight, layer.bias) - frozen, unit)
        way = Score(max(3 * plain_error.ulp, 2 * root), max(2 * plain_error.rms, 0.35 * root))
        limits = (way, way, Score(2 * way.ulp, 2 * way.rms))
    else:

        def chain(base: Tensor, product: Tensor) -> Tensor:
            added = layer.scale * (product if fused else rnd(product))
            return rnd(base + (added if fused else rnd(added)))

        beside = chain(rnd(frozen), rnd(wide @ down.T) @ up.T)
        within = rnd(wide @ chain(weight, up @ down).T + bias)
        errors = (beside - exact, within - exact, within - beside)
        models = [in_ulp(error, unit) for error in errors]
        u, m, a = (Score(1.25 * model.ulp + 0.5, 1.05 * model.rms) for model in models)
        limits = (u, m, Score(u.ulp + m.ulp, a.rms))
    merged = plain(x).double()
    return Agreement(
        name,
        in_ulp(unmerged - exact, unit),
        in_ulp(merged - exact, unit),
        in_ulp(merged - unmerged, unit),
        limits,
        in_ulp(frozen - exact, unit),
        (unit.max() / unit.min()).item(),
    )


@torch.no_grad()
def compare_merge(
    model: Encoder, merged: Encoder, batch: Batch, fused: bool
) -> tuple[Tensor, list[Agreement]]:
    """Every adapted layer, merged and unmerged, on the activations that reach it in ``model``.

    Returns:
        The vectors (B, H) of ``model``, and what was found for each layer.
    """
    plain = dict(merged.blocks.named_modules())
    # (tokens, I) and (tokens, O) of every layer, without the padding.
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor], out: Tensor) -> None:
            seen[name] = (arguments[0][batch.mask], out[batch.mask])

        return hook

    hooks = [layer.register_forward_hook(keep(name)) for name, layer in adapters(model)]
    vectors = model(batch.ids, batch.mask)
    for hook in hooks:
        hook.remove()
    return vectors, [agreement(n, a, plain[n], *seen[n], fused) for n, a in adapters(model)]
