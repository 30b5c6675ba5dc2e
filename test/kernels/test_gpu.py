"""What only a GPU can show: capture, no hidden waits, peak memory, 2^31 elements, host time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lycoris.functional import boft_apply, lora_apply, lora_weight, oft_apply

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
BF16 = torch.bfloat16


def factors(tokens: int, n_in: int, n_out: int, rank: int) -> list[Tensor]:
    shapes = ((tokens, n_in), (n_out, rank), (rank, n_in))
    return [torch.randn(s, device="cuda").to(BF16).requires_grad_() for s in shapes]


def step(leaves: list[Tensor], grad: Tensor, backend: str) -> tuple[Tensor, ...]:
    out = lora_apply(*leaves, 0.7, backend=backend)
    # Detached: a graph that lives on ties its leaves to the stream of this call, for any capture.
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def test_capture_without_a_host_sync(fused: str) -> None:
    leaves = factors(300, 256, 192, 8)
    grad = torch.randn(300, 192, device="cuda").to(BF16)
    want = step(leaves, grad, fused)  # builds the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = step(leaves, grad, fused)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for t in got:
        t.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_launch_follows_the_current_stream(fused: str) -> None:
    leaves = factors(4096, 512, 512, 8)
    grad = torch.randn(4096, 512, device="cuda").to(BF16)
    want = step(leaves, grad, fused)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source = leaves[0].detach() * 1
        got = step([source.requires_grad_(), *leaves[1:]], grad, fused)
    stream.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_bypass_peaks_below_the_weight(fused: str) -> None:
    tokens, n = 16, 4096
    leaves = factors(tokens, n, n, 4)
    grad = torch.randn(tokens, n, device="cuda").to(BF16)
    step(leaves, grad, fused)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(leaves, grad, fused)
    assert torch.cuda.max_memory_allocated() - before < n * n  # bytes: half of a bf16 weight


def test_more_than_2_to_the_31_elements(fused: str) -> None:
    tokens, n = 2**25 + 5, 64  # 2^31 + 320 elements of x and of the output
    x = torch.zeros(tokens, n, dtype=BF16, device="cuda")
    x[-7:] = torch.randn(7, n, device="cuda")
    x[:3] = x[-3:]
    up, down = torch.randn(n, 2, device="cuda").to(BF16), torch.randn(2, n, device="cuda").to(BF16)
    out = lora_apply(x, up, down, 0.7, backend=fused)
    want = lora_apply(x[-7:].clone(), up, down, 0.7, backend=fused)
    assert torch.equal(out[-7:], want)
    assert torch.equal(out[:3], want[-3:])
    assert not out[3:-7].any()
    down.requires_grad_()
    grad = torch.zeros_like(out)
    grad[-7:] = 1
    (got,) = torch.autograd.grad(lora_apply(x, up, down, 0.7, backend=fused), down, grad)
    (want,) = torch.autograd.grad(
        lora_apply(x[-7:].clone(), up, down, 0.7, backend=fused), down, grad[-7:].clone()
    )
    torch.testing.assert_close(got, want)


def test_compiled_scales_share_a_graph(fused: str) -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    run = torch.compile(
        lambda x, u, d, s: lora_apply(x, u, d, s, backend=fused), fullgraph=True, backend=counter
    )
    for i in range(12):
        leaves = factors(64, 128, 96, 4)
        scale = 0.1 + i / 7
        got, want = run(*leaves, scale), lora_apply(*leaves, scale, backend=fused)
        torch.testing.assert_close(got, want)
        grad = torch.randn_like(want)
        a = torch.autograd.grad(got, leaves, grad)
        torch.testing.assert_close(a, torch.autograd.grad(want, leaves, grad))
    assert counter.frame_count <= 2


def test_auto_takes_a_fused_backend() -> None:
    leaves = [t.detach() for t in factors(64, 128, 96, 4)]
    from lycoris.kernels import registry
    from lycoris.kernels.precision import Policy

    choice = registry.select("lora_apply", "lora", {"r": 4}, Policy(BF16, BF16), leaves[0].device)
    assert choice.has_kernels
    assert torch.equal(lora_apply(*leaves, 0.7), lora_apply(*leaves, 0.7, backend=choice.backend))
    cpu_up, cpu_down = leaves[1].cpu(), leaves[2].cpu()
    assert lora_weight(cpu_up, cpu_down, backend="triton").device.type == "cpu"


def test_host_microseconds(fused: str, record_property: Callable[[str, object], None]) -> None:
    leaves = factors(77, 1280, 1280, 4)
    grad = torch.randn(77, 1280, device="cuda").to(BF16)
    spans = {}
    for name in (fused, "torch"):
        for _ in range(50):
            step(leaves, grad, name)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            step(leaves, grad, name)
        torch.cuda.synchronize()
        spans[name] = (time.perf_counter() - start) / 300 * 1e6
    record_property("host_us", spans)
    print({name: f"{us:.0f} us" for name, us in spans.items()})
    assert spans[fused] < 3 * spans["torch"]  # the record in bench/results has the figures


@pytest.mark.parametrize("constraint", [None, 0.5])
@pytest.mark.parametrize("op", [oft_apply, boft_apply])
def test_rotations_are_captured_without_a_host_sync(
    fused: str, op: Callable[..., Tensor], constraint: float | None
) -> None:
    y = torch.randn(300, 256, device="cuda").to(BF16).requires_grad_()
    shape = (8, 32, 32) if op is oft_apply else (4, 32, 8, 8)
    blocks = (torch.randn(shape, device="cuda") * 0.3).requires_grad_()
    grad = torch.randn(300, 256, device="cuda")

    def run() -> tuple[Tensor, ...]:
        out = op(y, blocks, constraint=constraint, backend=fused)
        return out.detach(), *torch.autograd.grad(out, (y, blocks), grad)

    want = run()  # builds the kernels
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


def test_butterflies_store_no_stage_inputs(fused: str) -> None:
    tokens, n = 8192, 1024
    y = torch.randn(tokens, n, device="cuda").to(BF16).requires_grad_()
    blocks = (torch.randn(6, n // 8, 8, 8, device="cuda") * 0.3).to(BF16).requires_grad_()
    grad = torch.randn(tokens, n, device="cuda").to(BF16)

    def run() -> None:
        torch.autograd.grad(boft_apply(y, blocks, backend=fused), (y, blocks), grad)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    # The output, y's gradient, and the matrices and sums of 256-wide groups.
    assert torch.cuda.max_memory_allocated() - before < 4 * y.numel() * y.element_size()
