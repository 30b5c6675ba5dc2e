"""What the TileLang kernels of DoRA share: tiles of W [+ delta] [+ s up down], and their launching.

An operand that is absent is the weight, or the norms, once more, and is not touched: one prim_func
serves every variant. On a CPU one fp32 build serves every dtype too: operands are converted on the
way in, which is exact (``mma`` ones by way of the compute dtype), results rounded on the way out.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from collections.abc import Callable
from typing import Any

import torch

from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES

Tensor = torch.Tensor
Number = float | torch.Tensor

# Squares neither vanish nor overflow where the largest element is within 2^-60..2^50. 2^109 and
# 2^-109 are what TileLang's C target prints exactly, with its seven digits.
_SMALL, _LARGE, _RAISE, _LOWER = 2.0**-60, 2.0**50, 2.0**109, 2.0**-109


class Tiles:
    """Sizes, buffers and macros that the kernels of one build share.

    Args:
        sizes: O, N, r, lines, columns of a line, columns of a program; None stays symbolic.
        blocks: of rows, columns and rank.
        weight, delta, factors, compute: TileLang's dtypes; None for what is absent. ``factors``
            is that of up and down.
        by_column: whether a line is a group of columns.
        fused: whether products are fused multiply-adds, not matrix instructions (true fp32).
        index: the dtype of symbolic sizes.
    """

    def __init__(
        self,
        sizes: tuple[int | None, ...],
        blocks: tuple[int, int, int],
        weight: str,
        delta: str | None,
        factors: str | None,
        compute: str,
        by_column: bool,
        fused: bool,
        index: str,
    ) -> None:
        import tilelang.language as T  # takes seconds: not before a kernel is built

        self.T, self.blocks, self.by_column, self.index = T, blocks, by_column, index
        named = zip(("o", "n", "r", "l", "k", "w"), sizes, strict=True)
        self.sizes = [T.dynamic(name, index) if size is None else size for name, size in named]
        O, N, _, _, _, W = self.sizes
        block_m, block_n, _ = blocks
        self.lanes = block_n if by_column else block_m
        self.dim = 0 if by_column else 1
        self.grid = T.ceildiv(N, W) if by_column else T.ceildiv(O, block_m)
        self.row_steps = T.ceildiv(O, block_m) if by_column else 1
        self.column_steps = T.ceildiv(W, block_n) if by_column else T.ceildiv(N, block_n)
        self.once = all(isinstance(s, int) for s in sizes) and (
            int(self.row_steps) * int(self.column_steps) == 1
        )
        self.weight, self.delta, self.compute = weight, delta, compute
        self.up, self.factored, self.fused = factors, factors is not None, fused

    def matrix(self, dtype: str | None = None) -> Any:
        """The type of a weight."""
        return self.T.Tensor(
            (self.sizes[0], self.sizes[1]), self.weight if dtype is None else dtype
        )

    def vector(self, dtype: str = "float32") -> Any:
        """The type of what has one element a line."""
        return self.T.Tensor((self.sizes[3],), dtype)

    def number(self, by_tensor: bool) -> Any:
        return self.T.Tensor((1,), "float32") if by_tensor else self.T.float32

    def widths(self) -> Any:
        """The types of two operands that are there for their sizes only: a line, and a slab."""
        T = self.T
        return T.Tensor((self.sizes[4],), "float32"), T.Tensor((self.sizes[5],), "float32")

    def factors(self) -> Any:
        """The types of up and down."""
        T, (O, N, R, *_) = self.T, self.sizes
        if not self.factored:
            return self.matrix(), self.matrix()
        return T.Tensor((O, R), self.up), T.Tensor((R, N), self.up)

    def place(self, program: Any, row_step: Any, column_step: Any) -> tuple[Any, Any]:
        """The first row and column of a tile."""
        block_m, block_n, _ = self.blocks
        if self.by_column:
            return row_step * block_m, program * self.sizes[5] + column_step * block_n
        return program * block_m, column_step * block_n

    def buffers(self) -> Any:
        """The tile of M, what it is read through, and one value a lane, as often as asked for."""
        T, (block_m, block_n, block_r) = self.T, self.blocks
        raw = T.alloc_fragment((block_m, block_n), self.weight)
        more = T.alloc_fragment((block_m, block_n), self.delta) if self.delta else raw
        tile = T.alloc_fragment((block_m, block_n), "float32")
        up = T.alloc_shared((block_m, block_r), self.compute) if self.factored else raw
        down = T.alloc_shared((block_r, block_n), self.compute) if self.factored else raw
        if not self.factored:
            return raw, more, tile, up, down, tile, tile
        product = T.alloc_fragment((block_m, block_n), "float32")
        staged = T.alloc_shared((block_m, block_n), "float32")
        return raw, more, tile, up, down, product, staged

    def merged(self, slabs: bool = True) -> Callable[..., None]:
        """A macro that fills ``tile`` with weight [+ delta] [+ factor * up @ down].

        Where lines are columns and a program owns a slab of whole lines, the tile ends with it.
        """
        T, (block_m, block_n, block_r) = self.T, self.blocks
        R, W = self.sizes[2], self.sizes[5]
        has_delta, factored, fused = self.delta is not None, self.factored, self.fused
        cut = self.by_column and slabs

        @T.macro
        def fill(
            weight: Any, delta: Any, up: Any, down: Any, factor: Any,
            row: Any, column: Any, place: Any, buffers: Any,
        ) -> None:  # fmt: skip
            raw, more, tile, up_s, down_s, product, staged = buffers
            if factored:
                T.clear(product)
                for r in T.serial(T.ceildiv(R, block_r)):
                    T.copy(up[row, r * block_r], up_s)
                    T.copy(down[r * block_r, column], down_s)
                    if fused:
                        for i, j in T.Parallel(block_m, block_n):
                            for q in T.serial(block_r):
                                product[i, j] += up_s[i, q] * down_s[q, j]
                    else:
                        T.gemm(up_s, down_s, product)
            if factored:  # through shared memory: sums by line want another layout
                T.copy(product, staged)
            T.copy(weight[row, column], raw)
            if has_delta:
                T.copy(delta[row, column], more)
            for i, j in T.Parallel(block_m, block_n):
                if factored:
                    tile[i, j] = T.cast(raw[i, j], "float32") + factor * staged[i, j]
                else:
                    tile[i, j] = T.cast(raw[i, j], "float32")
                if has_delta:
                    tile[i, j] += T.cast(more[i, j], "float32")
                if cut:  # past the slab lies the next program's
                    tile[i, j] = T.if_then_else(place + j < W, tile[i, j], T.float32(0))

        return fill

    def joined(self, largest: bool) -> Callable[..., None]:
        """A macro: each lane's value becomes the sum, or the maximum, over its line's lanes."""
        T, K, lanes = self.T, self.sizes[4], self.lanes
        needed = self.by_column and not (isinstance(K, int) and K == 1)

        @T.macro
        def join(value: Any, copy: Any) -> None:
            if needed:
                for j in T.Parallel(lanes):
                    copy[j] = value[j]
                for j in T.Parallel(lanes):
                    value[j] = 0
                    for q in T.serial(T.min(K, lanes)):
                        at = T.min(j // K * K + q, lanes - 1)
                        if largest:
                            value[j] = T.max(value[j], copy[at])
                        else:
                            value[j] += copy[at]

        return join

    def power(self, top: Any) -> Any:
        """The power of two that brings a line whose largest element is ``top`` into range."""
        T = self.T
        low = T.if_then_else(top > _LARGE, T.float32(_LOWER), T.float32(1))
        return T.if_then_else(top < _SMALL, T.float32(_RAISE), low)

    def unpower(self, top: Any) -> Any:
        """The inverse of :meth:`power`."""
        T = self.T
        low = T.if_then_else(top > _LARGE, T.float32(_RAISE), T.float32(1))
        return T.if_then_else(top < _SMALL, T.float32(_LOWER), low)


def ratio(T: Any, magnitude: Any, norm: Any) -> Any:
    """magnitude / norm; 0 where the norm is 0."""
    # A NaN is not 0, so that it reaches the whole line.
    return T.if_then_else(norm == 0, T.float32(0), magnitude / norm)


def tiles_of(
    weight: Tensor,
    delta: Tensor | None,
    up: Tensor | None,
    norm: Tensor,
    group: int,
    plan: Plan,
    policy: Policy,
) -> tuple[Any, ...]:
    """The arguments of :class:`Tiles`: on a CPU nothing is compiled in that need not be."""
    on_cpu = not weight.is_cuda
    rank = 0 if up is None else up.shape[1]
    sizes = (*weight.shape, rank, norm.shape[0], group or 1, _slab(group, plan))
    return (
        (None,) * 6 if on_cpu else sizes,
        (plan.block_m, plan.block_n, max(16, plan.block_k)),
        name(weight),
        name(delta),
        name(up),
        "float32" if on_cpu else NAMES[policy.compute],
        group > 0,
        on_cpu or (policy.compute is torch.float32 and not policy.tf32),
        "int64" if on_cpu else "int32",
    )


def _slab(group: int, plan: Plan) -> int:
    return max(1, plan.block_n // group) * group if group else 1


def name(t: Tensor | None) -> str | None:
    """TileLang's name of the dtype a kernel sees."""
    return None if t is None else NAMES[t.dtype] if t.is_cuda else "float32"


def widths(weight: Tensor, group: int, plan: Plan) -> tuple[Tensor, Tensor]:
    """Two tensors that are there for their sizes only: a line's columns, and a program's."""
    sizes = (group or 1, _slab(group, plan))
    first, second = (torch.empty(size, device=weight.device) for size in sizes)
    return first, second


def threads_of(t: Tensor, plan: Plan) -> int:
    """A block's threads; on a CPU one build serves every number."""
    return 32 * (plan.num_warps if t.is_cuda else 1)


def is_tensor(*numbers: Number) -> tuple[bool, ...]:
    """Which of the numbers are 0-d tensors."""
    return tuple(isinstance(number, torch.Tensor) for number in numbers)


def call(
    kernel: Any, policy: Policy, inputs: list[Any], outputs: list[Any], mma: tuple[int, ...] = ()
) -> None:
    """Runs a kernel on its inputs, then outputs; ``mma``: which inputs are cast to compute."""
    values = [t.reshape(1) if isinstance(t, torch.Tensor) and not t.dim() else t for t in inputs]
    if outputs[0].is_cuda:
        kernel(*values, *outputs)
        return
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            values[i] = (value.to(policy.compute) if i in mma else value).float()
    made = [t if t.dtype is torch.float32 else t.float() for t in outputs]
    kernel(*values, *made)
    for out, value in zip(outputs, made, strict=True):
        absent = any(out is t for t in inputs)
        if value is not out and not absent:
            out.copy_(value)
