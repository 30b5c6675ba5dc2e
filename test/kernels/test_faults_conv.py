"""The rule can fail: each planted fault in a launcher around a convolution breaks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.kernels import testing

Launch = Callable[..., None]
BF16 = (torch.bfloat16, torch.bfloat16)
FP32 = (torch.float32, torch.float32)


def last_channel_skipped(launch: Launch) -> Launch:
    def mix(a: Tensor, b: Tensor, *args: Any, **kw: Any) -> None:
        launch(a[..., :-1].contiguous(), b[:, :-1].contiguous(), *args, **kw)

    return mix


def scale_dropped(launch: Launch) -> Launch:
    def mix(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        launch(a, b, base, 1.0, out, **kw)

    return mix


def scaled_after_rounding(launch: Launch) -> Launch:
    def mix(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        product = torch.empty(out.shape, dtype=kw["policy"].compute)
        launch(a, b, None, 1.0, product, **kw)
        total = scale * product.float()
        out.copy_(total if base is None else base + total)

    return mix


def group_of_another_sample(launch: Launch) -> Launch:
    def mix(a: Tensor, b: Tensor, *args: Any, **kw: Any) -> None:
        launch(a.flip(0).contiguous(), b, *args, **kw)

    return mix


def unwritten_tail(launch: Launch) -> Launch:
    """The last sample is never stored; only the NaN poison shows it."""

    def mix(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        whole = torch.empty(out.shape, dtype=out.dtype)
        launch(a, b, base, scale, whole, **kw)
        out[:-1].copy_(whole[:-1])

    return mix


def last_pixel_skipped(launch: Launch) -> Launch:
    def contract(left: Tensor, right: Tensor, *args: Any, **kw: Any) -> None:
        launch(left[..., :-1].contiguous(), right[..., :-1].contiguous(), *args, **kw)

    return contract


def accumulated_in_bf16(launch: Launch) -> Launch:
    def contract(left: Tensor, right: Tensor, scale: Any, out: Tensor, **kw: Any) -> None:
        total = torch.zeros(out.shape, dtype=torch.bfloat16)
        part = torch.empty(out.shape, dtype=torch.float32)
        for i in range(0, left.shape[2], 8):
            some = (t[..., i : i + 8].contiguous() for t in (left, right))
            launch(*some, scale, part, **kw)
            total = (total.float() + part).bfloat16()
        out.copy_(total)

    return contract


def product_off_by_a_bit(launch: Launch) -> Launch:
    def pairs(left: Tensor, right: Tensor, out: Tensor, *args: Any, **kw: Any) -> None:
        launch(left, right, out, *args, **kw)
        out.copy_((out.float() * (1 + 2.0**-7)).to(out.dtype))

    return pairs


def second_factor_ignored(launch: Launch) -> Launch:
    def pairs_grad(grad: Tensor, left: Tensor, right: Tensor, *args: Any, **kw: Any) -> None:
        launch(grad, left, left.clone(), *args, **kw)

    return pairs_grad


FAULTS = [
    ("conv", "mix", last_channel_skipped, "lora_conv_apply", "integers", FP32),
    ("conv", "mix", scale_dropped, "lora_conv_apply", "plain", BF16),
    ("conv", "mix", scaled_after_rounding, "lora_conv_apply", "base", BF16),
    ("conv", "mix", group_of_another_sample, "lora_conv_apply", "groups", FP32),
    ("conv", "mix", unwritten_tail, "lora_conv_apply", "base", FP32),
    ("conv", "mix", scaled_after_rounding, "lokr_conv_apply", "plain", BF16),
    ("conv", "contract", last_pixel_skipped, "lokr_conv_apply", "integers", FP32),
    ("conv", "contract", accumulated_in_bf16, "lora_conv_apply", "plain", BF16),
    ("khatri_rao", "pairs", product_off_by_a_bit, "loha_conv_apply", "plain", BF16),
    ("khatri_rao", "pairs_grad", second_factor_ignored, "loha_conv_apply", "plain", FP32),
]


@pytest.mark.parametrize(
    ("family", "name", "fault", "op", "case", "mix"),
    [pytest.param(*f, id=f"{f[2].__name__}-{f[3]}-{testing.mix_name(f[5])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    family: str,
    name: str,
    fault: Callable[[Launch], Launch],
    op: str,
    case: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    planted(fused, family, name, fault, op, case, mix)
