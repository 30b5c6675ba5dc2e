"""What an op's forward and backward are written with: it allocates, plans and launches.

The host logic of every op lives in its OpSpec, once; a backend only launches. A Schedule ties one
run of a call's backend, policy and device to that logic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
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
#: (a, b, scale, out) of out = scale * a @ b.
Product = tuple[Tensor, Tensor, float | Tensor, Tensor]


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

    def kernel(self, family: str, name: str, *, optional: bool = False) -> Any:
        """The launcher ``name`` of a family; None where an optional one, or its family, is missing.

        Raises:
            BackendError: the backend has none of that name, or its family can't be imported.
        """
        module = registry.kernels(self.backend, family)
        if optional and isinstance(module, registry.NoFamily):
            return None
        if isinstance(module, str):
            raise BackendError(f"{self.backend.__name__}: {module}")
        launcher = getattr(module, name, None)
        if launcher is None and not optional:
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
        exact: bool = False,
    ) -> None:
        """out = [base +] scale * a @ b, rounded once to ``out``'s dtype.

        Args:
            a: (M, K), either dimension contiguous.
            b: (K, N), either dimension contiguous.
            out: (M, N), either dimension contiguous. Put the longer side on M.
            base: (M, N) or None.
            scale: a number, or a 0-d fp32 tensor on the device.
            dynamic: which of ``m`` and ``k`` is the token count.
            exact: computes in fp32, whatever the policy: an fp32 operand isn't cast.
        """
        launcher = self.kernel("lora", "matmul")
        args = (a, b, base, scale, out)
        policy = replace(self.policy, compute=torch.float32) if exact else self.policy
        self._run(launcher, args, lambda: self._matmul(launcher, *args, dynamic, policy))

    def matmul_pair(
        self, first: Product | None, second: Product | None, *, dynamic: str = ""
    ) -> None:
        """Up to two products like :meth:`matmul`, in one launch where the backend can.

        Args:
            first: (a, b, scale, out), or None where it is not wanted.
            second: the same, with as many columns and an ``a`` laid out alike.
            dynamic: as for :meth:`matmul`, of both.
        """
        launcher = self.kernel("lora", "matmul_pair", optional=True)
        if launcher is None or first is None or second is None:
            for a, b, scale, out in filter(None, (first, second)):
                self.matmul(a, b, out, scale=scale, dynamic=dynamic)
            return
        args = (*first, *second)
        self._run(launcher, args, lambda: self._matmul_pair(launcher, first, second, dynamic))

    def add_up(self, *sums: tuple[Tensor, Tensor]) -> None:
        """out = the sum of its partial sums, for up to two of (parts, out), in one launch.

        Args:
            sums: ``parts``, fp32, is (count, *shape) or (count, *shape, width), and is summed over
                count and width. ``out`` has that shape, or its first rows. Every part and ``out``
                are dense and lie in memory alike.
        """
        if sums:
            second = sums[1] if len(sums) > 1 else (None, None)
            args = (sums[0][0], None, sums[0][1], *second)
            launcher = self._adder()
            self._run(launcher, args, lambda: self._adding(launcher, *args))

    def launch(self, family: str, name: str, *args: Any, tiles: plan.Plan) -> None:
        """Launches any kernel of a family on ``args``, tensors first.

        Args:
            family: the module of the backend.
            name: the launcher in it, called as ``name(*args, plan=tiles, policy=...)``.
            args: the launcher's.
            tiles: its Plan.
        """
        launcher = self.kernel(family, name)
        self._run(launcher, args, lambda: self._prepare(launcher, tiles, self.policy, *args))

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
        policy: Policy,
    ) -> Launch:
        m, k = a.shape
        tiles = self._tiles(m, k, b, a, dynamic, policy)
        if tiles.splits == 1:
            return self._prepare(launcher, tiles, policy, a, b, base, scale, out)
        made = self._partials(tiles.splits, out)
        launch = self._prepare(launcher, tiles, policy, a, b, None, scale, made)
        add_up = self._adding(self._adder(), made, base, out, None, None)

        def split(
            a: Tensor, b: Tensor, base: Tensor | None, scale: float | Tensor, out: Tensor
        ) -> None:
            partials = self._partials(tiles.splits, out)
            launch(a, b, None, scale, partials)
            add_up(partials, base, out, None, None)

        return split

    def _matmul_pair(self, launcher: Any, first: Product, second: Product, dynamic: str) -> Launch:
        (a, b, scale, out), (a2, b2, scale2, out2) = first, second
        m, k = (max(sizes) for sizes in zip(a.shape, a2.shape, strict=True))
        tiles = self._tiles(m, k, b, a, dynamic, self.policy)
        if any(t.element_size() > self.policy.compute.itemsize for t in (a, b, a2, b2)):
            # Casts and the addresses of two bodies in the registers: a longer tile spills.
            tiles = replace(tiles, block_k=min(tiles.block_k, 64))
        if tiles.splits == 1:
            return self._prepare(launcher, tiles, self.policy, *first, *second)
        made, made2 = (self._partials(tiles.splits, t) for t in (out, out2))
        args = (a, b, scale, made, a2, b2, scale2, made2)
        launch = self._prepare(launcher, tiles, self.policy, *args)
        add_up = self._adding(self._adder(), made, None, out, made2, out2)

        def split(
            a: Tensor, b: Tensor, scale: float | Tensor, out: Tensor,
            a2: Tensor, b2: Tensor, scale2: float | Tensor, out2: Tensor,
        ) -> None:  # fmt: skip
            partials, partials2 = (self._partials(tiles.splits, t) for t in (out, out2))
            launch(a, b, scale, partials, a2, b2, scale2, partials2)
            add_up(partials, None, out, partials2, out2)

        return split

    def _tiles(
        self, m: int, k: int, b: Tensor, a: Tensor, dynamic: str, policy: Policy
    ) -> plan.Plan:
        itemsize, units = policy.compute.itemsize, plan.multiprocessors(self.device)
        transposed = a.stride(0) == 1
        tiles = plan.matmul(
            m, b.shape[1], k, itemsize, units, dynamic=dynamic, transposed=transposed
        )
        if min(a.element_size(), b.element_size()) > itemsize:  # two casts: a longer tile spills
            tiles = replace(tiles, block_k=min(tiles.block_k, 64))
        return tiles

    def _partials(self, splits: int, out: Tensor) -> Tensor:
        """Room for ``splits`` partial sums of ``out``, each laid out as ``out`` is."""
        if out.is_contiguous():
            return self.empty((splits, *out.shape), torch.float32)
        return self.empty((splits, *out.shape[::-1]), torch.float32).mT

    def _adder(self) -> Any:
        """What adds partial sums: the backend's kernel, or PyTorch where it has none."""
        return self.kernel("shares", "add_up", optional=True) or _add_up

    def _adding(
        self,
        launcher: Any,
        parts: Tensor,
        base: Tensor | None,
        out: Tensor,
        parts2: Tensor | None,
        out2: Tensor | None,
    ) -> Launch:
        if launcher is _add_up:
            return _add_up
        sizes = [
            plan.sum_sizes(p, o)
            for p, o in ((parts, out), (parts2, out2))
            if p is not None and o is not None
        ]
        terms = tuple((count * width, size) for count, _, width, size in sizes)
        tiles = plan.sums(terms, plan.multiprocessors(self.device))
        return self._prepare(launcher, tiles, self.policy, parts, base, out, parts2, out2)

    @staticmethod
    def _prepare(launcher: Any, tiles: plan.Plan, policy: Policy, *args: Any) -> Launch:
        # A launcher of one step, a plug-in's say, is called anew each time.
        prepare = getattr(launcher, "prepare", None)
        if prepare is None:
            return partial(launcher, plan=tiles, policy=policy)
        launch: Launch = prepare(*args, plan=tiles, policy=policy)
        return launch


def _add_up(
    parts: Tensor,
    base: Tensor | None,
    out: Tensor,
    parts2: Tensor | None,
    out2: Tensor | None,
) -> None:
    """What ``shares.add_up`` does, for a backend without it."""
    for part, term, result in ((parts, base, out), (parts2, None, out2)):
        if part is not None and result is not None:
            with_width = part.dim() > result.dim() + 1
            total = part.sum((0, -1) if with_width else 0)[: result.shape[0]]
            result.copy_(total if term is None else total.add_(term))
