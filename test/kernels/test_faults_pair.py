"""The rule can fail: faults planted in the launchers of GLoRA and T-LoRA in both backends."""

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


def second_product_dropped(launch: Launch) -> Launch:
    return lambda a, b, a0, *args, **kw: launch(a, b, torch.zeros_like(a0), *args, **kw)


def products_rounded_apart(launch: Launch) -> Launch:
    def product(
        a: Tensor, b: Tensor, a0: Tensor, b0: Tensor, s: Any, out: Tensor, subtract: bool, **kw: Any
    ) -> None:
        first, second = torch.empty_like(out), torch.empty_like(out)
        launch(a, b, torch.zeros_like(a0), b0, s, first, subtract, **kw)
        launch(torch.zeros_like(a), b, a0, b0, s, second, subtract, **kw)
        out.copy_(first.float() + second.float())

    return product


def scaled_after_rounding(launch: Launch) -> Launch:
    def product(a: Tensor, b: Tensor, a0: Tensor, b0: Tensor, s: Any, out: Tensor, *args: Any,
                **kw: Any) -> None:  # fmt: skip
        launch(a, b, a0, b0, 1.0, out, *args, **kw)
        out.copy_(s * out.float())

    return product


def last_of_the_rank_skipped(launch: Launch) -> Launch:
    def product(a: Tensor, b: Tensor, *args: Any, **kw: Any) -> None:
        shorter = a.clone()
        shorter[:, -1] = 0
        launch(shorter, b, *args, **kw)

    return product


def mask_dropped(launch: Launch) -> Launch:
    return lambda a, lam, mask, out, **kw: launch(a, lam, torch.ones_like(mask), out, **kw)


def mask_dropped_from_the_sum(launch: Launch) -> Launch:
    return lambda a, b, mask, out, **kw: launch(a, b, torch.ones_like(mask), out, **kw)


def rounded_before_the_diagonal(launch: Launch) -> Launch:
    def diagonal(a: Tensor, *args: Any, policy: Any, **kw: Any) -> None:
        launch(a.to(policy.compute).to(a.dtype), *args, policy=policy, **kw)

    return diagonal


def last_row_skipped(launch: Launch) -> Launch:
    def gradient(a: Tensor, *args: Any, **kw: Any) -> None:
        shorter = a.clone()
        shorter[-1] = 0
        launch(shorter, *args, **kw)

    return gradient


FAULTS = [
    ("product", second_product_dropped, "glora_weight", "plain", FP32),
    ("product", products_rounded_apart, "glora_weight", "plain", BF16),
    ("product", products_rounded_apart, "tlora_weight", "plain", BF16),
    ("product", scaled_after_rounding, "tlora_weight", "plain", BF16),
    ("product", last_of_the_rank_skipped, "glora_weight", "integers", BF16),
    ("diagonal", mask_dropped, "tlora_weight", "plain", BF16),
    ("diagonal", mask_dropped, "tlora_apply", "masks", FP32),
    ("diagonal", rounded_before_the_diagonal, "tlora_apply", "plain", BF16),
    ("diagonal_gradient", last_row_skipped, "tlora_apply", "plain", BF16),
    ("diagonal_gradient", mask_dropped_from_the_sum, "tlora_apply", "masks", BF16),
]


@pytest.mark.parametrize(
    ("name", "fault", "op", "case", "mix"),
    [pytest.param(*f, id=f"{f[1].__name__}-{f[2]}-{testing.mix_name(f[4])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    name: str,
    fault: Callable[[Launch], Launch],
    op: str,
    case: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    planted(fused, "pair", name, fault, op, case, mix)
