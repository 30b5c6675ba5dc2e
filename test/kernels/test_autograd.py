"""What eager autograd must do: second order, transforms, checkpointing, layouts, memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lycoris.functional import lora_apply, lora_weight
from lycoris.kernels.schedule import Schedule

Factors = tuple[Tensor, Tensor, Tensor]


def factors(dtype: torch.dtype = torch.float32, grad: bool = True) -> Factors:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 5, 8), (6, 2), (2, 8))
    x, up, down = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return tuple(t.requires_grad_(grad) for t in (x, up, down))  # type: ignore[return-value]


def plain(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return 0.7 * ((x @ down.T) @ up.T)


def test_second_order_with_operands_that_depend_on_each_other(fused: str) -> None:
    seed = torch.randn(2, 8, requires_grad=True)
    up = torch.randn(8, 2)

    def grads(op: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        down = seed * 2
        x = down.repeat(3, 1)[:5]
        out = op(x, up, down)
        (first,) = torch.autograd.grad(out.square().sum(), seed, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), seed)
        return first, second

    got = grads(lambda *t: lora_apply(*t, 0.7, backend=fused))
    torch.testing.assert_close(got, grads(plain), rtol=1e-4, atol=1e-4)


def test_second_order_with_one_tensor_in_two_places(fused: str) -> None:
    z = torch.randn(4, 4, requires_grad=True)

    def grads(op: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        (first,) = torch.autograd.grad(op(z, z, z).square().sum(), z, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), z)
        return first, second

    got = grads(lambda *t: lora_apply(*t, 0.7, backend=fused))
    torch.testing.assert_close(got, grads(plain), rtol=1e-3, atol=1e-3)


def test_first_order_with_create_graph_and_base(fused: str) -> None:
    x, up, down = factors()
    base = torch.randn(3, 5, 6, requires_grad=True)
    out = lora_apply(x, up, down, 0.7, base=base, backend=fused)
    got = torch.autograd.grad(out.square().sum(), (x, up, down, base), create_graph=True)
    want = torch.autograd.grad((base + plain(x, up, down)).square().sum(), (x, up, down, base))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert torch.autograd.grad(got[0].sum(), base)[0].shape == base.shape


def test_func_grad_and_vmap(fused: str) -> None:
    x, up, down = factors(grad=False)
    got = torch.func.grad(lambda u: lora_apply(x, u, down, 0.7, backend=fused).square().sum())(up)
    want = torch.func.grad(lambda u: plain(x, u, down).square().sum())(up)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    rows = torch.func.vmap(lambda row: lora_apply(row, up, down, 0.7, backend=fused))(x)
    torch.testing.assert_close(rows, plain(x, up, down), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(fused: str, reentrant: bool) -> None:
    leaves = factors()
    direct = torch.autograd.grad(lora_apply(*leaves, 0.7, backend=fused).sum(), leaves)

    def run(*t: Tensor) -> Tensor:
        return lora_apply(*t, 0.7, backend=fused)

    for leaf in leaves:
        leaf.grad = None
    checkpoint(run, *leaves, use_reentrant=reentrant).sum().backward()
    for leaf, want in zip(leaves, direct, strict=True):
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, want)


@pytest.mark.parametrize("wanted", ["x", "up", "down", "base", "x down", "up base"])
def test_only_the_needed_gradients_cost_anything(
    fused: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    family = importlib.import_module(f"lycoris.backends.{fused}.lora")
    launches: list[int] = []
    plain_launch = family.matmul

    def counted(*args: object, **kw: object) -> None:
        launches.append(1)
        plain_launch(*args, **kw)

    named = dict(zip(("x", "up", "down"), factors(grad=False), strict=True))
    named["base"] = torch.randn(3, 5, 6)
    for name in wanted.split():
        named[name].requires_grad_()
    out = lora_apply(named["x"], named["up"], named["down"], 0.7, base=named["base"], backend=fused)
    monkeypatch.setattr(family, "matmul", counted)
    out.sum().backward()
    for name, t in named.items():
        assert (t.grad is not None) == (name in wanted.split())
    expected = {"x": 2, "up": 2, "down": 2, "base": 0, "x down": 3, "up base": 2}
    assert len(launches) == expected[wanted]


def test_nothing_but_the_inputs_is_saved(fused: str) -> None:
    x, up, down = factors()
    base = torch.randn(3, 5, 6, requires_grad=True)
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        lora_apply(x, up, down, 0.7, base=base, backend=fused)
    assert {t.data_ptr() for t in saved} == {x.data_ptr(), up.data_ptr(), down.data_ptr()}


def test_the_bypass_never_allocates_the_weight(fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n_in, n_out, tokens = 160, 144, 5
    sizes: list[int] = []
    plain_empty = Schedule.empty

    def empty(self: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = plain_empty(self, shape, dtype)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Schedule, "empty", empty)
    x, up, down = torch.randn(tokens, n_in), torch.randn(n_out, 2), torch.randn(2, n_in)
    leaves = [t.requires_grad_() for t in (x, up, down)]
    lora_apply(*leaves, 0.7, backend=fused).sum().backward()
    assert len(sizes) == 7  # h, y; then h, q and three gradients
    assert max(sizes) <= tokens * max(n_in, n_out)


def test_nothing_aliases_an_input(fused: str) -> None:
    x, up, down = factors()
    base = torch.randn(3, 5, 6, requires_grad=True)
    out = lora_apply(x, torch.zeros_like(up), down, base=base, backend=fused)
    assert torch.equal(out, base)
    assert out.data_ptr() != base.data_ptr()
    grad = torch.ones_like(out)
    out.backward(grad)
    assert base.grad is not None
    assert base.grad.data_ptr() != grad.data_ptr()


def test_two_runs_are_bitwise_equal(fused: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, up, down = (torch.randn(s, generator=generator) for s in ((1100, 24), (20, 3), (3, 24)))
    leaves = tuple(t.requires_grad_() for t in (x, up, down))

    def run() -> tuple[Tensor, ...]:
        out = lora_apply(*leaves, 0.7, backend=fused)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    for a, b in zip(run(), run(), strict=True):
        assert torch.equal(a, b)


def test_misaligned_and_overlapping_inputs(fused: str) -> None:
    x, up, down = factors(torch.bfloat16, grad=False)
    want = lora_apply(x, up, down, 0.7, backend=fused)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    assert shifted.data_ptr() % 16
    assert torch.equal(lora_apply(shifted, up, down, 0.7, backend=fused), want)
    windows = torch.randn(10, dtype=torch.bfloat16).unfold(0, 8, 1)
    assert torch.equal(
        lora_apply(windows, up, down, backend=fused),
        lora_apply(windows.clone(), up, down, backend=fused),
    )


def test_a_0d_scale_is_read_by_the_kernel(fused: str) -> None:
    x, up, down = factors()
    want = lora_apply(x, up, down, 0.25, backend=fused)
    for dtype in (torch.float32, torch.float16, torch.float64):
        got = lora_apply(x, up, down, torch.tensor(0.25, dtype=dtype), backend=fused)
        assert torch.equal(got, want)
    got = lora_apply(x, up, down, torch.tensor(0.25), backend=fused)
    a = torch.autograd.grad(got.sum(), (x, up, down))
    b = torch.autograd.grad(want.sum(), (x, up, down))
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_no_tokens_and_no_kernel(fused: str) -> None:
    _, up, down = factors()
    x = torch.randn(4, 0, 8, requires_grad=True)
    base = torch.randn(4, 0, 6, requires_grad=True)
    out = lora_apply(x, up, down, 0.7, base=base, backend=fused)
    assert out.shape == (4, 0, 6)
    out.sum().backward()
    assert up.grad is not None
    assert not up.grad.any()
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_under_a_dispatch_mode_and_on_meta(fused: str) -> None:
    x, up, down = factors()
    with FlopCounterMode(display=False):
        out = lora_apply(x, up, down, 0.7, backend=fused)
        out.sum().backward()
    torch.testing.assert_close(out, plain(x, up, down), rtol=1e-4, atol=1e-4)
    assert x.grad is not None
    meta = lora_apply(*(t.detach().to("meta") for t in (x, up, down)))
    assert meta.shape == out.shape
    assert meta.is_meta


def test_fp16_gradients_survive_where_the_unscaled_product_overflows(fused: str) -> None:
    x = torch.randn(8, 16, dtype=torch.float16)
    up = torch.full((64, 2), 8.0, dtype=torch.float16)
    down = torch.randn(2, 16, dtype=torch.float16, requires_grad=True)
    out = lora_apply(x, up, down, 2.0**-10, backend=fused)
    grad = torch.full_like(out, 1024.0)
    assert (grad.double() @ up.double()).max() > torch.finfo(torch.float16).max
    out.backward(grad)
    assert down.grad is not None
    assert torch.isfinite(down.grad).all()


def test_a_delta_below_the_weights_ulp_reaches_the_output(fused: str) -> None:
    weight = torch.ones(16, 16, dtype=torch.bfloat16)
    up = torch.full((16, 1), 2.0**-6, dtype=torch.bfloat16)
    down = torch.full((1, 16), 2.0**-6, dtype=torch.bfloat16)
    assert torch.equal(lora_weight(up, down, base=weight, backend=fused), weight)
    x = torch.eye(16, dtype=torch.bfloat16)
    assert lora_apply(x, up, down, backend=fused).abs().min() == 2.0**-12
