"""Bad input: each error names the operand, what it was and what was expected."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from lycoris import functional as F
from lycoris import use_backend
from lycoris.functional import lora_apply, lora_weight, peft_rotation

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


# What public functions look at before the op does.
V, SQUARE, IMAGES = torch.randn(2, 3, 4), torch.randn(4, 4), torch.randn(2, 4, 6, 6)
FLAT = torch.randn(2, 36)


@pytest.mark.parametrize("wrong", [None, [1.0], 1.5, "x", torch.ones(4).to_sparse()])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ia3_scale: v", lambda w: F.ia3_scale(w, torch.ones(4))),
        ("ia3_scale: scale", lambda w: F.ia3_scale(V, w)),
        ("add_scaled: base", lambda w: F.add_scaled(w, V)),
        ("add_scaled: delta", lambda w: F.add_scaled(V, w)),
        ("merge_: weight", lambda w: F.merge_(w, V)),
        ("merge_: delta", lambda w: F.merge_(V.clone(), w)),
        ("tlora_weight: lam", lambda w: F.tlora_weight(V, V, w, V, V, V, V)),
        ("tlora_weight: mask", lambda w: F.tlora_weight(V, V, V, V, V, V, w)),
        ("tlora_apply: lam0", lambda w: F.tlora_apply(V, V, V, V, V, V, w, V)),
        ("dora_weight: weight", lambda w: F.dora_weight(w, V)),
        ("dora_weight: magnitude", lambda w: F.dora_weight(V, w)),
        (
            "dora_lora_weight: down",
            lambda w: F.dora_lora_weight(SQUARE, SQUARE[0], SQUARE, w, axis="in"),
        ),
        ("loha_conv_apply: t2", lambda w: F.loha_conv_apply(IMAGES, V, V, V, V, t1=IMAGES, t2=w)),
        ("cayley_neumann: skew", lambda w: peft_rotation.cayley_neumann(w)),
        ("rotate_input: x", lambda w: peft_rotation.rotate_input(w, SQUARE[None])),
        ("skew_from_vectors: vectors", lambda w: peft_rotation.skew_from_vectors(w, 4)),
    ],
)
def test_no_tensor_where_a_function_prepares_it(name: str, call: Any, wrong: object) -> None:
    if name.endswith("t2") and wrong is None:
        return  # one core alone is an error of its own
    kind = r"(None|list|float|str|torch\.sparse_coo); expected a (dense )?tensor"
    with pytest.raises(TypeError, match=f"{name} is {kind}"):
        call(wrong)


@pytest.mark.parametrize("wrong", [None, 3, "ab", {}])
def test_no_half_of_lokr(wrong: object) -> None:
    kind = "None" if wrong is None else type(wrong).__name__
    with pytest.raises(TypeError, match=f"w1 is {kind}; expected a tensor or tensors"):
        F.lokr_conv_apply(IMAGES, wrong, torch.ones(3, 2, 3, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lokr_weight: base is list; expected a tensor"):
        F.lokr_weight((SQUARE, SQUARE), (SQUARE, SQUARE), base=[1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [None, "2", 1.0, True])
def test_no_int(wrong: Any) -> None:
    calls = {
        "ia3_scale: axis": lambda: F.ia3_scale(V, torch.ones(4), axis=wrong),
        "oft_apply: axis": lambda: F.oft_apply(V, SQUARE[None], axis=wrong),
        "lora_conv_apply: groups": lambda: F.lora_conv_apply(
            IMAGES, UP, torch.ones(2, 4, 3, 3), groups=wrong
        ),
        "loha_conv_apply: groups": lambda: F.loha_conv_apply(
            IMAGES, UP, FLAT, UP, FLAT, groups=wrong
        ),
        "lokr_conv_apply: groups": lambda: F.lokr_conv_apply(
            IMAGES, torch.ones(2, 2), (torch.ones(3, 2), torch.ones(2, 18)), groups=wrong
        ),
        "factorization: dimension": lambda: F.factorization(wrong),
        "factorization: factor": lambda: F.factorization(8, wrong),
        "cayley_neumann: terms": lambda: peft_rotation.cayley_neumann(SQUARE, wrong),
        "butterfly_permutation: size": lambda: peft_rotation.butterfly_permutation(8, wrong, 0),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} is {wrong!r}; expected an int"):
            call()


@pytest.mark.parametrize("wrong", [None, "2", True, 1j, torch.tensor(0.5)])
def test_the_multiplier_of_dora_lora_weight_is_a_number(wrong: Any) -> None:
    args = (SQUARE, SQUARE[0], SQUARE, SQUARE)
    with pytest.raises(TypeError, match=r"dora_lora_weight: multiplier is .*; expected a number"):
        F.dora_lora_weight(*args, multiplier=wrong)
    with pytest.raises(ValueError, match="dora_lora_weight: multiplier is NaN"):
        F.dora_lora_weight(*args, multiplier=math.nan)
    with pytest.raises(ValueError, match="multiplier is beyond a float's range"):
        F.dora_lora_weight(*args, multiplier=10**400)


def test_a_scale_that_says_another_axis_of_a_square_weight() -> None:
    for shape, axis in (((4, 1), -1), ((1, 4), 0)):
        with pytest.raises(ValueError, match=r"scale has shape .*expected \(4,\).* for axis"):
            F.ia3_scale(SQUARE, torch.ones(shape), axis=axis)
        assert F.ia3_scale(SQUARE, torch.ones(shape), axis=-1 - axis).shape == (4, 4)


def test_shapes_in_the_callers_order_of_dimensions() -> None:
    with pytest.raises(ValueError, match=r"delta has shape|base has shape \(3, 4\)"):
        F.add_scaled(torch.randn(4, 3).t(), torch.randn(4, 3).t()[:2])
    with pytest.raises(ValueError, match=r"delta has shape \(2, 4\).*\(3, 4\)"):
        F.merge_(torch.randn(4, 3).t(), torch.randn(2, 4))


@pytest.mark.parametrize("size", [5, (3, 2)])
def test_a_kernel_size_that_a_factor_contradicts(size: Any) -> None:
    kernel = torch.ones(2, 4, 3, 3)
    with pytest.raises(ValueError, match=r"w1_b has shape .*from kernel_size"):
        F.loha_conv_apply(IMAGES, UP, kernel, UP, kernel, kernel_size=size)
    with pytest.raises(ValueError, match=r"w2 has shape .*from kernel_size"):
        F.lokr_conv_apply(IMAGES, torch.ones(2, 2), torch.ones(3, 2, 3, 3), kernel_size=size)
    with pytest.raises(ValueError, match=r"w1_b has shape \(2, 36\); expected"):
        F.loha_conv_apply(IMAGES, UP, FLAT, UP, FLAT, kernel_size=-3)


def test_numbers_of_peft_rotations() -> None:
    with pytest.raises(ValueError, match=r"rotations has shape \(2, 4, 3\); expected \(n, s, s\)"):
        peft_rotation.rotate_input(torch.ones(3, 8), torch.ones(2, 4, 3))
    with pytest.raises(ValueError, match=r"skew has shape \(3, 1\); expected \(\.\.\., s, s\)"):
        peft_rotation.cayley_neumann(torch.ones(3, 1))
    for channels, size, stage in ((8, 0, 0), (8, 4, -1), (-8, 4, 0)):
        with pytest.raises(ValueError, match=r"butterfly_permutation: .*expected at least"):
            peft_rotation.butterfly_permutation(channels, size, stage)
    with pytest.raises(ValueError, match="skew_from_vectors: size is -3; expected at least 1"):
        peft_rotation.skew_from_vectors(torch.ones(2, 6), -3)
    with pytest.raises(ValueError, match="constraint is beyond a float's range"):
        F.oft_weight(SQUARE, SQUARE[None], constraint=10**400)


@pytest.mark.parametrize("wrong", [["x"], 3, b"triton", torch])
def test_a_backend_that_is_no_name(wrong: Any) -> None:
    kind = type(wrong).__name__
    with pytest.raises(TypeError, match=f"lora_apply: backend is {kind}; expected a backend's"):
        lora_apply(X, UP, DOWN, backend=wrong)
    with pytest.raises(TypeError, match=f"use_backend: backend is {kind}; expected a backend's"):
        use_backend(wrong)


def test_a_butterfly_of_no_or_too_many_stages() -> None:
    blocks = torch.zeros(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"has shape \(0, 2, 4, 4\); expected m, the stages"):
        F.boft_weight(torch.ones(8, 3), blocks[:0])
    with pytest.raises(ValueError, match=r"mix groups of 4 \* 2\^999999999999 channels"):
        F.boft_apply(torch.ones(3, 8), blocks.expand(10**12, 2, 4, 4))
    with pytest.raises(ValueError, match=r"runs of 4 \* 2\^1000000000000 channels"):
        peft_rotation.butterfly_permutation(8, 4, 10**12)


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_a_convolution_of_numbers_beyond_32_bits(name: str, backend: str | None) -> None:
    for value in (2**31, 2**62, 10**30):
        with pytest.raises(ValueError, match=rf"{name} is \({value}, 1\); expected .* 2147483647"):
            F.lora_conv_apply(
                IMAGES, UP, torch.ones(2, 4, 3, 3), backend=backend, **{name: (value, 1)}
            )


def test_an_output_that_no_tensor_holds(backend: str | None) -> None:
    with pytest.raises(ValueError, match=r"the output would have shape \(2, 6, 42949672.*2\^56"):
        F.lora_conv_apply(IMAGES, UP, torch.ones(2, 4, 3, 3), padding=2**31 - 1, backend=backend)
    wide = [torch.ones(1).expand(2**30, 1), torch.ones(1).expand(1, 2**30)]
    with pytest.raises(ValueError, match=r"shape \(1073741824, 1073741824\); expected fewer"):
        lora_weight(*wide, backend=backend)


@pytest.mark.parametrize("wrong", ["False", None, 1, torch.ones(2)])
def test_no_flag(wrong: Any) -> None:
    calls = {
        "ia3_scale: diff": lambda: F.ia3_scale(V, torch.ones(4), diff=wrong),
        "oft_weight: diff": lambda: F.oft_weight(SQUARE, SQUARE[None], diff=wrong),
        "boft_apply: diff": lambda: F.boft_apply(SQUARE, SQUARE[None, None], diff=wrong),
        "dora_weight: detach_norm": lambda: F.dora_weight(SQUARE, SQUARE[0], detach_norm=wrong),
        "dora_lora_weight: detach_norm": lambda: F.dora_lora_weight(
            SQUARE, SQUARE[0], SQUARE, SQUARE, detach_norm=wrong
        ),
        "dora_apply: detach_norm": lambda: F.dora_apply(
            SQUARE, SQUARE, SQUARE, SQUARE, SQUARE, SQUARE[0], detach_norm=wrong
        ),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} is .*; expected True or False"):
            call()


def test_numbers_of_numpy() -> None:
    kernel = torch.ones(2, 4, 3, 3)
    one, two = np.int64(1), np.int32(2)
    out = F.lora_conv_apply(IMAGES, UP, kernel, stride=two, padding=(one, 1), groups=one)
    assert torch.equal(out, F.lora_conv_apply(IMAGES, UP, kernel, stride=2, padding=1))
    assert torch.equal(
        F.ia3_scale(V, torch.ones(3), axis=one, multiplier=np.float32(0.5)),
        F.ia3_scale(V, torch.ones(3), axis=1, multiplier=0.5),
    )
    assert torch.equal(
        F.oft_apply(SQUARE, SQUARE[None], axis=np.int64(0), constraint=np.float32(0.5)),
        F.oft_apply(SQUARE, SQUARE[None], axis=0, constraint=0.5),
    )
    assert F.factorization(np.int64(12), np.int64(-1)) == (3, 4)
    for wrong, what in ((np.float64(1), "np.float64"), (np.bool_(True), "np.True_")):
        with pytest.raises(TypeError, match=f"stride is {what}.*; expected an int or 2"):
            F.lora_conv_apply(IMAGES, UP, kernel, stride=wrong)  # type: ignore[arg-type]


def test_a_constraint_is_a_number() -> None:
    for wrong in (True, "1", torch.tensor(0.5), 1j):
        with pytest.raises(TypeError, match=r"constraint is .*; expected a number or None"):
            F.oft_weight(SQUARE, SQUARE[None], constraint=wrong)  # type: ignore[arg-type]
    for value in (math.nan, -1):
        with pytest.raises(ValueError, match=r"constraint is .*; expected a number"):
            F.oft_weight(SQUARE, SQUARE[None], constraint=value)


def test_an_uninitialized_parameter_is_named() -> None:
    lazy = torch.nn.UninitializedParameter()
    with pytest.raises(TypeError, match="lora_apply: up is an uninitialized parameter; expected"):
        lora_apply(X, lazy, DOWN)
    with pytest.raises(TypeError, match="ia3_scale: v is an uninitialized parameter"):
        F.ia3_scale(lazy, torch.ones(4))


def test_rotations_of_integers() -> None:
    with pytest.raises(TypeError, match=r"rotate_input: x is torch\.int64; expected a floating"):
        peft_rotation.rotate_input(torch.ones(3, 4, dtype=torch.int64), SQUARE[None])
    with pytest.raises(TypeError, match=r"cayley_neumann: skew is torch\.complex64; expected"):
        peft_rotation.cayley_neumann(SQUARE.to(torch.complex64))
    with pytest.raises(TypeError, match=r"skew_from_vectors: vectors is torch\.int32; expected"):
        peft_rotation.skew_from_vectors(torch.ones(2, 6, dtype=torch.int32), 4)
