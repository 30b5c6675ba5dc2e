"""Fixtures of the kernel tests, and the parity summary at the end of a run."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lycoris.kernels import registry
from lycoris.kernels.report import table, to_json
from lycoris.kernels.testing import Row, summarise

_ROWS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--parity-json", help="write every parity row to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_ROWS] = []


@pytest.fixture
def record_rows(record_property: Callable[[str, Any], None]) -> Callable[[list[Row]], None]:
    """Hands rows to the summary, through pytest-xdist's workers too."""
    return lambda rows: record_property("parity", [row.as_dict() for row in rows])


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and _active is not None:
        for name, rows in report.user_properties:
            if name == "parity":
                _active.stash[_ROWS].extend(rows)  # type: ignore[arg-type]


_active: pytest.Config | None = None


def pytest_sessionstart(session: pytest.Session) -> None:
    global _active
    _active = session.config


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_ROWS]
    if not rows:
        return
    fields = Row.__dataclass_fields__
    parsed = [Row(**{k: v for k, v in row.items() if k in fields}) for row in rows]
    terminalreporter.section("parity: the worst of every op, backend and dtype mix, in ULP")
    summary = summarise(parsed)
    terminalreporter.write_line(table(summary, list(summary[0])))
    target = config.getoption("--parity-json")
    if target:
        Path(target).write_text(to_json(rows) + "\n")
        terminalreporter.write_line(f"{len(rows)} rows written to {target}")


def ideal_matmul(
    a: Any, b: Any, base: Any, scale: Any, out: Any, *, plan: Any, policy: Any
) -> None:
    """The launcher's contract in plain PyTorch: fp32 accumulation, one rounding."""
    a, b = a.to(policy.compute).float(), b.to(policy.compute).float()
    if plan.splits == 1:
        total = scale * (a @ b)
        out.copy_(total if base is None else base.float() + total)
        return
    tiles = -(-a.shape[1] // plan.block_k)
    step = -(-tiles // plan.splits) * plan.block_k
    for s in range(plan.splits):
        out[s] = scale * (a[:, s * step : (s + 1) * step] @ b[s * step : (s + 1) * step])


@pytest.fixture
def plug_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., types.ModuleType]]:
    """Registers a backend made on the spot: ``plug_in(name, matmul=..., probe=...)``."""
    made: list[str] = []
    plug_ins = dict(registry._discover())
    monkeypatch.setattr(registry, "_plug_ins", plug_ins)

    def make(
        name: str = "toy",
        matmul: Callable[..., None] = ideal_matmul,
        probe: Callable[..., str | None] = lambda device: None,
        limits: Callable[..., str | None] = lambda *a: None,
    ) -> types.ModuleType:
        package, family = types.ModuleType(f"_{name}"), types.ModuleType(f"_{name}.lora")
        package.probe, package.limits = probe, limits  # type: ignore[attr-defined]
        family.matmul = matmul  # type: ignore[attr-defined]
        for module in (package, family):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        plug_ins[name] = package.__name__
        made.append(name)
        registry._loaded.pop(name, None)
        registry.generation += 1
        return family

    yield make
    for name in made:
        registry._loaded.pop(name, None)
    registry.generation += 1


@pytest.fixture(params=["triton", "tilelang"])
def fused(request: pytest.FixtureRequest) -> str:
    """Each of the fused backends in turn."""
    return request.param
