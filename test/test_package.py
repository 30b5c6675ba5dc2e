"""The built distributions hold what they should, and the package imports from each of them."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = sorted(p.parent.name for p in (ROOT / "backends").glob("*/__init__.py"))
SHIM = "lycoris/backends/__init__.py"
SHIPPED = (
    *("lycoris", "backends", "test", "bench", "docs", ".ci"),
    *("pyproject.toml", "setup.py", "MANIFEST.in"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.py[cod]", "*.egg-info")


def files_under(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@dataclass(frozen=True)
class Built:
    """A copy of the checkout and everything built from it, unpacked."""

    source: Path
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path
    editable: Path


def build(source: Path, kind: str, target: Path) -> Path:
    """Calls a PEP 517 hook of ``source``, as pip and build do, without their network access."""
    target.mkdir()
    code = f"from setuptools import build_meta as b; print(b.build_{kind}({str(target)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target / done.stdout.splitlines()[-1]


def unpack(archive: Path, target: Path) -> Path:
    if archive.suffix == ".whl":
        zipfile.ZipFile(archive).extractall(target)
        return target
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11.4
    with tarfile.open(archive) as tar:
        tar.extractall(target, **safe)
    return next(target.iterdir())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("package")
    source = work / "source"
    source.mkdir()
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=LEFTOVERS)
        else:
            shutil.copy(ROOT / name, source / name)
    # A wheel and an sdist each start from a tree that no other build has left anything in.
    clean = work / "clean"
    shutil.copytree(source, clean)
    sdist = unpack(build(clean, "sdist", work / "dist-sdist"), work / "sdist")
    again = work / "again"
    shutil.copytree(sdist, again)
    return Built(
        source=source,
        sdist=sdist,
        wheel=unpack(build(source, "wheel", work / "dist-wheel"), work / "wheel"),
        wheel_of_sdist=unpack(build(again, "wheel", work / "dist-again"), work / "wheel-again"),
        editable=unpack(build(source, "editable", work / "dist-editable"), work / "editable"),
    )


def metadata(folder: Path) -> str:
    (path,) = folder.glob("*.dist-info/METADATA")
    return path.read_text()


def test_the_wheel_holds_every_module_and_nothing_else(built: Built) -> None:
    core = {f"lycoris/{name}" for name in files_under(built.source / "lycoris")}
    core = {name for name in core if not name.startswith("lycoris/backends/")}
    backends = {f"lycoris/backends/{name}" for name in files_under(built.source / "backends")}
    found = {name for name in files_under(built.wheel) if ".dist-info/" not in name}
    assert found == core | backends
    assert "lycoris/py.typed" in found
    # TileLang's CPU target includes a C header of ours.
    assert [name for name in found if re.fullmatch(r"lycoris/backends/tilelang/\w+\.h", name)]


def test_the_shim_stays_in_the_source_tree(built: Built) -> None:
    assert (built.wheel / SHIM).read_bytes() == (ROOT / "backends/__init__.py").read_bytes()
    assert (built.sdist / SHIM).read_bytes() == (ROOT / SHIM).read_bytes()
    assert (ROOT / SHIM).read_bytes() != (ROOT / "backends/__init__.py").read_bytes()


def test_the_sdist_holds_the_whole_tree(built: Built) -> None:
    made_by_build = re.compile(r"PKG-INFO|setup\.cfg|[^/]+\.egg-info/.*")
    found = {n for n in files_under(built.sdist) if not made_by_build.fullmatch(n)}
    clean = built.source.parent / "clean"
    expected = {n for n in files_under(clean) if not made_by_build.fullmatch(n)}
    assert found == expected
    for folder in ("backends", "lycoris/backends", "test", "bench", "docs"):
        assert any(name.startswith(folder + "/") for name in found), folder


def test_a_wheel_from_the_sdist_is_the_same(built: Built) -> None:
    assert files_under(built.wheel_of_sdist) == files_under(built.wheel)


def test_the_version_is_one_and_valid(built: Built) -> None:
    spec = importlib.util.spec_from_file_location("_version", ROOT / "lycoris/_version.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (line,) = re.findall(r"^Version: (.*)$", metadata(built.wheel), re.MULTILINE)
    assert line == module.__version__ == str(Version(module.__version__))


def test_console_scripts_point_at_shipped_modules(built: Built) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for target in project.get("scripts", {}).values():
        assert (built.wheel / (target.partition(":")[0].replace(".", "/") + ".py")).is_file()


def test_the_license_and_typing_markers_ship(built: Built) -> None:
    (license_file,) = built.wheel.glob("*.dist-info/licenses/LICENSE")
    assert license_file.read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in metadata(built.wheel)


PROBE = """
import importlib, importlib.metadata, importlib.util, json, site, sys
first, addsite, others, names = json.loads(sys.argv[1])
sys.path[:0] = [first] + others
if addsite:
    site.addsitedir(first)  # runs its .pth file
lycoris = importlib.import_module("lycoris")
reference = importlib.import_module("lycoris.backends.reference")
from lycoris.kernels import registry
import torch
assert registry.load("torch") is reference
y = lycoris.functional.lora_apply(torch.ones(2, 3), torch.ones(4, 1), torch.ones(1, 3))
assert y.tolist() == [[3.0] * 4] * 2
try:
    version = importlib.metadata.version("lycoris-kernels")
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps({
    "files": [lycoris.__file__] + [
        importlib.util.find_spec("lycoris.backends." + name).origin for name in names
    ],
    "version": version,
    "attribute": lycoris.__version__,
}))
"""


@pytest.mark.parametrize("layout", ["wheel", "sdist", "checkout", "editable"])
def test_imports_from(layout: str, built: Built) -> None:
    first = {
        "wheel": built.wheel,
        "sdist": built.sdist,
        "checkout": ROOT,
        "editable": built.editable,
    }[layout]
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    # -S runs no .pth file: an editable install in this environment can't answer instead. Where
    # the package is installed here, its folder comes after ``first``, and the origins tell.
    others = [*{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    others.append(str(Path(torch.origin).parents[1]))
    argument = json.dumps([str(first), layout == "editable", others, BACKENDS])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROBE, argument],
        cwd=built.source.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    home = built.source if layout == "editable" else first
    assert {Path(name).resolve().is_relative_to(home) for name in found["files"]} == {True}
    if layout in ("wheel", "editable"):
        assert found["version"] == found["attribute"]
