"""What only a GPU can show of the dora family: capture, determinism, peak memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lycoris.functional import dora_apply, dora_weight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


def dora_operands(tokens: int, n: int, rank: int) -> dict[str, Tensor]:
    """The operands of dora_apply with its weight frozen, in the order of its arguments."""
    shapes = {
        "base": (tokens, n), "x": (tokens, n), "weight": (n, n), "up": (n, rank),
        "down": (rank, n), "magnitude": (n,),
    }  # fmt: skip
    made = {name: torch.randn(s, device="cuda").to(BF16) for name, s in shapes.items()}
    return {name: t.requires_grad_(name != "weight") for name, t in made.items()}


def test_dora_apply_is_captured_and_peaks_below_the_weight(fused: str) -> None:
    tokens, n = 16, 4096
    operands = dora_operands(tokens, n, 4)
    leaves = [t for t in operands.values() if t.requires_grad]
    grad = torch.randn(tokens, n, device="cuda").to(BF16)

    def run() -> tuple[Tensor, ...]:
        out = dora_apply(**operands, scale=0.7, backend=fused)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    want = run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    assert torch.cuda.max_memory_allocated() - before < n * n  # bytes: half of a bf16 weight
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for t in got:
        t.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("axis", ["out", "in"])
def test_dora_weight_is_captured_and_keeps_its_identity(fused: str, axis: str) -> None:
    weight = torch.randn(1280, 1280, device="cuda").to(BF16).requires_grad_()
    magnitude = weight.detach().double().norm(dim=1 if axis == "out" else 0).float()
    grad = torch.randn_like(weight)

    def run() -> tuple[Tensor, ...]:
        out = dora_weight(weight, magnitude, axis=axis, out_dtype=BF16, backend=fused)
        return out.detach(), *torch.autograd.grad(out, weight, grad)

    want = run()
    assert torch.equal(want[0], weight)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
