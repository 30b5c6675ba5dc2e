"""``python -m lycoris compare``: planted regressions, noise, missing rows, failures, bad files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lycoris.__main__ import main
from lycoris.bench.compare import Limits, compare
from lycoris.bench.records import Results, load, load_all
from lycoris.kernels.report import UsageError

ROOT = Path(__file__).resolve().parents[1]


def verdict(tensor: str = "out", **changes: Any) -> dict[str, Any]:
    return {
        "tensor": tensor, "ulp": 1.5, "rms": 0.4, "model_ulp": 1.25, "model_rms": 0.4,
        "floor_ulp": 1.0, "floor_rms": 0.3, "eager_ulp": 3.0, "eager_rms": 0.5, "bound": 24.0,
        "agreement": 1.0, "why": "", "pass": True,
    } | changes  # fmt: skip


def row(time: float | None = 100.0, noise: float = 1.0, **changes: Any) -> dict[str, Any]:
    """A row of the matrix whose time has quartiles ``noise`` us away."""
    speed = {} if time is None else {"time_low_us": time - noise, "time_high_us": time + noise}
    return {
        "op": "lora_apply", "kind": "op", "backend": "triton", "case": "T=8 r=4", "dtypes": "bf16",
        "direction": "fwd+bwd", "device": "cuda", "pass": True, "why": "", "time_us": time,
        "timing": "cuda graph", "present": [], "parity": [verdict(), verdict("grad x")], **speed,
    } | changes  # fmt: skip


def parity(backend: str, **changes: Any) -> dict[str, Any]:
    """A row as ``pytest --parity-json`` writes it."""
    about = {"op": "lora_apply", "backend": backend, "case": "plain", "dtypes": "bf16"}
    return about | {"device": "cpu"} | verdict() | changes


def matrix(rows: list[dict[str, Any]], name: str = "GPU 1", commit: str = "abc") -> dict[str, Any]:
    machine = {"environment": {"torch": "2.13", "name": name}, "ceilings": {}, "unavailable": {}}
    return {
        "machine_info": {"lycoris": machine},
        "commit_info": {"id": commit},
        "datetime": "2026-11-30T01:02:03",
        "benchmarks": [{"name": "x", "extra_info": r, "stats": None} for r in rows],
    }


@pytest.fixture
def status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on two results; returns (exit status, what it printed)."""

    def run(a: Any, b: Any, *argv: str) -> tuple[int, str]:
        names = []
        for name, data in (("a.json", a), ("b.json", b)):
            if data is not None:
                text = data if isinstance(data, str) else json.dumps(data)
                (tmp_path / name).write_text(text)
            names.append(str(tmp_path / name))
        code = main(["compare", *names, *argv])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


def test_equal_results_are_no_regression(status: Any) -> None:
    code, text = status(matrix([row()]), matrix([row()]))
    assert code == 0
    assert "No parity failure and no regression." in text
    assert (
        "| lora_apply | bf16 | 2 | 1.5 | 1.5 | 1.25 | 3 | 24 | none | none |" in text.splitlines()
    )


def test_a_planted_slowdown_is_one(status: Any) -> None:
    code, text = status(matrix([row(100.0)]), matrix([row(125.0)]))
    assert code == 1
    assert "125.0 us after 100.0 us, 1.25 times as long" in text
    assert "slower |" in text
    assert status(matrix([row(100.0)]), matrix([row(125.0)]), "--max-slowdown", "1.3")[0] == 0


@pytest.mark.parametrize(("before", "after"), [((100, 1), (109, 1)), ((100, 15), (125, 15))])
def test_what_is_small_or_within_the_spread_is_noise(
    status: Any, before: tuple[float, float], after: tuple[float, float]
) -> None:
    assert status(matrix([row(*before)]), matrix([row(*after)]))[0] == 0


def test_a_speed_up_is_no_regression(status: Any) -> None:
    code, text = status(matrix([row(125.0)]), matrix([row(100.0)]))
    assert code == 0
    assert "faster |" in text


def test_a_growing_error_is_one(status: Any) -> None:
    worse = row(parity=[verdict(), verdict("grad x", ulp=1.75)])
    code, text = status(matrix([row()]), matrix([worse]))
    assert code == 1
    assert "grad x: 1.75 ULP after 1.5" in text
    assert status(matrix([row()]), matrix([worse]), "--max-ulp-growth", "0.5")[0] == 0


def test_errors_of_two_devices_or_backends_differ_by_nature(status: Any) -> None:
    worse = row(parity=[verdict(ulp=1.75), verdict("grad x")])
    assert status(matrix([row()]), matrix([worse], name="GPU 2"))[0] == 0
    other = [parity("tilelang", ulp=2.0)]
    assert status([parity("triton")], other)[0] == 0
    assert status([parity("triton")], other, "--max-ulp-growth", "0.25")[0] == 1


def test_two_devices_are_told_apart(status: Any) -> None:
    text = status(matrix([row()]), matrix([row()], name="GPU | 2"))[1]
    assert "They differ in name GPU 1 and GPU \\| 2." in text


def test_a_row_that_is_gone_is_a_regression_and_a_new_one_is_not(status: Any) -> None:
    more = matrix([row(), row(op="lora_weight")])
    code, text = status(more, matrix([row()]))
    assert code == 1
    assert "B: lora_weight, bf16, T=8 r=4, fwd+bwd, triton: no such row" in text
    code, text = status(matrix([row()]), more)
    assert code == 0
    assert "1 rows are new in B." in text


def test_a_new_row_that_fails_is_a_failure(status: Any) -> None:
    bad = row(None, op="lora_weight", why="out: ulp 30 > 24", **{"pass": False})
    code, text = status(matrix([row()]), matrix([row(), bad]))
    assert code == 1
    assert "out: ulp 30 > 24" in text


def test_a_speed_that_is_gone_is_a_regression(status: Any) -> None:
    code, text = status(matrix([row()]), matrix([row(None)]))
    assert code == 1
    assert "not timed; A was" in text


def test_parity_failures_and_missing_rows_of_backends(status: Any) -> None:
    bad = {"why": "ulp 30 > 24 (bound)", "pass": False}
    left = [parity("triton", **bad), parity("triton", case="base")]
    code, text = status(left, [parity("tilelang"), parity("tilelang", case="primes")])
    assert code == 1
    assert "- triton: lora_apply, bf16, plain: out: ulp 30 > 24 (bound)" in text
    assert "- tilelang: lora_apply, bf16, base: no such row" in text
    assert "- triton: lora_apply, bf16, primes: no such row" in text
    assert "| eager | bound | failed | missing |" in text
    assert "| 3 | 24 | 1 | 2 |" in text


def test_a_hash_is_cut_and_a_commit_in_words_is_not(status: Any) -> None:
    words = "4e70395: Generated signatures, and two more fixes"
    text = status(matrix([row()], commit="0123456789abcdef" * 2 + "01234567"), matrix([row()]))[1]
    assert text.startswith("### 0123456789 (A) and abc (B)")
    text = status(matrix([row()], commit=words), matrix([row()]))[1]
    assert text.startswith(f"### {words} (A) and abc (B)")


def test_both_backends_of_one_file(status: Any) -> None:
    both = [parity("triton"), parity("tilelang", ulp=2.0)]
    code, text = status(both, both, "--backends", "triton", "tilelang")
    assert code == 0
    assert text.startswith("### triton (A) and tilelang (B)")
    code, text = status(both, both, "--backends", "triton", "cuda")
    assert code == 2
    assert "no row of backend 'cuda'; it has triton, tilelang" in text


def test_rows_that_differ_in_an_optional_operand_are_two(status: Any) -> None:
    rows = [row(100.0), row(150.0, present=["base"])]
    assert status(matrix(rows), matrix(rows[::-1]))[0] == 0


def test_a_layer_is_not_the_op(status: Any) -> None:
    rows = [row(100.0), row(150.0, kind="layer")]
    assert status(matrix(rows), matrix(rows[::-1]))[0] == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "can't be read: No such file"),
        ("{", "not JSON"),
        ([], "no row in it"),
        ({"rows": []}, "no 'environment' where it belongs; expected results of the benchmark"),
        ([{"op": "lora_apply"}], "no 'path' where it belongs; expected results"),
        ([parity("triton") | {"tensor": "out"}, {"tensor": "out"}], "no 'op' where it belongs"),
        (
            matrix([{k: v for k, v in row().items() if k != "op"}]),
            "a row without op; expected results",
        ),
        ("3", "no list of rows; expected results"),
        ([3], "no list of rows"),
        ({"rows": 3713}, "no list of rows"),
        ({"compilerOptions": {}}, "an object without rows; expected results"),
        ({"rows": 2, "summary": [{"op": "lora_apply"}]}, "a summary without rows; expected"),
        ({"benchmarks": [], "machine_info": 3}, "a part of it is of another kind; expected"),
        ("[" * 100_000, "not JSON"),
        ('[{"ulp": NaN}]', "not JSON: NaN is no number of JSON"),
        (matrix([row(time_us="12")]), "time_us is '12'; expected a number or null"),
        (matrix([row(eager_us=True)]), "eager_us is True; expected a number or null"),
        (matrix([row(-1.0)]), "time_us is -1.0; expected a time above 0"),
        (matrix([row(0.0)]), "time_us is 0.0; expected a time above 0"),
        (matrix([row(floor_us=-1)]), "floor_us is -1; expected a time above 0"),
        (matrix([row(time_low_us=10**400)]), "time_low_us is beyond a double's range"),
        (matrix([row(parity=[verdict(ulp=10**400)])]), "ulp is beyond a double's range"),
        (matrix([row(op=3)]), "op is 3; expected text"),
        (matrix([row(**{"pass": "no"})]), "pass is 'no'; expected true or false"),
        (matrix([row(parity=[])]), "a row has an empty parity"),
        (matrix([row(parity=[verdict(ulp=None)])]), "out passes without an error in ulp"),
        (matrix([row(parity=[verdict(bound="1")])]), "bound is '1'; expected a number or null"),
        (matrix([row(parity=[verdict(tensor=1)])]), "tensor is 1; expected text"),
        ({"rows": [row()], "environment": 3}, "environment is 3; expected an object"),
        ({"rows": [row()], "environment": {}, "commit": 3}, "commit is 3; expected text"),
        ({"rows": [row()], "environment": {}, "ceilings": 3}, "ceilings is 3; expected an object"),
        ({"rows": [row()], "environment": {"name": []}}, "name is []; expected text"),
        (
            {"rows": [row()], "environment": {}, "ceilings": {"copy_bytes_per_s": 10**400}},
            "copy_bytes_per_s is beyond a double's range",
        ),
        (
            {"rows": [row()], "environment": {}, "ceilings": {"copy_bytes_per_s": "1"}},
            "ceiling copy_bytes_per_s is '1'; expected a number above 0",
        ),
    ],
)
def test_bad_files_are_usage_errors(status: Any, data: Any, message: str) -> None:
    code, text = status(data, matrix([row()]))
    assert code == 2
    assert "a.json" in text
    assert message in text
    assert len(text.splitlines()) == 1
    assert not re.search(r"[A-Z][a-z]+Error|object is not", text)


def test_bad_options_are_usage_errors(status: Any) -> None:
    assert status(matrix([row()]), matrix([row()]), "--max-slowdown", "0")[0] == 2
    for growth in ("-1", "nan"):
        assert status(matrix([row()]), matrix([row()]), "--max-ulp-growth", growth)[0] == 2


def test_what_a_file_holds_starts_no_markup() -> None:
    name = "<script>a|b</script>"
    a, b = (Results(name, [row(t, op=name, case=name)]) for t in (1.0, 9.0))
    found = compare(a, b, Limits())
    assert found.problems
    assert "<" not in found.markdown
    assert "script>a\\|b" in found.markdown


def test_many_problems_are_counted(tmp_path: Path) -> None:
    rows = [row(case=f"case {i}", why="out: bad", **{"pass": False}) for i in range(60)]
    a = Results("a", rows)
    found = compare(a, a, Limits())
    assert len(found.problems) == 120
    assert "- and 70 more" in found.markdown


def test_files_of_one_device_are_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(matrix([row(100.0), row(op="lora_weight")])))
    new.write_text(json.dumps(matrix([row(90.0)])))
    found = load_all([old, new])
    assert [(r["op"], r["time_us"]) for r in found.rows] == [
        ("lora_apply", 90.0),
        ("lora_weight", 100.0),
    ]


def test_the_summaries_on_record_say_what_they_are() -> None:
    files = sorted((ROOT / "bench" / "results").glob("*parity*.json"))
    assert files
    for file in files:
        with pytest.raises(UsageError, match="a summary without rows; expected results"):
            load(file)


def test_the_files_on_record_are_read() -> None:
    files = sorted((ROOT / "bench" / "results").glob("*-h200-lora-t*.json"))
    assert files
    for file in files:
        found = load(file)
        assert found.environment["name"] == "NVIDIA H200"
        assert all(r["parity"] and r["time_us"] for r in found.rows if r["pass"])
