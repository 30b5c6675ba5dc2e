"""Spacing and scores, against numpy-free facts of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lycoris.kernels import ulp

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_spacing_is_the_distance_to_the_next_number(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    for value in (1.0, 1.5, 2.0, 3.999, info.tiny, info.max / 4):
        here = torch.tensor(value, dtype=dtype)
        step = torch.tensor(ulp.spacing(dtype, here.item()), dtype=torch.float64)
        following = (here.double() + step).to(dtype)
        assert following.double() == here.double() + step  # representable
        assert (here.double() + step / 2).to(dtype) in (here, following)
    smallest = info.smallest_normal * info.eps
    assert ulp.spacing(dtype, 0.0) == smallest
    assert ulp.spacing(dtype, info.tiny / 8) == smallest


@given(st.floats(allow_nan=False, allow_infinity=False, width=32), st.sampled_from(DTYPES))
def test_elementwise_spacing_equals_the_scalar_one(value: float, dtype: torch.dtype) -> None:
    got = ulp.spacings(dtype, torch.tensor([value], dtype=torch.float64)).item()
    assert got == ulp.spacing(dtype, value)


def test_score_of_a_reduction_uses_the_rms() -> None:
    reference = torch.tensor([3.0, 4.0], dtype=torch.float64)  # rms 3.54: binade of 2
    out = reference + torch.tensor([0.0, 2.0**-22], dtype=torch.float64)
    got = ulp.score(out, reference, torch.float32)
    assert got.ulp == 1.0
    assert got.rms == pytest.approx(math.sqrt(0.5))


def test_score_of_a_pointwise_op_uses_each_element() -> None:
    reference = torch.tensor([1.0, 1024.0], dtype=torch.float64)
    out = reference + torch.tensor([2.0**-23, 0.0], dtype=torch.float64)
    assert ulp.score(out, reference, torch.float32, pointwise=True).ulp == 1.0
    assert ulp.score(out, reference, torch.float32).ulp < 1.0


def test_zero_must_be_matched_exactly() -> None:
    zero = torch.zeros(4, dtype=torch.float64)
    assert ulp.score(zero.float(), zero, torch.float32) == ulp.Score(0.0, 0.0)
    assert not ulp.score(zero.float() + 1e-40, zero, torch.float32).finite


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_element_scores_infinity(bad: float) -> None:
    reference = torch.ones(3, dtype=torch.float64)
    out = torch.tensor([1.0, bad, 1.0])
    assert not ulp.score(out, reference, torch.float32).finite


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\); expected \(2,\)"):
        ulp.score(torch.ones(3), torch.ones(2), torch.float32)


def test_tiny_tensors_keep_their_rms() -> None:
    reference = torch.full((8,), 1e-200, dtype=torch.float64)
    assert ulp.score(reference, reference, torch.float64).ulp == 0.0
    assert ulp._rms(reference) == pytest.approx(1e-200)
