"""Every op, backend, dtype mix and case, output and gradients, against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lycoris.kernels import testing
from lycoris.kernels.errors import BackendError
from lycoris.kernels.spec import SPECS, Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("triton", "tilelang")
MATRIX = [
    pytest.param(op, backend, case, mix, id=f"{op}-{backend}-{testing.mix_name(mix)}-{case.name}")
    for backend in BACKENDS
    for op in SPECS
    for case, mix in testing.cases(op, DEVICE)
]


@pytest.mark.parametrize(("op", "backend", "case", "mix"), MATRIX)
def test_parity(
    op: str,
    backend: str,
    case: Case,
    mix: tuple[torch.dtype, torch.dtype],
    record_rows: Callable[[list[testing.Row]], None],
) -> None:
    rows = testing.check(op, backend, case, mix, device=DEVICE)
    record_rows(rows)
    failed = [f"{row.tensor}: {row.why}" for row in rows if not row.passed]
    assert not failed, "\n".join(failed)


def test_a_trial_scores_one_backend_after_another() -> None:
    case, mix = next(testing.cases("merge_"))  # in place: the first must leave the operands alone
    trial = testing.Trial("merge_", case, mix)
    for _ in range(2):
        for backend in (*BACKENDS, "torch"):
            assert trial.score(backend) == testing.check("merge_", backend, case, mix)


def test_the_matrix_is_whole() -> None:
    seen = {(p.values[0], p.values[1]) for p in MATRIX}
    assert seen == {(op, backend) for op in SPECS for backend in BACKENDS}
    for op in SPECS:
        mixes = {testing.mix_name(mix) for _, mix in testing.cases(op, DEVICE)}
        assert len(mixes) == len(testing.MIXES)
        cases = {case.fill for case, _ in testing.cases(op, "cpu")}
        assert {"random", "integers", "one_hot", "cancellation", "subnormal"} <= cases
        assert {"near_overflow", "zero_factor"} <= cases


def test_a_backend_that_writes_into_an_operand_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case, mix = next(testing.cases("lora_weight"))
    trial = testing.Trial("lora_weight", case, mix)
    run = testing._run

    def spoil(spec: Any, inputs: Any, *args: Any) -> Any:
        found = run(spec, inputs, *args)
        inputs.operands[0].zero_()
        return found

    with monkeypatch.context() as patch:
        patch.setattr(testing, "_run", spoil)
        with pytest.raises(BackendError, match="torch wrote into up of lora_weight"):
            trial.score("torch")
    assert trial.score("torch") == testing.check("lora_weight", "torch", case, mix)
