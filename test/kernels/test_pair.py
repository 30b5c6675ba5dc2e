"""GLoRA and T-LoRA: truths, the exact zero at the start, masks, conventions and errors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lycoris.functional import OPS, glora_weight, tlora_apply, tlora_weight

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


def rand(*shape: int, dtype: torch.dtype = F64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 100 * seed)
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def glora(dtype: torch.dtype = F64) -> list[Tensor]:
    shapes = ((5, 7), (7, 2), (2, 7), (5, 3), (3, 7))
    return [rand(*s, dtype=dtype).requires_grad_() for s in shapes]


def tlora(
    r: int = 3, n_in: int = 7, n_out: int = 5, dtype: torch.dtype = F64, frozen: int = 1
) -> list[Tensor]:
    """q, p, lam, q0, p0, lam0; with ``frozen`` = 0 the frozen ones equal the others."""
    shapes = ((r, n_in), (n_out, r), (1, r))
    made = [rand(*s, dtype=dtype).requires_grad_() for s in shapes]
    return [*made, *(rand(*s, dtype=dtype, seed=frozen) for s in shapes)]


def test_glora_is_what_it_says() -> None:
    weight, a1, a2, b1, b2 = operands = glora()
    expected = 0.7 * (weight @ (a1 @ a2) + b1 @ b2)
    torch.testing.assert_close(glora_weight(*operands, 0.7), expected)
    assert torch.autograd.gradcheck(lambda *t: glora_weight(*t, 0.7), operands)
    assert torch.autograd.gradgradcheck(lambda *t: glora_weight(*t, 0.7), operands)


def test_a_frozen_weight_costs_glora_nothing(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, *factors = glora(F32)
    seen = []
    from lycoris.kernels.schedule import Schedule

    plain = Schedule.matmul
    monkeypatch.setattr(
        Schedule,
        "matmul",
        lambda self, a, b, out, **k: seen.append(out) or plain(self, a, b, out, **k),
    )
    out = glora_weight(weight.detach(), *factors, 0.7, backend=fused)
    got = torch.autograd.grad(out.sum(), factors)
    assert not [t for t in seen if t.shape == weight.shape]
    want = torch.autograd.grad(glora_weight(weight.detach(), *factors, 0.7).sum(), factors)
    torch.testing.assert_close(got, want)


def test_tlora_weight_sums_over_the_masked_rank() -> None:
    q, p, lam, q0, p0, lam0 = tlora()
    mask = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
    expected = torch.zeros(5, 7, dtype=F64)
    for r in (0, 2):
        expected += 0.7 * lam[0, r] * torch.outer(p[:, r], q[r])
        expected -= 0.7 * lam0[0, r] * torch.outer(p0[:, r], q0[r])
    got = tlora_weight(q, p, lam, q0, p0, lam0, mask, 0.7)
    torch.testing.assert_close(got, expected)
    assert torch.equal(got, tlora_weight(q, p, lam[0], q0, p0, lam0[0], mask[None], 0.7))


@pytest.mark.parametrize("shape", [(2, 4, 7), (2, 7), (2, 2, 2, 7)])
def test_tlora_apply_has_a_mask_for_each_sample(shape: tuple[int, ...]) -> None:
    factors, x = tlora(), rand(*shape).requires_grad_()
    masks = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]], dtype=F64)
    got = tlora_apply(x, *factors, masks, 0.7)
    for i in range(2):
        weight = tlora_weight(*factors, masks[i], 0.7)
        torch.testing.assert_close(got[i], x[i] @ weight.T)
        torch.testing.assert_close(tlora_apply(x[i], *factors, masks[i], 0.7), got[i])
    assert torch.autograd.gradcheck(
        lambda x, *t: tlora_apply(x, *t, *factors[3:], masks, 0.7), [x, *factors[:3]]
    )


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("backend", ["triton", "tilelang", "torch"])
def test_tlora_is_exactly_zero_at_the_start(backend: str, dtype: torch.dtype) -> None:
    factors = tlora(7, 61, 53, dtype, frozen=0)
    mask = torch.ones(7, dtype=dtype)
    weight = tlora_weight(*factors, mask, 0.7, backend=backend)
    assert weight.dtype is dtype
    assert torch.equal(weight, torch.zeros_like(weight))
    grads = torch.autograd.grad(weight.sum(), factors[:3])
    assert all(g.any() for g in grads)  # and yet it learns
    x = rand(2, 13, 61, dtype=dtype).requires_grad_()
    masks = torch.ones(2, 7, dtype=dtype)
    masks[1, 3:] = 0
    out = tlora_apply(x, *factors, masks, 0.7, backend=backend)
    assert torch.equal(out, torch.zeros_like(out))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, torch.zeros_like(grad))


def test_what_is_frozen_gets_no_gradient(fused: str) -> None:
    factors = [t.detach().requires_grad_() for t in tlora(dtype=F32)]
    mask = torch.ones(3, requires_grad=True)
    tlora_weight(*factors, mask, 0.7, backend=fused).sum().backward()
    assert [t.grad is None for t in factors] == [False] * 3 + [True] * 3
    assert mask.grad is None
    x = rand(4, 7, dtype=F32)
    for i in range(3):  # each gradient alone
        leaves = [t.detach().requires_grad_(i == j) for j, t in enumerate(factors)]
        got, want = (
            torch.autograd.grad(
                tlora_apply(x, *leaves, mask, 0.7, backend=b).sin().sum(), leaves[i]
            )
            for b in (fused, "torch")
        )
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_an_output_without_a_gradient_does_not_ask_for_one(backend: str) -> None:
    q, p, lam, *frozen = (t.detach() for t in tlora(dtype=F32))
    frozen = [t.requires_grad_() for t in frozen]
    mask = torch.ones(3, requires_grad=True)
    assert not tlora_weight(q, p, lam, *frozen, mask, backend=backend).requires_grad
    run = torch.compile(
        lambda *t: tlora_apply(*t, mask, backend=backend), fullgraph=True, backend="aot_eager"
    )
    assert not run(rand(4, 7, dtype=F32), q, p, lam, *frozen).requires_grad
    assert run(rand(4, 7, dtype=F32), q, p.requires_grad_(), lam, *frozen).requires_grad


def test_shapes() -> None:
    weight, a1, a2, b1, b2 = (t.detach() for t in glora())
    with pytest.raises(ValueError, match=r"a2 has shape \(2, 6\); expected \(r, I\) with I = 7"):
        glora_weight(weight, a1, a2[:, :6], b1, b2)
    with pytest.raises(ValueError, match=r"b2 has shape \(2, 7\); expected \(q, I\) with q = 3"):
        glora_weight(weight, a1, a2, b1, a2)
    factors = [t.detach() for t in tlora()]
    with pytest.raises(ValueError, match=r"mask has shape \(2, 3\); expected b = 1$"):
        tlora_weight(*factors, torch.ones(2, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"mask has shape \(3, 3\); expected b = 1, or 2, from x"):
        tlora_apply(torch.zeros(2, 4, 7, dtype=F64), *factors, torch.ones(3, 3, dtype=F64))
    with pytest.raises(ValueError, match=r"mask has shape \(1, 2\); expected \(b, r\) with r = 3"):
        tlora_weight(*factors, torch.ones(2, dtype=F64))
    with pytest.raises(TypeError, match="mask is bool; expected float16"):
        tlora_weight(*factors, torch.ones(3, dtype=torch.bool))
    factors[2] = factors[2].T
    with pytest.raises(ValueError, match=r"lam has shape"):
        tlora_weight(*factors, torch.ones(3, dtype=F64))


@pytest.mark.parametrize("backend", ["triton", "tilelang", "torch"])
def test_opcheck(backend: str) -> None:
    number = torch.tensor(0.7)
    rest = (number, None, None, backend)
    torch.library.opcheck(OPS["glora_weight"].library.op, (*glora(F32), *rest))
    factors = tlora(dtype=F32)
    factors[2], factors[5] = factors[2].detach()[0].requires_grad_(), factors[5][0]
    torch.library.opcheck(OPS["tlora_weight"].library.op, (*factors, torch.ones(1, 3), *rest))
    x = rand(2, 4, 7, dtype=F32).requires_grad_()
    torch.library.opcheck(OPS["tlora_apply"].library.op, (x, *factors, torch.ones(2, 3), *rest))


def test_tlora_is_one_graph(fused: str) -> None:
    torch._dynamo.reset()
    factors, x = tlora(dtype=F32), rand(2, 4, 7, dtype=F32).requires_grad_()
    masks = torch.ones(2, 3)

    def step(x: Tensor, *t: Tensor) -> Tensor:
        return tlora_apply(x * 2, *t, masks, 0.7, backend=fused).relu()

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, *factors)
    want = step(x, *factors)
    assert torch.equal(got, want)
    leaves = [x, *factors[:3]]
    grads = (torch.autograd.grad(t.square().sum(), leaves) for t in (got, want))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
