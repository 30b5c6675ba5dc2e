"""Each op's formula against its definition, spelled out once more and independently."""

from __future__ import annotations

import pytest
import torch

from lycoris.functional import lora_apply, lora_weight

F64 = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


def test_lora_weight_sums_over_the_rank() -> None:
    up, down, base = rand(5, 3), rand(3, 7), rand(5, 7)
    expected = base.clone()
    for o in range(5):
        for i in range(7):
            for r in range(3):
                expected[o, i] += 0.7 * up[o, r] * down[r, i]
    torch.testing.assert_close(lora_weight(up, down, 0.7, base=base), expected)


def test_lora_weight_tucker_sums_over_both_ranks() -> None:
    up, mid, down = rand(4, 2), rand(2, 3, 3, 3), rand(3, 5)
    expected = 0.3 * torch.einsum("op,pqhw,qi->oihw", up, mid, down)
    torch.testing.assert_close(lora_weight(up, down, 0.3, mid=mid), expected)
    conv = lora_weight(up[..., None, None], down[..., None, None], 0.3, mid=mid, base=expected)
    torch.testing.assert_close(conv, 2 * expected)


def test_lora_apply_is_the_product_with_lora_weight() -> None:
    x, up, down, base = rand(2, 3, 7), rand(5, 3), rand(3, 7), rand(2, 3, 5)
    expected = base + x @ lora_weight(up, down, 0.7).T
    torch.testing.assert_close(lora_apply(x, up, down, 0.7, base=base), expected)


def test_shapes_of_conv_factors() -> None:
    up, down = rand(6, 2, 1, 1), rand(2, 3, 3, 3)
    assert lora_weight(up, down).shape == (6, 3, 3, 3)
    assert lora_weight(up, down.flatten(1)).shape == (6, 27)
    base = rand(6, 3, 3, 3)
    assert lora_weight(up, down.flatten(1), base=base).shape == base.shape
    assert lora_apply(rand(4, 3), up, rand(2, 3, 1, 1)).shape == (4, 6)
    assert lora_apply(rand(3), up, rand(2, 3)).shape == (6,)


@pytest.mark.parametrize("names", [("base",), ()])
def test_gradcheck(names: tuple[str, ...]) -> None:
    x, up, down = rand(2, 3, 4), rand(5, 2), rand(2, 4)
    base = rand(2, 3, 5) if names else None
    leaves = [t.requires_grad_() for t in (x, up, down, base) if t is not None]

    def apply(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *b: torch.Tensor):
        return lora_apply(x, up, down, 0.7, base=b[0] if b else None)

    assert torch.autograd.gradcheck(apply, leaves)
    assert torch.autograd.gradgradcheck(apply, leaves)


def test_gradcheck_tucker() -> None:
    leaves = [t.requires_grad_() for t in (rand(4, 2), rand(3, 5), rand(2, 3, 2))]
    assert torch.autograd.gradcheck(lambda u, d, m: lora_weight(u, d, 0.7, mid=m), leaves)
    assert torch.autograd.gradgradcheck(lambda u, d, m: lora_weight(u, d, 0.7, mid=m), leaves)
