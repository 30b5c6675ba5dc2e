"""Backends: loading them, asking what they can do, and choosing one with a reason.

A backend is a package. It has ``probe(device) -> str | None`` and ``limits(op, dims, policy,
device) -> str | None``, each giving the reason it can't serve or None, and for every family of
ops a module of that family's name with the launchers. A backend without kernels (``torch``) has a
``run_formula`` instead. Other distributions add theirs through the entry-point group
``lycoris.backends``: the entry point's name is the backend's, its value the package.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType, TracebackType
from typing import Any

import torch

from . import config
from .errors import BackendError
from .precision import Policy

log = logging.getLogger("lycoris.kernels")

AUTO = "auto"
FORMULA = "torch"
BUILT_IN = {
    "triton": "lycoris.backends.triton",
    "tilelang": "lycoris.backends.tilelang",
    FORMULA: "lycoris.backends.reference",
}
#: What auto tries, best first, by device type; bench/results/ holds the measurements behind it.
RANKING = {"cpu": (FORMULA,), "meta": (FORMULA,)}
DEFAULT_RANKING = ("triton", "tilelang", FORMULA)


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen backend, why, and what was passed over with its reasons."""

    backend: str
    module: ModuleType
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def has_kernels(self) -> bool:
        """Whether it launches kernels; otherwise it runs the op's formula."""
        return not hasattr(self.module, "run_formula")


_lock = threading.RLock()


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
_plug_ins: dict[str, str] | None = None
_loaded: dict[str, ModuleType | str] = {}
#: (backend's module, family) -> its module of launchers: looked up for every launch.
_families: dict[tuple[ModuleType, str], ModuleType] = {}
_failed: dict[tuple[Any, ...], str] = {}
_logged: set[tuple[str, str, str]] = set()
#: Grows whenever an earlier choice may no longer hold.
generation = 0


def check_name(where: str, name: Any) -> None:
    """Checks that a backend is given by its name; whether there is one of it is ``load``'s to say.

    Raises:
        TypeError: it is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"{where}: backend is {type(name).__name__}; expected a backend's name")


def names() -> tuple[str, ...]:
    """Every known backend: those in the tree, then the installed plug-ins."""
    return (*BUILT_IN, *_discover())


def _discover() -> dict[str, str]:
    global _plug_ins
    if _plug_ins is None:
        with _lock:
            found: dict[str, str] = {}
            for point in entry_points(group="lycoris.backends"):
                if point.name in BUILT_IN or point.name in found or point.name == AUTO:
                    log.warning("backend plug-in %r ignored: the name is taken", point.name)
                else:
                    found[point.name] = point.value
            _plug_ins = found
    return _plug_ins


def _unknown(name: str, by: str = "") -> ValueError:
    return ValueError(f"unknown backend {name!r}{by}; known: {', '.join((AUTO, *names()))}")


def refresh() -> None:
    """Forgets loaded backends, failures and choices, and looks for plug-ins again."""
    global _plug_ins, generation
    with _lock:
        _plug_ins = None
        _loaded.clear()
        _families.clear()
        _failed.clear()
        _logged.clear()
        generation += 1


def load(name: str) -> ModuleType | str:
    """The backend's module, or the reason it can't be loaded. Never raises for a broken one.

    Raises:
        ValueError: no backend has that name.
    """
    found = _loaded.get(name)
    if found is None:
        path = BUILT_IN.get(name) or _discover().get(name)
        if path is None:
            raise _unknown(name)
        with _lock:
            found = _loaded.get(name)
            if found is None:
                found = _loaded[name] = _import(path)
    return found


def _import(path: str) -> ModuleType | str:
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        return f"not installed: {error}"
    # A plug-in may fail in any way while it is imported; none may break the others.
    except (Exception, SystemExit) as error:
        return f"import failed: {type(error).__name__}: {error}"
    missing = [
        name
        for name in ("probe", "limits")
        if not hasattr(module, "run_formula") and not callable(getattr(module, name, None))
    ]
    return f"not a backend: {path} lacks {' and '.join(missing)}" if missing else module


class NoFamily(str):
    """The reason why a backend has no module of a family, where it is not that one is broken."""


def kernels(module: ModuleType, family: str) -> ModuleType | str:
    """The module of one family's launchers, or the reason there is none."""
    found = _families.get((module, family))
    if found is not None:
        return found
    try:
        # Waits where another thread is importing it.
        found = importlib.import_module(f"{module.__name__}.{family}")
        _families[module, family] = found
        return found
    except ModuleNotFoundError as error:
        reason = f"no kernels for the {family} family: {error}"
        return NoFamily(reason) if error.name == f"{module.__name__}.{family}" else reason
    # As above: a broken family must not break the rest.
    except Exception as error:
        return f"import failed: {type(error).__name__}: {error}"


def availability(name: str, device: torch.device) -> str | None:
    """Why a backend can't serve a device at all; None where it can.

    Raises:
        ValueError: no backend has that name.
    """
    module = load(name)
    if isinstance(module, str):
        return module
    return None if hasattr(module, "run_formula") else _ask(module.probe, device)


def _ask(check: Callable[..., str | None], *args: Any) -> str | None:
    # A plug-in's own check may be broken too; that is a reason like any other.
    try:
        return check(*args)
    except (Exception, SystemExit) as error:
        return f"{check.__name__}() failed: {type(error).__name__}: {error}"


def capability(
    name: str,
    op: str,
    family: str,
    dims: Mapping[str, int],
    policy: Policy,
    device: torch.device,
    form: Hashable = (),
) -> str | None:
    """Why a backend can't serve a call; None where it can.

    ``form`` is what else tells calls apart, as in :func:`mark_failed`.

    Raises:
        ValueError: no backend has that name.
    """
    reason = availability(name, device)
    if reason:
        return reason
    module = load(name)
    assert isinstance(module, ModuleType)
    if hasattr(module, "run_formula"):
        return None
    if policy.compute is torch.float64:
        return "float64 operands; only the torch backend takes them"
    found = kernels(module, family)
    if isinstance(found, str):
        return found
    failed = _failed.get(_key(name, op, dims, policy, device, form))
    return failed or _ask(module.limits, op, dims, policy, device)


def _key(name: str, op: str, dims: Mapping[str, int], *rest: Hashable) -> tuple[Any, ...]:
    return (name, op, tuple(sorted(dims.items())), *rest)


def mark_failed(
    name: str,
    op: str,
    dims: Mapping[str, int],
    policy: Policy,
    device: torch.device,
    form: Hashable,
    reason: str,
) -> None:
    """Remembers that a kernel did not build for this call, so that auto steps past it.

    ``form``: its operands' dtypes, None for one that is absent, and its attributes.
    """
    global generation
    with _lock:
        _failed[_key(name, op, dims, policy, device, form)] = reason
        generation += 1


def select(
    op: str,
    family: str,
    dims: Mapping[str, int],
    policy: Policy,
    device: torch.device,
    override: str | None = None,
    form: Hashable = (),
) -> Choice:
    """Chooses the backend of one call.

    Args:
        op: the op's name.
        family: its family of kernels.
        dims: the sizes of its shape symbols.
        policy: its dtypes.
        device: where its operands lie.
        override: the name given by the call or by ``use_backend``, if any; otherwise the
            environment is asked, per-op variable first.
        form: what else tells calls apart, as in :func:`mark_failed`.

    Raises:
        ValueError: the name is unknown; the message lists the known ones.
        BackendError: a named backend can't serve the call, or strict mode forbids a fallback.
    """
    wanted = override or config.backend_override(op)
    strict = config.strict()
    if wanted != AUTO:
        if wanted not in BUILT_IN and wanted not in _discover():
            raise _unknown(wanted, "" if override else f", named by {_named_by(op, override)}")
        reason = capability(wanted, op, family, dims, policy, device, form)
        if reason:
            raise BackendError(f"{wanted}: can't run {op}: {reason}")
        module = load(wanted)
        assert isinstance(module, ModuleType)
        return Choice(wanted, module, f"named by {_named_by(op, override)}")
    passed: list[tuple[str, str]] = []
    for name in RANKING.get(device.type, DEFAULT_RANKING):
        reason = capability(name, op, family, dims, policy, device, form)
        if not reason:
            module = load(name)
            assert isinstance(module, ModuleType)
            why = f"auto: first able on {device.type}"
            return Choice(name, module, why, tuple(passed))
        passed.append((name, reason))
        if strict:
            raise BackendError(f"{name}: can't run {op}: {reason} (strict: no fallback)")
        _log_once(op, name, reason)
    raise BackendError(f"no backend can run {op}: " + "; ".join(f"{n}: {r}" for n, r in passed))


def _named_by(op: str, override: str | None) -> str:
    if override:
        return "the call or use_backend()"
    variable = config.op_variable(op)
    return variable if config.is_set(variable) else config.BACKEND.name


def _log_once(op: str, name: str, reason: str) -> None:
    if (op, name, reason) not in _logged:
        _logged.add((op, name, reason))
        log.warning("%s: %s passed over: %s", op, name, reason)


class _Stack(threading.local):
    # A ContextVar can't be traced by torch.compile; a threading.local can.
    names: list[str]

    def __init__(self) -> None:
        self.names = []


_stack = _Stack()


def context_override() -> str | None:
    """The innermost ``use_backend`` of this thread, if any."""
    return _stack.names[-1] if _stack.names else None


class use_backend:
    """Selects a backend for this thread while the ``with`` block runs.

    Args:
        name: a backend's name, or ``auto``.

    Raises:
        TypeError: the name is no str.
        ValueError: the name is unknown; the message lists the known ones.
    """

    def __init__(self, name: str) -> None:
        check_name("use_backend", name)
        if name != AUTO and name not in BUILT_IN and name not in _discover():
            raise _unknown(name)
        self.name = name

    def __enter__(self) -> use_backend:
        _stack.names.append(self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Its own: a generator may leave its block later than one that was entered after it.
        names = _stack.names
        at = len(names) - 1
        while names[at] != self.name:
            at -= 1
        del names[at]
