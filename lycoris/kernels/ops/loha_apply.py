"""LoHa's product with x: by Khatri-Rao products of the factors, or on tiles of the weight.

Sources: see :mod:`.loha`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..plan import Plan, multiprocessors, power_of_2
from ..schedule import Schedule
from ..spec import Bound, Case, Cost, Operand, OpSpec, Round, Sizes, register
from .loha import BASE, FACTORS, factor_grads, few


def uses_khatri_rao(n_out: int, n_in: int, rank: int) -> bool:
    """Whether ``loha_apply`` runs as a rank r^2 LoRA, rather than on tiles of the weight.

    Where the products of the factors' rows are together half as large as the weight, or smaller:
    up to rank 32 at 4096 x 4096. By floating-point operations the two meet at rank 26, but a
    generated tile serves 128 tokens only, and generating it costs more than multiplying by it: at
    rank 32 and 8192 tokens an H200 took 5.8 ms by tiles of the weight.
    """
    return 2 * rank * rank * (n_out + n_in) <= n_out * n_in


# --------------------------------------------------------------------------------- plans


@lru_cache(maxsize=4096)
def dense_plan(m: int, rank: int, itemsize: int, units: int) -> Plan:
    """Tiles of a product with the generated weight; ``block_k`` is along the rank too."""
    if not units:
        return Plan(64, 64, 64, dynamic="m")
    block_k = min(max(16, power_of_2(rank)), 32)
    if itemsize == 4:
        return Plan(min(64, max(16, power_of_2(m))), 32, block_k, 4, 2, dynamic="m")
    return Plan(min(128, max(16, power_of_2(m))), 64, block_k, 8, 3, dynamic="m")


def pairs_plan(device: torch.device) -> Plan:
    """``block_n``: elements of row-wise products, or of a factor's gradient, at once."""
    return Plan(1, 512 if multiprocessors(device) else 256, 1)


# ------------------------------------------------------------------------------- contract


def _apply_shapes(present: frozenset[str]) -> Mapping[str, str]:
    a, b = "O r 1*", "r I 1*"
    return {
        "x": "... I",
        "w1_a": a,
        "w1_b": b,
        "w2_a": a,
        "w2_b": b,
        "base": "... O",
        "out": "... O",
    }


def _row_products(first: Tensor, second: Tensor) -> Tensor:
    """(n, r) and (n, r) -> (n, r * r): all products of two elements of a row."""
    return (first[:, :, None] * second[:, None, :]).flatten(1)


def _apply_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    if uses_khatri_rao(t.w1_a.shape[0], t.x.shape[1], t.w1_a.shape[1]):
        up = rnd(_row_products(t.w1_a, t.w2_a), backward=False)
        down = rnd(_row_products(t.w1_b.T, t.w2_b.T), backward=False)
        # Rounding h also rounds, going back, its gradient q = s * (g up).
        hidden = rnd(t.x @ down)
        out = scale * (hidden @ up.T)
    else:
        # The gradients that are rounded, (s g^T x) o W2 and (s g^T x) o W1, enter products.
        first = rnd(t.w1_a @ t.w1_b, forward=False)
        second = rnd(t.w2_a @ t.w2_b, forward=False)
        out = scale * (t.x @ rnd(first * second, backward=False).T)
    return out if t.base is None else t.base + out


def _up(run: Schedule, t: SimpleNamespace) -> Tensor:
    """(O, r^2), the rows' products of w1_a and w2_a, in the compute dtype."""
    n_out, rank = t.w1_a.shape
    out = run.empty((n_out, rank * rank), run.policy.compute)
    args = (t.w1_a, t.w2_a, out, True, False)
    run.launch("khatri_rao", "pairs", *args, tiles=pairs_plan(run.device))
    return out


def _down(run: Schedule, t: SimpleNamespace) -> Tensor:
    """(r^2, I), the columns' products of w1_b and w2_b, in the compute dtype."""
    rank, n_in = t.w1_b.shape
    out = run.empty((rank * rank, n_in), run.policy.compute)
    args = (t.w1_b, t.w2_b, out, False, False)
    run.launch("khatri_rao", "pairs", *args, tiles=pairs_plan(run.device))
    return out


def _split(
    run: Schedule,
    grad: Tensor,
    factors: tuple[Tensor, Tensor],
    wanted: tuple[Tensor | None, Tensor | None],
    rank_last: bool,
) -> None:
    """The gradients of two factors from that of their products."""
    room = [
        run.empty(tuple(factor.shape), torch.float32) if into is None else into
        for into, factor in zip(wanted, factors, strict=True)
    ]
    args = (grad, *factors, *room, rank_last, False)
    run.launch("khatri_rao", "pairs_grad", *args, tiles=pairs_plan(run.device))


def _apply_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    (tokens, n_in), (n_out, rank) = t.x.shape, t.w1_a.shape
    if not uses_khatri_rao(n_out, n_in, rank):
        transposed = (t.w1_b.t(), t.w1_a.t(), t.w2_b.t(), t.w2_a.t())
        _dense_product(run, t.x, transposed, t.base, scale, out)
        return
    down = _down(run, t)
    hidden = run.empty((tokens, rank * rank), run.policy.compute)
    run.matmul(t.x, down.t(), hidden, dynamic="m")
    run.matmul(hidden, _up(run, t).t(), out, base=t.base, scale=scale, dynamic="m")


def _dense_product(
    run: Schedule,
    a: Tensor,
    factors: tuple[Tensor, ...],
    base: Tensor | None,
    scale: float | Tensor,
    out: Tensor,
) -> None:
    """out = [base +] scale * a @ (f1 f2 o f3 f4), the weight generated by tiles."""
    rank, units = factors[0].shape[1], multiprocessors(run.device)
    tiles = dense_plan(a.shape[0], rank, run.policy.compute.itemsize, units)
    run.launch("loha", "dense_product", a, *factors, base, scale, out, tiles=tiles)


def _apply_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    (tokens, n_in), (n_out, rank) = t.x.shape, t.w1_a.shape
    if not uses_khatri_rao(n_out, n_in, rank):
        if grads.x is not None:
            factors = (t.w1_a, t.w1_b, t.w2_a, t.w2_b)
            _dense_product(run, grad, factors, None, scale, grads.x)
        factor_grads(run, grad, t.x, t, scale, grads)
        return
    width = rank * rank
    down = _down(run, t)
    if grads.w1_a is not None or grads.w2_a is not None:
        hidden = run.empty((tokens, width), run.policy.compute)
        run.matmul(t.x, down.t(), hidden, dynamic="m")
        of_up = run.empty((n_out, width), torch.float32)
        run.matmul(grad.t(), hidden, of_up, scale=scale, dynamic="k")
        _split(run, of_up, (t.w1_a, t.w2_a), (grads.w1_a, grads.w2_a), True)
        del of_up  # up to half the bytes of a 16-bit weight: not beside of_down
    wanted_b = grads.w1_b is not None or grads.w2_b is not None
    if grads.x is None and not wanted_b:
        return
    # Scaled before it is rounded: an unscaled fp16 q overflows where s * q is finite.
    hidden_grad = run.empty((tokens, width), run.policy.compute)
    run.matmul(grad, _up(run, t), hidden_grad, scale=scale, dynamic="m")
    if grads.x is not None:
        run.matmul(hidden_grad, down, grads.x, dynamic="m")
    if wanted_b:
        of_down = run.empty((width, n_in), torch.float32)
        run.matmul(t.x.t(), hidden_grad, of_down.t(), dynamic="k")
        _split(run, of_down, (t.w1_b, t.w2_b), (grads.w1_b, grads.w2_b), False)


def _apply_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    if uses_khatri_rao(n_out, n_in, rank):
        a, b = tokens + n_in + rank, tokens + n_out + rank
        out, x = n_in + rank * rank, n_out + rank * rank
    else:
        a, b = tokens + n_in + rank, tokens + n_out + rank
        out, x = n_in + rank, n_out + rank
    return {"out": out, "x": x, "w1_a": a, "w1_b": b, "w2_a": a, "w2_b": b}


def _apply_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    tokens, n_in, n_out, rank = d["T"], d["I"], d["O"], d["r"]
    streams = tokens * (3 * n_in + n_out) + tokens * (n_in + n_out)  # x twice back, gx, g; x, y
    flops = 2 * tokens * min(rank * rank * (4 * n_in + 3 * n_out), 3 * n_in * n_out)
    return Cost(itemsize * (streams + 8 * rank * (n_in + n_out)), flops)


# ---------------------------------------------------------------------------------- spec


def _cancel_products(values: dict[str, Tensor], case: Case) -> None:
    """Undoes the sign that the second factor's cancellation takes from the first's."""
    if case.fill == "cancellation":
        values["w2_b"][:, values["w2_b"].shape[1] // 2 :] *= -1


#: By Khatri-Rao products, and by tiles of the weight: the rank decides.
_BY_ROWS: Sizes = {"T": (2, 32), "I": 96, "O": 72, "r": 3}
_BY_TILES: Sizes = {"T": (2, 32), "I": 64, "O": 80, "r": 5}

_APPLY_CASES = (
    Case("base", _BY_ROWS, present=("base",)),
    few("plain", _BY_ROWS),
    few("primes", {"T": 37, "I": 61, "O": 83, "r": 2}),
    few("rank 1", {"T": 91, "I": 61, "O": 43, "r": 1}),
    few("one token", {"T": (), "I": 192, "O": 144, "r": 4}),
    few("integers", _BY_ROWS, "integers", scale=2.0, present=("base",), exact=True),
    few("one nonzero", {"T": 33, "I": 40, "O": 48, "r": 16}, "one_hot", present=("base",)),
    few("cancellation", {"T": 64, "I": 128, "O": 64, "r": 3}, "cancellation"),
    few("subnormal", _BY_ROWS, "subnormal"),
    few("near overflow", _BY_ROWS, "near_overflow", scale=0.0055),
    few("zero factor", _BY_ROWS, "zero_factor", present=("base",)),
    few("no tokens", {"T": (3, 0), "I": 64, "O": 96, "r": 4}, present=("base",)),
    few("dense", _BY_TILES, present=("base",)),
    few("dense primes", {"T": 37, "I": 61, "O": 53, "r": 5}, present=("base",)),
    few("dense rank 130", {"T": 40, "I": 48, "O": 40, "r": 130}, present=("base",)),
    few("dense groups", {"T": 20, "I": 20, "O": 293, "r": 5}, present=("base",)),
    few("dense two levels", {"T": 1153, "I": 29, "O": 23, "r": 5}, present=("base",)),
    few("dense integers", _BY_TILES, "integers", scale=2.0, present=("base",), exact=True),
    few("dense overflow", _BY_TILES, "near_overflow", scale=0.0055, present=("base",)),
    few("dense strided", _BY_TILES, layout="strided", present=("base",)),
    Case("llm", {"T": (2, 4096), "I": 4096, "O": 4096, "r": 16}, device="cuda"),
    Case("llm dense", {"T": 8192, "I": 4096, "O": 4096, "r": 48}, device="cuda"),
    few("gpu ragged", {"T": 4099, "I": 3071, "O": 1283, "r": 13}, present=("base",), device="cuda"),
    few(
        "gpu rank 130",
        {"T": 1021, "I": 1280, "O": 3072, "r": 130},
        present=("base",),
        device="cuda",
    ),
    few("gpu wide", {"T": 512, "I": 3072, "O": 12288, "r": 8}, device="cuda"),
    few("prompt", {"T": (1, 77), "I": 1280, "O": 1280, "r": 4}, device="cuda"),
)

LOHA_APPLY = register(
    OpSpec(
        name="loha_apply",
        family="loha",
        operands=(Operand("x", side="model"), *(Operand(name) for name in FACTORS), BASE),
        shapes=_apply_shapes,
        formula=_apply_formula,
        forward=_apply_forward,
        backward=_apply_backward,
        reductions=_apply_reductions,
        cost=_apply_cost,
        bound=Bound(half=48.0, fp32=24.0),
        cases=_APPLY_CASES,
        positive=("r",),
        adjust=_cancel_products,
        doc="[base +] s * x @ ((w1_a @ w1_b) o (w2_a @ w2_b))^T",
    )
)
