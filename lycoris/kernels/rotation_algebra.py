"""What precedes and follows the streaming kernels of a rotation: small matrices, in fp64.

From D = R - I of every block to the dense matrix M of every group of channels, and from M's
gradient back to the blocks'. All of it is batched products and element-wise torch operations on
the call's device, of some groups x width x width elements: it waits for nothing, can be captured
in a CUDA graph, and no TF32 setting reaches it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rotation import Pass

Scale = float | Tensor


def skew(blocks: Tensor) -> Tensor:
    """Q = B - B^T of every block."""
    wide = blocks.double()
    return wide - wide.mT


def factor(q: Tensor, constraint: float) -> Tensor:
    """What the constraint multiplies Q by: 0-d, on the device."""
    return (constraint / torch.linalg.vector_norm(q).clamp(min=1e-300)).clamp(max=1.0)


# ------------------------------------------------------- stages, and a pass's matrix


def _entries(dense: Tensor, part: Pass, stage: int) -> Tensor:
    """A view of (groups, width, width) that holds a butterfly stage's blocks, in their order.

    Rows are inputs and columns outputs: a block's last index, which is contracted, is a row.
    """
    high, low = part.stages - 1 - stage, stage
    sides = (1 << high, 2, 1 << low, part.unit)
    view = dense.view(-1, part.low, *sides, *sides)
    # Stages mix neither the units beyond a block (high) nor those between (low).
    view = view.diagonal(dim1=2, dim2=6).diagonal(dim1=3, dim2=6)
    return view.permute(0, 6, 7, 1, 5, 4, 3, 2)


def _stage(scaled: Tensor, part: Pass, stage: int) -> Tensor:
    """The matrix less I of one stage, over every group."""
    dense = scaled.new_zeros(part.groups, part.width, part.width)
    entries = _entries(dense, part, stage)
    entries.copy_(scaled[part.first + stage].view(entries.shape))
    return dense


def products(delta: Tensor, scale: Scale, part: Pass) -> list[Tensor]:
    """The products, less I, of a pass's first 1, 2, ... stages I + scale * D.

    Args:
        delta: (stages, n, s, s), D of every block.
        scale: multiplies D.
        part: the pass.

    Returns:
        One (groups, width, width) a stage of the pass; the last is M.
    """
    scaled = delta * scale
    if not part.butterfly:
        return [scaled[0]]
    found = [_stage(scaled, part, 0)]
    for at in range(1, part.stages):
        before, stage = found[-1], _stage(scaled, part, at)
        found.append(torch.baddbmm(before + stage, before, stage))
    return found


def stage_gradients(
    grad: Tensor, found: list[Tensor], delta: Tensor, scale: Scale, part: Pass, deltas: Tensor
) -> None:
    """From M's gradient to that of D of a pass's stages, into ``deltas``, which is like ``delta``.

    ``found`` is what :func:`products` returned.
    """
    if not part.butterfly:
        torch.mul(grad, scale, out=deltas[0])
        return
    scaled = delta * scale
    for at in reversed(range(part.stages)):
        own = torch.baddbmm(grad, found[at - 1].mT, grad) if at else grad
        entries = _entries(own, part, at) * scale
        deltas[part.first + at].view(entries.shape).copy_(entries)
        if at:
            grad = torch.baddbmm(grad, grad, _stage(scaled, part, at).mT)


def blocks_gradient(
    blocks: Tensor, delta: Tensor, deltas: Tensor, constraint: float | None, out: Tensor
) -> None:
    """The gradient of the blocks from that of D: dD = 2 N dQ N with N = (I - Q)^-1 = I + D / 2.

    D is needed in fp64: for large Q, N is small, and what it loses to I is then what D can spare.
    """
    inverse = delta.reshape(-1, *delta.shape[-2:]) * 0.5
    inverse.diagonal(dim1=1, dim2=2).add_(1.0)
    half = torch.bmm(inverse.mT, deltas.reshape(inverse.shape))
    inward = torch.bmm(half, inverse.mT).mul_(2.0)
    found = (inward - inward.mT).view(blocks.shape)
    if constraint is not None:
        q = skew(blocks)
        held = factor(q, constraint)
        radial = (found * q).sum() / q.square().sum().clamp(min=1e-300)
        found = held * (found - torch.where(held < 1, radial, 0.0) * q)
    out.copy_(found)


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


def _diagonal(packed: Tensor, part: Pass) -> Tensor:
    """(..., packs, padded, padded) as (..., packs, pack, width, width), a view of the groups."""
    side = part.pack * part.width
    inner = packed[..., :side, :side]
    inner = inner.unflatten(-1, (part.pack, part.width)).unflatten(-3, (part.pack, part.width))
    return inner.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def pack(matrix: Tensor, part: Pass, parts: Tensor) -> Tensor | None:
    """M of every pack into ``parts`` (parts, packs, padded, padded), whose sum it is.

    Returns:
        Where the parts are fp16, which has too few exponents for M and its low part: they hold M
        times a power of two, and this is its inverse, (packs,) fp32.
    """
    spare = part.packs * part.pack - part.groups
    if spare:
        matrix = torch.cat((matrix, matrix.new_zeros(spare, part.width, part.width)))
    matrix = matrix.reshape(part.packs, part.pack, part.width, part.width)
    inverse = None
    if parts.dtype is torch.float16:
        # A power of two that puts the pack's largest entry near 16; one that isn't finite is out.
        top = matrix.nan_to_num(0.0, 0.0, 0.0).abs().amax((1, 2, 3)).clamp(2.0**-99, 2.0**99)
        power = top / torch.frexp(top).mantissa / 16  # exact
        matrix = matrix / power[:, None, None, None]
        inverse = power.float()
    parts.zero_()
    for piece in _diagonal(parts, part):
        piece.copy_(matrix)
        matrix = matrix - piece
    return inverse


def unpack(total: Tensor, part: Pass) -> Tensor:
    """The sum of shares of v^T g, (shares, packs, padded, padded), by group, in fp64."""
    summed = _diagonal(total, part).sum(0, dtype=torch.float64)
    return summed.reshape(-1, part.width, part.width)[: part.groups]
