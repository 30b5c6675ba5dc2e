"""Triton kernels: compiled on CUDA tensors, run through Triton's interpreter on CPU tensors.

Importing this package without triton installed raises an ImportError that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import torch
import triton  # noqa: F401  (core learns from this line whether Triton is installed)

from lycoris.kernels.precision import Policy


def probe(device: torch.device) -> str | None:
    """Why Triton can't serve ``device`` at all; None where it can."""
    if device.type == "cpu":
        missing = [name for name in ("numpy", "ml_dtypes") if find_spec(name) is None]
        if missing:
            names = " ".join(missing)
            return f"triton: the interpreter needs {names} (pip install {names})"
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"triton: no kernels for {'ROCm' if device.type == 'cuda' else device.type} devices"
    if not torch.cuda.is_available():
        return "triton: torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 5):
        return f"triton: compute capability {major}.{minor} < 7.5"
    return None


def limits(op: str, dims: Mapping[str, int], policy: Policy, device: torch.device) -> str | None:
    """Why Triton can't serve this call; None where it can.

    ``dims`` maps the op's shape symbols to sizes. No size is out of reach: offsets are 64-bit.
    """
    if (
        device.type == "cuda"
        and torch.bfloat16 in (policy.compute, policy.output)
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "triton: bf16 needs compute capability 8.0"
    return None
