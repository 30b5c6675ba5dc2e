"""The Triton backend: its interpreter's rounding, its launcher, and the LoRA product.

Run as a script, as a test does, it compiles kernels for GPUs that are not there, and prints them.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("ml_dtypes")

import triton
import triton.language as tl
from lycoris.backends.triton import limits, lora, probe
from lycoris.backends.triton.common import Kernel, kernel
from triton.language.extra import libdevice

from lycoris.kernels.errors import KernelBuildError
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@triton.jit
def _double(x):
    y = 0
    y += 2
    return x * y


@kernel
def _convert(x, out, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < N).to(out.dtype.element_ty), mask=i < N)


@kernel
def _arithmetic(x, y, out, OP: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    u = tl.load(x + i)
    v = tl.load(y + i)
    if OP == "double":
        w = _double(u)
    else:
        w = u + v if OP == "add" else u * v if OP == "mul" else tl.fma(u, v, v)
    tl.store(out + i, w)


@kernel
def _row_sums(x, out, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)
    tile = tl.load(x + i[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(out + i, tl.sum(tile.to(tl.float32), axis=1) + tile.to(tl.float32).max(axis=1))


@kernel
def _asm(x):
    v = tl.load(x)
    tl.store(x, tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], tl.float32, True, 1))


@kernel
def _libdevice(x):
    tl.store(x, libdevice.tanh(tl.load(x)))


def spacing(dtype: torch.dtype, value: float) -> float:
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** (math.frexp(max(value, info.smallest_normal))[1] - 1)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def check(out: torch.Tensor, ref: torch.Tensor, compute: torch.dtype, k: int, eager: torch.Tensor):
    """The pass rule of one product: errors in ULP of ``compute`` at the rms of ``ref`` (fp64)."""
    unit = spacing(compute, rms(ref))
    error = (out.double() - ref) / unit
    floor = (ref.to(out.dtype).double() - ref) / unit
    assert torch.isfinite(out).all()
    if compute is F32:
        chain = (eager.double() - ref) / unit
        k = min(k, 512)
        assert rms(error) <= max(2 * rms(chain), 1.05 * rms(floor), 0.35 * math.sqrt(k))
    else:
        assert error.abs().max() <= 1.1 * floor.abs().max() + 0.25
        assert rms(error) <= 1.05 * rms(floor) + 1e-3


def draw(m: int, n: int, dtype: torch.dtype, transposed: bool, device: str) -> torch.Tensor:
    """A strided (m, n) view, normal; its fast dimension is a slice of a wider allocation."""
    rows, columns = (n, m) if transposed else (m, n)
    x = torch.randn(rows, columns + 3).to(dtype).to(device)[:, :columns]
    return x.t() if transposed else x


def product(
    m, k, n, plan, *, dtypes=(BF16, BF16, None, BF16), layout="nnn", scale=0.3, device="cpu"
):
    """Run ``lora.matmul`` on random operands of (a, b, base, out) dtypes and check it."""
    torch.manual_seed(m * 31 + k * 7 + n)
    ta, tb, ty, to = dtypes
    a, b = draw(m, k, ta, layout[0] == "t", device), draw(k, n, tb, layout[1] == "t", device)
    base = None if ty is None else draw(m, n, ty, layout[2] == "t", device)
    compute = next((t for t in (ta, tb) if t is not F32), F32)
    out = torch.full_like(draw(m, n, to, layout[2] == "t", device), math.nan)
    guarded = torch.full((plan.splits, m, n), math.nan, device=device) if plan.splits > 1 else out
    lora.matmul(a, b, base, scale, guarded, plan=plan, policy=Policy(compute, to))
    out = guarded.double().sum(0).to(to) if plan.splits > 1 else out
    ref = a.to(compute).double() @ b.to(compute).double() * float(scale)
    eager = a.to(compute) @ b.to(compute) * float(scale)
    if base is not None:
        ref, eager = ref + base.double(), eager + base
    check(out, ref, compute, k, eager)
    return out


def patterns() -> torch.Tensor:
    """fp32 values: ties of both 16-bit types, both sides of overflow, subnormals, NaN, any bits."""
    torch.manual_seed(0)
    whole = torch.randint(-(2**31), 2**31 - 1, (3000,), dtype=torch.int64)
    ties = (whole & ~0xFFFF) | 0x8000
    halves = (torch.randn(500).half().float().view(torch.int32).long() & ~0xFFF) | 0x1000
    near = torch.tensor([0x7F7F7FFF, 0x7F7F8000, 0x477FEFFF, 0x477FF000, 1, 0x8000, 0x18000])
    bits = torch.cat((whole, ties, ties + 1, ties - 1, halves, near, torch.arange(0, 2**19, 997)))
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 65519.99, 65520.0])
    return torch.cat((bits.to(torch.int32).view(F32), special, special.new_full((3,), 2.0**-25)))


@pytest.mark.parametrize(("source", "target"), [(F32, BF16), (F32, F16), (BF16, F32), (BF16, F16),
                                                (F16, BF16), (F16, F32)])  # fmt: skip
def test_conversions_round_to_nearest_even(source, target):
    x, n = patterns().to(source), patterns().numel()
    out, expected = torch.empty(x.shape, dtype=target), x.to(target)
    _convert((1,), x, out, n, BLOCK=triton.next_power_of_2(n))
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.nan_to_num().signbit(), expected.nan_to_num().signbit())


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("op", ["add", "mul", "fma", "double"])
def test_arithmetic_rounds_once(dtype, op):
    torch.manual_seed(1)
    x, y = (torch.randn(4096) * 10).to(dtype), torch.randn(4096).to(dtype)
    out = torch.empty_like(x)
    _arithmetic((1,), x, y, out, OP=op, BLOCK=4096)
    u, v = x.double(), y.double()
    exact = {"add": u + v, "mul": u * v, "fma": u * v + v, "double": 2 * u}[op]
    assert torch.equal(out, exact.to(dtype))


def test_reductions_of_library_and_tensors():
    x = torch.randn(8, 64).to(BF16)
    out = torch.empty(8)
    _row_sums((1,), x, out, M=8, N=64)
    torch.testing.assert_close(out, x.float().sum(1) + x.float().amax(1))


MIXES = [
    (BF16, BF16, None, BF16), (F16, F16, F16, F16), (F32, F32, None, F32), (F32, F32, F32, F32),
    (BF16, F32, BF16, F32), (F32, F16, F32, F16), (BF16, BF16, F32, F32), (F16, F16, None, F32),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtypes", MIXES, ids=str)
def test_dtype_mixes(dtypes, device):
    product(37, 67, 29, Plan(32, 16, 32), dtypes=dtypes, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["nnn", "tnn", "ntn", "ttn", "nnt", "ttt"])
@pytest.mark.parametrize("shape", [(64, 64, 32), (53, 41, 19)])
def test_layouts(shape, layout, device):
    product(*shape, Plan(64, 16, 32), dtypes=(BF16, BF16, F32, BF16), layout=layout, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 130, 3), (97, 1, 101), (33, 3, 16), (5, 16, 1),
                                   (16, 4, 48)])  # fmt: skip
def test_small_and_ragged_sizes(shape, dtype, device):
    product(*shape, Plan(16, 32, 16), dtypes=(dtype, dtype, dtype, dtype), device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_scale_is_a_number_or_a_device_tensor(device):
    run = partial(product, 32, 40, 32, Plan(32, 32, 32), device=device)
    assert torch.equal(run(scale=1 / 3), run(scale=torch.tensor(1 / 3, device=device)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "splits"), [(256, 2), (250, 4), (70, 8), (1300, 2)])
def test_splits_are_scaled_partial_sums(k, splits, device):
    product(32, k, 16, Plan(32, 16, 16, splits=splits), dtypes=(BF16, F32, None, F32),
            layout="tnn", device=device)  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_integers_are_exact_and_runs_repeat(dtype, device):
    # The sums, about 2500, need more bits than either type has: they are accumulated in fp32.
    torch.manual_seed(3)
    a, b = (torch.randint(0, 4, size, device=device).to(dtype) for size in ((33, 1100), (1100, 17)))
    first, second = (torch.empty(33, 17, device=device) for _ in range(2))
    for out in (first, second):
        lora.matmul(a, b, None, 1.0, out, plan=Plan(16, 16, 64), policy=Policy(dtype, F32))
    assert torch.equal(first.double(), a.double() @ b.double())
    assert torch.equal(first, second)


def test_second_level_of_sums_is_real(monkeypatch):
    k = 4096
    torch.manual_seed(2)
    a, b = torch.rand(16, k), torch.rand(k, 16)
    ref = a.double() @ b.double()
    errors = {}
    for chunk in (512, k):
        monkeypatch.setattr(lora, "CHUNK", chunk)
        out = torch.empty(16, 16)
        lora.matmul(a, b, None, 1.0, out, plan=Plan(16, 16, 16), policy=Policy(F32, F32))
        errors[chunk] = rms(out.double() - ref)
    assert errors[512] < errors[k] / 2


def test_threads_interpret_at_once():
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda m: product(m, 70, 16, Plan(16, 16, 32)), range(20, 29)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_interprets():
    # Nothing but launches on either side: torch's own locks and threads do not survive a fork.
    a, b = torch.randint(-3, 4, (64, 64)).to(BF16), torch.randint(-3, 4, (64, 16)).to(BF16)
    expected = (a.double() @ b.double()).to(BF16)
    theirs, ours = torch.zeros_like(expected), torch.zeros_like(expected)

    def launch(out: torch.Tensor) -> None:
        lora.matmul(a, b, None, 1.0, out, plan=Plan(16, 16, 16), policy=Policy(BF16, BF16))

    busy = threading.Thread(target=launch, args=(theirs,))
    busy.start()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        launch(ours)
        os._exit(0 if ours.tolist() == expected.tolist() else 1)
    busy.join()
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(theirs, expected)


def test_whatever_triton_interpret_says():
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import test_triton_backend as t;"
        "t.product(33, 40, 20, t.Plan(16, 16, 16)); t.test_reductions_of_library_and_tensors();"
        "assert type(t._convert.jit).__name__ == 'JITFunction'"
    )
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code, str(Path(__file__).parent)], env=env,
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(("fn", "feature"), [(_asm, "inline_asm"), (_libdevice, "libdevice.tanh")])
def test_missing_feature_names_kernel_and_line(fn, feature):
    before = tl.load
    with pytest.raises(KernelBuildError, match=rf"triton kernel {fn.name}: line \d+.*{feature}"):
        fn((1,), torch.ones(1))
    assert tl.load is before


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ValueError("no such op"), KernelBuildError), (torch.cuda.OutOfMemoryError("x"), None),
     (RuntimeError("Triton Error [CUDA]: an illegal memory access"), None)],
)  # fmt: skip
def test_errors_of_a_compiled_launch(raised, expected, monkeypatch):
    def run(*_, **__):
        raise raised

    broken = Kernel(_convert.jit.fn)
    monkeypatch.setattr(broken.jit, "run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    with pytest.raises(expected or type(raised)) as caught:
        broken((1,), SimpleNamespace(get_device=lambda: 0))
    if expected is not None:
        assert str(caught.value) == "triton kernel _convert: ValueError: no such op"
    assert raised in (caught.value, caught.value.__cause__)


def test_probe_and_limits():
    assert probe(torch.device("cpu")) is None
    assert "meta" in probe(torch.device("meta"))
    assert limits("lora_apply", {}, Policy(BF16, BF16), torch.device("cpu")) is None


TL = {BF16: ("bf16", tl.bfloat16), F16: ("fp16", tl.float16), F32: ("fp32", tl.float32)}
BUILDS = {  # name: (a, b, base, out, compute, precision, tile, layout, one step, warps)
    "h": (BF16, BF16, None, BF16, BF16, "tf32", (128, 16, 64), "nt", False, 4),
    "h, fp32 factor": (BF16, F32, None, BF16, BF16, "tf32", (128, 16, 64), "nt", False, 4),
    "h, fp32": (F32, F32, None, F32, F32, "tf32x3", (128, 16, 32), "nt", False, 4),
    "y": (BF16, BF16, BF16, BF16, BF16, "tf32", (128, 128, 16), "nt", True, 8),
    "y, rank 1": (F32, F32, F32, F32, F32, "ieee", (64, 64, 16), "nt", True, 4),
    "d_down": (F16, F16, None, F32, F16, "tf32", (128, 16, 64), "tn", False, 4),
    "q, rank 8": (BF16, BF16, None, BF16, BF16, "tf32", (64, 16, 128), "nn", False, 4),
}


def compile_only(name: str, capability: int) -> dict:
    """Build one case as a launch on aligned tensors would; registers, and what the code holds."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    jit = lora._matmul.jit
    a, b, base, out, compute, precision, tile, layout, one_step, warps = BUILDS[name]
    unit = {"stride_am" if layout[0] == "t" else "stride_ak", "stride_yn", "stride_on",
            "stride_bk" if layout[1] == "t" else "stride_bn"}  # fmt: skip
    constants = dict.fromkeys(unit, 1)
    constants |= dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), tile, strict=True))
    short = 8 if "rank 8" in name else 16
    constants |= {"EVEN_M": True, "EVEN_N": short == 16, "EVEN_K": True, "ONE_STEP": one_step,
                  "FLUSH": 0 if one_step else 512, "COMPUTE": TL[compute][1],
                  "PRECISION": precision, "OF_N": short, "OF_OUT": short,
                  "OF_B": 1 if layout[1] == "t" else short}  # fmt: skip
    pointers = {"a": a, "b": b, "base": base, "out": out}
    signature = {}
    for arg in jit.arg_names:
        dtype = pointers.get(arg)
        signature[arg] = "*" + TL[dtype][0] if dtype else "fp32" if arg == "scale" else "i32"
        if arg in constants or (arg == "base" and base is None):
            signature[arg] = "constexpr"
            constants.setdefault(arg, None)
    attrs = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(jit.arg_names)
             if signature[arg][0] in "*i"
             and (short == 16 or arg not in ("N", "stride_bk", "stride_om"))}  # fmt: skip
    places = {(jit.arg_names.index(arg),): value for arg, value in constants.items()}
    source = ASTSource(fn=jit, signature=signature, constexprs=places, attrs=attrs)
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32),
                           options={"num_warps": warps, "num_stages": 3})  # fmt: skip
    cubin = Path(tempfile.mkdtemp()) / "k.cubin"
    cubin.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True)
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout))
    ptx, ttir = built.asm["ptx"], built.asm["ttir"]
    return {
        "registers": int(found["REG"]), "spills": int(found["STACK"]) + int(found["LOCAL"]),
        "shared": built.metadata.shared, "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"), "async copies": ptx.count("cp.async.cg"),
        "wide": len(re.findall(r"(?:ld|st)\.global\S*\.v4", ptx)),
        "narrow": len(re.findall(r"(?:ld|st)\.global\S*\.b(?:8|16)\b", ptx)),
        "i64 offsets": len(re.findall(r"tt\.addptr .*xi64>", ttir)),
        "i32 offsets": len(re.findall(r"tt\.addptr .*i32>? *$", ttir, re.M)),
        "flush": "scf.if" in ttir,
    }  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_without_a_gpu(capability):
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}
        env["PYTHONPATH"] = os.pathsep.join(sys.path)
        run = subprocess.run([sys.executable, __file__, str(capability)], env=env,
                             capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr
    for line in run.stdout.splitlines():
        print(line)
        report = json.loads(line)
        assert report["spills"] == report["narrow"] == report["i32 offsets"] == 0
        assert min(report["wide"], report["i64 offsets"] - 2) > 0
        assert report["name"] == "y, rank 1" or report["wgmma" if capability == 90 else "mma"] > 0
        assert report["name"][0] == "y" or report["async copies"] * report["flush"] > 0


if __name__ == "__main__":
    for case in BUILDS if sys.argv[1] == "90" else ("h", "y", "d_down", "q, rank 8"):
        print(json.dumps({"name": case, **compile_only(case, int(sys.argv[1]))}), flush=True)
