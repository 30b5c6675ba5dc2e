"""The callable of every registered op, by name."""

from __future__ import annotations

from ..kernels import ops as _ops  # noqa: F401  (registers every op)
from ..kernels.autograd import Op
from ..kernels.spec import SPECS

OPS = {spec.name: Op(spec) for spec in SPECS.values()}
