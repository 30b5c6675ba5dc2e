"""What small matrices need of plain torch operations between a rotation's kernels, in fp64.

All of it is batched products and element-wise operations on the call's device: it waits for
nothing, can be captured in a CUDA graph, and no TF32 setting reaches it. The common path, blocks
of up to 32 without constraint or rescale in bf16 or fp32, takes none of these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rotation import Pass

# -------------------------------------------------------------------------- the constraint


def _skew(blocks: Tensor) -> Tensor:
    """Q = B - B^T of every block."""
    wide = blocks.double()
    return wide - wide.mT


def held(blocks: Tensor, constraint: float | None) -> Tensor | None:
    """What the constraint multiplies Q by: 0-d, on the device; None without a constraint."""
    if constraint is None:
        return None
    norm = torch.linalg.vector_norm(_skew(blocks))
    active = norm > constraint
    return torch.where(active, constraint / torch.where(active, norm, 1.0), 1.0)


def through_norm(found: Tensor, blocks: Tensor, factor: Tensor) -> Tensor:
    """The gradient of B from that of the held Q, less its transpose: ``factor`` depends on Q."""
    q = _skew(blocks)
    radial = (found * q).sum() / q.square().sum().clamp(min=1e-300)
    return factor * (found - torch.where(factor < 1, radial, 0.0) * q)


def cayley_gradient(delta: Tensor, deltas: Tensor) -> Tensor:
    """dQ - dQ^T from dD, (n, s, s) both, for blocks too large for the kernel of that name."""
    inverse = delta * 0.5
    inverse.diagonal(dim1=1, dim2=2).add_(1.0)
    half = torch.bmm(inverse.mT, deltas)
    inward = torch.bmm(half, inverse.mT).mul_(2.0)
    return inward - inward.mT


# ---------------------------------------------------------------- channels and packs


def by_column(rescale: Tensor, part: Pass) -> Tensor:
    """(channels,) in the order of the groups' columns, (groups, width)."""
    wide = rescale.double()
    if not part.butterfly:
        return wide.reshape(part.groups, part.width)
    bits = part.stages
    units = wide.reshape(-1, *[2] * bits, part.low, part.unit)
    turned = units.permute(0, bits + 1, *range(bits, 0, -1), bits + 2)
    return turned.reshape(part.groups, part.width)


def by_channel(values: Tensor, part: Pass) -> Tensor:
    """What :func:`by_column` undoes."""
    if not part.butterfly:
        return values.reshape(-1)
    bits = part.stages
    units = values.reshape(-1, part.low, *[2] * bits, part.unit)
    return units.permute(0, *range(bits + 1, 1, -1), 1, bits + 2).reshape(-1)


def own(values: Tensor, part: Pass) -> Tensor:
    """The entries of (groups, width, width) that lead from a channel to itself, by column."""
    if not part.butterfly:
        return values.diagonal(dim1=1, dim2=2)
    bits = part.stages
    at = torch.arange(part.width, device=values.device).view(*[2] * bits, part.unit)
    row = at.permute(*range(bits - 1, -1, -1), bits).reshape(1, 1, part.width)
    return values.gather(1, row.expand(part.groups, 1, part.width))[:, 0]


def power(matrix: Tensor, part: Pass) -> Tensor:
    """A power of two for each pack, (packs,) fp32, by which its largest entry is near 16.

    fp16 has too few exponents for M and its low part: they are kept divided by it.
    """
    top = torch.linalg.vector_norm(matrix, torch.inf, dim=(1, 2))
    # A group that isn't finite is its own fault: it says nothing about the rest of its pack.
    top = torch.where(top.isfinite(), top, 4.0).clamp(2.0**-99, 2.0**99)
    spare = part.packs * part.pack - part.groups
    if spare:
        top = torch.cat((top, top.new_full((spare,), 2.0**-99)))
    top = top.view(part.packs, part.pack).amax(1)
    return (top / torch.frexp(top).mantissa / 16).float()  # exact
