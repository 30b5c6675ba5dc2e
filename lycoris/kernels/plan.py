"""Tile plans as data: one rule picks the tiles of a kernel from its shape, dtype and device.

Both backends read the same :class:`Plan`; neither chooses tiles of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

import torch

#: A reduction longer than this adds its partial sums in a second fp32 level.
CHUNK = 512
#: Terms of sums of partial sums that a program adds at once: 16 a thread of 2 warps, and at most
#: 32 a thread of 16.
_ADDED, _MOST_ADDED = 1024, 16384


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of one kernel launch, in GEMM terms: out (M, N) = a (M, K) @ b (K, N).

    ``splits`` > 1 asks for fp32 partial sums over K, one slice of the output each, which core
    adds in a fixed order. ``dynamic`` names the dimension that holds the token count: a backend
    that compiles shapes in must leave that one symbolic.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3
    splits: int = 1
    dynamic: str = ""

    def strip(self, n: int) -> int:
        """How many tiles along N each of ``splits`` programs takes."""
        return tile_count(tile_count(n, self.block_n), self.splits)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """How many tiles a GPU runs at once; 0 for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 0


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a tile may take on a GPU; 0 where PyTorch doesn't say."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return getattr(properties, "shared_memory_per_block_optin", 0)
    return 0


@lru_cache(maxsize=4096)
def matmul(
    m: int, n: int, k: int, itemsize: int, units: int, dynamic: str, transposed: bool
) -> Plan:
    """The plan of a product (M, N) = (M, K) @ (K, N), skinny as a rule, from its shape alone.

    The tiles of 16 bits are among the best measured on an H200
    (bench/results/*-h200-matmul-tiles.txt). Those of fp32 were chosen to compile without spills.

    Args:
        m: rows of the output: the long side.
        n: columns of the output.
        k: the reduction.
        itemsize: bytes of the compute dtype.
        units: how many tiles the device runs at once; 0 for a CPU.
        dynamic: which dimension holds the token count.
        transposed: whether the (M, K) operand is contiguous along M.
    """
    if not units:  # simulated: one plan, so that there is one build; splits where a GPU has them
        return Plan(64, 32, 64, splits=2 if k > 2 * CHUNK else 1, dynamic=dynamic)
    wide = itemsize == 4
    even = n % 16 == k % 16 == 0  # odd operands, copied by single elements, spill in large tiles
    if n > 256 and k <= 256:  # a short reduction, a large output to stream
        block_k = min(max(16, power_of_2(k)), 32 if wide else 64)
        # Over a longer rank each tile of the factors is worth keeping for more of the output, and
        # 4 warps would spill.
        tall = 32 if wide or k <= 64 else 128 if k > 128 and even else 64
        block_m = min(tall, max(16, power_of_2(m)))
        stages, warps = 1 if k <= block_k else 2, 8 if block_k > 16 else 4
        return Plan(block_m, 128, block_k, warps, stages, 1, dynamic)
    # Of 128 columns, where that leaves tiles for three quarters of the device.
    tiles = tile_count(m, 128) * tile_count(n, 128)
    large = not wide and n >= 256 and even and 4 * tiles >= 3 * units
    if large and (not transposed or tiles >= units):
        return Plan(128, 128, 64, 8, 4 if k >= 4 * CHUNK else 3, 1, dynamic)
    block_n = min(max(16, power_of_2(n)), 32 if wide else 64)  # of more, odd operands would spill
    columns = tile_count(n, block_n)
    if transposed and k >= 4 * CHUNK:  # the tokens are summed: long rows of few columns each
        block_m, block_k = min(128, max(16, power_of_2(m))), 32 if wide else 64
        tiles = tile_count(m, block_m) * columns
        few = block_n == 64 and 4 * tiles <= units  # two programs a multiprocessor, of 4 warps
        splits = max(1, min((2 if few else 1) * units // tiles, k // (2 * CHUNK), 32))
        return Plan(block_m, block_n, block_k, 4 if few else 8, 3 if wide else 4, splits, dynamic)
    # A longer fp32 tile is faster, and its chain of truncating TF32 products breaks the bound.
    block_k = min(32 if wide else 128 if block_n == 16 else 64, max(16, power_of_2(k)))
    block_m, stages = min(64, max(16, power_of_2(m))), 4
    narrow = not wide and (block_n < 64 or not even)  # 32 x 64 of even operands spills, too
    if block_m == 64 and narrow and 4 * tile_count(m, 64) * columns < 3 * units:
        block_m = 32
        stages = 6 if block_n == 16 else 4  # half the tile: as many bytes in flight
    tiles = tile_count(m, block_m) * columns
    # A split pays for its second pass only where the reduction is long and the device idle.
    splits = min(units // tiles, k // (2 * CHUNK), 16) if k >= 4 * CHUNK and tiles < units else 1
    # Odd operands of 16 bits, copied by single elements, spill in 4 warps of the largest tile.
    single = not even and block_m == block_n == block_k == 64
    warps = 8 if single or (wide and block_n > 16) else 4
    return Plan(block_m, block_n, block_k, warps, stages, max(1, splits), dynamic)


def tile_count(size: int, block: int) -> int:
    """How many tiles of ``block`` cover ``size``."""
    return -(-size // block)


def sum_sizes(parts: torch.Tensor, out: torch.Tensor) -> tuple[int, int, int, int]:
    """Of ``out``, a sum of partial sums: their count, elements and width, and its own elements.

    ``parts`` is (count, *shape) or (count, *shape, width), and is summed over count and width;
    ``out`` has that shape, or its first rows.
    """
    count, *shape = parts.shape
    width = shape.pop() if len(shape) > out.dim() else 1
    return count, prod(shape), width, out.numel()


@lru_cache(maxsize=4096)
def sums(sizes: tuple[tuple[int, int], ...], units: int) -> Plan:
    """The plan that adds partial sums: up to two sums of (terms, elements), in one launch.

    M: how many terms of the first sum a program adds at once. K: the same of the second. N: terms
    times elements of a tile, the same for both.

    Args:
        sizes: how many terms each sum has for each of its elements.
        units: how many tiles the device runs at once; 0 for a CPU.
    """
    if not units:
        return Plan(32, 1024, 32, 16)
    # A row of a tile is a cache line or more, down to a sector where that leaves most of the
    # device idle while a program goes through its terms.
    columns = [min(32, power_of_2(size)) for _, size in sizes]
    for i, (terms, size) in enumerate(sizes):
        while columns[i] > 8 and terms * columns[i] > _ADDED:
            if 2 * tile_count(size, columns[i]) >= units:
                break
            columns[i] //= 2
    # Each step waits for its loads: few programs of many terms take longer ones, until there are
    # 32 KB on their way to every multiprocessor.
    tile = _ADDED
    while tile < _MOST_ADDED and any(
        terms * row > tile and tile_count(size, row) * tile < 8192 * units
        for (terms, size), row in zip(sizes, columns, strict=True)
    ):
        tile *= 2
    rows = [
        min(power_of_2(terms), tile // row) for (terms, _), row in zip(sizes, columns, strict=True)
    ]
    return Plan(rows[0], tile, rows[-1], min(16, tile // 512), 1)
