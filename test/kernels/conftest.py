"""Fixtures of the kernel tests."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lycoris.kernels import registry, testing
from lycoris.kernels.spec import SPECS
from lycoris.kernels.testing import Row


@pytest.fixture
def record_rows(record_property: Callable[[str, Any], None]) -> Callable[[list[Row]], None]:
    """Hands rows to the summary, through pytest-xdist's workers too."""
    return lambda rows: record_property("parity", [row.as_dict() for row in rows])


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


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Shows that a fault in a launcher breaks the rule, and that without it a case passes.

    ``planted(backend, family, launcher's name, fault, op, case's name, mix)``; the fault makes a
    faulty launcher of the real one.
    """

    def check(
        backend: str, family: str, name: str, fault: Any, op: str, case_name: str, mix: Any
    ) -> None:
        case = next(c for c in SPECS[op].cases if c.name == case_name)
        assert all(row.passed for row in testing.check(op, backend, case, mix))
        module = importlib.import_module(f"lycoris.backends.{backend}.{family}")
        monkeypatch.setattr(module, name, fault(getattr(module, name)))
        registry.generation += 1  # a product that is split keeps the launch of its sums
        rows = testing.check(op, backend, case, mix)
        assert not all(row.passed for row in rows), [row.as_dict() for row in rows]

    yield check
    registry.generation += 1


@pytest.fixture(params=["triton", "tilelang"])
def fused(request: pytest.FixtureRequest) -> str:
    """Each of the fused backends in turn."""
    return request.param
