"""Triton kernels that are launched while the last one ends: those that wait, on Hopper or newer."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from lycoris.backends.triton.common import Kernel, in_turn, kernel


@kernel
def _waits(x):
    in_turn()


@kernel
def _does_not(x):
    pass


@pytest.mark.parametrize(
    ("tested", "capability", "hip", "early"),
    [
        (_waits, (9, 0), None, True),
        (_waits, (10, 0), None, True),
        (_waits, (8, 9), None, False),
        (_waits, (9, 4), "6.4", False),
        (_does_not, (9, 0), None, False),
    ],
)
def test_a_kernel_that_waits_is_launched_early(
    tested: Kernel,
    capability: tuple[int, int],
    hip: str | None,
    early: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {}

    def run(*args: Any, **options: Any) -> dict[tuple[int, ...], Any]:
        asked.update(options)
        return {(1, 1, 1): None}

    monkeypatch.setattr(tested.jit, "run", run)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", None, raising=False)
    tested.prepare((1,), (SimpleNamespace(get_device=lambda: 0),), {"num_warps": 1})
    assert asked.get("launch_pdl", False) is early


def test_interpreted_there_is_nothing_to_wait_for() -> None:
    _waits((1,), torch.zeros(1))
