"""The spatial convolutions inside an op: PyTorch's own, with dtype and determinism pinned.

fp32 is true fp32 whatever ``torch.backends.cudnn.allow_tf32`` says (it is on by default), unless
the policy allows TF32; 16-bit operands whose fp32 accumulator is wanted are multiplied as TF32,
which holds every fp16 and bf16 value. Results are bitwise repeatable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import HALF, Policy

_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where a kernel meets its input: one number a spatial dimension each, 1 to 3 dimensions."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    sizes: tuple[int, ...]

    def out(self, kernel: Sequence[int]) -> tuple[int, ...]:
        """The output's spatial sizes; below 1 where the kernel does not fit."""
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                self.sizes, kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def pointwise(self, kernel: Sequence[int]) -> bool:
        """Whether it is a product of matrices, pixel by pixel."""
        return max((*kernel, *self.stride)) == 1 and not any(self.padding)

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution as differentiable PyTorch, under PyTorch's own settings."""
        convolve = (F.conv1d, F.conv2d, F.conv3d)[len(self.sizes) - 1]
        out: Tensor = convolve(x, weight, None, self.stride, self.padding, self.dilation)
        return out

    # -------------------------------------------------------------- within a schedule

    def forward(self, x: Tensor, weight: Tensor, policy: Policy) -> Tensor:
        """The convolution of (N, I, sizes) with (O, I, kernel), in the compute dtype."""
        x, weight = x.to(policy.compute), weight.to(policy.compute)
        return self._convolve(x, weight, (0,) * len(self.sizes), False, policy)

    def input_grad(
        self, grad: Tensor, weight: Tensor, policy: Policy, dtype: torch.dtype
    ) -> Tensor:
        """The input's gradient from the output's, rounded from fp32 to ``dtype``'s width once."""
        compute = torch.float32 if dtype is torch.float32 else policy.compute
        grad, weight = (t.to(policy.compute).to(compute) for t in (grad, weight))
        reached = self.out(weight.shape[2:])
        rest = tuple(
            n + 2 * p - d * (k - 1) - 1 - (o - 1) * s
            for n, k, o, s, p, d in zip(
                self.sizes, weight.shape[2:], reached, self.stride, self.padding, self.dilation,
                strict=True,
            )
        )  # fmt: skip
        return self._convolve(grad, weight, rest, True, policy)

    def weight_grad(
        self, grad: Tensor, x: Tensor, kernel: Sequence[int], policy: Policy, dtype: torch.dtype
    ) -> Tensor:
        """The weight's gradient, a sum over samples and pixels, rounded from fp32 once."""
        wide = dtype is torch.float32 or not x.is_cuda
        compute = torch.float32 if wide else policy.compute
        grad, x = (t.to(policy.compute).to(compute) for t in (grad, x))
        blank = x.new_empty((grad.shape[1], x.shape[1], *kernel))  # only its shape is read
        rest = (0,) * len(self.sizes)
        with _settings(_precision(policy)):
            _, found, _ = torch.ops.aten.convolution_backward(
                *(grad, x, blank, None, self.stride, self.padding, self.dilation),
                *(False, rest, 1, (False, True, False)),
            )
        return found

    def _convolve(
        self, x: Tensor, weight: Tensor, rest: tuple[int, ...], transposed: bool, policy: Policy
    ) -> Tensor:
        narrow = x.dtype in HALF and not x.is_cuda
        if narrow:  # a CPU may lack 16-bit convolutions, or round inside of them
            x, weight = x.float(), weight.float()
        found: Tensor = torch.ops.aten._convolution(
            *(x, weight, None, self.stride, self.padding, self.dilation, transposed, rest, 1),
            *(torch.backends.cudnn.benchmark, True, True, _precision(policy) == "tf32"),
        )
        return (found.to(policy.compute) if narrow else found).contiguous()


def _precision(policy: Policy) -> str:
    return "tf32" if policy.tf32 or policy.compute in HALF else "ieee"


@contextmanager
def _settings(precision: str) -> Iterator[Any]:
    """cuDNN deterministic and in one precision: a backward convolution takes no such arguments."""
    cudnn: Any = torch.backends.cudnn
    with _lock:  # threads that restore in another order would leave each other's values behind
        before = cudnn.deterministic, cudnn.conv.fp32_precision
        cudnn.deterministic, cudnn.conv.fp32_precision = True, precision
        try:
            yield
        finally:
            cudnn.deterministic, cudnn.conv.fp32_precision = before
