"""Which backend runs: the order of the overrides, reasons, strict mode, and broken backends."""

from __future__ import annotations

import importlib.metadata
import logging
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lycoris
from lycoris.functional import lora_apply, lora_weight
from lycoris.kernels import config, registry
from lycoris.kernels.errors import BackendError, KernelBuildError
from lycoris.kernels.precision import Policy

X, UP, DOWN = torch.randn(5, 8), torch.randn(6, 2), torch.randn(2, 8)
PlugIn = Callable[..., types.ModuleType]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (config.BACKEND.name, config.STRICT.name, config.op_variable("lora_apply")):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def ran(plug_in: PlugIn) -> list[str]:
    """Four toy backends; the list says which of them launched."""
    log: list[str] = []
    for name in ("one", "two", "three", "four"):
        family = plug_in(name)
        inner = family.matmul

        def matmul(*args, _name=name, _inner=inner, **kw):  # type: ignore[no-untyped-def]
            log.append(_name)
            _inner(*args, **kw)

        family.matmul = matmul
    return log


def test_the_more_specific_override_wins(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def who() -> str | None:
        ran.clear()
        lora_apply(X, UP, DOWN)
        return ran[0] if ran else None

    assert who() is None  # auto, no GPU: torch
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "one")
    assert who() == "one"
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND_LORA_APPLY", "two")
    assert who() == "two"
    with lycoris.use_backend("three"):
        assert who() == "three"
        with lycoris.use_backend("one"):
            assert who() == "one"
        assert who() == "three"
        ran.clear()
        lora_apply(X, UP, DOWN, backend="four")
        assert ran[0] == "four"
    assert who() == "two"
    ran.clear()
    lora_weight(UP, DOWN)  # the per-op variable is the other op's
    assert ran == ["one"]
    monkeypatch.delenv("LYCORIS_KERNEL_BACKEND_LORA_APPLY")
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "auto")
    assert who() is None


def test_the_context_belongs_to_its_thread(ran: list[str]) -> None:
    def other() -> None:
        lora_apply(X, UP, DOWN)

    with lycoris.use_backend("one"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert ran == []


def test_a_generator_leaves_its_own_context() -> None:
    def steps() -> Iterator[str | None]:
        with lycoris.use_backend("tilelang"):
            yield registry.context_override()

    running = steps()
    assert next(running) == "tilelang"
    with lycoris.use_backend("triton"):
        running.close()
        assert registry.context_override() == "triton"
    assert registry.context_override() is None


def test_both_halves_keep_the_choice(ran: list[str]) -> None:
    up = UP.clone().requires_grad_()
    with lycoris.use_backend("one"):
        out = lora_apply(X, up, DOWN)
    with lycoris.use_backend("two"):
        out.sum().backward()
    assert set(ran) == {"one"}


def test_an_unknown_name_lists_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    known = r"unknown backend 'cuda'; known: auto, triton, tilelang, torch"
    with pytest.raises(ValueError, match=known):
        lora_apply(X, UP, DOWN, backend="cuda")
    with pytest.raises(ValueError, match=known):
        lycoris.use_backend("cuda")
    for variable in ("LYCORIS_KERNEL_BACKEND", "LYCORIS_KERNEL_BACKEND_LORA_APPLY"):
        monkeypatch.setenv(variable, "cuda")
        known = (
            rf"unknown backend 'cuda', named by {variable}; known: auto, triton, tilelang, torch"
        )
        with pytest.raises(ValueError, match=known):
            lora_apply(X, UP, DOWN)


def test_a_named_backend_that_cannot_serve_raises_its_reason(plug_in: PlugIn) -> None:
    plug_in("small", limits=lambda op, dims, policy, device: f"rank {dims['r']} > 1")
    with pytest.raises(BackendError, match="small: can't run lora_apply: rank 2 > 1"):
        lora_apply(X, UP, DOWN, backend="small")
    plug_in("absent", probe=lambda device: f"no {device.type} here")
    with pytest.raises(BackendError, match="absent: can't run lora_apply: no cpu here"):
        lora_apply(X, UP, DOWN, backend="absent")


def test_float64_runs_on_torch_and_nowhere_else(fused: str) -> None:
    args = [t.double() for t in (X, UP, DOWN)]
    with pytest.raises(BackendError, match=rf"{fused}: can't run lora_apply: float64"):
        lora_apply(*args, backend=fused)
    assert lora_apply(*args).dtype == torch.float64


@pytest.fixture
def ranked(plug_in: PlugIn, monkeypatch: pytest.MonkeyPatch) -> PlugIn:
    monkeypatch.setattr(registry, "RANKING", {"cpu": ("first", "second", "torch")})
    return plug_in


def test_auto_steps_on_and_logs_each_reason_once(
    ranked: PlugIn, caplog: pytest.LogCaptureFixture
) -> None:
    ranked("first", limits=lambda *a: "not today")
    ranked("second")
    with caplog.at_level(logging.WARNING, "lycoris.kernels"):
        for _ in range(3):
            lora_apply(X, UP, DOWN)
            lora_apply(X[:2], UP, DOWN)
    assert [r.getMessage() for r in caplog.records] == ["lora_apply: first passed over: not today"]
    choice = registry.select(
        "lora_apply", "lora", {"r": 2}, Policy(torch.float32, torch.float32), torch.device("cpu")
    )
    assert choice.backend == "second"
    assert choice.passed_over == (("first", "not today"),)


def test_strict_forbids_the_fallback(ranked: PlugIn, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked("first", limits=lambda *a: "not ever")
    ranked("second")
    monkeypatch.setenv("LYCORIS_KERNEL_STRICT", "1")
    with pytest.raises(BackendError, match=r"first: can't run lora_apply: not ever \(strict"):
        lora_apply(X, UP, DOWN)
    monkeypatch.setenv("LYCORIS_KERNEL_STRICT", "yes")
    with pytest.raises(ValueError, match="LYCORIS_KERNEL_STRICT is 'yes'; expected 0 or 1"):
        lora_apply(X, UP, DOWN)


def broken(*args: object, **kw: object) -> None:
    raise KernelBuildError("ptxas: no")


def test_a_failed_build_speaks_for_its_own_dtypes(ranked: PlugIn) -> None:
    """Under autocast fp16 and fp32 operands have one Policy, and the kernels differ."""
    inner = ranked("first").matmul

    def matmul(a: torch.Tensor, *args: object, **kw: object) -> None:
        (broken if a.dtype is torch.float16 else inner)(a, *args, **kw)

    ranked("first", matmul=matmul)

    def call(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return lora_apply(x, UP, DOWN, backend="first", out_dtype=torch.bfloat16)

    for _ in range(2):
        with pytest.raises(BackendError, match="first: can't run lora_apply: ptxas: no"):
            call(X.half())
        assert call(X).isfinite().all()


def test_a_kernel_that_does_not_build(ranked: PlugIn, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked("first", matmul=broken)
    ranked("second")
    expected = lora_apply(X, UP, DOWN, backend="torch")
    torch.testing.assert_close(lora_apply(X, UP, DOWN), expected)  # auto: steps on
    up = UP.clone().requires_grad_()
    lora_apply(X, up, DOWN).sum().backward()
    assert up.grad is not None
    with pytest.raises(BackendError, match="first: can't run lora_apply: ptxas: no"):
        lora_apply(X, UP, DOWN, backend="first")
    monkeypatch.setenv("LYCORIS_KERNEL_STRICT", "1")
    for rows in (X, X[:3]):  # a failure known already, and one met for the first time
        with pytest.raises(BackendError, match="first: can't run lora_apply: ptxas: no"):
            lora_apply(rows, UP, DOWN)
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "first")
    monkeypatch.setenv("LYCORIS_KERNEL_STRICT", "0")
    with pytest.raises(BackendError, match="ptxas: no"):
        lora_apply(X, UP, DOWN)


def test_a_backward_kernel_that_does_not_build_steps_on_too(ranked: PlugIn) -> None:
    family = ranked("first")
    ranked("second")
    up = UP.clone().requires_grad_()
    out = lora_apply(X, up, DOWN)
    family.matmul = broken  # type: ignore[attr-defined]
    out.sum().backward()
    wanted = UP.clone().requires_grad_()
    lora_apply(X, wanted, DOWN, backend="torch").sum().backward()
    torch.testing.assert_close(up.grad, wanted.grad)


@pytest.mark.parametrize(
    "error", ["RuntimeError('no driver')", "SystemExit(3)", "ImportError('x')"]
)
def test_a_backend_that_fails_to_import_is_listed_and_breaks_nothing(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plug_in: PlugIn
) -> None:
    (tmp_path / "bad_backend.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._discover(), "bad", "bad_backend")
    monkeypatch.delitem(registry._loaded, "bad", raising=False)
    reason = registry.availability("bad", torch.device("cpu"))
    assert reason is not None
    assert error.split("(")[0] in reason
    with pytest.raises(BackendError, match="bad: can't run lora_apply"):
        lora_apply(X, UP, DOWN, backend="bad")
    assert lora_apply(X, UP, DOWN).shape == (5, 6)
    registry._loaded.pop("bad", None)


def test_a_check_that_raises_is_a_reason(plug_in: PlugIn) -> None:
    def broken_check(*args: object) -> str | None:
        raise OSError("no such driver")

    plug_in("odd", probe=broken_check)
    reason = registry.availability("odd", torch.device("cpu"))
    assert reason == "broken_check() failed: OSError: no such driver"
    plug_in("odd", limits=broken_check)
    with pytest.raises(BackendError, match=r"odd: can't run lora_apply: broken_check\(\) failed"):
        lora_apply(X, UP, DOWN, backend="odd")


def test_a_package_that_is_no_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no_backend.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_plug_ins", {"no": "no_backend"})
    reason = registry.availability("no", torch.device("cpu"))
    assert reason == "not a backend: no_backend lacks probe and limits"
    registry._loaded.pop("no", None)


def test_a_third_party_backend_joins_through_its_entry_point(tmp_path: Path) -> None:
    """Installed like any distribution, in a process of its own, and proved by the parity runner."""
    package = tmp_path / "toy_backend"
    package.mkdir()
    (package / "__init__.py").write_text(
        "def probe(device): return None\ndef limits(op, dims, policy, device): return None\n"
    )
    (package / "lora.py").write_text(
        "def matmul(a, b, base, scale, out, *, plan, policy):\n"
        "    product = scale * (a.to(policy.compute).float() @ b.to(policy.compute).float())\n"
        "    out.copy_(product if base is None else base.float() + product)\n"
    )
    info = tmp_path / "toy_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[lycoris.backends]\ntoy = toy_backend\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from lycoris.kernels import registry, testing\n"
        "assert 'toy' in registry.names()\n"
        "rows = [r for op in ('lora_apply', 'lora_weight')\n"
        "        for case, mix in testing.cases(op) if case.name in ('base', 'primes')\n"
        "        for r in testing.check(op, 'toy', case, mix)]\n"
        "assert all(r.passed for r in rows), [r for r in rows if not r.passed]\n"
        "print(len(rows), {r.backend for r in rows})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "{'toy'}" in done.stdout
    points = importlib.metadata.entry_points(group="lycoris.backends")
    assert "toy" not in points.names  # nothing of it is left here


def test_importing_lycoris_imports_no_backend() -> None:
    script = (
        "import sys, lycoris\n"
        "heavy = [m for m in ('triton.compiler', 'tilelang', 'lycoris.backends.triton') "
        "if m in sys.modules and m != 'triton.compiler']\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
