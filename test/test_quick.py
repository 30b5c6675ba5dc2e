"""bench/kernels/quick.py: its rows, its table, its exit statuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from lycoris.kernels import registry
from lycoris.kernels.spec import SPECS

QUICK = Path(__file__).parents[1] / "bench" / "kernels" / "quick.py"


@pytest.fixture(scope="module")
def quick():
    spec = importlib.util.spec_from_file_location("quick", QUICK)
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run as a user starts it. Unfused, fp32 meets the rule; in bf16 it rounds too often."""
    file = tmp_path_factory.mktemp("quick") / "rows.json"
    argv = ["--op", "lora_weight", "--backend", "torch", "--dtype", "fp32", "--dtype", "bf16"]
    done = subprocess.run(
        [sys.executable, QUICK, *argv, "--device", "cpu", "--jobs", "1", "--json", file],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert file.exists(), done.stderr
    return done, json.loads(file.read_text())


def test_a_parity_failure_is_status_1_with_its_reason(ran):
    done, rows = ran
    assert done.returncode == 1, done.stderr
    assert {r["dtypes"]: r["pass"] for r in rows} == {"fp32": True, "bf16": False}
    assert "FAIL lora_weight, plain, bf16, torch: out: only" in done.stdout


def test_rows_carry_accuracy_and_environment_and_no_simulated_speed(ran):
    done, rows = ran
    for row in rows:
        assert {
            "op", "backend", "path", "shape", "dtypes", "ulp", "grad_ulp", "model_ulp",
            "floor_ulp", "eager_ulp", "bound", "pass", "why", "tensors",
        } <= row.keys()  # fmt: skip
        assert row["timing"] == "simulated"
        assert row["time_us"] is row["eager_us"] is row["ratio"] is None
        assert row["environment"]["torch"]
    assert "no speed is claimed" in done.stdout


def test_rows_cover_every_path_in_order(ran):
    found = [(r["path"], r["dtypes"]) for r in ran[1]]
    names = ("plain", "base", "tucker", "tucker base")
    assert found == [(p, d) for p in names for d in ("fp32", "bf16")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_has_a_path_of_the_right_size(quick, device):
    for spec in SPECS.values():
        found = quick.paths(spec, device)
        assert found
        if any(c.device == "cuda" for c in spec.cases):
            assert all((c.device == "cuda") == (device == "cuda") for c in found)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--op", "nope"], "unknown op 'nope'; known: "),
        (["--backend", "nope"], "unknown backend 'nope'; known: triton"),
        (["--backend", "gone"], "gone: not installed: No module named 'gone_backend'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--backend", "torch", "--jobs", "0"], "expected at least 1"),
    ],
)
def test_usage_errors(quick, capsys, monkeypatch, argv, message):
    monkeypatch.setattr(registry, "_discover", lambda: {"gone": "gone_backend"})
    assert quick.main([*argv, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


def test_an_unavailable_backend_is_listed_with_its_reason(quick, capsys, monkeypatch):
    known = {"gone": "gone_backend"}
    monkeypatch.setattr(registry, "BUILT_IN", {"torch": registry.BUILT_IN["torch"]})
    monkeypatch.setattr(registry, "_discover", lambda: known)
    assert quick.main(["--device", "cpu"]) == 2
    assert "gone: not installed" in capsys.readouterr().err


def test_a_table_whose_file_can_not_be_written_is_shown(quick, capsys, monkeypatch):
    monkeypatch.setattr(quick, "_run", lambda *args: iter([[]]))
    argv = ["--op", "add_scaled", "--backend", "torch", "--device", "cpu"]
    assert quick.main([*argv, "--jobs", "1", "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "0 rows, 0 failed" in out
    assert "error: --json: /dev/full can't be written: No space left on device" in err
