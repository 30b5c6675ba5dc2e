"""T-LoRA: LoRA with a masked diagonal, less what it was at the start.

Source: Soboleva et al., "T-LoRA: Single Image Diffusion Model Customization Without Overfitting",
2025. At the start p = p0, lam = lam0 and q = q0, and the result is exactly 0 under any mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Bound, Case, Cost, Operand, OpSpec, Round, Sizes, register
from .pair import Scale, cases, product


def _same(t: Tensor, like: Tensor) -> Tensor:
    """A factor in the dtype of another: eager's products take one dtype."""
    return t.to(like.dtype)


def _diagonal(
    run: Schedule, a: Tensor, lam: Tensor, mask: Tensor, out: Tensor, *, dynamic: str = ""
) -> Tensor:
    """out = a * lam * mask, in fp32, rounded once."""
    tiles = _diagonal_tiles(out.shape[0], out.shape[1], plan.multiprocessors(run.device))
    tiles = replace(tiles, dynamic=dynamic)
    run.launch("pair", "diagonal", a, lam, mask, out, tiles=tiles)
    return out


def _diagonal_tiles(rows: int, rank: int, units: int) -> Plan:
    if not units:
        return Plan(64, 32, 1, splits=2 if rows > plan.CHUNK else 1)
    block_n = min(128, max(16, plan.power_of_2(rank)))
    block_m = 2048 // block_n
    # Of few rows a part, so that there are parts for every multiprocessor.
    return Plan(block_m, block_n, 1, 4, 1, max(1, min(2 * units, -(-rows // (2 * block_m)))))


def _lam_gradient(
    run: Schedule, a: Tensor, b: Tensor, t: SimpleNamespace, grad_lam: Tensor, *, dynamic: str = ""
) -> None:
    """grad_lam = the sum over rows of a * b * mask."""
    rank = t.lam.shape[0]
    tiles = _diagonal_tiles(a.shape[0], rank, plan.multiprocessors(run.device))
    partials = run.empty((tiles.splits, rank), torch.float32)
    tiles = replace(tiles, dynamic=dynamic)
    run.launch("pair", "diagonal_gradient", a, b, t.mask, partials, tiles=tiles)
    run.add_up((partials, grad_lam))


_TLORA = (
    Operand("q"),
    Operand("p"),
    Operand("lam", role="wide"),
    Operand("q0", differentiable=False, side="model"),
    Operand("p0", differentiable=False, side="model"),
    Operand("lam0", role="wide", differentiable=False, side="model"),
    Operand("mask", role="wide", differentiable=False),
)
_FACTORS = {
    "q": "r I",
    "p": "O r",
    "lam": "r",
    "q0": "r I",
    "p0": "O r",
    "lam0": "r",
    "mask": "b r",
}


def _masks(groups: Groups) -> Groups:
    """Checks that there is one mask for all rows, or one for each of x's first dimension."""
    (masks,), tokens = groups["b"], groups.get("T")
    if masks != 1 and (tokens is None or tokens[:1] != (masks,)):
        samples = f", or {tokens[0]}, from x" if tokens else ""
        raise ValueError(f"mask has shape ({masks}, {groups['r'][0]}); expected b = 1{samples}")
    return {}


def _adjust(values: dict[str, Tensor], case: Case) -> None:
    """Nested masks, as T-LoRA's schedule makes them: ones, then zeros."""
    samples, rank = values["mask"].shape
    kept = torch.arange(samples)[:, None] % 2 + (rank + 1) // 2
    values["mask"] = (torch.arange(rank) < kept).double()
    if case.fill == "cancellation" and "x" in values:
        # The two halves nearly undo each other, as soon after the start; h itself does not cancel.
        values["q"][:, values["q"].shape[1] // 2 :] *= -1
        values |= {"p0": values["p"], "lam0": values["lam"]}
        values["q0"] = values["q"] * (0.5 + values["q0"] / 16)


def _tlora_weight_formula(t: SimpleNamespace, scale: Scale, rnd: Round) -> Tensor:
    # The gradient of the rounded product enters no matrix product: it stays in fp32.
    left = rnd(_same(t.p * (t.lam * t.mask), t.p), backward=False)
    left0 = rnd(_same(t.p0 * (t.lam0 * t.mask), t.p0), backward=False)
    return scale * (left @ t.q - left0 @ t.q0)


def _cast(run: Schedule, p: Tensor) -> Tensor:
    """p as the policy casts it, which a diagonal, unlike a product, leaves to its caller."""
    return p.to(run.policy.compute)


def _left(run: Schedule, p: Tensor, lam: Tensor, mask: Tensor) -> Tensor:
    made = run.empty(tuple(p.shape), run.policy.compute)
    return _diagonal(run, _cast(run, p), lam, mask, made)


def _tlora_weight_forward(
    run: Schedule, t: SimpleNamespace, scale: Scale, out: Tensor, saved: Any
) -> None:
    left, left0 = _left(run, t.p, t.lam, t.mask), _left(run, t.p0, t.lam0, t.mask)
    product(run, left, t.q, left0, t.q0, scale, out, subtract=True)


def _tlora_weight_backward(
    run: Schedule, grad: Tensor, t: SimpleNamespace, saved: Any, scale: Scale, grads: Any
) -> None:
    if grads.q is not None:
        left = _left(run, t.p, t.lam, t.mask)
        run.matmul(grad.t(), left, grads.q.t(), scale=scale)
    if grads.p is None and grads.lam is None:
        return
    left_grad = run.empty(tuple(t.p.shape), torch.float32)
    run.matmul(grad, t.q.t(), left_grad, scale=scale)
    if grads.p is not None:
        _diagonal(run, left_grad, t.lam, t.mask, grads.p)
    if grads.lam is not None:
        _lam_gradient(run, _cast(run, t.p), left_grad, t, grads.lam)


def _tlora_weight_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    size, rank, factors = d["O"] * d["I"], d["r"], d["r"] * (d["O"] + d["I"])
    return Cost(itemsize * (2 * size + 5 * factors), 2 * size * 4 * rank)


def _tlora_apply_formula(t: SimpleNamespace, scale: Scale, rnd: Round) -> Tensor:
    samples = t.mask.shape[0]

    def hidden(q: Tensor, lam: Tensor) -> Tensor:
        # Scaled before it is rounded; its gradient is scaled, then rounded, likewise.
        plain = rnd(t.x @ q.T, forward=False).reshape(
            samples, len(t.x) // max(1, samples), q.shape[0]
        )
        scaled = plain * (lam * t.mask)[:, None]
        return rnd(_same(scaled.reshape(-1, q.shape[0]), t.x), backward=False)

    return scale * (hidden(t.q, t.lam) @ t.p.T - hidden(t.q0, t.lam0) @ t.p0.T)


def _times(run: Schedule, x: Tensor, factor: Tensor, scale: Scale = 1.0) -> Tensor:
    """scale * x @ factor, of few columns, in fp32: it is yet to be scaled by the diagonal."""
    made = run.empty((x.shape[0], factor.shape[1]), torch.float32)
    run.matmul(x, factor, made, scale=scale, dynamic="m")
    return made


def _hidden(run: Schedule, plain: Tensor, lam: Tensor, mask: Tensor) -> Tensor:
    made = run.empty(tuple(plain.shape), run.policy.compute)
    return _diagonal(run, plain, lam, mask, made, dynamic="m")


def _tlora_apply_forward(
    run: Schedule, t: SimpleNamespace, scale: Scale, out: Tensor, saved: Any
) -> None:
    # Two products of one shape, not one of both factors: made alike, they cancel exactly.
    hidden = _hidden(run, _times(run, t.x, t.q.t()), t.lam, t.mask)
    hidden0 = _hidden(run, _times(run, t.x, t.q0.t()), t.lam0, t.mask)
    product(run, hidden, t.p.t(), hidden0, t.p0.t(), scale, out, subtract=True, dynamic="m")


def _tlora_apply_backward(
    run: Schedule, grad: Tensor, t: SimpleNamespace, saved: Any, scale: Scale, grads: Any
) -> None:
    needs_plain = grads.p is not None or grads.lam is not None
    plain = _times(run, t.x, t.q.t()) if needs_plain else None
    if plain is not None and grads.p is not None:
        hidden = _hidden(run, plain, t.lam, t.mask)
        run.matmul(grad.t(), hidden, grads.p, scale=scale, dynamic="k")
    if grads.x is None and grads.q is None and grads.lam is None:
        return
    scaled_grad = _times(run, grad, t.p, scale)
    if plain is not None and grads.lam is not None:
        _lam_gradient(run, plain, scaled_grad, t, grads.lam, dynamic="m")
    if grads.x is None and grads.q is None:
        return
    hidden_grad = _hidden(run, scaled_grad, t.lam, t.mask)
    if grads.q is not None:
        run.matmul(t.x.t(), hidden_grad, grads.q.t(), dynamic="k")
    if grads.x is not None:  # only this needs the frozen half
        hidden_grad0 = _hidden(run, _times(run, grad, t.p0, scale), t.lam0, t.mask)
        product(
            *(run, hidden_grad, t.q, hidden_grad0, t.q0, 1.0, grads.x), subtract=True, dynamic="m"
        )


def _tlora_apply_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    return {
        "out": d["I"] + d["r"],
        "x": d["O"] + d["r"],
        "q": d["T"] + d["O"],
        "p": d["T"] + d["I"],
        "lam": d["T"] + d["O"] + d["I"],
    }


def _tlora_apply_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    streams = tokens * (4 * n_in + 3 * n_out)  # x, x twice back, gx; y, g twice
    factors = 5 * rank * (n_in + n_out)
    return Cost(itemsize * (streams + factors), 2 * tokens * rank * 6 * (n_in + n_out))


_WEIGHT: Sizes = {"O": 96, "I": 64, "r": 8, "b": 1}
_APPLY: Sizes = {"T": (2, 32), "I": 64, "O": 96, "r": 8, "b": 1}

TLORA_WEIGHT = register(
    OpSpec(
        name="tlora_weight",
        family="pair",
        operands=_TLORA,
        shapes=lambda present: {**_FACTORS, "out": "O I"},
        formula=_tlora_weight_formula,
        forward=_tlora_weight_forward,
        backward=_tlora_weight_backward,
        reductions=lambda d: {
            "out": 2 * d["r"],
            "q": d["O"],
            "p": d["I"],
            "lam": d["I"] + d["O"],
        },
        cost=_tlora_weight_cost,
        bound=Bound(half=16.0, fp32=10.0),
        cases=tuple(
            cases(
                _WEIGHT,
                {"O": 53, "I": 61, "r": 7, "b": 1},
                {
                    "rank 1": {"O": 59, "I": 71, "r": 1, "b": 1},
                    "rank 130": {"O": 40, "I": 80, "r": 130, "b": 1},
                },
                llm={"O": 4096, "I": 4096, "r": 16, "b": 1},
                ragged={"O": 1283, "I": 3071, "r": 13, "b": 1},
            )
        ),
        positive=("r",),
        derive=_masks,
        adjust=_adjust,
        doc="s * (p diag(lam o mask) q - p0 diag(lam0 o mask) q0)",
        conditions="b is 1",
    )
)

TLORA_APPLY = register(
    OpSpec(
        name="tlora_apply",
        family="pair",
        operands=(Operand("x", side="model"), *_TLORA),
        shapes=lambda present: {"x": "... I", **_FACTORS, "out": "... O"},
        formula=_tlora_apply_formula,
        forward=_tlora_apply_forward,
        backward=_tlora_apply_backward,
        reductions=_tlora_apply_reductions,
        cost=_tlora_apply_cost,
        bound=Bound(half=24.0, fp32=10.0),
        cases=(
            *cases(
                _APPLY,
                {"T": 37, "I": 61, "O": 53, "r": 7, "b": 1},
                {
                    "rank 130": {"T": 64, "I": 80, "O": 40, "r": 130, "b": 1},
                    "masks": {"T": (5, 53), "I": 48, "O": 40, "r": 7, "b": 5},
                    "no tokens": {"T": (3, 0), "I": 64, "O": 96, "r": 4, "b": 3},
                },
                llm={"T": (2, 4096), "I": 4096, "O": 4096, "r": 16, "b": 2},
                ragged={"T": (3, 1021), "I": 2053, "O": 1283, "r": 13, "b": 3},
            ),
            Case("two levels", {"T": 601, "I": 29, "O": 23, "r": 7, "b": 1}, mixes="few"),
        ),
        positive=("r",),
        derive=_masks,
        tiny=(("x",), ("p", "p0")),
        adjust=_adjust,
        doc="tlora_weight's product with x, without that weight",
        conditions="b is 1, or x's first dimension: a mask for each sample",
    )
)
