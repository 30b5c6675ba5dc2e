"""The Cayley solve of a rotation's blocks, in fp64: D = R - I = 2 (I - Q)^-1 Q.

Sizes are arguments, so that one build serves every shape.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import build

THREADS = 128


@prepared
def eliminate(
    q: torch.Tensor,
    source: torch.Tensor | None,
    target: torch.Tensor,
    step: int,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """Step ``step`` of the solve D = 2 (I - Q)^-1 Q for every block, all fp64.

    ``q`` (n, s, s). A step eliminates ``plan.block_n`` columns of [I - Q | 2 Q]; between steps that
    is kept as (n, s, 2 s). The first has no source; the last one's ``target`` (n, s, s) takes D.
    fp64, so that growth of the entries, up to the square of Q, costs no digit that fp32 has.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    count, size, _ = q.shape
    # A block of one tile may lie in a larger one.
    tile = max(16, plan.block_n)
    tiles = -(-size // tile)
    params = (tile, source is None, step == tiles - 1, THREADS)
    kernel = build(eliminate_kernel, params, q.device)

    def launch(
        q: torch.Tensor, source: torch.Tensor | None, target: torch.Tensor, step: int
    ) -> None:
        read = q if source is None else source
        kernel(read.view(-1), target.view(-1), count, size, step, tiles)

    return launch


def eliminate_kernel(tile: int, first: bool, last: bool, threads: int) -> Any:
    """One step of a block Gauss-Jordan elimination, for one tile of [I - Q | 2 Q].

    No pivot is small: I - Q and its Schur complements have a symmetric part of at least I.
    """
    import tilelang.language as T

    n, m = T.dynamic("n", "int64"), T.dynamic("m", "int64")

    @T.macro
    def fetch(source: Any, tile_s: Any, block: Any, r0: Any, c0: Any, size: Any, wide: Any) -> None:
        """A tile of [I - Q | 2 Q] at row r0, column c0; 2 Q's columns start at ``wide``."""
        for i, j in T.Parallel(tile, tile):
            r = r0 + i
            c = T.if_then_else(c0 + j >= wide, c0 + j - wide, c0 + j)
            unit = T.if_then_else(r == c0 + j, T.float64(1), T.float64(0))
            if r < size and c < size:
                if first:
                    q = source[(block * size + r) * size + c]
                    tile_s[i, j] = T.if_then_else(c0 + j >= wide, 2 * q, unit - q)
                else:
                    shift = T.if_then_else(c0 + j >= wide, size, 0)
                    tile_s[i, j] = source[(block * size + r) * (2 * size) + c + shift]
            else:
                tile_s[i, j] = unit

    @T.prim_func
    def eliminate(
        source: T.Tensor((n,), "float64"),
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
            value = T.alloc_shared((tile, tile), "float64")
            row = T.alloc_shared((tile,), "float64")
            col = T.alloc_shared((tile,), "float64")
            wide = tiles * tile
            at = step * tile
            c0 = (step + 1 + bx) * tile
            r0 = by * tile
            fetch(source, p, block, at, at, size, wide)
            for k in T.serial(tile):
                for i in T.Parallel(tile):
                    row[i] = p[k, i] / T.if_then_else(i == k, T.float64(1), p[k, k])
                    col[i] = p[i, k]
                for i, j in T.Parallel(tile, tile):
                    inner = T.if_then_else(j == k, -col[i] / row[k], p[i, j] - col[i] * row[j])
                    p[i, j] = T.if_then_else(
                        i == k, T.if_then_else(j == k, 1 / row[k], row[j]), inner
                    )
            fetch(source, rows, block, at, c0, size, wide)
            for i, j in T.Parallel(tile, tile):
                y[i, j] = 0
                for k in T.serial(tile):
                    y[i, j] += p[i, k] * rows[k, j]
            if by == step:
                for i, j in T.Parallel(tile, tile):
                    value[i, j] = y[i, j]
            else:
                fetch(source, value, block, r0, c0, size, wide)
                fetch(source, rows, block, r0, at, size, wide)
                for i, j in T.Parallel(tile, tile):
                    for k in T.serial(tile):
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
