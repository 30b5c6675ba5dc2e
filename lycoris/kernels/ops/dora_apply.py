"""DoRA on activations: a layer's output with the update of its weight, rescaled by row.

Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation", 2024; the form, on the output of
the frozen layer, is HF PEFT's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import CHUNK, Plan
from ..schedule import Schedule
from ..spec import Bound, Case, Cost, Operand, OpSpec, Round, Saved, Sizes, register
from .dora import DETACH, line_norm, ratio, set_magnitude, wide
from .dora_lines import Lines
from .dora_lora import contract


def _shapes(present: frozenset[str], **_: Any) -> Mapping[str, str]:
    return {
        "x": "... I",
        "up": "O r 1*",
        "down": "r I 1*",
        "weight": "O I 1*",
        "magnitude": "O",
        "base": "... O",
        "out": "... O",
    }


def _formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round, *, detach_norm: bool) -> Tensor:
    norm = line_norm(wide(t.weight) + wide(scale * (t.up @ t.down)), (1,)).squeeze(1)
    if detach_norm:
        norm = norm.detach() + 0 * norm  # weight keeps a gradient, of zero
    # Rounding h also rounds, going back, q = s * (gy up); gy = c o g is rounded before products.
    hidden = rnd(t.x @ t.down.T)
    return ratio(wide(t.magnitude), norm) * (t.base + rnd(scale * (hidden @ t.up.T), forward=False))


def _expansion(run: Schedule, width: int, rank: int) -> Plan:
    """Tiles of what reads or writes (T, O) once, beside a product over the rank."""
    units, wide_ = plan.multiprocessors(run.device), run.policy.compute.itemsize == 4
    if not units:
        return Plan(64, 32, 16, num_stages=1, splits=2, dynamic="m")
    block_k = min(max(16, plan.power_of_2(rank)), 32 if wide_ else 64)
    return Plan(32, 128, block_k, 8 if wide_ or block_k > 16 else 4, 2, 1, "m")


def _summation(run: Schedule, tokens: int, width: int, rank: int) -> Plan:
    """Tiles of what reads (T, O) and sums over T: programs own columns and a share of T."""
    tiles = _expansion(run, width, rank)
    units = plan.multiprocessors(run.device)
    if not units:
        return tiles
    columns = -(-width // tiles.block_n)
    splits = max(1, min(4 * units // columns, -(-tokens // tiles.block_m), CHUNK))
    return Plan(tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, 2, splits, "m")


def _forward(
    run: Schedule,
    t: SimpleNamespace,
    scale: float | Tensor,
    out: Tensor,
    saved: Any,
    *,
    detach_norm: bool,
) -> None:
    (width, _), rank = t.weight.shape, t.up.shape[1]
    merged = Lines(run, (t.weight, None, t.up, t.down, scale), 0)
    merged.rescale(t.magnitude, 1.0, saved.norm, None)
    hidden = run.empty((t.x.shape[0], rank), run.policy.compute)
    run.matmul(t.x, t.down.t(), hidden, dynamic="m")
    tiles = _expansion(run, width, rank)
    operands = (t.base, hidden, t.up, t.magnitude, saved.norm, scale, out)
    run.launch("dora_apply", "expand", *operands, tiles=tiles)


def _backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
    *,
    detach_norm: bool,
) -> None:
    (tokens, width), rank = grad.shape, t.up.shape[1]
    compute = run.policy.compute
    through_norm = not detach_norm and any(
        g is not None for g in (grads.weight, grads.up, grads.down)
    )
    summed = through_norm or grads.magnitude is not None
    hidden = None
    if summed or grads.up is not None:
        hidden = run.empty((tokens, rank), compute)
        run.matmul(t.x, t.down.t(), hidden, dynamic="m")
    # c o g: the gradient of base, and rounded to compute that of s * h up^T; often the same bits.
    products = any(g is not None for g in (grads.x, grads.up, grads.down))
    same = grads.base is not None and grads.base.dtype is compute
    scaled = grads.base if same else run.empty(grad.shape, compute) if products else None
    tiles = _summation(run, tokens, width, rank)
    partial = run.empty((tiles.splits, width), torch.float32) if summed else None
    stored = (scaled, None if same else grads.base, partial)
    if any(t is not None for t in stored):
        args = (grad, t.base, hidden, t.up, t.magnitude, saved.norm, scale, *stored)
        run.launch("dora_apply", "reduce", *args, tiles=tiles)

    made, more_up, more_down = None, None, None
    if through_norm:
        made = run.empty((2, width), torch.float32)
        more_up = None if grads.up is None else run.empty(t.up.shape, torch.float32)
        more_down = None if grads.down is None else run.empty(t.down.shape, torch.float32)
    elif grads.weight is not None:
        grads.weight.zero_()
    if partial is not None:
        results = (grads.magnitude, made)
        run.launch("dora_apply", "finish", partial, t.magnitude, saved.norm, *results, tiles=tiles)
    if through_norm:
        gradient = (t.weight, None, t.up, t.down, scale, saved.norm, made)
        contract(run, gradient, grads.weight, more_up, more_down, 0)

    if not products:
        return
    assert scaled is not None
    if grads.up is not None:
        assert hidden is not None
        run.matmul(scaled.t(), hidden, grads.up, base=more_up, scale=scale, dynamic="k")
    if grads.x is None and grads.down is None:
        return
    # Scaled before it is rounded: an unscaled fp16 q overflows where s * q is finite.
    hidden_grad = run.empty((tokens, rank), compute)
    run.matmul(scaled, t.up, hidden_grad, scale=scale, dynamic="m")
    if grads.x is not None:
        run.matmul(hidden_grad, t.down, grads.x, dynamic="m")
    if grads.down is not None:
        base = None if more_down is None else more_down.t()
        run.matmul(t.x.t(), hidden_grad, grads.down.t(), base=base, dynamic="k")


def _reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    return {
        "out": n_in + rank,
        "base": n_in + rank,
        "x": n_out + rank + n_in,
        "up": tokens + n_in + rank,
        "down": tokens + n_out + n_in,
        "weight": tokens + n_in + rank,
        "magnitude": tokens + n_in + rank,
    }


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    # x three times (h, h again, grad down), its gradient; base twice, out, grad, c o g once more
    # written and twice read; the weight for its norm and, going back, for that norm's gradient.
    streams = tokens * (4 * n_in + 7 * n_out) + 3 * n_in * n_out
    flops = tokens * rank * 2 * (4 * n_in + 4 * n_out) + 8 * n_in * n_out * rank
    return Cost(itemsize * (streams + 3 * rank * (n_in + n_out)), flops)


def _adjust(values: dict[str, Tensor], case: Case) -> None:
    weight = values["weight"]
    if case.fill == "integers":  # rows of 64 elements of 1 or -1: their norm is 8
        values["up"].zero_()
        weight.copy_(torch.where(weight == 0, 1.0, weight))
    if case.fill == "subnormal":  # else the product would be lost in base
        values["base"].zero_()
    set_magnitude(values, case, weight + case.scale * (values["up"] @ values["down"]), True)


_SIZES: Sizes = {"T": (2, 24), "I": 64, "O": 48, "r": 4}

_CASES = (
    Case("plain", _SIZES),
    Case("primes", {"T": 37, "I": 61, "O": 53, "r": 3}, mixes="few"),
    Case("rank 37", {"T": 40, "I": 48, "O": 40, "r": 37}, mixes="few"),
    Case("one token", {"T": (), "I": 64, "O": 48, "r": 4}, mixes="few"),
    Case("two levels", {"T": 1153, "I": 29, "O": 23, "r": 3}, mixes="few"),
    Case("detached", _SIZES, attributes={"detach_norm": True}, mixes="few"),
    Case("integers", _SIZES, "integers", 2.0, mixes="few"),
    Case("one nonzero", _SIZES, "one_hot", mixes="few"),
    Case("cancellation", _SIZES, "cancellation", mixes="few"),
    Case("subnormal", _SIZES, "subnormal", mixes="few"),
    Case("near overflow", _SIZES, "near_overflow", 0.0055, mixes="few"),
    Case("zero up", _SIZES, "zero_factor", mixes="few"),
    Case("strided", _SIZES, layout="strided", mixes="few"),
    Case("no tokens", {"T": (3, 0), "I": 64, "O": 48, "r": 4}, mixes="few"),
    Case("llm", {"T": (2, 4096), "I": 4096, "O": 4096, "r": 16}, device="cuda"),
    Case("gpu ragged", {"T": 1021, "I": 2053, "O": 1283, "r": 13}, device="cuda", mixes="few"),
    Case("prompt", {"T": (1, 77), "I": 1280, "O": 1280, "r": 4}, device="cuda", mixes="few"),
)

DORA_APPLY = register(
    OpSpec(
        name="dora_apply",
        family="dora_apply",
        operands=(
            Operand("x", side="model"),
            Operand("up"),
            Operand("down"),
            Operand("weight", role="wide", side="model"),
            Operand("magnitude", role="wide"),
            Operand("base", role="wide", side="model"),
        ),
        shapes=_shapes,
        formula=_formula,
        forward=_forward,
        backward=_backward,
        reductions=_reductions,
        cost=_cost,
        bound=Bound(half=24.0, fp32=10.0),
        cases=_CASES,
        saved=(Saved("norm", "O"),),
        attributes=(DETACH,),
        positive=("O", "I", "r"),
        adjust=_adjust,
        doc="(magnitude / norm(weight + s * up @ down)) o (base + s * (x @ down^T) @ up^T)",
    )
)
