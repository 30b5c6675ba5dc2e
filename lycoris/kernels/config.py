"""Every environment variable this package reads, in one table.

Nothing else in the package looks at the environment. Values are read at call time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PREFIX = "LYCORIS_KERNEL_"


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name, default, accepted values and meaning."""

    name: str
    default: str
    values: str
    meaning: str


BACKEND = Variable(
    PREFIX + "BACKEND",
    "auto",
    "auto, triton, tilelang, torch, or an installed plug-in's name",
    "The backend of every op in this process.",
)
BACKEND_OP = Variable(
    PREFIX + "BACKEND_<OP>",
    "(unset)",
    "as above",
    "The backend of one op, as in LYCORIS_KERNEL_BACKEND_LORA_APPLY; stronger than the above.",
)
STRICT = Variable(
    PREFIX + "STRICT",
    "0",
    "0 or 1",
    "1: any fallback raises instead of stepping on to the next backend (for CI).",
)
CACHE_DIR = Variable(
    PREFIX + "CACHE_DIR",
    "$XDG_CACHE_HOME/lycoris-kernels, or ~/.cache/lycoris-kernels",
    "a folder",
    "Where kernels built for the CPU are kept between processes.",
)

VARIABLES = (BACKEND, BACKEND_OP, STRICT, CACHE_DIR)


@cache
def op_variable(op: str) -> str:
    """The variable that picks the backend of ``op``."""
    return f"{PREFIX}BACKEND_{op.upper()}"


def backend_override(op: str) -> str:
    """The backend the environment names for ``op``: per-op first, then all ops, else ``auto``."""
    return os.environ.get(op_variable(op)) or os.environ.get(BACKEND.name) or BACKEND.default


def _raw_get() -> Callable[[str], object]:
    # On every call's path, and os.environ raises and catches a KeyError for each unset name; the
    # dictionary behind it, where there is one, is the same live data without that.
    data = getattr(os.environ, "_data", None)
    encode = getattr(os.environ, "encodekey", None)
    if not isinstance(data, dict) or encode is None:
        return os.environ.get
    keys: dict[str, object] = {}
    return lambda name: data.get(keys.get(name) or keys.setdefault(name, encode(name)))


_get = _raw_get()


def snapshot(op: str) -> tuple[object, ...]:
    """The raw values a call of ``op`` depends on, as a key."""
    return _get(op_variable(op)), _get(BACKEND.name), _get(STRICT.name)


def is_set(variable: str) -> bool:
    """Whether the environment holds a non-empty value for ``variable``."""
    return bool(os.environ.get(variable))


def strict() -> bool:
    """Whether a fallback raises.

    Raises:
        ValueError: the variable holds neither 0 nor 1.
    """
    value = os.environ.get(STRICT.name, "") or STRICT.default
    if value not in ("0", "1"):
        raise ValueError(f"{STRICT.name} is {value!r}; expected 0 or 1")
    return value == "1"


def cache_dir() -> Path:
    """The folder for kernels built on this machine; it may not exist yet."""
    named = os.environ.get(CACHE_DIR.name)
    if named:
        return Path(named).expanduser()
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lycoris-kernels"


def unknown(ops: Iterable[str]) -> list[str]:
    """Variables with this package's prefix that nothing reads: misspelt, as a rule."""
    known = {variable.name for variable in VARIABLES} | {op_variable(op) for op in ops}
    return sorted(name for name in os.environ if name.startswith(PREFIX) and name not in known)


def report(ops: Iterable[str]) -> list[dict[str, str]]:
    """Every variable with its present value, the per-op one expanded over ``ops``."""
    rows = []
    for variable in VARIABLES:
        names = [variable.name]
        if variable is BACKEND_OP:
            names += [op_variable(op) for op in ops if op_variable(op) in os.environ]
        for name in names:
            value = os.environ.get(name)
            rows.append(
                {
                    "name": name,
                    "value": variable.default if value is None else value,
                    "set": "no" if value is None else "yes",
                    "values": variable.values,
                    "meaning": variable.meaning,
                }
            )
    return rows
