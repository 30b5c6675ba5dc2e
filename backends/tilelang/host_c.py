"""Runs GPU-style TileLang kernels on a CPU, through TileLang's C target and g++.

The target lowers tile operators (T.copy, T.gemm, ...) to serial loops, but takes neither the GPU's
memory scopes, parallel loops and layouts, nor bfloat16. :func:`lower` rewrites the serialised IR:
every on-chip scope becomes ``local``, T.Parallel a serial loop, layout annotations go, and bfloat16
is printed as float16, whose class ``half.h`` defines. fp32 stays IEEE fp32 (no contraction into
fused multiply-adds), products of 16-bit tiles accumulate in fp32, stores round to nearest even.

One library holds one kernel, exported as ``lycoris_launch``; ``lycoris_abi`` tells how to call it.
"""

from __future__ import annotations

import ctypes
import json
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from lycoris.kernels.errors import KernelBuildError

HEADER = Path(__file__).with_name("half.h")
_THEIRS = "#include <tl_templates/cpp/common.h>"
_ON_CHIP = ("shared.dyn", "shared", "local.fragment")
_LAYOUTS = ("layout_map", "padding_map")
# What has been proved on the C target; anything else of TileLang's gets a clear refusal.
_OPERATORS = {
    "tl.launch_thread_idx",
    "tl.region",
    "tl.tileop.copy",
    "tl.tileop.fill",
    "tl.tileop.gemm",
    "tl.tileop.reduce",
}
_SKIPPED = (
    *("tirx.Simplify", "tl.Simplify", "s_tir.HoistIfThenElse", "tirx.RemoveNoOp"),
    *("s_tir.RenormalizeSplitPattern", "tl.LegalizeNegativeIndex"),
)
_SERIAL, _PARALLEL = 0, 1  # tirx.ForKind
_C_TYPES = {"handle": ctypes.c_void_p, "float32": ctypes.c_float, "int32": ctypes.c_int32}


def flags() -> list[str]:
    """The compile flags; they belong in the cache key, because they differ between machines."""
    # A fixed baseline, not -march=native: a cache folder may be shared by unlike machines.
    wide = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    vector = ["-mavx2", "-mf16c"] if wide and platform.machine() == "x86_64" else []
    # C++17's headers, and what -O3 adds to -O2 and vectors, more than double the time of a build.
    level = ["-std=c++14", "-O2", "-ftree-vectorize"]
    return [*level, "-ffp-contract=off", "-fno-strict-aliasing", *vector]


def lower(func: Any) -> str:
    """The C++ source of a TileLang prim_func.

    Raises:
        KernelBuildError: the kernel uses something that the C target can't run.
    """
    import tilelang
    from tilelang import tvm

    name = str(func.attrs["global_symbol"])
    text = tvm.ir.save_json(func)
    called = {n["data"] for n in json.loads(text)["nodes"] if n.get("type") == "ir.Op"}
    unknown = sorted(op for op in called - _OPERATORS if op.startswith("tl."))
    if unknown:
        raise KernelBuildError(f"{name}: TileLang's C target can't run {', '.join(unknown)}")
    brain = '"bfloat16"' in text
    if brain and '"float16"' in text:
        raise KernelBuildError(f"{name}: TileLang's C target can't mix float16 with bfloat16")
    config = {"tirx.disable_vectorize": True}
    try:
        rewritten = tvm.ir.load_json(_rewrite(text))
        passes = tilelang.transform.PassContext(3, config=config, instruments=[_fewer_passes(tvm)])
        with passes, tvm.target.Target("c"):
            source = tilelang.lower(rewritten, target="c").kernel_source
    except Exception as error:
        reason = str(error).strip().splitlines()[-1:]
        raise KernelBuildError(f"{name}: TileLang's C target failed: {reason}") from error
    half = f"#define half lycoris_{'bf16' if brain else 'fp16'}\n"
    return HEADER.read_text() + half + source.replace(_THEIRS, "") + _entry(func, name, source)


def _fewer_passes(tvm: Any) -> Any:
    """Leaves simplification to g++: TileLang's takes most of the time over symbolic sizes.

    Nor does it look for indices from an axis's end, such as A[-1]: no kernel has one.
    """

    class Fewer:
        def should_run(self, mod: Any, info: Any) -> bool:
            return bool(info.name not in _SKIPPED)

    return tvm.ir.instrument.pass_instrument(Fewer)()


def compile_source(source: str, library: Path) -> None:
    """Build ``source`` into the shared ``library``.

    Raises:
        KernelBuildError: there is no g++, or it failed.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelBuildError("TileLang's C target needs g++, and there is none on PATH")
    command = [compiler, *flags(), "-w", "-fPIC", "-shared", "-x", "c++", "-", "-o", str(library)]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelBuildError(f"g++ failed on a generated kernel: {done.stderr.strip()[:2000]}")


class HostKernel:
    """A kernel in a shared library, called with tensors and numbers in the order it declares."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        abi = json.loads(ctypes.c_char_p.in_dll(loaded, "lycoris_abi").value or b"")
        self._dims: list[list[int]] = abi["dims"]
        self._launch = loaded.lycoris_launch
        types: list[Any] = [_C_TYPES[kind] for kind in abi["kinds"]]
        self._launch.argtypes = types + [ctypes.c_int64] * len(self._dims)

    def __call__(self, *args: torch.Tensor | float) -> None:
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args]
        self._launch(*values, *[args[i].shape[axis] for i, axis in self._dims])  # type: ignore[union-attr]


def _rewrite(text: str) -> str:
    """A serialised prim_func in the terms that the C target knows."""
    for scope in _ON_CHIP:
        text = text.replace(f'"{scope}"', '"local"')
    graph = json.loads(text.replace('"bfloat16"', '"float16"'))
    nodes = graph["nodes"]
    for node in nodes:
        kind, data = node.get("type"), node.get("data")
        if kind == "tirx.For" and data["kind"] == _PARALLEL:
            data["kind"] = _SERIAL
        elif kind == "tirx.SBlock":
            notes = nodes[data["annotations"]]  # a flat list: key, value, key, value, ...
            pairs = zip(notes["data"][::2], notes["data"][1::2], strict=True)
            kept = [pair for pair in pairs if nodes[pair[0]]["data"] not in _LAYOUTS]
            notes["data"] = [index for pair in kept for index in pair]
    return json.dumps(graph)


def _entry(func: Any, name: str, source: str) -> str:
    """C++ that exports a kernel with its parameters in declared order, then its symbolic sizes."""
    buffers = [func.buffer_map[p] if p in func.buffer_map else None for p in func.params]
    names = [b.name if b else p.name for b, p in zip(buffers, func.params, strict=True)]
    sizes = {
        str(size): [i, axis]
        for i, buffer in enumerate(buffers)
        if buffer
        for axis, size in enumerate(buffer.shape)
        if not hasattr(size, "value")  # an IntImm has one, a Var none
    }
    signature = re.search(rf"int32_t {name}_kernel\((.*?)\);", source)
    if signature is None:
        raise KernelBuildError(f"{name}: TileLang's C target printed no {name}_kernel")
    # The target orders parameters by its own rule, so pass them on by name, in its order.
    split = [p.rsplit(" ", 1) for p in signature[1].split(", ")]
    types = {parameter: kind for kind, parameter in split}
    pairs = zip(buffers, func.params, strict=True)
    kinds = ["handle" if buffer else str(parameter.dtype) for buffer, parameter in pairs]
    # A parameter that the kernel never reads is missing there; it is passed all the same.
    spare = {"handle": "void*", "float32": "float"}
    unused = {n: spare.get(k, f"{k}_t") for n, k in zip(names, kinds, strict=True)}
    unused |= dict.fromkeys(sizes, "int64_t")
    declared = ", ".join(f"{types.get(n, unused[n])} {n}" for n in [*names, *sizes])
    abi = json.dumps({"kinds": kinds, "dims": [*sizes.values()]})
    return f"""
extern "C" const char* lycoris_abi = R"({abi})";
extern "C" void lycoris_launch({declared}) {{ {name}_kernel({", ".join(types)}); }}
"""
