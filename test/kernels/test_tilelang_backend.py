"""The TileLang backend: its C target, its kernel cache, and the CUDA it generates."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("tilelang")

from lycoris.backends.tilelang import common, host_c, lora

from lycoris.backends import tilelang as backend
from lycoris.kernels.errors import KernelBuildError
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = torch.device("cpu")
REASON = backend.probe(CPU)
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no C target: {REASON}")
PLAN = Plan(32, 32, 32)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """A cache of this module's own, so that a cold run is cold."""
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LYCORIS_KERNEL_CACHE_DIR", str(folder))
        patch.setattr(common, "_kernels", {})
        yield folder / "tilelang"


def run(a, b, *, scale=1.0, base=None, out=None, compute=None, plan=PLAN):
    """``matmul`` into a NaN-filled output, and its fp64 reference."""
    compute = compute or a.dtype
    if out is None:
        shape = (a.shape[0], b.shape[1])
        out = torch.empty((plan.splits, *shape) if plan.splits > 1 else shape)
    out.fill_(float("nan"))
    lora.matmul(a, b, base, scale, out, plan=plan, policy=Policy(compute, out.dtype))
    exact = a.to(compute).double() @ b.to(compute).double() * float(scale)
    return out, exact if base is None else exact + base.double()


def close(out, exact, ulps=1.0):
    """Whether ``out`` is within ``ulps`` of ``exact`` at its largest element."""
    eps = torch.finfo(out.dtype).eps
    return (out.double() - exact).abs().max() <= ulps * eps * exact.abs().max()


# --- rounding -----------------------------------------------------------------------------------


def hard_values(dtype):
    """fp32 values around every kind of boundary of a 16-bit ``dtype``."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    every = bits.view(dtype).float()
    every = every[every.isfinite()].sort().values.unique()
    ties = ((every[1:].double() + every[:-1].double()) / 2).float()  # exact: one more bit
    up = torch.tensor(float("inf"))
    overflow = torch.finfo(dtype).max * torch.tensor([1.0001, 1.001, 1.0019, 1.003, 1.01])
    special = torch.tensor([0.0, -0.0, up, -up, float("nan"), 1e-45, -1e-45])
    near = [ties, ties.nextafter(up), ties.nextafter(-up)]
    return torch.cat([every, *near, overflow, -overflow, special])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_stores_round_to_nearest_even(dtype):
    # The base carries the value and the product is -0, which leaves even a zero's sign.
    values = hard_values(dtype)
    base = values[: len(values) // 32 * 32].view(-1, 32)
    a, b = -torch.zeros(base.shape[0], 1, dtype=dtype), torch.zeros(1, 32, dtype=dtype)
    out, _ = run(a, b, base=base, out=torch.empty(base.shape, dtype=dtype))
    expected = base.to(dtype)
    same = (out == expected) | (out.isnan() & expected.isnan())
    assert same.all(), f"{base[~same][:5]} -> {out[~same][:5]}, not {expected[~same][:5]}"


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_every_16_bit_value_is_read_exactly(dtype):
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    b = values[values.isfinite()].view(1, -1)
    out, _ = run(torch.ones(1, 1, dtype=dtype), b)
    assert torch.equal(out, b.float())


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_products_accumulate_in_fp32(dtype):
    # 1 + 2^-12 * 64: a 16-bit accumulator would stay at 1.
    a = torch.full((1, 65), 2.0**-6, dtype=dtype)
    b = torch.full((65, 1), 2.0**-6, dtype=dtype)
    a[0, 0] = b[0, 0] = 1
    out, exact = run(a, b)
    assert out.item() == exact.item() == 1 + 64 * 2.0**-12


def test_fp32_operands_are_rounded_to_the_compute_dtype_first():
    a, b = torch.randn(5, 40), torch.randn(40, 7, dtype=BF16)
    out, exact = run(a, b, compute=BF16)
    assert close(out, exact)
    assert not close(out, a.double() @ b.double(), 100)


# --- the product --------------------------------------------------------------------------------

MIXES = [  # a, b, base, out, compute
    (BF16, BF16, BF16, BF16, BF16),
    (F16, F32, F32, F16, F16),
    (F32, BF16, None, F32, BF16),
    (F32, F32, F32, F32, F32),
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 17, 70), (3, 131, 16)], ids=str)
def test_matches_fp64(mix, shape):
    (a_dtype, b_dtype, base_dtype, out_dtype, compute), (m, n, k) = mix, shape
    a, b = torch.randn(m, k).to(a_dtype), torch.randn(k, n).to(b_dtype)
    base = None if base_dtype is None else torch.randn(m, n).to(base_dtype)
    out = torch.empty(m, n, dtype=out_dtype)
    result, exact = run(a, b, scale=-1.7, base=base, out=out, compute=compute)
    assert close(result, exact, 8 if out_dtype == F32 else 1)


@pytest.mark.parametrize("layout", ["a", "b", "out"])
def test_transposed_views(layout):
    m, n, k = 37, 19, 53
    a = torch.randn(k, m).t() if "a" in layout else torch.randn(m, k)
    b = torch.randn(n, k).t() if "b" in layout else torch.randn(k, n)
    transposed = layout == "out"
    out = torch.empty(n, m).t() if transposed else None
    base = torch.randn(n, m).t() if transposed else None
    assert close(*run(a, b, out=out, base=base), 8)


def test_sizes_of_one_may_have_odd_strides():
    a = torch.randn(9, 4)[:, :1].contiguous().as_strided((9, 1), (1, 77))
    b = torch.randn(12).as_strided((1, 12), (99, 1))
    assert close(*run(a, b), 8)


def test_the_scale_may_be_a_tensor():
    a, b = torch.randn(8, 24), torch.randn(24, 8)
    by_number, exact = run(a, b, scale=0.3)
    by_tensor, _ = run(a, b, scale=torch.tensor(0.3))
    assert close(by_number, exact, 8)
    assert torch.equal(by_number, by_tensor)


@pytest.mark.parametrize("k", [5, 64, 1000])
def test_splits_are_shares_of_whole_blocks(k):
    a, b = torch.randn(10, k), torch.randn(k, 6)
    out, exact = run(a, b, scale=2.0, plan=Plan(32, 32, 32, splits=3))
    assert close(out.sum(0), exact, 8)
    share = 32 * math.ceil(math.ceil(k / 32) / 3)
    for i, part in enumerate(out):
        rows = slice(i * share, (i + 1) * share)
        assert torch.allclose(part, 2 * a[:, rows] @ b[rows], atol=1e-4)


def test_long_reductions_add_in_a_second_level():
    # In one chain, 2^24 swallows every later 1; per block the ones add up first.
    a, b = torch.ones(1, 4 * CHUNK), torch.ones(4 * CHUNK, 1)
    a[0, 0] = 2.0**24
    out, exact = run(a, b)
    assert exact.item() - out.item() <= PLAN.block_k
    assert torch.equal(out, run(a, b)[0])


def test_infinity_and_subnormals_survive_fp32():
    a = torch.tensor([[float("inf")], [1e-40], [3.0e38]])
    b = torch.tensor([[1.0, -2.0]])
    out, _ = run(a, b)
    assert torch.equal(out, a * b)


def test_layouts_that_are_not_dense_are_refused():
    a = torch.randn(8, 16)[:, ::2]
    with pytest.raises(ValueError, match="isn't dense"):
        run(a, torch.randn(8, 4))


# --- builds and their cache ---------------------------------------------------------------------


def test_two_threads_build_one_kernel(monkeypatch):
    monkeypatch.setattr(common, "_kernels", {})
    build = Mock(side_effect=common._build)
    monkeypatch.setattr(common, "_build", build)
    a, b = torch.randn(8, 24), torch.randn(24, 8)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(a, b), range(4)))
    build.assert_called_once()
    assert all(close(*result, 8) for result in results)


def test_a_fork_builds_although_the_lock_was_held(monkeypatch):
    monkeypatch.setattr(common, "_kernels", {})
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    with common._lock:
        pid = os.fork()
        if pid == 0:  # loads what other tests have built, or builds it
            try:
                os._exit(0 if (run(a, b)[0] == 3).all() else 1)
            finally:
                os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_second_process_neither_lowers_nor_imports_tilelang(cache):
    run(torch.randn(8, 24), torch.randn(24, 8))
    code = """
import json, sys, time, torch
from lycoris.backends.tilelang.lora import matmul
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
out = torch.empty(2, 2)
start = time.perf_counter()
matmul(torch.ones(2, 3), torch.ones(3, 2), None, 1.0, out, plan=Plan(32, 32, 32),
       policy=Policy(torch.float32, torch.float32))
spent = time.perf_counter() - start
print(json.dumps([out.tolist(), spent, "tilelang" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result, spent, imported = json.loads(done.stdout)
    assert result == [[3, 3], [3, 3]]
    assert spent < 1
    assert not imported


def test_a_damaged_cache_file_is_rebuilt(cache, monkeypatch, tmp_path):
    a, b = torch.randn(8, 24), torch.randn(24, 8)
    run(a, b)
    damaged = shutil.copytree(cache, tmp_path / "tilelang")
    for file in damaged.glob("*.so"):
        data = file.read_bytes()
        for bad in (b"", data[:3000], bytes([data[0] ^ 1]) + data[1:]):
            file.write_bytes(bad)
            assert not common._intact(file)
    monkeypatch.setattr(common, "_kernels", {})
    monkeypatch.setenv("LYCORIS_KERNEL_CACHE_DIR", str(tmp_path))
    assert close(*run(a, b), 8)
    assert sum(map(common._intact, damaged.iterdir())) == 1  # and no scratch folder is left


def test_errors_while_building_name_the_kernel(monkeypatch):
    def broken_kernel(size):
        raise OSError("disk on fire")

    with pytest.raises(KernelBuildError, match=r"broken_kernel\(7,\) for cpu: disk on fire"):
        common.build(broken_kernel, (7,), CPU)
    monkeypatch.setattr(common, "_build_cpu", Mock(side_effect=torch.cuda.OutOfMemoryError))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        common.build(broken_kernel, (8,), CPU)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelBuildError, match="needs g"):
        host_c.compile_source("", Path("unused.so"))


def test_features_the_c_target_lacks_are_named():
    T = common.load_tilelang().language

    @T.prim_func
    def running_sum(x: T.Tensor((32, 32), "float32")):
        with T.Kernel(1, threads=32):
            tile = T.alloc_shared((32, 32), "float32")
            T.copy(x, tile)
            T.cumsum(tile, dim=0)
            T.copy(tile, x)

    with pytest.raises(KernelBuildError, match=r"running_sum: .* can't run .*cumsum"):
        host_c.lower(running_sum)


# --- what the backend serves --------------------------------------------------------------------


def test_probe_gives_reasons(monkeypatch):
    assert backend.probe(torch.device("meta")) == "no kernels for meta"
    monkeypatch.setattr(backend, "version", lambda _: "0.2.0")
    assert "0.2.0" in backend.probe(CPU)
    monkeypatch.setattr(backend, "version", lambda _: backend.TESTED)
    monkeypatch.setenv("PATH", "")
    assert "g++" in backend.probe(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert "7.5" in backend.probe(torch.device("cuda", 0))


def test_limits_give_reasons():
    policy, gpu = Policy(BF16, BF16), torch.device("cuda", 0)
    assert backend.limits("lora_apply", {"T": 2**40}, policy, CPU) is None
    assert backend.limits("lora_apply", {"T": 8192}, policy, gpu) is None
    assert "T = 2147483648" in backend.limits("lora_apply", {"T": 2**31}, policy, gpu)
    policy = Policy(torch.float64, torch.float64)
    assert backend.limits("lora_apply", {}, policy, CPU) == "no fp64 kernels"


# --- the CUDA it generates, without a GPU -------------------------------------------------------

HALVES, SINGLES = (BF16, BF16, None, BF16, BF16), (F32, F32, None, F32, F32)
COMPILED = {  # architecture, then the parameters of lora.matmul_kernel
    "h": ("sm_90a", None, 16, 4096, (64, 16, 64), HALVES, (False, True)),
    "d_down": ("sm_80", 4096, 16, None, (64, 16, 64), (*HALVES[:3], F32, BF16), (True, False)),
    "y": ("sm_80", None, 4096, 16, (128, 128, 16), (BF16,) * 5, (False, True)),
    "h in fp32": ("sm_90a", None, 16, 4096, (128, 16, 32), SINGLES, (False, True)),
}
NVCC = ["nvcc", "-std=c++17", "-cubin", "-Xptxas=-v", "-w", "--keep"]


def compile_only():
    """Compile each of COMPILED to machine code, and print what it uses as a line of JSON."""
    tilelang = common.load_tilelang()
    from tilelang import tvm

    root = Path(tilelang.__file__).parent
    for name, (arch, *shape) in COMPILED.items():
        splits = 8 if name == "d_down" else 1
        func = lora.matmul_kernel(*shape, False, splits, False, 128, 2, "int32")
        target = {"kind": "cuda", "arch": arch}
        passes = tilelang.transform.PassContext(opt_level=3, config=common._PASSES)
        with passes, tvm.target.Target(target):
            lowered = tilelang.lower(func, target=target)
        (device,) = lowered.device_mod.functions.values()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "kernel.cu"
            source.write_text(lowered.kernel_source)
            include = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
            command = [*NVCC, f"-arch={arch}", *include, str(source)]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            ptx = source.with_suffix(".ptx").read_text()
        report = {
            "name": name,
            "registers": int(re.search(r"Used (\d+) registers", done.stderr)[1]),
            "spilled": int(re.search(r"(\d+) bytes spill stores", done.stderr)[1]),
            "shared": int(device.attrs["dyn_shared_memory_buf"]),
            "mma": len(re.findall(r"mma\.sync", ptx)),
            "async": len(re.findall(r"cp\.async\.c[ag]", ptx)),
            "async_16": len(re.findall(r"cp\.async\.c[ag]\S+ [^;]*, 16[,;]", ptx)),
            "vector_stores": len(re.findall(r"st\.global\.v[24]", ptx)),
            "scalar_loads": len(re.findall(r"ld\.global(?:\.nc)?\.[bfu]\d+", ptx)),
        }
        print(json.dumps(report))


@pytest.mark.skipif(backend._no_nvcc() is not None, reason="no nvcc")
def test_cuda_kernels_compile_without_spills_and_load_vectors():
    command, env = [sys.executable, __file__], os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert [report["name"] for report in reports] == list(COMPILED)
    for report in reports:
        assert report["spilled"] == 0
        assert report["registers"] <= 168  # three blocks of 128 threads a multiprocessor
        assert report["shared"] <= 64 * 1024
        # Both operands arrive asynchronously, 16 bytes at a time; results leave in vectors.
        assert report["async_16"] == report["async"] > 0
        assert report["scalar_loads"] == 0
        assert report["vector_stores"] > 0
        assert (report["mma"] == 0) == ("fp32" in report["name"])


def test_offsets_into_large_tensors_are_64_bit():
    tilelang = common.load_tilelang()
    from tilelang import tvm

    def source(m):
        shape = (m, 4096, 16, (64, 64, 16), (BF16,) * 5, (False, True))
        func = lora.matmul_kernel(*shape, False, 1, False, 128, 3, "int32")
        target = {"kind": "cuda", "arch": "sm_80"}
        with tilelang.transform.PassContext(config=common._PASSES), tvm.target.Target(target):
            return tilelang.lower(func, target=target).kernel_source

    row = "((int)blockIdx.x)) >> (int64_t)6) * (int64_t)262144"  # 64 rows of 4096
    for m in (None, 2**20):
        assert source(m).count(row) == 2, m  # base and out


if __name__ == "__main__":
    compile_only()
