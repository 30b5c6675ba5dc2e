"""What only a GPU can show of the conv family: capture, determinism, peak memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lycoris.functional import lokr_conv_apply, lora_conv_apply

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


def images(n: int, channels: int, rank: int) -> list[Tensor]:
    shapes = ((n, channels, 32, 32), (channels, rank), (rank, channels, 3, 3))
    return [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]


def conv_step(leaves: list[Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    out = lora_conv_apply(*leaves, 0.7, padding=1, backend=backend)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def test_convolutions_are_captured_and_repeatable(fused: str) -> None:
    leaves = images(2, 320, 16)
    grad = torch.randn(2, 320, 32, 32, device="cuda").to(BF16)
    want = conv_step(leaves, grad, fused)  # builds the kernels
    again = conv_step(leaves, grad, fused)
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = conv_step(leaves, grad, fused)
    for t in got:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_fp32_convolutions_are_true_fp32(fused: str) -> None:
    leaves = [t.detach().float().requires_grad_() for t in images(2, 320, 16)]
    grad = torch.randn(2, 320, 32, 32, device="cuda")
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    exact = conv_step(doubles, grad.double(), "torch")
    assert torch.backends.cudnn.allow_tf32
    for got, want in zip(conv_step(leaves, grad, fused), exact, strict=True):
        assert (got.double() - want).norm() < 1e-5 * want.norm()


def test_the_kronecker_bypass_of_a_convolution_holds_no_weight(fused: str) -> None:
    shapes = ((1, 4096, 4, 4), (64, 64), (64, 64, 3, 3))
    leaves = [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]
    grad = torch.randn(1, 4096, 4, 4, device="cuda").to(BF16)

    def run() -> None:
        out = lokr_conv_apply(*leaves, 0.7, padding=1, backend=fused)
        torch.autograd.grad(out, leaves, grad)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.max_memory_allocated() - before < 9 * 4096 * 4096  # half of a bf16 weight
