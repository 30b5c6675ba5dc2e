"""README.md and docs/ say what is so: their code runs, and their commands and links hold."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from lycoris import functional
from lycoris.kernels import registry

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("C*.md")])
ADDING = {"adding-an-op.md", "adding-a-backend.md"}
_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(file named on the fence or "", code) of every block in a language."""
    return [
        (extra.strip().removeprefix("file="), code)
        for found, extra, code in _FENCE.findall(page)
        if found == language
    ]


def run(page: str, folder: Path, **environment: str) -> str:
    """Writes a page's named files, then runs its other Python blocks as one script."""
    script = ""
    for name, code in [*blocks(page, "python"), *blocks(page, "toml")]:
        if name:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(code)
        else:
            script += code + "\n"
    (folder / "page.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def install(folder: Path) -> None:
    """Does what pip would with the page's pyproject.toml, as far as entry points go."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.mark.parametrize("backend", ["torch", "triton", "tilelang"])
def test_the_example_runs_on(backend: str, tmp_path: Path) -> None:
    reason = registry.availability(backend, torch.device("cpu"))
    if reason:
        pytest.skip(reason)  # says what to install
    asks = """
```python
from lycoris.kernels.config import backend_override

print("backend asked for:", backend_override("lora_apply"))
```
"""
    settings = {"LYCORIS_KERNEL_BACKEND": backend, "LYCORIS_KERNEL_STRICT": "1"}
    printed = run(README + asks, tmp_path, **settings)
    losses = [float(value) for value in re.findall(r"loss (\S+)", printed)]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert f"backend asked for: {backend}" in printed


@pytest.mark.parametrize("name", ["adding-an-op", "training"])
def test_the_snippets_run(name: str, tmp_path: Path) -> None:
    assert run((ROOT / f"docs/{name}.md").read_text(), tmp_path)


def test_the_scores_are_as_numerics_says(tmp_path: Path) -> None:
    reason = registry.availability("triton", torch.device("cpu"))
    if reason:
        pytest.skip(reason)  # says what to install
    printed = run((ROOT / "docs/numerics.md").read_text(), tmp_path).splitlines()
    passed = [line.endswith("passed") for line in printed]
    assert [line.split()[0] for line in printed] == ["triton"] * 4 + ["torch"] * 4
    assert passed == [True] * 4 + [False] * 4


def test_the_largest_error_is_as_numerics_says() -> None:
    key = ("lora_apply", "8192x4096x4096 r=16", "bf16", ["base"])
    rows = recorded("lora-triton")
    (row,) = (r for r in rows if (r["op"], r["case"], r["dtypes"], r["present"]) == key)
    (down,) = (t for t in row["parity"] if t["tensor"] == "grad down")
    said = " ".join((ROOT / "docs/numerics.md").read_text().split())
    assert "{ulp:.2f} ULP at worst where eager has {eager_ulp:.2f}".format(**down) in said
    assert "an rms of {rms:.2f} against {eager_rms:.2f}".format(**down) in said
    assert down["pass"]
    assert down["ulp"] > down["eager_ulp"]


def test_the_toy_backend_is_found_and_passes(tmp_path: Path) -> None:
    page = (ROOT / "docs/adding-a-backend.md").read_text()
    for name, code in blocks(page, "toml"):
        (tmp_path / name).write_text(code)
    install(tmp_path)
    run(page, tmp_path)
    ((_, command),) = blocks(page, "bash")
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], "--dtype", "bf16"],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_snippet_is_run_by_a_test() -> None:
    run_here = {"README.md", *(f"{n}.md" for n in ("numerics", "training")), *ADDING}
    assert {p.name for p in PAGES if blocks(p.read_text(), "python")} == run_here


def test_ci_runs_the_readme_commands_verbatim() -> None:
    commands = [code.splitlines() for _, code in blocks(README, "bash") if ".[dev" in code]
    quick, tests = commands
    assert quick[-1].endswith("bench/kernels/quick.py")
    assert "pytest" in tests[-1]
    lines = [line.strip() for line in (ROOT / ".ci/run").read_text().splitlines()]
    assert "\n".join(tests) in "\n".join(lines)
    assert [line for line in lines if line.startswith(quick[-1])]


COMMANDS = [
    line
    for _, code in blocks(README, "bash")
    for line in code.splitlines()
    if line.startswith("python ")
]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_are_understood(command: str) -> None:
    _, *arguments = shlex.split(command, comments=True)
    if any(word in command for word in ("parity", "quick", "bench", "compare")):
        arguments.append("--help")  # stops before the work, after the arguments before it
    # pytest-benchmark would take a command of pytest-xdist's worker for one of its own.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_generated_pages_are_up_to_date() -> None:
    for name, text in runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]().items():
        assert (ROOT / "docs" / name).read_text() == text, "run python docs/generate.py"
    described = re.findall(r"^## (\w+)$", (ROOT / "docs/ops.md").read_text(), re.MULTILINE)
    assert sorted(described) == sorted(set(functional.__all__) - {"OPS"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    # A path in code style, from the root, without a placeholder in it.
    folders = r"lycoris|backends|test|bench|docs|examples|\.ci"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert not [path for path in paths if not (ROOT / path).exists()]
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}
    assert not set(re.findall(r"\]\(#([^)]+)", text)) - anchors


def test_the_figures_are_those_of_the_record() -> None:
    script = runpy.run_path(str(ROOT / "bench/readme.py"))
    assert script["rewrite"](README) == README, "run python bench/readme.py"
    # A figure that differs from the file's by one shows.
    figure, *_ = re.findall(r"^\| `lora_apply` \|[^|]*\|[^|]*\| (\d+) \|", README, re.MULTILINE)
    wrong = README.replace(f"| {figure} |", f"| {int(figure) + 1} |", 1)
    assert script["rewrite"](wrong) == README


def recorded(name: str) -> list[dict]:
    """The rows with a time of a file of results."""
    read = json.loads((ROOT / f"bench/results/2026-11-30-h200-{name}.json").read_text())
    rows = read.get("rows") or [b["extra_info"] for b in read["benchmarks"]]
    return [row for row in rows if row["time_us"]]


MATRICES = ("llm", "sdxl", "flux", "own")


def test_what_is_slower_is_as_recorded() -> None:
    rows = [row for name in MATRICES for row in recorded(f"matrix-{name}")]
    convs = {"lora_conv_apply", "loha_conv_apply", "lokr_conv_apply"}
    slower = {(r["op"], r["backend"]) for r in rows if r["time_us"] > r["eager_us"]}
    both = {*convs, "loha_apply", "add_scaled"}
    expected = {(op, backend) for op in both for backend in ("triton", "tilelang")}
    assert slower == expected | {("loha_weight", "triton")}
    compiled = {
        (r["op"], r["backend"])
        for r in rows
        if r["time_us"] > 1.01 * r.get("compile_us", torch.inf)
    }
    names = ("lokr_weight", "ia3_scale", "dora_lora_weight")
    more = {(op, backend) for op in names for backend in ("triton", "tilelang")}
    assert compiled - slower == more | {("merge_", "tilelang")}
    rows = [r for r in rows if r["direction"] == "fwd+bwd"]

    def times(op: str, backend: str, other: str = "eager_us", **sizes: Any) -> list[int]:
        sought = (op, backend, sizes)
        row = next(
            r
            for r in rows
            if (r["op"], r["backend"], {k: r["sizes"].get(k) for k in sizes}) == sought
        )
        return [round(row[key]) for key in ("time_us", other)]

    said = " ".join(README.split())
    triton, eager = times("loha_apply", "triton", r=16)
    tilelang, _ = times("loha_apply", "tilelang", r=16)
    assert f"{triton} us in Triton and {tilelang} in TileLang at rank 16, eager {eager};" in said
    (layer,) = (
        [round(r["added_us"]), round(r["eager_us"] - r["base_us"])]
        for r in recorded("matrix-layers")
        if (r["op"], r["backend"], r["sizes"].get("I")) == ("loha_apply", "triton", 4096)
    )
    assert "It adds {} us to a layer, eager {}.".format(*layer) in said
    above = {r["op"] for r in recorded("matrix-layers") if r["peak_bytes"] > r["peft_peak_bytes"]}
    assert above == {"lora_apply", "lokr_apply", "oft_apply"}
    assert "; {} at rank 32, eager {} (".format(*times("loha_apply", "triton", r=32)) in said
    high = times("loha_weight", "triton", r=64)
    assert "`loha_weight` at rank 64: {}, eager {}.".format(*high) in said
    large = times("add_scaled", "triton", T=[4096, 4096])
    assert "`add_scaled`: {} us, eager {};".format(*large) in said
    merged = times("dora_lora_weight", "tilelang", "compile_us", O=4096)
    assert "`dora_lora_weight` ({}, compiled {})".format(*merged) in said
    kron = times("lokr_weight", "triton", "compile_us", c=40)
    kron += times("lokr_weight", "triton", "compile_us", c=384)
    assert (
        "({} us in Triton at 320 channels, compiled {}; {} at 3072, compiled {})".format(*kron)
        in said
    )
    layers = [r["peak_bytes"] / r["eager_peak_bytes"] for r in recorded("matrix-layers")]
    assert f"(as a layer {max(layers):.1f} times, at 77 tokens)" in said
    wide = [
        next(r for r in recorded(name) if r["sizes"]["r"] == 128)
        for name in ("lora-triton-pairs", "lora-tilelang")
    ]
    triton, tilelang = (round(r["time_us"]) for r in wide)
    eager = round(wide[0]["eager_us"])
    assert f"{triton} us in Triton and {tilelang} in TileLang, eager {eager} (" in said
    former = wide[1]["wall_fwd_bwd_us"] / wide[1]["eager_wall_fwd_bwd_us"]
    assert f"the former LoRA of lora-tilelang.json {former:.1f}." in said


def test_what_is_larger_and_what_waits_is_as_recorded() -> None:
    rows = [row for name in MATRICES for row in recorded(f"matrix-{name}")]
    said = " ".join(README.split())
    (found,) = (
        [r["peak_bytes"], r["eager_peak_bytes"]]
        for r in recorded("matrix-sdxl")
        if (r["op"], r["backend"], r["direction"]) == ("loha_conv_apply", "triton", "fwd+bwd")
    )
    assert "peaks at {} MB against {}".format(*(round(p / 1e6) for p in found)) in said
    larger: dict[str, float] = {}
    for r in rows:
        ratio = r["peak_bytes"] / max(1, r["eager_peak_bytes"])
        larger[r["op"]] = max(ratio, larger.get(r["op"], 0.0))
    convs, oft = {"lora_conv_apply", "lokr_conv_apply"}, {"oft_weight", "oft_apply"}
    over = {op for op, ratio in larger.items() if ratio > 1.1}
    assert over == {*convs, "loha_conv_apply", *oft, "boft_apply"}
    for ops, end in {
        frozenset(convs): " times eager's",
        frozenset(oft): " times, and BOFT",
        frozenset({"boft_apply"}): " times (15 MB)",
    }.items():
        assert f" {max(larger[op] for op in ops):.1f}{end}" in said
    waits = [(r["op"], r["wall_us"] / r["eager_wall_us"]) for r in rows]
    assert f"the others up to {max(ratio for _, ratio in waits):.1f} times" in said
    short = ("dora", "oft", "boft", "merge_")
    assert max(ratio for op, ratio in waits if op.startswith(short)) < 0.65
    assert "take 0.6 times as long as eager or less" in said


def test_the_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    pinned = dict(d.split("==") for d in extras["dev"] if "==" in d)
    cells = {
        row[0]: row[1:]
        for row in re.findall(r"^\| ([\w, ]+) \| ([^|]*) \| ([^|]*) \|$", README, re.MULTILINE)
    }
    assert project["requires-python"] == ">=3.11"
    assert cells["Python, Linux"][0] == "3.11 and newer"
    assert project["dependencies"] == ["torch>=2.11"]
    assert cells["torch"][0] == "2.11 and newer"
    assert "triton>=3.6,<3.8" in extras["triton"]
    assert cells["Triton"][0] == "3.6, 3.7"
    assert extras["tilelang"] == [f"tilelang=={cells['TileLang'][0]}"]
    for name, row in {"torch": "torch", "triton": "Triton"}.items():
        assert cells[row][1].startswith(f"{pinned[name]} on CPUs")


def test_the_architectures_are_those_that_are_built() -> None:
    source = (ROOT / "test/compile/test_compile_only.py").read_text()
    built = {(b, a.rstrip("a")) for b, a in re.findall(r'\("(\w+)", "((?:sm_|gfx)\w+)"\)', source)}
    (line,) = re.findall(r"^\| GPU, kernels built.*$", README, re.MULTILINE)
    triton, tilelang = line.split("TileLang")
    for backend, said in {"triton": triton, "tilelang": tilelang}.items():
        named = set(re.findall(r"sm_\d+|gfx\d+", said))
        assert named | {"sm_90"} == {arch for b, arch in built if b == backend}
