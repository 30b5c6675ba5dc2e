"""The second level of a reduction: partial sums that programs left, added up and rounded once."""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from .. import plan
from ..plan import Plan
from ..schedule import Schedule

#: Elements of a tile: 16 a thread.
_TILE = 2048


@lru_cache(maxsize=4096)
def _tiles(sums: tuple[tuple[int, int], ...], units: int) -> Plan:
    """Tiles for up to two sums of (terms, elements): see a backend's ``add_up``."""
    if not units:
        return Plan(8, 64, 8)
    rows = [
        min(plan.power_of_2(terms), _TILE // min(32, plan.power_of_2(size))) for terms, size in sums
    ]
    return Plan(rows[0], _TILE, rows[-1], 4, 1)


def add_up(run: Schedule, *sums: tuple[Tensor, Tensor]) -> None:
    """out = the sum of its partial sums, for up to two of (parts, out), in one launch.

    ``parts`` (count, size) or (count, size, width) fp32, summed over all but its second dimension;
    ``out`` has ``size`` elements. Both are contiguous.
    """
    if not sums:
        return
    parts = [p if p.dim() == 3 else p.unsqueeze(2) for p, _ in sums]
    sizes = tuple((p.shape[0] * p.shape[2], p.shape[1]) for p in parts)
    tiles = _tiles(sizes, plan.multiprocessors(run.device))
    second = (parts[1], sums[1][1].view(-1)) if len(sums) > 1 else (None, None)
    run.launch("shares", "add_up", parts[0], sums[0][1].view(-1), *second, tiles=tiles)
