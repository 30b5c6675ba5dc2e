"""Options of the benchmark matrix, its rows in pytest-benchmark's JSON, and its own table.

    python -m pytest bench --benchmark-only --quick --benchmark-json FILE

Each test is one row. pytest-benchmark's clock is set by hand to device times that were measured
with all variants taking turns, so that its statistics are theirs.
"""

from __future__ import annotations

import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

# Also from a checkout that is not installed, and ahead of another distribution's `lycoris`.
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
sys.path.insert(2, str(Path(__file__).parent / "kernels"))

import peft_layers
import shapes
import torch
from clock import clock
from measure import BASELINES, DIRECTIONS, Matrix

from lycoris.kernels import explain, report, testing
from lycoris.kernels.spec import OpSpec

COLUMNS = (
    *("op", "case", "dtypes", "direction", "backend", "pass", "time_us", "floor_us"),
    *("times_floor", "eager_us", "compile_us", "peft_us", "base_us", "added_us"),
    *("host_us", "wall_us", "ulp", "bound"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("matrix", "the benchmark matrix")
    several = {"action": "append", "default": None}
    group.addoption("--op", **several, help="only this op; may be repeated")
    group.addoption("--backend", **several, help="default every fused one there is")
    group.addoption("--dtype", **several, help="bf16 or bf16/fp32; may be repeated")
    group.addoption(
        "--shapes",
        **several,
        choices=shapes.NAMES,
        help="a set of shapes; may be repeated (default all for a GPU; small on a CPU)",
    )
    group.addoption(
        "--direction", **several, choices=DIRECTIONS, help="default both; may be repeated"
    )
    group.addoption(
        "--baseline",
        **several,
        choices=(*BASELINES, "none"),
        help="default eager, compile and, if installed, peft; may be repeated",
    )
    group.addoption("--device", choices=("cpu", "cuda"), help="default a GPU, if any")
    group.addoption("--quick", action="store_true", help="few shapes, bf16 alone")
    group.addoption(
        "--budget", type=float, metavar="SECONDS", help="start no row after that long; skip it"
    )


class Plan:
    """What the options ask for."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        self.device = report.pick_device(option("--device"))
        self.named = bool(option("--backend"))
        self.backends, self.missing = report.pick_backends(option("--backend"), self.device)
        left_out = ("small", "own") if option("--quick") else ("small",)
        default = [s for s in shapes.NAMES if s not in left_out]
        self.sets = tuple(option("--shapes") or (default if self._gpu else ["small"]))
        self.quick = option("--quick")
        mixes = shapes.QUICK_MIXES if self.quick else shapes.MIXES
        self.mixes = tuple(report.pick_mixes(option("--dtype"), mixes))
        self.directions = tuple(option("--direction") or DIRECTIONS)
        baselines = option("--baseline") or [
            b for b in BASELINES if b != "peft" or peft_layers.available()
        ]
        if "peft" in baselines and not peft_layers.available():
            raise report.UsageError("--baseline peft: the package peft is not installed")
        self.baselines = [b for b in baselines if b != "none"]
        self.ops = report.pick_ops(option("--op"))
        budget = option("--budget")
        if budget is not None and not budget > 0:
            raise report.UsageError(f"--budget {budget:g}: expected seconds, above 0")
        self.ends = time.monotonic() + (float("inf") if budget is None else budget)
        #: Rows that --budget left no time for.
        self.late = 0

    def start_row(self) -> None:
        """Skips the row where the time is up."""
        if time.monotonic() > self.ends:
            self.late += 1
            pytest.skip("the time of --budget is up")

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"


_PLAN = pytest.StashKey[Plan]()
_MATRIX = pytest.StashKey[Matrix]()
_EMPTY = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    try:
        plan = config.stash[_PLAN] = Plan(config)
    except report.UsageError as error:
        raise pytest.UsageError(str(error)) from error
    target = config.getoption("benchmark_json", None)
    if target and not isinstance(target, str | Path):
        target = target.name  # older versions of the plugin open it
    if target:
        try:
            report.check_target("--benchmark-json", target)
        except report.UsageError as error:
            raise pytest.UsageError(str(error)) from error
    config.stash[_MATRIX] = Matrix(plan.device, plan.backends, plan.baselines)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The rows of a test, in groups that are measured together."""
    if "subject" not in metafunc.fixturenames:
        return
    plan = metafunc.config.stash[_PLAN]
    adapt = getattr(metafunc.module, "adapt", None)
    directions = ("fwd+bwd",) if adapt else plan.directions
    found = []
    for spec in plan.ops:
        for row in shapes.rows(spec, plan.sets, plan.mixes, plan.quick):
            kept = adapt(spec, row) if adapt else row
            if kept is None:
                continue
            for direction in (
                directions if any(o.differentiable for o in spec.operands) else ("fwd",)
            ):
                for backend in plan.backends:
                    words = (
                        spec.name,
                        backend,
                        testing.mix_name(row.mix),
                        kept.case.name,
                        direction,
                    )
                    found.append(pytest.param((spec, kept, backend, direction), id="-".join(words)))
    unique = {p.id: p for p in found}
    metafunc.parametrize("subject", list(unique.values()), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that the options leave without a row is not there, rather than skipped."""
    empty = [i for i in items if getattr(i, "callspec", None) and not _has_row(i)]
    if empty:
        config.hook.pytest_deselected(items=empty)
        items[:] = [i for i in items if i not in empty]
    config.stash[_EMPTY] = not items
    # Ops before layers: where --budget ends a run, it has what matters most.
    items.sort(key=lambda item: "test_layers" in item.nodeid)


def _has_row(item: Any) -> bool:
    return isinstance(item.callspec.params.get("subject"), tuple)


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> tuple[OpSpec, shapes.Row, str, str]:
    """(op, row, backend, direction); skipped where the time is up or the backend declines it."""
    spec, row, backend, direction = request.param
    plan = request.config.stash[_PLAN]
    plan.start_row()
    refusal = explain.refusal(spec, backend, row.case, row.mix, plan.device)
    if refusal and not plan.named:
        pytest.skip(f"declined: {refusal}")
    return spec, row, backend, direction


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> Matrix:
    """The session's, with what groups of rows share."""
    return request.config.stash[_MATRIX]


@pytest.fixture
def put(benchmark: Any) -> Any:
    """Hands a measured row to pytest-benchmark."""

    def put_row(found: dict[str, Any]) -> None:
        clock.samples = [us / 1e6 for us in found.pop("samples_us", ())]
        benchmark.group = f"{found['op']} {found['case']} {found['dtypes']} {found['direction']}"
        benchmark.params = {k: found[k] for k in ("op", "backend", "case", "dtypes", "direction")}
        benchmark.extra_info.update(found)
        benchmark.pedantic(clock.tick, rounds=max(1, len(clock.samples)))

    return put_row


# -------------------------------------------------------------------------------- results


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: Any) -> None:
    plan = config.stash[_PLAN]
    name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else None
    machine_info["lycoris"] = {
        "environment": _environment(plan) | {"name": name or report.devices()[0]["name"]},
        "device": plan.device.type,
        "ceilings": config.stash[_MATRIX].ceilings,
        "unavailable": plan.missing,
    }


def _environment(plan: Plan) -> dict[str, str | None]:
    """The versions a result depends on, that of a baseline too."""
    rivals = {"peft": version("peft")} if "peft" in plan.baselines else {}
    return report.versions() | rivals


def pytest_benchmark_update_json(config: pytest.Config, benchmarks: Any, output_json: Any) -> None:
    """No speed where none was measured; numbers that are not finite as null."""
    for entry in output_json["benchmarks"]:
        entry["extra_info"] = report.plain(entry["extra_info"])
        if entry["extra_info"]["time_us"] is None:
            entry["stats"] = None


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_group_stats(config: pytest.Config, benchmarks: Any, group_by: str) -> Any:
    """No table of pytest-benchmark's: it knows no accuracy, and no speed goes without."""
    return []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    plan = config.stash.get(_PLAN, None)
    if plan and plan.late:
        terminalreporter.write_line(f"{plan.late} rows not started: the time of --budget was up")
    session = getattr(config, "_benchmarksession", None)
    rows = [bench.extra_info for bench in session.benchmarks] if session else []
    if not rows:
        if config.stash.get(_EMPTY, False):
            terminalreporter.write_line("no row of the matrix fits these options")
        return
    terminalreporter.section("matrix: times in us, the worst error of each row in ULP")
    shown = []
    for row in rows:
        worst = max(row["parity"], key=lambda p: p["ulp"] or 0.0)
        op = row["op"] + (" as a layer" if row["kind"] == "layer" else "")
        shown.append(row | {"op": op, "ulp": worst["ulp"], "bound": worst["bound"]})
    columns = [c for c in COLUMNS if any(row.get(c) is not None for row in shown)]
    terminalreporter.write_line(report.table(shown, columns))
    if config.stash[_PLAN].device.type == "cpu":
        terminalreporter.write_line("CPU: kernels are simulated, no speed is claimed")
