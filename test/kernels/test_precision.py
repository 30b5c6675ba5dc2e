"""The dtype policy: compute and output of every mix, overrides, autocast."""

from __future__ import annotations

import pytest
import torch

from lycoris.functional import OPS, lora_apply, lora_weight
from lycoris.kernels.inputs import draw
from lycoris.kernels.precision import Policy, resolve, tf32_allowed
from lycoris.kernels.spec import SPECS

F16, B16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("x", "adapter", "compute", "output"),
    [
        (F16, F16, F16, F16),
        (B16, B16, B16, B16),
        (F32, F32, F32, F32),
        (B16, F32, B16, F32),
        (F32, F16, F16, F32),
        (F64, F64, F64, F64),
    ],
)
def test_compute_and_output(
    x: torch.dtype, adapter: torch.dtype, compute: torch.dtype, output: torch.dtype
) -> None:
    operands = [("x", x, "mma"), ("up", adapter, "mma"), ("base", x, "wide")]
    assert resolve("op", operands) == Policy(compute, output)


def test_out_dtype_overrides_the_store_alone() -> None:
    operands = [("x", B16, "mma"), ("up", F32, "mma")]
    assert resolve("op", operands, out_dtype=B16) == Policy(B16, B16)
    assert resolve("op", [("x", F32, "mma")], out_dtype=F16) == Policy(F32, F16)


def test_autocast_replaces_the_mma_operands_alone() -> None:
    operands = [("x", F32, "mma"), ("up", F16, "mma")]
    assert resolve("op", operands, autocast=B16) == Policy(B16, B16)
    wide = [*operands, ("base", F32, "wide")]
    assert resolve("op", wide, autocast=B16) == Policy(B16, F32)
    with pytest.raises(TypeError, match="x, up is bfloat16 but base is float16"):
        resolve("op", [*operands, ("base", F16, "wide")], autocast=B16)
    assert resolve("op", [("x", F64, "mma")], autocast=B16) == Policy(F64, F64)


def test_tf32_is_the_users_to_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not tf32_allowed()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert tf32_allowed()
    assert resolve("op", [("x", F32, "mma")], device="cuda").tf32
    assert not resolve("op", [("x", F32, "mma")], device="cpu").tf32
    assert not resolve("op", [("x", B16, "mma")], device="cuda").tf32


def test_an_fp32_gradient_is_no_16_bit_value(fused: str) -> None:
    x = torch.randn(33, 24, dtype=B16)
    up, down = (torch.randn(s, requires_grad=True) for s in ((20, 4), (4, 24)))
    out = lora_apply(x, up, down, 0.7, backend=fused)
    assert out.dtype == F32
    out.backward(torch.randn_like(out))
    for leaf in (up, down):
        assert leaf.grad is not None
        assert leaf.grad.dtype == F32
        assert (leaf.grad.bfloat16().float() != leaf.grad).float().mean() > 0.9


#: Ops with a required wide operand of the adapter, or without any mma operand.
KEPT = {
    *("dora_weight", "oft_weight", "oft_apply", "boft_weight", "boft_apply"),
    *("ia3_scale", "add_scaled"),
    *("dora_apply", "dora_lora_weight", "tlora_weight", "tlora_apply"),
}


@pytest.mark.parametrize("model", [F32, B16])
@pytest.mark.parametrize("name", [n for n, spec in SPECS.items() if not spec.inplace])
def test_autocast_leaves_wide_operands_alone(name: str, model: torch.dtype) -> None:
    spec = SPECS[name]
    case = next(c for c in spec.cases if "base" not in c.present or name == "add_scaled")
    operands = draw(spec, case, (model, F32), torch.device("cpu")).operands
    attributes = tuple(spec.named(case.attributes).values())
    with torch.autocast("cpu", B16):
        out = OPS[name](operands, 1.0, attributes=attributes)
        narrow = OPS[name](operands, 1.0, attributes=attributes, out_dtype=B16)
    assert out.dtype == (F32 if name in KEPT else B16)
    assert narrow.dtype == B16


@pytest.mark.parametrize("base", [F32, B16])
def test_autocast_stores_as_base_is(base: torch.dtype) -> None:
    x, up, down = torch.randn(3, 8), torch.randn(6, 2), torch.randn(2, 8)
    with torch.autocast("cpu", B16):
        assert lora_apply(x, up, down, base=torch.randn(3, 6, dtype=base)).dtype == base


def test_out_dtype_spares_the_cast_pass(fused: str) -> None:
    x, up, down = torch.randn(9, 8, dtype=B16), torch.randn(6, 2), torch.randn(2, 8)
    wide = lora_apply(x, up, down, 0.7, backend=fused)
    out = lora_apply(x, up, down, 0.7, out_dtype=B16, backend=fused)
    assert out.dtype == B16
    assert torch.equal(out, wide.bfloat16())
    assert lora_weight(up, down, out_dtype=F16, backend=fused).dtype == F16


def test_autocast(fused: str) -> None:
    x, up, down = torch.randn(9, 8), torch.randn(6, 2, requires_grad=True), torch.randn(2, 8)
    expected = lora_apply(x.bfloat16(), up.bfloat16(), down.bfloat16(), 0.7, backend=fused)
    with torch.autocast("cpu", torch.bfloat16):
        out = lora_apply(x, up, down, 0.7, backend=fused)
        eager = lora_apply(x, up, down, 0.7, backend="torch")
    assert (
        out.dtype == eager.dtype == torch.nn.functional.linear(x.bfloat16(), down.bfloat16()).dtype
    )
    assert torch.equal(out, expected)
    out.sum().backward()
    assert up.grad is not None
    assert up.grad.dtype == F32
