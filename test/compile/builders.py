"""GPUs that are not there, and how Triton and TileLang build a kernel for one; see worker.py."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lycoris import functional  # noqa: F401  (registers every op)
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.schedule import Schedule

GPU = torch.device("cuda", 0)
SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
MIXES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float32, torch.float32),
]


@dataclass(frozen=True)
class Arch:
    """What of a GPU decides plans and limits; ``shared`` is the most a block may use, in bytes."""

    capability: tuple[int, int]
    units: int
    shared: int


ARCHS = {
    "sm_80": Arch((8, 0), 108, 163 * 1024),
    "sm_90": Arch((9, 0), 132, 227 * 1024),
    "sm_90a": Arch((9, 0), 132, 227 * 1024),
    "sm_100": Arch((10, 0), 148, 227 * 1024),
    # Plans come from the number of units; the capability only has to be one that is served.
    "gfx942": Arch((9, 4), 304, 64 * 1024),
}
#: How many of the kernels the suite builds for (backend, architecture): 0 shows every layout,
#: in 16 bits and in fp32; 1 every dtype mix, and every tile of the large cases; 2 each mix with
#: each tile. ``worker.py --level 2`` builds more, in minutes an op: for whoever changes kernels.
TARGETS = {
    ("triton", "sm_90"): 1,
    ("triton", "sm_80"): 0,
    ("triton", "sm_100"): 0,
    ("triton", "gfx942"): 0,
    ("tilelang", "sm_90a"): 0,
    ("tilelang", "sm_80"): 0,
}


@dataclass
class Build:
    """One kernel built for one architecture, and where it was asked for first."""

    backend: str
    arch: str
    kernel: str
    dtypes: str
    tile: str
    op: str
    phase: str
    case: str
    mix: str
    #: Whether every size is a multiple of 16, and so every row starts at an aligned address.
    aligned: bool
    registers: int = 0
    shared: int = 0
    spills: int = 0
    #: Counts of instructions of note; ``narrow``: global accesses of less than 4 bytes.
    code: dict[str, int] = field(default_factory=dict)
    error: str = ""


@dataclass
class Launch:
    """What core asks of a launcher, as far as it decides the code of the kernel."""

    kernel: str
    dtypes: tuple[str, ...]
    layouts: tuple[str, ...]
    plan: Plan

    @classmethod
    def of(cls, kernel: str, args: tuple[Any, ...], plan: Plan, policy: Policy) -> Launch:
        tensors = [a if isinstance(a, torch.Tensor) and a.dim() else None for a in args]
        dtypes = [SHORT[t.dtype] if t is not None else "-" for t in tensors]
        layouts = [
            type(a).__name__ if t is None else "rows" if t.stride()[-1] == 1 else "columns"
            for a, t in zip(args, tensors, strict=True)
        ]
        return cls(kernel, (*dtypes, SHORT[policy.compute]), tuple(layouts), plan)


@dataclass
class Request:
    """A kernel that was asked for; ``large``: by a case whose sizes are made for a GPU."""

    launch: Launch
    large: bool
    build: Build
    compile: Callable[[], Any]

    def features(self, level: int) -> set[Any]:
        """What of it a sample of this level must show; see :data:`TARGETS`."""
        launch = self.launch
        # The grid's third dimension and the symbolic sizes leave a tile what it is.
        tile = replace(launch.plan, splits=1, dynamic="")
        compute = launch.dtypes[-1]
        if level == 0 and compute != "fp32":
            compute = "16-bit"  # fp16 and bf16 differ in the names of a few instructions only
        found: set[Any] = {*enumerate(launch.layouts), compute}
        if level > 0:
            found.add(launch.dtypes)
        if level > 0 and self.large:
            # What is streamed, the first two, takes twice the shared memory in fp32.
            wide = tuple(d == "fp32" for d in launch.dtypes[:2])
            found |= (
                {(launch.dtypes, tile), launch.plan.splits > 1} if level > 1 else {(wide, tile)}
            )
        return {(launch.kernel, feature) for feature in found}


# ----------------------------------------------------------------------- a GPU that is not there


class StandIn(torch.Tensor):
    """A tensor without memory that claims to be on the GPU, aligned as an allocator's is."""

    inside = False  # torch's own code, which must see where the tensor really is
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta") if StandIn.inside else GPU

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, StandIn.inside = StandIn.inside, True
        try:
            return super().__torch_function__(func, types, args, kwargs or {})
        finally:
            StandIn.inside = before

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return 0


class OnStandIns(TorchFunctionMode):
    """Makes whatever is allocated on the GPU a stand-in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "cuda":
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "meta"}).as_subclass(StandIn)


def pretend(arch: Arch) -> None:
    """Makes torch describe the GPU of ``arch`` as the current one."""
    properties = SimpleNamespace(
        multi_processor_count=arch.units,
        shared_memory_per_block_optin=arch.shared,
        major=arch.capability[0],
        minor=arch.capability[1],
    )
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: arch.capability
    cuda.get_device_properties = lambda device=None: properties
    cuda.device = lambda device: nullcontext()  # type: ignore[assignment,misc]
    torch._C._cuda_getCurrentRawStream = lambda device: 0


def watch(place: SimpleNamespace) -> None:
    """Keeps in ``place.launch`` what core asks of a launcher while the launcher runs."""
    plain = Schedule.kernel

    def kernel(self: Schedule, family: str, name: str, *, optional: bool = False) -> Any:
        launcher = plain(self, family, name, optional=optional)
        if launcher is None:
            return None

        def prepare(*args: Any, plan: Plan, policy: Policy) -> Any:
            place.launch = Launch.of(f"{family}.{name}", args, plan, policy)
            return launcher.prepare(*args, plan=plan, policy=policy)

        def launch(*args: Any, plan: Plan, policy: Policy) -> None:
            prepare(*args, plan=plan, policy=policy)(*args)

        launch.prepare = prepare  # type: ignore[attr-defined]
        return launch

    Schedule.kernel = kernel  # type: ignore[method-assign]


# ---------------------------------------------------------------------------------------- Triton


class Triton:
    """Notes what Triton's runtime is asked to launch, and compiles it for a target."""

    def __init__(self, arch: str, note: Callable[..., None]) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.runtime.jit import JITFunction

        amd = arch.startswith("gfx")
        number = arch if amd else int(arch.removeprefix("sm_"))
        target = GPUTarget("hip" if amd else "cuda", number, 64 if amd else 32)
        triton.runtime.driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: target,
                get_current_device=lambda: 0,
                get_current_stream=lambda device: 0,
            )
        )
        self.arch = arch
        self.tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        run, runtime = JITFunction.run, triton.knobs.runtime

        def record(jit: Any, *args: Any, **kwargs: Any) -> Any:
            found: list[dict[str, Any]] = []
            # Triton's own key: types, divisibility, constants and options. True: don't compile.
            runtime.jit_cache_hook = lambda **hook: found.append(hook["compile"]) or True
            run(jit, *args, **kwargs)
            runtime.jit_cache_hook = None
            (asked,) = found
            note(
                key=(jit.__name__, asked["key"]),
                compile=lambda: run(jit, *args, **kwargs),
            )
            return {kwargs["grid"]: None, (*kwargs["grid"], 1, 1)[:3]: lambda *a, **k: None}

        JITFunction.run = record

    def compile(self, requests: list[Request]) -> None:
        for request in requests:
            try:
                built = request.compile()
                measure = self._amd if self.arch.startswith("gfx") else self._nvidia
                measure(request.build, built)
            except Exception as error:
                request.build.error = f"{type(error).__name__}: {error}"

    def _nvidia(self, build: Build, built: Any) -> None:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            command = [self.tools / "cuobjdump", "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        build.registers, build.spills = found["REG"], found["STACK"] + found["LOCAL"]
        build.shared = built.metadata.shared
        build.code = ptx_counts(built.asm["ptx"])
        build.code["32-bit offsets"] = len(
            re.findall(r"tt\.addptr .*i32>? *$", built.asm["ttir"], re.MULTILINE)
        )
        if built.metadata.launch_pdl:
            first, *_ = built.asm["ptx"].split("griddepcontrol.wait")
            build.code["out of turn"] = len(
                re.findall(r"\b(?:ld|st|red|atom|cp)\S*\.global", first)
            )

    @staticmethod
    def _amd(build: Build, built: Any) -> None:
        text = built.asm["amdgcn"]
        found = dict(re.findall(r"\.(\w+_count|group_segment_fixed_size):\s+(\d+)", text))
        build.registers = int(found["vgpr_count"])
        # Scalar registers spill into lanes of vector registers, not into memory.
        build.spills = int(found["vgpr_spill_count"])
        build.shared = max(int(found["group_segment_fixed_size"]), built.metadata.shared)
        build.code = {"mma": text.count("v_mfma")}


# -------------------------------------------------------------------------------------- TileLang


class TileLang:
    """Notes what TileLang is asked to build, and compiles it with nvcc, several at a time."""

    BATCH = 32  # nvcc reads TileLang's headers (seconds) once a file

    def __init__(self, arch: str, note: Callable[..., None]) -> None:
        from lycoris.backends.tilelang import common

        self.arch = arch
        self.tilelang = common.load_tilelang()
        self.lowered: dict[int, tuple[str, int]] = {}
        build_cuda = common._build_cuda

        def record(factory: Any, params: tuple[Any, ...], device: torch.device) -> Any:
            note(
                key=(factory.__name__, params),
                compile=lambda: build_cuda(factory, params, device),
            )
            return lambda *args: None

        common._build_cuda = record
        self.tilelang.compile = self._lower

    def _lower(self, func: Any, *, target: Any, pass_configs: Any, **_: Any) -> Any:
        """In place of tilelang.compile: everything but the host code and the load."""
        from tilelang import tvm

        if target["arch"] != self.arch:
            raise ValueError(f"the backend builds for {target['arch']}, not {self.arch}")
        passes = self.tilelang.transform.PassContext(opt_level=3, config=pass_configs)
        with passes, tvm.target.Target(target):
            lowered = self.tilelang.lower(func, target=target)
        (device,) = lowered.device_mod.functions.values()
        self.made = lowered.kernel_source, int(device.attrs.get("dyn_shared_memory_buf", 0))
        library = {"main": None}
        adapter = SimpleNamespace(get_exportable_executable=lambda: library)
        return SimpleNamespace(adapter=adapter)

    def compile(self, requests: list[Request]) -> None:
        ready: list[tuple[Build, str, int]] = []
        for request in requests:
            try:
                request.compile()
                ready.append((request.build, *self.made))
            except Exception as error:
                request.build.error = f"{type(error).__name__}: {error}"
        for start in range(0, len(ready), self.BATCH):
            self._nvcc(ready[start : start + self.BATCH])

    def _nvcc(self, batch: list[tuple[Build, str, int]]) -> None:
        root = Path(self.tilelang.__file__).parent
        names = [f"kernel_{i}" for i in range(len(batch))]
        sources = []
        for name, (_, source, _) in zip(names, batch, strict=True):
            (declared,) = set(re.findall(r"__global__[^;{]*?(\w+)\((?:const |\w+\*)", source))
            sources.append(re.sub(rf"\b{declared}\b", name, source))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernels.cu"
            file.write_text("\n".join(sources))
            command = [
                *("nvcc", "-std=c++17", "-cubin", "-Xptxas=-v", "-w", "--keep"),
                *(f"-arch={self.arch}", f"-I{root / 'src'}"),
                *(f"-I{root / '3rdparty' / 'cutlass' / 'include'}", str(file)),
            ]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                for build, _, _ in batch:
                    build.error = f"nvcc, on {len(batch)} kernels: {done.stderr[-2000:]}"
                return
            ptx = (Path(folder) / "kernels.ptx").read_text()
        usage = dict(
            re.findall(r"entry function '(\w+)'(.*?)(?=entry function|\Z)", done.stderr, re.S)
        )
        bodies = dict(re.findall(r"\.entry (\w+)\((.*?)^}", ptx, re.S | re.M))
        for name, (build, _, dynamic) in zip(names, batch, strict=True):
            text = usage[name]
            build.registers = int(re.search(r"Used (\d+) registers", text)[1])  # type: ignore[index]
            spills = re.findall(r"(\d+) bytes spill", text)
            stack = re.findall(r"(\d+) bytes stack frame", text)
            build.spills = sum(map(int, spills)) + sum(map(int, stack))
            static = re.search(r"(\d+) bytes smem", text)
            build.shared = dynamic + (int(static[1]) if static else 0)
            build.code = ptx_counts(bodies[name])


def ptx_counts(ptx: str) -> dict[str, int]:
    """How often instructions of note stand in a kernel's code."""
    patterns = {
        "mma": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)",
        "copies": r"\bcp\.async\.c[ag]",
        "narrow copies": r"\bcp\.async\.c[ag]\S+ [^;]*, [48][,;]",
        "wide": r"\b(?:ld|st)\.global\S*\.v[248]",
        "narrow": r"\b(?:ld|st)\.global[\w.:]*\.[busf]?(?:8|16)\b",
    }
    return {name: len(re.findall(pattern, ptx)) for name, pattern in patterns.items()}
