"""Where the elements of a rotation's packs are: what its TileLang kernels have in common."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.rotation import Pass

#: Integers that a kernel needs beside its tensors, in order.
INTEGERS = (
    *("tiles", "per", "tokens", "share", "outer_step", "token_step", "channel_step"),
    *("unit", "stages", "low", "width", "pack", "groups", "packs"),
)
#: What changes with the token count, and stays an argument on CUDA too.
DYNAMIC = {"tiles", "per", "tokens", "share"}


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in a row; a view of what is contiguous."""
    return tensor.reshape(-1)


def div(a: Any, b: Any) -> Any:
    """a // b of numbers that are not negative; // itself doubles its operands for each sign."""
    from tilelang.language import truncdiv

    return truncdiv(a, b)


def mod(a: Any, b: Any) -> Any:
    """a % b of numbers that are not negative."""
    from tilelang.language import truncmod

    return truncmod(a, b)


def product_start(T: Any, stage: Any, group: Any, groups: Any, width: Any) -> Any:
    """Where the group's entries of the product from ``stage`` on start; see ``compose``."""
    before = T.cast(groups * width, "int64") * (2 * width - ((2 * width) >> stage))
    return before + T.cast(group, "int64") * (width * (width >> stage))


def block_number(group: Any, within: Any, low: Any, per: Any) -> Any:
    """The number of a block among a stage's: of block ``within`` of a group that has ``per``."""
    return (div(group, low) * per + within) * low + mod(group, low)


def reversed_bits(y: Any, bits: Any) -> Any:
    """The number of up to 8 bits that are y's in reverse."""
    y = ((y & 0x55) << 1) | ((y >> 1) & 0x55)
    y = ((y & 0x33) << 2) | ((y >> 2) & 0x33)
    y = ((y & 0x0F) << 4) | (y >> 4)
    return y >> (8 - bits)


def channel_of(T: Any, g: Any, p: Any, width: Any, unit: Any, stages: Any, low: Any) -> Any:
    """The channel of position p in group g."""
    strided = (((div(g, low) << stages) + div(p, unit)) * low + mod(g, low)) * unit + mod(p, unit)
    return T.if_then_else(low == 1, g * width + p, strided)


def layout(x: torch.Tensor) -> tuple[int, int, tuple[int, int, int], bool]:
    """Outer size, tokens, and the strides of both and of channels of an (A, C, B) tensor."""
    a, channels, b = x.shape
    if b == 1:
        return 1, a, (0, channels, 1), True
    return a, b, (channels * b, 1, b), False


def integers_of(x: torch.Tensor, part: Pass, block: int, splits: int) -> dict[str, int]:
    outer, tokens, strides, _ = layout(x)
    per = -(-tokens // block)
    tiles = outer * per
    shape = (part.unit, part.stages, part.low, part.width, part.pack, part.groups, part.packs)
    return dict(
        zip(INTEGERS, (tiles, per, tokens, -(-tiles // splits), *strides, *shape), strict=True)
    )


def fixed_of(integers: dict[str, int], on_cpu: bool) -> tuple[int | None, ...]:
    """The integers that are compiled in; None for those that are arguments."""
    return tuple(None if on_cpu or n in DYNAMIC else v for n, v in integers.items())


def flat_or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """``tensor`` flattened; in its place ``other``, which is not read, where there is none."""
    return flat(other if tensor is None else tensor)


def index_macro(T: Any, padded: int) -> Any:
    """A macro that lists the channel at each position of a pack, or -1: kernels look it up."""

    @T.macro
    def index(
        channels: Any, which: Any, unit: Any, stages: Any, low: Any, width: Any, pack: Any,
        groups: Any,
    ) -> None:  # fmt: skip
        for z in T.Parallel(padded):
            g = which * pack + div(z, width)
            if z < pack * width and g < groups:
                channels[z] = channel_of(T, g, mod(z, width), width, unit, stages, low)
            else:
                channels[z] = -1

    return index
