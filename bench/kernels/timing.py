"""Device time of an op's forward and backward pass, a fused backend against the unfused run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lycoris.functional import OPS
from lycoris.kernels.inputs import draw
from lycoris.kernels.report import Mix
from lycoris.kernels.spec import Case, OpSpec

REPEATS = 25
Call = Callable[[], object]


def compare(
    spec: OpSpec, backend: str, case: Case, mix: Mix, device: torch.device
) -> dict[str, Any]:
    """``time_us`` and ``eager_us`` of one call, their ratio, and how they were timed.

    Calls rotate over copies of the operands that exceed the L2 cache four times, so that none
    finds its operands there. The two runs alternate, so that clocks and heat meet both alike.
    """
    inputs = draw(spec, case, mix, device)
    tensors = [*(t for t in inputs.operands if t is not None), inputs.grad]
    size = sum(t.numel() * t.element_size() for t in tensors)
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    count = min(64, max(4, math.ceil(4 * cache / max(size, 1))))
    attributes = tuple(spec.named(case.attributes).values())

    def calls(name: str) -> list[Call]:
        def prepare() -> Call:
            leaves = [
                None if t is None else t.clone().requires_grad_(o.differentiable)
                for o, t in zip(spec.operands, inputs.operands, strict=True)
            ]
            wanted = [t for t in leaves if t is not None and t.requires_grad]
            grad = inputs.grad.clone()

            def call() -> tuple[Tensor, ...]:
                out = OPS[spec.name](leaves, inputs.scale, attributes=attributes, backend=name)
                return torch.autograd.grad(out, wanted, grad)

            return call

        return [prepare() for _ in range(count)]

    (ours, ours_how), (eager, eager_how) = _record(calls(backend)), _record(calls("torch"))
    spans: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for run, times in zip((ours, eager), spans, strict=True):
            times.append(elapsed(run) / count)
    time, baseline = map(median, spans)
    how = ours_how if ours_how == eager_how else f"{ours_how}; eager: {eager_how}"
    return {"time_us": time, "eager_us": baseline, "ratio": baseline / time, "timing": how}


def _record(calls: Sequence[Call]) -> tuple[Call, str]:
    """All calls as one CUDA graph; as a plain loop, launch gaps included, where one can't be."""

    def loop() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # builds the kernels and warms up the libraries
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            loop()
    except RuntimeError:  # the chain synchronises, or a library refuses capture
        torch.cuda.synchronize()
        loop()
        return loop, "events"
    graph.replay()
    return graph.replay, "cuda graph"


def elapsed(run: Call) -> float:
    """Device time of a run in microseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000
