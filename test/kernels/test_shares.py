"""Partial sums: what adds them up, and that every one of them is written before."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.kernels import plan as plans
from lycoris.kernels.ops import lokr
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

BF16, F32 = torch.bfloat16, torch.float32
NAN = float("nan")
CPU_TILES = plans.sums(((1, 1),), 0)


def launcher(fused: str, family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lycoris.backends.{fused}.{family}"), name)


def parts_of(count: int, size: int, width: int) -> Tensor:
    """Integers, whose sums are exact in any order, and differ from share to share."""
    at = torch.arange(count * size * width, dtype=F32).reshape(count, size, width)
    return at * 7 % 61 - 30


def total(parts: Tensor) -> Tensor:
    return parts.double().sum((0, 2))


@pytest.mark.parametrize(
    ("count", "size", "width"),
    [(1, 1, 1), (1, 67, 1), (2, 64, 1), (7, 65, 1), (8, 3, 1), (9, 130, 1), (3, 5, 7), (33, 1, 3)],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_sum(fused: str, count: int, size: int, width: int, dtype: torch.dtype) -> None:
    parts, out = parts_of(count, size, width), torch.full((size,), NAN, dtype=dtype)
    add_up = launcher(fused, "shares", "add_up")
    add_up(parts, None, out, None, None, plan=CPU_TILES, policy=Policy(F32, F32))
    assert torch.equal(out, total(parts).to(dtype))


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 67, 1), (9, 3, 1)), ((17, 130, 1), (1, 1, 1)), ((3, 5, 7), (2, 129, 3))],
)
def test_two_sums_in_one_launch(
    fused: str, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    parts = [parts_of(*first), -parts_of(*second)]
    outs = [
        torch.full((first[1],), NAN),
        torch.full((second[1],), NAN, dtype=BF16),
    ]
    add_up = launcher(fused, "shares", "add_up")
    add_up(parts[0], None, outs[0], parts[1], outs[1], plan=CPU_TILES, policy=Policy(F32, F32))
    for out, part in zip(outs, parts, strict=True):
        assert torch.equal(out, total(part).to(out.dtype))


def test_the_order_of_a_sum_is_that_of_its_shares(fused: str) -> None:
    """Lanes of a tile sum every eighth share in order; a sum of one lane shows it bit by bit."""
    values = torch.zeros(24, 3, 1)
    values[0], values[8], values[16] = 2.0**25, 1.0, -(2.0**25)
    out = torch.full((3,), NAN)
    add_up = launcher(fused, "shares", "add_up")
    add_up(values, None, out, None, None, plan=CPU_TILES, policy=Policy(F32, F32))
    assert torch.equal(out, torch.zeros(3))  # 1 is lost in 2^25; summed last, it would not be
    values[8], values[16] = -(2.0**25), 1.0
    add_up(values, None, out, None, None, plan=CPU_TILES, policy=Policy(F32, F32))
    assert torch.equal(out, torch.ones(3))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_every_part_of_a_weights_gradient_is_written(fused: str, rank: int, splits: int) -> None:
    """Parts start as NaN; of five splits, two have no share at all."""
    a, b, c, d = 4, 5, 7, 40
    plan = Plan(4, 32, 8, splits=splits)
    grad, w1 = torch.randn(a * c, b * d), torch.randn(a, b)
    w2, w2_b = torch.randn(c, rank or d), torch.randn(rank, d) if rank else None
    parts_1 = torch.full((2 * 2, a, b), NAN)
    parts_2 = torch.full((splits, c, d), NAN)
    launch = launcher(fused, "lokr", "kron_grad")
    launch(
        grad, w1, None, w2, w2_b, 0.7, parts_1, parts_2, plan=plan, policy=Policy(F32, F32)
    )  # fmt: skip
    blocks = grad.double().view(a, c, b, d)
    half = (w2 if w2_b is None else w2.double() @ w2_b.double()).double()
    want_1 = 0.7 * torch.einsum("acbd,cd->ab", blocks, half)
    want_2 = 0.7 * torch.einsum("acbd,ab->cd", blocks, w1.double())
    torch.testing.assert_close(parts_1.double().sum(0), want_1, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(parts_2.double().sum(0), want_2, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("pairs", [1, 64, 1024, 4096, 5000])
@pytest.mark.parametrize(("c", "d"), [(64, 64), (40, 40), (512, 512), (3, 5)])
def test_no_share_of_a_weight_is_empty_or_too_long(
    monkeypatch: pytest.MonkeyPatch, pairs: int, c: int, d: int
) -> None:
    monkeypatch.setattr(lokr, "multiprocessors", lambda device: 132)
    plan = lokr._weight_plan(pairs, c, d, torch.device("cuda", 0))
    steps = -(-pairs // plan.block_k)
    share = -(-steps // plan.splits)
    assert (plan.splits - 1) * share < steps <= plan.splits * share
    assert share * plan.block_k <= lokr.CHUNK + plan.block_k
