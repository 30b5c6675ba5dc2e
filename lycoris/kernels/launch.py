"""Launchers that settle everything about a launch once, and only launch from then on.

A Python launch is dearer than the kernel at small sizes. What a launch needs beside its pointers
(strides, tiles, the compiled kernel) depends on shapes, dtypes, Plan and Policy alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from .plan import Plan
from .precision import Policy

Launch = Callable[..., None]
_KEPT = 4096


def prepared(prepare: Callable[..., Launch]) -> Launch:
    """Makes ``prepare(*args, plan, policy)``, which returns a launch of ``args``, a launcher.

    A prepared launch serves every later call whose tensors have the same shapes, strides, dtypes
    and device, whose floats are floats, and whose other arguments, Plan and Policy are equal.
    Tensors that do not start at a multiple of 16 bytes are prepared for afresh at every call.
    """
    launches: dict[tuple[Any, ...], Launch] = {}

    @wraps(prepare)
    def launcher(*args: Any, plan: Plan, policy: Policy) -> None:
        key: list[Any] = [plan, policy, args[0].get_device()]
        addresses = 0
        for arg in args:
            if isinstance(arg, Tensor):
                key += (arg.shape, arg.stride(), arg.dtype)
                addresses |= arg.data_ptr()
            else:
                key.append(float if type(arg) is float else arg)
        found = tuple(key)
        launch = launches.get(found)
        if launch is None or addresses % 16:
            launch = prepare(*args, plan=plan, policy=policy)
            if not addresses % 16:
                if len(launches) >= _KEPT:
                    launches.clear()
                launches[found] = launch
        launch(*args)

    launcher.launches = launches  # type: ignore[attr-defined]
    return launcher
