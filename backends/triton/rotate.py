"""Rotations: what streams, v + v M and v^T g.

The solve is in :mod:`.cayley`; what makes M of its blocks, and leads back, in :mod:`.butterfly`.

Activations (tokens, channels) and weights (channels, columns) go through the same kernels by
strides: nothing is transposed in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import FLUSH, Pass

from .butterfly import compose, pack, stage_gradient, unpack
from .cayley import cayley_gradient, eliminate
from .common import MIN_TRIPLE, TL_DTYPE, in_turn, kernel

__all__ = [
    "cayley_gradient",
    "compose",
    "eliminate",
    "gram",
    "pack",
    "rotate",
    "stage_gradient",
    "unpack",
]


@triton.jit
def _channel(g, p, unit, stages, low):
    """The channel of position p in group g of a pass whose stages are not the first."""
    return ((((g // low) << stages) + p // unit) * low + g % low) * unit + p % unit


@triton.jit
def _channels(
    which, z, pack, groups, width, unit, stages, low,
    FILLED: tl.constexpr, EVEN: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The channels at positions z of a pack, and which of them exist.

    FILLED, positions of a pack that are any group's, is a constant for the compiler to see how far
    neighbours are loaded together.
    """
    if FIRST:
        channel = (which * FILLED + z).to(tl.int64)
        if EVEN:
            return channel, tl.full(z.shape, True, tl.int1)
        else:
            return channel, (z < FILLED) & (channel < groups * width)
    else:
        g = which * pack + z // width
        ok = (z < FILLED) & (g < groups)
        return _channel(g, z % width, unit, stages, low).to(tl.int64), ok


@triton.jit
def _tokens(tile, per, tokens, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """The outer index of a tile of tokens, the tokens in it, and which of them exist."""
    t = (tile % per).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        return tile // per, t, tl.full((BLOCK,), True, tl.int1)
    else:
        return tile // per, t, t < tokens


@triton.jit
def _finish(
    acc, own, extra, rescale, power, out, at, inside, n, ok_n, which,
    BLOCK_N: tl.constexpr, DIFF: tl.constexpr,
):  # fmt: skip
    """Stores power * acc + factor * extra + (factor - DIFF) * own, factor that of the columns."""
    if power is not None:
        acc *= tl.load(power + which)
    factor = tl.full((BLOCK_N,), 1.0, tl.float32)
    if rescale is not None:
        factor = tl.load(rescale + n, mask=ok_n, other=0.0).to(tl.float32)
    if extra is not None:
        acc += factor[None, :] * tl.load(extra + at, mask=inside, other=0.0).to(tl.float32)
    if own is not None:
        if rescale is None:
            acc = tl.where(acc == 0.0, own, own + acc)  # keeps the sign of a zero
        else:
            acc += (factor - (1.0 if DIFF else 0.0))[None, :] * own
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)


@kernel
def _rotate(
    x, base, extra, rescale, parts, power, out,
    tiles, per, tokens, share, stride_o, stride_t, stride_c,
    unit, stages, low, width, pack, groups, packs,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_C: tl.constexpr, FILLED: tl.constexpr, FIRST: tl.constexpr,
    ROWS: tl.constexpr, DIFF: tl.constexpr, TRANSPOSED: tl.constexpr, HELD: tl.constexpr,
    STREAMED: tl.constexpr,
):  # fmt: skip
    """Tiles of tokens by columns of one pack. ROWS: a token's channels are contiguous.

    STREAMED: a program keeps its columns of the matrix and takes ``share`` tiles of tokens.
    HELD: x is the base, too, and its tile all of the pack.
    """
    in_turn()
    COLUMNS: tl.constexpr = PADDED // BLOCK_N
    pid = tl.program_id(0)
    if ROWS:  # neighbours share the tokens, so that whole rows are read and written together
        first, column = pid // (packs * COLUMNS) * share, pid % (packs * COLUMNS)
    else:
        shares = tl.cdiv(tiles, share)
        first, column = pid % shares * share, pid // shares
    which = column // COLUMNS
    zn = column % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    n, ok_n = _channels(which, zn, pack, groups, width, unit, stages, low, FILLED, EVEN_C, FIRST)
    # M[k, n], or M[n, k].
    m = parts + which.to(tl.int64) * PADDED * PADDED
    step_n, step_k = (PADDED, 1) if TRANSPOSED else (1, PADDED)
    step = tl.cast(packs, tl.int64) * PADDED * PADDED
    if STREAMED:
        zk = tl.arange(0, PADDED)
        k, ok_k = _channels(
            which, zk, pack, groups, width, unit, stages, low, FILLED, EVEN_C, FIRST
        )
        at_m = m + zk[:, None] * step_k + zn[None, :] * step_n
        m0 = tl.load(at_m)
        if PARTS > 1:
            m1 = tl.load(at_m + step)
        if PARTS > 2:
            m2 = tl.load(at_m + 2 * step)
        for tile in tl.range(first, tl.minimum(first + share, tiles)):
            outer, t, ok_t = _tokens(tile, per, tokens, BLOCK_T, EVEN_T)
            start = outer.to(tl.int64) * stride_o + t[:, None] * stride_t
            inside = ok_t[:, None] & ok_k[None, :]
            v = tl.load(x + start + k[None, :] * stride_c, mask=inside, other=0.0)
            at, inside = start + n[None, :] * stride_c, ok_t[:, None] & ok_n[None, :]
            acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            if PARTS > 2:  # the least first
                acc = tl.dot(v.to(COMPUTE), m2, acc, input_precision=PRECISION)
            if PARTS > 1:
                acc = tl.dot(v.to(COMPUTE), m1, acc, input_precision=PRECISION)
            acc = tl.dot(v.to(COMPUTE), m0, acc, input_precision=PRECISION)
            own = None
            if HELD:
                own = v.to(tl.float32)
            elif base is not None:
                own = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
            _finish(acc, own, extra, rescale, power, out, at, inside, n, ok_n, which, BLOCK_N, DIFF)
    else:
        outer, t, ok_t = _tokens(first, per, tokens, BLOCK_T, EVEN_T)
        start = outer.to(tl.int64) * stride_o + t[:, None] * stride_t
        acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
        for k0 in tl.range(0, PADDED, BLOCK_K):
            zk = k0 + tl.arange(0, BLOCK_K)
            k, ok_k = _channels(
                which, zk, pack, groups, width, unit, stages, low, FILLED, EVEN_C, FIRST
            )
            inside = ok_t[:, None] & ok_k[None, :]
            v = tl.load(x + start + k[None, :] * stride_c, mask=inside, other=0.0).to(COMPUTE)
            # Tensor cores cut what they add to a sum: as many parts as fp32 has digits keep them in
            # sums of their own.
            if PARTS > 2:
                sum_ = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            else:
                sum_ = acc
            for part in tl.static_range(PARTS):  # the least first
                at_m = m + zk[:, None] * step_k + zn[None, :] * step_n
                factor = tl.load(at_m + (PARTS - 1 - part) * step)
                sum_ = tl.dot(v, factor, sum_, input_precision=PRECISION)
            if PARTS > 2:
                acc += sum_
            else:
                acc = sum_
        at, inside = start + n[None, :] * stride_c, ok_t[:, None] & ok_n[None, :]
        own = None
        if base is not None:
            own = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        _finish(acc, own, extra, rescale, power, out, at, inside, n, ok_n, which, BLOCK_N, DIFF)


def _layout(x: torch.Tensor, part: Pass) -> tuple[int, int, tuple[int, int, int], bool]:
    """Outer size, tokens, and the strides of both and of channels of an (A, C, B) tensor."""
    a, channels, b = x.shape
    if b == 1:
        return 1, a, (0, channels, 1), True
    return a, b, (channels * b, 1, b), False


def _precision(part: Pass, policy: Policy) -> str:
    if policy.tf32:
        return "tf32"
    return "ieee" if part.width < MIN_TRIPLE or torch.version.hip else "tf32x3"


@prepared
def rotate(
    x: torch.Tensor,
    base: torch.Tensor | None,
    extra: torch.Tensor | None,
    rescale: torch.Tensor | None,
    parts: torch.Tensor,
    power: torch.Tensor | None,
    out: torch.Tensor,
    part: Pass,
    diff: bool,
    transposed: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = x M + rescale * extra + (rescale - diff) * base, on the middle axis.

    ``x``, ``base``, ``extra`` and ``out`` are contiguous (A, C, B) tensors of any dtypes; x is cast
    to that of ``parts``. Their sum, times ``power`` (packs,) if given, is M, as ``pack`` leaves it;
    M^T where ``transposed``. Without ``rescale`` (C,), that is 1 and ``diff`` nothing. Sums are
    fp32, and rounded once.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    outer, tokens, strides, rows = _layout(x, part)
    per = triton.cdiv(tokens, plan.block_m)
    tiles = outer * per
    share = triton.cdiv(tiles, plan.splits) if plan.splits > 1 else 1
    fixed = (
        *(tiles, per, tokens, share, *strides),
        *(part.unit, part.stages, part.low, part.width, part.pack, part.groups, part.packs),
    )
    options = {
        "COMPUTE": TL_DTYPE[parts.dtype],
        "PRECISION": _precision(part, policy) if parts.dtype is torch.float32 else "tf32",
        "PARTS": parts.shape[0],
        "PADDED": part.padded,
        "BLOCK_T": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k,
        "EVEN_T": tokens % plan.block_m == 0,
        "EVEN_C": part.full,
        "FILLED": part.pack * part.width,
        "FIRST": part.low == 1,
        "ROWS": rows,
        "DIFF": diff,
        "TRANSPOSED": transposed,
        "HELD": base is x and plan.block_n == part.padded,
        "STREAMED": plan.splits > 1,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    grid = (triton.cdiv(tiles, share) * part.packs * (part.padded // plan.block_n),)
    args = (x, base, extra, rescale, parts, power, out)
    launch = _rotate.prepare(grid, args, options, fixed)
    return lambda *args: launch(*args[:7])


@kernel
def _gram(
    x, g, rescale, parts, power, out, total,
    tiles, per, tokens, share, stride_o, stride_t, stride_c,
    unit, stages, low, width, pack, groups, packs,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, FLUSH: tl.constexpr,
    EVEN_T: tl.constexpr, EVEN_C: tl.constexpr, FILLED: tl.constexpr, FIRST: tl.constexpr,
    BASE: tl.constexpr, DIFF: tl.constexpr,
):  # fmt: skip
    """One tile of one share of one pack's x^T g, and its tokens' g M^T + base if asked for.

    FLUSH: tiles of tokens between two additions to the second level; 0 has one level only.
    """
    in_turn()
    COLUMNS: tl.constexpr = PADDED // BLOCK_N
    pid = tl.program_id(0)
    which = pid // (COLUMNS * COLUMNS)
    zj = pid // COLUMNS % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    zc = pid % COLUMNS * BLOCK_N + tl.arange(0, BLOCK_N)
    j, ok_j = _channels(which, zj, pack, groups, width, unit, stages, low, FILLED, EVEN_C, FIRST)
    c, ok_c = _channels(which, zc, pack, groups, width, unit, stages, low, FILLED, EVEN_C, FIRST)
    begin = tl.program_id(1) * share
    part_sum = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    if FLUSH:
        sum_ = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    if out is not None:
        m = parts + which.to(tl.int64) * PADDED * PADDED
        factor = tl.full((BLOCK_N,), 1.0, tl.float32)
        if rescale is not None:
            factor = tl.load(rescale + c, mask=ok_c, other=0.0).to(tl.float32)
            factor -= 1.0 if DIFF else 0.0
        scaling = 1.0
        if power is not None:
            scaling = tl.load(power + which)
    for tile in tl.range(begin, tl.minimum(begin + share, tiles)):
        outer, t, ok_t = _tokens(tile, per, tokens, BLOCK_T, EVEN_T)
        start = outer.to(tl.int64) * stride_o + t * stride_t
        left = start[None, :] + j[:, None] * stride_c
        v = tl.load(x + left, mask=ok_j[:, None] & ok_t[None, :], other=0.0).to(COMPUTE)
        at = start[:, None] + c[None, :] * stride_c
        inside = ok_t[:, None] & ok_c[None, :]
        grad = tl.load(g + at, mask=inside, other=0.0)
        part_sum = tl.dot(v, grad.to(COMPUTE), part_sum, input_precision=PRECISION)
        if out is not None:
            acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
            for k in tl.static_range(PARTS):
                step = (PARTS - 1 - k) * tl.cast(packs, tl.int64) * PADDED * PADDED
                mt = tl.load(m + step + zj[None, :] * PADDED + zc[:, None])
                acc = tl.dot(grad.to(COMPUTE), mt, acc, input_precision=PRECISION)
            acc *= scaling
            if BASE:
                own = grad.to(tl.float32)
                if rescale is None:
                    acc = tl.where(acc == 0.0, own, own + acc)
                else:
                    acc += factor[None, :] * own
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside)
        if FLUSH:
            if (tile - begin + 1) % FLUSH == 0:
                sum_ += part_sum
                part_sum = tl.zeros((BLOCK_N, BLOCK_N), tl.float32)
    if FLUSH:
        part_sum += sum_
    at = (tl.program_id(1) * packs + which).to(tl.int64) * PADDED * PADDED
    tl.store(total + at + zj[:, None] * PADDED + zc[None, :], part_sum)


@prepared
def gram(
    x: torch.Tensor,
    g: torch.Tensor,
    rescale: torch.Tensor | None,
    parts: torch.Tensor | None,
    power: torch.Tensor | None,
    out: torch.Tensor | None,
    total: torch.Tensor,
    part: Pass,
    base: bool,
    diff: bool,
    compute: torch.dtype,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """total[share] = x^T g of every pack, each share over a part of the tokens.

    ``x`` and ``g`` are contiguous (A, C, B) tensors, cast to ``compute``; ``total`` (splits, packs,
    padded, padded) fp32. ``out`` like x, if given, takes g M^T + (rescale - diff) * g in the same
    pass, without the second term unless ``base``; a pack is one tile then. Sums are in two levels
    where there are more than FLUSH tokens.

    Raises:
        KernelBuildError: the kernel doesn't compile for this device and plan.
    """
    outer, tokens, strides, _ = _layout(x, part)
    per = triton.cdiv(tokens, plan.block_k)
    tiles = outer * per
    share = triton.cdiv(tiles, plan.splits)
    fixed = (
        *(tiles, per, tokens, share, *strides),
        *(part.unit, part.stages, part.low, part.width, part.pack, part.groups, part.packs),
    )
    fp32 = compute is torch.float32
    options = {
        "COMPUTE": TL_DTYPE[compute],
        "PRECISION": _precision(part, policy) if fp32 else "tf32",
        "PARTS": 0 if parts is None else parts.shape[0],
        "PADDED": part.padded,
        "BLOCK_T": plan.block_k,
        "BLOCK_N": plan.block_n,
        "FLUSH": FLUSH // plan.block_k if share * plan.block_k > FLUSH else 0,
        "EVEN_T": tokens % plan.block_k == 0,
        "EVEN_C": part.full,
        "FILLED": part.pack * part.width,
        "FIRST": part.low == 1,
        "BASE": base,
        "DIFF": diff,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
    }
    grid = (part.packs * (part.padded // plan.block_n) ** 2, plan.splits)
    launch = _gram.prepare(grid, (x, g, rescale, parts, power, out, total), options, fixed)
    return lambda *args: launch(*args[:7])
