"""Products that share a launch or are split over K, through the Schedule that plans them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lycoris.kernels.plan import CHUNK
from lycoris.kernels.precision import Policy
from lycoris.kernels.schedule import Schedule
from lycoris.kernels.testing import poisoned

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned():
        yield


def schedule(backend: str, compute: torch.dtype) -> Schedule:
    module = importlib.import_module(f"lycoris.backends.{backend}")
    return Schedule(module, Policy(compute, compute), CPU)


def draw(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize("k", [40, 2 * CHUNK + 37], ids=["short", "split"])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_pair_equals_two_products(fused: str, k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # As the token sums are: a transposed, one output transposed, sizes and output dtypes unlike.
    a, a2, b, b2 = draw(k, 70), draw(k, 37, dtype=dtype), draw(k, 5), draw(k, 5, dtype=dtype)
    outs = [torch.full(s, float("nan"), dtype=d) for s, d in (((70, 5), dtype), ((5, 37), F32))]
    alone = [torch.full_like(t, float("nan")) for t in outs]
    script = None
    for _ in range(2):  # planned, then repeated
        run = schedule(fused, BF16)
        if script is not None:
            run = Schedule(run.backend, run.policy, CPU, script)
        run.matmul_pair((a.t(), b, 0.7, outs[0]), (a2.t(), b2, torch.tensor(1.25), outs[1].t()))
        script = run.script
    run = schedule(fused, BF16)
    run.matmul(a.t(), b, alone[0], scale=0.7)
    run.matmul(a2.t(), b2, alone[1].t(), scale=1.25)
    for got, want in zip(outs, alone, strict=True):
        assert torch.equal(got, want)
    exact = 0.7 * a.double().t() @ b.double()
    torch.testing.assert_close(outs[0].double(), exact, rtol=1e-2, atol=1e-1)


def test_one_of_a_pair(fused: str) -> None:
    a, b, out = draw(40, 33), draw(33, 5), torch.empty(40, 5)
    schedule(fused, BF16).matmul_pair(None, (a, b, 2.0, out))
    torch.testing.assert_close(out.double(), 2 * a.double() @ b.double(), rtol=1e-4, atol=1e-4)
    schedule(fused, BF16).matmul_pair(None, None)


@pytest.mark.parametrize("transposed", [False, True])
def test_split_sums_with_a_base(fused: str, transposed: bool) -> None:
    k = 2 * CHUNK + 37
    a, b = draw(19, k), draw(k, 23)
    base, out = draw(19, 23), torch.full((19, 23), float("nan"))
    if transposed:
        base, out = base.t().contiguous().t(), out.t().contiguous().t()
    schedule(fused, BF16).matmul(a, b, out, base=base, scale=0.3)
    exact = base.double() + 0.3 * a.double() @ b.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-4)
