"""LoKr: its definition, conventions, what is stored, gradient truths, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.functional import OPS, factorization, lokr_apply, lokr_weight
from lycoris.kernels.ops.lokr_apply import w2_first

F64, BF16, FP16 = torch.float64, torch.bfloat16, torch.float16


def rand(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=F64, generator=generator).to(dtype)


# ------------------------------------------------------------------------------ factorization


@pytest.mark.parametrize(
    ("dimension", "factor", "expected"),
    [
        (127, -1, (1, 127)),
        (127, 4, (1, 127)),
        (128, -1, (8, 16)),
        (128, 64, (8, 16)),
        (250, 2, (2, 125)),
        (250, -1, (10, 25)),
        (360, 4, (4, 90)),
        # LyCORIS's docstring says (12, 30); its code, whose files are out there, says this.
        (360, 16, (15, 24)),
        (512, 8, (8, 64)),
        (1024, -1, (32, 32)),
        (1, -1, (1, 1)),
    ],
)
def test_factorization(dimension: int, factor: int, expected: tuple[int, int]) -> None:
    assert factorization(dimension, factor) == expected


def test_factorization_of_nothing() -> None:
    with pytest.raises(ValueError, match="dimension is 0; expected at least 1"):
        factorization(0)
    with pytest.raises(ValueError, match="factor is 0; expected -1 or at least 1"):
        factorization(8, 0)


# --------------------------------------------------------------------------------- definition


@pytest.mark.parametrize("empty", "abcdk")
def test_a_weight_of_nothing_has_its_shape(empty: str) -> None:
    d = dict(zip("abcdk", (2, 3, 4, 5, 2), strict=True)) | {empty: 0}
    w1 = torch.ones(d["a"], d["b"], requires_grad=True)
    shape = (d["a"] * d["c"], d["b"] * d["d"], d["k"])
    w2 = torch.ones(d["c"], d["d"], d["k"])
    pair = (torch.ones(d["c"], 1), torch.ones(1, d["d"], d["k"]))
    triple = (torch.ones(1, d["c"]), torch.ones(1, d["d"]), torch.ones(1, 1, d["k"]))
    for half in (w2, pair, triple):
        out = lokr_weight(w1, half)
        assert out.shape == shape
        (grad,) = torch.autograd.grad(out.sum(), w1)
        assert not grad.any()


def test_weight_is_the_kronecker_product() -> None:
    w1, w2, base = rand(3, 4), rand(5, 6), rand(15, 24)
    torch.testing.assert_close(lokr_weight(w1, w2, 0.7, base=base), base + 0.7 * torch.kron(w1, w2))


def test_weight_of_factored_halves() -> None:
    w1_a, w1_b, w2_a, w2_b = rand(3, 2), rand(2, 4), rand(5, 3), rand(3, 6, 2, 2)
    w2 = torch.einsum("cr,rdhw->cdhw", w2_a, w2_b)
    want = torch.einsum("ab,cdhw->acbdhw", w1_a @ w1_b, w2).reshape(15, 24, 2, 2)
    torch.testing.assert_close(lokr_weight((w1_a, w1_b), w2, 0.3), 0.3 * want)
    torch.testing.assert_close(lokr_weight((w1_a, w1_b), (w2_a, w2_b), 0.3), 0.3 * want)
    flat = (w2_a, w2_b.flatten(1))
    torch.testing.assert_close(lokr_weight((w1_a, w1_b), flat, 0.3, base=want), 1.3 * want)
    torch.testing.assert_close(lokr_weight((w1_a, w1_b), flat, 0.3), 0.3 * want.flatten(1))


def test_weight_of_a_tucker_triple() -> None:
    w1, w2_a, w2_b, t2 = rand(3, 4), rand(2, 5), rand(2, 6), rand(2, 2, 3, 3)
    w2 = torch.einsum("pqhw,pc,qd->cdhw", t2, w2_a, w2_b)
    torch.testing.assert_close(lokr_weight(w1, (w2_a, w2_b, t2), 0.3), lokr_weight(w1, w2, 0.3))


@pytest.mark.parametrize("sizes", [(3, 4, 5, 6), (2, 5, 3, 70), (7, 2, 66, 3)])
def test_apply_is_the_product_with_the_weight(sizes: tuple[int, int, int, int]) -> None:
    a, b, c, d = sizes
    x, base, w1, w2 = rand(2, 3, b * d), rand(2, 3, a * c), rand(a, b), rand(c, d)
    w1_pair, w2_pair, core = (rand(a, 2), rand(2, b)), (rand(c, 2), rand(2, d)), rand(2, 2)
    triple = (w2_pair[0].t(), w2_pair[1], core)
    for first in (w1, w1_pair):
        for second in (w2, w2_pair, triple):
            want = base + x @ lokr_weight(first, second, 0.7).T
            torch.testing.assert_close(lokr_apply(x, first, second, 0.7, base=base), want)


def test_the_order_of_the_halves() -> None:
    assert w2_first(8, 8, 512, 512)
    assert w2_first(16, 4, 256, 256)
    assert not w2_first(4, 16, 256, 256)
    assert w2_first(4, 16, 64, 64)  # small: one kernel does both


def test_gradcheck() -> None:
    x, w1_a, w1_b = (t.requires_grad_() for t in (rand(2, 6), rand(2, 2), rand(2, 3)))
    w2_a, w2_b, core = (t.requires_grad_() for t in (rand(3, 2), rand(2, 2), rand(2, 2, 2)))

    def apply(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return lokr_apply(x, (a, b), (c, d), 0.7)

    def weight(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return lokr_weight((a, b), (c, d), 0.7)

    def tucker(w1: Tensor, p: Tensor, q: Tensor, t: Tensor) -> Tensor:
        return lokr_weight(w1, (p, q, t), 0.7)

    for run, leaves in [
        (apply, (x, w1_a, w1_b, w2_a, w2_b)),
        (weight, (w1_a, w1_b, w2_a, w2_b)),
        (tucker, (w1_a, w2_b, w1_b, core)),
    ]:
        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves)


def test_opcheck() -> None:
    x, w1 = (t.float().requires_grad_() for t in (rand(5, 12), rand(2, 3)))
    w2_a, w2_b = (t.float().requires_grad_() for t in (rand(6, 2), rand(2, 4)))
    halves = (w1, None, None, None, w2_a, w2_b, None, None)
    rest = (torch.tensor(0.7), None, None, "triton")
    torch.library.opcheck(OPS["lokr_apply"].library.op, (x, *halves, *rest))
    torch.library.opcheck(OPS["lokr_weight"].library.op, (*halves, *rest))


# ------------------------------------------------------------------------------ gradient truths


def test_an_fp16_gradient_whose_unscaled_product_overflows(fused: str) -> None:
    """Each sum is beyond fp16 before it is scaled, and within it after."""
    x = torch.ones(64, 96, dtype=FP16)
    grad = torch.full((64, 96), 2048.0, dtype=FP16)
    w1 = torch.full((8, 6), 8.0, dtype=FP16, requires_grad=True)
    for w2 in (torch.full((12, 16), 8.0, dtype=FP16), None):
        pair = (torch.full((12, 2), 4.0, dtype=FP16), torch.full((2, 16), 4.0, dtype=FP16))
        leaves = [t.requires_grad_() for t in ((w2,) if w2 is not None else pair)]
        half: Any = leaves[0] if w2 is not None else tuple(leaves)
        out = lokr_apply(x, w1, half, 2.0**-16, backend=fused)
        found = torch.autograd.grad(out, [w1, *leaves], grad)
        assert all(g.isfinite().all() and g.any() for g in found)
        weight = lokr_weight(w1, half, 2.0**-16, backend=fused)
        found = torch.autograd.grad(weight, [w1, *leaves], torch.full_like(weight, 2048.0))
        assert all(g.isfinite().all() and g.any() for g in found)


def test_an_fp32_leaf_gets_an_fp32_gradient(fused: str) -> None:
    x = rand(40, 56 * 7, dtype=BF16)
    w1 = rand(8, 7, dtype=torch.float32).requires_grad_()
    pair = [t.requires_grad_() for t in (rand(24, 4, dtype=torch.float32), rand(4, 56).float())]
    out = lokr_apply(x, w1, tuple(pair), 0.7, backend=fused)
    assert out.dtype is torch.float32
    found = torch.autograd.grad(out.sum(), [w1, *pair])
    weight = lokr_weight(w1, tuple(pair), 0.7, base=rand(192, 392, dtype=BF16), backend=fused)
    assert weight.dtype is torch.float32
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    found += torch.autograd.grad(weight, [w1, *pair], noise)
    for gradient in found:
        assert gradient.dtype is torch.float32
        assert (gradient != gradient.bfloat16().float()).double().mean() > 0.5


def test_mixed_dtypes_return_the_promoted_one_from_the_accumulator(fused: str) -> None:
    x, w1 = rand(40, 112, dtype=BF16), rand(8, 7, dtype=BF16)
    pair = (rand(24, 4, dtype=torch.float32), rand(4, 16, dtype=torch.float32))
    out = lokr_apply(x, w1, pair, 0.7, backend=fused)
    assert out.dtype is torch.float32
    assert (out != out.bfloat16().float()).double().mean() > 0.5
    short = lokr_apply(x, w1, pair, 0.7, backend=fused, out_dtype=BF16)
    assert torch.equal(short, out.bfloat16())


@pytest.mark.parametrize("form", ["dense", "pair"])
def test_a_delta_below_the_weights_ulp_reaches_the_output(fused: str, form: str) -> None:
    """Merged into a bf16 weight of ones it would vanish; on the apply path it is all there is."""
    x, w1 = torch.ones(8, 112, dtype=BF16), torch.full((8, 7), 2.0**-6, dtype=BF16)
    dense = torch.full((12, 16), 2.0**-6, dtype=BF16)
    pair = (torch.full((12, 2), 2.0**-4, dtype=BF16), torch.full((2, 16), 2.0**-3, dtype=BF16))
    w2: Any = dense if form == "dense" else pair
    ones = torch.ones(96, 112, dtype=BF16)
    assert torch.equal(lokr_weight(w1, w2, 0.5, base=ones, backend=fused), ones)
    assert (lokr_apply(x, w1, w2, 0.5, backend=fused).float() > 1e-3).all()


# ---------------------------------------------------------------------------- what is stored


@pytest.mark.parametrize("form", ["dense", "pair"])
def test_neither_kron_nor_a_factored_half_is_stored(
    fused: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lycoris.kernels.schedule import Schedule

    sizes: list[int] = []
    plain = Schedule.empty

    def empty(self: Schedule, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = plain(self, shape, dtype)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(Schedule, "empty", empty)
    a, b, c, d, tokens = 8, 7, 40, 48, 2
    w1 = rand(a, b, dtype=BF16).requires_grad_()
    dense = (rand(c, d, dtype=BF16).requires_grad_(),)
    pair = (rand(c, 2, dtype=BF16).requires_grad_(), rand(2, d, dtype=BF16).requires_grad_())
    leaves = dense if form == "dense" else pair
    x = rand(tokens, b * d, dtype=BF16).requires_grad_()
    half: Any = leaves[0] if form == "dense" else leaves
    out = lokr_apply(x, w1, half, 0.7, backend=fused)
    forward = max(sizes)
    torch.autograd.grad(out.sum(), [x, w1, *leaves])
    assert forward == out.numel()
    # Two parts of a dense half's gradient; nothing of c x d where that half is factored.
    assert max(sizes) <= (2 * c * d if form == "dense" else x.numel())
    assert max(sizes) < a * b * c * d / 10
    if form == "pair":
        sizes.clear()
        lokr_weight(w1.detach(), half, 0.7, backend=fused)
        assert sizes == [a * b * c * d]  # the output, and nothing else


@pytest.mark.parametrize("needed", ["x", "w1", "w2"])
@pytest.mark.parametrize("form", ["fused", "w2 first", "w1 first", "pair"])
def test_a_frozen_operand_costs_nothing(
    form: str, needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One gradient alone is what it is among all; fewer kernels run for it."""
    from lycoris.kernels.schedule import Schedule

    launches: list[str] = []
    plain = Schedule.kernel

    def kernel(self: Schedule, family: str, name: str, **options: Any) -> Any:
        launches.append(name)
        return plain(self, family, name, **options)

    monkeypatch.setattr(Schedule, "kernel", kernel)
    a, b, c, d = {"w2 first": (5, 3, 6, 70), "w1 first": (2, 5, 7, 70)}.get(form, (4, 3, 6, 10))
    w2 = (rand(c, 2), rand(2, d)) if form == "pair" else (rand(c, d),)
    values = {"x": rand(9, b * d), "w1": rand(a, b)} | {f"w2{i}": t for i, t in enumerate(w2)}

    def run(names: list[str]) -> tuple[dict[str, Tensor], int]:
        leaves = {n: t.to(BF16).requires_grad_(n in names) for n, t in values.items()}
        pair: Any = tuple(t for n, t in leaves.items() if n.startswith("w2"))
        half = pair if form == "pair" else pair[0]
        out = lokr_apply(leaves["x"], leaves["w1"], half, 0.7, backend="triton")
        launches.clear()
        found = torch.autograd.grad(out, [leaves[n] for n in names], rand(9, a * c).to(BF16))
        return dict(zip(names, found, strict=True)), len(launches)

    everything, most = run(list(values))
    some, fewer = run([n for n in values if n.startswith(needed)])
    assert all(torch.equal(got, everything[name]) for name, got in some.items())
    if form == "fused":  # one kernel for all of them, and one that adds up partial sums
        assert (most, fewer) == (2, 1 if needed == "x" else 2)
    else:
        assert fewer < most


# ------------------------------------------------------------------------------------ bad input

X, W1, W2 = torch.randn(2, 5, 12), torch.randn(2, 3), torch.randn(5, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: lokr_apply(X[..., :11], W1, W2, backend=b), ValueError,
         r"x has 11 columns; expected 3 \* 4 = 12, the columns of w1 times those of w2"),
        (lambda b: lokr_apply(X, W1[0], W2, backend=b), ValueError,
         r"w1 has shape \(3,\); expected \(a, b\)"),
        (lambda b: lokr_apply(X, W1, W2[..., None].expand(5, 4, 3), backend=b), ValueError,
         r"w2 has shape \(5, 4, 3\); expected \(c, d\), then only ones"),
        (lambda b: lokr_apply(X, W1, (W2, W1), backend=b), ValueError,
         r"w2_b has shape \(2, 3\); expected \(r, d\) with r = 4, from w2_a"),
        (lambda b: lokr_apply(X, W1, W2, base=X, backend=b), ValueError,
         r"base has shape \(2, 5, 12\); expected \(\.\.\., O\) with O = 10"),
        (lambda b: lokr_apply(X, (W1, W1, W1), W2, backend=b), ValueError,
         "w1 has 3 parts; expected a tensor or 2"),
        (lambda b: lokr_apply(X, W1, 3.0, backend=b), TypeError,
         "w2 is float; expected a tensor or 2 or 3 tensors"),
        (lambda b: lokr_apply(X, W1, (W2, None), backend=b), ValueError,
         "got w1, w2_a; expected w1, or w1_a and w1_b; and w2, or w2_a and w2_b"),
        (lambda b: lokr_apply(X.half(), W1.bfloat16(), W2, backend=b), TypeError,
         "x is float16 but w1 is bfloat16"),
        (lambda b: lokr_weight(W1, W2.int(), backend=b), TypeError,
         "w2 is int32; expected float16"),
        (lambda b: lokr_weight(W1, W2, base=torch.zeros(10, 13), backend=b), ValueError,
         r"base has shape \(10, 13\); expected \(O, I, \*k\) with I = 12"),
        (lambda b: lokr_weight(W1, (W2[:, :0], W2[:0]), backend=b), ValueError,
         r"w2_a has shape \(5, 0\); expected r to be at least 1"),
        (lambda b: lokr_weight(W1, (W2.t(), W2.t(), torch.ones(3, 4)), backend=b), ValueError,
         r"t2 has shape \(3, 4\); expected \(r, r, \*k\) with r = 4, from w2_a"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("backend", ["torch", "triton", "tilelang"])
def test_bad_input(
    call: Callable[[str], Tensor], error: type[Exception], message: str, backend: str
) -> None:
    with pytest.raises(error, match=message):
        call(backend)
