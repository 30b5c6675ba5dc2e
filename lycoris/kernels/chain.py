"""A chain of linear maps on the channels of an image, the last one fused with scale and base.

An adapter of a convolution is such a chain: one link is a spatial convolution, which is PyTorch's,
and the others are products with small matrices, (G, M, K) times (K, S) for every sample, which are
kernels of the family ``conv``. All tensors keep their channels before their pixels, so that each
link sees its input as a view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace

import torch
from torch import Tensor

from .convolution import Geometry
from .plan import CHUNK, Plan, multiprocessors, power_of_2
from .schedule import Schedule
from .spec import Round

FAMILY = "conv"


@dataclass(frozen=True, slots=True)
class Link:
    """One linear map.

    Attributes:
        name: the operand that holds its weight.
        batch: how many samples it sees.
        weight: a view of the operand, or of its gradient: (G, M, K), where sample b meets matrix
            b % G; or a convolution's (M, K, *kernel).
        geometry: of a spatial convolution; None for a product of matrices.
    """

    name: str
    batch: int
    weight: Callable[[Tensor], Tensor]
    geometry: Geometry | None = None

    def channels(self, weight: Tensor) -> tuple[int, int]:
        """Its output's channels and its input's."""
        m, k = weight.shape[:2] if self.geometry else weight.shape[1:]
        return m, k

    def pixels(self, value: Tensor, channels: int) -> int:
        """How many pixels, or other trailing elements, each channel of ``value`` has."""
        return value.numel() // (self.batch * channels) if self.batch else 1


def spatial(
    name: str, batch: int, geometry: Geometry, kernel: Sequence[int], weight: Callable[..., Tensor]
) -> Link:
    """The link of a convolution; one by 1x1 kernels without strides and padding is a product."""
    if geometry.pointwise(kernel):
        return Link(name, batch, lambda t: weight(t).flatten(1)[None])
    return Link(name, batch, weight, geometry)


def formula(
    links: Sequence[Link],
    t: SimpleNamespace,
    scale: float | Tensor,
    rnd: Round,
    shape: tuple[int, ...],
) -> Tensor:
    """``[base +] scale * chain(x)`` of that shape; every value between two links is rounded."""
    value = t.x
    for link in links:
        weight = link.weight(getattr(t, link.name))
        _, k = link.channels(weight)
        if link.geometry is not None:
            value = value.reshape(link.batch, k, *link.geometry.sizes)
            value = link.geometry.plain(value, weight)
        else:
            groups = weight.shape[0]
            value = weight @ value.reshape(link.batch // groups, groups, k, link.pixels(value, k))
        if link is not links[-1]:
            value = rnd(value)
    out: Tensor = scale * value.reshape(shape)
    return out if t.base is None else t.base + out


def forward(
    run: Schedule, links: Sequence[Link], t: SimpleNamespace, scale: float | Tensor, out: Tensor
) -> None:
    """Writes ``[base +] scale * chain(x)``."""
    value = t.x
    for link in links[:-1]:
        value = _apply(run, link, value, t)
    last = links[-1]
    weight = last.weight(getattr(t, last.name))
    mix(run, weight, _matrices(last, value, weight.shape[2]), out, t.base, scale)


def backward(
    run: Schedule,
    links: Sequence[Link],
    grad: Tensor,
    t: SimpleNamespace,
    scale: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    """Writes the gradient of x and of every weight that is wanted."""
    wanted = [getattr(grads, link.name) is not None for link in links]
    # The input of link i, as far as the last weight that wants a gradient needs it.
    values = [t.x]
    for i, link in enumerate(links[:-1]):
        if any(wanted[i + 1 :]):
            values.append(_apply(run, link, values[i], t))
    for i in reversed(range(len(links))):
        link = links[i]
        # Scaled before it is rounded: an unscaled fp16 gradient overflows where this is finite.
        factor = scale if i == len(links) - 1 else 1.0
        if wanted[i]:
            _weight_grad(run, link, grad, values[i], factor, grads)
        if i and (any(wanted[:i]) or grads.x is not None):
            grad = _input_grad(run, link, grad, t, factor, None)
        elif not i and grads.x is not None:
            grads.x = _input_grad(run, link, grad, t, factor, grads.x)


def _matrices(link: Link, value: Tensor, channels: int) -> Tensor:
    return value.view(link.batch, channels, link.pixels(value, channels))


def _apply(run: Schedule, link: Link, value: Tensor, t: SimpleNamespace) -> Tensor:
    weight = link.weight(getattr(t, link.name))
    m, k = link.channels(weight)
    if link.geometry is not None:
        value = value.view(link.batch, k, *link.geometry.sizes)
        return link.geometry.forward(value, weight, run.policy)
    value = _matrices(link, value, k)
    out = run.empty((link.batch, m, value.shape[2]), run.policy.compute)
    mix(run, weight, value, out)
    return out


def _input_grad(
    run: Schedule,
    link: Link,
    grad: Tensor,
    t: SimpleNamespace,
    factor: float | Tensor,
    out: Tensor | None,
) -> Tensor:
    """The gradient of a link's input: in ``out``, or another tensor of its dtype and size."""
    weight = link.weight(getattr(t, link.name))
    m, k = link.channels(weight)
    dtype = run.policy.compute if out is None else out.dtype
    if link.geometry is not None:
        shape = (link.batch, m, *link.geometry.out(weight.shape[2:]))
        made = link.geometry.input_grad(grad.view(shape), weight, run.policy, dtype)
        return made if out is None else made.view(out.shape)
    grad = _matrices(link, grad, m)
    if out is None:
        out = run.empty((link.batch, k, grad.shape[2]), dtype)
    mix(run, weight.transpose(1, 2), grad, out, None, factor)
    return out


def _weight_grad(
    run: Schedule,
    link: Link,
    grad: Tensor,
    value: Tensor,
    factor: float | Tensor,
    grads: SimpleNamespace,
) -> None:
    found = getattr(grads, link.name)
    out = link.weight(found)
    m, k = link.channels(out)
    if link.geometry is None:
        contract(run, _matrices(link, grad, m), _matrices(link, value, k), out, factor)
        return
    kernel = out.shape[2:]
    grad = grad.view(link.batch, m, *link.geometry.out(kernel))
    value = value.view(link.batch, k, *link.geometry.sizes)
    made = link.geometry.weight_grad(grad, value, kernel, run.policy, found.dtype)
    setattr(grads, link.name, made.view(found.shape))


# ------------------------------------------------------------------------------- kernels


def mix(
    run: Schedule,
    weight: Tensor,
    value: Tensor,
    out: Tensor,
    base: Tensor | None = None,
    scale: float | Tensor = 1.0,
) -> None:
    """out[b] = [base[b] +] scale * weight[b % G] @ value[b].

    Args:
        run: the schedule.
        weight: (G, M, K), contiguous or its transpose.
        value: (B, K, S).
        out: as many elements as (B, M, S).
        base: like ``out``, or None.
        scale: a number, or a 0-d fp32 tensor on the device.
    """
    batch, k, pixels = value.shape
    m = weight.shape[1]
    shape = (batch, m, pixels)
    tiles = _mix_tiles(m, k, run.policy.compute.itemsize, multiprocessors(run.device))
    base = None if base is None else base.view(shape)
    run.launch(FAMILY, "mix", weight, value, base, scale, out.view(shape), tiles=tiles)


def contract(
    run: Schedule, left: Tensor, right: Tensor, out: Tensor, scale: float | Tensor
) -> None:
    """out[g] = scale * the sum of left[b] @ right[b]^T over all b with b % G = g.

    Args:
        run: the schedule.
        left: (B, M, S).
        right: (B, K, S).
        out: (G, M, K), contiguous or its transpose.
        scale: a number, or a 0-d fp32 tensor on the device.
    """
    if not out.is_contiguous():
        left, right, out = right, left, out.transpose(1, 2)
    groups, m, k = out.shape
    size, units = run.policy.compute.itemsize, multiprocessors(run.device)
    tiles = _contract_tiles(m, k, left.shape[2], left.shape[0], groups, size, units)
    if tiles.splits == 1:
        run.launch(FAMILY, "contract", left, right, scale, out[None], tiles=tiles)
        return
    partials = run.empty((tiles.splits, groups, m, k), torch.float32)
    run.launch(FAMILY, "contract", left, right, scale, partials, tiles=tiles)
    run.add_up((partials, out))


@lru_cache(maxsize=4096)
def _mix_tiles(m: int, k: int, itemsize: int, units: int) -> Plan:
    """Tiles of (M, K) times (K, S), S the pixels: block_n tiles them."""
    if not units:  # simulated: one plan, so that there is one build
        return Plan(32, 128, 32, dynamic="n")
    wide = itemsize == 4
    if m > 64:  # up: a short reduction, a large output to stream
        block_k = min(max(16, power_of_2(k)), 32 if wide else 64)
        # Over a longer rank each tile of the factor is worth keeping for more of the output.
        tall, warps = 64 if k > 64 and not wide else 32, 8 if block_k > 16 else 4
        return Plan(tall, 128, block_k, warps, 1 if k <= block_k else 2, dynamic="n")
    block_m = min(max(16, power_of_2(m)), 32 if wide else 64)
    if k <= 32:  # both short: two streams, in and out
        return Plan(block_m, 128, max(16, power_of_2(k)), 4, 1, dynamic="n")
    block_k = min(32 if wide else 64, power_of_2(k))
    if block_m > 16:
        return Plan(block_m, 64, block_k, 8, 3, dynamic="n")
    return Plan(block_m, 64, block_k, 4, 2 if wide else 4, dynamic="n")


@lru_cache(maxsize=4096)
def _contract_tiles(
    m: int, k: int, pixels: int, batch: int, groups: int, itemsize: int, units: int
) -> Plan:
    """Tiles of (M, S) times (S, K), summed over samples: block_k tiles the pixels."""
    if not units:
        steps = batch // groups * math.ceil(pixels / 128)
        return Plan(32, 32, 128, splits=2 if steps > 2 * CHUNK // 128 else 1, dynamic="k")
    wide = itemsize == 4
    block_k = 32 if wide else 64
    block_m = min(64 if wide else 128, max(16, power_of_2(m)))
    block_n = min(32 if wide else 64, max(16, power_of_2(k)))
    tiles = groups * math.ceil(m / block_m) * math.ceil(k / block_n)
    steps = batch // groups * math.ceil(pixels / block_k)
    # Enough blocks for the device, each with a sum worth its part of the second pass.
    splits = max(1, min(2 * units // tiles, steps // 8))
    warps = 8 if block_m * block_n > 64 * 16 else 4
    return Plan(block_m, block_n, block_k, warps, 3 if wide else 4, splits, "k")
