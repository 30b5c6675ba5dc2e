"""The matrix's modules, and the tables at the end of a run: parity, and what was compiled.

The tables are here, and not beside their tests, because pytest-xdist's controller and pytest's
options know the conftest of the folder that is run and of those above it alone.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lycoris.kernels.report import table, to_json
from lycoris.kernels.testing import Row, summarise

_ROOT = Path(__file__).resolve().parents[1]
_PARITY: list[dict[str, Any]] = []
_BUILDS: list[dict[str, Any]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-json", help="write every parity row to this file")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The worker that is done first takes half of what another has yet to do.

    By default the one with the compile-only suite, the longest, holds back hundreds of tests.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":  # properties come through pytest-xdist's workers too
        for name, rows in report.user_properties:
            if name == "parity":
                _PARITY.extend(rows)  # type: ignore[arg-type]
            elif name == "builds":
                _BUILDS.extend(rows)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _PARITY:
        terminalreporter.section("parity: the worst of every op, backend and dtype mix, in ULP")
        fields = Row.__dataclass_fields__
        parsed = [Row(**{k: v for k, v in row.items() if k in fields}) for row in _PARITY]
        summary = summarise(parsed)
        terminalreporter.write_line(table(summary, list(summary[0])))
    target = config.getoption("--parity-json")
    if target:
        Path(target).write_text(to_json(_PARITY) + "\n")
        terminalreporter.write_line(f"{len(_PARITY)} rows written to {target}")
    if _BUILDS:
        terminalreporter.section(
            "compiled without a GPU: the most of every kernel, shared in bytes"
        )
        terminalreporter.write_line(_builds())


def _builds() -> str:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for build in _BUILDS:
        compute = build["dtypes"].split()[-1]
        key = (build["backend"], build["arch"], build["kernel"], compute)
        groups.setdefault(key, []).append(build)
    rows = [
        dict(zip(("backend", "arch", "kernel", "compute"), key, strict=True))
        | {"built": len(members), "failed": sum(bool(b["error"]) for b in members)}
        | {name: max(b[name] for b in members) for name in ("registers", "shared", "spills")}
        for key, members in sorted(groups.items())
    ]
    return table(rows, list(rows[0]))


@pytest.fixture(scope="module")
def bench() -> Any:
    """The matrix's modules."""
    before = list(sys.path)
    sys.path[:0] = [str(_ROOT / "bench"), str(_ROOT / "bench" / "kernels")]
    names = ("clock", "rows", "layers", "peft_layers", "shapes", "timing", "measure")
    yield SimpleNamespace(**{name: import_module(name) for name in names})
    sys.path[:] = before
