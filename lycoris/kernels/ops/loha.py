"""LoHa: a weight that is the elementwise product of two low-rank ones.

Source: Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated
Learning", 2022; the Tucker form (``t1``, ``t2``) is LyCORIS's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..plan import Plan, multiprocessors, power_of_2, tile_count
from ..schedule import Schedule
from ..spec import Bound, Case, Cost, Operand, OpSpec, Round, Sizes, register

# --------------------------------------------------------------------------------- plans


@lru_cache(maxsize=4096)
def weight_plan(m: int, rank: int, itemsize: int, units: int) -> Plan:
    """Tiles that generate the weight; ``block_k`` is along the rank."""
    if not units:  # simulated: one plan, so that there is one build
        return Plan(64, 64, 64)
    block_k = 16 if itemsize == 4 else min(max(16, power_of_2(rank)), 32)  # 32: sm_100 spills
    stages, warps = (1 if rank <= block_k else 2), (8 if block_k > 16 or itemsize == 4 else 4)
    return Plan(min(32, max(16, power_of_2(m))), 128, block_k, warps, stages)


@lru_cache(maxsize=4096)
def grads_plan(
    m: int, n: int, rank: int, itemsize: int, units: int, stored: int
) -> tuple[Plan, int]:
    """Tiles of the weight's gradient, and how many of its rows one launch takes.

    Each tile leaves partial sums of two factors' gradients and each strip of tiles (``splits`` of
    them along N) of the other two's, so rows go by groups whose sums are small beside the weight:
    half of a 16-bit weight, all of it where the gradient is ``stored`` anyway (in elements of so
    many bytes; 0 where it is made of tokens), or 16 MB.
    """
    if not units:  # two tiles a group and a strip, so that several are seen
        plan = Plan(64, 64, 64, dynamic="k")
    else:
        block_k = min(max(16, power_of_2(rank)), 32)
        if itemsize == 4:  # contracted along both sides: see docs/numerics.md on fp32
            plan = Plan(32, 32, block_k, 4, 3, dynamic="k")
        else:
            # Four warps where a gradient is read as it is, and one step takes the rank: a longer
            # one would spill, and three tiles of an fp32 gradient are too many.
            streamed = rank <= block_k and 0 < stored <= 2
            stages = 1 if rank > block_k else 2 if stored and not streamed else 3
            rows = 64 if streamed and rank > 16 else 128
            plan = Plan(rows, 64, block_k, 4 if streamed else 8, stages, dynamic="k")
    tiles_m, tiles_n = tile_count(m, plan.block_m), tile_count(n, plan.block_n)
    strip = 1
    if stored and rank <= plan.block_k and itemsize < 4:  # else registers would not hold the sums
        # The longest that keeps the device as busy; of 4 tiles a chain is within CHUNK.
        rounds = {s: tile_count(tiles_m * tile_count(tiles_n, s), max(1, units)) for s in (4, 2, 1)}
        strip = min(rounds, key=lambda s: s * rounds[s]) if units else 2
    plan = replace(plan, splits=tile_count(tiles_n, strip))
    if not units:
        return plan, 128
    budget = max(m * n * itemsize // (1 if stored else 2), 2**24)
    fitting = budget // (8 * rank * (plan.splits * plan.block_m + n))
    wave = tiles_m if stored else units // tiles_n
    return plan, plan.block_m * max(1, min(tiles_m, fitting, wave))


# ------------------------------------------------------------------ gradients of the weight


def factor_grads(
    run: Schedule,
    grad: Tensor,
    x: Tensor | None,
    t: SimpleNamespace,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    """The four factors' gradients from the weight's, which is ``grad``, or grad^T x by tiles."""
    (m, rank), n = t.w1_a.shape, t.w1_b.shape[1]
    pairs = (grads.w1_a, grads.w2_a), (grads.w1_b, grads.w2_b)
    if all(g is None for pair in pairs for g in pair):
        return
    itemsize, units = run.policy.compute.itemsize, multiprocessors(run.device)
    stored = 0 if x is not None else grad.element_size()
    plan, rows = grads_plan(m, n, rank, itemsize, units, stored)
    part_a = run.empty((2, plan.splits, rows, rank), torch.float32)
    part_b = run.empty((2, rows // plan.block_m, rank, n), torch.float32)
    factors = (t.w1_a, t.w1_b, t.w2_a, t.w2_b)
    for start in range(0, m, rows):
        run.launch(
            "loha", "factor_grads", grad, x, *factors, part_a, part_b, scale, start, tiles=plan
        )
        of_rows = (None if g is None else g[start : start + rows] for g in pairs[0])
        _add_up(run, part_a, *of_rows)
    _add_up(run, part_b, *pairs[1])


def _add_up(run: Schedule, parts: Tensor, *halves: Tensor | None) -> None:
    """The gradients of both halves that are wanted, from ``parts`` (2, tiles, ...)."""
    run.add_up(*((p, g) for p, g in zip(parts, halves, strict=True) if g is not None))


# --------------------------------------------------------------------------- loha_weight

FACTORS = ("w1_a", "w1_b", "w2_a", "w2_b")


def _weight_shapes(present: frozenset[str]) -> Mapping[str, str]:
    tucker = present & {"t1", "t2"}
    if len(tucker) == 1:
        (given,) = tucker
        missing = "t2" if given == "t1" else "t1"
        raise ValueError(f"loha_weight: {given} is given and {missing} is None; expected both")
    if tucker:
        return {
            "w1_a": "p O",
            "t1": "p q k*",
            "w1_b": "q I",
            "w2_a": "p O",
            "t2": "p q k*",
            "w2_b": "q I",
            "base": "O I k*",
            "out": "O I k*",
        }
    a, b = "O r", "r N+"
    return {"w1_a": a, "w1_b": b, "w2_a": a, "w2_b": b, "base": "O N+", "out": "O N+"}


def _fold_core(t: SimpleNamespace) -> Mapping[str, Tensor | None]:
    # Far smaller than the weight: (p, I * k) in fp32, so that nothing rounds before the output.
    folded: dict[str, Tensor | None] = {"t1": None, "t2": None}
    for half in ("1", "2"):
        a, core, b = (getattr(t, name.format(half)) for name in ("w{}_a", "t{}", "w{}_b"))
        folded[f"w{half}_a"] = a.T.contiguous()
        folded[f"w{half}_b"] = torch.einsum("pqk,qi->pik", core, b).flatten(1)
    return folded


def _weight_formula(t: SimpleNamespace, scale: float | Tensor, rnd: Round) -> Tensor:
    if t.t1 is None:
        # Only their gradients are rounded, s * g o W2 and s * g o W1: they enter products.
        first = rnd(t.w1_a @ t.w1_b, forward=False)
        second = rnd(t.w2_a @ t.w2_b, forward=False)
        out = scale * (first * second)
    else:
        f: dict[str, Any] = dict(_fold_core(t))
        out = scale * ((f["w1_a"] @ f["w1_b"]) * (f["w2_a"] @ f["w2_b"]))
        out = out.reshape(t.w1_a.shape[1], t.w1_b.shape[1], t.t1.shape[2])
    return out if t.base is None else t.base + out


def _weight_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    m, rank = t.w1_a.shape
    tiles = weight_plan(m, rank, run.policy.compute.itemsize, multiprocessors(run.device))
    base = None if t.base is None else t.base.flatten(1)
    factors = (t.w1_a, t.w1_b, t.w2_a, t.w2_b)
    run.launch("loha", "weight", *factors, base, scale, out.flatten(1), tiles=tiles)


def _weight_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    factor_grads(run, grad.flatten(1), None, t, scale, grads)


def _weight_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    if "N" in d:
        (a, b), rank = (d["N"], d["O"]), d["r"]
        sums = {"w1_a": a + rank, "w1_b": b + rank, "w2_a": a + rank, "w2_b": b + rank}
        return {"out": rank, **sums}
    n_in, n_out, p, q, k = d["I"], d["O"], d["p"], d["q"], d["k"]
    a, b, core = n_in * k + p + q, n_out + p * k + q, n_out + n_in + p
    sums = {"w1_a": a, "w1_b": b, "w2_a": a, "w2_b": b, "t1": core, "t2": core}
    return {"out": p + q, **sums}


def _weight_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    width, rank = (d["N"], d["r"]) if "N" in d else (d["I"] * d["k"], d["p"])
    if "N" in d:
        factors = 2 * rank * (d["O"] + width)
    else:
        factors = 2 * (d["O"] * rank + rank * d["q"] * d["k"] + d["q"] * d["I"])
    return Cost(itemsize * (2 * d["O"] * width + 3 * factors), 16 * d["O"] * width * rank)


# --------------------------------------------------------------------------------- specs

_SIZES: Sizes = {"O": 80, "N": 64, "r": 4}
_LONG: Sizes = {"O": 48, "N": 64, "r": 16}
_TUCKER: Sizes = {"O": 40, "p": 5, "q": 3, "I": 24, "k": (3, 3)}
_CORES = ("t1", "t2")


def _share_shift(values: dict[str, Tensor], case: Case) -> None:
    """Both halves carry a part of a tiny output, so that neither is subnormal by itself."""
    if case.fill == "subnormal" and "x" not in values:
        large, small = values["w2_a"].abs().max(), values["w1_b"].abs().max()
        shift = torch.exp2(torch.log2(small / large).round())
        values["w2_a"] *= shift
        values["w1_b"] /= shift


def few(name: str, sizes: Sizes, fill: str = "random", **options: Any) -> Case:
    return Case(name, sizes, fill, **{"mixes": "few", **options})


_WEIGHT_CASES = (
    Case("base", _SIZES, present=("base",)),
    few("plain", _SIZES),
    few("primes", {"O": 53, "N": 61, "r": 3}),
    few("rank 1", {"O": 59, "N": 71, "r": 1}),
    few("rank 16", _LONG, scale=0.3),
    few("rank 130", {"O": 40, "N": 64, "r": 130}),
    few("groups of rows", {"O": 293, "N": 20, "r": 3}),
    few("conv", {"O": 48, "N": (7, 3, 3), "r": 4}, present=("base",)),
    few("tucker", _TUCKER, present=_CORES),
    few("tucker base", _TUCKER, present=(*_CORES, "base")),
    few("integers", _SIZES, "integers", scale=2.0, present=("base",), exact=True),
    few("integers ragged", {"O": 53, "N": 61, "r": 3}, "integers", scale=2.0, exact=True),
    few("integers tucker", _TUCKER, "integers", scale=2.0, present=_CORES, exact=True),
    few("one nonzero", _LONG, "one_hot"),
    few("cancellation", _LONG, "cancellation"),
    few("subnormal", _SIZES, "subnormal"),
    few("near overflow", _SIZES, "near_overflow", scale=0.0055),
    few("zero factor", _SIZES, "zero_factor", present=("base",)),
    few("large delta", _SIZES, "large", present=("base",)),
    few("strided", _SIZES, layout="strided", present=("base",)),
    Case("llm", {"O": 4096, "N": 4096, "r": 16}, device="cuda"),
    Case("gpu rank 130", {"O": 3072, "N": 1280, "r": 130}, present=("base",), device="cuda"),
    few("gpu ragged", {"O": 4099, "N": 3071, "r": 13}, device="cuda"),
    few("gpu wide", {"O": 3072, "N": 12288, "r": 16}, present=("base",), device="cuda"),
    few("gpu conv", {"O": 1280, "N": (640, 3, 3), "r": 32}, present=("base",), device="cuda"),
    few(
        "gpu tucker",
        {"O": 640, "p": 16, "q": 16, "I": 320, "k": (3, 3)},
        present=_CORES,
        device="cuda",
    ),
)


BASE = Operand("base", role="wide", optional=True, additive=True, side="model")

LOHA_WEIGHT = register(
    OpSpec(
        name="loha_weight",
        family="loha",
        operands=(
            *(Operand(name) for name in FACTORS),
            Operand("t1", optional=True),
            Operand("t2", optional=True),
            BASE,
        ),
        shapes=_weight_shapes,
        formula=_weight_formula,
        forward=_weight_forward,
        backward=_weight_backward,
        reductions=_weight_reductions,
        cost=_weight_cost,
        bound=Bound(half=16.0, fp32=24.0),
        cases=_WEIGHT_CASES,
        fold=_fold_core,
        fold_with="t1",
        positive=("r", "p", "q"),
        adjust=_share_shift,
        doc="[base +] s * (w1_a @ w1_b) o (w2_a @ w2_b); Tucker: each half summed over t[p,q,k]",
    )
)
