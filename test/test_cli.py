"""The CLI: exit statuses, JSON shapes, messages, and that nothing broken breaks it."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import metadata

import pytest
import torch

import lycoris
from lycoris.__main__ import command, main
from lycoris.functional import boft_weight, oft_weight
from lycoris.kernels import explain, registry, report
from lycoris.kernels.spec import SPECS

MATMUL = """
def matmul(a, b, base, scale, out, *, plan, policy):
    result = SCALE * (a.to(policy.compute).float() @ b.to(policy.compute).float())
    out.copy_(result if base is None else base.float() + result)
"""
BACKEND = "def probe(device): return None\ndef limits(op, dims, policy, device): return None\n"


@pytest.fixture
def plug_in(tmp_path, monkeypatch):
    """Installs a distribution whose backend package is made of the given files."""

    def install(name, **files):
        package = tmp_path / f"{name}_backend"
        package.mkdir()
        for file, source in files.items():
            (package / f"{file}.py").write_text(source)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[lycoris.backends]\n{name} = {name}_backend\n")
        monkeypatch.syspath_prepend(tmp_path)
        registry.refresh()

    yield install
    monkeypatch.undo()
    for name in [m for m in sys.modules if m.partition(".")[0].endswith("_backend")]:
        del sys.modules[name]  # the next test may install another of that name
    registry.refresh()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("BACKEND", "BACKEND_LORA_APPLY", "BACKEND_LORA_WEIGHT", "STRICT"):
        monkeypatch.delenv(f"LYCORIS_KERNEL_{name}", raising=False)


def run_json(capsys, *argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# ---------------------------------------------------------------------------------- info


def test_info_lists_versions_devices_backends_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND_LORA_APPLY", "torch")
    found = run_json(capsys, "info")
    assert found["versions"]["torch"] == torch.__version__
    assert found["devices"][0]["device"] == "cpu"
    assert [b["name"] for b in found["backends"]][:3] == ["triton", "tilelang", "torch"]
    assert found["backends"][2]["cpu"] == {"available": True, "reason": None}
    variables = {v["name"]: v["value"] for v in found["environment"]}
    assert variables["LYCORIS_KERNEL_BACKEND_LORA_APPLY"] == "torch"
    assert variables["LYCORIS_KERNEL_STRICT"] == "0"


def test_info_lists_broken_plug_ins_with_their_errors(capsys, plug_in):
    plug_in("crash", __init__="raise RuntimeError('bad wheel')")
    plug_in("prober", __init__=BACKEND.replace("return None", "return 1 / 0", 1))
    backends = {b["name"]: b["cpu"] for b in run_json(capsys, "info")["backends"]}
    assert backends["crash"]["reason"] == "import failed: RuntimeError: bad wheel"
    assert "ZeroDivisionError" in backends["prober"]["reason"]
    assert backends["torch"]["available"]
    assert main(["info"]) == 0
    assert "no: import failed: RuntimeError: bad wheel" in capsys.readouterr().out


def test_info_warns_of_another_owner_of_the_import_name(capsys, monkeypatch):
    owners = {"lycoris": ["lycoris-lora", "lycoris_kernels"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    assert main(["info"]) == 0
    assert "'lycoris-lora' also owns the import name" in capsys.readouterr().err
    assert len(run_json(capsys, "info")["warnings"]) == 1


def test_info_does_not_warn_of_this_distribution(monkeypatch):
    monkeypatch.setattr(
        metadata, "packages_distributions", lambda: {"lycoris": ["lycoris-kernels"]}
    )
    assert report.rivals() == []


# ----------------------------------------------------------------------------------- ops


def test_ops_describes_every_op(capsys):
    found = {op["name"]: op for op in run_json(capsys, "ops")}
    assert list(found) == list(SPECS)
    for name, op in found.items():
        assert {"operands", "backends", "bound"} <= op.keys()
        assert [o["name"] for o in op["operands"]] == [o.name for o in SPECS[name].operands]
        assert all(o["shapes"] for o in op["operands"]), name
        assert "torch" in op["backends"]
    up, *_ = found["lora_weight"]["operands"]
    assert up["shapes"] == {"": "(O, r)", "mid": "(O, p)"}
    # Whatever halves LoKr is given, x is x.
    x, *_ = found["lokr_apply"]["operands"]
    assert x["shapes"] == {"": "(..., I)"}
    assert main(["ops"]) == 0
    printed = capsys.readouterr().out
    assert "(q, I) with mid" in printed
    rows = {tuple(re.split(" {2,}", line)) for line in printed.splitlines()}
    assert ("q0", "(r, I)", "mma, no gradient", "the model") in rows
    assert ("rescale (optional)", "(O)", "wide", "the adapter") in rows
    assert "  sizes: n * b = O; b even and at most 256; b * 2^(m-1) divides O\n" in printed


def test_what_is_said_of_a_rotation_is_what_it_does():
    torch.manual_seed(0)
    # A butterfly's first stage of 2-wide blocks takes the rows as they come.
    weight, blocks = torch.randn(8, 3, dtype=torch.float64), torch.randn(4, 2, 2).double()
    q = blocks - blocks.mT
    r = torch.block_diag(*((torch.eye(2) + q) @ torch.linalg.inv(torch.eye(2) - q)))
    assert "R^T W: out[j] = sum_i R[i,j] W[i]" in SPECS["oft_weight"].doc
    torch.testing.assert_close(oft_weight(weight, blocks), r.mT @ weight)
    assert "R W: out[i] = sum_j R[i,j] W[j]" in SPECS["boft_weight"].doc
    torch.testing.assert_close(boft_weight(weight, blocks[None]), r @ weight)


# ------------------------------------------------------------------------------- explain


@pytest.mark.parametrize(
    ("op", "shape", "operands"),
    [
        ("lora_apply", "T=2x8,I=64,O=32,r=4", {"x": [2, 8, 64], "up": [32, 4], "down": [4, 64]}),
        ("lora_weight", "O=32,N=20x3x3,r=4", {"up": [32, 4], "down": [4, 20, 3, 3]}),
        (
            "lora_weight",
            "O=8,p=2,q=3,I=6,k=3x3",
            {"up": [8, 2], "down": [3, 6], "mid": [2, 3, 3, 3]},
        ),
    ],
)
def test_explain(capsys, op, shape, operands):
    found = run_json(capsys, "explain", op, "--shape", shape, "--device", "cpu")
    assert found["operands"] == operands
    assert found["backend"] == "torch"
    assert set(found["others"]) == set(registry.names()) - {"torch"}
    assert found["policy"]["compute"] == "bfloat16"
    assert {launch["phase"] for launch in found["launches"]} == {"forward", "backward"}
    assert all(launch["plan"]["block_m"] for launch in found["launches"])


@pytest.mark.parametrize("op", list(SPECS))
def test_explain_plans_every_case(op):
    spec = SPECS[op]
    for case in spec.cases:
        mix = (torch.bfloat16, torch.float32)
        operands = explain.blanks(spec, case, mix)
        binding = spec.bind(operands, case.attributes)
        policy = report.Policy(torch.bfloat16, torch.float32)
        planned = explain.launches(
            spec, binding, operands, policy, torch.device("cpu"), case.attributes
        )
        # Where a size is 0, no kernel runs.
        assert bool(planned) == (0 not in binding.dims.values()), case.name


def test_explain_names_the_reason_and_the_mixed_policy(capsys, monkeypatch, plug_in):
    plug_in("toy", __init__=BACKEND, lora=MATMUL)
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND_LORA_APPLY", "toy")
    argv = ["explain", "lora_apply", "--shape", "T=8,I=4,O=4,r=2", "--with", "base"]
    assert main([*argv, "--adapter-dtype", "fp32", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "backend: toy (named by LYCORIS_KERNEL_BACKEND_LORA_APPLY)" in out
    assert "not torch: able; toy was named" in out
    assert "products in bfloat16, sums in fp32, output in float32" in out
    assert "base (8, 4)" in out


def test_explain_says_why_a_named_backend_cannot(capsys, plug_in):
    plug_in("small", __init__=BACKEND[:-12] + "return 'small: rank 4 > 2'\n", lora=MATMUL)
    argv = ["explain", "lora_apply", "--shape", "T=8,I=4,O=4,r=4", "--device", "cpu"]
    assert main([*argv, "--backend", "small"]) == 1
    assert "small: rank 4 > 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nope"], "unknown op 'nope'; known: "),
        (["lora_weight", "--shape", "O=3"], "needs the sizes O, r, N; or with mid: O, p, q, k, I"),
        (["lora_weight", "--shape", "O=3;N"], "'O=3;N' is not SYMBOL=SIZE"),
        (["lora_apply", "--shape", "T=1,T=2,I=1,O=1,r=1"], "--shape: T is given twice"),
        (["lora_apply", "--shape", f"T={'9' * 9999},I=1"], "is not SYMBOL=SIZE"),
        (["lora_apply", "--shape", f"T={2**62},I=8,O=8,r=1"], "no tensor has sizes like these"),
        (["lora_apply", "--shape", f"T={2**63},I=8,O=8,r=1"], "no tensor has sizes like these"),
        (["lora_apply", "--shape", "T=1,I=1,O=1,r=1", "--with", "mid"], "optional operands: base"),
        (["lora_apply", "--shape", "T=1,I=1,O=1,r=0"], "expected r to be at least 1"),
        (
            ["boft_apply", "--shape", "T=8,B=1,m=2,n=8,b=8,O=60"],
            "error: --shape: boft_apply: blocks has shape (2, 8, 8, 8) and rotates 8 * 8 channels; "
            "expected 60",
        ),
        (["oft_weight", "--shape", "N=8,n=3x3,s=8,O=24"], "n is one dimension; got n=3x3"),
        (["lora_apply", "--shape", "T=1,I=1,O=1,r=1", "--backend", "x"], "unknown backend 'x'"),
        (
            ["lora_apply", "--shape", "T=1,I=1,O=1,r=1", "--dtype=fp16", "--adapter-dtype=bf16"],
            "float16 and bfloat16 can't meet",
        ),
    ],
)
def test_explain_usage_errors(capsys, argv, message):
    assert main(["explain", *argv]) == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------------------- parity

PARITY = ["parity", "--op", "lora_weight", "--device", "cpu", "--case", "base"]


def test_parity_passes_and_writes_its_rows(capsys, plug_in, tmp_path):
    plug_in("toy", __init__=BACKEND, lora=MATMUL.replace("SCALE", "scale"))
    file = tmp_path / "rows.json"
    assert main([*PARITY, "--backend", "toy", "--dtype", "bf16", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())
    assert {r["case"] for r in rows} == {"base", "tucker base"}
    assert {"op", "backend", "dtypes", "ulp", "bound", "why", "pass"} <= rows[0].keys()
    assert "0 failed" in capsys.readouterr().out


def test_parity_shows_each_op_as_it_is_done(capsys, plug_in, monkeypatch):
    """Interrupted in the second op, a run has shown the first, failures and all."""
    plug_in("faulty", __init__=BACKEND, lora=MATMUL.replace("SCALE", "1.0"))
    check = report.testing.check

    def stopping(op, *args, **options):
        if op == "lora_apply":
            raise KeyboardInterrupt
        return check(op, *args, **options)

    argv = [*PARITY, "--op", "lora_apply", "--backend", "faulty", "--dtype", "fp32"]
    with monkeypatch.context() as patch:
        patch.setattr(report.testing, "check", stopping)
        with pytest.raises(KeyboardInterrupt):
            main(argv)
    shown = capsys.readouterr().out
    assert shown.startswith("op           backend")
    assert "FAIL lora_weight, faulty, base, fp32, out:" in shown
    assert "lora_apply" not in shown
    assert main(argv) == 1
    whole = capsys.readouterr().out
    assert whole.startswith(shown)
    summary = whole.partition("\nall of them:\n")[2].splitlines()
    assert [line.split()[0] for line in summary[2:4]] == ["lora_apply", "lora_weight"]
    assert summary[-1].endswith(f" tensors, {whole.count('FAIL') // 2} failed")


@pytest.mark.parametrize(("scale", "why"), [("1.0", "grad up:"), ("1 / 0", "ZeroDivisionError")])
def test_parity_fails_on_a_fault(capsys, plug_in, scale, why):
    plug_in("faulty", __init__=BACKEND, lora=MATMUL.replace("SCALE", scale))
    assert main([*PARITY, "--backend", "faulty", "--dtype", "fp32"]) == 1
    out = capsys.readouterr().out
    assert "FAIL lora_weight, faulty, base, fp32" in out
    assert why in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--op", "nope"], "unknown op 'nope'; known: "),
        (["--backend", "nope"], "unknown backend 'nope'; known: triton, tilelang, torch"),
        (["--backend", "crash"], "crash: import failed: RuntimeError: bad wheel"),
        (["--dtype", "int8"], "unknown dtype 'int8'; known: fp16, bf16"),
        (["--case", "no such case"], "nothing to run"),
        (["--seed", str(2**64)], "--seed: expected a number of at most 63 bits"),
    ],
)
def test_parity_usage_errors(capsys, plug_in, argv, message):
    plug_in("crash", __init__="raise RuntimeError('bad wheel')")
    assert main(["parity", *argv, "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("started", "shown"),
    [("/x/lycoris/__main__.py", "python -m lycoris"), ("/x/lycoris-kernels", "lycoris-kernels")],
)
def test_the_version_and_the_command_it_was_started_by(capsys, monkeypatch, started, shown):
    monkeypatch.setattr(sys, "argv", [started])
    for option, expected in (
        ("--version", f"lycoris-kernels {lycoris.__version__}\n"),
        ("--help", f"usage: {shown} [-h] [--version] COMMAND ...\n"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([option])
        assert stopped.value.code == 0
        assert capsys.readouterr().out.startswith(expected)


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_info_warns_of_variables_nobody_reads(monkeypatch, capsys):
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND_LORA_APLY", "triton")
    monkeypatch.setenv("LYCORIS_KERNEL_STRICT", "yes")
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND", "trition")
    monkeypatch.setenv("LYCORIS_KERNEL_BACKEND_LORA_APPLY", "torch")
    assert main(["info"]) == 0
    warned = capsys.readouterr().err
    assert "LYCORIS_KERNEL_BACKEND names the unknown backend 'trition'" in warned
    assert warned.count("names the unknown backend") == 1
    assert "no variable of that name is read: LYCORIS_KERNEL_BACKEND_LORA_APLY" in warned
    assert "LYCORIS_KERNEL_STRICT is 'yes'; expected 0 or 1" in warned


def test_a_file_that_can_not_be_written_is_known_before_the_run(capsys, tmp_path):
    for target, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.json", "no folder")):
        assert main([*PARITY, "--backend", "torch", "--json", str(target)]) == 2
        assert f"--json: {why}" in capsys.readouterr().err.replace(f"{tmp_path} ", "")
    sealed = tmp_path / "sealed"
    sealed.mkdir(mode=0o500)
    if not os.access(sealed, os.W_OK):  # root may write anywhere
        with pytest.raises(report.UsageError, match=r"--json: .*x\.json can't be written"):
            report.check_target("--json", sealed / "x.json")
    report.check_target("--json", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


def test_results_on_a_full_disk_have_been_shown(capsys):
    assert main([*PARITY, "--backend", "torch", "--json", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert "63 tensors, 39 failed" in out
    assert "error: --json: /dev/full can't be written: No space left on device" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_an_output_that_takes_no_more(capsys, monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["lycoris", "ops"])
        assert command() == 2
    assert "error: [Errno 28] No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["closed", "nobody reads"])
def test_an_output_that_nobody_reads(monkeypatch, kind):
    read, write = os.pipe()
    os.close(read)
    broken = open(write, "w")  # noqa: SIM115 (it is closed below, after the program has it)
    monkeypatch.setattr(sys, "stdout", None if kind == "closed" else broken)
    monkeypatch.setattr(sys, "argv", ["lycoris", "ops"])
    assert command() == 0
    broken.close()
