"""Bad input: each error names the operand, what it was and what was expected."""

from __future__ import annotations

import math

import pytest
import torch

from lycoris.functional import lora_apply, lora_weight

X, UP, DOWN = torch.randn(2, 5, 8), torch.randn(6, 2), torch.randn(2, 8)
BACKENDS = ["torch", "triton", "tilelang", None]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str | None:
    return request.param


def test_fp16_with_bf16(backend: str | None) -> None:
    with pytest.raises(TypeError, match=r"x is float16 but up is bfloat16.*can't meet"):
        lora_apply(X.half(), UP.bfloat16(), DOWN, backend=backend)
    with pytest.raises(TypeError, match="up, down is float16 but base is bfloat16"):
        lora_weight(
            UP.half(), DOWN.half(), base=torch.zeros(6, 8, dtype=torch.bfloat16), backend=backend
        )
    with pytest.raises(TypeError, match="x is bfloat16 but out_dtype is float16"):
        lora_apply(X.bfloat16(), UP, DOWN, out_dtype=torch.float16, backend=backend)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_other_dtypes(dtype: torch.dtype, backend: str | None) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"lora_apply: up is {name}; expected float16, bfloat16"):
        lora_apply(X, UP.to(dtype), DOWN, backend=backend)
    with pytest.raises(TypeError, match=f"out_dtype is {name}; expected float16 or bfloat16"):
        lora_apply(X, UP, DOWN, out_dtype=dtype, backend=backend)


def test_float64_is_all_or_nothing() -> None:
    with pytest.raises(TypeError, match="x is float64 but up is float32, down is float32"):
        lora_apply(X.double(), UP, DOWN)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X, UP, DOWN[:, :7]), r"down has shape \(2, 7\); expected \(r, I\) with I = 8, from x"),
        ((X, UP[:, :1], DOWN), r"down has shape \(2, 8\); expected \(r, I\) with r = 1, from up"),
        ((X, UP[0], DOWN), r"up has shape \(2,\); expected \(O, r\)"),
        ((X, UP[:, :, None].expand(6, 2, 3), DOWN), r"up has shape \(6, 2, 3\); .*only ones"),
        ((torch.tensor(1.0), UP, DOWN), r"x has shape \(\); expected \(\.\.\., I\)"),
        ((X, UP[:, :0], DOWN[:0]), r"up has shape \(6, 0\); expected r to be at least 1"),
    ],
)
def test_shapes(args: tuple[torch.Tensor, ...], message: str, backend: str | None) -> None:
    with pytest.raises(ValueError, match=message):
        lora_apply(*args, backend=backend)


@pytest.mark.parametrize("shape", [(6,), (2, 5, 8), (10, 6), (5, 2, 6), (1, 1, 6), (2, 5, 6, 1)])
def test_base_of_apply(shape: tuple[int, ...], backend: str | None) -> None:
    with pytest.raises(ValueError, match=r"base has shape .*; expected \(\.\.\., O\)"):
        lora_apply(X, UP, DOWN, base=torch.zeros(shape), backend=backend)


@pytest.mark.parametrize("shape", [(8,), (8, 6), (6, 1), (1, 8), (6, 4), (6, 3, 3)])
def test_base_of_weight(shape: tuple[int, ...], backend: str | None) -> None:
    with pytest.raises(ValueError, match=r"base has shape .*; expected \(O, \*N\)"):
        lora_weight(UP, DOWN, base=torch.zeros(shape), backend=backend)


def test_mid() -> None:
    with pytest.raises(ValueError, match=r"mid has shape \(3, 2, 3\); .* with p = 2, from up"):
        lora_weight(UP, DOWN, mid=torch.zeros(3, 2, 3))
    with pytest.raises(ValueError, match=r"down has shape \(2, 8\); .* with q = 3, from mid"):
        lora_weight(UP, DOWN, mid=torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match=r"base has shape \(6, 8\); .*k = \(3, 3\), from mid"):
        lora_weight(UP, DOWN, mid=torch.zeros(2, 2, 3, 3), base=torch.zeros(6, 8))


def test_devices() -> None:
    with pytest.raises(ValueError, match="down is on meta; expected cpu, where x is"):
        lora_apply(X, UP, DOWN.to("meta"))
    with pytest.raises(ValueError, match="scale is on meta; expected cpu or cpu"):
        lora_apply(X, UP, DOWN, torch.tensor(1.0, device="meta"))


def test_operands_that_are_no_tensors() -> None:
    with pytest.raises(TypeError, match="x is list; expected a tensor"):
        lora_apply([1.0], UP, DOWN)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="down is None; expected a tensor"):
        lora_apply(X, UP, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"up is torch\.sparse_coo; expected a dense tensor"):
        lora_apply(X, UP.to_sparse(), DOWN)


@pytest.mark.parametrize("scale", [math.nan, torch.nan])
def test_a_nan_scale(scale: float, backend: str | None) -> None:
    with pytest.raises(ValueError, match="lora_apply: scale is NaN; expected a number"):
        lora_apply(X, UP, DOWN, scale, backend=backend)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ("1", TypeError, "scale is str; expected a number or a 0-d tensor"),
        (True, TypeError, "scale is bool"),
        (None, TypeError, "scale is NoneType"),
        (1j, TypeError, "scale is complex"),
        (torch.ones(1), ValueError, r"scale has shape \(1,\); expected a 0-d tensor"),
        (torch.tensor(1), TypeError, "scale is torch.int64; expected a floating-point tensor"),
        (torch.tensor(1.0, requires_grad=True), TypeError, "scale requires a gradient"),
    ],
)
def test_other_scales(scale: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lora_apply(X, UP, DOWN, scale)  # type: ignore[arg-type]
