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
    norm = torch.linalg.vector_norm(_skew(blocks)).clamp(min=1e-300)
    return (constraint / norm).clamp(max=1.0)


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


def by_position(rescale: Tensor, part: Pass) -> Tensor:
    """(channels,) in the order of the groups' positions, (groups, width)."""
    wide = rescale.double()
    if not part.butterfly:
        return wide.reshape(part.groups, part.width)
    units = wide.reshape(-1, 1 << part.stages, part.low, part.unit)
    return units.transpose(1, 2).reshape(part.groups, part.width)


def by_channel(values: Tensor, part: Pass) -> Tensor:
    """What :func:`by_position` undoes."""
    if not part.butterfly:
        return values.reshape(-1)
    units = values.reshape(-1, part.low, 1 << part.stages, part.unit)
    return units.transpose(1, 2).reshape(-1)


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
