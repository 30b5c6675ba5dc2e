"""Builds kernels once, keeps them, and hands launchers a plain callable.

A factory is a module-level function that returns a TileLang prim_func; its parameters are a tuple
of plain values. A kernel is kept in this process by (factory, parameters, device). Between
processes, TileLang's own cache keeps CUDA kernels; CPU kernels are kept here, because a hit then
needs neither TileLang's import nor its lowering, which take seconds.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lycoris.kernels import config
from lycoris.kernels.errors import KernelBuildError

from . import host_c

Factory = Callable[..., Any]
Kernel = Callable[..., object]

#: TileLang's names of torch's dtypes.
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}

# One pipeline for every architecture: cp.async and mma.sync. TMA would encode a descriptor on the
# host at every launch. Warp specialisation gives one block all of an SM's registers, where these
# memory-bound kernels want several blocks. And wgmma after cp.async lacks a proxy fence in the
# last iterations of a pipeline (seen in the source that 0.1.15 generates).
_PASSES = {
    "tl.disable_tma_lower": True,
    "tl.disable_warp_specialized": True,
    "tl.disable_wgmma": True,
}
#: TileLang 0.1.15 can't print the tail of a deeper pipeline over a symbolic number of steps.
STAGES_OF_DYNAMIC_K = 2
_DIGEST_BYTES = hashlib.sha256().digest_size

_kernels: dict[tuple[Factory, tuple[object, ...], torch.device], Kernel] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    """Another thread may have held the lock when this process was forked."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def build(factory: Factory, params: tuple[object, ...], device: torch.device) -> Kernel:
    """The kernel ``factory(*params)`` for ``device``, built at most once in this process.

    Call it with tensors and floats in the order in which the prim_func declares them.

    Raises:
        KernelBuildError: it doesn't lower, compile or load.
        torch.cuda.OutOfMemoryError: as it came.
    """
    key = (factory, params, device)
    kernel = _kernels.get(key)
    if kernel is None:
        with _lock:
            kernel = _kernels.get(key)
            if kernel is None:
                kernel = _kernels[key] = _build(factory, params, device)
    return kernel


def _build(factory: Factory, params: tuple[object, ...], device: torch.device) -> Kernel:
    try:
        return (_build_cpu if device.type == "cpu" else _build_cuda)(factory, params, device)
    except (KernelBuildError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        text = str(error).strip()
        reason = text.splitlines()[-1] if text else type(error).__name__
        what = f"{factory.__name__}{params} for {device}"
        raise KernelBuildError(f"TileLang couldn't build {what}: {reason}") from error


def load_tilelang() -> ModuleType:
    """TileLang, imported here because it takes seconds, with its progress messages off."""
    if "tilelang" in sys.modules:
        return sys.modules["tilelang"]
    before = os.environ.get("PYTHONPATH")
    try:
        import tilelang
    finally:
        # Its import adds its own TVM, which every process started from here would then import.
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before
    # Its import sets its own logger to INFO; a level that the user chooses afterwards stays.
    logging.getLogger("tilelang").setLevel(logging.WARNING)
    return tilelang


def _build_cuda(factory: Factory, params: tuple[object, ...], device: torch.device) -> Kernel:
    tilelang = load_tilelang()
    major, minor = torch.cuda.get_device_capability(device)
    # From Hopper on, only the architecture-specific target compiles.
    target = {"kind": "cuda", "arch": f"sm_{major}{minor}{'a' if major >= 9 else ''}"}
    built = tilelang.compile(
        factory(*params), target=target, execution_backend="tvm_ffi", pass_configs=_PASSES
    )
    # The bare function: it reads the stream from its tensors, and costs half the full adapter.
    library = built.adapter.get_exportable_executable()
    return (library.jit() if hasattr(library, "jit") else library)["main"]


def _build_cpu(factory: Factory, params: tuple[object, ...], device: torch.device) -> Kernel:
    stem = f"{factory.__name__}-{_digest(factory, params)}"
    try:
        path = config.cache_dir() / "tilelang" / f"{stem}.so"
        if _intact(path):
            return host_c.HostKernel(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} can't be written")
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        raise KernelBuildError(
            f"kernels for the CPU can't be kept: {error}; {config.CACHE_DIR.name} names another "
            "folder"
        ) from error
    load_tilelang()
    source = host_c.lower(factory(*params))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=stem) as scratch:
        library = Path(scratch) / path.name
        host_c.compile_source(source, library)
        with library.open("r+b") as file:  # a loader ignores what follows the sections
            file.write(hashlib.sha256(file.read()).digest())
        os.replace(library, path)  # atomic: other processes see all of it or nothing
    return host_c.HostKernel(path)


def _intact(path: Path) -> bool:
    """Whether a cached library is whole: loading a damaged one can kill the process."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(data[:-_DIGEST_BYTES]).digest() == data[-_DIGEST_BYTES:]


def _digest(factory: Factory, params: tuple[object, ...]) -> str:
    """What a CPU kernel's library depends on, without tracing the kernel."""
    parts = (params, host_c.flags(), platform.machine(), version("tilelang"))
    digest = hashlib.sha256(repr(parts).encode() + _sources(inspect.getfile(factory)))
    return digest.hexdigest()[:32]


@lru_cache
def _sources(factory_file: str) -> bytes:
    # A factory may take parts of its kernel from the files beside its own.
    files = {*Path(factory_file).parent.glob("*.py"), Path(host_c.__file__), host_c.HEADER}
    return b"".join(file.read_bytes() for file in sorted(files))


def is_transposed(x: torch.Tensor, name: str) -> bool:
    """Whether ``x`` lies in memory as its transpose."""
    if x.is_contiguous():
        return False
    if not x.t().is_contiguous():
        raise ValueError(f"{name} isn't dense: {tuple(x.shape)} with strides {x.stride()}")
    return True


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x``, copied where the kernel's 16-byte loads would be misaligned (an odd view)."""
    return compact(x.clone() if x.is_cuda and x.data_ptr() % 16 else x)


def compact(x: torch.Tensor) -> torch.Tensor:
    """Contiguous ``x`` with a last stride of 1, which the CUDA launch demands of a size 1 too."""
    return x if x.stride()[-1] == 1 else x.view(-1).view(x.shape)
