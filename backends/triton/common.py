"""Launching a kernel: compiled for CUDA tensors, interpreted for CPU tensors, in one process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from lycoris.kernels.errors import KernelBuildError
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

TL_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: Below this K a TF32 triple misses the fp32 bound (K = 1: 1.05 ULP rms, 0.76 allowed).
MIN_TRIPLE = 16

#: Held while interpreting, when Triton's language functions are replaced for the whole process,
#: and while compiling, which goes through those same functions.
LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child forked while another thread interprets would keep the replacements and the lock.
    os.register_at_fork(
        before=LOCK.acquire, after_in_parent=LOCK.release, after_in_child=LOCK.release
    )


class Kernel:
    """A kernel and its two ways to run; ``jit`` is the compiled one, for compile-only checks."""

    def __init__(self, fn: Callable[..., None]) -> None:
        # JITFunction rather than triton.jit: the latter gives no compilable object when
        # TRITON_INTERPRET is set at import.
        self.jit = JITFunction(fn)
        self.name = fn.__name__
        self.waits = in_turn.__name__ in fn.__code__.co_names

    def __call__(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Run the kernel once on every program of ``grid``; see :meth:`prepare`."""
        self.prepare(grid, args, options)(*args)

    def prepare(
        self,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        options: dict[str, Any],
        fixed: tuple[Any, ...] = (),
    ) -> Callable[..., None]:
        """A launcher with all but ``args`` settled, for launches like this one.

        ``args`` are the kernel's first arguments, the very first a tensor: its device decides
        where to run. Later ones must have the same types, and pointers and integers be multiples
        of 16 where these are. ``fixed`` are the arguments after them; ``options`` are constexprs
        by name, in the kernel's order, and num_warps, num_stages.

        Raises:
            KernelBuildError: the kernel can't be compiled. An interpreted one says so when run.
        """
        device = args[0].get_device()
        if device < 0 or triton.knobs.runtime.interpret:
            return partial(self._interpret, grid, fixed, options)
        early = {"launch_pdl": True} if self.waits and _launches_early(device) else {}
        with self._building(), LOCK, torch.cuda.device(device):
            compiled = self.jit.run(*args, *fixed, grid=grid, warmup=True, **options, **early)
            run = compiled[(*grid, 1, 1)[:3]]  # loads it
        # Triton's own launch would work out types and divisibility again, four times the cost.
        rest = (*fixed, *(options[name] for name in self.jit.arg_names[len(args) + len(fixed) :]))
        current_stream = torch._C._cuda_getCurrentRawStream

        def launch(*args: Any) -> None:
            run(*args, *rest, stream=current_stream(device))

        return launch

    def _interpret(
        self, grid: tuple[int, ...], fixed: tuple[Any, ...], options: dict[str, Any], *args: Any
    ) -> None:
        from . import interpreter

        with self._building(), LOCK:
            interpreter.run(self.jit, grid, (*args, *fixed), options)

    @contextmanager
    def _building(self) -> Iterator[None]:
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            # The driver's own failures (a sticky fault of an earlier kernel, say) are not ours.
            if str(error).startswith("Triton Error [CUDA]"):
                raise
            raise KernelBuildError(f"triton kernel {self.name}: {self._reason(error)}") from error

    def _reason(self, error: Exception) -> str:
        """The error, after the source line of the kernel it came from where there is one."""
        path = self.jit.fn.__code__.co_filename
        first = self.jit.starting_line_number
        body = range(first, first + len(self.jit.raw_src))
        where = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == path and frame.lineno in body:
                where = f"line {frame.lineno}, `{frame.line}`: "
        return f"{where}{type(error).__name__}: {error}"


def kernel(fn: Callable[..., None]) -> Kernel:
    """Make a plain module-level function a kernel. Helpers it calls are plain ``triton.jit``."""
    return Kernel(fn)


def _launches_early(device: int) -> bool:
    """Whether a kernel may be launched before the last one ends; AMD knows nothing of the kind."""
    return not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)


def in_turn(_semantic: Any = None) -> None:
    """The first statement of a kernel: waits until the launches before it are done and seen.

    Programmatic dependent launch: programs of a kernel are put on the device while the last ones of
    the kernel before still run, which hides most of the gap between two launches. Hence nothing may
    be loaded or stored above this line; a kernel without it is launched when the last one is done.
    Nothing is waited for where kernels aren't launched early.
    """
    if _semantic is not None and getattr(_semantic.builder.options, "launch_pdl", False):
        # No early trigger beside it: with one, what is launched takes room from what still runs.
        tl.extra.cuda.gdc_wait(_semantic=_semantic)


# Triton's own decorator would refuse a call without _semantic, which the interpreter makes. A
# function takes attributes, which mypy does not model.
in_turn.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def inside_of(index, size, EVEN: tl.constexpr):
    """index < size; a constant, which removes the mask, where no tile is cut."""
    if EVEN:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < size


def input_precision(policy: Policy, k: int, least: int = MIN_TRIPLE) -> str:
    """input_precision of a product over ``k``: for fp32 a TF32 triple, from ``least`` on."""
    if policy.compute is not torch.float32 or policy.tf32:
        return "tf32"
    return "ieee" if k < least or torch.version.hip else "tf32x3"  # AMD has no TF32


def launch_options(plan: Plan) -> dict[str, int]:
    """num_warps and num_stages; AMD's shared memory is a third of NVIDIA's."""
    stages = min(plan.num_stages, 2) if torch.version.hip else plan.num_stages
    return {"num_warps": plan.num_warps, "num_stages": stages}
