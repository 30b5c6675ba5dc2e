"""What an op's forward and backward are written with: it allocates, plans and launches.

The host logic of every op lives in its OpSpec, once; a backend only launches. A Schedule ties one
run of a call's backend, policy and device to that logic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import plan, registry
from .errors import BackendError
from .launch import Launch
from .precision import Policy

#: The launches of one run in order, each with the launcher it came from.
Script = list[tuple[Any, Launch]]
_HERE = nullcontext()


class Schedule:
    """Launches the kernels of one backend, in one run of a call's forward or backward.

    The first run records its launches in ``script``; given that script, a later run of the same
    call on operands of the same kind repeats them without planning or preparing anything.
    """

    __slots__ = ("at", "backend", "device", "policy", "replays", "script")

    def __init__(
        self,
        backend: ModuleType,
        policy: Policy,
        device: torch.device,
        script: Script | None = None,
    ) -> None:
        self.backend = backend
        self.policy = policy
        self.device = device
        self.replays = script is not None
        self.script: Script = [] if script is None else script
        self.at = 0

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the call's GPU the current one, where it is not already."""
        device = self.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return _HERE
        return torch.cuda.device(device)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised workspace or output on the call's device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def kernel(self, family: str, name: str) -> Any:
        """The launcher ``name`` of a family.

        Raises:
            BackendError: the backend has none of that name.
        """
        module = registry.kernels(self.backend, family)
        if isinstance(module, str):
            raise BackendError(f"{self.backend.__name__}: {module}")
        launcher = getattr(module, name, None)
        if launcher is None:
            raise BackendError(f"{module.__name__} has no kernel {name!r}")
        return launcher

    def matmul(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        base: Tensor | None = None,
        scale: float | Tensor = 1.0,
        dynamic: str = "",
    ) -> None:
        """out = [base +] scale * a @ b, rounded once to ``out``'s dtype.

        Args:
            a: (M, K), either dimension contiguous.
            b: (K, N), either dimension contiguous.
            out: (M, N), either dimension contiguous. Put the longer side on M.
            base: (M, N) or None.
            scale: a number, or a 0-d fp32 tensor on the device.
            dynamic: which of ``m`` and ``k`` is the token count.
        """
        launcher = self.kernel("lora", "matmul")
        args = (a, b, base, scale, out)
        self._run(launcher, args, lambda: self._matmul(launcher, *args, dynamic))

    def launch(self, family: str, name: str, *args: Any, tiles: plan.Plan) -> None:
        """Launches any kernel of a family on ``args``, tensors first.

        Args:
            family: the module of the backend.
            name: the launcher in it, called as ``name(*args, plan=tiles, policy=...)``.
            args: the launcher's.
            tiles: its Plan.
        """
        launcher = self.kernel(family, name)
        self._run(launcher, args, lambda: self._prepare(launcher, tiles, *args))

    def _run(self, launcher: Any, args: tuple[Any, ...], make: Callable[[], Launch]) -> None:
        """Repeats this place's launch of the script, or makes one and records it."""
        if self.replays:
            known, launch = self.script[self.at]
            self.at += 1
            if known is launcher:
                launch(*args)
                return
        launch = make()
        launch(*args)
        if not self.replays:
            self.script.append((launcher, launch))

    def _matmul(
        self,
        launcher: Any,
        a: Tensor,
        b: Tensor,
        base: Tensor | None,
        scale: float | Tensor,
        out: Tensor,
        dynamic: str,
    ) -> Launch:
        (m, k), n = a.shape, b.shape[1]
        tiles = plan.matmul(
            *(m, n, k, self.policy.compute.itemsize, plan.multiprocessors(self.device)),
            dynamic=dynamic,
            transposed=a.stride(0) == 1,
        )
        if tiles.splits == 1:
            return self._prepare(launcher, tiles, a, b, base, scale, out)
        shape = (tiles.splits, m, n)
        example = self.empty(shape, torch.float32)
        launch = self._prepare(launcher, tiles, a, b, None, scale, example)

        def split(
            a: Tensor, b: Tensor, base: Tensor | None, scale: float | Tensor, out: Tensor
        ) -> None:
            partials = self.empty(shape, torch.float32)
            launch(a, b, None, scale, partials)
            total = partials.sum(0)
            out.copy_(total if base is None else total.add_(base))

        return split

    def _prepare(self, launcher: Any, tiles: plan.Plan, *args: Any) -> Launch:
        # A launcher of one step, a plug-in's say, is called anew each time.
        prepare = getattr(launcher, "prepare", None)
        if prepare is None:
            return partial(launcher, plan=tiles, policy=self.policy)
        launch: Launch = prepare(*args, plan=tiles, policy=self.policy)
        return launch
