"""What rotations promise: orthogonality, isometry, identity, conventions, errors."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor

from lycoris.functional import boft_apply, boft_weight, oft_apply, oft_weight
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import compose_plan, passes

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def cayley(blocks: Tensor) -> Tensor:
    q = blocks - blocks.mT
    eye = torch.eye(q.shape[-1], dtype=q.dtype)
    return (eye + q) @ torch.linalg.inv(eye - q)


# -------------------------------------------------------------------------- the definition


def test_oft_contracts_the_first_index() -> None:
    weight, blocks, rescale = rand(12, 5, 3), rand(4, 3, 3, seed=1), rand(12, 1, seed=2)
    r = cayley(blocks)
    expected = torch.zeros_like(weight)
    for block in range(4):
        for i in range(3):
            for j in range(3):
                expected[3 * block + j] += r[block, i, j] * weight[3 * block + i]
    torch.testing.assert_close(oft_weight(weight, blocks), expected)
    scaled = rescale[..., None] * expected
    torch.testing.assert_close(oft_weight(weight, blocks, rescale=rescale), scaled)
    got = oft_weight(weight, blocks, rescale=rescale, diff=True)
    torch.testing.assert_close(got, scaled - weight)


def test_boft_stages_contract_the_second_index() -> None:
    weight, blocks = rand(24, 5), rand(3, 4, 6, 6, seed=1)[:2] * 0.3
    expected = weight
    for stage in range(2):
        r = 0.7 * cayley(blocks[stage]) + 0.3 * torch.eye(6, dtype=F64)
        half = 2**stage * 3
        order = torch.arange(24).view(-1, 2, half).transpose(1, 2).flatten()
        moved = torch.einsum("nij,njc->nic", r, expected[order].view(4, 6, 5)).reshape(24, 5)
        expected = torch.empty_like(moved).index_copy(0, order, moved)
    torch.testing.assert_close(boft_weight(weight, blocks, multiplier=0.7), expected)
    got = boft_weight(weight, blocks, multiplier=0.7, diff=True)
    torch.testing.assert_close(got, expected - weight)


@pytest.mark.parametrize("axis", [-1, 0, 1, 2])
def test_apply_is_the_weight_rotation_on_any_axis(axis: int) -> None:
    y, oft, boft = rand(8, 8, 8), rand(2, 4, 4, seed=1), rand(2, 2, 4, 4, seed=2)
    for apply, weight, blocks in ((oft_apply, oft_weight, oft), (boft_apply, boft_weight, boft)):
        got = apply(y, blocks, axis=axis)
        expected = weight(y.movedim(axis, 0), blocks).movedim(0, axis)
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("constraint", [None, 0.5, 100.0])
def test_gradcheck(constraint: float | None) -> None:
    leaves = [rand(4, 3).requires_grad_(), rand(2, 2, 2, seed=1).requires_grad_()]
    leaves.append(rand(4, seed=2).requires_grad_())

    def run(w: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return oft_weight(w, b, rescale=s, constraint=constraint)

    assert torch.autograd.gradcheck(run, leaves)
    stages = [rand(4, 3).requires_grad_(), rand(2, 2, 2, 2, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda w, b: boft_weight(w, b, constraint=constraint, multiplier=0.7), stages
    )


# ------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize(("std", "limit"), [(1e-4, 1e-6), (0.3, 1e-5), (30.0, 2e-4), (1e4, 2e-4)])
@pytest.mark.parametrize("size", [8, 20])
def test_orthogonality(fused: str, std: float, limit: float, size: int) -> None:
    blocks = (rand(2, size, size) * std).float()
    eye = torch.eye(size).repeat(2, 1)
    r = oft_weight(eye, blocks, backend=fused).view(2, size, size).double()
    assert (r @ r.mT - torch.eye(size)).abs().max() < limit
    # R - I itself, which a subtraction would lose.
    moved = oft_weight(eye, blocks, diff=True, backend=fused).view(2, size, size).double()
    exact = cayley(blocks.double()).mT - torch.eye(size)
    assert (moved - exact).norm() < 2e-7 * exact.norm()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 1e-3), (torch.float32, 1e-6)])
def test_isometry(fused: str, dtype: torch.dtype, limit: float) -> None:
    weight, blocks = rand(64, 40).to(dtype), (rand(3, 8, 8, 8, seed=1) * 0.3).to(dtype)
    for got in (
        oft_weight(weight, blocks[0], backend=fused),
        boft_weight(weight, blocks, backend=fused),
    ):
        ratio = got.double().norm() / weight.double().norm()
        assert abs(ratio - 1) < limit


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("constraint", [None, 0.5])
def test_zero_blocks_give_the_input_back(
    fused: str, dtype: torch.dtype, constraint: float | None
) -> None:
    weight = rand(64, 40).to(dtype)
    weight[0, :2] = torch.tensor([0.0, -0.0])
    blocks = torch.zeros(3, 8, 8, 8, dtype=dtype, requires_grad=True)
    outs = (
        oft_weight(weight, blocks[0], constraint=constraint, backend=fused),
        boft_weight(weight, blocks, constraint=constraint, backend=fused),
    )
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for out in outs:
        assert torch.equal(out.view(bits), weight.view(bits))
        (got,) = torch.autograd.grad(out.float().square().sum(), blocks)
        exact = blocks.detach().double().requires_grad_()
        wide = weight.double()
        again = oft_weight(wide, exact[0]) if out is outs[0] else boft_weight(wide, exact)
        (want,) = torch.autograd.grad(again.square().sum(), exact)
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)


def test_the_constraint_holds_and_its_gradient_goes_through_the_norm(fused: str) -> None:
    weight, blocks = rand(16, 9), rand(2, 8, 8, seed=1)
    q = blocks - blocks.mT
    held = blocks * (1.5 / q.norm())
    got = oft_weight(weight.float(), blocks.float(), constraint=1.5, backend=fused)
    torch.testing.assert_close(got.double(), oft_weight(weight, held), atol=1e-5, rtol=1e-5)
    leaf, exact = blocks.float().requires_grad_(), blocks.clone().requires_grad_()
    target = rand(16, 9, seed=3)
    out = oft_weight(weight.float(), leaf, constraint=1.5, backend=fused)
    (grad,) = torch.autograd.grad(out, leaf, target.float())
    (want,) = torch.autograd.grad(oft_weight(weight, exact, constraint=1.5), exact, target)
    assert (grad - want).norm() < 1e-5 * want.norm()
    fixed = blocks.clone().requires_grad_()
    (constant,) = torch.autograd.grad(oft_weight(weight, fixed * (1.5 / q.norm())), fixed, target)
    assert (constant - want).norm() > 0.05 * want.norm()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, 1e8])
def test_blocks_that_are_not_finite(fused: str, value: float) -> None:
    weight, blocks = rand(16, 5).float(), (rand(2, 8, 8) * 0.3).float()
    clean = oft_weight(weight, blocks, backend=fused)
    blocks[1, 0, 3] = value
    out = oft_weight(weight, blocks, backend=fused)
    assert torch.equal(out[:8], clean[:8])  # a block's fault is its own
    if value == 1e8:  # nearly a quarter turn in one plane, to fp32's last digit
        assert abs(out[8:].norm() / weight[8:].norm() - 1) < 1e-6
    if value in (1e8, 3e38):
        assert out.isfinite().all()
        return
    assert out[8:].isnan().all()
    held = oft_weight(weight, blocks, constraint=1.0, backend=fused)
    assert held[8:].isnan().all()
    # No norm is larger than a NaN; an infinite one leaves nothing of the other blocks.
    free = oft_weight(weight[:8], blocks[:1], backend=fused)
    assert torch.equal(held[:8], free if value != value else weight[:8])


def test_a_constraint_of_zero_is_not_exceeded_by_zero_blocks(fused: str) -> None:
    weight, target = rand(16, 9).float(), rand(16, 9, seed=3).float()
    found = []
    for constraint in (None, 0.0):
        leaf = torch.zeros(2, 8, 8, requires_grad=True)
        out = oft_weight(weight, leaf, constraint=constraint, backend=fused)
        assert torch.equal(out, weight)
        found.append(torch.autograd.grad(out, leaf, target)[0])
    assert torch.equal(*found)
    assert found[0].norm() > 1


@pytest.mark.parametrize("rows", [True, False])
def test_a_pack_keeps_to_its_channels(fused: str, rows: bool) -> None:
    """16 blocks of 6 are two packs of 48 channels, in tiles of 64: the second's NaN stays there."""
    blocks = (rand(16, 6, 6) * 0.3).bfloat16().requires_grad_()
    got = []
    for value in (1.0, float("nan")):
        v = rand(96, 40, seed=1).bfloat16()
        g = rand(96, 40, seed=2).bfloat16()
        v[48], g[50] = value, value
        leaf = (v.t().contiguous() if rows else v).requires_grad_()
        op = oft_apply if rows else oft_weight
        out = op(leaf, blocks, backend=fused)
        given = g.t().contiguous() if rows else g
        grads = torch.autograd.grad(out, (leaf, blocks), given)
        wide = [t.t() if rows else t for t in (out, grads[0])]
        got.append([*(t[:48] for t in wide), grads[1][:8]])
        assert all(t[48:].isfinite().all() == (value == 1.0) for t in wide)
    for clean, beside in zip(*got, strict=True):
        assert torch.equal(clean, beside)
        assert clean.isfinite().all()


@pytest.mark.parametrize(("size", "tile"), [(5, 8), (12, 16), (32, 32)])
def test_the_gradient_of_a_solve(fused: str, size: int, tile: int) -> None:
    """Tiles of a GPU's plan, which are taken as matrix products from 16 on."""
    blocks, deltas = rand(3, size, size) * 0.3, rand(3, size, size, seed=1)
    leaf = blocks.clone().requires_grad_()
    q = leaf - leaf.mT
    exact = 2 * torch.linalg.solve(torch.eye(size, dtype=F64) - q, q)
    (want,) = torch.autograd.grad(exact, leaf, deltas)
    exact = exact.detach().contiguous()
    rotate = importlib.import_module(f"lycoris.backends.{fused}.rotate")
    delta, out = torch.empty_like(blocks), torch.empty_like(blocks)
    how = {"plan": Plan(1, tile, tile, 4, 1), "policy": Policy(torch.float32, torch.float32)}
    rotate.eliminate(blocks.float(), None, None, delta, 0, **how)
    torch.testing.assert_close(delta, exact, atol=1e-6, rtol=1e-6)
    rotate.cayley_gradient(exact, deltas[None], out, 1, **how)
    torch.testing.assert_close(out, want, atol=2e-6, rtol=2e-6)
    # The same from shares of packs of two, with something else beside the blocks.
    shares = torch.full((6, 2, 2 * tile, 2 * tile), float("nan"))
    weights = torch.tensor([0.5, -1.0, 0.25, 0.25, 2.0, -1.0])
    for block in range(3):
        rows = slice(block % 2 * size, (block % 2 + 1) * size)
        shares[:, block // 2, rows, rows] = weights[:, None, None] * deltas[block].float()
    again = torch.full_like(out, float("nan"))
    rotate.cayley_gradient(exact, shares, again, 2, **how)
    torch.testing.assert_close(again, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "stages"), [(2, 3), (6, 3), (8, 4), (10, 2), (32, 2)])
def test_products_of_stages(fused: str, size: int, stages: int) -> None:
    """In tiles of a GPU's plan; only columns that have their blocks in common load them once."""
    (part,) = passes(stages, size, size << stages, True)
    scaled = rand(stages, 1 << stages, size, size) * 0.3
    given = rand(part.products, seed=1)
    butterfly = importlib.import_module(f"lycoris.backends.{fused}.butterfly")
    rows = compose_plan(part, torch.device("cpu")).block_k
    policy = Policy(torch.float32, torch.float32)
    found = []
    for plan in (Plan(8, 8, rows, 4, 1), Plan(16, 64, rows, 4, 1)):
        products, grads = given.clone(), given.clone()
        butterfly.compose(scaled, products, part, False, plan=plan, policy=policy)
        butterfly.compose(scaled, grads, part, True, plan=plan, policy=policy)
        found.append((products, grads))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-14, rtol=1e-14)
    # The first product is that of the whole butterfly.
    products, _ = found[0]
    width, first = part.width, part.groups * part.width**2
    eye = torch.eye(size << stages, dtype=F64)
    for stage in range(stages):
        turned = eye.new_zeros(eye.shape)
        unit = size // 2 << stage
        for block in range(1 << stages):
            start = block // (1 << stage) * (size << stage) + block % (1 << stage) * (size // 2)
            at = torch.cat(
                [torch.arange(size // 2) + start, torch.arange(size // 2) + start + unit]
            )
            at = at.view(2, -1).t().reshape(-1)
            turned[at[:, None], at] = scaled[stage, block]
        eye = eye + turned @ eye
    order = torch.arange(width).view(-1, size // 2)
    bits = [int(f"{y:0{stages}b}"[::-1], 2) for y in range(1 << stages)]
    order = order[bits].reshape(-1)
    for group in range(part.groups):
        own = slice(group * width, (group + 1) * width)
        want = (eye[own, own] - torch.eye(width, dtype=F64)).t()[:, order]
        torch.testing.assert_close(products[:first].view(-1, width, width)[group], want)


# --------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 4, 4), r"blocks has shape \(3, 4, 4\) and rotates 3 \* 4 channels; expected 16"),
        ((16, 1, 1), r"blocks are 1 x 1; expected a size from 2 to 256"),
        ((4, 4, 3), r"blocks has shape \(4, 4, 3\); expected \(n, s, s\) with s = 4, from blocks"),
        ((16,), r"blocks has shape \(16,\); expected \(n, s, s\)"),
    ],
)
def test_oft_shapes(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        oft_weight(torch.zeros(16, 5), torch.zeros(shape))
    with pytest.raises(ValueError, match=message):
        oft_apply(torch.zeros(5, 16), torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 3, 4, 4), r"rotates 3 \* 4 channels; expected 24"),
        ((1, 8, 3, 3), r"blocks are 3 x 3; expected an even size from 2 to 256"),
        ((4, 6, 4, 4), r"4 stages of 4-wide blocks mix groups of 4 \* 2\^3 .* do not divide 24"),
        ((6, 4, 4), r"blocks has shape \(6, 4, 4\); expected \(m, n, b, b\)"),
    ],
)
def test_boft_shapes(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        boft_weight(torch.zeros(24, 5), torch.zeros(shape))


def test_other_arguments() -> None:
    y, blocks = torch.zeros(3, 16), torch.zeros(4, 4, 4)
    with pytest.raises(ValueError, match=r"axis is 2; expected one of y's 2, of shape \(3, 16\)"):
        oft_apply(y, blocks, axis=2)
    with pytest.raises(ValueError, match="constraint is -1; expected a number of at least 0"):
        oft_apply(y, blocks, constraint=-1)
    with pytest.raises(TypeError, match="constraint is str; expected a number or None"):
        oft_apply(y, blocks, constraint="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"rescale has shape \(4,\); expected \(O\)"):
        oft_apply(y, blocks, rescale=torch.zeros(4))
    with pytest.raises(TypeError, match="y is float16 but blocks is bfloat16"):
        oft_apply(y.half(), blocks.bfloat16())
    with pytest.raises(TypeError, match="y is list; expected a tensor"):
        oft_apply([1.0], blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("transposed", [False, True])
def test_tilelang_warns_of_nothing_in_the_products_of_stages(
    transposed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tilelang")
    from lycoris.backends.tilelang import butterfly, common, host_c

    common.load_tilelang()
    capfd.readouterr()
    host_c.lower(butterfly.compose_kernel(transposed, None, butterfly.MIXERS))
    out, err = capfd.readouterr()
    assert "arning" not in out + err
