"""Device time, host time, wall time and peak memory of an op, variants side by side.

A variant is one way to do the same work: a backend, or a baseline. Variants take turns, so that
clocks and heat meet all of them alike, and every number comes with its spread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from lycoris.functional import OPS
from lycoris.kernels.call import resolve_policy
from lycoris.kernels.formula import Formula
from lycoris.kernels.inputs import Inputs, draw
from lycoris.kernels.report import Mix
from lycoris.kernels.spec import Case, OpSpec

REPEATS = 25
#: Calls in a loop: batches, calls of each at most and at least, and us on the device of a batch.
HOST_BATCHES, HOST_CALLS, FEWEST_CALLS, BATCH_US = 5, 40, 5, 20_000
Call = Callable[[], object]
Forward = Callable[[list[Tensor | None]], Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """Microseconds a call: every sample, their median and quartiles, and how they were taken."""

    samples: tuple[float, ...]
    how: str = ""

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples lies below the first, a quarter above the second."""
        low, _, high = quantiles(self.samples, n=4, method="inclusive")
        return low, high


# ------------------------------------------------------------------------------ variants


def on_backend(spec: OpSpec, case: Case, scale: float, backend: str) -> Forward:
    """The op on a backend, as a user calls it."""
    attributes = tuple(spec.named(case.attributes).values())
    op = OPS[spec.name]
    return lambda leaves: op(leaves, scale, attributes=attributes, backend=backend)


def compiled(spec: OpSpec, case: Case, inputs: Inputs) -> Forward:
    """The op's formula in plain PyTorch under ``torch.compile``."""
    attributes = spec.named(case.attributes)
    binding = spec.bind(inputs.operands, attributes)
    device = next(t.device for t in inputs.operands if t is not None)
    policy = resolve_policy(spec, inputs.operands, device, None, None)
    formula = Formula(spec, binding, policy, attributes)
    torch._dynamo.reset()  # or the formulas of earlier ops would use up its recompile limit
    run = torch.compile(formula.output, dynamic=False)
    return lambda leaves: run(leaves, inputs.scale)


def prepare(spec: OpSpec, inputs: Inputs, forward: Forward, backward: bool) -> Call:
    """One call on operands of its own: forward, or forward and all gradients."""
    leaves = [
        None if t is None else t.clone().requires_grad_(o.differentiable)
        for o, t in zip(spec.operands, inputs.operands, strict=True)
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    grad = inputs.grad.clone()

    def call() -> tuple[Tensor, ...]:
        out = forward(leaves)
        return torch.autograd.grad(out, wanted, grad) if backward and wanted else (out,)

    return call


def rotations(inputs: Inputs) -> int:
    """How many copies of the operands exceed the L2 cache four times."""
    tensors = [*(t for t in inputs.operands if t is not None), inputs.grad]
    size = sum(t.numel() * t.element_size() for t in tensors)
    cache = torch.cuda.get_device_properties(inputs.grad.device).L2_cache_size
    return min(64, max(4, math.ceil(4 * cache / max(size, 1))))


# --------------------------------------------------------------------------- device time


@dataclass(frozen=True, slots=True)
class Recorded:
    """Several calls on operands of their own, so that none finds its operands in the L2 cache.

    They replay as one CUDA graph; where one can't be captured they run as a loop, launch gaps
    included (``how`` is then ``events``). ``calls`` own the operands, which a graph does not.
    """

    run: Call
    how: str
    calls: Sequence[Call]

    @property
    def count(self) -> int:
        """How many calls one run is."""
        return len(self.calls)


def race(variants: Mapping[str, Recorded]) -> dict[str, Span]:
    """Device time of a call of each variant."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, variant in variants.items():
            samples[name].append(elapsed(variant.run) / variant.count)
    return {name: Span(tuple(samples[name]), v.how) for name, v in variants.items()}


def compare(
    spec: OpSpec, backend: str, case: Case, mix: Mix, device: torch.device
) -> dict[str, Any]:
    """``time_us`` and ``eager_us`` of one call with its gradients, and how they were timed."""
    inputs = draw(spec, case, mix, device)
    forwards = {name: on_backend(spec, case, inputs.scale, name) for name in (backend, "torch")}
    count = rotations(inputs)
    spans = race(
        {
            name: record([prepare(spec, inputs, forward, True) for _ in range(count)])
            for name, forward in forwards.items()
        }
    )
    ours, eager = spans[backend], spans["torch"]
    low, high = ours.quartiles
    return {
        "time_us": ours.median,
        "time_low_us": low,
        "time_high_us": high,
        "eager_us": eager.median,
        "ratio": eager.median / ours.median,
        "timing": ours.how if ours.how == eager.how else f"{ours.how}; eager: {eager.how}",
    }


def record(calls: Sequence[Call]) -> Recorded:
    """Captures calls, after running some of them on a stream of their own."""

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
        # The generator would wait for the end of that capture, and draw no more.
        index = torch.cuda.current_device()
        fresh = torch.Generator(torch.device("cuda", index))
        torch.cuda.default_generators[index].graphsafe_set_state(fresh)
        loop()
        return Recorded(loop, "events", calls)
    graph.replay()
    return Recorded(graph.replay, "cuda graph", calls)


def elapsed(run: Call) -> float:
    """Device time of a run in microseconds."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1000


# ------------------------------------------------------------------ host time and memory


def loop_times(calls: Mapping[str, tuple[Call, float]]) -> dict[str, tuple[Span, Span]]:
    """(host, wall) time of a call of each variant, given with its device time, in a Python loop.

    Host time ends when all calls are issued, wall time when the device has done them.
    """
    counts = {
        name: max(FEWEST_CALLS, min(HOST_CALLS, int(BATCH_US / us)))
        for name, (_, us) in calls.items()
    }
    host: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for batch in range(HOST_BATCHES + 1):  # the first warms up
        for name, (call, _) in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(counts[name]):
                call()
            issued = time.perf_counter()
            torch.cuda.synchronize()
            if batch:
                host[name].append((issued - start) / counts[name] * 1e6)
                wall[name].append((time.perf_counter() - start) / counts[name] * 1e6)
    return {name: (Span(tuple(host[name])), Span(tuple(wall[name]))) for name in calls}


def peak(run: Call) -> int:
    """Bytes at the peak of one call, above what was there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


# ------------------------------------------------------------------------ the device's own


def ceilings(device: torch.device) -> dict[str, float]:
    """Copy bandwidth (bytes read and written a second) and bf16 matrix rate (flop/s), measured."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    copies, products = [], []
    for _ in range(12):
        copies.append(elapsed(lambda: target.copy_(source)))
        products.append(elapsed(lambda: a @ b))
    return {
        "copy_bytes_per_s": 2 * source.numel() / median(copies) * 1e6,
        "bf16_flop_per_s": 2 * 8192**3 / median(products) * 1e6,
    }
