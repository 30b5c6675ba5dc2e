"""Every op x backend x dtype mix x shape x direction: accuracy, and on a GPU speed and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from clock import clock
from measure import Matrix


@pytest.mark.benchmark(timer=clock)
def test_op(subject: Any, matrix: Matrix, put: Callable[[dict[str, Any]], None]) -> None:
    spec, row, backend, direction = subject
    found = matrix.measure(spec, row, backend, direction)
    put(found)
    assert found["pass"], found["why"]
