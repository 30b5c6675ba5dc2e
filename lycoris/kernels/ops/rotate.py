"""OFT and BOFT: block-diagonal and butterfly rotations, y = v + v M, all four ops one schedule.

Sources: Qiu et al., "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", 2023 (OFT);
Liu et al., "Parameter-Efficient Orthogonal Finetuning via Butterfly Factorization", 2023 (BOFT).
The conventions are those of LyCORIS files: OFT contracts R's first index, BOFT its second.

The rotation is built once a call: D = R - I of every block, then one dense matrix M = R - I for
each group of channels that the stages of a pass mix. Everything large streams through two kernels,
``rotate`` (v + v M) and ``gram`` (v^T g, and g + g M^T where that fits).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ..rotation import WIDEST, passes
from ..rotation_schedule import Scale, schedules
from ..shapes import Groups
from ..spec import Attribute, Bound, Case, Cost, Operand, OpSpec, Round, Saved, Sizes, register

# ------------------------------------------------------------------------------- formula


def _cayley(blocks: Tensor, constraint: float | None) -> Tensor:
    """D = R - I = 2 (I - Q)^-1 Q of every block, in fp32 or fp64; Q = B - B^T, held to the norm."""
    blocks = blocks if blocks.dtype is torch.float64 else blocks.float()
    q = blocks - blocks.mT
    if constraint is not None:
        norm = torch.linalg.vector_norm(q)
        active = norm > constraint
        # Where it isn't active, 1 stands in for the norm: no division by 0, no gradient.
        q = q * torch.where(active, constraint / torch.where(active, norm, 1.0), 1.0)
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return 2 * torch.linalg.solve_ex(eye - q, q)[0]


def _finish(v: Tensor, moved: Tensor, rescale: Tensor | None, diff: bool) -> Tensor:
    """v + moved, rescaled; its difference from v where ``diff``. (A, C, B) all."""
    if rescale is None:
        return moved if diff else v + moved
    factor = rescale[:, None]
    if rescale.dtype is not torch.float64:
        factor = factor.float()
    if diff:
        return (factor * moved.to(factor.dtype) + (factor - 1) * v).to(moved.dtype)
    return factor.to(v.dtype) * (v + moved)


def _oft(
    v: Tensor, t: SimpleNamespace, scale: Scale, constraint: float | None, diff: bool
) -> Tensor:
    n, size = t.blocks.shape[:2]
    delta = (scale * _cayley(t.blocks, constraint)).to(v.dtype)
    rows = v.reshape(v.shape[0], n, size, v.shape[2])
    moved = torch.einsum("nij,anib->anjb", delta, rows).reshape(v.shape)
    return _finish(v, moved, t.rescale, diff)


def _boft(
    v: Tensor, t: SimpleNamespace, scale: Scale, constraint: float | None, diff: bool
) -> Tensor:
    stages, n, size = t.blocks.shape[:3]
    deltas = (scale * _cayley(t.blocks, constraint)).to(v.dtype)
    a, channels, b = v.shape
    x, total = v, torch.zeros((), dtype=v.dtype, device=v.device)
    for stage in range(stages):
        half = 2**stage * size // 2
        pairs = x.reshape(a, channels // (2 * half), 2, half, b).transpose(2, 3)
        rows = pairs.reshape(a, n, size, b)
        moved = torch.einsum("nij,anjb->anib", deltas[stage], rows)
        moved = moved.reshape(a, channels // (2 * half), half, 2, b).transpose(2, 3)
        moved = moved.reshape(x.shape)
        x, total = x + moved, total + moved
    if t.rescale is None and not diff:
        return x
    return _finish(v, total, t.rescale, diff)


def _of_weight(rotation: Any) -> Any:
    def formula(
        t: SimpleNamespace, scale: Scale, rnd: Round, *, constraint: float | None, diff: bool
    ) -> Tensor:
        return rotation(t.weight[None], t, scale, constraint, diff)[0]

    return formula


def _of_apply(rotation: Any) -> Any:
    def formula(
        t: SimpleNamespace, scale: Scale, rnd: Round, *, constraint: float | None, diff: bool
    ) -> Tensor:
        return rotation(t.y, t, scale, constraint, diff)

    return formula


# ------------------------------------------------------------------------------ contract


def _oft_sizes(op: str) -> Any:
    def derive(sizes: Groups, **_: Any) -> Groups:
        (n,), (size,), (channels,) = sizes["n"], sizes["s"], sizes["O"]
        if not 2 <= size <= WIDEST:
            raise ValueError(
                f"{op}: blocks are {size} x {size}; expected a size from 2 to {WIDEST}"
            )
        if n * size != channels:
            raise ValueError(
                f"{op}: blocks has shape {(n, size, size)} and rotates {n} * {size} channels; "
                f"expected {channels}"
            )
        return {}

    return derive


def _boft_sizes(op: str) -> Any:
    def derive(sizes: Groups, **_: Any) -> Groups:
        (m,), (n,), (size,), (channels,) = (sizes[symbol] for symbol in ("m", "n", "b", "O"))
        if size % 2 or not 2 <= size <= WIDEST:
            raise ValueError(
                f"{op}: blocks are {size} x {size}; expected an even size from 2 to {WIDEST}"
            )
        if n * size != channels:
            raise ValueError(
                f"{op}: blocks has shape {(m, n, size, size)} and rotates {n} * {size} channels; "
                f"expected {channels}"
            )
        if m < 1:
            raise ValueError(
                f"{op}: blocks has shape {(m, n, size, size)}; expected m, the stages, to be at "
                "least 1"
            )
        if m > 63 or channels % (size << (m - 1)):  # no dimension has more than 63 bits
            raise ValueError(
                f"{op}: {m} stages of {size}-wide blocks mix groups of {size} * 2^{m - 1} "
                f"channels, which do not divide {channels}"
            )
        return {}

    return derive


def _operands(name: str) -> tuple[Operand, ...]:
    return (
        Operand(name, role="wide", side="model"),
        Operand("blocks", role="wide"),
        Operand("rescale", role="wide", optional=True),
    )


def _shapes(name: str, v: str, blocks: str) -> Any:
    def shapes(present: frozenset[str], **_: Any) -> Mapping[str, str]:
        return {name: v, "blocks": blocks, "rescale": "O 1*", "out": v}

    return shapes


def _counts(d: Mapping[str, int]) -> tuple[int, int, int, int]:
    """Tokens, passes, the width of a dense matrix, and the elements of all blocks."""
    tokens = d["N"] if "N" in d else d["T"] * d["B"]
    if "s" in d:
        return tokens, 1, d["s"], d["O"] * d["s"]
    found = passes(d["m"], d["b"], d["O"], True)
    return tokens, len(found), max(part.width for part in found), d["m"] * d["O"] * d["b"]


def _reductions(name: str) -> Any:
    def reductions(d: Mapping[str, int]) -> Mapping[str, int]:
        tokens, count, width, _ = _counts(d)
        # M in up to three parts, or an fp32 product in three; what makes M of the blocks is fp64.
        chain = 3 * width * count
        return {"out": chain, name: chain, "blocks": tokens + chain, "rescale": tokens + chain}

    return reductions


def _cost(d: Mapping[str, int], itemsize: int) -> Cost:
    tokens, count, width, generators = _counts(d)
    elements = tokens * d["O"]
    # Out and back with M in two parts each, and v^T g.
    return Cost(itemsize * (5 * elements + 3 * generators), 2 * elements * width * 5 * count)


#: The standard deviation of the blocks that a case draws.
_SPREAD = {"near identity": 1e-4, "near identity diff": 1e-4}


def _adjust(values: dict[str, Tensor], case: Case) -> None:
    blocks = values["blocks"]
    if case.fill == "integers":  # quarter turns, whose D is integer
        blocks.tril_()
    else:
        blocks *= blocks[0].numel() ** 0.5 * _SPREAD.get(case.name, 0.3)
    if "rescale" in values and case.fill != "integers":
        values["rescale"].mul_(0.25).add_(1.0)


_OFT_BLOCKS = f"n * s = O; s from 2 to {WIDEST}"
_BOFT_BLOCKS = f"n * b = O; b even and at most {WIDEST}; b * 2^(m-1) divides O"


def _doc(oft: bool, operand: str) -> str:
    v, channels = ("W", "rows") if operand == "weight" else ("y", "channels")
    cayley = "R = (I + Q)(I - Q)^-1, Q = B - B^T of each block B"
    if oft:
        return f"[rescale o] R^T {v}: out[j] = sum_i R[i,j] {v}[i] on each s {channels}; {cayley}"
    return (
        f"[rescale o] m stages of R {v}: out[i] = sum_j R[i,j] {v}[j] on each b {channels} in the "
        f"stage's order; {cayley}; multiplier * R + (1 - multiplier) * I in place of R"
    )


def _register(name: str, operand: str, v: str, blocks: str, cases: tuple[Case, ...]) -> OpSpec:
    oft = name.startswith("oft")
    rotation, derive = (_oft, _oft_sizes) if oft else (_boft, _boft_sizes)
    if oft:  # has no multiplier
        cases = tuple(replace(case, scale=1.0) for case in cases)
    forward, backward = schedules(operand)
    return register(
        OpSpec(
            name=name,
            family="rotate",
            operands=_operands(operand),
            shapes=_shapes(operand, v, blocks),
            formula=(_of_weight if operand == "weight" else _of_apply)(rotation),
            forward=forward,
            backward=backward,
            reductions=_reductions(operand),
            cost=_cost,
            bound=Bound(half=24.0, fp32=10.0),
            cases=cases,
            saved=(Saved("delta", blocks, torch.float64),),
            attributes=(Attribute("constraint", "float?", None), Attribute("diff", "bool", False)),
            derive=derive(name),
            adjust=_adjust,
            doc=_doc(oft, operand),
            conditions=_OFT_BLOCKS if oft else _BOFT_BLOCKS,
        )
    )


# --------------------------------------------------------------------------------- cases


def _sizes(weight: bool, tokens: Any, **others: int) -> Sizes:
    """Tokens are a weight's columns, or (leading, trailing) of an activation."""
    if weight:
        return {"N": tokens, **others}
    return {"T": tokens, "B": 1, **others}


def _blocks(m: int, size: int, channels: int) -> dict[str, int]:
    """Blocks of OFT (``m`` 0) or BOFT."""
    if not m:
        return {"n": channels // size, "s": size, "O": channels}
    return {"m": m, "n": channels // size, "b": size, "O": channels}


def _common(weight: bool, m: int) -> tuple[Case, ...]:
    """The fills that every op is shown, at small sizes, whose packs all fill 64 columns."""
    usual = _sizes(weight, 40, **_blocks(m, 8, 64))
    small = _sizes(weight, 24, **_blocks(min(m, 2), 4, 40))
    turns = _sizes(weight, 21, **_blocks(m, 2, 48))
    few: Literal["few"] = "few"
    diff = {"diff": True}
    return (
        Case("plain", usual, scale=1.0),
        Case("rescale", usual, scale=0.7, present=("rescale",), mixes=few),
        Case("diff", usual, attributes=diff, present=("rescale",), mixes=few),
        Case("near identity", usual, scale=1.0, mixes=few),
        Case("near identity diff", small, attributes=diff, mixes=few),
        Case("constrained", small, scale=1.0, attributes={"constraint": 1.5}, mixes=few),
        Case("integers", turns, "integers", 1.0, exact=True, mixes=few),
        Case("one nonzero", small, "one_hot", mixes=few),
        Case("cancellation", small, "cancellation", mixes=few),
        Case("subnormal", small, "subnormal", mixes=few),
        Case("near overflow", usual, "near_overflow", 1.0, mixes=few),
        Case("zero blocks", small, "zero_factor", mixes=few),
        Case("strided", small, layout="strided", present=("rescale",), mixes=few),
    )


def _own(weight: bool, butterfly: bool) -> tuple[Case, ...]:
    """Block sizes, stages and tokens that differ in their layout."""
    few: Literal["few"] = "few"
    if butterfly:
        shapes = [(2, 6, 48), (4, 2, 48), (1, 4, 44)] if weight else [(2, 32, 64)]
        large = [(6, 8, 4096), (2, 32, 4096), (3, 6, 3072), (10, 2, 3072), (10, 2, 1024)]
    else:
        shapes = [(0, 2, 58), (0, 3, 51), (0, 32, 64)] if weight else [(0, 6, 42)]
        large = [(0, 32, 4096), (0, 8, 4096), (0, 6, 3072), (0, 160, 3200), (0, 256, 4096)]
    made = [
        Case(_named(m, s, c), _sizes(weight, 37, **_blocks(m, s, c)), scale=0.8, mixes=few)
        for m, s, c in shapes
    ]
    if butterfly:
        two = _sizes(weight, 7, **_blocks(9, 2, 512))
        attributes = {"diff": not weight}
        made.append(Case("two passes", two, attributes=attributes, present=("rescale",), mixes=few))
    if weight:
        made.append(Case("conv", _sizes(weight, (5, 3, 3), **_blocks(*shapes[0])), mixes=few))
    else:
        long = _sizes(weight, 1153, **_blocks(*shapes[0]))
        made.append(Case("two levels", long, scale=0.9, mixes=few))
        inner: Sizes = {"T": 3, "B": 19, **_blocks(*shapes[0])}
        made.append(Case("inner axis", inner, scale=0.9, present=("rescale",), mixes=few))
    tokens: Any = 4096 if weight else (2, 4096)
    made += [
        Case(
            f"gpu {_named(m, s, c)}",
            _sizes(weight, tokens, **_blocks(m, s, c)),
            scale=1.0 if i else 0.8,
            present=("rescale",) if i == 1 else (),
            device="cuda",
        )
        for i, (m, s, c) in enumerate(large)
    ]
    m, s, c = large[2]
    ragged = _sizes(weight, 4099, **_blocks(m, s, c))
    made.append(Case("gpu ragged", ragged, present=("rescale",), device="cuda"))
    return tuple(made)


def _named(m: int, size: int, channels: int) -> str:
    return f"{channels} of {size}" + (f" m={m}" if m else "")


_WEIGHT, _APPLY = "O N+", "... O B"
_OFT, _BOFT = "n s s", "m n b b"

OFT_WEIGHT = _register("oft_weight", "weight", _WEIGHT, _OFT, _common(True, 0) + _own(True, False))
OFT_APPLY = _register("oft_apply", "y", _APPLY, _OFT, _common(False, 0) + _own(False, False))
BOFT_WEIGHT = _register(
    "boft_weight", "weight", _WEIGHT, _BOFT, _common(True, 3) + _own(True, True)
)
BOFT_APPLY = _register("boft_apply", "y", _APPLY, _BOFT, _common(False, 3) + _own(False, True))
