"""One row of the matrix: accuracy first, then device, host and wall time and peak memory.

The variants of a group (all backends and baselines on one case, mix and direction) are measured
together, taking turns. A row that fails its parity has no speed, and neither has a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import layers
import peft_layers
import timing
import torch
from shapes import Row

from lycoris.kernels import explain, report, testing
from lycoris.kernels.call import resolve_policy
from lycoris.kernels.inputs import Inputs
from lycoris.kernels.spec import OpSpec

DIRECTIONS = ("fwd", "fwd+bwd")
#: Baseline -> the prefix of its columns in a row. ``peft`` is of layers alone.
BASELINES = {"eager": "eager_", "compile": "compile_", "peft": "peft_"}
#: The columns of a verdict that the row itself does not say.
_TENSOR = (
    *("tensor", "ulp", "rms", "model_ulp", "model_rms", "floor_ulp", "floor_rms"),
    *("eager_ulp", "eager_rms", "bound", "agreement", "why", "pass"),
)
Found = dict[str, Any]


class _Latest:
    """Remembers the latest value made, for as long as its key is asked for."""

    def __init__(self) -> None:
        self._key: Any = None
        self._value: Any = None

    def get(self, key: Any, make: Callable[[], Any]) -> Any:
        if self._key != key:
            self._key = self._value = None  # frees the last one's memory first
            self._value = make()
            self._key = key
        return self._value


class Matrix:
    """Measures rows; keeps what the rows of one group share."""

    def __init__(
        self, device: torch.device, backends: Sequence[str], baselines: Sequence[str]
    ) -> None:
        self.device = device
        self.backends = list(backends)
        self.baselines = list(baselines)
        self.timed = device.type == "cuda"
        self._trials, self._verdicts, self._compiled, self._times = (_Latest() for _ in range(4))

    @cached_property
    def ceilings(self) -> dict[str, float]:
        """What the device reaches; nothing on a CPU."""
        return timing.ceilings(self.device) if self.timed else {}

    def measure(
        self, spec: OpSpec, row: Row, backend: str, direction: str, *, layer: bool = False
    ) -> Found:
        """Every column of a row: what goes into its ``extra_info``."""
        parity = self._parity(spec, row, backend)
        found: Found = {
            "op": spec.name,
            "kind": "layer" if layer else "op",
            "backend": backend,
            "set": row.set,
            "case": row.case.name,
            "sizes": {k: list(v) if isinstance(v, tuple) else v for k, v in row.case.sizes.items()},
            "present": list(row.case.present),
            "dtypes": testing.mix_name(row.mix),
            "direction": direction,
            "device": self.device.type,
            "pass": all(p["pass"] for p in parity),
            "why": "; ".join(f"{p['tensor']}: {p['why']}" for p in parity if p["why"]),
            "parity": parity,
            "timing": "not timed" if self.timed else "simulated",
            "time_us": None,
        } | self._floor(spec, row, direction, layer)
        if not self.timed or not found["pass"]:
            return found
        times = self._times.get(
            (spec.name, row, direction, layer), lambda: self._race(spec, row, direction, layer)
        )
        if "error" in times[backend]:
            return found | {"pass": False, "why": times[backend]["error"]}
        found |= times[backend]
        for name, columns in times.items():
            if name not in self.backends:
                prefix = BASELINES.get(name, f"{name}_")
                found |= {
                    prefix + k.removeprefix("time_"): v
                    for k, v in columns.items()
                    if k != "samples_us"
                }
        if "eager_us" in found:
            found["ratio"] = found["eager_us"] / found["time_us"]
        if layer:
            found["added_us"] = found["time_us"] - found["base_us"]
            if "peft_us" in found:
                found["peft_added_us"] = found["peft_us"] - found["base_us"]
        elif found["floor_us"]:
            found["times_floor"] = found["time_us"] / found["floor_us"]
        return found

    def _trial(self, spec: OpSpec, row: Row) -> testing.Trial:
        """The operands of a row, and what all its backends are scored against."""
        call = (spec.name, row.case, row.mix)
        trial: testing.Trial = self._trials.get(
            call, lambda: testing.Trial(*call, device=self.device)
        )
        return trial

    def _parity(self, spec: OpSpec, row: Row, backend: str) -> list[Found]:
        known: dict[str, list[Found]] = self._verdicts.get((spec.name, row), dict)
        if backend not in known:
            try:
                scored = self._trial(spec, row).score(backend)
            except Exception as error:  # one broken kernel must not lose the other rows
                call = (spec.name, backend, row.case, row.mix)
                scored = [report.broken(*call, self.device, error)]
            known[backend] = [{k: r.as_dict()[k] for k in _TENSOR} for r in scored]
        return known[backend]

    def _floor(self, spec: OpSpec, row: Row, direction: str, layer: bool) -> Found:
        """Least bytes and flops, and the time they take at the device's ceilings.

        Forward plus backward comes from the OpSpec. Forward alone reads every operand and writes
        the output, once each; its flops are not declared, so that bandwidth alone bounds it.
        """
        operands = explain.blanks(spec, row.case, row.mix)
        binding = spec.bind(operands, row.case.attributes)
        out = resolve_policy(spec, operands, self.device, None, None).output.itemsize
        if direction == "fwd":
            size = sum(t.numel() * t.element_size() for t in operands if t is not None)
            size += out * torch.Size(binding.out_shape).numel()
            flops = None
        else:
            cost = spec.cost(binding.dims, out)
            size, flops = cost.bytes, cost.flops
        least = None
        if self.ceilings and not layer:
            least = 1e6 * max(
                size / self.ceilings["copy_bytes_per_s"],
                (flops or 0) / self.ceilings["bf16_flop_per_s"],
            )
        return {"bytes": size, "flops": flops, "floor_us": least}

    # ----------------------------------------------------------------- on a GPU

    def _race(self, spec: OpSpec, row: Row, direction: str, layer: bool) -> dict[str, Found]:
        """Times of every backend that passes its parity and of every baseline."""
        inputs = self._trial(spec, row).inputs
        passing = [
            name
            for name in self.backends
            if not explain.refusal(spec, name, row.case, row.mix, self.device)
            and all(p["pass"] for p in self._parity(spec, row, name))
        ]
        maker = self._layer_steps if layer else self._op_calls
        prepared = maker(spec, row, inputs, passing, direction == "fwd+bwd")
        count = timing.rotations(inputs)
        recorded, loops, peaks = {}, {}, {}
        found: dict[str, Found] = {}
        for name, prepare in prepared.items():
            try:
                recorded[name] = timing.record([prepare() for _ in range(count)])
                loops[name] = prepare()
                peaks[name] = timing.peak(loops[name])
            except Exception as error:  # out of memory, or a compiler's own
                recorded.pop(name, None)
                loops.pop(name, None)
                found[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
        spans = timing.race(recorded)
        hosts = timing.loop_times({name: (loops[name], spans[name].median) for name in recorded})
        for name, span in spans.items():
            low, high = span.quartiles
            host, wall = hosts[name]
            found[name] = {
                "timing": span.how,
                "time_us": span.median,
                "time_low_us": low,
                "time_high_us": high,
                "samples_us": list(span.samples),
                "host_us": host.median,
                "wall_us": wall.median,
                "wall_low_us": wall.quartiles[0],
                "wall_high_us": wall.quartiles[1],
                "peak_bytes": peaks[name],
            }
        return found

    def _op_calls(
        self, spec: OpSpec, row: Row, inputs: Inputs, backends: list[str], backward: bool
    ) -> dict[str, Callable[[], timing.Call]]:
        forwards = {n: timing.on_backend(spec, row.case, inputs.scale, n) for n in backends}
        if "eager" in self.baselines:
            forwards["eager"] = timing.on_backend(spec, row.case, inputs.scale, "torch")
        if "compile" in self.baselines:
            # Compiled once for both directions.
            forwards["compile"] = self._compiled.get(
                (spec.name, row), lambda: timing.compiled(spec, row.case, inputs)
            )
        return {
            name: lambda forward=forward: timing.prepare(spec, inputs, forward, backward)
            for name, forward in forwards.items()
        }

    def _layer_steps(
        self, spec: OpSpec, row: Row, inputs: Inputs, backends: list[str], backward: bool
    ) -> dict[str, Callable[[], timing.Call]]:
        dims = spec.bind(inputs.operands, row.case.attributes).dims
        frozen = layers.freeze(spec, row.case, inputs, dims)
        ops = {n: timing.on_backend(spec, row.case, inputs.scale, n) for n in backends}
        if "eager" in self.baselines:
            ops["eager"] = timing.on_backend(spec, row.case, inputs.scale, "torch")
        steps: dict[str, Callable[[], timing.Call]] = {
            name: lambda op=op: layers.step(spec, row.case, frozen, op)
            for name, op in [*ops.items(), ("base", None)]
        }
        if "peft" in self.baselines and peft_layers.has(spec):
            steps["peft"] = lambda: peft_layers.step(spec, row.case, frozen, inputs.scale)
        return steps
