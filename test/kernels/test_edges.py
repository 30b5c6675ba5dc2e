"""Tensors and surroundings that are out of the ordinary; each was once a fault."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from lycoris.functional import OPS, lora_apply, lora_weight

X, UP, DOWN = torch.randn(2, 6, 12), torch.randn(9, 3), torch.randn(3, 12)


def plain(x: Tensor, up: Tensor, down: Tensor, scale: float = 0.7) -> Tensor:
    return scale * (x @ down.T @ up.T)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_lazy_negation(fused: str) -> None:
    close(lora_apply(torch._neg_view(X), UP, DOWN, 0.7, backend=fused), -plain(X, UP, DOWN))
    scale = torch._neg_view(torch.tensor(0.7))
    close(lora_apply(X, UP, DOWN, scale, backend=fused), -plain(X, UP, DOWN))


def test_tensors_without_memory(fused: str) -> None:
    zero = torch._efficientzerotensor(2, 6, 12)
    assert not lora_apply(zero, UP, DOWN, backend=fused).any()
    up = UP.clone().requires_grad_()
    out = lora_apply(X, up, DOWN, backend=fused)
    (grad,) = torch.autograd.grad(out, up, torch._efficientzerotensor(2, 6, 9))
    assert not grad.any()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (X, UP, DOWN)]
    assert lora_apply(*fakes, backend=fused).shape == (2, 6, 9)


def test_a_scale_changed_before_backward_is_an_error(fused: str) -> None:
    up, scale = UP.clone().requires_grad_(), torch.tensor(2.0)
    out = lora_apply(X, up, DOWN, scale, backend=fused)
    scale.mul_(10)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["triton", "tilelang", "torch", None])
def test_a_dispatch_mode_changes_nothing(backend: str | None) -> None:
    leaves = [t.clone().requires_grad_() for t in (X, UP, DOWN)]
    with FlopCounterMode(display=False):
        out = lora_apply(*leaves, 0.7, backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), leaves[1])
        lora_weight(leaves[1], leaves[2], backend=backend).sum().backward()
    out = plain(*leaves)
    (a,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    (b,) = torch.autograd.grad(a.square().sum(), leaves[1])
    close(first, a)
    torch.testing.assert_close(second, b, rtol=1e-3, atol=1e-2)


def test_tucker_backward_under_a_dispatch_mode(fused: str) -> None:
    leaves = [torch.randn(s, requires_grad=True) for s in ((5, 2), (3, 4), (2, 3, 2))]

    def run() -> tuple[Tensor, ...]:
        out = lora_weight(leaves[0], leaves[1], 0.7, mid=leaves[2], backend=fused)
        return torch.autograd.grad(out.square().sum(), leaves)

    with FlopCounterMode(display=False):
        inside = run()
    for a, b in zip(inside, run(), strict=True):
        close(a, b)


def test_forward_mode(fused: str) -> None:
    tangent = torch.randn_like(X)
    with forward_ad.dual_level():
        out = lora_apply(forward_ad.make_dual(X, tangent), UP, DOWN, 0.7, backend=fused)
        got = forward_ad.unpack_dual(out).tangent
    close(got, plain(tangent, UP, DOWN))


def test_batched_gradients(fused: str) -> None:
    x = X.clone().requires_grad_()
    out = lora_apply(x, UP, DOWN, 0.7, backend=fused)
    grads = torch.randn(4, *out.shape)
    (got,) = torch.autograd.grad(out, x, grads, is_grads_batched=True)
    close(got, 0.7 * grads @ UP @ DOWN)


def test_jit_trace(fused: str) -> None:
    traced = torch.jit.trace(lambda x: lora_apply(x, UP, DOWN, 0.7, backend=fused), X)
    close(traced(X + 1), plain(X + 1, UP, DOWN))


def test_the_output_may_be_changed_in_place(fused: str) -> None:
    up = UP.clone().requires_grad_()
    out = lora_apply(X, up, DOWN, 0.7, backend=fused)
    out.mul_(2).sum().backward()
    want = UP.clone().requires_grad_()
    plain(X, want, DOWN).mul(2).sum().backward()
    assert up.grad is not None
    assert want.grad is not None
    close(up.grad, want.grad)


def test_the_output_is_contiguous_whatever_the_base() -> None:
    base = torch.randn(12, 9).t()
    assert lora_weight(UP, DOWN, base=base).is_contiguous()
    run = torch.compile(lambda b: lora_weight(UP, DOWN, 0.5, base=b) * 2, backend="aot_eager")
    close(run(base), 2 * (base + 0.5 * UP @ DOWN))


def test_func_grad_under_a_dispatch_mode(fused: str) -> None:
    with FlopCounterMode(display=False):
        got = torch.func.grad(lambda u: lora_apply(X, u, DOWN, 0.7, backend=fused).sum())(UP)
    close(got, torch.func.grad(lambda u: plain(X, u, DOWN).sum())(UP))


def test_a_scale_beyond_floats() -> None:
    with pytest.raises(ValueError, match="scale is beyond a float's range"):
        lora_apply(X, UP, DOWN, 10**400)
    close(lora_apply(X, UP, DOWN, 2), plain(X, UP, DOWN, 2))


def test_a_nested_tensor_is_named() -> None:
    rows = [torch.randn(2, 12), torch.randn(3, 12)]
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(rows, layout=layout)
        with pytest.raises(TypeError, match="x is nested; expected a dense tensor"):
            lora_apply(nested, UP, DOWN)


FIRST_USE = """
import sys, threading, torch
from lycoris.functional import lora_apply
barrier, wrong = threading.Barrier(6), []
x, up, down = torch.randn(5, 8), torch.randn(6, 2), torch.randn(2, 8)
def go():
    barrier.wait()
    try:
        lora_apply(x, up, down, backend=sys.argv[1])
    except Exception as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=go) for _ in range(6)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not wrong, wrong
"""


def test_first_use_by_six_threads(fused: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE, fused], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_a_backend_loads() -> None:
    from lycoris.kernels import registry

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with registry._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        free = registry._lock.acquire(timeout=5)
        os._exit(0 if free else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_copy_of_an_op_is_itself() -> None:
    op = OPS["lora_apply"]
    assert copy.deepcopy({"op": op})["op"] is op
    assert pickle.loads(pickle.dumps(op)) is op
