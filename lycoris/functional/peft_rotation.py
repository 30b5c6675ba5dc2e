"""HF PEFT's conventions of OFT and BOFT, from the published formulas, as inputs of our ops.

PEFT's adapters differ from LyCORIS's in what they store and on which side they rotate. The
functions here turn its parameters into block-diagonal rotations, in plain PyTorch, differentiable.

Sources: Qiu et al., "Orthogonal Finetuning Made Scalable" (OFTv2), 2025, for the input side, the
packed skew vectors and the Cayley-Neumann series; Liu et al., BOFT, 2023, for the butterfly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.checks import check_floating, check_integer


def skew_from_vectors(vectors: Tensor, size: int) -> Tensor:
    """Skew-symmetric blocks from their packed upper triangles.

    Args:
        vectors: (n, size * (size - 1) / 2), the entries above the diagonal, row by row.
        size: of a block.

    Returns:
        (n, size, size), Q with Q^T = -Q.

    Raises:
        TypeError: ``vectors`` is no floating-point tensor, or ``size`` no int.
        ValueError: the vectors' length isn't that of a block of this size.
    """
    name = "skew_from_vectors"
    if check_integer(name, "size", size) < 1:
        raise ValueError(f"{name}: size is {size}; expected at least 1")
    entries = size * (size - 1) // 2
    if check_floating(name, "vectors", vectors).dim() != 2 or vectors.shape[1] != entries:
        raise ValueError(
            f"{name}: vectors has shape {tuple(vectors.shape)}; "
            f"expected (n, {entries}) for blocks of {size}"
        )
    rows, columns = torch.triu_indices(size, size, 1, device=vectors.device)
    upper = vectors.new_zeros(vectors.shape[0], size, size)
    upper = upper.index_put(
        (torch.arange(vectors.shape[0], device=vectors.device)[:, None], rows, columns), vectors
    )
    return upper - upper.mT


def blocks_from_vectors(vectors: Tensor, size: int) -> Tensor:
    """The blocks B, with B - B^T = Q, that :func:`oft_apply` takes for packed vectors.

    Args:
        vectors: as for :func:`skew_from_vectors`.
        size: of a block.

    Returns:
        (n, size, size), upper triangular.
    """
    return skew_from_vectors(vectors, size).triu()


def cayley_neumann(skew: Tensor, terms: int = 5) -> Tensor:
    """R = (I + Q)(I + Q + Q^2 + ... + Q^terms), the Cayley transform without a solve.

    The series stands for (I - Q)^-1 and needs a spectral norm r of Q below 1. With k terms, what is
    cut off of R is (I + Q) Q^(k + 1) (I - Q)^-1, whose spectral norm is r^(k + 1) exactly: Q is
    normal, and I + Q and I - Q have the same singular values. R R^T misses I by at most
    2 r^(k + 1) + r^(2 k + 2). So 5 terms are exact to 1e-6 at r = 0.1 and to 1.6e-2 at 0.5; from
    r = 1 on the series diverges.

    Args:
        skew: (..., s, s), skew-symmetric.
        terms: k, the powers of Q beside I; at least 0.

    Returns:
        (..., s, s), in the dtype of ``skew``.

    Raises:
        TypeError: ``skew`` is no floating-point tensor, or ``terms`` no int.
        ValueError: ``terms`` is negative, or the blocks are not square.
    """
    name = "cayley_neumann"
    if check_integer(name, "terms", terms) < 0:
        raise ValueError(f"{name}: terms is {terms}; expected at least 0")
    _check_square(name, "skew", check_floating(name, "skew", skew))
    eye = torch.eye(skew.shape[-1], dtype=skew.dtype, device=skew.device)
    # Horner: one product a term, and the small terms are added first.
    series = eye.expand_as(skew)
    for _ in range(terms):
        series = eye + skew @ series
    return series + skew @ series


def rotate_input(x: Tensor, rotations: Tensor) -> Tensor:
    """x R on each block of the last axis: PEFT rotates a layer's input, y = W (R^T x).

    It equals the layer with the weight W diag(R)^T, whose columns are rotated. With exact Cayley
    rotations of blocks B it is ``oft_apply(x, B)``, which streams x once.

    Args:
        x: (..., n * s).
        rotations: (n, s, s).

    Returns:
        Of x's shape.

    Raises:
        TypeError: an operand is no floating-point tensor.
        ValueError: the blocks aren't (n, s, s), or don't cover the axis.
    """
    name = "rotate_input"
    _check_square(name, "rotations", check_floating(name, "rotations", rotations), 3)
    n, size = rotations.shape[:2]
    if check_floating(name, "x", x).dim() < 1 or x.shape[-1] != n * size:
        raise ValueError(
            f"{name}: x has shape {tuple(x.shape)}; expected (..., {n * size}) for "
            f"{n} blocks of {size}"
        )
    blocks = x.unflatten(-1, (n, size))
    return torch.einsum("...ni,nij->...nj", blocks, rotations.to(x.dtype)).flatten(-2)


def _check_square(op: str, name: str, t: Tensor, dims: int | None = None) -> None:
    if t.dim() < 2 or dims not in (None, t.dim()) or t.shape[-1] != t.shape[-2]:
        wanted = "(..., s, s)" if dims is None else "(n, s, s)"
        raise ValueError(f"{op}: {name} has shape {tuple(t.shape)}; expected {wanted}")


def butterfly_permutation(channels: int, size: int, stage: int) -> Tensor:
    """BOFT's permutation of one stage: entry p is the channel that position p of the blocks takes.

    Factor ``stage`` of the butterfly pairs channel groups 2^stage * size / 2 apart: within each
    run of 2^stage * size channels, first and second half alternate, channel by channel. The first
    factor of size 2 is the identity.

    Args:
        channels: of the axis.
        size: of a block, even.
        stage: from 0.

    Returns:
        (channels,) int64, a permutation: ``x[..., p]`` is in the order of the blocks, and its
        ``argsort()`` undoes it.

    Raises:
        TypeError: a number is no int.
        ValueError: one is out of range, the size is odd, or a stage's runs do not divide the
            channels.
    """
    name = "butterfly_permutation"
    for what, value, least in (("channels", channels, 0), ("size", size, 1), ("stage", stage, 0)):
        if check_integer(name, what, value) < least:
            raise ValueError(f"{name}: {what} is {value}; expected at least {least}")
    run = size << min(stage, 63)  # no channels have more bits
    if size % 2 or channels % run:
        raise ValueError(
            f"{name}: runs of {size} * 2^{stage} channels, of blocks of an even "
            f"size, must divide {channels}"
        )
    return torch.arange(channels).view(-1, 2, run // 2).transpose(1, 2).flatten()
