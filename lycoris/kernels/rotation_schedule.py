"""The host logic of every rotation op: solve, multiply stages, stream; and back.

Nothing here waits for the device, and nothing of stages x tokens x channels is ever stored: a
longer butterfly's backward replays its prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import rotation_algebra as algebra
from .rotation import (
    Pass,
    compose_plan,
    fuses,
    gram_plan,
    pack_plan,
    passes,
    return_plan,
    rotate_plan,
    solve_plan,
    stage_plan,
    unpack_plan,
)
from .schedule import Schedule

Scale = float | Tensor


def _solve(run: Schedule, blocks: Tensor, constraint: float | None, delta: Tensor) -> None:
    """D of every block into ``delta``: one launch, or several for a large block."""
    size = blocks.shape[-1]
    held = algebra.held(blocks, constraint)
    leaf, delta = blocks.reshape(-1, size, size), delta.view(-1, size, size)
    plan = solve_plan(size, run.device)
    steps = -(-size // plan.block_n)
    source: Tensor | None = None
    for step in range(steps):
        last = step == steps - 1
        target = delta if last else run.empty((leaf.shape[0], size, 2 * size), torch.float64)
        run.launch("rotate", "eliminate", leaf, held, source, target, step, tiles=plan)
        source = target


def _blocks_gradient(
    run: Schedule,
    blocks: Tensor,
    delta: Tensor,
    total: Tensor,
    pack: int,
    constraint: float | None,
    out: Tensor,
) -> None:
    """The gradient of the blocks from that of D: dD = 2 N dQ N with N = (I - Q)^-1 = I + D / 2.

    ``total`` (shares, packs, padded, padded) holds dD, ``pack`` blocks on the diagonal of each
    matrix: one share of one block each where the blocks are larger than :func:`_at_once` allows.
    D is needed in fp64: for large Q, N is small, and what it loses to I is then what D can spare.
    """
    size = blocks.shape[-1]
    delta = delta.view(-1, size, size)
    plan = return_plan(size, run.device)
    held = algebra.held(blocks, constraint)
    if size > plan.block_n:
        found = algebra.cayley_gradient(delta, total[0])
    else:
        plain = held is None
        found = out if plain else run.empty(tuple(delta.shape), torch.float64)
        leaf = found.view(-1, size, size)
        run.launch("rotate", "cayley_gradient", delta, total, leaf, pack, tiles=plan)
        if plain:
            return
    found = found.view(blocks.shape)
    out.copy_(found if held is None else algebra.through_norm(found, blocks, held))


def _at_once(blocks: Tensor, scale: Scale, rescale: Tensor | None, run: Schedule) -> bool:
    """Whether the way back through the solve starts at v^T g itself, without a launch between."""
    size = blocks.shape[-1]
    plain = blocks.dim() == 3 and rescale is None and _is_one(scale)
    return plain and size <= return_plan(size, run.device).block_n


def _products(run: Schedule, scaled: Tensor, part: Pass) -> Tensor:
    """The products, less I, of a pass's stages from each on, flat; M, that of all, comes first."""
    if not part.butterfly:
        return scaled.view(-1)
    found = run.empty((part.products,), torch.float64)
    plan = compose_plan(part, run.device)
    run.launch("rotate", "compose", scaled, found, part, False, tiles=plan)
    return found


def _first(products: Tensor, part: Pass) -> Tensor:
    """M, or its gradient: (groups, width, width), rows inputs, columns outputs as in Pass."""
    size = part.groups * part.width**2
    return products[:size].view(part.groups, part.width, part.width)


def _stage_gradients(
    run: Schedule, grads: Tensor, found: Tensor, scaled: Tensor, part: Pass, deltas: Tensor
) -> None:
    """From M's gradient, the first of ``grads``, to that of a pass's stages, into ``deltas``.

    ``grads`` (part.products,) takes the gradients of the shorter products too.
    """
    if part.stages > 1:
        plan = compose_plan(part, run.device)
        run.launch("rotate", "compose", scaled, grads, part, True, tiles=plan)
    plan = stage_plan(part, run.device)
    run.launch("rotate", "stage_gradient", found, grads, deltas, part, tiles=plan)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """M of every pack of a pass, its columns times rescale, as the kernels read it.

    ``parts``: (parts, packs, padded, padded), whose sum is M, in the compute dtype; fp16's is M
    divided by a power of two, ``power`` (packs,).
    """

    parts: Tensor
    power: Tensor | None


def _matrices(
    run: Schedule,
    matrix: Tensor,
    rescale: Tensor | None,
    part: Pass,
    compute: torch.dtype,
    wide: bool,
) -> _Matrices:
    """``wide``: in as many parts as fp32 has digits."""
    count = 1 if compute is torch.float32 else 3 if wide else 2
    parts = run.empty((count, part.packs, part.padded, part.padded), compute)
    if rescale is not None:
        matrix = matrix * algebra.by_column(rescale, part)[:, None]
    power = algebra.power(matrix, part) if compute is torch.float16 else None
    run.launch("rotate", "pack", matrix, power, parts, part, tiles=pack_plan(part, run.device))
    return _Matrices(parts, power)


def _rotate(
    run: Schedule,
    x: Tensor,
    m: _Matrices | None,
    out: Tensor,
    part: Pass,
    base: Tensor | None,
    extra: Tensor | None,
    rescale: Tensor | None,
    diff: bool,
    transposed: bool,
) -> None:
    """out = x M + rescale * extra + (rescale - diff) * base; M^T where ``transposed``."""
    assert m is not None  # made wherever something is streamed
    tokens = x.shape[0] * x.shape[2]
    plan = rotate_plan(part, tokens, m.parts.dtype, x.shape[2] == 1, run.device)
    args = (x, base, extra, rescale, m.parts, m.power, out, part, diff, transposed)
    run.launch("rotate", "rotate", *args, tiles=plan)


def _passes(
    blocks: Tensor, delta: Tensor, scale: Scale, channels: int
) -> tuple[tuple[Pass, ...], Tensor]:
    """The passes of a call, and scale * D of every block, (stages, n, size, size)."""
    size, butterfly = blocks.shape[-1], blocks.dim() == 4
    stages = blocks.shape[0] if butterfly else 1
    delta = delta.view(stages, -1, size, size)
    return passes(stages, size, channels, butterfly), delta if _is_one(scale) else delta * scale


def _is_one(scale: Scale) -> bool:
    return not isinstance(scale, Tensor) and scale == 1.0


def _chain(
    run: Schedule,
    x: Tensor,
    chain: Sequence[tuple[Pass, _Matrices | None, Tensor | None]],
    out: Tensor,
    diff: bool,
    transposed: bool,
) -> None:
    """Passes in turn, each (pass, matrices, rescale); the last stores ``out``, others fp32.

    Where ``diff``, what the passes add is kept apart from x: near the identity, x would swallow it.
    """
    start, moved = x, None
    for at, (part, m, rescale) in enumerate(chain):
        last = at == len(chain) - 1
        target = out if last else run.empty(tuple(x.shape), torch.float32)
        base = (start if rescale is not None else None) if diff else x
        _rotate(run, x, m, target, part, base, moved, rescale, diff, transposed)
        if diff and not last:
            moved, x = target, start + target
        else:
            x = target


def _forward(
    run: Schedule,
    v: Tensor,
    t: SimpleNamespace,
    scale: Scale,
    out: Tensor,
    saved: Any,
    constraint: float | None,
    diff: bool,
) -> None:
    _solve(run, t.blocks, constraint, saved.delta)
    parts, scaled = _passes(t.blocks, saved.delta, scale, v.shape[1])
    compute = v.dtype if len(parts) == 1 else torch.float32
    chain = []
    for part in parts:
        rescale = t.rescale if part is parts[-1] else None
        matrix = _first(_products(run, scaled, part), part)
        m = _matrices(run, matrix, rescale, part, compute, out.dtype is torch.float32)
        chain.append((part, m, rescale))
    _chain(run, v, chain, out, diff, False)


def _backward(
    run: Schedule,
    grad: Tensor,
    v: Tensor,
    t: SimpleNamespace,
    saved: Any,
    scale: Scale,
    grads: SimpleNamespace,
    into: Tensor | None,
    constraint: float | None,
    diff: bool,
) -> None:
    """``into`` takes v's gradient, ``grads.blocks`` and ``grads.rescale`` theirs, where wanted."""
    parts, scaled = _passes(t.blocks, saved.delta, scale, v.shape[1])
    single = len(parts) == 1
    compute = v.dtype if single else torch.float32
    wide = into is not None and into.dtype is torch.float32
    found = [_products(run, scaled, part) for part in parts]
    chain = []
    for part, products in zip(parts, found, strict=True):
        rescale = t.rescale if part is parts[-1] else None
        # A frozen v asks for no matrices, unless to go from pass to pass.
        m = None
        if into is not None or not single:
            m = _matrices(run, _first(products, part), rescale, part, compute, wide)
        chain.append((part, m, rescale))
    if grads.blocks is None and grads.rescale is None:
        assert into is not None  # something is wanted
        _chain(run, grad, chain[::-1], into, diff, True)
        return
    at_once = _at_once(t.blocks, scale, t.rescale, run)
    deltas = None if at_once or grads.blocks is None else torch.empty_like(scaled)
    # The inputs of the passes are replayed, not kept.
    inputs = [v]
    for part, m, _ in chain[:-1]:
        inputs.append(run.empty(tuple(v.shape), torch.float32))
        _rotate(run, inputs[-2], m, inputs[-1], part, inputs[-2], None, None, False, False)
    g, start, moved = grad, grad, None
    for at in reversed(range(len(parts))):
        part, m, rescale = chain[at]
        last = part is parts[-1]
        target = into if at == 0 else run.empty(tuple(v.shape), torch.float32)
        base = (start if rescale is not None else None) if diff else g
        fused = target if single and fuses(part, compute) else None
        total = _gram(run, inputs[at], g, base is not None, rescale, m, fused, part, diff, compute)
        if not at_once:
            into_rescale = grads.rescale if last else None
            _matrix_gradients(run, total, found[at], scaled, part, rescale, deltas, into_rescale)
        if target is None:
            break
        if fused is None:
            _rotate(run, g, m, target, part, base, moved, rescale, diff, True)
        if at and diff:
            moved, g = target, start + target
        else:
            g = target
    pack = parts[0].pack
    if deltas is not None:
        size = t.blocks.shape[-1]
        total, pack = (deltas if _is_one(scale) else deltas.mul_(scale)).view(1, -1, size, size), 1
    if grads.blocks is not None:
        _blocks_gradient(run, t.blocks, saved.delta, total, pack, constraint, grads.blocks)


def _matrix_gradients(
    run: Schedule,
    total: Tensor,
    products: Tensor,
    scaled: Tensor,
    part: Pass,
    rescale: Tensor | None,
    deltas: Tensor | None,
    into_rescale: Tensor | None,
) -> None:
    """From the shares of v^T g to the gradients of a pass's stages and of the rescale."""
    # OFT's M is D, and BOFT's the product of its stages.
    if deltas is not None and not part.butterfly:
        chained = deltas.view(-1)
    else:
        chained = run.empty((part.products,), torch.float64)
    sums = _first(chained, part)
    run.launch("rotate", "unpack", total, sums, part, tiles=unpack_plan(run.device))
    if into_rescale is not None:
        # y's own columns: sum_t g (v + v M), and v^T g is at hand.
        columns = (_first(products, part) * sums).sum(1) + algebra.own(sums, part)
        into_rescale.copy_(algebra.by_channel(columns, part))
    if deltas is not None:
        if rescale is not None:
            sums *= algebra.by_column(rescale, part)[:, None]
        if part.butterfly:
            _stage_gradients(run, chained, products, scaled, part, deltas)


def _gram(
    run: Schedule,
    x: Tensor,
    g: Tensor,
    base: bool,
    rescale: Tensor | None,
    m: _Matrices | None,
    out: Tensor | None,
    part: Pass,
    diff: bool,
    compute: torch.dtype,
) -> Tensor:
    """x^T g of every pack, in shares: (splits, packs, padded, padded), fp32.

    ``out``, if given, takes g M^T + (rescale - diff) * g in the same pass; without ``base`` g M^T.
    """
    tokens = x.shape[0] * x.shape[2]
    itemsizes = (x.element_size(), g.element_size())
    plan = gram_plan(part, tokens, compute, itemsizes, rescale is not None, run.device)
    total = run.empty((plan.splits, part.packs, part.padded, part.padded), torch.float32)
    parts, power = (None, None) if m is None or out is None else (m.parts, m.power)
    args = (x, g, rescale, parts, power, out, total, part, base, diff, compute)
    run.launch("rotate", "gram", *args, tiles=plan)
    return total


def schedules(name: str) -> tuple[Any, Any]:
    """forward and backward over the operand ``name``: (O, N), or (T, O, B)."""

    def stream(t: Tensor) -> Tensor:
        return t if t.dim() == 3 else t[None]

    def forward(
        run: Schedule,
        t: SimpleNamespace,
        scale: Scale,
        out: Tensor,
        saved: Any,
        *,
        constraint: float | None,
        diff: bool,
    ) -> None:
        v = stream(getattr(t, name))
        _forward(run, v, t, scale, stream(out), saved, constraint, diff)

    def backward(
        run: Schedule,
        grad: Tensor,
        t: SimpleNamespace,
        saved: Any,
        scale: Scale,
        grads: SimpleNamespace,
        *,
        constraint: float | None,
        diff: bool,
    ) -> None:
        into = getattr(grads, name)
        args = (t, saved, scale, grads, None if into is None else stream(into), constraint, diff)
        _backward(run, stream(grad), stream(getattr(t, name)), *args)

    return forward, backward
