"""GLoRA: a low-rank change of the weight plus a low-rank product with it.

Source: Chavan et al., "One-for-All: Generalized LoRA for Parameter-Efficient Fine-tuning", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from ..schedule import Schedule
from ..spec import Bound, Cost, Operand, OpSpec, Round, Sizes, register
from .pair import Scale, cases, product


def _glora_shapes(present: frozenset[str]) -> Mapping[str, str]:
    return {"weight": "O I", "a1": "I r", "a2": "r I", "b1": "O q", "b2": "q I", "out": "O I"}


def _glora_formula(t: SimpleNamespace, scale: Scale, rnd: Round) -> Tensor:
    return scale * (rnd(t.weight @ t.a1) @ t.a2 + t.b1 @ t.b2)


def _glora_hidden(run: Schedule, t: SimpleNamespace) -> Tensor:
    hidden = run.empty((t.weight.shape[0], t.a1.shape[1]), run.policy.compute)
    run.matmul(t.weight, t.a1, hidden)
    return hidden


def _glora_forward(
    run: Schedule, t: SimpleNamespace, scale: Scale, out: Tensor, saved: Any
) -> None:
    hidden = _glora_hidden(run, t)
    product(run, hidden, t.a2, t.b1, t.b2, scale, out, subtract=False)


def _glora_backward(
    run: Schedule, grad: Tensor, t: SimpleNamespace, saved: Any, scale: Scale, grads: Any
) -> None:
    if grads.b1 is not None:
        run.matmul(grad, t.b2.t(), grads.b1, scale=scale)
    if grads.b2 is not None:
        run.matmul(grad.t(), t.b1, grads.b2.t(), scale=scale)
    if grads.a2 is not None:
        run.matmul(grad.t(), _glora_hidden(run, t), grads.a2.t(), scale=scale)
    if grads.weight is None and grads.a1 is None:
        return
    # As LoRA's q: scaled before it is rounded.
    hidden_grad = run.empty((t.weight.shape[0], t.a1.shape[1]), run.policy.compute)
    run.matmul(grad, t.a2.t(), hidden_grad, scale=scale)
    if grads.a1 is not None:
        run.matmul(t.weight.t(), hidden_grad, grads.a1)
    if grads.weight is not None:
        run.matmul(hidden_grad, t.a1.t(), grads.weight)


def _glora_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    n_in, n_out, r = d["I"], d["O"], d["r"]
    return {
        "out": n_in + r + d["q"],
        "weight": n_in + r,
        "a1": n_in + n_out,
        "a2": n_in + n_out,
        "b1": n_in,
        "b2": n_out,
    }


def _glora_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    size, rank = d["O"] * d["I"], d["r"] + d["q"]
    factors = 3 * (d["r"] * 2 * d["I"] + d["q"] * (d["O"] + d["I"]))
    return Cost(itemsize * (5 * size + factors), 2 * size * (7 * d["r"] + 3 * d["q"]) + rank)


_GLORA: Sizes = {"O": 96, "I": 64, "r": 4, "q": 4}

GLORA_WEIGHT = register(
    OpSpec(
        name="glora_weight",
        family="pair",
        operands=(
            Operand("weight", side="model"),
            *(Operand(name) for name in ("a1", "a2", "b1", "b2")),
        ),
        shapes=_glora_shapes,
        formula=_glora_formula,
        forward=_glora_forward,
        backward=_glora_backward,
        reductions=_glora_reductions,
        cost=_glora_cost,
        bound=Bound(half=16.0, fp32=10.0),
        cases=tuple(
            cases(
                _GLORA,
                {"O": 53, "I": 61, "r": 3, "q": 5},
                {
                    "rank 1": {"O": 59, "I": 37, "r": 1, "q": 1},
                    "rank 130": {"O": 40, "I": 80, "r": 130, "q": 16},
                },
                llm={"O": 4096, "I": 4096, "r": 16, "q": 16},
                ragged={"O": 1283, "I": 3071, "r": 13, "q": 7},
            )
        ),
        positive=("r", "q"),
        tiny=(("weight", "b1"), ("a2", "b2")),
        doc="s * (W a1 a2 + b1 b2)",
    )
)
