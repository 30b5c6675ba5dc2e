"""Adapters of convolutions: equal to the convolution with the rebuilt weight, in every setting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lycoris.functional import (
    OPS,
    loha_conv_apply,
    lokr_conv_apply,
    lora_conv_apply,
    lora_weight,
)

F64 = torch.float64
CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SETTINGS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((11,), (3,), {}),
    ((11,), (4,), {"padding": "same", "dilation": 3}),
    ((8, 8), (3, 3), {"padding": 1}),
    ((5, 7), (3, 2), {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    ((5, 7), (3, 3), {"padding": "same", "groups": 2}),
    ((5, 7), (2, 4), {"padding": "same"}),
    ((8, 8), (3, 3), {"padding": "valid", "stride": 2, "groups": 2}),
    ((8, 8), (1, 1), {}),
    ((8, 8), (1, 1), {"stride": 2, "groups": 2}),
    ((8, 8), (1, 1), {"padding": 1}),
    ((4, 5, 6), (2, 3, 1), {"stride": (1, 2, 1), "padding": (0, 1, 0), "groups": 2}),
]
each_setting = pytest.mark.parametrize(("image", "kernel", "settings"), SETTINGS)


def rand(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


def convolve(x: Tensor, weight: Tensor, settings: dict[str, Any]) -> Tensor:
    return CONV[x.dim() - 2](x, weight, **settings)


def lora(kernel: tuple[int, ...], mid: bool) -> tuple[Callable[..., Tensor], list[Tensor], Tensor]:
    """The op, its factors, and the weight they make: 6 outputs, 4 inputs."""
    if mid:
        up, core, down = rand(6, 3), rand(3, 2, *kernel), rand(2, 4)
        weight = torch.einsum("op,pq...,qi->oi...", up, core, down)

        def apply(x: Tensor, up: Tensor, core: Tensor, down: Tensor, s: float, **kw: Any) -> Tensor:
            return lora_conv_apply(x, up, down, s, mid=core, **kw)

        return apply, [up, core, down], weight
    up, down = rand(6, 3), rand(3, 4, *kernel)
    return lora_conv_apply, [up, down], torch.einsum("or,ri...->oi...", up, down)


def loha(kernel: tuple[int, ...], tucker: bool) -> Any:
    if tucker:
        factors = [rand(3, 6), rand(2, 4), rand(3, 6) + 1, rand(2, 4) - 1]
        cores = rand(3, 2, *kernel), rand(3, 2, *kernel) * 2 + 1
        halves = [
            torch.einsum("pq...,po,qi->oi...", cores[i], factors[2 * i], factors[2 * i + 1])
            for i in range(2)
        ]

        def apply(x: Tensor, *args: Any, **kw: Any) -> Tensor:
            *given, t1, t2, s = args
            return loha_conv_apply(x, *given, s, t1=t1, t2=t2, **kw)

        return apply, [*factors, *cores], halves[0] * halves[1]
    factors = [rand(6, 2), rand(2, 4, *kernel), rand(6, 2) + 1, rand(2, 4, *kernel) - 1]
    halves = [torch.einsum("or,ri...->oi...", *factors[i : i + 2]) for i in (0, 2)]
    return loha_conv_apply, factors, halves[0] * halves[1]


def lokr(kernel: tuple[int, ...], first: int, second: int) -> Any:
    w1 = [rand(2, 2)] if first == 1 else [rand(2, 3), rand(3, 2)]
    w2 = {
        1: [rand(3, 2, *kernel)],
        2: [rand(3, 2), rand(2, 2, *kernel)],
        3: [rand(2, 3), rand(2, 2), rand(2, 2, *kernel)],
    }[second]
    small = w1[0] if first == 1 else w1[0] @ w1[1]
    sums = {1: "cd...->cd...", 2: "cr,rd...->cd...", 3: "rc,qd,rq...->cd..."}
    large = torch.einsum(sums[second], *w2)
    weight = torch.einsum("ab,cd...->acbd...", small, large).reshape(6, 4, *kernel)

    def apply(x: Tensor, *args: Any, **kw: Any) -> Tensor:
        *given, s = args
        halves = [given[:first], given[first:]]
        return lokr_conv_apply(x, *(h[0] if len(h) == 1 else tuple(h) for h in halves), s, **kw)

    return apply, [*w1, *w2], weight


VARIANTS: dict[str, Callable[[tuple[int, ...]], Any]] = {
    "lora": lambda kernel: lora(kernel, False),
    "lora tucker": lambda kernel: lora(kernel, True),
    "loha": lambda kernel: loha(kernel, False),
    "loha tucker": lambda kernel: loha(kernel, True),
    "lokr": lambda kernel: lokr(kernel, 1, 1),
    "lokr pair": lambda kernel: lokr(kernel, 1, 2),
    "lokr pairs": lambda kernel: lokr(kernel, 2, 2),
    "lokr tucker": lambda kernel: lokr(kernel, 2, 3),
}


@each_setting
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_is_the_convolution_with_the_rebuilt_weight(
    variant: str, image: tuple[int, ...], kernel: tuple[int, ...], settings: dict[str, Any]
) -> None:
    apply, factors, weight = VARIANTS[variant](kernel)
    x = rand(2, 4 * settings.get("groups", 1), *image)
    want = convolve(x, weight, settings)
    base = rand(*want.shape)
    torch.testing.assert_close(apply(x, *factors, 0.7, **settings), 0.7 * want)
    torch.testing.assert_close(apply(x, *factors, 0.7, base=base, **settings), base + 0.7 * want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_kernels_are_the_convolution_with_the_rebuilt_weight(fused: str, variant: str) -> None:
    image, kernel, settings = SETTINGS[4]
    apply, factors, weight = VARIANTS[variant](kernel)
    leaves = [t.float().requires_grad_() for t in (rand(2, 8, *image), *factors)]
    x = leaves[0].double()
    out = apply(*leaves, 0.7, backend=fused, **settings)
    want = 0.7 * convolve(x, weight, settings)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    reference = apply(*exact, 0.7, **settings)
    expected = torch.autograd.grad(reference, exact, torch.ones_like(reference))
    for got, grad in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("variant", ["lora tucker", "loha", "lokr pairs"])
def test_gradcheck(variant: str) -> None:
    apply, factors, _ = VARIANTS[variant]((2, 2))
    leaves = [t.requires_grad_() for t in (rand(1, 4, 3, 3), *factors)]
    assert torch.autograd.gradcheck(lambda *t: apply(*t, 0.7, padding=1), leaves)
    assert torch.autograd.gradgradcheck(lambda *t: apply(*t, 0.7), leaves)


def test_factors_flattened_as_files_have_them() -> None:
    apply, (a1, b1, a2, b2), weight = loha((3, 3), False)
    x = rand(2, 4, 8, 8)
    got = apply(x, a1, b1.flatten(1), a2, b2.flatten(1))
    torch.testing.assert_close(got, convolve(x, weight, {}))
    _, (w1, w2_a, w2_b), weight = lokr((3, 2), 1, 2)
    got = lokr_conv_apply(x, w1, (w2_a, w2_b.flatten(1)), kernel_size=(3, 2))
    torch.testing.assert_close(got, convolve(x, weight, {}))
    with pytest.raises(ValueError, match=r"w2_b has shape \(2, 12\); .*kernel_size="):
        lokr_conv_apply(x, w1, (w2_a, w2_b.flatten(1)))
    up, down = rand(6, 3), rand(3, 4)
    want = lora_conv_apply(x, up[..., None, None], down[..., None, None])
    assert torch.equal(lora_conv_apply(x, up, down), want)


def test_channels_last(fused: str) -> None:
    x, up, down = rand(2, 8, 5, 7).float(), rand(6, 3).float(), rand(3, 8, 3, 3).float()
    base = rand(2, 6, 5, 7).float()
    want = lora_conv_apply(x, up, down, 0.7, base=base, padding=1, backend=fused)
    turned = [t.to(memory_format=torch.channels_last) for t in (x, base)]
    got = lora_conv_apply(turned[0], up, down, 0.7, base=turned[1], padding=1, backend=fused)
    assert torch.equal(got, want)
    assert got.is_contiguous()


def test_an_fp32_leaf_keeps_its_gradients_low_bits(fused: str) -> None:
    x, grad = rand(2, 8, 5, 7).bfloat16(), rand(2, 6, 5, 7).float()
    for variant in ("lora", "loha", "lokr"):
        apply, factors, _ = VARIANTS[variant]((3, 3))
        leaves = [t.float().requires_grad_() for t in factors]
        out = apply(x[:, :4], *leaves, 0.7, padding=1, backend=fused)
        assert out.dtype is torch.float32
        for found in torch.autograd.grad(out, leaves, grad):
            assert found.dtype is torch.float32
            assert not torch.equal(found.bfloat16().float(), found)


def test_a_gradient_whose_unscaled_product_overflows_is_finite(fused: str) -> None:
    x, up, down = rand(2, 8, 5, 7).half(), rand(6, 3).half(), rand(3, 8, 3, 3).half()
    leaves = [t.requires_grad_() for t in (x / 16, up * 16, down)]
    grad = torch.full((2, 6, 5, 7), 8192.0).half() * torch.sign(up.sum(1))[:, None, None]
    assert (grad.float().movedim(1, -1) @ leaves[1].float()).abs().max() > 65504
    out = lora_conv_apply(*leaves, 1 / 1024, padding=1, backend=fused)
    for found in torch.autograd.grad(out, leaves, grad):
        assert torch.isfinite(found).all()


def test_a_delta_below_the_bases_ulp_reaches_the_output(fused: str) -> None:
    x, base = torch.ones(1, 4, 3, 3), torch.ones(1, 6, 3, 3).bfloat16()
    up, down = torch.full((6, 1), 2.0**-6), torch.full((1, 4, 1, 1), 2.0**-6)
    out = lora_conv_apply(x.bfloat16(), up, down, base=base, backend=fused)
    assert out.dtype is torch.float32
    assert torch.equal(out, torch.full_like(out, 1 + 4 * 2.0**-12))


def test_fp32_ignores_cudnns_tf32_and_leaves_the_settings(fused: str) -> None:
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    leaves = [t.float().requires_grad_() for t in (rand(2, 8, 5, 7), rand(6, 3), rand(3, 8, 3, 3))]
    lora_conv_apply(*leaves, 0.7, backend=fused).sum().backward()
    assert (cudnn.allow_tf32, cudnn.deterministic) == before


X, UP, DOWN = torch.randn(2, 8, 5, 7), torch.randn(6, 3), torch.randn(3, 8, 3, 3)


@pytest.mark.parametrize(
    ("args", "settings", "message"),
    [
        ((X[0], UP, DOWN), {}, r"down has shape \(3, 8, 3, 3\); expected 1 spatial dimensions, as"),
        ((X[:, 0, 0], UP, DOWN), {}, r"x has shape \(2, 7\); expected \(N, C, \*image\) with 1 to"),
        ((X, UP, DOWN[:, :7]), {}, "x has 8 channels; expected 7: 7, from the factors"),
        ((X, UP, DOWN), {"groups": 2}, "x has 8 channels; expected 16: 8, .* each of groups = 2"),
        ((X, UP[:5], DOWN[:, :4]), {"groups": 2}, "the factors make 5 output channels; .* = 2"),
        ((X, UP, DOWN), {"dilation": 3}, "down has a 3x3 kernel, which does not fit into x, 5x7"),
        ((X, UP, DOWN), {"stride": 0}, r"stride is \(0, 0\); expected numbers of at least 1"),
        ((X, UP, DOWN), {"stride": (1, 2, 3)}, r"stride is \(1, 2, 3\); expected an int or 2"),
        ((X, UP, DOWN), {"padding": -1}, r"padding is \(-1, -1\); expected numbers of at least 0"),
        ((X, UP, DOWN), {"padding": "full"}, "padding is 'full'; expected numbers"),
        ((X, UP, DOWN), {"padding": "same", "stride": 2}, 'padding is "same" and stride is 2'),
        ((X, UP, DOWN), {"groups": 0}, "groups is 0; expected at least 1"),
        ((X, UP, DOWN), {"base": X}, r"base has shape \(2, 8, 5, 7\); .* with O = 6, from up"),
        ((X, UP[:, :2], DOWN), {}, r"down has shape .*; .* with r = 2, from up"),
    ],
)
def test_errors(args: tuple[Tensor, ...], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"lora_conv_apply: {message}"):
        lora_conv_apply(*args, **settings)


def test_errors_of_the_other_factors() -> None:
    w1, w2 = torch.randn(3, 2), torch.randn(2, 2, 3, 3)
    with pytest.raises(ValueError, match="groups is 2, which does not divide the 3 rows of w1"):
        lokr_conv_apply(X, w1, w2, groups=2)
    with pytest.raises(ValueError, match="w1 has 3 factors"):
        lokr_conv_apply(X, (w1, w1, w1), w2)
    with pytest.raises(TypeError, match="w2 holds a NoneType; expected a tensor"):
        lokr_conv_apply(X, w1, (w2, None))  # type: ignore[arg-type]
    a, b = torch.randn(6, 2), torch.randn(2, 8, 3, 3)
    with pytest.raises(ValueError, match="t1 is given and t2 is None; expected both"):
        loha_conv_apply(X, a, b, a, b, t1=torch.randn(2, 2, 3, 3))
    with pytest.raises(ValueError, match=r"w1_b has shape \(2, 60\); expected \(r, 8 \* k\)"):
        loha_conv_apply(X, a, b.flatten(1)[:, :60], a, b)
    with pytest.raises(TypeError, match=r"stride is 1\.5; expected an int or 2 of them"):
        lora_conv_apply(X, UP, DOWN, stride=1.5)  # type: ignore[arg-type]


def test_lora_agrees_with_lora_weight() -> None:
    x, up, mid, down = rand(2, 4, 5, 7), rand(6, 3), rand(3, 2, 3, 3), rand(2, 4)
    weight = lora_weight(up, down, 0.3, mid=mid)
    torch.testing.assert_close(lora_conv_apply(x, up, down, 0.3, mid=mid), F.conv2d(x, weight))


def test_traced_calls() -> None:
    leaves = [t.float().requires_grad_() for t in (rand(2, 8, 5, 7), rand(6, 3), rand(3, 8, 3, 3))]

    def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return lora_conv_apply(x, up, down, 0.7, stride=(2, 1), padding=1, backend="triton")

    got, want = torch.compile(step, fullgraph=True, backend="aot_eager")(*leaves), step(*leaves)
    assert torch.equal(got, want)
    grad = torch.ones_like(want)
    pairs = zip(*(torch.autograd.grad(out, leaves, grad) for out in (got, want)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    settings = ([2, 1], [1, 1], [1, 1], 1)
    operands = (*leaves, None, None, torch.tensor(0.7))
    op = OPS["lora_conv_apply"].library.op
    torch.library.opcheck(op, (*operands, *settings, None, None, "torch"))
