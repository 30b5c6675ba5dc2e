"""How a rotation is laid out: which stages share a pass, which channels share a dense matrix.

A block-diagonal rotation (OFT) is one pass whose groups of channels are its blocks. A butterfly
(BOFT) of b-wide blocks mixes, in stages i .. i + L - 1, groups of b * 2^(L - 1) channels: the unit
of b / 2 neighbours, and L bits of the unit's number. Each group's stages multiply to one dense
matrix, of at most 256 columns; a longer butterfly takes several passes, as an FFT does. Several
small groups lie side by side in one matrix, a pack, so that matrix instructions have work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .plan import Plan, multiprocessors, power_of_2, shared_memory

#: Columns of a dense matrix at most, and of an OFT block.
WIDEST = 256
#: Columns that a pack of small groups fills; in 16 bits its backward streams v and g once.
FUSED = 64
#: A Cayley solve on a GPU eliminates this many columns a launch.
TILE = 32
#: Tokens between two additions to the second level of v^T g.
FLUSH = 512


@dataclass(frozen=True, slots=True)
class Pass:
    """Some stages of a rotation, done as one product with a dense matrix for each group.

    Position p of group g is channel ``unit * (hi * 2^stages * low + y * low + g % low) + p % unit``
    with y = p // unit and hi = g // low; for ``low`` = 1 that is g * width + p.

    The small matrices of a butterfly (groups, width, width) have their columns in another order:
    column c is position ``reversed(c // unit) * unit + c % unit``, with the ``stages`` bits of the
    unit's number reversed. What shares blocks in the first stages is then a range of columns.

    Attributes:
        size: of a block.
        butterfly: whether the blocks are a butterfly's.
        first, stages: the stages done.
        low: 2^first, the distance in units between the units of a group.
        width: channels of a group.
        groups: how many there are.
        pack: groups in one matrix.
    """

    size: int
    butterfly: bool
    first: int
    stages: int
    low: int
    width: int
    groups: int
    pack: int

    @property
    def unit(self) -> int:
        """Neighbouring channels that no stage separates."""
        return self.size // 2 if self.butterfly else self.size

    @property
    def packs(self) -> int:
        """How many matrices there are; the last may hold fewer groups."""
        return -(-self.groups // self.pack)

    @property
    def products(self) -> int:
        """Entries that are kept of the products of all stages, of all but the first, and so on."""
        return self.groups * self.width * (2 * self.width - self.size)

    @property
    def padded(self) -> int:
        """Rows and columns of a matrix as it is stored, filled up with zeros."""
        return max(16, power_of_2(self.pack * self.width))

    @property
    def full(self) -> bool:
        """Whether the groups fill every matrix, so that no column needs a mask."""
        return self.pack * self.width == self.padded and self.groups % self.pack == 0


def _pack(width: int, groups: int) -> int:
    most = max(1, FUSED // width)
    # Rows of 16 bytes where they cost no more than half of the matrix.
    aligned = [p for p in range(most, most // 2, -1) if p * width % 8 == 0]
    return min(aligned[0] if aligned else most, groups)


@lru_cache(maxsize=1024)
def passes(stages: int, size: int, channels: int, butterfly: bool) -> tuple[Pass, ...]:
    """The passes of a rotation, in order, of as equal lengths as can be."""
    if not butterfly:
        groups = channels // size
        return (Pass(size, False, 0, 1, 1, size, groups, _pack(size, groups)),)
    most = (2 * WIDEST // size).bit_length() - 1
    count = -(-stages // most)
    found, first = [], 0
    for at in range(count):
        length = stages * (at + 1) // count - first
        width = size << (length - 1)
        groups = channels // width
        found.append(
            Pass(size, True, first, length, 1 << first, width, groups, _pack(width, groups))
        )
        first += length
    return tuple(found)


# --------------------------------------------------------------------------------- plans


def solve_plan(size: int, device: torch.device) -> Plan:
    """block_m: blocks solved side by side; block_n: columns of a tile.

    One warp's, a column a thread: what its threads tell each other is a matter of shuffles, and
    no step waits for a barrier. Three tiles of a larger block take the registers of two.
    """
    simulated = not multiprocessors(device)
    tile = min(TILE // 2 if simulated else TILE, power_of_2(size))
    # An interpreter pays by the operation.
    blocks = 4096 // (tile * tile) if simulated else TILE // tile
    return Plan(max(1, blocks), tile, tile, 1 if size <= tile else 2, 1)


def return_plan(size: int, device: torch.device) -> Plan:
    """block_m: blocks led back side by side; block_n: columns of a tile."""
    plan = solve_plan(size, device)
    warps = 2 if plan.block_n <= 8 else plan.block_n // 4
    if not multiprocessors(device):
        return replace(plan, num_warps=warps)
    return replace(plan, block_m=max(1, 512 // plan.block_n**2), num_warps=warps)


def compose_plan(part: Pass, device: torch.device) -> Plan:
    """block_n: columns of a group that go through its stages together.

    block_m items at once of block_k rows each, which have their terms in common.
    """
    rows = next(n for n in (4, 3, 2, 1) if part.unit % n == 0)
    if not multiprocessors(device):
        return Plan(128, 64, rows, 4, 1)
    items = min(32, power_of_2(part.width // (2 * rows)))
    return Plan(items, 8, rows, max(1, items // 8), 1)


def pack_plan(part: Pass, device: torch.device) -> Plan:
    """block_m: rows of a pack that are stored together."""
    simulated = not multiprocessors(device)
    rows = 64 if simulated else max(1, 2048 // part.padded)
    return Plan(min(part.padded, rows), part.padded, 1, 4, 1)


def stage_plan(part: Pass, device: torch.device) -> Plan:
    """block_n entries of a stage's gradient at once, block_k of the rows that they sum."""
    simulated = not multiprocessors(device)
    return Plan(1, 1024 if simulated else 64, 32 if simulated else 8, 4, 1)


def unpack_plan(device: torch.device) -> Plan:
    """block_n elements at once."""
    return Plan(1, 512 if multiprocessors(device) else 8192, 1, 4, 1)


def rotate_plan(
    part: Pass, tokens: int, compute: torch.dtype, by_row: bool, device: torch.device
) -> Plan:
    """block_m tokens by block_n columns of the output, block_k of the contraction at once.

    ``splits``: shares of the tokens, each a program's, where a pack is one tile. ``by_row``: a
    token's channels are neighbours.
    """
    size, wide = part.padded, compute is torch.float32
    if not multiprocessors(device):
        shares = 2 if size <= FUSED and not wide and tokens > 64 else 1
        return Plan(64, min(64, size), min(64, size), splits=shares, dynamic="m")
    if size <= FUSED:
        rows = min(64, max(16, power_of_2(tokens)))
        if wide:
            return Plan(rows, size, 16, 4, 1, dynamic="m")
        # Shares of the tokens; the next tile is on its way while one is multiplied.
        programs = (2 if by_row else 4) * multiprocessors(device)
        shares = min(programs // part.packs, -(-tokens // rows))
        return Plan(rows, size, size, 4, 4, max(1, shares), dynamic="m")
    if wide:
        return Plan(64, 64, 32, 4, 2, dynamic="m")
    return Plan(128, 128, 32, 8, 3, dynamic="m")


def gram_plan(
    part: Pass, tokens: int, compute: torch.dtype, rescaled: bool, device: torch.device
) -> Plan:
    """block_k tokens a step; block_n columns (and rows) of v^T g; splits: shares of the tokens."""
    size, wide = part.padded, compute is torch.float32
    units = multiprocessors(device)
    if not units:
        return Plan(64, min(64, size), 64, splits=2 if tokens > 2 * FLUSH else 1, dynamic="k")
    fits = size <= FUSED
    side = size if fits else 64 if wide else 128
    # Three stages of 128 tokens fit Hopper.
    long = side == 128 and shared_memory(device) >= 3 * 2 * 128 * 128 * 2
    rows = 16 if wide else 128 if long else 64
    tiles = part.packs * (size // side) ** 2
    programs = (2 if fits else 1) * (2 if wide else 1) * units
    splits = max(1, min(programs // tiles, -(-tokens // rows)))
    warps = 8 if side > FUSED or (wide and side > 32) or rescaled else 4
    return Plan(side, side, rows, warps, 2 if wide else 3 if fits or long else 4, splits, "k")


def fuses(part: Pass, compute: torch.dtype) -> bool:
    """Whether one launch takes v^T g and g M^T: they fit the registers together."""
    return part.padded <= FUSED and compute is not torch.float32
