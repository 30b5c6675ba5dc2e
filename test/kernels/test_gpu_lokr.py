"""What only a GPU can show of the lokr family: capture, determinism, peak memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lycoris.functional import lokr_apply, lokr_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


# ----------------------------------------------------------------------------------------- LoKr


def lokr_leaves(form: str, tokens: int, a: int, c: int) -> list[Tensor]:
    w2 = [(c, 8), (8, c)] if form == "pair" else [(c, c)]
    shapes = [(tokens, a * c), (a, a), *w2]
    return [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]


def lokr_step(leaves: list[Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    x, w1, *w2 = leaves
    out = lokr_apply(x, w1, tuple(w2) if len(w2) > 1 else w2[0], 0.7, backend=backend)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


@pytest.mark.parametrize(("form", "a", "c"), [("pair", 8, 64), ("dense", 8, 64), ("dense", 8, 96)])
def test_lokr_apply_in_a_graph(fused: str, form: str, a: int, c: int) -> None:
    leaves = lokr_leaves(form, 300, a, c)
    grad = torch.randn(300, a * c, device="cuda").to(BF16)
    want = lokr_step(leaves, grad, fused)
    assert all(torch.equal(x, y) for x, y in zip(want, lokr_step(leaves, grad, fused), strict=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = lokr_step(leaves, grad, fused)
    for t in got:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize(("form", "a", "c"), [("pair", 8, 512), ("dense", 64, 64)])
def test_lokr_apply_peaks_below_the_weight(fused: str, form: str, a: int, c: int) -> None:
    leaves = lokr_leaves(form, 16, a, c)
    grad = torch.randn(16, a * c, device="cuda").to(BF16)
    lokr_step(leaves, grad, fused)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    lokr_step(leaves, grad, fused)
    assert torch.cuda.max_memory_allocated() - before < (a * c) ** 2 // 4  # bytes


def test_lokr_weight_holds_the_weight_and_its_halves(fused: str) -> None:
    w1 = torch.randn(8, 8, device="cuda").to(BF16).requires_grad_()
    w2 = [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in ((512, 16), (16, 512))]
    grad = torch.randn(4096, 4096, device="cuda").to(BF16)
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = lokr_weight(w1, tuple(w2), 0.7, backend=fused)
        torch.autograd.grad(out, [w1, *w2], grad)
        peak = torch.cuda.max_memory_allocated() - before
        del out
    assert peak < 1.5 * 2 * 4096**2  # the output; parts of w2's gradient are a fraction of it
