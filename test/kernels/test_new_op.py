"""An op that is none of LoRA's: what an OpSpec may ask for, shown on a toy.

y = scale * m[c] * x / norm(x), row by row, over the first or over the last dimension: a static
attribute, a saved fp32 tensor, an additive base, a kernel family of its own.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lycoris.kernels import registry
from lycoris.kernels.autograd import Op
from lycoris.kernels.plan import Plan
from lycoris.kernels.spec import Attribute, Bound, Cost, Operand, OpSpec, Saved

TILES = Plan(16, 16, 16)


def formula(t, scale, rnd, *, negate):
    sign = -1 if negate else 1
    out = sign * scale * t.m * t.x / t.x.norm(dim=1, keepdim=True)
    return out if t.base is None else t.base + out


def forward(run, t, scale, out, saved, *, negate):
    run.launch("toy", "norm", t.x, saved.norm, tiles=TILES)
    factor = -scale if negate else scale
    run.launch("toy", "scaled", t.x, t.m, saved.norm, t.base, factor, out, tiles=TILES)


def backward(run, grad, t, saved, scale, grads, *, negate):
    factor = -scale if negate else scale
    run.launch("toy", "back", grad, t.x, t.m, saved.norm, factor, grads.x, grads.m, tiles=TILES)


SPEC = OpSpec(
    name="toy_normed",
    family="toy",
    operands=(
        Operand("x", role="wide", side="model"),
        Operand("m", role="wide"),
        Operand("base", role="wide", optional=True, additive=True, side="model"),
    ),
    shapes=lambda present, negate: {"x": "... C", "m": "C", "base": "... C", "out": "... C"},
    formula=formula,
    forward=forward,
    backward=backward,
    reductions=lambda d: {"out": d["C"], "x": d["C"], "m": d["T"]},
    cost=lambda d, size: Cost(5 * size * d["T"] * d["C"], 4 * d["T"] * d["C"]),
    bound=Bound(half=8.0, fp32=10.0),
    cases=(),
    saved=(Saved("norm", "T"),),
    attributes=(Attribute("negate", "bool", False),),
    unit="output",
)
LOG: list[str] = []


def norm(x, out, *, plan, policy):
    LOG.append("norm")
    out.copy_(x.float().norm(dim=1))


def scaled(x, m, norms, base, scale, out, *, plan, policy):
    LOG.append("scaled")
    value = scale * m.float() * x.float() / norms[:, None]
    out.copy_(value if base is None else base.float() + value)


def back(grad, x, m, norms, scale, grad_x, grad_m, *, plan, policy):
    LOG.append("back")
    unit = x.float() / norms[:, None]
    inner = scale * grad.float() * m.float()
    if grad_x is not None:
        radial = (inner * unit).sum(1, keepdim=True)
        grad_x.copy_((inner - radial * unit) / norms[:, None])
    if grad_m is not None:
        grad_m.copy_((scale * grad.float() * unit).sum(0))


OP = Op(SPEC)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    package, family = types.ModuleType("_toy_normed"), types.ModuleType("_toy_normed.toy")
    package.probe, package.limits = (lambda device: None), (lambda *a: None)  # type: ignore[attr-defined]
    for kernel in (norm, scaled, back):
        setattr(family, kernel.__name__, kernel)
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, family.__name__, family)
    monkeypatch.setitem(registry._discover(), "normed", package.__name__)
    LOG.clear()
    yield
    registry.refresh()


def leaves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = (torch.randn(2, 5, 8), torch.rand(8) + 0.5, torch.randn(2, 5, 8))
    return [t.to(dtype).requires_grad_() for t in made]


@pytest.mark.parametrize("negate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_formula(negate: bool, dtype: torch.dtype) -> None:
    operands = leaves(dtype)
    for _ in range(2):  # prepared, then repeated
        got, want = (
            OP(operands, 0.7, attributes=(negate,), backend=b) for b in ("normed", "torch")
        )
        grad = torch.randn_like(want)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(got, want, **tolerance)
        torch.testing.assert_close(
            torch.autograd.grad(got, operands, grad),
            torch.autograd.grad(want, operands, grad),
            **tolerance,
        )
    assert LOG == ["norm", "scaled", "back"] * 2  # the saved norm is not computed again


def test_compiled_and_checked_by_torch() -> None:
    operands = leaves()
    scale = torch.tensor(0.7)
    torch.library.opcheck(OP.library.op, (*operands, scale, False, None, None, "normed"))
    run = torch.compile(
        lambda x, m: OP((x, m, None), 0.7, attributes=(True,), backend="normed"),
        fullgraph=True,
        backend="aot_eager",
    )
    got = run(*operands[:2])
    want = OP((*operands[:2], None), 0.7, attributes=(True,), backend="torch")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad(got.sum(), operands[:2]), torch.autograd.grad(want.sum(), operands[:2])
    )


def test_a_missing_kernel_is_named() -> None:
    del sys.modules["_toy_normed.toy"].back  # type: ignore[attr-defined]
    operands = leaves()
    out = OP(operands, 0.7, attributes=(False,), backend="normed")
    with pytest.raises(RuntimeError, match=r"_toy_normed\.toy has no kernel 'back'"):
        out.sum().backward()
