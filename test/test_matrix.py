"""bench/: the matrix's rows, and what is measured of them."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from lycoris.kernels import explain
from lycoris.kernels.inputs import draw
from lycoris.kernels.spec import SPECS, Case

FP32 = (torch.float32, torch.float32)


# ---------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("op", list(SPECS))
def test_every_op_has_rows_and_each_is_a_call_it_takes(bench: Any, op: str) -> None:
    spec = SPECS[op]
    for sets in (("llm", "sdxl", "flux", "own"), ("small",)):
        rows = bench.shapes.rows(spec, sets, bench.shapes.MIXES, False)
        quick = bench.shapes.rows(spec, sets, bench.shapes.QUICK_MIXES, True)
        assert quick
        assert {(r.set, r.case.name) for r in quick} <= {(r.set, r.case.name) for r in rows}
        assert len({(r.set, r.case.name, r.mix) for r in rows}) == len(rows)
        for row in rows:
            spec.bind(explain.blanks(spec, row.case, row.mix), row.case.attributes)
            if sets == ("small",):
                draw(spec, row.case, row.mix, torch.device("cpu"))
            names = {o.name for o in spec.operands}
            assert set(row.case.present) <= names


def test_the_shapes_are_those_people_use(bench: Any) -> None:
    layers = [y for name in ("llm", "sdxl", "flux") for y in bench.shapes.SETS[name]]
    sizes = {(y.n_out, y.n_in) for y in layers if not y.image}
    assert {(640, 640), (1280, 1280), (3072, 3072), (4096, 4096)} <= sizes
    assert {(11008, 4096), (12288, 3072)} <= sizes
    assert {(y.n_out, y.kernel) for y in layers if y.image} == {
        (n, (3, 3)) for n in (320, 640, 1280)
    }
    assert {77, 1024, 4096, 16384} <= {y.tokens for y in layers}
    assert {4, 16, 64, 128} <= {y.rank for y in layers}


def test_every_set_has_a_quick_layer(bench: Any) -> None:
    assert all(any(y.quick for y in layers) for layers in bench.shapes.SETS.values())


def test_a_slow_call_is_looped_over_a_few_times(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing, slow, fast = bench.timing, MagicMock(), MagicMock()
    found = timing.loop_times({"slow": (slow, 1e6), "fast": (fast, 1.0)})
    batches = timing.HOST_BATCHES + 1  # one to warm up
    assert slow.call_count == timing.FEWEST_CALLS * batches
    assert fast.call_count == timing.HOST_CALLS * batches
    assert {len(span.samples) for spans in found.values() for span in spans} == {batches - 1}


def test_rows_of_single_ops_are_told_apart(bench: Any) -> None:
    assert bench.rows.SHAPES.keys() >= {"lora_apply", "lora_weight"}
    for op in bench.rows.SHAPES.keys() & SPECS.keys():
        rows = bench.shapes.rows(SPECS[op], ("own",), bench.shapes.MIXES, False)
        assert len(rows) == len(bench.rows.SHAPES[op])
        assert {r.set for r in rows} == {"own"}


def test_an_op_nobody_listed_gets_its_rows(bench: Any) -> None:
    known = SPECS["lora_weight"]
    renamed = replace(known, name="new_weight")  # the usual symbols
    (row,) = bench.shapes.rows(renamed, ("llm",), bench.shapes.QUICK_MIXES, True)
    assert row.case.sizes == {"O": 4096, "r": 16, "N": (4096,)}

    def shapes(present: frozenset[str]) -> dict[str, str]:
        return {"up": "V r", "down": "r W", "mid": "V", "base": "V W", "out": "V W"}

    cases = (
        Case("tiny", {"V": 4, "W": 5, "r": 2}),
        Case("large", {"V": 400, "W": 500, "r": 2}, device="cuda", mixes="few"),
    )
    foreign = replace(known, name="foreign", shapes=shapes, cases=cases)  # symbols of its own
    for name, expected in (("small", ["tiny"]), ("llm", ["large"]), ("flux", [])):
        found = bench.shapes.rows(foreign, (name,), (FP32,), False)
        assert [r.case.name for r in found] == expected


def test_a_mix_that_changes_nothing_is_no_row_of_its_own(bench: Any) -> None:
    rows = bench.shapes.rows(SPECS["lora_weight"], ("small",), bench.shapes.MIXES, True)
    plain = [r.mix for r in rows if not r.case.present and r.case.name == rows[0].case.name]
    assert len(plain) == 3  # without a base the model's dtype is nobody's


def test_layers_are_found_by_their_operands(bench: Any) -> None:
    apply, weight = SPECS["lora_apply"], SPECS["lora_weight"]
    case = bench.layers.layer_case(apply, Case("c", {"T": 5, "I": 6, "O": 7, "r": 2}))
    assert case.present == ("base",)
    assert bench.layers.layer_case(weight, Case("c", {"O": 7, "N": 6, "r": 2})) is None


# --------------------------------------------------------------- measuring, with a fake GPU


def test_a_recorded_run_owns_its_operands(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph doesn't: replays would read what the next capture has given back to the device."""
    for name in ("Stream", "current_stream", "synchronize", "CUDAGraph", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    operand = torch.ones(3)
    calls = [lambda: operand + 1]
    alive = weakref.ref(calls[0])
    recorded = bench.timing.record(calls)
    del calls
    gc.collect()
    assert alive() is not None
    assert recorded.count == 1


@pytest.fixture
def timed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A matrix that times on the CPU what it times on a GPU."""
    timing = bench.timing

    def record(calls: Any) -> Any:
        def loop() -> None:
            for call in calls:
                call()

        loop()
        return timing.Recorded(loop, "fake", calls)

    def elapsed(call: Any) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    ceilings = {"copy_bytes_per_s": 4e12, "bf16_flop_per_s": 8e14}
    for name, value in {
        "record": record, "elapsed": elapsed, "REPEATS": 4,
        "HOST_CALLS": 2, "HOST_BATCHES": 3, "FEWEST_CALLS": 1,
        "rotations": lambda inputs: 2, "peak": lambda call: (call(), 7)[1],
        "ceilings": lambda device: ceilings,
    }.items():  # fmt: skip
        monkeypatch.setattr(timing, name, value)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    matrix = bench.measure.Matrix(torch.device("cpu"), ["torch"], ["eager", "compile"])
    matrix.timed = True
    return matrix


@pytest.mark.parametrize("op", list(SPECS))
def test_a_row_has_every_column(bench: Any, timed: Any, op: str) -> None:
    spec = SPECS[op]
    row = bench.shapes.rows(spec, ("small",), (FP32,), True)[0]
    directions = ("fwd", "fwd+bwd") if any(o.differentiable for o in spec.operands) else ("fwd",)
    for direction in directions:
        found = timed.measure(spec, row, "torch", direction)
        assert found["pass"], found["why"]
        for name in ("", "eager_", "compile_"):
            assert found[f"{name}peak_bytes"] == 7
            assert found[f"{name}host_us"] > 0
            assert found[f"{name}wall_us"] > 0
        assert 0 < found["time_low_us"] <= found["time_us"] <= found["time_high_us"]
        assert found["ratio"] == found["eager_us"] / found["time_us"]
        assert found["times_floor"] == found["time_us"] / found["floor_us"]
        assert found["floor_us"] >= found["bytes"] / 4e12 * 1e6
        assert len(found["samples_us"]) == 4
        assert {p["tensor"] for p in found["parity"]} >= {"out"}


@pytest.mark.parametrize("op", list(SPECS))
def test_a_layer_has_what_its_adapter_adds(bench: Any, timed: Any, op: str) -> None:
    spec = SPECS[op]
    rows = bench.shapes.rows(spec, ("small",), (FP32,), True)
    cases = [(row, bench.layers.layer_case(spec, row.case)) for row in rows]
    for row, case in [(row, case) for row, case in cases if case][:1]:
        found = timed.measure(spec, replace(row, case=case), "torch", "fwd+bwd", layer=True)
        assert found["pass"], found["why"]
        assert found["added_us"] == found["time_us"] - found["base_us"]
        assert found["eager_us"] > 0
        assert "times_floor" not in found  # the floor of the op is none of the layer's


PEFT = pytest.mark.skipif(find_spec("peft") is None, reason="needs HF PEFT: pip install peft")
#: The ops that PEFT has too; where only costs compare, on the identity as the layer's weight.
PEFT_OPS = (
    *("lora_apply", "dora_apply", "loha_apply", "lokr_apply"),
    *("oft_apply", "boft_apply", "ia3_scale"),
)


def peft_cases(bench: Any, op: str) -> list[Case]:
    """Small cases of an op as a layer; BOFT's of one stage, which PEFT has without CUDA."""
    rows = bench.shapes.rows(SPECS[op], ("small",), (FP32,), False)
    cases = [bench.layers.layer_case(SPECS[op], row.case) for row in rows]
    if op == "lokr_apply":
        sizes = {"T": 9, "a": 4, "b": 4, "c": 8, "d": 6}
        cases.append(Case("dense", sizes, present=("w1", "w2", "base")))
    if op == "boft_apply":
        cases = [replace(c, sizes=c.sizes | {"m": 1}) for c in cases]
    if op in ("oft_apply", "boft_apply"):  # PEFT has no multiplier
        cases = [replace(c, scale=1.0) for c in cases]
    return cases


@PEFT
@pytest.mark.parametrize("op", PEFT_OPS)
def test_pefts_layer_computes_what_the_row_does(bench: Any, op: str) -> None:
    spec = SPECS[op]
    assert bench.peft_layers.has(spec)
    for case in peft_cases(bench, op):
        inputs = draw(spec, case, FP32, torch.device("cpu"))
        dims = spec.bind(inputs.operands, case.attributes).dims
        frozen = bench.layers.freeze(spec, case, inputs, dims)
        if op in ("oft_apply", "boft_apply"):  # PEFT rotates the layer's input, ours its output
            frozen = replace(frozen, weight=torch.eye(frozen.weight.shape[0]))
        if op == "boft_apply":  # our stage takes the channels of a block's halves in turn
            v, blocks, *rest = frozen.operands
            order = torch.arange(blocks.shape[-1]).view(-1, 2).t().flatten()
            frozen = replace(frozen, operands=[v, blocks[..., order, :][..., order], *rest])
        layer = bench.peft_layers.wrap(spec, case, frozen, inputs.scale)
        y = torch.nn.functional.linear(frozen.x, frozen.weight)
        given = {"x": frozen.x, "weight": frozen.weight, bench.layers.output_operand(spec, case): y}
        leaves = [
            t if t is None or o.name not in given else given[o.name].reshape(t.shape)
            for o, t in zip(spec.operands, inputs.operands, strict=True)
        ]
        ours = bench.timing.on_backend(spec, case, inputs.scale, "torch")(leaves)
        theirs = layer(frozen.x).detach().reshape(ours.shape)
        moved = (ours - y.reshape(ours.shape)).abs().max()
        assert moved > 0.01  # an adapter that does nothing would agree with anything
        assert (theirs - ours).abs().max() < 1e-4 * moved + 1e-5, case.name


@PEFT
@pytest.mark.parametrize("mix", [FP32, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("op", PEFT_OPS)
def test_a_layer_has_pefts_cost(bench: Any, timed: Any, op: str, mix: Any) -> None:
    timed.baselines = ["peft"]
    spec = SPECS[op]
    row = bench.shapes.rows(spec, ("small",), (mix,), True)[0]
    row = replace(row, case=bench.layers.layer_case(spec, row.case))
    times = timed._race(spec, row, "fwd+bwd", True)
    assert times["peft"]["time_us"] > 0, times["peft"]
    if mix == FP32:  # unfused, 16-bit rows fail their parity
        found = timed.measure(spec, row, "torch", "fwd+bwd", layer=True)
        assert found["peft_added_us"] == found["peft_us"] - found["base_us"]
        assert found["peft_wall_us"] > 0
        assert "peft_us" not in timed.measure(spec, row, "torch", "fwd+bwd")


@PEFT
def test_an_adapter_of_another_shape_is_no_baseline(bench: Any, timed: Any) -> None:
    timed.baselines = ["peft"]
    spec = SPECS["lokr_apply"]
    sizes = {"T": 9, "a": 4, "b": 4, "c": 8, "d": 6, "r": 5}  # PEFT keeps w2 dense at this rank
    case = Case("high rank", sizes, present=("w1", "w2_a", "w2_b", "base"))
    row = bench.shapes.Row("own", case, FP32)
    found = timed.measure(spec, row, "torch", "fwd+bwd", layer=True)
    assert found["pass"], found["why"]
    assert found["peft_error"].startswith("ValueError: PEFT's lokr_w2_a.default has the shape None")
    assert "peft_us" not in found


def test_a_row_that_fails_its_parity_has_no_speed(bench: Any, timed: Any) -> None:
    spec = SPECS["lora_weight"]
    row = bench.shapes.rows(spec, ("small",), bench.shapes.QUICK_MIXES, True)[0]
    found = timed.measure(spec, row, "torch", "fwd")  # unfused bf16 rounds too often
    assert not found["pass"]
    assert found["why"]
    assert found["time_us"] is None
    assert not [k for k in found if k.startswith(("eager_", "host", "wall", "peak"))]


def test_a_variant_that_breaks_loses_only_its_own_columns(
    bench: Any, timed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        def forward(leaves: Any) -> Any:
            raise RuntimeError("no memory")

        return forward

    monkeypatch.setattr(bench.timing, "compiled", broken)
    spec = SPECS["lora_apply"]
    row = bench.shapes.rows(spec, ("small",), (FP32,), True)[0]
    found = timed.measure(spec, row, "torch", "fwd")
    assert found["compile_error"] == "RuntimeError: no memory"
    assert found["time_us"] > 0
    assert found["eager_us"] > 0


def test_the_clock_gives_back_the_samples(bench: Any) -> None:
    clock = bench.clock.Clock()
    clock.samples = [3.0, 1.0]
    spans = []
    for _ in range(3):
        start = clock()
        clock.tick()
        spans.append(clock() - start)
    assert spans == [3.0, 1.0, 0.0]
