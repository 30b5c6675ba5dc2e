"""What only a GPU can show of the loha family: capture, determinism, peak memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lycoris.functional import loha_apply, loha_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


def loha_factors(n_out: int, n_in: int, rank: int) -> list[Tensor]:
    shapes = ((n_out, rank), (rank, n_in), (n_out, rank), (rank, n_in))
    return [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]


def loha_step(leaves: list[Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    op = loha_apply if len(leaves) == 5 else loha_weight
    out = op(*leaves, 0.01, backend=backend)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize("tokens", [0, 300])
@pytest.mark.parametrize("rank", [4, 48])
def test_loha_is_captured_and_deterministic(fused: str, rank: int, tokens: int) -> None:
    leaves = loha_factors(192, 256, rank)
    grad = torch.randn(tokens or 192, 192 if tokens else 256, device="cuda").to(BF16)
    if tokens:
        leaves = [torch.randn(tokens, 256, device="cuda").to(BF16).requires_grad_(), *leaves]
    want = loha_step(leaves, grad, fused)  # builds the kernels
    assert all(map(torch.equal, loha_step(leaves, grad, fused), want))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = loha_step(leaves, grad, fused)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for t in got:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("rank", [4, 32])
def test_loha_apply_peaks_below_the_weight(fused: str, rank: int) -> None:
    tokens, n = 16, 4096
    leaves = [torch.randn(tokens, n, device="cuda").to(BF16).requires_grad_()]
    leaves += loha_factors(n, n, rank)
    grad = torch.randn(tokens, n, device="cuda").to(BF16)
    loha_step(leaves, grad, fused)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loha_step(leaves, grad, fused)
    # Bytes: less than a bf16 weight, with the factors' own gradients and partial sums in it.
    assert torch.cuda.max_memory_allocated() - before < 2 * n * n
