"""LoKr's rule can fail: each planted fault in a real backend's launcher breaks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.kernels import testing

Launch = Callable[..., None]
BF16 = (torch.bfloat16, torch.bfloat16)
FP32 = (torch.float32, torch.float32)


def scale_dropped(launch: Launch) -> Launch:
    def faulty(*args: Any, **kw: Any) -> None:
        launch(*args[:-2], 1.0, args[-1], **kw)

    return faulty


def scaled_after_rounding(launch: Launch) -> Launch:
    def faulty(*args: Any, **kw: Any) -> None:
        *first, base, scale, out = args
        product = torch.empty(out.shape, dtype=kw["policy"].compute)
        launch(*first, None, 1.0, product, **kw)
        total = scale * product.float()
        out.copy_(total if base is None else base + total)

    return faulty


def last_row_unwritten(launch: Launch) -> Launch:
    def faulty(*args: Any, **kw: Any) -> None:
        whole = torch.empty_like(args[-1])
        launch(*args[:-1], whole, **kw)
        args[-1][:-1].copy_(whole[:-1])

    return faulty


def last_part_lost(launch: Launch) -> Launch:
    """One split's sums don't reach the total."""

    def faulty(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        args[-1][-1].zero_()

    return faulty


def parts_kept_in_bf16(launch: Launch) -> Launch:
    def faulty(*args: Any, **kw: Any) -> None:
        launch(*args, **kw)
        for parts in args[-2:]:
            if isinstance(parts, Tensor):
                parts.copy_(parts.bfloat16())

    return faulty


def half_rounded(launch: Launch) -> Launch:
    """W2 of a pair is declared unrounded in the weight."""

    def faulty(w1: Tensor, w1_b: Any, w2: Tensor, w2_b: Any, *args: Any, **kw: Any) -> None:
        if w2_b is not None:
            w2, w2_b = (w2.float() @ w2_b.float()).to(w2.dtype), None
        launch(w1, w1_b, w2, w2_b, *args, **kw)

    return faulty


def intermediate_kept_in_fp32(launch: Launch) -> Launch:
    """What lies between the halves is declared rounded."""

    def faulty(*args: Any, **kw: Any) -> None:
        exact = replace(kw["policy"], compute=torch.float32)
        launch(*args, plan=kw["plan"], policy=exact)

    return faulty


def tokens_mixed_up(launch: Launch) -> Launch:
    """Each token gets its neighbour's rows."""

    def faulty(value: Tensor, w: Tensor, w_b: Any, *args: Any, **kw: Any) -> None:
        p = (w if w_b is None else w_b).shape[1]
        launch(value.roll(p, 0), w, w_b, *args, **kw)

    return faulty


FAULTS = [
    (scale_dropped, "lokr", "kron", "lokr_weight", "plain", FP32),
    (scaled_after_rounding, "lokr", "kron", "lokr_weight", "low-rank w2", BF16),
    (last_row_unwritten, "lokr", "kron", "lokr_weight", "plain", FP32),
    (half_rounded, "lokr", "kron", "lokr_weight", "low-rank w2", BF16),
    (last_part_lost, "lokr", "kron_grad", "lokr_weight", "plain", BF16),
    (parts_kept_in_bf16, "lokr", "kron_grad", "lokr_weight", "plain", FP32),
    (scale_dropped, "lokr_fused", "fused", "lokr_apply", "plain", BF16),
    (scaled_after_rounding, "lokr_fused", "fused", "lokr_apply", "plain", BF16),
    (intermediate_kept_in_fp32, "lokr_fused", "fused", "lokr_apply", "plain", BF16),
    (last_part_lost, "lokr_fused", "fused_grad", "lokr_apply", "plain", BF16),
    (intermediate_kept_in_fp32, "lokr_fused", "fused_grad", "lokr_apply", "plain", BF16),
    (tokens_mixed_up, "lokr_mix", "mix", "lokr_apply", "low-rank w2", BF16),
    (last_part_lost, "lokr_mix", "mix_grad", "lokr_apply", "low-rank w2", BF16),
]


@pytest.mark.parametrize(
    ("fault", "family", "kernel", "op", "name", "mix"),
    [pytest.param(*f, id=f"{f[0].__name__}-{f[2]}-{testing.mix_name(f[5])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    fault: Callable[[Launch], Launch],
    family: str,
    kernel: str,
    op: str,
    name: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    planted(fused, family, kernel, fault, op, name, mix)
