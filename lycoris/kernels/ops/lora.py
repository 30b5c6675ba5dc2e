"""LoRA: a low-rank weight, and its product with x without that weight.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. The Tucker form
(``mid``) is LyCORIS's LoCon.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..schedule import Schedule
from ..spec import Bound, Case, Cost, Operand, OpSpec, Round, Sizes, register

# ---------------------------------------------------------------------------- lora_apply


def _apply_shapes(present: frozenset[str]) -> Mapping[str, str]:
    return {"x": "... I", "up": "O r 1*", "down": "r I 1*", "base": "... O", "out": "... O"}


def _apply_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    # Rounding h also rounds, going back, its gradient q = s * (g up).
    hidden = rnd(t.x @ t.down.T)
    out = scale * (hidden @ t.up.T)
    return out if t.base is None else t.base + out


def _apply_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    hidden = run.empty((t.x.shape[0], t.down.shape[0]), run.policy.compute)
    run.matmul(t.x, t.down.t(), hidden, dynamic="m")
    run.matmul(hidden, t.up.t(), out, base=t.base, scale=scale, dynamic="m")


def _apply_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    shape = (t.x.shape[0], t.down.shape[0])
    through = grads.x is not None or grads.down is not None
    hidden = run.empty(shape, run.policy.compute) if grads.up is not None else None
    hidden_grad = run.empty(shape, run.policy.compute) if through else None
    # Scaled before it is rounded: an unscaled fp16 q overflows where s * q is finite.
    run.matmul_pair(
        None if hidden is None else (t.x, t.down.t(), 1.0, hidden),
        None if hidden_grad is None else (grad, t.up, scale, hidden_grad),
        dynamic="m",
    )
    # The sums over the tokens come next, while the L2 cache holds the last of x and g.
    run.matmul_pair(
        None if hidden is None else (grad.t(), hidden, scale, grads.up),
        None
        if hidden_grad is None or grads.down is None
        else (t.x.t(), hidden_grad, 1.0, grads.down.t()),
        dynamic="k",
    )
    if hidden_grad is not None and grads.x is not None:
        run.matmul(hidden_grad, t.down, grads.x, dynamic="m")


def _apply_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    return {
        "out": d["I"] + d["r"],
        "x": d["O"] + d["r"],
        "up": d["T"] + d["I"],
        "down": d["T"] + d["O"],
    }


def _apply_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    streams = tokens * (3 * n_in + n_out) + tokens * (n_in + n_out)  # x twice back, gx, g; x, y
    factors = 4 * rank * (n_in + n_out)
    return Cost(itemsize * (streams + factors), 2 * tokens * rank * 4 * (n_in + n_out))


# --------------------------------------------------------------------------- lora_weight


def _weight_shapes(present: frozenset[str]) -> Mapping[str, str]:
    if "mid" in present:
        return {
            "up": "O p 1*",
            "mid": "p q k*",
            "down": "q I 1*",
            "base": "O I k*",
            "out": "O I k*",
        }
    return {"up": "O r 1*", "down": "r N+", "base": "O N+", "out": "O N+"}


def _fold_mid(t: SimpleNamespace) -> Mapping[str, Tensor | None]:
    # Far smaller than the weight: (p, I * k) in fp32, so that nothing rounds before the output.
    return {"down": torch.einsum("pqk,qi->pik", t.mid, t.down).flatten(1), "mid": None}


def _weight_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    if t.mid is None:
        out = scale * (t.up @ t.down)
    else:
        out = scale * (t.up @ _fold_mid(t)["down"])
        out = out.reshape(t.up.shape[0], t.down.shape[1], t.mid.shape[2])
    return out if t.base is None else t.base + out


def _weight_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    base = None if t.base is None else t.base.flatten(1)
    run.matmul(t.up, t.down, out.flatten(1), base=base, scale=scale)


def _weight_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    grad = grad.flatten(1)
    if grads.up is not None:
        run.matmul(grad, t.down.t(), grads.up, scale=scale)
    if grads.down is not None:
        run.matmul(grad.t(), t.up, grads.down.t(), scale=scale)


def _weight_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    if "N" in d:
        return {"out": d["r"], "up": d["N"], "down": d["O"]}
    n_in, n_out, p, q, k = d["I"], d["O"], d["p"], d["q"], d["k"]
    return {
        "out": p + q,
        "up": n_in * k + q,
        "mid": n_out + n_in,
        "down": n_out + p * k,
    }


def _weight_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    if "N" in d:
        width, rank, factors = d["N"], d["r"], d["r"] * (d["O"] + d["N"])
    else:
        width, rank = d["I"] * d["k"], d["p"]
        factors = d["O"] * d["p"] + d["p"] * d["q"] * d["k"] + d["q"] * d["I"]
    return Cost(itemsize * (2 * d["O"] * width + 3 * factors), 6 * d["O"] * width * rank)


# --------------------------------------------------------------------------------- specs

_APPLY_SIZES: Sizes = {"T": (2, 32), "I": 64, "O": 96, "r": 4}
_WEIGHT_SIZES: Sizes = {"O": 96, "N": 64, "r": 4}

_APPLY_CASES = (
    Case("plain", _APPLY_SIZES),
    Case("base", _APPLY_SIZES, present=("base",)),
    Case("primes", {"T": 37, "I": 61, "O": 53, "r": 3}, present=("base",)),
    Case("rank 1", {"T": 67, "I": 71, "O": 59, "r": 1}, mixes="few"),
    Case("rank 16", {"T": 128, "I": 256, "O": 96, "r": 16}, scale=0.3, mixes="few"),
    Case("rank 130", {"T": 64, "I": 96, "O": 80, "r": 130}),
    Case("one token", {"T": (), "I": 64, "O": 48, "r": 4}, mixes="few"),
    Case("long input", {"T": 33, "I": 509, "O": 40, "r": 4}, mixes="few"),
    Case("long output", {"T": 40, "I": 40, "O": 503, "r": 4}, mixes="few"),
    Case("many tokens", {"T": (4, 128), "I": 48, "O": 40, "r": 4}, mixes="few"),
    Case("two levels", {"T": 1153, "I": 29, "O": 23, "r": 3}, mixes="few"),
    Case("integers", _APPLY_SIZES, "integers", 2.0, ("base",), exact=True, mixes="few"),
    Case(
        "integers ragged",
        {"T": 37, "I": 61, "O": 53, "r": 3},
        "integers",
        2.0,
        exact=True,
        mixes="few",
    ),
    Case("one nonzero", _APPLY_SIZES, "one_hot", mixes="few"),
    Case("cancellation", _APPLY_SIZES, "cancellation", present=("base",), mixes="few"),
    Case("subnormal", _APPLY_SIZES, "subnormal", mixes="few"),
    Case("near overflow", _APPLY_SIZES, "near_overflow", 0.0055, mixes="few"),
    Case("zero up", _APPLY_SIZES, "zero_factor", present=("base",), mixes="few"),
    Case("strided", _APPLY_SIZES, layout="strided", present=("base",), mixes="few"),
    Case("expanded", _APPLY_SIZES, layout="expanded", mixes="few"),
    Case("no tokens", {"T": (3, 0), "I": 64, "O": 96, "r": 4}, present=("base",), mixes="few"),
    Case("llm", {"T": (2, 4096), "I": 4096, "O": 4096, "r": 16}, device="cuda"),
    Case("llm base", {"T": 8192, "I": 4096, "O": 4096, "r": 16}, present=("base",), device="cuda"),
    Case(
        "gpu ragged", {"T": 4099, "I": 3071, "O": 1283, "r": 13}, present=("base",), device="cuda"
    ),
    Case("gpu rank 130", {"T": 1021, "I": 2053, "O": 4096, "r": 130}, device="cuda"),
    Case("prompt", {"T": (1, 77), "I": 1280, "O": 1280, "r": 4}, device="cuda"),
)

_TUCKER: Sizes = {"O": 40, "p": 5, "q": 3, "I": 24, "k": (3, 3)}

_WEIGHT_CASES = (
    Case("plain", _WEIGHT_SIZES),
    Case("base", _WEIGHT_SIZES, present=("base",)),
    Case("primes", {"O": 53, "N": 61, "r": 3}, present=("base",)),
    Case("rank 1", {"O": 59, "N": 71, "r": 1}, mixes="few"),
    Case("rank 16", {"O": 96, "N": 256, "r": 16}, scale=0.3, mixes="few"),
    Case("rank 130", {"O": 64, "N": 80, "r": 130}),
    Case("wide", {"O": 33, "N": 509, "r": 4}, mixes="few"),
    Case("tall", {"O": 509, "N": 40, "r": 4}, mixes="few"),
    Case("two levels", {"O": 23, "N": 1153, "r": 3}, mixes="few"),
    Case("conv", {"O": 48, "N": (20, 3, 3), "r": 4}, present=("base",)),
    Case("tucker", _TUCKER, present=("mid",), mixes="few"),
    Case("tucker base", _TUCKER, present=("mid", "base")),
    Case(
        "tucker rank 1",
        {"O": 24, "p": 1, "q": 1, "I": 16, "k": (3,)},
        present=("mid",),
        mixes="few",
    ),
    Case("integers", _WEIGHT_SIZES, "integers", 2.0, ("base",), exact=True, mixes="few"),
    Case("integers ragged", {"O": 53, "N": 61, "r": 3}, "integers", 2.0, exact=True, mixes="few"),
    Case("integers tucker", _TUCKER, "integers", 2.0, ("mid",), exact=True, mixes="few"),
    Case("one nonzero", _WEIGHT_SIZES, "one_hot", mixes="few"),
    Case("cancellation", _WEIGHT_SIZES, "cancellation", present=("base",), mixes="few"),
    Case("subnormal", _WEIGHT_SIZES, "subnormal", mixes="few"),
    Case("near overflow", _WEIGHT_SIZES, "near_overflow", 0.0055, mixes="few"),
    Case("zero up", _WEIGHT_SIZES, "zero_factor", present=("base",), mixes="few"),
    Case("large delta", _WEIGHT_SIZES, "large", present=("base",)),
    Case("strided", _WEIGHT_SIZES, layout="strided", present=("base",), mixes="few"),
    Case("expanded", _WEIGHT_SIZES, layout="expanded", mixes="few"),
    Case("llm", {"O": 4096, "N": 4096, "r": 16}, device="cuda"),
    Case("llm base", {"O": 4096, "N": 4096, "r": 16}, present=("base",), device="cuda"),
    Case("gpu ragged", {"O": 4099, "N": 3071, "r": 13}, device="cuda"),
    Case("gpu conv", {"O": 1280, "N": (640, 3, 3), "r": 32}, present=("base",), device="cuda"),
    Case(
        "gpu tucker",
        {"O": 640, "p": 16, "q": 16, "I": 320, "k": (3, 3)},
        present=("mid",),
        device="cuda",
    ),
)

LORA_APPLY = register(
    OpSpec(
        name="lora_apply",
        family="lora",
        operands=(
            Operand("x", side="model"),
            Operand("up"),
            Operand("down"),
            Operand("base", role="wide", optional=True, additive=True, side="model"),
        ),
        shapes=_apply_shapes,
        formula=_apply_formula,
        forward=_apply_forward,
        backward=_apply_backward,
        reductions=_apply_reductions,
        cost=_apply_cost,
        bound=Bound(half=24.0, fp32=10.0),
        cases=_APPLY_CASES,
        positive=("r",),
        doc="[base +] s * (x @ down^T) @ up^T",
    )
)

LORA_WEIGHT = register(
    OpSpec(
        name="lora_weight",
        family="lora",
        operands=(
            Operand("up"),
            Operand("down"),
            Operand("mid", optional=True),
            Operand("base", role="wide", optional=True, additive=True, side="model"),
        ),
        shapes=_weight_shapes,
        formula=_weight_formula,
        forward=_weight_forward,
        backward=_weight_backward,
        reductions=_weight_reductions,
        cost=_weight_cost,
        bound=Bound(half=16.0, fp32=10.0),
        cases=_WEIGHT_CASES,
        fold=_fold_mid,
        fold_with="mid",
        positive=("r", "p", "q"),
        doc="[base +] s * up @ down; Tucker: s * sum_pq up[o,p] mid[p,q,k] down[q,i]",
    )
)
