"""The rule can fail: each planted fault in a real backend's launcher breaks it."""

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


def last_tile_skipped(launch: Launch) -> Launch:
    def matmul(a: Tensor, b: Tensor, *args: Any, plan: Any, policy: Any) -> None:
        k = max(1, (a.shape[1] - 1) // 32 * 32)
        launch(a[:, :k].clone(), b[:k].clone(), *args, plan=plan, policy=policy)

    return matmul


def scale_dropped(launch: Launch) -> Launch:
    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        launch(a, b, base, 1.0, out, **kw)

    return matmul


def scaled_after_rounding(launch: Launch) -> Launch:
    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        product = torch.empty(out.shape, dtype=kw["policy"].compute)
        launch(a, b, None, 1.0, product, **kw)
        total = scale * product.float()
        out.copy_(total if base is None else base + total)

    return matmul


def accumulated_in_bf16(launch: Launch) -> Launch:
    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        total = torch.zeros(out.shape, dtype=torch.bfloat16)
        part = torch.empty(out.shape, dtype=torch.float32)
        for k in range(0, a.shape[1], 16):
            rows, cols = a[:, k : k + 16].clone(), b[k : k + 16].clone()
            launch(rows, cols, None, 1.0, part, **kw)
            total = (total.float() + part).bfloat16()
        value = scale * total.float()
        out.copy_(value if base is None else base + value)

    return matmul


def base_added_after_rounding(launch: Launch) -> Launch:
    """An intermediate rounded where none is declared."""

    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        product = torch.empty(out.shape, dtype=kw["policy"].compute)
        launch(a, b, None, scale, product, **kw)
        out.copy_(product if base is None else base.float() + product.float())

    return matmul


def intermediate_kept_in_fp32(launch: Launch) -> Launch:
    """h and q are declared rounded; here they keep their low bits beside the rounded value."""
    low: dict[int, Tensor] = {}

    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        wide = torch.empty(out.shape, dtype=torch.float32)
        launch(a, b, base, scale, wide, **kw)
        exact = replace(kw["policy"], compute=torch.float32)
        for kept, transposed in ((a, False), (b, False), (a.t(), True)):
            part = low.get(kept.data_ptr())
            if part is not None and part.shape == kept.shape:
                more = torch.empty(out.shape, dtype=torch.float32)
                left = part.t() if transposed else part
                pair = (left, b.float()) if kept is not b else (a.float(), part)
                plan = replace(kw["plan"], block_k=16)
                launch(*(t.contiguous() for t in pair), None, scale, more, plan=plan, policy=exact)
                wide += more
        out.copy_(wide)
        low[out.data_ptr()] = wide - out.float()

    return matmul


def unwritten_tail(launch: Launch) -> Launch:
    """The last row is never stored; only the NaN poison shows it."""

    def matmul(a: Tensor, b: Tensor, base: Any, scale: Any, out: Tensor, **kw: Any) -> None:
        whole = torch.empty(out.shape, dtype=out.dtype)
        launch(a, b, base, scale, whole, **kw)
        out[..., :-1, :].copy_(whole[..., :-1, :])

    return matmul


FAULTS = [
    (last_tile_skipped, "lora_apply", "integers", FP32),
    (last_tile_skipped, "lora_apply", "plain", BF16),
    (scale_dropped, "lora_apply", "plain", BF16),
    (scale_dropped, "lora_weight", "plain", FP32),
    (scaled_after_rounding, "lora_apply", "base", BF16),
    (scaled_after_rounding, "lora_weight", "plain", BF16),
    (accumulated_in_bf16, "lora_apply", "rank 16", BF16),
    (accumulated_in_bf16, "lora_weight", "tall", FP32),
    (base_added_after_rounding, "lora_weight", "large delta", BF16),
    (intermediate_kept_in_fp32, "lora_apply", "plain", BF16),
    (unwritten_tail, "lora_weight", "plain", FP32),
]


@pytest.mark.parametrize(
    ("fault", "op", "name", "mix"),
    [pytest.param(*f, id=f"{f[0].__name__}-{f[1]}-{testing.mix_name(f[3])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    fault: Callable[[Launch], Launch],
    op: str,
    name: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    planted(fused, "lora", "matmul", fault, op, name, mix)
