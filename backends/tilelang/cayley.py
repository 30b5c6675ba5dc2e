"""The Cayley solve of a rotation's blocks, D = R - I = 2 (I - Q)^-1 Q, and back; all in fp64.

Sizes are arguments, so that one build serves every shape.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .rotation_layout import div, mod

THREADS = 128


@prepared
def eliminate(
    blocks: torch.Tensor,
    held: torch.Tensor | None,
    source: torch.Tensor | None,
    target: torch.Tensor,
    step: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Step ``step`` of the solve D = 2 (I - Q)^-1 Q for every block, Q = held * (B - B^T).

    ``blocks`` (n, s, s) hold B in any dtype, ``held`` is 0-d and fp64, or 1. A step eliminates
    ``plan.block_n`` columns of [I - Q | 2 Q]; between steps that is kept as (n, s, 2 s), fp64. The
    first has no source; the last one's ``target`` (n, s, s) takes D. fp64, so that growth of the
    entries, up to the square of Q, costs no digit that fp32 has.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    count, size, _ = blocks.shape
    # A block of one tile may lie in a larger one.
    tile = max(16, plan.block_n)
    tiles = -(-size // tile)
    first = source is None
    read_dtype = NAMES[blocks.dtype] if first else "float64"
    holds = first and held is not None
    if tiles == 1:
        whole = build(invert_kernel, (tile, read_dtype, holds, THREADS), blocks.device)

        def solve(
            blocks: torch.Tensor, held: torch.Tensor | None, _: None, target: torch.Tensor, *__: int
        ) -> None:
            factor = target if held is None else held
            whole(blocks.view(-1), factor.view(-1), target.view(-1), count, size)

        return solve
    params = (tile, read_dtype, holds, first, step == tiles - 1, THREADS)
    kernel = build(eliminate_kernel, params, blocks.device)

    def launch(
        blocks: torch.Tensor,
        held: torch.Tensor | None,
        source: torch.Tensor | None,
        target: torch.Tensor,
        step: int,
    ) -> None:
        read = blocks if source is None else source
        factor = target if held is None else held  # not read where there is none
        kernel(read.view(-1), factor.view(-1), target.view(-1), count, size, step, tiles)

    return launch


def invert_kernel(tile: int, read_dtype: str, holds: bool, threads: int) -> Any:
    """D = 2 ((I - Q)^-1 - I) of a block of one tile.

    A step inverts one pivot of the tableau, whose diagonal is kept less I: no digit is lost to I,
    however small Q is. No pivot is small, as in :func:`eliminate_kernel`.
    """
    import tilelang.language as T

    n, h, m = (T.dynamic(name, "int64") for name in "nhm")

    @T.macro
    def step(v: Any, value: Any, after: Any, k: Any) -> None:
        for i, j in T.Parallel(tile, tile):
            inverse = T.float64(1) / (1 + v[k, k])
            scaled = v[i, k] * inverse
            rest = v[i, j] - scaled * v[k, j]
            other = T.if_then_else(i == k, v[k, j] * inverse, rest)
            value[i, j] = T.if_then_else(j == k, -scaled, other)
        T.copy(value, after)

    @T.prim_func
    def invert(
        source: T.Tensor((n,), read_dtype),
        held: T.Tensor((h,), "float64"),
        out: T.Tensor((m,), "float64"),
        count: T.int32,
        size: T.int32,
    ) -> None:
        with T.Kernel(count, threads=threads) as block:
            even = T.alloc_shared((tile, tile), "float64")
            odd = T.alloc_shared((tile, tile), "float64")
            value = T.alloc_fragment((tile, tile), "float64")
            start = T.cast(block, "int64") * (size * size)
            for i, j in T.Parallel(tile, tile):
                if i < size and j < size:
                    upper = T.cast(source[start + i * size + j], "float64")
                    lower = T.cast(source[start + j * size + i], "float64")
                    even[i, j] = (lower - upper) * (held[0] if holds else T.float64(1))
                else:
                    even[i, j] = 0
            # A step on what lies beyond the block changes nothing.
            for pair in T.serial(T.ceildiv(size, 2)):
                step(even, value, odd, 2 * pair)
                step(odd, value, even, 2 * pair + 1)
            for i, j in T.Parallel(tile, tile):
                if i < size and j < size:
                    out[start + i * size + j] = 2 * even[i, j]

    return invert


def eliminate_kernel(
    tile: int, read_dtype: str, holds: bool, first: bool, last: bool, threads: int
) -> Any:
    """One step of a block Gauss-Jordan elimination, for one tile of [I - Q | 2 Q].

    No pivot is small: I - Q and its Schur complements have a symmetric part of at least I.
    """
    import tilelang.language as T

    n, h, m = (T.dynamic(name, "int64") for name in "nhm")

    @T.macro
    def fetch(
        source: Any, held: Any, tile_s: Any, block: Any, r0: Any, c0: Any, size: Any, wide: Any
    ) -> None:
        """A tile of [I - Q | 2 Q] at row r0, column c0; 2 Q's columns start at ``wide``."""
        for i, j in T.Parallel(tile, tile):
            r = r0 + i
            c = T.if_then_else(c0 + j >= wide, c0 + j - wide, c0 + j)
            unit = T.if_then_else(r == c0 + j, T.float64(1), T.float64(0))
            if r < size and c < size:
                if first:
                    upper = T.cast(source[(block * size + r) * size + c], "float64")
                    lower = T.cast(source[(block * size + c) * size + r], "float64")
                    q = (upper - lower) * (held[0] if holds else T.float64(1))
                    tile_s[i, j] = T.if_then_else(c0 + j >= wide, 2 * q, unit - q)
                else:
                    shift = T.if_then_else(c0 + j >= wide, size, 0)
                    tile_s[i, j] = source[(block * size + r) * (2 * size) + c + shift]
            else:
                tile_s[i, j] = unit

    @T.prim_func
    def eliminate(
        source: T.Tensor((n,), read_dtype),
        held: T.Tensor((h,), "float64"),
        out: T.Tensor((m,), "float64"),
        count: T.int32,
        size: T.int32,
        step: T.int32,
        tiles: T.int32,
    ) -> None:
        with T.Kernel(2 * tiles - step - 1, tiles, count, threads=threads) as (bx, by, block):
            p = T.alloc_shared((tile, tile), "float64")
            rows = T.alloc_shared((tile, tile), "float64")
            y = T.alloc_shared((tile, tile), "float64")
            value = T.alloc_fragment((tile, tile), "float64")
            row = T.alloc_shared((tile,), "float64")
            col = T.alloc_shared((tile,), "float64")
            wide = tiles * tile
            at = step * tile
            c0 = (step + 1 + bx) * tile
            r0 = by * tile
            fetch(source, held, p, block, at, at, size, wide)
            # Beyond the block's size is the identity, which asks for no elimination.
            deep = T.min(tile, size - at)
            for k in T.serial(deep):
                for i in T.Parallel(tile):
                    row[i] = T.if_then_else(i == k, T.float64(1), p[k, i]) / p[k, k]
                    col[i] = p[i, k]
                for i, j in T.Parallel(tile, tile):
                    rest = T.if_then_else(j == k, T.float64(0), p[i, j]) - col[i] * row[j]
                    p[i, j] = T.if_then_else(i == k, row[j], rest)
            fetch(source, held, rows, block, at, c0, size, wide)
            for i, j in T.Parallel(tile, tile):
                value[i, j] = 0
                for k in T.serial(deep):
                    value[i, j] += p[i, k] * rows[k, j]
            if by != step:
                T.copy(value, y)
                fetch(source, held, value, block, r0, c0, size, wide)
                fetch(source, held, rows, block, r0, at, size, wide)
                for i, j in T.Parallel(tile, tile):
                    for k in T.serial(deep):
                        value[i, j] -= rows[i, k] * y[k, j]
            for i, j in T.Parallel(tile, tile):
                r = r0 + i
                c = T.if_then_else(c0 + j >= wide, c0 + j - wide, c0 + j)
                if r < size and c < size:
                    if last:
                        out[(block * size + r) * size + c] = value[i, j]
                    else:
                        shift = T.if_then_else(c0 + j >= wide, size, 0)
                        out[(block * size + r) * (2 * size) + c + shift] = value[i, j]

    return eliminate


@prepared
def cayley_gradient(
    delta: torch.Tensor,
    total: torch.Tensor,
    out: torch.Tensor,
    pack: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradient of B from that of D, for blocks of one tile: dQ - dQ^T with dD = 2 N dQ N.

    ``delta`` (n, s, s) holds D, fp64; ``out`` is like it, in any dtype. dD is the sum over the
    shares of ``total`` (shares, packs, padded, padded), fp32 or fp64, with ``pack`` blocks on the
    diagonal of each matrix. N = (I - Q)^-1 = I + D / 2.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    size = delta.shape[1]
    names = {**NAMES, torch.float64: "float64"}
    stored, summed = names[out.dtype], names[total.dtype]
    # A CPU's build serves every size; the tiles of small blocks lie side by side in a program.
    on_cpu = not delta.is_cuda
    tile = max(16 if on_cpu else 4, plan.block_n)
    beside = 1 if on_cpu else max(1, plan.block_m * plan.block_n**2 // tile**2)
    known = None if on_cpu else (size, pack, *total.shape[1:3])
    params = (beside, tile, known, stored, summed, 32 * plan.num_warps)
    kernel = build(cayley_gradient_kernel, params, delta.device)

    def launch(delta: torch.Tensor, total: torch.Tensor, out: torch.Tensor, pack: int) -> None:
        kernel(delta, total, out.view(delta.shape), pack)

    return launch


def cayley_gradient_kernel(
    beside: int,
    tile: int,
    known: tuple[int, int, int, int] | None,
    stored: str,
    summed: str,
    threads: int,
) -> Any:
    """out = Z - Z^T with Z = 2 N^T dD N^T, of ``beside`` blocks.

    ``known``: the size of a block, how many a pack has, the packs and their columns.
    """
    import tilelang.language as T

    count = T.dynamic("count")
    shares, size, packs, padded = map(T.dynamic, ("shares", "size", "packs", "padded"))
    if known is not None:
        size, _, packs, padded = known

    @T.prim_func
    def cayley_gradient(
        delta: T.Tensor((count, size, size), "float64"),
        total: T.Tensor((shares, packs, padded, padded), summed),
        out: T.Tensor((count, size, size), stored),
        a_pack: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(count, beside), threads=threads) as first:
            inverse = T.alloc_shared((beside, tile, tile), "float64")
            # Rows that are written, or read, by column lie a bank apart.
            turned = T.alloc_shared((beside, tile, tile + 1), "float64")
            middle = T.alloc_shared((beside, tile, tile), "float64")
            left = T.alloc_shared((beside, tile, tile + 1), "float64")
            z = T.alloc_shared((beside, tile, tile + 1), "float64")
            sums = T.alloc_fragment((beside, tile, tile), "float64")
            pack = a_pack if known is None else known[1]
            for b, i, j in T.Parallel(beside, tile, tile):
                block = first * beside + b
                if block < count and i < size and j < size:
                    unit = T.if_then_else(i == j, T.float64(1), T.float64(0))
                    inverse[b, i, j] = unit + delta[block, i, j] / 2
                else:
                    inverse[b, i, j] = 0
                turned[b, j, i] = inverse[b, i, j]
            T.clear(sums)
            for share in T.serial(shares):
                for b, i, j in T.Parallel(beside, tile, tile):
                    block = first * beside + b
                    if block < count and i < size and j < size:
                        which, start = div(block, pack), mod(block, pack) * size
                        sums[b, i, j] += T.cast(
                            total[share, which, start + i, start + j], "float64"
                        )
            T.copy(sums, middle)
            # A thread's sums grow together: none waits for the addition before its own.
            T.clear(sums)
            for k in T.serial(size):
                for b, i, j in T.Parallel(beside, tile, tile):
                    sums[b, i, j] += inverse[b, k, i] * middle[b, k, j]
            T.copy(sums, left[0:beside, 0:tile, 0:tile])
            T.clear(sums)
            for k in T.serial(size):
                for b, i, j in T.Parallel(beside, tile, tile):
                    sums[b, i, j] += left[b, i, k] * turned[b, k, j]
            T.copy(sums, z[0:beside, 0:tile, 0:tile])
            for b, i, j in T.Parallel(beside, tile, tile):
                block = first * beside + b
                if block < count and i < size and j < size:
                    value = 2 * (z[b, i, j] - z[b, j, i])
                    if stored == "float64":
                        out[block, i, j] = value
                    else:
                        out[block, i, j] = T.cast(T.cast(value, "float32"), stored)

    return cayley_gradient
