"""The rule can fail: faults planted in the pointwise launchers of both backends."""

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
    return lambda v, vector, scale, *args, **kw: launch(v, vector, 1.0, *args, **kw)


def difference_rounded(launch: Launch) -> Launch:
    """v * scale * vector is rounded, then added to v."""

    def scaled(v: Tensor, vector: Tensor, scale: Any, out: Tensor, diff: bool, **kw: Any) -> None:
        launch(v, vector, scale, out, True, **kw)
        if not diff:
            out.copy_(v.float() + out.float())

    return scaled


def last_column_unwritten(launch: Launch) -> Launch:
    def scaled(v: Tensor, vector: Tensor, scale: Any, out: Tensor, diff: bool, **kw: Any) -> None:
        whole = torch.empty_like(out)
        launch(v, vector, scale, whole, diff, **kw)
        out[:, :-1].copy_(whole[:, :-1])

    return scaled


def last_row_skipped(launch: Launch) -> Launch:
    def back(grad: Tensor, *args: Any, **kw: Any) -> None:
        rest = grad.clone()
        rest[-1] = 0
        launch(rest, *args, **kw)

    return back


def partials_in_bf16(launch: Launch) -> Launch:
    def back(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        partials = args[5]
        partials.copy_(partials.bfloat16())

    return back


def sum_of_a_rounded_product(launch: Launch) -> Launch:
    def add(delta: Tensor, base: Tensor | None, scale: Any, out: Tensor, **kw: Any) -> None:
        launch(delta, None, scale, out, **kw)
        if base is not None:
            out.copy_(base.float() + out.float())

    return add


def scale_dropped(launch: Launch) -> Launch:
    return lambda delta, base, scale, out, **kw: launch(delta, base, 1.0, out, **kw)


def rounded_before_merging(launch: Launch) -> Launch:
    def merge(weight: Tensor, delta: Tensor, scale: Any, **kw: Any) -> None:
        launch(weight, (scale * delta.float()).to(delta.dtype), 1.0, **kw)

    return merge


def last_element_left_out(launch: Launch) -> Launch:
    def merge(weight: Tensor, *args: Any, **kw: Any) -> None:
        last = weight[-1].clone()
        launch(weight, *args, **kw)
        weight[-1] = last

    return merge


FAULTS = [
    ("scale_columns", multiplier_dropped, "ia3_scale", "plain", BF16),
    ("scale_columns", difference_rounded, "ia3_scale", "cancellation", BF16),
    ("scale_columns", last_column_unwritten, "ia3_scale", "plain", FP32),
    ("scale_rows", multiplier_dropped, "ia3_scale", "images", FP32),
    ("gradients_of_columns", last_row_skipped, "ia3_scale", "integers", BF16),
    ("gradients_of_columns", partials_in_bf16, "ia3_scale", "plain", FP32),
    ("gradients_of_rows", last_row_skipped, "ia3_scale", "images", BF16),
    ("gradients_of_rows", partials_in_bf16, "ia3_scale", "images", BF16),
    ("add", sum_of_a_rounded_product, "add_scaled", "large delta", BF16),
    ("add", scale_dropped, "add_scaled", "plain", FP32),
    ("merge", rounded_before_merging, "merge_", "large delta", BF16),
    ("merge", last_element_left_out, "merge_", "plain", BF16),
]


@pytest.mark.parametrize(
    ("name", "fault", "op", "case", "mix"),
    [
        pytest.param(*f, id=f"{f[1].__name__}-{f[0]}-{f[3]}-{testing.mix_name(f[4])}")
        for f in FAULTS
    ],
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
    planted(fused, "scale", name, fault, op, case, mix)
