"""The TileLang backend: one kernel file a family, run on CUDA, or on a CPU through the C target.

Importing this package is cheap: TileLang itself (seconds) is imported by the first kernel built,
and not at all where every CPU kernel comes from the disk cache.

Raises:
    ImportError: TileLang isn't installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
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
    return None if _has_nvcc() else "no nvcc"


def limits(op: str, dims: Mapping[str, int], policy: Policy, device: torch.device) -> str | None:
    """Why TileLang can't serve this call of ``op``; None where it can.

    ``dims`` maps each shape symbol to its size.
    """
    if policy.compute not in FLOATS:
        return f"no {policy.name} kernels"
    # A dimension is an int32 in the CUDA kernels; offsets are int64 wherever they need it.
    large = [f"{name} = {size}" for name, size in dims.items() if size >= 2**31]
    return f"{', '.join(large)}: 2^31 or more" if large and device.type == "cuda" else None


def _has_nvcc() -> bool:
    """Whether TileLang will find nvcc: in CUDA_HOME, else on PATH, else as a package or default."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return (Path(home) / "bin" / "nvcc").exists()
    if shutil.which("nvcc"):
        return True
    from tilelang.env import CUDA_HOME  # its own search, for the rarer places

    return bool(CUDA_HOME) and (Path(CUDA_HOME) / "bin" / "nvcc").exists()
