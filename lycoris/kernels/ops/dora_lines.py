"""DoRA where no program holds a line: its parts are summed, then every tile is rescaled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan, tile_count
from ..schedule import Schedule

#: Sums of a line's parts, ``block_m`` lines a program.
_JOIN = Plan(16, 32, 0)


#: The longest rank whose factors leave registers for more tiles of the weight.
SHORT = 32


def stages(run: Schedule) -> int:
    """How many tiles of a weight, and of what goes with it, are in shared memory at once."""
    return 3 if plan.shared_memory(run.device) >= 2**17 else 2


def tiles_plan(run: Schedule, weight: Tensor, group: int, rank: int, summed: bool) -> Plan:
    """Tiles of a kernel that reads a weight in any order.

    Args:
        run: whose device it is for.
        weight: (O, N).
        group: columns that make a line; 0 where a line is a row.
        rank: of the factors of the delta, along which ``block_k`` lies; 0 without.
        summed: whether sums along lines are made, by ``splits`` parts of a line.
    """
    units = plan.multiprocessors(run.device)
    rows, columns = weight.shape
    if not units:  # simulated: one plan, so that there is one build
        return Plan(16, 32, 16, num_stages=1, splits=2)
    if rank:
        block_k = min(max(16, plan.power_of_2(rank)), 64)
        # fp32 factors, products of three, cost registers, and so do rows at odd addresses.
        large = run.policy.compute.itemsize == 2 and columns % 8 == 0
        made = Plan(64, 64, block_k, 4, 1) if large else Plan(32, 64, block_k, 8, 1)
        if short := large and rank <= SHORT:
            # Summed, the next tiles of the weight are on their way while one is multiplied.
            made = Plan(32, 128, block_k, 4, stages(run) if summed else 1)
    else:
        short = False
        made = Plan(32, 128, 0, 8 if columns % 8 else 4, 2 if columns % 8 == 0 and summed else 1)
    if not summed:
        return made
    tiles_m, tiles_n = tile_count(rows, made.block_m), tile_count(columns, made.block_n)
    along, blocks = (tiles_m, tiles_n) if group else (tiles_n, tiles_m)
    parts = min(along, 64, tile_count((4 if short else 8) * units, blocks))
    return replace(made, splits=tile_count(along, tile_count(along, parts)))  # none is empty


class Lines:
    """A weight M (O, N) = weight [+ delta] [+ factor * up @ down], its lines cut into parts.

    ``operands``: weight, delta, up, down, factor. ``group``: columns of a line, or 0 for rows.
    """

    def __init__(self, run: Schedule, operands: tuple[Any, ...], group: int) -> None:
        self.run, self.group = run, group
        self.weight, *rest = operands
        self.rest = tuple(rest)
        self.rank = 0 if rest[1] is None else rest[1].shape[1]

    def _parts(self, grad: Tensor | None, norm: Tensor) -> Tensor:
        tiles = tiles_plan(self.run, self.weight, self.group, self.rank, True)
        lanes = self.weight.shape[1 if self.group else 0]
        shape = (tiles.splits, 2, lanes) if grad is None else (tiles.splits, lanes)
        parts = self.run.empty(shape, torch.float32)
        args = (self.weight, grad, *self.rest, norm, parts, self.group)
        self.run.launch("dora_lines", "measure", *args, tiles=tiles)
        return parts

    def _spread(self, grad: Tensor | None, norm: Tensor, made: Tensor, out: Any, more: Any) -> None:
        tiles = tiles_plan(self.run, self.weight, self.group, self.rank, False)
        args = (self.weight, grad, *self.rest, norm, made, out, more, self.group)
        self.run.launch("dora_lines", "spread", *args, tiles=tiles)

    def rescale(
        self, magnitude: Tensor, multiplier: float | Tensor, norm: Tensor, out: Tensor | None
    ) -> None:
        """norm, and out = M * (multiplier * (magnitude / norm - 1) + 1) where wanted."""
        parts = self._parts(None, norm)
        made = None if out is None else self.run.empty(norm.shape, torch.float32)
        args = (parts, magnitude, multiplier, norm, made, self.group or 1)
        self.run.launch("dora_lines", "lengths", *args, tiles=_JOIN)
        if made is not None:
            self._spread(None, norm, made, out, None)

    def radial(
        self,
        grad: Tensor,
        magnitude: Tensor,
        multiplier: float | Tensor,
        norm: Tensor,
        grad_magnitude: Tensor | None,
        detach: bool,
        wanted: bool,
    ) -> Tensor | None:
        """The magnitude's gradient; where ``wanted``, (2, lines) that make the gradient of M.

        It is, line by line, the first times ``grad`` and the second times M / norm.
        """
        made = self.run.empty((2, *norm.shape), torch.float32) if wanted else None
        summed = grad_magnitude is not None or (wanted and not detach)
        if not summed and made is None:
            return None
        parts = self._parts(grad, norm) if summed else None
        args = (norm, parts, magnitude, multiplier, grad_magnitude, made, self.group or 1, detach)
        self.run.launch("dora_lines", "radial", *args, tiles=_JOIN)
        return made

    def rescale_back(
        self,
        grad: Tensor,
        magnitude: Tensor,
        multiplier: float | Tensor,
        norm: Tensor,
        grads: tuple[Tensor | None, Tensor | None, Tensor | None],
        detach: bool,
    ) -> None:
        """Gradients of weight, delta and magnitude, where wanted."""
        of_weight, of_delta, of_magnitude = grads
        wanted = of_weight is not None or of_delta is not None
        made = self.radial(grad, magnitude, multiplier, norm, of_magnitude, detach, wanted)
        if made is not None:
            self._spread(grad, norm, made, of_weight, of_delta)
