"""What only a GPU can show of the scale family: capture, determinism, peak memory."""

from __future__ import annotations

import pytest
import torch

from lycoris.functional import ia3_scale, merge_, tlora_apply

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


def test_merge_in_place_needs_no_memory(fused: str) -> None:
    weight = torch.zeros(4096, 4096, dtype=BF16, device="cuda")
    delta = torch.randn(4096, 4096, device="cuda").to(BF16)
    merge_(weight, delta, 0.7, backend=fused)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    merge_(weight, delta, 0.7, backend=fused)
    assert torch.cuda.max_memory_allocated() == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_(weight, delta, 0.7, backend=fused)
    weight.zero_()
    graph.replay()
    assert torch.equal(weight, merge_(torch.zeros_like(weight), delta, 0.7, backend=fused))


def test_ia3_and_tlora_peak_below_what_they_avoid(fused: str) -> None:
    v = torch.randn(8192, 4096, device="cuda").to(BF16).requires_grad_()
    scale = torch.randn(4096, device="cuda").requires_grad_()
    tokens, n, r = 16, 4096, 4
    factors = [torch.randn(s, device="cuda").to(BF16) for s in ((r, n), (n, r), (r,))]
    leaves = [t.clone().requires_grad_() for t in factors]
    x = torch.randn(tokens, n, device="cuda").to(BF16).requires_grad_()
    mask = torch.ones(r, device="cuda")

    def scaled() -> None:
        out = ia3_scale(v, scale, out_dtype=BF16, backend=fused)
        torch.autograd.grad(out, (v, scale), v.detach())

    def applied() -> None:
        out = tlora_apply(x, *leaves, *factors, mask, 0.7, backend=fused)
        assert not out.any()  # exactly zero at the start
        torch.autograd.grad(out, (x, *leaves), torch.ones_like(out))

    # The output, the gradient of v and a few partial sums; and less than half of an O x I weight.
    for run, limit in ((scaled, 2.2 * v.numel() * 2), (applied, n * n)):
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        assert torch.cuda.max_memory_allocated() - before < limit
