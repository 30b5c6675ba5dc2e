"""A frozen ``nn.Linear`` with each adapter on it: what the adapter adds to the layer's step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import layers
import pytest
from clock import clock
from measure import Matrix
from shapes import Row

from lycoris.kernels.spec import OpSpec


def adapt(spec: OpSpec, row: Row) -> Row | None:
    """The row as a layer; None where the op adapts none."""
    case = layers.layer_case(spec, row.case)
    return None if case is None else replace(row, case=case)


@pytest.mark.benchmark(timer=clock)
def test_layer(subject: Any, matrix: Matrix, put: Callable[[dict[str, Any]], None]) -> None:
    spec, row, backend, direction = subject
    found = matrix.measure(spec, row, backend, direction, layer=True)
    put(found)
    assert found["pass"], found["why"]
