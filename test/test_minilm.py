"""Real weights, real sentences: examples/minilm_lora.py on every backend, in fp32 and bf16.

The package with the weights is part of the ``dev`` extra: where it is missing these tests fail.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lycoris.kernels.ulp import spacing

PATH = Path(__file__).parents[1] / "examples/minilm_lora.py"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are small, and beside another worker more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minilm_lora", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def loaded(example: ModuleType) -> Any:
    """The model in fp32 and a batch of two triplets, on the CPU."""
    return example.load(torch.device("cpu"), 2)


def test_the_model_knows_what_is_related(example: ModuleType, loaded: Any) -> None:
    model, _ = loaded
    sentences = ["A man plays the guitar.", "Someone is playing an instrument."]
    sentences += ["The stock market fell sharply.", "Share prices dropped today."]
    batch = example.tokenize(example.model_folder(), sentences, torch.device("cpu"))
    vectors = model(batch.ids, batch.mask)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    close = vectors @ vectors.T
    assert min(close[0, 1], close[2, 3]) > 0.5
    assert close[:2, 2:].max() < 0.25


def test_padding_changes_nothing(example: ModuleType, loaded: Any) -> None:
    model, _ = loaded
    sentences = ["Short.", "A sentence that is a good deal longer than the other one."]
    folder, cpu = example.model_folder(), torch.device("cpu")
    both = example.tokenize(folder, sentences, cpu)
    alone = example.tokenize(folder, sentences[:1], cpu)
    assert alone.ids.shape[1] < both.ids.shape[1]
    torch.testing.assert_close(
        model(both.ids, both.mask)[:1], model(alone.ids, alone.mask), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_backends_train_and_merge_alike(example: ModuleType, loaded: Any, dtype: str) -> None:
    reports = example.run(*loaded, dtype, example.BACKENDS, layers=1, steps=2)
    assert [r.backend for r in reports] == ["torch", "triton", "tilelang"]
    for report in reports:
        assert not report.failures, report.backend
        names = {a.layer for a in report.layers}
        assert names == {
            f"5.{n}" for n in ("query", "key", "value", "attention_out", "inner", "out")
        }
        # Agreement means something only where the adapter weighs more than the roundings.
        assert all(a.adapter.rms > 2 * a.apart.rms for a in report.layers)
    # The runs started alike and are two steps old: their losses are the same to a few ULP.
    unit = spacing(example.DTYPES[dtype], reports[0].losses[0])
    allowed = {"fp32": 32.0, "bf16": 1.0}[dtype] * unit
    for report in reports[1:]:
        for loss, unfused in zip(report.losses, reports[0].losses, strict=True):
            assert abs(loss - unfused) <= allowed, report.backend


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["not merged", "scale dropped", "merged twice", "scale 2 % off"])
def test_a_wrong_merge_shows(example: ModuleType, dtype: str, fault: str) -> None:
    torch.manual_seed(0)
    frozen = torch.nn.Linear(96, 64).to(example.DTYPES[dtype]).requires_grad_(False)
    layer = sys.modules["minilm"].LoRALinear(frozen, 4, 5.6, torch.Generator().manual_seed(0))
    layer.up.data.normal_(std=0.05)
    x = torch.randn(32, 96).to(frozen.weight.dtype)

    def failures(plain: torch.nn.Linear) -> list[str]:
        agreement = sys.modules["minilm_merge"].agreement
        return agreement("it", layer, plain, x, layer(x).detach(), False).failures

    right = layer.merged()
    assert not failures(right)
    delta = right.weight - frozen.weight
    wrong = copy.deepcopy(right)
    wrong.weight.data = {
        "not merged": frozen.weight,
        "scale dropped": frozen.weight + delta / layer.scale,
        "merged twice": right.weight + delta,
        "scale 2 % off": frozen.weight + 1.02 * delta,
    }[fault]
    found = failures(wrong)
    assert any("merged:" in f for f in found)
    assert any("apart:" in f for f in found)


def test_a_merged_layer_is_plain(example: ModuleType, loaded: Any) -> None:
    model = example.adapt(copy.deepcopy(loaded[0]), 1)
    merged = example.merge(model)
    assert not list(sys.modules["minilm"].adapters(merged))
    assert list(sys.modules["minilm"].adapters(model))
    # up is zero still: nothing may have changed, to the bit.
    before, after = loaded[0].state_dict(), merged.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_without_the_package(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["minilm"], "PACKAGE", "no-such-package-of-weights")
    with pytest.raises(ModuleNotFoundError, match=r"--no-deps no-such-package-of-weights==0\.1\.0"):
        example.model_folder()
    monkeypatch.undo()
    module, project = sys.modules["minilm"], PATH.parents[1] / "pyproject.toml"
    assert f'"{module.PACKAGE}=={module.VERSION}"' in project.read_text()


def test_the_command_line(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        example.main(["--backend", "torch", "--dtype", "fp32", "--steps", "2", "--layers", "1"])
        == 0
    )
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["dtype", "backend"]
    assert row.split()[:2] == ["fp32", "torch"]
    assert row.split()[-1] == "ok"
    with pytest.raises(SystemExit) as stop:
        example.main(["--steps", "1"])
    assert stop.value.code == 2
