"""LoHa's launchers with planted faults: each breaks the rule."""

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
SCALE_AT = {"weight": 5, "factor_grads": 8, "dense_product": 6}


def with_scale(args: tuple[Any, ...], name: str, scale: float) -> list[Any]:
    changed = list(args)
    changed[SCALE_AT[name]] = scale
    return changed


def last_rank_skipped(launch: Launch) -> Launch:
    def weight(a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor, *args: Any, **kw: Any) -> None:
        a1, a2 = (a[:, :-1].contiguous() for a in (a1, a2))
        launch(a1, b1[:-1], a2, b2[:-1], *args, **kw)

    return weight


def weight_scale_dropped(launch: Launch) -> Launch:
    return lambda *args, **kw: launch(*with_scale(args, "weight", 1.0), **kw)


def a_half_rounded(launch: Launch) -> Launch:
    """W1 rounded where no rounding is declared."""

    def weight(a1: Tensor, b1: Tensor, *args: Any, policy: Any, **kw: Any) -> None:
        first = (a1.float() @ b1.float()).to(policy.compute)
        eye = torch.eye(b1.shape[1], dtype=policy.compute)
        second = (args[0].float() @ args[1].float()).to(policy.compute)
        launch(first, eye, second, eye, *args[2:], policy=policy, **kw)

    return weight


def base_added_after_rounding(launch: Launch) -> Launch:
    def weight(*args: Any, policy: Any, **kw: Any) -> None:
        base, out = args[4], args[-1]
        product = torch.empty(out.shape, dtype=policy.compute)
        launch(*args[:4], None, args[5], product, policy=policy, **kw)
        out.copy_(product if base is None else base.float() + product.float())

    return weight


def grads_scaled_late(launch: Launch) -> Launch:
    """s applied to the sums, after the rounding of the gradient's products."""

    def factor_grads(*args: Any, **kw: Any) -> None:
        launch(*with_scale(args, "factor_grads", 1.0), **kw)
        for part in args[6:8]:
            part.mul_(args[8])

    return factor_grads


def products_kept_in_fp32(launch: Launch) -> Launch:
    """rnd(G o W) is declared; here it is not done."""

    def factor_grads(*args: Any, policy: Any, **kw: Any) -> None:
        rounded = [t.to(policy.compute).float() if i < 6 and t is not None else t
                   for i, t in enumerate(args)]  # fmt: skip
        launch(*rounded, policy=replace(policy, compute=torch.float32), **kw)

    return factor_grads


def earlier_groups_forgotten(launch: Launch) -> Launch:
    def factor_grads(*args: Any, **kw: Any) -> None:
        args[7].zero_()
        launch(*args, **kw)

    return factor_grads


def last_tokens_skipped(launch: Launch) -> Launch:
    def factor_grads(grad: Tensor, x: Tensor, *args: Any, **kw: Any) -> None:
        launch(grad[:32], x[:32], *args, **kw)

    return factor_grads


def product_scale_dropped(launch: Launch) -> Launch:
    return lambda *args, **kw: launch(*with_scale(args, "dense_product", 1.0), **kw)


def products_cut_off(launch: Launch) -> Launch:
    """The product in fp32 cut off, not rounded to nearest."""

    def pairs(
        left: Tensor, right: Tensor, out: Tensor, rank_last: bool, *args: Any, **kw: Any
    ) -> None:
        at = 1 if rank_last else 0
        first, second = left.float().unsqueeze(at + 1), right.float().unsqueeze(at)
        value = (first * second).flatten(at, at + 1)
        cut = value.view(torch.int32) & -65536
        out.copy_(cut.view(torch.float32))

    return pairs


def halves_swapped(launch: Launch) -> Launch:
    def pairs_grad(grad: Tensor, left: Tensor, right: Tensor, *args: Any, **kw: Any) -> None:
        launch(grad, right, left, *args, **kw)

    return pairs_grad


FAULTS = [
    (last_rank_skipped, "weight", "loha_weight", "integers", BF16),
    (weight_scale_dropped, "weight", "loha_weight", "plain", FP32),
    (a_half_rounded, "weight", "loha_weight", "plain", BF16),
    (base_added_after_rounding, "weight", "loha_weight", "large delta", BF16),
    (grads_scaled_late, "factor_grads", "loha_weight", "plain", BF16),
    (products_kept_in_fp32, "factor_grads", "loha_weight", "plain", BF16),
    (earlier_groups_forgotten, "factor_grads", "loha_weight", "groups of rows", BF16),
    (last_tokens_skipped, "factor_grads", "loha_apply", "dense", BF16),
    (product_scale_dropped, "dense_product", "loha_apply", "dense", BF16),
    (products_cut_off, "pairs", "loha_apply", "plain", BF16),
    (halves_swapped, "pairs_grad", "loha_apply", "plain", BF16),
]


@pytest.mark.parametrize(
    ("fault", "launcher", "op", "name", "mix"),
    [pytest.param(*f, id=f"{f[0].__name__}-{f[2]}-{testing.mix_name(f[4])}") for f in FAULTS],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    fault: Callable[[Launch], Launch],
    launcher: str,
    op: str,
    name: str,
    mix: tuple[torch.dtype, torch.dtype],
    planted: Callable[..., None],
) -> None:
    family = "khatri_rao" if launcher.startswith("pairs") else "loha"
    planted(fused, family, launcher, fault, op, name, mix)
