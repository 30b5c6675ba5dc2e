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
        sizes: O, N, r, lines, columns of a line; None stays symbolic.
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
        named = zip(("o", "n", "r", "l", "k"), sizes, strict=True)
        self.sizes = [T.dynamic(name, index) if size is None else size for name, size in named]
        block_m, block_n, _ = blocks
        self.lanes = block_n if by_column else block_m
        self.dim = 0 if by_column else 1
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

    def width(self) -> Any:
        """The type of an operand that is there for its size only: the columns of a line."""
        return self.T.Tensor((self.sizes[4],), "float32")

    def factors(self) -> Any:
        """The types of up and down."""
        T, (O, N, R, *_) = self.T, self.sizes
        if not self.factored:
            return self.matrix(), self.matrix()
        return T.Tensor((O, R), self.up), T.Tensor((R, N), self.up)

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

    def merged(self) -> Callable[..., None]:
        """A macro that fills ``tile`` with weight [+ delta] [+ factor * up @ down]."""
        T, (block_m, block_n, block_r) = self.T, self.blocks
        R = self.sizes[2]
        has_delta, factored, fused = self.delta is not None, self.factored, self.fused

        @T.macro
        def fill(
            weight: Any, delta: Any, up: Any, down: Any, factor: Any,
            row: Any, column: Any, buffers: Any,
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

        return fill

    def power(self, top: Any) -> Any:
        return power_of(self.T, top)


def power_of(T: Any, top: Any) -> Any:
    """The power of two that brings a line whose largest element is ``top`` into range."""
    low = T.if_then_else(top > _LARGE, T.float32(_LOWER), T.float32(1))
    return T.if_then_else(top < _SMALL, T.float32(_RAISE), low)


def unpower_of(T: Any, top: Any) -> Any:
    """The inverse of :func:`power_of`."""
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
    sizes = (*weight.shape, rank, norm.shape[0], group or 1)
    return (
        (None,) * 5 if on_cpu else sizes,
        (plan.block_m, plan.block_n, max(16, plan.block_k)),
        name(weight),
        name(delta),
        name(up),
        "float32" if on_cpu else NAMES[policy.compute],
        group > 0,
        on_cpu or (policy.compute is torch.float32 and not policy.tf32),
        "int64" if on_cpu else "int32",
    )


def name(t: Tensor | None) -> str | None:
    """TileLang's name of the dtype a kernel sees."""
    return None if t is None else NAMES[t.dtype] if t.is_cuda else "float32"


def width_of(weight: Tensor, group: int) -> Tensor:
    """A tensor that is there for its size only: the columns of a line."""
    return torch.empty(group or 1, device=weight.device)


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
