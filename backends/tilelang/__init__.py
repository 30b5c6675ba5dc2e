"""The TileLang backend: one kernel file a family, run on CUDA, or on a CPU through the C target.

Importing this package is cheap: TileLang itself (seconds) is imported by the first kernel built,
and not at all where every CPU kernel comes from the disk cache.

Raises:
    ImportError: TileLang isn't installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from lycoris.kernels.precision import FLOATS, Policy

if importlib.util.find_spec("tilelang") is None:
    raise ImportError("the tilelang backend needs the package 'tilelang'", name="tilelang")

#: The C target rewrites TileLang's serialised IR, whose schema is tied to this release.
TESTED = "0.1.15"
#: cp.async and bf16 matrix products start here.
OLDEST_CAPABILITY = (8, 0)


def probe(device: torch.device) -> str | None:
    """Why TileLang can't serve ``device`` at all; None where it can."""
    if device.type == "cpu":
        if version("tilelang") != TESTED:
            return f"tilelang {version('tilelang')}: the C target is tied to {TESTED}"
        return None if shutil.which("g++") else "no g++ on PATH, which the C target needs"
    if device.type != "cuda" or torch.version.hip:
        return f"no kernels for {'ROCm' if torch.version.hip else device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return "compute capability {}.{} is below {}.{}".format(*capability, *OLDEST_CAPABILITY)
    return _no_nvcc()


def limits(op: str, dims: Mapping[str, int], policy: Policy, device: torch.device) -> str | None:
    """Why TileLang can't serve this call of ``op``; None where it can.

    ``dims`` maps each shape symbol to its size.
    """
    if policy.compute not in FLOATS:
        return f"no {policy.name} kernels"
    # A dimension is an int32 in the CUDA kernels; offsets are int64 wherever they need it.
    large = [f"{name} = {size}" for name, size in dims.items() if size >= 2**31]
    return f"{', '.join(large)}: 2^31 or more" if large and device.type == "cuda" else None


def _no_nvcc() -> str | None:
    """Why TileLang will find no nvcc; None where it will.

    TileLang looks for a toolkit once, as it is imported (seconds): in CUDA_HOME, else CUDA_PATH,
    else around the nvcc on PATH, as a package, and in the usual places. What shows without that
    import is answered without it.
    """
    if "tilelang" not in sys.modules:
        for variable in ("CUDA_HOME", "CUDA_PATH"):
            if home := os.environ.get(variable):
                return _lacks_nvcc(home, f"where {variable} says it is")
        found = shutil.which("nvcc")
        if found and Path(found).parent.name == "bin":
            return None
        from .common import load_tilelang

        load_tilelang()
    home = importlib.import_module("tilelang.env").CUDA_HOME
    if not home:
        return "no nvcc: TileLang found no CUDA toolkit as it was imported; CUDA_HOME names one"
    return _lacks_nvcc(home, "where TileLang found a CUDA toolkit as it was imported")


def _lacks_nvcc(home: str, why: str) -> str | None:
    nvcc = Path(home) / "bin" / "nvcc"
    return None if nvcc.is_file() and os.access(nvcc, os.X_OK) else f"no nvcc at {nvcc}, {why}"
