"""The rule can fail on rotations: each planted fault in a real backend's launcher breaks it."""

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


def low_part_dropped(launch: Launch) -> Launch:
    """M's first 16-bit part alone."""

    def rotate(
        x: Tensor, base: Any, extra: Any, rescale: Any, parts: Tensor, *args: Any, **kw: Any
    ) -> None:
        parts = parts.clone()
        parts[1:] = 0
        launch(x, base, extra, rescale, parts, *args, **kw)

    return rotate


def _tf32(t: Tensor) -> Tensor:
    return ((t.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


def in_tf32(launch: Launch) -> Launch:
    """Bare TF32 products: 10 explicit bits of both factors."""

    def rotate(
        x: Tensor, base: Any, extra: Any, rescale: Any, parts: Tensor, *args: Any, **kw: Any
    ) -> None:
        launch(_tf32(x), base, extra, rescale, _tf32(parts), *args, **kw)

    return rotate


def by_subtraction(launch: Launch) -> Launch:
    """D as R - I, with R rounded to fp32."""

    def eliminate(
        blocks: Tensor, held: Any, source: Any, target: Tensor, step: int, **kw: Any
    ) -> None:
        launch(blocks, held, source, target, step, **kw)
        eye = torch.eye(blocks.shape[-1])
        target.copy_((eye + target).float() - eye)  # cases of one step

    return eliminate


def transposed(launch: Launch) -> Launch:
    """The other index contracted: the inverse rotation."""

    def rotate(*args: Any, **kw: Any) -> None:
        launch(*args[:-1], not args[-1], **kw)

    return rotate


def share_dropped(launch: Launch) -> Launch:
    """The last tokens are left out of v^T g."""

    def gram(x: Tensor, g: Tensor, *args: Any, **kw: Any) -> None:
        x = x.clone()
        x[-1:, :, -1:] = 0
        launch(x, g, *args, **kw)

    return gram


def stage_skipped(launch: Launch) -> Launch:
    """The last stage of a butterfly is left out."""

    def compose(scaled: Tensor, found: Tensor, part: Any, transposed: bool, **kw: Any) -> None:
        if not transposed:
            scaled = scaled.clone()
            scaled[-1] = 0
        launch(scaled, found, part, transposed, **kw)

    return compose


def others_forgotten(launch: Launch) -> Launch:
    """A stage's gradient without the stages after it."""

    def stage_gradient(found: Tensor, *args: Any, **kw: Any) -> None:
        launch(torch.zeros_like(found), *args, **kw)

    return stage_gradient


def solve_held_constant(launch: Launch) -> Launch:
    """The Cayley transform's gradient to first order only, N = I."""

    def cayley_gradient(delta: Tensor, *args: Any, **kw: Any) -> None:
        launch(torch.zeros_like(delta), *args, **kw)

    return cayley_gradient


FAULTS = [
    (low_part_dropped, "rotate", "oft_weight", "plain", BF16),
    (low_part_dropped, "rotate", "boft_apply", "plain", BF16),
    (in_tf32, "rotate", "oft_weight", "plain", FP32),
    (by_subtraction, "eliminate", "oft_weight", "near identity diff", FP32),
    (transposed, "rotate", "boft_apply", "plain", BF16),
    (stage_skipped, "compose", "boft_apply", "plain", BF16),
    (others_forgotten, "stage_gradient", "boft_weight", "plain", BF16),
    (solve_held_constant, "cayley_gradient", "oft_weight", "plain", BF16),
    (share_dropped, "gram", "oft_weight", "plain", FP32),
]


@pytest.mark.parametrize(
    ("fault", "launcher", "op", "case", "mix"),
    [pytest.param(*f, id=f"{f[0].__name__}-{f[2]}-{testing.mix_name(f[4])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    fault: Callable[[Launch], Launch],
    launcher: str,
    op: str,
    case: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    planted(fused, "rotate", launcher, fault, op, case, mix)
