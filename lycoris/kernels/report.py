"""What the CLI and the benchmarks share: tables, JSON, the environment, and what to run on it.

A broken backend or package never raises here: its error is what is reported.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .._version import __version__
from . import registry, testing
from .precision import Policy
from .spec import SPECS, Case, OpSpec

DISTRIBUTION = "lycoris-kernels"
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
Mix = testing.Mix


class UsageError(Exception):
    """What the user asked for makes no sense; the message says what would."""


def check_target(option: str, path: str | Path) -> None:
    """Checks that a file can be written, before the work whose results go there.

    Raises:
        UsageError: it can't.
    """
    target = Path(path).absolute()
    if target.is_dir():
        raise UsageError(f"{option}: {path} is a folder")
    if not target.parent.is_dir():
        raise UsageError(f"{option}: no folder {Path(path).parent}")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"{option}: {path} can't be written")


def write(option: str, path: str | Path, text: str) -> None:
    """Writes a file of results.

    Raises:
        UsageError: it can't be written, or not whole.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option}: {path} can't be written: {error.strerror}") from error


# ------------------------------------------------------------------------- text and JSON


def text(value: object) -> str:
    """A cell: three significant digits, a dash for nothing, yes or no."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Aligned columns under their names; numbers to the right."""
    cells = [[text(row.get(c)) for c in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [any(isinstance(row.get(c), (int, float)) for row in rows) for c in columns]

    def line(parts: Sequence[str]) -> str:
        put = (
            p.rjust(w) if n else p.ljust(w) for p, w, n in zip(parts, widths, numeric, strict=True)
        )
        return "  ".join(put).rstrip()

    return "\n".join([line(columns), line(["-" * w for w in widths]), *map(line, cells)])


def to_json(value: object) -> str:
    """Strict JSON: a number that is not finite becomes null."""
    return json.dumps(plain(value), indent=2, allow_nan=False)


def plain(value: Any) -> Any:
    """``value`` as strict JSON has it: a number that is not finite becomes None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


# --------------------------------------------------------------------------- environment


def _version(distribution: str) -> str | None:
    # Metadata, not __version__: importing Triton or TileLang takes seconds, and can fail.
    try:
        return metadata.version(distribution)
    except Exception:
        return None


def versions() -> dict[str, str | None]:
    """The versions a result depends on; None where something is not there."""
    try:
        driver = Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()
        found = next((word for word in driver if word[0].isdigit()), None)
    except (OSError, IndexError):
        found = None
    return {
        "lycoris": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        # A backend in the tree is named after the language it is written in.
        **{n: _version(n) for n in registry.BUILT_IN if n != registry.FORMULA},
        "cuda": torch.version.cuda,
        "driver": found,
    }


def devices() -> list[dict[str, str]]:
    """The CPU and every GPU, with name and capability."""
    cpu = {"device": "cpu", "name": platform.processor() or "cpu", "capability": platform.machine()}
    found = [cpu]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            name = torch.cuda.get_device_name(i)
            found.append({"device": f"cuda:{i}", "name": name, "capability": f"{major}.{minor}"})
    return found


def rivals() -> list[str]:
    """Other installed distributions that own the import name ``lycoris``."""
    try:
        owners = metadata.packages_distributions().get("lycoris", [])
    except Exception:  # some other package's metadata is broken
        return []
    return sorted({o for o in owners if o.lower().replace("_", "-") != DISTRIBUTION})


def pick_device(wanted: str | None) -> torch.device:
    """The device named, by default a GPU where there is one.

    Raises:
        UsageError: a GPU is wanted and there is none.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device")
    return torch.device(wanted or ("cuda" if torch.cuda.is_available() else "cpu"))


# ------------------------------------------------------------------------------ backends


def unavailable(name: str, device: torch.device) -> str | None:
    """Why a backend can't serve a device; None where it can."""
    try:
        module = registry.load(name)
        if isinstance(module, str):
            return module
        if device.type == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        return registry.availability(name, device)
    except Exception as error:  # a plug-in's probe may fail in any way
        return f"probe failed: {type(error).__name__}: {error}"


def incapable(
    name: str, spec: OpSpec, dims: Mapping[str, int], policy: Policy, device: torch.device
) -> str | None:
    """Why a backend can't serve a call; None where it can."""
    reason = unavailable(name, device)
    if reason:
        return reason
    try:
        return registry.capability(name, spec.name, spec.family, dims, policy, device)
    except Exception as error:
        return f"check failed: {type(error).__name__}: {error}"


def is_fused(name: str) -> bool:
    """Whether a backend has, or would have, kernels; ``torch`` runs the formula."""
    return not hasattr(registry.load(name), "run_formula")


def pick_ops(wanted: Sequence[str] | None) -> list[OpSpec]:
    """The ops named, by default all.

    Raises:
        UsageError: a name is unknown; the message lists the known ones.
    """
    for name in wanted or ():
        if name not in SPECS:
            raise UsageError(f"unknown op {name!r}; known: {', '.join(SPECS)}")
    return [SPECS[name] for name in dict.fromkeys(wanted or SPECS)]


def pick_backends(
    wanted: Sequence[str] | None, device: torch.device
) -> tuple[list[str], dict[str, str]]:
    """The backends named, by default every fused one there is, and why the others are missing.

    Raises:
        UsageError: a name is unknown, or a named backend can't serve the device.
    """
    known = registry.names()
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"unknown backend {name!r}; known: {', '.join(known)}")
    names = list(dict.fromkeys(wanted or (n for n in known if is_fused(n))))
    missing = {n: reason for n in names if (reason := unavailable(n, device))}
    if wanted and missing:
        reasons = "; ".join(f"{n}: {reason}" for n, reason in missing.items())
        raise UsageError(f"backend unavailable on {device.type}: {reasons}")
    return [n for n in names if n not in missing], missing


def pick_mixes(wanted: Sequence[str] | None, default: Sequence[Mix]) -> list[Mix]:
    """The dtype mixes named (``bf16``, ``bf16/fp32``: the model's, then the adapter's).

    Raises:
        UsageError: a name is unknown; the message lists the known ones.
    """
    known = {testing.mix_name(mix): mix for mix in testing.MIXES}
    for name in wanted or ():
        if name not in known:
            raise UsageError(f"unknown dtype {name!r}; known: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)] if wanted else list(default)


def broken(
    op: str, backend: str, case: Case, mix: Mix, device: torch.device, error: Exception
) -> testing.Row:
    """The failing row of a case that raised."""
    scores = dict.fromkeys(
        ("ulp", "rms", "model_ulp", "model_rms", "floor_ulp", "floor_rms", "eager_ulp"), math.inf
    )
    return testing.Row(
        op=op,
        backend=backend,
        case=case.name,
        dtypes=testing.mix_name(mix),
        tensor="call",
        device=device.type,
        **scores,
        eager_rms=math.inf,
        bound=0.0,
        headroom=0.0,
        agreement=0.0,
        why=f"{type(error).__name__}: {error}",
    )
