"""What an op's forward and backward are written with: it allocates, plans and launches.

The host logic of every op lives in its OpSpec, once; a backend only launches. A Schedule ties one
call's backend, policy and device to that logic.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import plan, registry
from .errors import BackendError
from .precision import Policy

_HERE = nullcontext()


class Schedule:
    """Launches the kernels of one backend for one call."""

    __slots__ = ("backend", "device", "modules", "policy", "units")

    def __init__(self, backend: ModuleType, policy: Policy, device: torch.device) -> None:
        self.backend = backend
        self.policy = policy
        self.device = device
        self.units = plan.multiprocessors(device)
        self.modules: dict[str, ModuleType] = {}

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
        module = self.modules.get(family)
        if module is None:
            found = registry.kernels(self.backend, family)
            if isinstance(found, str):
                raise BackendError(f"{self.backend.__name__}: {found}")
            module = self.modules[family] = found
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
        (m, k), n = a.shape, b.shape[1]
        tiles = plan.matmul(
            m, n, k, self.policy.compute.itemsize, self.units, dynamic, a.stride(0) == 1
        )
        launch = self.kernel("lora", "matmul")
        if tiles.splits == 1:
            launch(a, b, base, scale, out, plan=tiles, policy=self.policy)
            return
        partials = self.empty((tiles.splits, m, n), torch.float32)
        launch(a, b, None, scale, partials, plan=tiles, policy=self.policy)
        total = partials.sum(0)
        out.copy_(total if base is None else total.add_(base))
