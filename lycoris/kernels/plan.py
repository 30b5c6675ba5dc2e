"""Tile plans as data: one rule picks the tiles of a kernel from its shape, dtype and device.

Both backends read the same :class:`Plan`; neither chooses tiles of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import torch

#: A reduction longer than this adds its partial sums in a second fp32 level.
CHUNK = 512


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


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """How many tiles a GPU runs at once; 0 for a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 0


@lru_cache(maxsize=4096)
def matmul(m: int, n: int, k: int, itemsize: int, units: int, dynamic: str) -> Plan:
    """The plan of a skinny product (M, N) = (M, K) @ (K, N), from the shape alone.

    Args:
        m: rows of the output: the long side.
        n: columns of the output.
        k: the reduction.
        itemsize: bytes of the compute dtype.
        units: how many tiles the device runs at once; 0 for a CPU.
        dynamic: which dimension holds the token count.
    """
    if not units:  # simulated: one plan, so that there is one build; splits where a GPU has them
        return Plan(64, 32, 64, splits=2 if k > 2 * CHUNK else 1, dynamic=dynamic)
    wide = itemsize == 4
    if n > 256 and k <= 256:  # expand: a short reduction, a large output to stream
        block_m, block_n = min(64, max(16, power_of_2(m))), 128
        block_k = min(max(16, power_of_2(k)), 32 if wide else 64)
        return Plan(block_m, block_n, block_k, 4, 2, 1, dynamic)
    block_n = min(max(16, power_of_2(n)), 128)
    block_m = min(64, max(16, power_of_2(m)))
    block_k = min(32 if wide else 128, max(16, power_of_2(k)))
    if block_n > 64:
        block_k = min(block_k, 32 if wide else 64)
    tiles = -(-m // block_m) * -(-n // block_n)
    # A split pays for its second pass only where the reduction is long and the device idle.
    splits = 1
    if k > 2 * CHUNK and 2 * tiles <= units:
        splits = max(1, min(units // tiles, k // CHUNK, 16))
    return Plan(block_m, block_n, block_k, 4, 4, splits, dynamic)
