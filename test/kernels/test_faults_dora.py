"""The rule can fail for DoRA: each planted fault in a real launcher breaks it."""

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


def multiplier_dropped(launch: Launch) -> Launch:
    def rescale(*args: Any, **kw: Any) -> None:
        launch(*args[:3], 1.0, *args[4:], **kw)

    return rescale


def lines_multiplier_dropped(launch: Launch) -> Launch:
    def lengths(*args: Any, **kw: Any) -> None:
        launch(*args[:2], 1.0, *args[3:], **kw)

    return lengths


def last_part_dropped(launch: Launch) -> Launch:
    def measure(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        args[7][-1] = 0

    return measure


def norm_held_constant(launch: Launch) -> Launch:
    def radial(*args: Any, **kw: Any) -> None:
        launch(*args[:-1], True, **kw)

    return radial


def rounded_before_it_is_rescaled(launch: Launch) -> Launch:
    def spread(weight: Tensor, grad: Tensor | None, delta: Tensor, *args: Any, **kw: Any) -> None:
        merged = (weight.float() + delta.float()).to(weight.dtype)
        launch(merged, grad, torch.zeros_like(delta), *args, **kw)

    return spread


def merged_in_bf16(launch: Launch) -> Launch:
    """weight + delta rounded before the norm and the rescaling."""

    def rescale(weight: Tensor, magnitude: Tensor, delta: Tensor, *args: Any, **kw: Any) -> None:
        merged = (weight.float() + delta.float()).to(weight.dtype)
        launch(merged, magnitude, torch.zeros_like(delta), *args, **kw)

    return rescale


def last_row_unwritten(launch: Launch) -> Launch:
    def rescale(*args: Any, **kw: Any) -> None:
        *front, out = args
        whole = torch.empty_like(out)
        launch(*front, whole, **kw)
        out[:-1].copy_(whole[:-1])

    return rescale


def norms_kept_in_bf16(launch: Launch) -> Launch:
    def rescale_back(*args: Any, **kw: Any) -> None:
        launch(*args[:5], args[5].bfloat16().float(), *args[6:], **kw)

    return rescale_back


def last_columns_skipped(launch: Launch) -> Launch:
    def contract(
        weight: Tensor, grad: Tensor, up: Tensor, down: Tensor, *args: Any, **kw: Any
    ) -> None:
        *middle, part_up, part_down, group = args
        launch(weight, grad, up, down, *middle, torch.empty_like(part_up), part_down, group, **kw)
        cut = down.clone()
        cut[:, -1] = 0
        launch(weight, grad, up, cut, *middle, part_up, torch.empty_like(part_down), group, **kw)

    return contract


def last_rows_skipped(launch: Launch) -> Launch:
    def contract(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        args[-2][-1] = 0

    return contract


def gradient_in_bf16(launch: Launch) -> Launch:
    def contract(*args: Any, **kw: Any) -> None:
        launch(*args[:6], args[6].bfloat16().float(), *args[7:], **kw)

    return contract


def scale_dropped(launch: Launch) -> Launch:
    def expand(*args: Any, **kw: Any) -> None:
        launch(*args[:5], 1.0, args[6], **kw)

    return expand


def rounded_before_the_magnitude(launch: Launch) -> Launch:
    """The layer's output is stored, and rescaled afterwards."""

    def expand(*args: Any, **kw: Any) -> None:
        base, hidden, up, magnitude, norm, scale, out = args
        one = torch.ones_like(norm)
        launch(base, hidden, up, one.to(magnitude.dtype), one, scale, out, **kw)
        out.copy_(out.float() * (magnitude.float() / norm))

    return expand


def last_token_skipped(launch: Launch) -> Launch:
    def reduce(grad: Tensor, *args: Any, **kw: Any) -> None:
        *front, partial = args
        launch(grad, *front, partial, **kw)
        without = grad.clone()
        without[-1] = 0
        rest = [torch.empty_like(t) if t is not None else None for t in front[-2:]]
        launch(without, *front[:-2], *rest, partial, **kw)

    return reduce


def norm_taken_for_constant(launch: Launch) -> Launch:
    def finish(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        args[-1].zero_()

    return finish


FAULTS = [
    ("dora", multiplier_dropped, "dora_weight", "plain", BF16),
    ("dora_lines", lines_multiplier_dropped, "dora_weight", "by input", FP32),
    ("dora_lines", last_part_dropped, "dora_weight", "by input", BF16),
    ("dora_lines", last_part_dropped, "dora_lora_weight", "plain", BF16),
    ("dora_lines", norm_held_constant, "dora_lora_weight", "plain", BF16),
    ("dora_lines", rounded_before_it_is_rescaled, "dora_weight", "conv by input", BF16),
    ("dora", merged_in_bf16, "dora_weight", "delta", BF16),
    ("dora", last_row_unwritten, "dora_weight", "plain", FP32),
    ("dora", norms_kept_in_bf16, "dora_weight", "plain", FP32),
    ("dora_contract", last_columns_skipped, "dora_lora_weight", "plain", BF16),
    ("dora_contract", last_rows_skipped, "dora_lora_weight", "plain", BF16),
    ("dora_contract", gradient_in_bf16, "dora_lora_weight", "plain", FP32),
    ("dora_apply", scale_dropped, "dora_apply", "plain", BF16),
    ("dora_apply", rounded_before_the_magnitude, "dora_apply", "plain", BF16),
    ("dora_apply", last_token_skipped, "dora_apply", "plain", FP32),
    ("dora_apply", norm_taken_for_constant, "dora_apply", "plain", BF16),
]


@pytest.mark.parametrize(
    ("family", "fault", "op", "name", "mix"),
    [pytest.param(*f, id=f"{f[1].__name__}-{f[2]}-{testing.mix_name(f[4])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    family: str,
    fault: Callable[[Launch], Launch],
    op: str,
    name: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    launcher = fault(print).__name__  # a faulty launcher has the name of the one it stands for
    planted(fused, family, launcher, fault, op, name, mix)
