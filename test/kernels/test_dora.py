"""DoRA: definitions, conventions, edge inputs, errors, and what is saved and allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.functional import dora_apply, dora_lora_weight, dora_weight, lora_weight
from lycoris.kernels.ops import dora_lora
from lycoris.kernels.schedule import Schedule
from lycoris.kernels.ulp import spacings

F64 = torch.float64


def rand(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + seed)
    return torch.randn(shape, dtype=F64, generator=generator)


def norms(weight: Tensor, axis: str) -> Tensor:
    place = 0 if axis == "out" else 1
    return weight.square().sum([d for d in range(weight.dim()) if d != place]).sqrt()


def spread(values: Tensor, weight: Tensor, axis: str) -> Tensor:
    shape = [1] * weight.dim()
    shape[0 if axis == "out" else 1] = -1
    return values.reshape(shape)


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("shape", [(5, 7), (4, 3, 3, 2)])
def test_the_definition(axis: str, shape: tuple[int, ...]) -> None:
    weight, delta = rand(*shape), rand(*shape, seed=1)
    n = shape[0 if axis == "out" else 1]
    magnitude = rand(n, seed=2)
    merged = weight + delta
    direction = merged / spread(norms(merged, axis), merged, axis)
    full = direction * spread(magnitude, merged, axis)
    got = dora_weight(weight, magnitude, delta=delta, axis=axis)
    torch.testing.assert_close(got, full)
    got = dora_weight(weight, magnitude, delta=delta, axis=axis, multiplier=0.3)
    torch.testing.assert_close(got, merged + 0.3 * (full - merged))


@pytest.mark.parametrize("axis", ["out", "in"])
def test_a_lora_delta_that_is_not_stored(axis: str) -> None:
    weight, up, down = rand(4, 3, 3, 3), rand(4, 2, 1, 1), rand(2, 3, 3, 3)
    magnitude = rand(4 if axis == "out" else 3)
    delta = lora_weight(up, down, 0.3)
    want = dora_weight(weight, magnitude, delta=delta, axis=axis, multiplier=0.6)
    for factor in (down, down.flatten(1)):
        got = dora_lora_weight(weight, magnitude, up, factor, 0.3, axis=axis, multiplier=0.6)
        torch.testing.assert_close(got, want)


def test_apply_is_the_product_with_the_weight() -> None:
    x, weight, up, down, magnitude = rand(2, 3, 7), rand(5, 7), rand(5, 2), rand(2, 7), rand(5)
    got = dora_apply(x @ weight.T, x, weight, up, down, magnitude, 0.7)
    want = x @ dora_lora_weight(weight, magnitude, up, down, 0.7).T
    torch.testing.assert_close(got, want)


def test_gradcheck() -> None:
    leaves = [t.requires_grad_() for t in (rand(4, 3, 2), rand(3), rand(4, 3, 2, seed=1))]
    shapes = ((3, 4), (3, 5), (4, 5), (4, 2), (2, 5), (4,))
    operands = [rand(*shape, seed=3).requires_grad_() for shape in shapes]

    def weight(w: Tensor, m: Tensor, d: Tensor) -> Tensor:
        return dora_weight(w, m, delta=d, multiplier=0.7, axis="in")

    def apply(*t: Tensor) -> Tensor:
        return dora_apply(*t, 0.7)

    for run, given in ((weight, leaves), (apply, operands)):
        assert torch.autograd.gradcheck(run, given)
        assert torch.autograd.gradgradcheck(run, given)


def test_a_detached_norm_is_a_constant() -> None:
    weight, magnitude = rand(4, 6).requires_grad_(), rand(4)
    (grad,) = torch.autograd.grad(dora_weight(weight, magnitude, detach_norm=True).sum(), weight)
    want = (magnitude / norms(weight.detach(), "out"))[:, None].expand(4, 6)
    torch.testing.assert_close(grad, want)


@pytest.mark.parametrize("axis", ["out", "in"])
@pytest.mark.parametrize("multiplier", [1.0, 0.7])
def test_identity_at_init(fused: str, axis: str, multiplier: float) -> None:
    weight = rand(40, 48).bfloat16()
    magnitude = norms(weight.double(), axis).float()
    options: dict[str, Any] = {"multiplier": multiplier, "axis": axis, "backend": fused}
    out = dora_weight(weight, magnitude, **options)
    assert out.dtype is torch.float32
    assert ((out - weight).abs() <= spacings(torch.bfloat16, weight) / 2).all()
    # Closer still: the factor is 1 to a rounding or two of fp32.
    assert ((out - weight).abs() <= 3 * spacings(torch.float32, weight)).all()
    assert torch.equal(dora_weight(weight, magnitude, out_dtype=torch.bfloat16, **options), weight)


@pytest.mark.parametrize("axis", ["out", "in"])
def test_lines_of_zeros_and_tiny_ones(fused: str, axis: str) -> None:
    weight = rand(33, 70).float()
    lines = weight if axis == "out" else weight.T
    lines[3] = 0
    lines[5] *= 1e-30
    lines[7] *= 1e30
    lines[9, :-1] = 0
    magnitude = torch.rand(lines.shape[0]) + 0.5
    grad = rand(33, 70, seed=1).float()

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (weight, magnitude)]
        out = dora_weight(*leaves, multiplier=0.7, axis=axis, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    for got, want in zip(run(fused, torch.float32), run("torch", F64), strict=True):
        assert got.isfinite().all()
        rows = (got, want) if axis == "out" or got.dim() == 1 else (got.T, want.T)
        for line, exact in zip(*rows, strict=True):
            torch.testing.assert_close(
                line.double(), exact, rtol=1e-4, atol=3e-6 * exact.abs().max().item()
            )


@pytest.mark.parametrize("axis", ["out", "in"])
def test_tiny_and_huge_lines_under_a_lora(fused: str, axis: str) -> None:
    """Parts of one line that lie at opposite ends of fp32's range, beside ordinary lines."""
    weight = rand(70, 90).float()
    lines = weight if axis == "out" else weight.T
    lines[3] = 0
    lines[5] *= 1e-30
    lines[7] *= 1e30
    lines[9, : lines.shape[1] // 2] *= 1e-30
    lines[11, 50:] *= 1e25
    magnitude = torch.rand(lines.shape[0]) + 0.5
    up, down = torch.zeros(70, 3), rand(3, 90).float()

    def run(backend: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (weight, magnitude)]
        out = dora_lora_weight(*leaves, up.to(dtype), down.to(dtype), axis=axis, backend=backend)
        grad = rand(70, 90, seed=1).float().to(dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    for got, want in zip(run(fused, torch.float32), run("torch", F64), strict=True):
        assert got.isfinite().all()
        rows = (got, want) if axis == "out" or got.dim() == 1 else (got.T, want.T)
        for line, exact in zip(*rows, strict=True):
            torch.testing.assert_close(
                line.double(), exact, rtol=1e-4, atol=3e-6 * exact.abs().max().item()
            )


@pytest.mark.parametrize(
    ("shape", "axis", "magnitudes"),
    [
        ((4, 4), "out", [(4,), (4, 1)]),
        ((4, 4), "in", [(4,), (1, 4)]),
        ((4, 4, 3, 3), "out", [(4,), (4, 1), (4, 1, 1, 1)]),
        ((4, 4, 3, 3), "in", [(4,), (1, 4), (1, 4, 1, 1)]),
    ],
)
def test_shapes_of_the_magnitude(
    shape: tuple[int, ...], axis: str, magnitudes: list[tuple[int, ...]]
) -> None:
    weight, magnitude = rand(*shape), rand(4)
    want = dora_weight(weight, magnitude, axis=axis)
    for m in magnitudes:
        leaf = magnitude.reshape(m).requires_grad_()
        got = dora_weight(weight, leaf, axis=axis)
        assert torch.equal(got, want)
        (grad,) = torch.autograd.grad(got.sum(), leaf)
        assert grad.shape == m


@pytest.mark.parametrize(
    ("axis", "shape", "expected"),
    [
        ("out", (1, 4), r"expected \(4,\) or \(4, 1, \.\.\.\), one for each of weight's rows"),
        ("out", (1, 4, 1, 1), r"expected \(4,\) or \(4, 1, \.\.\.\)"),
        ("in", (4, 1), r"expected \(4,\) or \(1, 4, 1, \.\.\.\), .* input channels"),
        ("out", (5,), r"magnitude has shape \(5,\)"),
        ("out", (), r"magnitude has shape \(\)"),
        ("out", (4, 4), r"magnitude has shape \(4, 4\)"),
        ("in", (1,), r"magnitude has shape \(1,\)"),
    ],
)
def test_a_magnitude_that_would_broadcast(axis: str, shape: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dora_weight(rand(4, 4), torch.ones(shape, dtype=F64), axis=axis)


def test_other_errors() -> None:
    weight, magnitude = rand(4, 6), rand(4)
    with pytest.raises(ValueError, match="axis is 'rows'; expected 'out' or 'in'"):
        dora_weight(weight, magnitude, axis="rows")
    with pytest.raises(ValueError, match=r"delta has shape \(6, 4\)"):
        dora_weight(weight, magnitude, delta=rand(6, 4))
    with pytest.raises(ValueError, match=r"weight has shape \(4,\)"):
        dora_weight(magnitude, magnitude)
    with pytest.raises(TypeError, match="magnitude is None"):
        dora_weight(weight, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weight is float16 but magnitude is bfloat16"):
        dora_weight(weight.half(), magnitude.bfloat16())
    with pytest.raises(ValueError, match=r"down has 5 columns; expected 6, weight's"):
        dora_lora_weight(weight, rand(6), rand(4, 2), rand(2, 5), axis="in")
    with pytest.raises(ValueError, match=r"base has shape \(2, 6\)"):
        dora_apply(rand(2, 6), rand(2, 6), weight, rand(4, 2), rand(2, 6), magnitude)


def test_only_the_norms_are_saved(fused: str) -> None:
    leaves = [t.float().requires_grad_() for t in (rand(48, 64), rand(48))]
    out = dora_weight(*leaves, backend=fused)
    kept = [t for t in out.grad_fn.saved_tensors if t is not None]  # type: ignore[union-attr]
    others = [t for t in kept if all(t is not leaf for leaf in leaves)]
    assert [(t.shape, t.dtype) for t in others] == [((48,), torch.float32)]


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of every workspace, output and gradient that a schedule makes."""
    sizes: list[int] = []
    plain = Schedule.empty

    def empty(self: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = plain(self, shape, dtype)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Schedule, "empty", empty)
    return sizes


def test_apply_never_stores_a_weight(allocated: list[int]) -> None:
    weight = rand(48, 64).float()
    shapes = ((2, 48), (2, 64), (48, 4), (4, 64), (48,))
    base, x, up, down, magnitude = (rand(*s).float().requires_grad_() for s in shapes)
    out = dora_apply(base, x, weight, up, down, magnitude, 0.7, backend="triton")
    torch.autograd.grad(out.sum(), (base, x, up, down, magnitude))
    assert allocated
    assert max(allocated) < weight.numel() / 4


def test_a_lora_delta_is_never_stored(allocated: list[int]) -> None:
    weight, magnitude = rand(48, 64).float(), rand(48).float()
    up, down = (rand(*s).float().requires_grad_() for s in ((48, 4), (4, 64)))
    out = dora_lora_weight(weight, magnitude, up, down, 0.7, backend="triton")
    torch.autograd.grad(out.sum(), (up, down))
    assert [n for n in allocated if n >= weight.numel()] == [out.numel()]


def test_frozen_operands_cost_no_kernel(
    monkeypatch: pytest.MonkeyPatch, fused_launches: Callable[[], list[str]]
) -> None:
    weight, magnitude = rand(32, 48).float(), rand(32).float().requires_grad_()
    up, down = rand(32, 4).float(), rand(4, 48).float()
    out = dora_lora_weight(weight, magnitude, up, down, backend="triton")
    out.sum().backward()
    assert fused_launches() == ["measure", "lengths", "spread", "measure", "radial"]


def test_both_factors_take_one_pass(fused_launches: Callable[[], list[str]]) -> None:
    weight, magnitude = rand(32, 48).float(), rand(32).float()
    up, down = (rand(*s).float().requires_grad_() for s in ((32, 4), (4, 48)))
    out = dora_lora_weight(weight, magnitude, up, down, backend="triton")
    out.sum().backward()
    assert fused_launches()[3:] == ["measure", "radial", "contract", "add_up"]


def test_a_long_rank_takes_two_passes_with_fewer_sums(
    fused: str, monkeypatch: pytest.MonkeyPatch, fused_launches: Callable[[], list[str]]
) -> None:
    weight, magnitude, grad = rand(70, 100).float(), rand(70).float(), rand(70, 100, seed=1).float()
    factors = [rand(*s).float() for s in ((70, 20), (20, 100))]

    def run(backend: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in factors]
        out = dora_lora_weight(weight.to(dtype), magnitude.to(dtype), *leaves, 0.7, backend=backend)
        return torch.autograd.grad(out, leaves, grad.to(dtype))

    # From the first call on: a later one would repeat the launches of the first.
    monkeypatch.setattr(dora_lora, "_PARTIALS", 0)
    got = run(fused, torch.float32)
    assert fused_launches().count("contract") == 2
    for a, b in zip(got, run("torch", F64), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


@pytest.fixture
def fused_launches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The launchers that were asked for, in order."""
    names: list[str] = []
    plain, plain_add_up = Schedule.launch, Schedule.add_up

    def launch(self: Schedule, family: str, name: str, *args: Any, tiles: Any) -> None:
        names.append(name)
        plain(self, family, name, *args, tiles=tiles)

    def add_up(self: Schedule, *sums: tuple[Tensor, Tensor]) -> None:
        names.append("add_up")
        plain_add_up(self, *sums)

    monkeypatch.setattr(Schedule, "launch", launch)
    monkeypatch.setattr(Schedule, "add_up", add_up)
    return lambda: names


@pytest.mark.parametrize("op", ["weight", "apply"])
def test_compiled_whole(op: str) -> None:
    shapes = ((3, 32), (3, 48), (32, 48), (32, 4), (4, 48), (32,))
    operands = [rand(*s, seed=5).float().requires_grad_() for s in shapes]

    def run(*t: Tensor) -> Tensor:
        if op == "apply":
            return dora_apply(*t, 0.7, backend="triton")
        return dora_weight(t[2], t[5], multiplier=0.7, backend="triton") + 0 * sum(
            map(torch.sum, t)
        )

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, want = compiled(*operands), run(*operands)
    torch.testing.assert_close(got, want)
    grad = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(got, operands, grad), torch.autograd.grad(want, operands, grad)
    )


@pytest.mark.parametrize("backend", ["triton", "tilelang", "torch"])
def test_a_nan_reaches_its_whole_line(backend: str) -> None:
    weight, x = torch.randn(9, 13), torch.randn(5, 13)
    weight[4, 6] = float("nan")
    up, down, magnitude = torch.randn(9, 2), torch.randn(2, 13), torch.rand(9) + 0.5
    lines = torch.zeros(9, 13, dtype=torch.bool)
    lines[4] = True
    out = dora_weight(weight, magnitude, backend=backend)
    assert torch.equal(out.isnan(), lines)
    columns = torch.zeros(9, 13, dtype=torch.bool)
    columns[:, 6] = True
    out = dora_weight(weight, torch.rand(13) + 0.5, axis="in", backend=backend)
    assert torch.equal(out.isnan(), columns)
    out = dora_lora_weight(weight, magnitude, up, down, backend=backend)
    assert torch.equal(out.isnan(), lines)
    base = torch.randn(5, 9)  # finite: the weight's NaN comes in through the norm alone
    out = dora_apply(base, x, weight, up, down, magnitude, backend=backend)
    assert torch.equal(out.isnan(), lines[:, :1].t().expand(5, 9))
    leaf = magnitude.clone().requires_grad_()
    dora_weight(weight, leaf, backend=backend).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.isnan(), lines[:, 0])
