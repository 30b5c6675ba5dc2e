"""Launchers in two steps: what a launch needs beside its pointers, then the launch.

A Python launch is dearer than the kernel at small sizes. Strides, tiles and the compiled kernel
depend on shapes, dtypes, Plan and Policy alone, so a backend prepares a launch once, and core
repeats it for every call of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from .plan import Plan
from .precision import Policy

Launch = Callable[..., None]


def prepared(prepare: Callable[..., Launch]) -> Launch:
    """Makes a launcher of ``prepare(*args, plan, policy)``, which returns a launch of ``args``.

    Calling the launcher prepares and launches. Its ``prepare`` is for whoever repeats a launch:
    what that returns serves any later ``args`` with the same shapes, strides, dtypes and device,
    where tensors start at multiples of 16 bytes if they did, and floats stay floats.
    """

    @wraps(prepare)
    def launcher(*args: Any, plan: Plan, policy: Policy) -> None:
        prepare(*args, plan=plan, policy=policy)(*args)

    # A function takes attributes, which mypy does not model.
    launcher.prepare = prepare  # type: ignore[attr-defined]
    return launcher
