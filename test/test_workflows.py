"""The GitHub workflows: valid, safe by zizmor's audit, and running only what is there."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sysconfig
import tomllib
from pathlib import Path

import pytest

from lycoris.__main__ import _parser

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
each_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


def audit(*paths: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sysconfig.get_path("scripts")) / "zizmor"
    zizmor = str(beside) if beside.exists() else shutil.which("zizmor")
    if zizmor is None:
        pytest.fail("zizmor, which checks the workflows, is missing: pip install -e '.[dev]'")
    command = [zizmor, "--offline", "--no-progress", "--persona=auditor", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def commands(workflow: Path) -> list[list[str]]:
    """The words of every command that the workflow runs."""
    text = workflow.read_text()
    found: list[str] = []
    for indent, mark, first, rest in re.findall(
        r"^( *)(?:- )?run: *([|>]-?)?([^\n]*)\n((?:\1 {2,}[^\n]*\n|\n)*)", text, re.MULTILINE
    ):
        assert indent
        lines = [line.strip() for line in rest.splitlines()] if mark else [first.strip()]
        if mark.startswith(">"):
            lines = [" ".join(lines)]
        found += "\n".join(lines).replace("\\\n", " ").splitlines()
    parts = [part for line in found for part in re.split(r" \| | && ", line) if part.strip()]
    return [shlex.split(part) for part in parts]


def test_the_audit_finds_nothing() -> None:
    assert {path.name for path in WORKFLOWS} >= {"ci.yml", "gpu.yml"}
    done = audit(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"@[0-9a-f]{40} # v\S+", "@v6"),  # an action that can be moved
        (r"^permissions:\n  contents: read\n", "permissions: write-all\n"),
        (r"^jobs:\n", "jobs:\n  empty: 3\n"),  # not a workflow
        (r'"\$BACKEND" --json', "${{ github.head_ref }} --json"),  # a stranger's text as code
    ],
)
def test_the_audit_can_fail(old: str, new: str, tmp_path: Path) -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    broken, count = re.subn(old, new, text, flags=re.MULTILINE)
    assert count
    (tmp_path / "ci.yml").write_text(broken)
    assert audit(tmp_path / "ci.yml").returncode != 0


@each_workflow
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    uses = re.findall(r"uses: *(.*)", workflow.read_text())
    assert uses
    for action in uses:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)


@each_workflow
def test_commands_exist(workflow: Path) -> None:
    found = commands(workflow)
    assert len(found) > 5
    checked = 0
    for words in found:
        for word in words:
            if re.search(r"^[\w.][\w./-]*/[\w.-]+\.(py|sh|toml)$", word):
                assert (ROOT / word).is_file(), words
        program, *arguments = words
        if not program.endswith(("python", "python3")) or arguments[0] == "-c":
            continue
        checked += 1
        if arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1]), words
            if arguments[1] == "lycoris":
                own = [w.replace("$BACKEND", "triton") for w in arguments[2:]]
                _parser().parse_args(own)
        else:
            script = (ROOT / arguments[0]).read_text()
            for option in (w for w in arguments if w.startswith("--")):
                assert f'"{option}"' in script, words
    assert checked > 3


@each_workflow
def test_versions_are_those_of_the_dev_extra(workflow: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = re.findall(r"'(\w+==[\w.]+)'", workflow.read_text())
    assert set(pins) <= set(project["optional-dependencies"]["dev"])
