"""HF PEFT's rotation conventions against the formulas as they are published."""

from __future__ import annotations

import pytest
import torch

from lycoris.functional import boft_weight, oft_apply
from lycoris.functional.peft_rotation import (
    blocks_from_vectors,
    butterfly_permutation,
    cayley_neumann,
    rotate_input,
    skew_from_vectors,
)

F64 = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def exact(q: torch.Tensor) -> torch.Tensor:
    eye = torch.eye(q.shape[-1], dtype=F64)
    return (eye + q) @ torch.linalg.inv(eye - q)


def test_vectors_are_upper_triangles_row_by_row() -> None:
    q = skew_from_vectors(torch.arange(1.0, 7.0)[None], 4)[0]
    assert torch.equal(q[0], torch.tensor([0.0, 1, 2, 3]))
    assert torch.equal(q[1], torch.tensor([-1.0, 0, 4, 5]))
    assert torch.equal(q, -q.T)
    with pytest.raises(ValueError, match=r"vectors has shape \(1, 5\); expected \(n, 6\)"):
        skew_from_vectors(torch.zeros(1, 5), 4)


def test_the_input_side_is_oft_apply() -> None:
    x, vectors = rand(2, 5, 12), rand(3, 6) * 0.3
    r = exact(skew_from_vectors(vectors, 4))
    got = oft_apply(x, blocks_from_vectors(vectors, 4))
    torch.testing.assert_close(got, rotate_input(x, r))
    # y = W (R^T x), the published form.
    weight = rand(7, 12)
    whole = torch.block_diag(*r)
    torch.testing.assert_close(got @ weight.T, (weight @ whole.T @ x.mT).mT)
    with pytest.raises(ValueError, match="expected"):
        rotate_input(x[..., 1:], r)


@pytest.mark.parametrize("terms", [0, 1, 3, 5])
@pytest.mark.parametrize("norm", [0.1, 0.5])
def test_the_truncation_error_is_as_stated(terms: int, norm: float) -> None:
    q = skew_from_vectors(rand(1, 28), 8)
    q = q * (norm / torch.linalg.matrix_norm(q, 2)[:, None, None])
    r = cayley_neumann(q, terms)
    error = torch.linalg.matrix_norm(exact(q) - r, 2).item()
    assert error == pytest.approx(norm ** (terms + 1), rel=1e-6)
    missed = torch.linalg.matrix_norm(r @ r.mT - torch.eye(8, dtype=F64), 2).item()
    power = norm ** (terms + 1)
    assert missed <= 2 * power + power**2 + 1e-12
    with pytest.raises(ValueError, match="terms is -1"):
        cayley_neumann(q, -1)


def test_the_butterfly_permutation() -> None:
    assert butterfly_permutation(8, 4, 0).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert butterfly_permutation(8, 2, 2).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert butterfly_permutation(6, 2, 0).tolist() == list(range(6))
    weight, blocks = rand(16, 3), rand(2, 4, 4, 4) * 0.3
    expected = weight
    for stage in range(2):
        order = butterfly_permutation(16, 4, stage)
        whole = torch.block_diag(*exact(blocks[stage] - blocks[stage].mT))
        expected = (whole @ expected[order])[order.argsort()]
    torch.testing.assert_close(boft_weight(weight, blocks), expected)
    with pytest.raises(ValueError, match="must divide 12"):
        butterfly_permutation(12, 4, 1)
