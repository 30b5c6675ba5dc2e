"""Every kernel compiles for every architecture, without a GPU, spills or too much shared memory.

worker.py says how kernels are found and built, in a process of its own for each architecture.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lycoris.functional import OPS
from lycoris.kernels import registry

WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[2]
#: Bytes of shared memory that a block may use at most.
SHARED = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}
#: The longest first: see the order in which test/conftest.py has tests handed out.
TARGETS = [
    ("tilelang", "sm_90a"),
    ("tilelang", "sm_80"),
    ("triton", "sm_90"),
    ("triton", "sm_100"),
    ("triton", "gfx942"),
    ("triton", "sm_80"),
]
#: Matrix products over whole rows of a large operand: more is asked of their code.
PRODUCTS = {"lora.matmul"}


def compile_for(backend: str, arch: str, cache: Path) -> dict[str, Any]:
    """The worker's report, from caches that are empty."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TILELANG_CACHE_DIR": str(cache / "tilelang"),
        "TRITON_INTERPRET": "0",
    }
    options = ["--backend", backend, "--arch", arch, "--json"]
    done = subprocess.run(
        [sys.executable, str(WORKER), *options],
        env={k: v for k, v in os.environ.items() if not k.startswith("LYCORIS_")} | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # TileLang's words where it found two threads' accesses that no barrier can separate.
    assert "the race remains" not in done.stderr, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def named(build: dict[str, Any]) -> str:
    keys = ("kernel", "dtypes", "tile", "op", "phase", "case", "mix")
    return ", ".join(build[k] for k in keys)


@pytest.mark.parametrize(("backend", "arch"), TARGETS)
def test_kernels_compile(
    backend: str, arch: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    if backend == "tilelang":
        from lycoris.backends import tilelang

        if missing := tilelang._no_nvcc():
            pytest.skip(missing)
    report = compile_for(backend, arch, tmp_path)
    builds = report["builds"]
    record_property("builds", builds)
    found = [f"{named(b)}: {why}" for b in builds for why in faults(b, arch)]
    assert not found, "\n".join(found)
    module = registry.load(backend)
    served = {
        op
        for op, spec in OPS.items()
        if not isinstance(registry.kernels(module, spec.spec.family), str)
    }
    assert set(report["ops"]) == served, report["declined"]


def faults(build: dict[str, Any], arch: str) -> list[str]:
    """What is wrong with one build."""
    if build["error"]:
        return [build["error"]]
    found = []
    if build["spills"]:
        found.append(f"{build['spills']} registers or bytes spilled")
    if build["shared"] > SHARED[arch]:
        found.append(f"{build['shared']} bytes of shared memory > {SHARED[arch]}")
    if build["code"].get("out of turn"):
        found.append(f"{build['code']['out of turn']} global accesses before in_turn()")
    if build["kernel"] in PRODUCTS:
        found += slow_code(build, arch)
    return found


def slow_code(build: dict[str, Any], arch: str) -> list[str]:
    """What keeps a product from streaming its operands, as far as the code shows it."""
    code, (a, b, *_, compute) = build["code"], build["dtypes"].split()
    found = []
    if compute != "fp32" and not code["mma"]:
        found.append("no matrix instruction")
    if arch.startswith("gfx"):
        return found
    if code.get("32-bit offsets"):
        found.append("offsets of 32 bits, which a large tensor overflows")
    if build["aligned"] and not code["wide"]:
        found.append("no global access of 8 bytes or more")
    if build["aligned"] and code["narrow"]:
        found.append(f"{code['narrow']} global accesses of less than 4 bytes")
    pipelined = not build["tile"].endswith("s1")
    if build["aligned"] and a == b == compute and pipelined and not code["copies"]:
        found.append("no asynchronous copy")
    return found


def test_faults_are_found() -> None:
    good = {
        "error": "", "spills": 0, "shared": 65536, "kernel": "lora.matmul", "aligned": True,
        "dtypes": "bf16 bf16 - - bf16 bf16", "tile": "64x16x64 w4 s3",
        "code": {"mma": 1, "wide": 4, "narrow": 0, "copies": 2},
    }  # fmt: skip
    assert not faults(good, "gfx942")
    assert not faults(good, "sm_80")
    code = good["code"]
    assert isinstance(code, dict)
    bad = [
        ({"error": "no such thing"}, "no such thing"),
        ({"spills": 8}, "spilled"),
        ({"shared": 163 * 1024 + 1}, "shared memory"),
        ({"code": code | {"mma": 0}}, "matrix"),
        ({"code": code | {"wide": 0}}, "8 bytes"),
        ({"code": code | {"narrow": 3}}, "less than 4"),
        ({"code": code | {"copies": 0}}, "asynchronous"),
        ({"code": code | {"32-bit offsets": 1}}, "offsets"),
        ({"code": code | {"out of turn": 1}}, "in_turn"),
    ]
    for change, why in bad:
        (found,) = faults(good | change, "sm_80")
        assert why in found
