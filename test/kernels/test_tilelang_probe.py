"""Where the TileLang backend looks for nvcc, and what importing TileLang leaves behind."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest
import torch

pytest.importorskip("tilelang")

from lycoris.backends.tilelang import common

from lycoris.backends import tilelang as backend
from lycoris.kernels.errors import KernelBuildError


def test_probe_looks_for_nvcc_where_tilelang_will(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def probe() -> str | None:
        return backend.probe(torch.device("cuda", 0))

    toolkit, place = tmp_path / "toolkit", tmp_path / "toolkit" / "bin" / "nvcc"
    place.parent.mkdir(parents=True)
    place.touch(0o755)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    found = types.ModuleType("tilelang.env")
    monkeypatch.setitem(sys.modules, "tilelang.env", found)
    with monkeypatch.context() as fresh:
        fresh.setitem(sys.modules, "tilelang", None)
        fresh.delitem(sys.modules, "tilelang")
        fresh.setenv("CUDA_PATH", str(toolkit))
        fresh.setenv("CUDA_HOME", "")
        assert probe() is None
        fresh.setenv("CUDA_HOME", "/nowhere")  # it hides the toolkit from TileLang too
        assert probe() == "no nvcc at /nowhere/bin/nvcc, where CUDA_HOME says it is"
        fresh.delenv("CUDA_PATH")
        fresh.delenv("CUDA_HOME")
        fresh.setenv("PATH", str(place.parent))
        assert probe() is None
    monkeypatch.setitem(sys.modules, "tilelang", types.ModuleType("tilelang"))
    monkeypatch.setenv("CUDA_HOME", str(toolkit))  # too late for what is imported
    found.CUDA_HOME = ""
    assert "TileLang found no CUDA toolkit" in probe()
    found.CUDA_HOME = str(toolkit)
    assert probe() is None
    place.chmod(0o644)
    assert probe().startswith(f"no nvcc at {place}, where TileLang found")


@pytest.mark.parametrize("before", [None, "mine"])
def test_tilelang_leaves_no_path_to_other_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, before: str | None
) -> None:
    monkeypatch.setenv("PYTHONPATH", before or "")
    if before is None:
        monkeypatch.delenv("PYTHONPATH")
    theirs = "import os\nos.environ['PYTHONPATH'] = 'theirs'\n"
    (tmp_path / "tilelang.py").write_text(theirs)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "tilelang", None)
    monkeypatch.delitem(sys.modules, "tilelang")
    assert common.load_tilelang().os is os
    assert os.environ.get("PYTHONPATH") == before


def test_a_cache_that_can_not_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    why = "can't be kept: .*; LYCORIS_KERNEL_CACHE_DIR names another folder"
    for folder in (file, "~nobody-of-that-name/x"):
        monkeypatch.setenv("LYCORIS_KERNEL_CACHE_DIR", str(folder))
        with pytest.raises(KernelBuildError, match=why):
            common._build_cpu(backend.probe, (), torch.device("cpu"))
    monkeypatch.setenv("LYCORIS_KERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(KernelBuildError, match=f"{tmp_path}/tilelang can't be written; LYCORIS"):
        common._build_cpu(backend.probe, (), torch.device("cpu"))
