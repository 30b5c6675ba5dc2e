"""Partial sums: what adds them up, and that every one of them is written before."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lycoris.functional import loha_weight, lora_apply
from lycoris.kernels import plan as plans
from lycoris.kernels import registry, schedule
from lycoris.kernels.errors import BackendError
from lycoris.kernels.ops import lokr
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.schedule import Schedule

BF16, F32 = torch.bfloat16, torch.float32
CPU, FP32 = torch.device("cpu"), Policy(F32, F32)
NAN = float("nan")
Launch = Callable[..., None]


def launcher(fused: str, family: str, name: str) -> Any:
    return getattr(importlib.import_module(f"lycoris.backends.{fused}.{family}"), name)


@pytest.fixture(params=["triton", "tilelang", "no kernel"])
def add_up(request: pytest.FixtureRequest) -> Launch:
    """``add_up`` of each backend, and what stands in for it where a backend has none."""
    if request.param == "no kernel":
        return schedule._add_up
    kernel, tiles = launcher(request.param, "shares", "add_up"), plans.sums(((1, 1),), 0)
    return lambda *args: kernel(*args, plan=tiles, policy=FP32)


def parts_of(*shape: int) -> Tensor:
    """Integers, whose sums are exact in any order, and differ from share to share."""
    return torch.arange(torch.Size(shape).numel(), dtype=F32).reshape(shape) * 7 % 61 - 30


def total(parts: Tensor) -> Tensor:
    return parts.double().sum((0, 2))


@pytest.mark.parametrize(
    ("count", "size", "width"),
    [
        (1, 1, 1),
        (1, 67, 1),
        (2, 64, 1),
        (7, 65, 1),
        (32, 3, 1),
        (71, 130, 1),
        (3, 5, 7),
        (33, 1, 3),
    ],
)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_one_sum(add_up: Launch, count: int, size: int, width: int, dtype: torch.dtype) -> None:
    parts, out = parts_of(count, size, width), torch.full((size,), NAN, dtype=dtype)
    add_up(parts, None, out, None, None)
    assert torch.equal(out, total(parts).to(dtype))


@pytest.mark.parametrize(
    ("first", "second"),
    [((1, 67, 1), (39, 3, 1)), ((67, 130, 1), (1, 1, 1)), ((3, 5, 7), (2, 129, 3))],
)
def test_two_sums_in_one_launch(
    add_up: Launch, first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    parts = [parts_of(*first), -parts_of(*second)]
    outs = [
        torch.full((first[1],), NAN),
        torch.full((second[1],), NAN, dtype=BF16),
    ]
    add_up(parts[0], None, outs[0], parts[1], outs[1])
    for out, part in zip(outs, parts, strict=True):
        assert torch.equal(out, total(part).to(out.dtype))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_parts_that_lie_as_the_output_does(
    add_up: Launch, transposed: bool, with_base: bool
) -> None:
    parts, out = parts_of(5, 19, 23), torch.full((19, 23), NAN, dtype=BF16)
    # Of bf16, and no sum of bf16: a base that is added after the sum was rounded would show.
    base = (parts_of(19, 23) / 32).bfloat16() if with_base else None
    if transposed:
        parts, out = parts.mT.contiguous().mT, out.t().contiguous().t()
        base = None if base is None else base.t().contiguous().t()
    wanted = parts.double().sum(0)
    add_up(parts, base, out, None, None)
    assert torch.equal(out, (wanted if base is None else wanted + base.double()).to(BF16))


def test_the_first_rows_of_longer_parts(add_up: Launch) -> None:
    parts = [parts_of(3, 29, 5), -parts_of(7, 29, 5)]
    whole = [torch.full((29, 5), NAN, dtype=dtype) for dtype in (F32, BF16)]
    add_up(parts[0], None, whole[0][:13], parts[1], whole[1][:13])
    for out, part in zip(whole, parts, strict=True):
        assert torch.equal(out[:13], part.sum(0)[:13].to(out.dtype))
        assert out[13:].isnan().all()


def test_the_order_of_a_sum_is_that_of_its_shares(fused: str) -> None:
    """Lanes of a tile sum some shares each, in order; a sum of one lane shows it bit by bit."""
    values = torch.zeros(96, 3)
    values[0], values[32], values[64] = 2.0**25, 1.0, -(2.0**25)
    out = torch.full((3,), NAN)
    add_up, tiles = launcher(fused, "shares", "add_up"), plans.sums(((1, 1),), 0)
    add_up(values, None, out, None, None, plan=tiles, policy=FP32)
    assert torch.equal(out, torch.zeros(3))  # 1 is lost in 2^25; summed last, it would not be
    values[32], values[64] = -(2.0**25), 1.0
    add_up(values, None, out, None, None, plan=tiles, policy=FP32)
    assert torch.equal(out, torch.ones(3))


# -------------------------------------------------------------------------- what core asks for


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], list[int]]]:
    """How many sums each later launch of a backend's ``add_up`` makes."""

    def watch(fused: str) -> list[int]:
        module, sums = importlib.import_module(f"lycoris.backends.{fused}.shares"), []
        plain = module.add_up

        def add_up(parts: Tensor, base: Any, out: Tensor, parts2: Any, *args: Any, **kw: Any):
            sums.append(1 if parts2 is None else 2)
            plain(parts, base, out, parts2, *args, **kw)

        monkeypatch.setattr(module, "add_up", add_up)
        registry.generation += 1  # a product that is split keeps the launch of its sums
        return sums

    yield watch
    registry.generation += 1


def test_loha_takes_one_launch_for_both_halves(fused: str, launches: Any) -> None:
    sums = launches(fused)
    for rows, frozen, wanted in ((40, (), [2, 2]), (293, (), [2] * 4), (40, (0, 1, 2), [1])):
        leaves = [torch.randn(s) for s in ((rows, 3), (3, 20)) * 2]
        for i, leaf in enumerate(leaves):
            leaf.requires_grad_(i not in frozen)
        sums.clear()
        loha_weight(*leaves, backend=fused).sum().backward()
        assert sums == wanted


def test_loras_token_sums_take_as_many_launches_as_the_products(fused: str, launches: Any) -> None:
    sums = launches(fused)
    x, up, down = (torch.randn(s).requires_grad_() for s in ((2 * CHUNK + 9, 24), (20, 4), (4, 24)))
    lora_apply(x, up, down, backend=fused).sum().backward()
    assert sums == ([2] if fused == "triton" else [1, 1])  # TileLang has no matmul_pair


@pytest.mark.parametrize("sizes", [
    ((4, 65536), (4, 65536)), ((32, 65536), (32, 65536)), ((16, 65536), (64, 65536)),
    ((512, 64), (2, 262144)), ((80, 4096), (4, 4096)), ((2048, 16), (1, 1 << 20)),
    ((528, 4096),), ((20, 1280),), ((264, 16),), ((300, 1),), ((1, 5),), ((7, 1279),),
])  # fmt: skip
@pytest.mark.parametrize("units", [108, 132, 304])
def test_tiles_of_sums_keep_a_gpu_busy(sizes: tuple[tuple[int, int], ...], units: int) -> None:
    tiles = plans.sums(sizes, units)
    threads = 32 * tiles.num_warps
    assert threads <= 512
    assert 16 <= tiles.block_n // threads <= 32  # terms that a thread loads at once
    for (terms, size), rows in zip(sizes, (tiles.block_m, tiles.block_k), strict=False):
        columns = tiles.block_n // rows
        programs = plans.tile_count(size, columns)
        steps = plans.tile_count(terms, rows)
        assert columns >= min(8, size)  # whole sectors, and whole cache lines of many elements
        assert columns >= 32 or 2 * plans.tile_count(size, 2 * columns) < units
        enough = programs * tiles.block_n >= 8192 * units  # 32 KB on the way to each
        assert steps == 1 or enough or tiles.block_n == 16384
        assert rows < 2 * terms
    # IA3's at 8192 x 4096: nine steps before, each of which waited for its loads.
    assert plans.tile_count(528, plans.sums(((528, 4096),), 132).block_m) == 2


# --------------------------------------------------------------- backends without such a kernel


def test_a_backend_without_the_kernel_adds_with_pytorch(
    plug_in: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in("toy")
    toy = sys.modules["_toy"]
    parts, out, base = parts_of(2, 40, 5), torch.full((40, 5), NAN), torch.randn(40, 5)
    Schedule(toy, FP32, CPU).add_up((parts, out))
    assert torch.equal(out, parts.sum(0))
    k = 2 * CHUNK + 37
    a, b = torch.randn(40, k), torch.randn(k, 5)
    Schedule(toy, FP32, CPU).matmul(a, b, out, base=base)  # split
    exact = base.double() + a.double() @ b.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-3)
    # With the family, the kernel is taken.
    family = ModuleType("_toy.shares")  # mypy knows no attributes of it
    family.add_up = lambda parts, base, out, *rest, plan, policy: out.fill_(plan.block_n)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, family.__name__, family)
    Schedule(toy, FP32, CPU).add_up((parts, out))
    assert (out == plans.sums(((1, 1),), 0).block_n).all()


@pytest.mark.parametrize("fault", ["raise RuntimeError('broken')", "import no_such_module_at_all"])
def test_a_broken_family_is_an_error(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "broken_toy"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "shares.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    run = Schedule(importlib.import_module("broken_toy"), FP32, CPU)
    try:
        with pytest.raises(BackendError, match=r"broken_toy: (import failed|no kernels)"):
            run.add_up((parts_of(2, 3), torch.empty(3)))
    finally:
        sys.modules.pop("broken_toy", None)


# ------------------------------------------------------------------------------- planted faults


def last_share_skipped(launch: Launch) -> Launch:
    def add_up(parts: Tensor, base: Any, out: Tensor, parts2: Any, out2: Any, **kw: Any) -> None:
        fewer = (p if p is None else p[: max(1, p.shape[0] - 1)] for p in (parts, parts2))
        first, second = fewer
        launch(first, base, out, second, out2, **kw)

    return add_up


def shares_kept_in_bf16(launch: Launch) -> Launch:
    def add_up(parts: Tensor, *args: Any, **kw: Any) -> None:
        launch(parts.bfloat16().float(), *args, **kw)

    return add_up


def second_sum_forgotten(launch: Launch) -> Launch:
    def add_up(parts: Tensor, base: Any, out: Tensor, *args: Any, **kw: Any) -> None:
        launch(parts, base, out, None, None, **kw)

    return add_up


@pytest.mark.parametrize(
    ("fault", "op", "name", "dtype"),
    [
        (last_share_skipped, "loha_weight", "integers", BF16),
        (last_share_skipped, "lora_weight", "two levels", BF16),
        (shares_kept_in_bf16, "lora_weight", "two levels", F32),
        (second_sum_forgotten, "loha_weight", "plain", BF16),
    ],
)
def test_a_planted_fault_breaks_the_rule(
    fused: str,
    fault: Callable[[Launch], Launch],
    op: str,
    name: str,
    dtype: torch.dtype,
    planted: Callable[..., None],
) -> None:
    planted(fused, "shares", "add_up", fault, op, name, (dtype, dtype))


# ------------------------------------------------------------------------------------ the parts


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
