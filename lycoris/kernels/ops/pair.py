"""What the ops of two low-rank products that meet in one store have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .. import plan
from ..schedule import Schedule
from ..spec import Case, Sizes

Scale = float | Tensor


def product(
    run: Schedule,
    a: Tensor,
    b: Tensor,
    a0: Tensor,
    b0: Tensor,
    scale: Scale,
    out: Tensor,
    *,
    subtract: bool,
    dynamic: str = "",
) -> None:
    """out = scale * (a @ b + a0 @ b0), or the difference, rounded once."""
    tiles = plan.matmul(
        *(*out.shape, max(b.shape[0], b0.shape[0]), run.policy.compute.itemsize),
        plan.multiprocessors(run.device),
        dynamic=dynamic,
        transposed=False,
    )
    # Both accumulators meet in the store; in fp32 with odd operands, 4 warps would spill.
    wide = run.policy.compute.itemsize == 4
    tiles = replace(tiles, splits=1, num_warps=8 if wide else tiles.num_warps)
    run.launch("pair", "product", a, b, a0, b0, scale, out, subtract, tiles=tiles)


def cases(sizes: Sizes, primes: Sizes, ranks: Mapping[str, Sizes], **large: Sizes) -> list[Case]:
    """The cases every op here has."""
    few: Any = {"mixes": "few"}
    return [
        Case("plain", sizes),
        Case("integers", sizes, "integers", 2.0, exact=True, **few),
        Case("primes", primes, **few),
        *(Case(name, found, scale=0.3, **few) for name, found in ranks.items()),
        Case("one nonzero", sizes, "one_hot", **few),
        Case("cancellation", sizes, "cancellation", **few),
        Case("subnormal", sizes, "subnormal", **few),
        Case("near overflow", sizes, "near_overflow", 0.0055, **few),
        Case("zero factor", sizes, "zero_factor", **few),
        Case("strided", sizes, layout="strided", **few),
        Case("expanded", sizes, layout="expanded", **few),
        *(Case(f"gpu {n}", found, scale=0.3, device="cuda", **few) for n, found in large.items()),
    ]
