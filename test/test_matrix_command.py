"""bench/ as a command: what its options come to, and a run of a few rows on a CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from lycoris.bench.records import load
from lycoris.bench.report import html, markdown
from lycoris.kernels.report import UsageError
from lycoris.kernels.spec import SPECS

ROOT = Path(__file__).resolve().parents[1]
MATRIX = [sys.executable, "-m", "pytest", "bench", "--benchmark-only", "--device", "cpu", "-q"]
FP32 = (torch.float32, torch.float32)


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    """The matrix as a user starts it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    return subprocess.run(
        [*MATRIX, *argv],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A few rows on a CPU. Unfused, fp32 meets the rule; in bf16 it rounds too often."""
    file = tmp_path_factory.mktemp("matrix") / "results.json"
    argv = ["--quick", "--op", "lora_weight", "--direction", "fwd+bwd"]
    argv += ["--backend", "triton", "--backend", "torch", "--dtype", "fp32", "--dtype", "bf16"]
    done = run(*argv, "--benchmark-json", str(file))
    assert file.exists(), done.stdout + done.stderr
    return done, json.loads(file.read_text()), file


def test_a_run_on_a_cpu_is_simulated_and_has_accuracy_only(ran: Any) -> None:
    done, data, _ = ran
    assert done.returncode == 1, done.stdout
    assert "CPU: kernels are simulated, no speed is claimed" in done.stdout
    rows = [entry["extra_info"] for entry in data["benchmarks"]]
    assert len(rows) == 8
    assert {(r["backend"], r["dtypes"]): r["pass"] for r in rows} == {
        ("triton", "fp32"): True,
        ("triton", "bf16"): True,
        ("torch", "fp32"): True,
        ("torch", "bf16"): False,
    }
    for entry, row in zip(data["benchmarks"], rows, strict=True):
        assert row["timing"] == "simulated"
        assert row["time_us"] is None
        assert entry["stats"] is None
        tensors = {p["tensor"] for p in row["parity"]}
        assert tensors == {"out", "grad up", "grad down"}
        for column in ("ulp", "model_ulp", "floor_ulp", "eager_ulp", "bound", "pass"):
            assert all(column in p for p in row["parity"])
    assert data["machine_info"]["lycoris"]["environment"]["torch"] == torch.__version__


def test_its_json_is_compared_and_reported(ran: Any) -> None:
    results = load(ran[2])
    assert results.backends == ["triton", "torch"]
    text = html(results, "x")
    assert "no speed is claimed" in text
    assert 'class="chart"' not in text
    assert markdown(results, "x").count("FAIL") == 2


def test_options_cut_the_matrix() -> None:
    done = run("--collect-only", "--op", "lora_apply", "--backend", "torch", "--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    tests = [line for line in done.stdout.splitlines() if "::" in line]
    row = "lora_apply-torch-bf16-T=2x16 I=64 O=96 r=4"
    assert tests == [
        f"bench/test_ops.py::test_op[{row}-fwd]",
        f"bench/test_ops.py::test_op[{row}-fwd+bwd]",
        f"bench/test_layers.py::test_layer[{row} +base-fwd+bwd]",
    ]


def test_the_table_tells_layers_from_ops_and_has_no_empty_column() -> None:
    argv = ["--quick", "--op", "ia3_scale", "--backend", "triton", "--direction", "fwd+bwd"]
    done = run(*argv)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert [w for w in lines if w.startswith("ia3")] == ["ia3_scale", "ia3_scale as a layer"]
    assert "time_us" not in done.stdout


def test_a_run_that_can_write_nothing_does_not_start(tmp_path: Path) -> None:
    argv = ["--quick", "--op", "ia3_scale", "--backend", "triton"]
    done = run(*argv, "--benchmark-json", str(tmp_path / "gone" / "results.json"))
    assert done.returncode == 4
    assert f"--benchmark-json: no folder {tmp_path / 'gone'}" in done.stdout + done.stderr


def test_options_that_leave_no_row_say_so() -> None:
    done = run("--op", "lora_conv_apply", "--shapes", "llm", "--backend", "torch")
    assert done.returncode == 5
    assert "no row of the matrix fits these options" in done.stdout


@pytest.fixture
def module(bench: Any) -> Any:
    """The matrix's conftest."""
    code = importlib.util.spec_from_file_location("matrix_conftest", ROOT / "bench/conftest.py")
    module = importlib.util.module_from_spec(code)
    code.loader.exec_module(module)
    return module


@pytest.fixture
def plan(module: Any) -> Any:
    """What the options given come to."""

    def make(**options: Any) -> Any:
        given = {f"--{name}": value for name, value in options.items()}
        return module.Plan(SimpleNamespace(getoption=lambda name: given.get(name)))

    return make


def test_options_come_to_a_plan(plan: Any) -> None:
    default = plan(device="cpu")
    assert default.sets == ("small",)
    assert default.directions == ("fwd", "fwd+bwd")
    peft = ["peft"] if find_spec("peft") else []
    assert default.baselines == ["eager", "compile", *peft]
    assert [spec.name for spec in default.ops] == list(SPECS)
    assert {(torch.bfloat16, torch.bfloat16), FP32} <= set(default.mixes)
    cut = plan(device="cpu", quick=True, shapes=["llm"], baseline=["none"], direction=["fwd"])
    assert (cut.sets, cut.directions, cut.baselines) == (("llm",), ("fwd",), [])
    assert cut.mixes == ((torch.bfloat16, torch.bfloat16),)


def test_rows_that_the_budget_leaves_out_are_counted(module: Any, plan: Any) -> None:
    found, lines = plan(device="cpu", budget=1e-9), []
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="the time of --budget is up"):
            found.start_row()
    plan(device="cpu").start_row()
    config = SimpleNamespace(stash={module._PLAN: found})
    module.pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)
    assert lines == ["2 rows not started: the time of --budget was up"]


def test_without_peft_there_is_no_such_baseline(
    bench: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.peft_layers, "find_spec", lambda name: None)
    assert plan(device="cpu").baselines == ["eager", "compile"]
    with pytest.raises(UsageError, match="--baseline peft: the package peft is not installed"):
        plan(device="cpu", baseline=["peft"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": ["nope"]}, "unknown op 'nope'; known: "),
        ({"backend": ["nope"]}, "unknown backend 'nope'"),
        ({"dtype": ["int8"]}, "unknown dtype 'int8'"),
        ({"budget": -1.0}, "--budget -1: expected seconds, above 0"),
        ({"budget": 0.0}, "--budget 0: expected seconds, above 0"),
        ({"budget": math.nan}, "--budget nan: expected seconds, above 0"),
    ],
)
def test_what_is_unknown_is_a_usage_error(plan: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(device="cpu", **options)
