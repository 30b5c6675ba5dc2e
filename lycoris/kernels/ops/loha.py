"""LoHa: a weight that is the elementwise product of two low-rank ones, and its product with x.

Source: Hyeon-Woo et al., "FedPara: Low-Rank Hadamard Product for Communication-Efficient Federated
Learning", 2022; the Tucker form (``t1``, ``t2``) is LyCORIS's.
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


def uses_khatri_rao(n_out: int, n_in: int, rank: int) -> bool:
    """Whether ``loha_apply`` runs as a rank r^2 LoRA, rather than on tiles of the weight.

    Forward and backward take seven products with r^2 columns then, against three with the whole
    weight and the work of generating it: at 4096 x 4096 they meet at rank 26.
    """
    return 3 * rank * rank * (n_out + n_in) <= n_out * n_in


# --------------------------------------------------------------------------------- plans


@lru_cache(maxsize=4096)
def weight_plan(m: int, rank: int, itemsize: int, units: int) -> Plan:
    """Tiles that generate the weight; ``block_k`` is along the rank."""
    if not units:  # simulated: one plan, so that there is one build
        return Plan(64, 64, 64)
    block_k = min(max(16, power_of_2(rank)), 32)
    stages, warps = (1 if rank <= block_k else 2), (8 if block_k > 16 or itemsize == 4 else 4)
    return Plan(min(32, max(16, power_of_2(m))), 128, block_k, warps, stages)


@lru_cache(maxsize=4096)
def dense_plan(m: int, rank: int, itemsize: int, units: int) -> Plan:
    """Tiles of a product with the generated weight; ``block_k`` is along the rank too."""
    if not units:
        return Plan(64, 64, 64, dynamic="m")
    block_k = min(max(16, power_of_2(rank)), 32)
    if itemsize == 4:
        return Plan(min(64, max(16, power_of_2(m))), 32, block_k, 4, 2, dynamic="m")
    return Plan(min(128, max(16, power_of_2(m))), 64, block_k, 8, 3, dynamic="m")


@lru_cache(maxsize=4096)
def grads_plan(
    m: int, n: int, rank: int, itemsize: int, units: int, stored: bool
) -> tuple[Plan, int]:
    """Tiles of the weight's gradient, and how many of its rows one launch takes.

    Each tile leaves partial sums of all four factors' gradients, so rows go by groups whose sums
    are small beside the weight: half of a 16-bit weight, all of it where the gradient is ``stored``
    anyway, or 16 MB.
    """
    if not units:  # two tiles a group, so that several groups are seen
        return Plan(64, 64, 64, dynamic="k"), 128
    block_k = min(max(16, power_of_2(rank)), 32)
    if itemsize == 4:  # contracted along both sides: see docs/numerics.md on fp32
        plan = Plan(32, 32, block_k, 4, 3, dynamic="k")
    else:
        # Wider tiles leave fewer partial sums; over a longer rank they would spill.
        stages = 3 if rank <= block_k else 1
        plan = Plan(128, 128 if rank <= 16 else 64, block_k, 8, stages, dynamic="k")
    tiles_m, tiles_n = _tiles(m, plan.block_m), _tiles(n, plan.block_n)
    budget = max(m * n * itemsize // (1 if stored else 2), 2**24)
    fitting = budget // (8 * rank * (tiles_n * plan.block_m + n))
    wave = tiles_m if stored else units // tiles_n
    return plan, plan.block_m * max(1, min(tiles_m, fitting, wave))


def _row_plan(rank: int, units: int) -> Plan:
    """Tiles of row-wise products: ``block_n`` is along the rank."""
    return Plan(16, max(16, power_of_2(rank)) if units else 16, 16)


def _tiles(size: int, block: int) -> int:
    return -(-size // block)


# ------------------------------------------------------------------ gradients of the weight

#: Sums of partial sums: ``block_m`` slices at a time, ``block_n`` elements a program.
_COMBINE = Plan(16, 128, 16)


def _factor_grads(
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
    wanted_a, wanted_b = (any(g is not None for g in pair) for pair in pairs)
    if not wanted_a and not wanted_b:
        return
    itemsize, units = run.policy.compute.itemsize, multiprocessors(run.device)
    plan, rows = grads_plan(m, n, rank, itemsize, units, x is None)
    tiles = (_tiles(n, plan.block_n), rows // plan.block_m)
    part_a = run.empty((tiles[0], 2, rows, rank), torch.float32)
    part_b = run.empty((tiles[1], 2, rank, n), torch.float32)
    factors = (t.w1_a, t.w1_b, t.w2_a, t.w2_b)
    for start in range(0, m, rows):
        run.launch(
            "loha", "factor_grads", grad, x, *factors, part_a, part_b, scale, start, tiles=plan
        )
        if wanted_a:
            of_rows = (None if g is None else g[start : start + rows] for g in pairs[0])
            run.launch("loha", "combine", part_a, *of_rows, tiles=_COMBINE)
    if wanted_b:
        run.launch("loha", "combine", part_b, *pairs[1], tiles=_COMBINE)


# --------------------------------------------------------------------------- loha_weight

_FACTORS = ("w1_a", "w1_b", "w2_a", "w2_b")


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
    _factor_grads(run, grad.flatten(1), None, t, scale, grads)


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


# ---------------------------------------------------------------------------- loha_apply


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


def _khatri_rao(run: Schedule, first: Tensor, second: Tensor) -> Tensor:
    n, rank = first.shape
    out = run.empty((n, rank * rank), run.policy.compute)
    tiles = _row_plan(rank, multiprocessors(run.device))
    run.launch("loha", "row_products", first, second, out, tiles=tiles)
    return out


def _split_khatri_rao(
    run: Schedule, grad: Tensor, factors: tuple[Tensor, ...], outs: tuple[Tensor | None, ...]
) -> None:
    """The gradients of two factors from that of their row-wise products."""
    tiles = _row_plan(factors[0].shape[1], multiprocessors(run.device))
    run.launch("loha", "row_products_grads", grad, *factors, *outs, tiles=tiles)


def _apply_forward(
    run: Schedule, t: SimpleNamespace, scale: float | Tensor, out: Tensor, saved: Any
) -> None:
    (tokens, n_in), (n_out, rank) = t.x.shape, t.w1_a.shape
    if not uses_khatri_rao(n_out, n_in, rank):
        transposed = (t.w1_b.t(), t.w1_a.t(), t.w2_b.t(), t.w2_a.t())
        _dense_product(run, t.x, transposed, t.base, scale, out)
        return
    down = _khatri_rao(run, t.w1_b.t(), t.w2_b.t())
    hidden = run.empty((tokens, rank * rank), run.policy.compute)
    run.matmul(t.x, down, hidden, dynamic="m")
    up = _khatri_rao(run, t.w1_a, t.w2_a)
    run.matmul(hidden, up.t(), out, base=t.base, scale=scale, dynamic="m")


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
        _factor_grads(run, grad, t.x, t, scale, grads)
        return
    width = rank * rank
    down = _khatri_rao(run, t.w1_b.t(), t.w2_b.t())
    if grads.w1_a is not None or grads.w2_a is not None:
        hidden = run.empty((tokens, width), run.policy.compute)
        run.matmul(t.x, down, hidden, dynamic="m")
        of_up = run.empty((n_out, width), torch.float32)
        run.matmul(grad.t(), hidden, of_up, scale=scale, dynamic="k")
        _split_khatri_rao(run, of_up, (t.w1_a, t.w2_a), (grads.w1_a, grads.w2_a))
    wanted_b = grads.w1_b is not None or grads.w2_b is not None
    if grads.x is None and not wanted_b:
        return
    up = _khatri_rao(run, t.w1_a, t.w2_a)
    # Scaled before it is rounded: an unscaled fp16 q overflows where s * q is finite.
    hidden_grad = run.empty((tokens, width), run.policy.compute)
    run.matmul(grad, up, hidden_grad, scale=scale, dynamic="m")
    if grads.x is not None:
        run.matmul(hidden_grad, down.t(), grads.x, dynamic="m")
    if wanted_b:
        of_down = run.empty((n_in, width), torch.float32)
        run.matmul(t.x.t(), hidden_grad, of_down, dynamic="k")
        outs = tuple(None if g is None else g.t() for g in (grads.w1_b, grads.w2_b))
        _split_khatri_rao(run, of_down, (t.w1_b.t(), t.w2_b.t()), outs)


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
    if uses_khatri_rao(n_out, n_in, rank):
        flops = 2 * tokens * rank * rank * (4 * n_in + 3 * n_out)
    else:
        flops = 6 * tokens * n_in * n_out
    return Cost(itemsize * (streams + 8 * rank * (n_in + n_out)), flops)


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


def _few(name: str, sizes: Sizes, fill: str = "random", **options: Any) -> Case:
    return Case(name, sizes, fill, **{"mixes": "few", **options})


_WEIGHT_CASES = (
    Case("base", _SIZES, present=("base",)),
    _few("plain", _SIZES),
    _few("primes", {"O": 53, "N": 61, "r": 3}),
    _few("rank 1", {"O": 59, "N": 71, "r": 1}),
    _few("rank 16", _LONG, scale=0.3),
    _few("rank 130", {"O": 40, "N": 64, "r": 130}),
    _few("groups of rows", {"O": 293, "N": 20, "r": 3}),
    _few("conv", {"O": 48, "N": (7, 3, 3), "r": 4}, present=("base",)),
    _few("tucker", _TUCKER, present=_CORES),
    _few("tucker base", _TUCKER, present=(*_CORES, "base")),
    _few("integers", _SIZES, "integers", scale=2.0, present=("base",), exact=True),
    _few("integers ragged", {"O": 53, "N": 61, "r": 3}, "integers", scale=2.0, exact=True),
    _few("integers tucker", _TUCKER, "integers", scale=2.0, present=_CORES, exact=True),
    _few("one nonzero", _LONG, "one_hot"),
    _few("cancellation", _LONG, "cancellation"),
    _few("subnormal", _SIZES, "subnormal"),
    _few("near overflow", _SIZES, "near_overflow", scale=0.0055),
    _few("zero factor", _SIZES, "zero_factor", present=("base",)),
    _few("large delta", _SIZES, "large", present=("base",)),
    _few("strided", _SIZES, layout="strided", present=("base",)),
    Case("llm", {"O": 4096, "N": 4096, "r": 16}, device="cuda"),
    Case("gpu rank 130", {"O": 3072, "N": 1280, "r": 130}, present=("base",), device="cuda"),
    _few("gpu ragged", {"O": 4099, "N": 3071, "r": 13}, device="cuda"),
    _few("gpu wide", {"O": 3072, "N": 12288, "r": 16}, device="cuda"),
    _few("gpu conv", {"O": 1280, "N": (640, 3, 3), "r": 32}, present=("base",), device="cuda"),
    _few(
        "gpu tucker",
        {"O": 640, "p": 16, "q": 16, "I": 320, "k": (3, 3)},
        present=_CORES,
        device="cuda",
    ),
)


def _cancel_products(values: dict[str, Tensor], case: Case) -> None:
    """Undoes the sign that the second factor's cancellation takes from the first's."""
    if case.fill == "cancellation":
        values["w2_b"][:, values["w2_b"].shape[1] // 2 :] *= -1


#: By Khatri-Rao products, and by tiles of the weight: the rank decides.
_BY_ROWS: Sizes = {"T": (2, 32), "I": 96, "O": 72, "r": 3}
_BY_TILES: Sizes = {"T": (2, 32), "I": 64, "O": 80, "r": 4}

_APPLY_CASES = (
    Case("base", _BY_ROWS, present=("base",)),
    _few("plain", _BY_ROWS),
    _few("primes", {"T": 37, "I": 61, "O": 83, "r": 2}),
    _few("rank 1", {"T": 91, "I": 61, "O": 43, "r": 1}),
    _few("one token", {"T": (), "I": 64, "O": 48, "r": 2}),
    _few("integers", _BY_ROWS, "integers", scale=2.0, present=("base",), exact=True),
    _few("one nonzero", {"T": 33, "I": 40, "O": 48, "r": 16}, "one_hot", present=("base",)),
    _few("cancellation", {"T": 64, "I": 128, "O": 64, "r": 3}, "cancellation"),
    _few("subnormal", _BY_ROWS, "subnormal"),
    _few("near overflow", _BY_ROWS, "near_overflow", scale=0.0055),
    _few("zero factor", _BY_ROWS, "zero_factor", present=("base",)),
    _few("no tokens", {"T": (3, 0), "I": 64, "O": 96, "r": 4}, present=("base",)),
    _few("dense", _BY_TILES, present=("base",)),
    _few("dense primes", {"T": 37, "I": 61, "O": 53, "r": 5}, present=("base",)),
    _few("dense rank 130", {"T": 40, "I": 48, "O": 40, "r": 130}, present=("base",)),
    _few("dense groups", {"T": 20, "I": 20, "O": 293, "r": 5}, present=("base",)),
    _few("dense two levels", {"T": 1153, "I": 29, "O": 23, "r": 5}, present=("base",)),
    _few("dense integers", _BY_TILES, "integers", scale=2.0, present=("base",), exact=True),
    _few("dense overflow", _BY_TILES, "near_overflow", scale=0.0055, present=("base",)),
    _few("dense strided", _BY_TILES, layout="strided", present=("base",)),
    Case("llm", {"T": (2, 4096), "I": 4096, "O": 4096, "r": 16}, device="cuda"),
    Case("llm dense", {"T": 8192, "I": 4096, "O": 4096, "r": 32}, device="cuda"),
    _few(
        "gpu ragged", {"T": 4099, "I": 3071, "O": 1283, "r": 13}, present=("base",), device="cuda"
    ),
    _few(
        "gpu rank 130",
        {"T": 1021, "I": 1280, "O": 3072, "r": 130},
        present=("base",),
        device="cuda",
    ),
    _few("gpu wide", {"T": 512, "I": 3072, "O": 12288, "r": 8}, device="cuda"),
    _few("prompt", {"T": (1, 77), "I": 1280, "O": 1280, "r": 4}, device="cuda"),
)

_BASE = Operand("base", role="wide", optional=True, additive=True, side="data")

LOHA_WEIGHT = register(
    OpSpec(
        name="loha_weight",
        family="loha",
        operands=(
            *(Operand(name) for name in _FACTORS),
            Operand("t1", optional=True),
            Operand("t2", optional=True),
            _BASE,
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

LOHA_APPLY = register(
    OpSpec(
        name="loha_apply",
        family="loha",
        operands=(Operand("x", side="data"), *(Operand(name) for name in _FACTORS), _BASE),
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
