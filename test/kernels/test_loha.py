"""LoHa: its definition spelled out once more, the truths of its gradients, and bad input."""

from __future__ import annotations

import pytest
import torch

from lycoris.functional import loha_apply, loha_weight
from lycoris.kernels.ops import loha
from lycoris.kernels.ops.loha_apply import uses_khatri_rao
from lycoris.kernels.plan import CHUNK
from lycoris.kernels.schedule import Schedule

F64 = torch.float64


def rand(*shape: int, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def factors(n_out: int, n_in: int, rank: int, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    shapes = ((n_out, rank), (rank, n_in), (n_out, rank), (rank, n_in))
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(s, dtype=F64, generator=generator).to(dtype) for s in shapes]


# ------------------------------------------------------------------------------------ definition


def test_loha_weight_multiplies_two_low_rank_weights() -> None:
    a1, b1, a2, b2 = factors(5, 7, 3)
    base = rand(5, 7)
    expected = base.clone()
    for o in range(5):
        for i in range(7):
            halves = [sum(a[o, r] * b[r, i] for r in range(3)) for a, b in ((a1, b1), (a2, b2))]
            expected[o, i] += 0.7 * halves[0] * halves[1]
    torch.testing.assert_close(loha_weight(a1, b1, a2, b2, 0.7, base=base), expected)


def test_tucker_has_its_factors_transposed() -> None:
    a1, a2, b1, b2 = rand(2, 4), rand(2, 4) + 1, rand(3, 5), rand(3, 5) - 1
    t1, t2 = rand(2, 3, 3, 3), rand(2, 3, 3, 3) * 2
    halves = [torch.einsum("pqhw,po,qi->oihw", t, a, b) for t, a, b in ((t1, a1, b1), (t2, a2, b2))]
    expected = 0.3 * halves[0] * halves[1]
    got = loha_weight(a1, b1, a2, b2, 0.3, t1=t1, t2=t2)
    torch.testing.assert_close(got, expected)
    merged = loha_weight(a1, b1, a2, b2, 0.3, t1=t1, t2=t2, base=expected)
    torch.testing.assert_close(merged, 2 * expected)


@pytest.mark.parametrize("rank", [1, 2, 9])
def test_loha_apply_is_the_product_with_loha_weight(rank: int) -> None:
    both = {uses_khatri_rao(24, 20, r) for r in (1, 2, 9)}
    assert both == {True, False}
    x, base, parts = rand(2, 3, 20), rand(2, 3, 24), factors(24, 20, rank)
    expected = base + x @ loha_weight(*parts, 0.7).T
    torch.testing.assert_close(loha_apply(x, *parts, 0.7, base=base), expected)


def test_shapes_of_conv_factors() -> None:
    a, b = rand(6, 2), rand(2, 3, 3, 3)
    assert loha_weight(a, b, a, b).shape == (6, 3, 3, 3)
    flat = b.flatten(1)
    assert loha_weight(a, flat, a, flat).shape == (6, 27)
    base = rand(6, 3, 3, 3)
    assert loha_weight(a, flat, a, flat, base=base).shape == base.shape
    up, down = a[..., None, None], rand(2, 3, 1, 1)
    assert loha_apply(rand(4, 3), up, down, up, down).shape == (4, 6)


def test_the_rank_decides_the_variant() -> None:
    assert uses_khatri_rao(4096, 4096, 32)
    assert not uses_khatri_rao(4096, 4096, 33)
    assert uses_khatri_rao(1280, 1280, 17)
    assert not uses_khatri_rao(1280, 1280, 18)


def test_gradcheck() -> None:
    for rank in (1, 4):
        leaves = [t.requires_grad_() for t in (rand(3, 9), *factors(8, 9, rank))]
        assert torch.autograd.gradcheck(lambda *t: loha_apply(*t, 0.7), leaves)
        assert torch.autograd.gradgradcheck(lambda *t: loha_apply(*t, 0.7), leaves)
    leaves = [t.requires_grad_() for t in factors(5, 4, 2)]
    assert torch.autograd.gradcheck(lambda *t: loha_weight(*t, 0.7), leaves)
    shapes = ((2, 4), (3, 5), (2, 4), (3, 5), (2, 3, 2), (2, 3, 2))
    leaves = [rand(*s).requires_grad_() for s in shapes]

    def tucker(a1, b1, a2, b2, t1, t2):
        return loha_weight(a1, b1, a2, b2, 0.7, t1=t1, t2=t2)

    assert torch.autograd.gradcheck(tucker, leaves)
    assert torch.autograd.gradgradcheck(tucker, leaves)


# ------------------------------------------------------------------------- truths of the gradients


def grads(op, operands: list[torch.Tensor], backend: str, scale: float, size: float = 1.0):
    leaves = [t.detach().clone().requires_grad_() for t in operands]
    out = op(*leaves, scale, backend=backend)
    generator = torch.Generator().manual_seed(0)
    grad = size * torch.randn(out.shape, generator=generator)
    return out, torch.autograd.grad(out, leaves, grad.to(out.dtype))


@pytest.mark.parametrize("rank", [2, 5])
def test_a_product_that_overflows_unscaled_is_finite(fused: str, rank: int) -> None:
    half = torch.float16
    parts = [6 * t for t in factors(40, 48, rank, half)]
    first, second = parts[0].float() @ parts[1].float(), parts[2].float() @ parts[3].float()
    assert 3000 * max(first.abs().max(), second.abs().max()) > 65504
    _, found = grads(loha_weight, parts, fused, 2.0**-14, 3000)
    assert all(g.isfinite().all() and g.any() for g in found)
    x = rand(33, 48, dtype=half)
    _, found = grads(loha_apply, [x, *parts], fused, 2.0**-14, 3000)
    assert all(g.isfinite().all() and g.any() for g in found)


@pytest.mark.parametrize("rank", [2, 5])
def test_an_fp32_leaf_gets_an_fp32_gradient(fused: str, rank: int) -> None:
    x, parts = rand(33, 48, dtype=torch.bfloat16), factors(40, 48, rank, torch.float32)
    out, found = grads(loha_apply, [x, *parts], fused, 0.7)
    assert out.dtype == torch.float32  # the promotion, from the fp32 accumulator
    assert (out != out.bfloat16().float()).any()
    assert [g.dtype for g in found] == [torch.bfloat16] + [torch.float32] * 4
    for g in found[1:]:
        assert (g != g.bfloat16().float()).float().mean() > 0.9


def test_mixed_dtypes_of_the_weight(fused: str) -> None:
    parts = factors(40, 48, 2, torch.bfloat16)
    base = rand(40, 48, dtype=torch.float32)
    out = loha_weight(*parts, 0.7, base=base, backend=fused)
    assert out.dtype == torch.float32
    delta = loha_weight(*(t.double() for t in parts), 0.7)
    torch.testing.assert_close(out.double(), base.double() + delta, rtol=1e-6, atol=1e-5)


def test_a_delta_below_the_base_ulp_reaches_the_output(fused: str) -> None:
    weight = torch.ones(40, 48, dtype=torch.bfloat16)
    parts = factors(40, 48, 2, torch.bfloat16)
    tiny = 2.0**-12
    merged = loha_weight(*parts, tiny, base=weight, backend=fused)
    kept = (merged == weight).float().mean()
    assert kept > 0.5  # merged into bf16 most of the delta is lost ...
    x = rand(33, 48, dtype=torch.bfloat16)
    bypass = loha_apply(x, *parts, tiny, backend=fused, out_dtype=torch.float32)
    want = x.double() @ loha_weight(*(t.double() for t in parts), tiny).T
    assert (bypass.double() - want).norm() < 1e-2 * want.norm()  # ... and none beside it


def test_frozen_operands_cost_nothing(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    plain = Schedule.launch

    def launch(self: Schedule, family: str, name: str, *args: object, **kw: object) -> None:
        launched.append(name)
        plain(self, family, name, *args, **kw)

    monkeypatch.setattr(Schedule, "launch", launch)
    x, parts = rand(8, 20, dtype=torch.float32), factors(24, 20, 9, torch.float32)
    out = loha_apply(x, *(t.requires_grad_() for t in parts), backend=fused)
    launched.clear()
    out.sum().backward()
    assert "dense_product" not in launched  # x is frozen
    out = loha_apply(x.requires_grad_(), *(t.detach() for t in parts), backend=fused)
    launched.clear()
    out.sum().backward()
    assert launched == ["dense_product"]  # the factors are


@pytest.mark.parametrize("wanted", [0, 3])
@pytest.mark.parametrize("rank", [2, 9])
def test_one_gradient_alone(fused: str, wanted: int, rank: int) -> None:
    x, parts = rand(8, 20, dtype=torch.float32), factors(24, 20, rank, torch.float32)
    _, whole = grads(loha_apply, [x, *parts], fused, 0.7)
    leaves = [t.detach() for t in parts]
    leaves[wanted].requires_grad_()
    out = loha_apply(x, *leaves, 0.7, backend=fused)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(out.shape, generator=generator)
    (alone,) = torch.autograd.grad(out, leaves[wanted], grad)
    assert torch.equal(alone, whole[1 + wanted])


@pytest.mark.parametrize("rank", [2, 12])
def test_apply_allocates_neither_the_weight_nor_its_gradient(
    fused: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    plain = Schedule.empty

    def empty(self: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        t = plain(self, shape, dtype)
        made.append(t.numel() * t.element_size())
        return t

    monkeypatch.setattr(Schedule, "empty", empty)
    n_out, n_in = 384, 320
    x, parts = rand(3, n_in, dtype=torch.float32), factors(n_out, n_in, rank, torch.float32)
    grads(loha_apply, [x, *parts], fused, 0.7)
    assert max(made) < n_out * n_in  # bytes: a quarter of an fp32 weight


def test_partial_sums_stay_small_beside_the_weight() -> None:
    for m, n, rank in ((4096, 4096, 32), (4096, 4096, 64), (12288, 3072, 130), (3072, 12288, 48)):
        plan, rows = loha.grads_plan(m, n, rank, 2, 132, 0)
        tiles = (-(-n // plan.block_n), rows // plan.block_m)
        assert rows % plan.block_m == 0
        assert 8 * rank * (tiles[0] * rows + tiles[1] * n) <= max(m * n, 2**24)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rank", [4, 16, 32, 130])
@pytest.mark.parametrize(("m", "n"), [(4096, 4096), (3072, 12288), (1280, 1280), (4099, 3071)])
def test_strips_cover_the_columns_in_chains_of_one_level(
    m: int, n: int, rank: int, itemsize: int
) -> None:
    for stored in (2, 4):
        plan, _ = loha.grads_plan(m, n, rank, itemsize, 132, stored)
        strip, tiles = plan.strip(n), -(-n // plan.block_n)
        assert (plan.splits - 1) * strip < tiles <= plan.splits * strip
        assert strip * plan.block_n <= CHUNK
        assert strip == 1 or (itemsize == 2 and rank <= plan.block_k)
        # Two tiles of the gradient and what is made of one fit an A100.
        assert plan.num_stages * plan.block_m * plan.block_n * stored <= 2**16 or strip == 1
    if (m, n, rank, itemsize) == (4096, 4096, 16, 2):
        assert loha.grads_plan(m, n, rank, itemsize, 132, 2)[0].splits == 16


# -------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("backend", ["torch", "triton", "tilelang", None])
def test_shapes_that_do_not_fit(backend: str | None) -> None:
    a1, b1, a2, b2 = factors(6, 8, 2, torch.float32)
    with pytest.raises(ValueError, match=r"loha_weight: w2_b has shape \(2, 7\); expected .*N = 8"):
        loha_weight(a1, b1, a2, b2[:, :7], backend=backend)
    with pytest.raises(ValueError, match=r"w2_a has shape \(6, 1\); expected \(O, r\) with r = 2"):
        loha_weight(a1, b1, a2[:, :1], b2, backend=backend)
    with pytest.raises(ValueError, match=r"base has shape \(8, 6\); expected \(O, \*N\)"):
        loha_weight(a1, b1, a2, b2, base=torch.zeros(8, 6), backend=backend)
    with pytest.raises(ValueError, match=r"w1_b has shape \(2, 8\); expected \(r, I\) with I = 7"):
        loha_apply(torch.zeros(3, 7), a1, b1, a2, b2, backend=backend)
    with pytest.raises(ValueError, match="expected r to be at least 1"):
        loha_weight(a1[:, :0], b1[:0], a2[:, :0], b2[:0], backend=backend)
    with pytest.raises(TypeError, match="w1_a is float16 but w1_b is bfloat16"):
        loha_weight(a1.half(), b1.bfloat16(), a2, b2, backend=backend)


def test_tucker_cores_come_in_pairs() -> None:
    a, b, core = torch.zeros(2, 6), torch.zeros(3, 8), torch.zeros(2, 3, 3)
    with pytest.raises(ValueError, match="loha_weight: t1 is given and t2 is None; expected both"):
        loha_weight(a, b, a, b, t1=core)
    with pytest.raises(ValueError, match="loha_weight: t2 is given and t1 is None; expected both"):
        loha_weight(a, b, a, b, t2=core)
    with pytest.raises(ValueError, match=r"t2 has shape \(2, 3, 4\); .*k = 3, from t1"):
        loha_weight(a, b, a, b, t1=core, t2=torch.zeros(2, 3, 4))
