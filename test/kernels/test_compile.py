"""torch.compile, torch.library: whole graphs with the fused op as a named node, few recompiles."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import lycoris
from lycoris.functional import (
    OPS,
    add_scaled,
    ia3_scale,
    lokr_weight,
    lora_apply,
    lora_weight,
    merge_,
)

torch._dynamo.config.cache_size_limit = 8  # PyTorch's own default, stated: the tests count on it


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def factors(tokens: int = 6, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((2, tokens, 8), (5, 3), (3, 8))
    made = (torch.randn(s, generator=generator).requires_grad_(grad) for s in shapes)
    return tuple(made)  # type: ignore[return-value]


class Recorder:
    """A Dynamo backend that keeps every graph, then runs AOTAutograd's eager backend."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def targets(self) -> list[str]:
        return [str(n.target) for g in self.graphs for n in g.graph.nodes]


def test_one_graph_with_the_op_as_a_node(fused: str) -> None:
    leaves = factors()
    recorder = Recorder()

    def step(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.relu(lora_apply(x * 2, up, down, 0.7, backend=fused))

    out = torch.compile(step, fullgraph=True, backend=recorder)(*leaves)
    assert "lycoris.lora_apply" in recorder.targets()
    want = step(*leaves)
    assert torch.equal(out, want)
    got = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch.autograd.grad(want.square().sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_backward_is_one_graph_too(fused: str) -> None:
    names: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        names.extend(str(n.target) for n in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    leaves = factors()
    base = torch.randn(2, 6, 5, requires_grad=True)
    step = torch.compile(
        lambda x, u, d, b: lora_apply(x, u, d, 0.7, base=b, backend=fused),
        fullgraph=True,
        backend=backend,
    )
    step(*leaves, base).sum().backward()
    assert "lycoris.lora_apply.default" in names
    assert "lycoris.lora_apply_backward.default" in names
    assert base.grad is not None


def test_inductor(fused: str) -> None:
    up, down = factors()[1:]
    step = torch.compile(lambda u, d: lora_weight(u, d, 0.7, backend=fused).sin(), fullgraph=True)
    out = step(up, down)
    want = lora_weight(up, down, 0.7, backend=fused).sin()
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.sum(), (up, down))
    torch.testing.assert_close(got, torch.autograd.grad(want.sum(), (up, down)))


def test_twelve_scales_and_five_token_counts_need_few_graphs() -> None:
    recorder = Recorder()
    step = torch.compile(
        lambda x, u, d, s: lora_apply(x, u, d, s), fullgraph=True, backend=recorder
    )
    for i in range(12):
        leaves = factors()
        got = step(*leaves, 0.1 + i / 7)
        torch.testing.assert_close(got, lora_apply(*leaves, 0.1 + i / 7))
    scales = len(recorder.graphs)
    assert scales <= 2
    for tokens in (6, 7, 33, 77, 128):
        leaves = factors(tokens)
        torch.testing.assert_close(step(*leaves, 0.7), lora_apply(*leaves, 0.7))
    assert len(recorder.graphs) <= scales + 2


def test_the_context_is_traced(fused: str) -> None:
    leaves = factors()
    recorder = Recorder()
    step = torch.compile(lambda *t: lora_apply(*t, 0.7), fullgraph=True, backend=recorder)
    with lycoris.use_backend(fused):
        got = step(*leaves)
    names = [n.args for g in recorder.graphs for n in g.graph.nodes if "lora" in str(n.target)]
    assert fused in names[0]
    assert torch.equal(got, lora_apply(*leaves, 0.7, backend=fused))


def test_autocast_is_traced(fused: str) -> None:
    x, up, down = factors(grad=False)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return lora_apply(x, up, down, 0.7, backend=fused)

    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, step(x))


def test_a_bad_shape_is_named_in_traced_code_too() -> None:
    x, up, down = factors(grad=False)
    step = torch.compile(lambda *t: lora_apply(*t), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"down has shape \(3, 7\); expected \(r, I\)"):
        step(x, up, down[:, :7])
    scaled = torch.compile(lambda s: lora_apply(x, up, down, s), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="scale is NaN"):
        scaled(float("nan"))


@pytest.mark.parametrize("optional", [False, True])
@pytest.mark.parametrize("backend", ["triton", "tilelang", "torch"])
def test_opcheck(backend: str, optional: bool) -> None:
    x, up, down = factors()
    scale = torch.tensor(0.7)
    base = torch.randn(2, 6, 5, requires_grad=True) if optional else None
    torch.library.opcheck(
        OPS["lora_apply"].library.op, (x, up, down, base, scale, None, None, backend)
    )
    mid = torch.randn(3, 2, 2, requires_grad=True) if optional else None
    weight = torch.randn(5, 8, 2, requires_grad=True) if optional else None
    down = torch.randn(2, 8, requires_grad=True) if optional else down
    torch.library.opcheck(
        OPS["lora_weight"].library.op, (up, down, mid, weight, scale, None, None, backend)
    )


def test_a_leading_operand_that_is_absent() -> None:
    pairs = tuple(torch.randn(s) for s in ((3, 2), (2, 2), (5, 3), (3, 7)))

    def run(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return lokr_weight((a, b), (c, d), 0.7)

    got = torch.compile(run, fullgraph=True, backend="aot_eager")(*pairs)
    assert torch.equal(got, run(*pairs))
    with torch.autocast("cpu", torch.bfloat16):  # of the operands' device alone
        assert run(*(t.to("meta") for t in pairs)).dtype is torch.float32
        assert run(*pairs).dtype is torch.bfloat16


def test_layouts_with_symbolic_strides() -> None:
    v = torch.randn(2, 5, 6, 7).to(memory_format=torch.channels_last)
    scale = torch.randn(1, 5, 1, 1)

    def run(v: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        return ia3_scale(v, scale, axis=1), add_scaled(v, v, 0.5), merge_(v.clone(), v, 0.5)

    got = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")(v, scale)
    for found, want in zip(got, (v * (1 + scale), 1.5 * v, 1.5 * v), strict=True):
        torch.testing.assert_close(found, want)
