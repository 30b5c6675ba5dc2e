"""LoKr: a weight that is a Kronecker product; see lokr_apply.py for its product with x.

Either half may be factored further: w1 as a pair, w2 as a pair or a Tucker triple. Rows of the
weight are (a, c), its columns (b, d, k);
Source: Yeh et al., "Navigating Text-To-Image Customization: From LyCORIS Fine-Tuning to Model
Evaluation", 2023.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..plan import CHUNK, Plan, multiprocessors, power_of_2
from ..schedule import Schedule
from ..shapes import Groups
from ..spec import Bound, Cost, Operand, OpSpec, Round, register
from .lokr_cases import WEIGHT_CASES

Scale = float | Tensor

# -------------------------------------------------------------------------------------- shapes


def half_shapes(op: str, present: Set[str], spatial: str) -> dict[str, str]:
    """The shapes of both halves; ``spatial`` is what may follow w2's dimensions.

    Raises:
        ValueError: a half is missing, incomplete, or given twice.
    """
    w1 = {"w1": "a b"} if "w1" in present else {"w1_a": "a p", "w1_b": "p b"}
    if "w2" in present:
        w2 = {"w2": f"c d {spatial}"}
    elif "t2" in present:
        w2 = {"w2_a": "r c", "w2_b": "r d", "t2": f"r r {spatial}"}
    else:
        w2 = {"w2_a": "c r", "w2_b": f"r d {spatial}"}
    given = sorted(present - {"base"})
    if set(given) != {*w1, *w2}:
        raise ValueError(
            f"{op}: got {', '.join(given) or 'no half'}; expected w1, or w1_a and w1_b; and w2, "
            "or w2_a and w2_b, or w2_a, w2_b and t2"
        )
    return w1 | w2


def _weight_shapes(present: frozenset[str]) -> Mapping[str, str]:
    return {**half_shapes("lokr_weight", present, "k*"), "base": "O I k*", "out": "O I k*"}


def whole(groups: Groups) -> Groups:
    """The weight's own sizes; x, bound before, must agree."""
    (a,), (b,), (c,), (d,) = (groups[s] for s in "abcd")
    if groups.get("I", (b * d,)) != (b * d,):
        raise ValueError(
            f"lokr_apply: x has {groups['I'][0]} columns; expected {b} * {d} = {b * d}, the "
            "columns of w1 times those of w2"
        )
    return {"O": (a * c,), "I": (b * d,)}


def fold_core(t: SimpleNamespace) -> dict[str, Tensor | None]:
    # Far smaller than w2, let alone the weight: (r, d * k) in fp32, so that nothing rounds.
    core = torch.einsum("pq...,qd->pd...", t.t2, t.w2_b).reshape(t.w2_b.shape[0], -1)
    return {"w2_a": t.w2_a.t().contiguous(), "w2_b": core, "t2": None}


def ceil_div(size: int, block: int) -> int:
    return -(-size // block)


# ---------------------------------------------------------------------------------- lokr_weight


def _weight_formula(t: SimpleNamespace, scale: Scale, rnd: Round) -> Tensor:
    w1 = t.w1 if t.w1 is not None else t.w1_a @ t.w1_b
    spatial = (t.w2 if t.w2 is not None else t.w2_b if t.t2 is None else t.t2).shape[2:]
    d = (t.w2 if t.w2 is not None else t.w2_b).shape[1]
    if t.t2 is not None:
        t = SimpleNamespace(**t.__dict__ | fold_core(t))
    w2 = t.w2.flatten(1) if t.w2 is not None else t.w2_a @ t.w2_b.flatten(1)
    out = scale * (w1[:, None, :, None] * w2[None, :, None, :])
    out = out.reshape(w1.shape[0] * w2.shape[0], w1.shape[1] * d, *spatial)
    return out if t.base is None else t.base + out


def sides(t: SimpleNamespace) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Both halves as kernels take them: dense and None, or a pair; two-dimensional."""
    w1 = (t.w1, None) if t.w1 is not None else (t.w1_a, t.w1_b)
    w2 = (t.w2.flatten(1), None) if t.w2 is not None else (t.w2_a, t.w2_b.flatten(1))
    return (*w1, *w2)


def sizes_of(
    w1: Tensor, w1_b: Tensor | None, w2: Tensor, w2_b: Tensor | None
) -> tuple[int, int, int, int]:
    """a, b, c and d (with k) of halves as kernels take them."""
    b = w1.shape[1] if w1_b is None else w1_b.shape[1]
    d = w2.shape[1] if w2_b is None else w2_b.shape[1]
    return w1.shape[0], b, w2.shape[0], d


def _weight_plan(pairs: int, c: int, d: int, device: torch.device, *, programs: int = 8) -> Plan:
    """Tiles of w2 (M, N) that a program multiplies by its share of w1's elements, K at once.

    Few rows of many neighbouring blocks: whole cache lines, and sums that stay within a warp. Each
    share of the backward pass costs an fp32 copy of w2's gradient, and none may sum more than
    ``CHUNK`` terms. ``programs``: about how many a multiprocessor, all of which run at once.
    """
    units = multiprocessors(device)
    if not units:
        return Plan(4, 32, 8, splits=2)  # one plan, so that there is one build
    block_n = min(256, max(16, power_of_2(d)))
    block_k = min(power_of_2(pairs), 1024 // block_n)
    block_m = min(power_of_2(c), max(2, 1024 // (block_n * block_k)))
    wanted = programs * units // (ceil_div(c, block_m) * ceil_div(d, block_n))
    steps = ceil_div(pairs, block_k)
    share = ceil_div(steps, min(steps, max(1, wanted, ceil_div(pairs, CHUNK))))
    return Plan(block_m, block_n, block_k, 4, 1, ceil_div(steps, share))


def _weight_forward(
    run: Schedule, t: SimpleNamespace, scale: Scale, out: Tensor, saved: Any
) -> None:
    halves = sides(t)
    a, b, c, d = sizes_of(*halves)
    # A tile of a pair is dear: few programs make the same one.
    plan = _weight_plan(a * b, c, d, run.device, programs=8 if halves[3] is None else 4)
    base = None if t.base is None else t.base.flatten(1)
    run.launch("lokr", "kron", *halves, base, scale, out.flatten(1), tiles=plan)


def _weight_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: Scale,
    grads: SimpleNamespace,
) -> None:
    halves = sides(t)
    a, b, c, d = sizes_of(*halves)
    first = any(g is not None for g in (grads.w1, grads.w1_a, grads.w1_b))
    second = any(g is not None for g in (grads.w2, grads.w2_a, grads.w2_b))
    if not (first or second):
        return
    plan = _weight_plan(a * b, c, d, run.device)
    tiles = ceil_div(c, plan.block_m) * ceil_div(d, plan.block_n)
    w1_parts = run.empty((tiles, a, b), torch.float32) if first else None
    w2_parts = run.empty((plan.splits, c, d), torch.float32) if second else None
    args = (grad.flatten(1), *halves, scale, w1_parts, w2_parts)
    run.launch("lokr", "kron_grad", *args, tiles=plan)
    finish(run, t, grads, w1_parts, w2_parts)


def finish(
    run: Schedule,
    t: SimpleNamespace,
    grads: SimpleNamespace,
    w1_parts: Tensor | None,
    w2_parts: Tensor | None = None,
) -> None:
    """The gradients of the halves, or of their pairs, from fp32 partial sums of the halves'."""
    sums: list[tuple[Tensor, Tensor]] = []
    totals: dict[str, Tensor] = {}
    for half, parts in (("w1", w1_parts), ("w2", w2_parts)):
        if parts is None:
            continue
        total = getattr(grads, half)
        if total is None:  # of a pair
            one = parts.shape[0] == 1
            total = totals[half] = parts[0] if one else run.empty(parts.shape[1:], torch.float32)
            if one:
                continue
        sums.append((parts, total.flatten(1)))
    run.add_up(*sums)
    for half, total in totals.items():
        left, right = getattr(grads, f"{half}_a"), getattr(grads, f"{half}_b")
        # The half's gradient is declared unrounded: true fp32, on what the policy's cast left.
        if left is not None:
            other = getattr(t, f"{half}_b").flatten(1).to(run.policy.compute)
            run.matmul(total, other.t(), left, exact=True)
        if right is not None:
            other = getattr(t, f"{half}_a").to(run.policy.compute)
            run.matmul(total.t(), other, right.flatten(1).t(), exact=True)


def _weight_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    w1, w2, p, r = d["c"] * d["d"] * d["k"], d["a"] * d["b"], d.get("p", 0), d.get("r", 0)
    return {
        "out": max(1, p + r),
        "w1": w1 + r,
        "w1_a": w1 + r + d["b"],
        "w1_b": w1 + r + d["a"],
        "w2": w2 + p,
        "w2_a": w2 + p + r + d["d"] * d["k"],
        "w2_b": w2 + p + r + d["c"],
        "t2": w2 + p + d["c"] + d["d"],
    }


def factors(d: Mapping[str, int]) -> int:
    """Elements of both halves as they are given."""
    width = d["d"] * d.get("k", 1)
    first = d["p"] * (d["a"] + d["b"]) if "p" in d else d["a"] * d["b"]
    second = d["r"] * (d["c"] + width) if "r" in d else d["c"] * width
    return first + second


def _weight_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    size = d["O"] * d["I"] * d["k"]
    return Cost(itemsize * (2 * size + 3 * factors(d)), 6 * size)


# --------------------------------------------------------------------------------------- specs

SIZES = "O = a * c and I = b * d"
HALVES = (
    Operand("w1", optional=True),
    Operand("w1_a", optional=True),
    Operand("w1_b", optional=True),
    Operand("w2", optional=True),
    Operand("w2_a", optional=True),
    Operand("w2_b", optional=True),
    Operand("t2", optional=True),
    Operand("base", role="wide", optional=True, additive=True, side="model"),
)

LOKR_WEIGHT = register(
    OpSpec(
        name="lokr_weight",
        family="lokr",
        operands=HALVES,
        shapes=_weight_shapes,
        formula=_weight_formula,
        forward=_weight_forward,
        backward=_weight_backward,
        reductions=_weight_reductions,
        cost=_weight_cost,
        bound=Bound(half=16.0, fp32=10.0),
        cases=WEIGHT_CASES,
        fold=fold_core,
        fold_with="t2",
        derive=whole,
        positive=("p", "r"),
        doc="[base +] s * kron(w1, w2)",
        conditions=SIZES,
    )
)
