"""LoKr applied to x: the Kronecker product is two products with its halves, and is never built.

Tokens are rows of x, which is (T * b, d) as it lies, and the output (T * a, c). Which half x meets
first is :func:`w2_first`'s rule; see lokr.py for the halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..plan import CHUNK, Plan, multiprocessors, power_of_2
from ..schedule import Schedule
from ..spec import Bound, Cost, Operand, OpSpec, Round, register
from .lokr import (
    HALVES,
    SIZES,
    Scale,
    ceil_div,
    factors,
    finish,
    fold_core,
    half_shapes,
    sides,
    sizes_of,
    whole,
)
from .lokr_cases import APPLY_CASES

#: The largest half, either way, that the one-kernel form takes.
SMALL = 64
#: Tiles whose gradients a program of that form may sum in one chain of matrix products, which
#: truncates: 2^-16 of the sum, where the operands' own rounding leaves 2^-11 at least.
_LONGEST = 128


def _apply_shapes(present: frozenset[str]) -> Mapping[str, str]:
    halves = half_shapes("lokr_apply", present, "1*")
    return {"x": "... I", **halves, "base": "... O", "out": "... O"}


def w2_first(a: int, b: int, c: int, d: int) -> bool:
    """Whether x meets a dense w2 before w1.

    True where it takes fewer multiplications, I * c + O * b against I * a + O * d, or as many, and
    where all four sizes are at most ``SMALL``: one kernel then does both. A factored w2 comes in
    two steps with w1 between them, at its rank, and is not asked about.
    """
    if max(a, b, c, d) <= SMALL:
        return True
    return b * d * c + a * c * b <= b * d * a + a * c * d


def _apply_formula(t: SimpleNamespace, scale: Scale, rnd: Round) -> Tensor:
    # With a core nothing rounds: it is folded in fp32, and so is all that follows.
    mark: Round = (lambda value, **_: value) if t.t2 is not None else rnd
    w1 = t.w1 if t.w1 is not None else mark(t.w1_a @ t.w1_b, backward=False)
    x = t.x.unflatten(1, (w1.shape[1], t.x.shape[1] // w1.shape[1]))
    if t.w2 is None:
        pair = t if t.t2 is None else SimpleNamespace(**fold_core(t))
        out = mark(w1 @ mark(x @ pair.w2_b.T)) @ pair.w2_a.T
    elif w2_first(*w1.shape, *t.w2.shape):
        out = w1 @ mark(x @ t.w2.T)
    else:
        out = mark(w1 @ x) @ t.w2.T
    out = scale * out.flatten(1)
    return out if t.base is None else t.base + out


def _mix_plan(n: int, itemsize: int, device: torch.device) -> Plan:
    """Tiles of ``mix``: rows of the output (tokens times rows of w1) by n, over the input's rows.

    Where a tile holds whole tokens, ``splits`` programs share them all.
    """
    units = multiprocessors(device)
    if not units:
        return Plan(32, 32, 32, splits=2, dynamic="m")
    wide = itemsize == 4
    least, most = (32, 64) if wide else (16, 128)  # 32 x 16 in fp32 would spill
    block_m, block_n = 32 if wide else 64, min(most, max(least, power_of_2(n)))
    return Plan(block_m, block_n, 32 if wide else 64, 4, 3, 4 * units, dynamic="m")


def _mix(
    run: Schedule,
    value: Tensor,
    w1: Tensor,
    w1_b: Tensor | None,
    scale: Scale,
    out: Tensor,
    base: Tensor | None = None,
) -> None:
    """out (T * a, n) = [base +] scale * w1 (a, b) @ value (T * b, n), token by token."""
    plan = _mix_plan(out.shape[1], run.policy.compute.itemsize, run.device)
    run.launch("lokr_mix", "mix", value, w1, w1_b, base, scale, out, tiles=plan)


def _mix_grad(
    run: Schedule,
    grad: Tensor,
    value: Tensor,
    scale: Scale,
    t: SimpleNamespace,
    grads: SimpleNamespace,
    shape: tuple[int, int],
) -> None:
    """w1's gradient, scale * sum over tokens of grad (T * a, n) @ value (T * b, n)^T."""
    (a, b), n = shape, grad.shape[1]
    tokens, units = value.shape[0] // b, multiprocessors(run.device)
    if units:
        block_m, block_n = (min(64, max(16, power_of_2(size))) for size in shape)
        wide = run.policy.compute.itemsize == 4
        # A longer tile where it doesn't cross a token, and two of them fit.
        block_k = 32 if wide else 256 if n % 256 == 0 and block_m + block_n <= 64 else 64
        wanted = ceil_div(4 * units, ceil_div(a, block_m) * ceil_div(b, block_n))
        # A split of few sums isn't worth its part; one of very many would lose accuracy.
        length = tokens * n
        splits = max(min(wanted, ceil_div(length, CHUNK)), ceil_div(length, block_k * CHUNK))
        warps = 2 if block_m == block_n == 16 and block_k == 256 else 4
        warps = 8 if wide and block_m == block_n == 64 else warps
        plan = Plan(block_m, block_n, block_k, warps, 3, min(tokens, splits), "k")
    else:
        plan = Plan(32, 32, 32, splits=2, dynamic="k")
    parts = run.empty((plan.splits, a, b), torch.float32)
    run.launch("lokr_mix", "mix_grad", grad, value, scale, parts, tiles=plan)
    finish(run, t, grads, parts)


def _fused_plan(
    sizes: tuple[int, int, int, int],
    tokens: int,
    itemsize: int,
    device: torch.device,
    *,
    backward: bool,
) -> Plan | None:
    """Tiles of the one-kernel form: as many whole tokens as fit; None where it isn't to be had.

    M: rows of w1's side, tokens times a or b; N: c; K: d. At most ``splits`` programs share the
    tiles: the same number up to so many tokens, then twice that, so that builds are few.
    """
    _, _, c, d = sizes
    if max(sizes) > SMALL or itemsize == 4:  # in fp32 it would spill
        return None
    # Before Hopper, matrix instructions take their operands from registers: it would spill.
    tight = backward and device.type == "cuda" and max(sizes) > SMALL // 2
    if tight and torch.cuda.get_device_capability(device) < (9, 0):
        return None
    block_n, block_k = (max(16, power_of_2(size)) for size in (c, d))
    # As many programs as a multiprocessor holds at once: each has partial sums of its own.
    splits = (2 if backward else 8) * multiprocessors(device) or 2
    if backward and device.type == "cuda":
        tiles = ceil_div(tokens, SMALL // max(sizes[:2]))
        while splits * _LONGEST < tiles:
            splits *= 2
    return Plan(SMALL, block_n, block_k, 4, 3, splits, "m")


def _apply_forward(
    run: Schedule, t: SimpleNamespace, scale: Scale, out: Tensor, saved: Any
) -> None:
    w1, w1_b, w2, w2_b = sides(t)
    a, b, c, d = sizes_of(w1, w1_b, w2, w2_b)
    tokens, compute = t.x.shape[0], run.policy.compute
    x, y = t.x.view(-1, d), out.view(-1, c)
    base = None if t.base is None else t.base.view(-1, c)
    if w2_b is not None:
        hidden = run.empty((tokens * b, w2_b.shape[0]), compute)
        mixed = run.empty((tokens * a, w2_b.shape[0]), compute)
        run.matmul(x, w2_b.t(), hidden, dynamic="m")
        _mix(run, hidden, w1, w1_b, 1.0, mixed)
        run.matmul(mixed, w2.t(), y, base=base, scale=scale, dynamic="m")
        return
    plan = _fused_plan((a, b, c, d), tokens, compute.itemsize, run.device, backward=False)
    if plan is not None:
        run.launch("lokr_fused", "fused", x, w1, w1_b, w2, base, scale, y, tiles=plan)
    elif w2_first(a, b, c, d):
        hidden = run.empty((tokens * b, c), compute)
        run.matmul(x, w2.t(), hidden, dynamic="m")
        _mix(run, hidden, w1, w1_b, scale, y, base)
    else:
        mixed = run.empty((tokens * a, d), compute)
        _mix(run, x, w1, w1_b, 1.0, mixed)
        run.matmul(mixed, w2.t(), y, base=base, scale=scale, dynamic="m")


def _apply_backward(
    run: Schedule,
    grad: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: Scale,
    grads: SimpleNamespace,
) -> None:
    halves = sides(t)
    a, b, c, d = sizes_of(*halves)
    itemsize = run.policy.compute.itemsize
    plan = _fused_plan((a, b, c, d), t.x.shape[0], itemsize, run.device, backward=True)
    views = (grad.view(-1, c), t.x.view(-1, d), None if grads.x is None else grads.x.view(-1, d))
    if halves[3] is not None:
        _backward_by_rank(run, *views, t, scale, grads)
    elif plan is not None:
        _backward_fused(run, *views, t, scale, grads, plan)
    elif w2_first(a, b, c, d):
        _backward_w2_first(run, *views, t, scale, grads)
    else:
        _backward_w1_first(run, *views, t, scale, grads)


def _wants_w1(grads: SimpleNamespace) -> bool:
    return any(g is not None for g in (grads.w1, grads.w1_a, grads.w1_b))


def _transposed(w1: Tensor, w1_b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return (w1.t(), None) if w1_b is None else (w1_b.t(), w1.t())


def _backward_by_rank(
    run: Schedule, g: Tensor, x: Tensor, gx: Tensor | None, t: Any, scale: Scale, grads: Any
) -> None:
    """Through a factored w2: h = x w2_b^T, m = w1 h, y = s m w2_a^T, and back."""
    w1, w1_b, w2_a, w2_b = sides(t)
    assert w2_b is not None
    a, b = sizes_of(w1, w1_b, w2_a, w2_b)[:2]
    tokens, compute, rank = x.shape[0] // b, run.policy.compute, w2_b.shape[0]
    hidden: Tensor | None = None
    if grads.w2_a is not None or _wants_w1(grads):
        hidden = run.empty((tokens * b, rank), compute)
        run.matmul(x, w2_b.t(), hidden, dynamic="m")
    if hidden is not None and grads.w2_a is not None:
        mixed = run.empty((tokens * a, rank), compute)
        _mix(run, hidden, w1, w1_b, 1.0, mixed)
        run.matmul(g.t(), mixed, grads.w2_a, scale=scale, dynamic="k")
    if gx is None and grads.w2_b is None and not _wants_w1(grads):
        return
    # Scaled before it is rounded: an unscaled fp16 value overflows where the scaled one doesn't.
    mixed_grad = run.empty((tokens * a, rank), compute)
    run.matmul(g, w2_a, mixed_grad, scale=scale, dynamic="m")
    if hidden is not None and _wants_w1(grads):
        _mix_grad(run, mixed_grad, hidden, 1.0, t, grads, (a, b))
    if gx is None and grads.w2_b is None:
        return
    hidden_grad = run.empty((tokens * b, rank), compute)
    _mix(run, mixed_grad, *_transposed(w1, w1_b), 1.0, hidden_grad)
    if gx is not None:
        run.matmul(hidden_grad, w2_b, gx, dynamic="m")
    if grads.w2_b is not None:
        run.matmul(x.t(), hidden_grad, grads.w2_b.flatten(1).t(), dynamic="k")


def _backward_w2_first(
    run: Schedule, g: Tensor, x: Tensor, gx: Tensor | None, t: Any, scale: Scale, grads: Any
) -> None:
    """z = x w2^T, y = s w1 z, and back; z and its gradient in the compute dtype."""
    w1, w1_b, w2, _ = sides(t)
    a, b, c, _ = sizes_of(w1, w1_b, w2, None)
    compute = run.policy.compute
    if _wants_w1(grads):
        hidden = run.empty((x.shape[0], c), compute)
        run.matmul(x, w2.t(), hidden, dynamic="m")
        _mix_grad(run, g, hidden, scale, t, grads, (a, b))
    if gx is None and grads.w2 is None:
        return
    hidden_grad = run.empty((x.shape[0], c), compute)
    _mix(run, g, *_transposed(w1, w1_b), scale, hidden_grad)
    if gx is not None:
        run.matmul(hidden_grad, w2, gx, dynamic="m")
    if grads.w2 is not None:
        run.matmul(x.t(), hidden_grad, grads.w2.t(), dynamic="k")


def _backward_w1_first(
    run: Schedule, g: Tensor, x: Tensor, gx: Tensor | None, t: Any, scale: Scale, grads: Any
) -> None:
    """u = w1 x, y = s u w2^T, and back; u and its gradient in the compute dtype."""
    w1, w1_b, w2, _ = sides(t)
    a, b, _, d = sizes_of(w1, w1_b, w2, None)
    compute = run.policy.compute
    if grads.w2 is not None:
        mixed = run.empty((g.shape[0], d), compute)
        _mix(run, x, w1, w1_b, 1.0, mixed)
        run.matmul(g.t(), mixed, grads.w2, scale=scale, dynamic="k")
    if gx is None and not _wants_w1(grads):
        return
    mixed_grad = run.empty((g.shape[0], d), compute)
    run.matmul(g, w2, mixed_grad, scale=scale, dynamic="m")
    if gx is not None:
        _mix(run, mixed_grad, *_transposed(w1, w1_b), 1.0, gx)
    if _wants_w1(grads):
        _mix_grad(run, mixed_grad, x, 1.0, t, grads, (a, b))


def _backward_fused(
    run: Schedule,
    g: Tensor,
    x: Tensor,
    gx: Tensor | None,
    t: Any,
    scale: Scale,
    grads: Any,
    plan: Plan,
) -> None:
    """Everything from one pass over x and the incoming gradient."""
    w1, w1_b, w2, _ = sides(t)
    a, b, c, d = sizes_of(w1, w1_b, w2, None)
    group = SMALL // max(a, b)  # tokens of a tile
    programs = min(plan.splits, ceil_div(x.shape[0] // b, group))
    w1_parts = w2_parts = None
    if _wants_w1(grads):  # every token of a tile has a sum of its own
        w1_parts = run.empty((programs * group, a, b), torch.float32)
    if grads.w2 is not None:
        w2_parts = run.empty((programs, c, d), torch.float32)
    if gx is None and w1_parts is None and w2_parts is None:
        return
    args = (g, x, *_transposed(w1, w1_b), w2, scale, gx, w1_parts, w2_parts)
    run.launch("lokr_fused", "fused_grad", *args, tiles=plan)
    finish(run, t, grads, w1_parts, w2_parts)


def _apply_reductions(d: Mapping[str, int]) -> Mapping[str, int]:
    n, o, tokens, p, r = d["I"], d["O"], d["T"], d.get("p", 0), d.get("r", 0)
    own = p + 2 * r
    return {
        "out": n + own,
        "x": o + own,
        "w1": tokens * max(d["c"], d["d"]) + own,
        "w1_a": tokens * max(d["c"], d["d"]) + own + d["b"],
        "w1_b": tokens * max(d["c"], d["d"]) + own + d["a"],
        "w2": tokens * max(d["a"], d["b"]) + own,
        "w2_a": tokens * d["a"] + n + own,
        "w2_b": tokens * d["b"] + o + own,
        "t2": tokens * d["b"] + o + n,
    }


def _apply_cost(d: Mapping[str, int], itemsize: int) -> Cost:
    a, b, c, w, tokens = d["a"], d["b"], d["c"], d["d"], d["T"]
    if "r" in d:  # x twice back, as in LoRA
        products, streams = d["r"] * (b * w + a * b + a * c), 4 * d["I"] + 3 * d["O"]
    else:
        order = b * w * c + a * c * b if w2_first(a, b, c, w) else b * w * a + a * c * w
        products, streams = order, 3 * d["I"] + 2 * d["O"]
    return Cost(itemsize * (tokens * streams + 3 * factors(d)), 8 * tokens * products)


LOKR_APPLY = register(
    OpSpec(
        name="lokr_apply",
        family="lokr",
        operands=(Operand("x", side="model"), *HALVES),
        shapes=_apply_shapes,
        formula=_apply_formula,
        forward=_apply_forward,
        backward=_apply_backward,
        reductions=_apply_reductions,
        cost=_apply_cost,
        bound=Bound(half=24.0, fp32=10.0),
        cases=APPLY_CASES,
        fold=fold_core,
        fold_with="t2",
        derive=whole,
        positive=("p", "r"),
        doc="[base +] s * x @ kron(w1, w2)^T",
        conditions=SIZES,
    )
)
