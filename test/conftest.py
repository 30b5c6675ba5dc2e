"""The table of registers, shared memory and spills at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest

from lycoris.kernels.report import table

_BUILDS: list[dict[str, Any]] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":  # properties come through pytest-xdist's workers too
        for name, builds in report.user_properties:
            if name == "builds":
                _BUILDS.extend(builds)  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for build in _BUILDS:
        compute = build["dtypes"].split()[-1]
        key = (build["backend"], build["arch"], build["kernel"], compute)
        groups.setdefault(key, []).append(build)
    if not groups:
        return
    rows = [
        dict(zip(("backend", "arch", "kernel", "compute"), key, strict=True))
        | {"built": len(members), "failed": sum(bool(b["error"]) for b in members)}
        | {name: max(b[name] for b in members) for name in ("registers", "shared", "spills")}
        for key, members in sorted(groups.items())
    ]
    terminalreporter.section("compiled without a GPU: the most of every kernel, shared in bytes")
    terminalreporter.write_line(table(rows, list(rows[0])))
