"""Triton's interpreter, made numerically right and usable beside compiled kernels.

As it comes (3.6, 3.7) it keeps bf16 as raw 16-bit integers, so that sums and products act on the
bits, and drops the low half of an fp32 to get a bf16. Here bf16 is ml_dtypes' type: every
conversion rounds to nearest even, arithmetic is done in fp32 and rounded once, and products of
16-bit matrices accumulate in fp32, as on the GPU. It also decides at import, from
TRITON_INTERPRET, whether it is used at all; here the language functions are replaced only while
a kernel is interpreted, whatever that variable said.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton._C.libtriton import ir
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream
from triton.runtime.interpreter import TensorHandle as Handle
from triton.runtime.jit import JITFunction

BF16 = np.dtype(ml_dtypes.bfloat16)
_BITS = np.dtype(np.uint16)
_LAUNCH_OPTIONS = frozenset(("num_warps", "num_stages", "num_ctas", "maxnreg"))
_MISSING = object()
#: Numpy's BLAS starts threads above 2^18 products, and then waits for them: on a busy machine
#: that took 80 times as long as the product of a tile itself.
_ONE_THREAD = 1 << 17
_dtypes = {"bf16": BF16}
_storage_dtype = upstream._get_np_dtype


def np_dtype(ty: tl.dtype) -> np.dtype:
    """The numpy dtype that holds values of a Triton dtype or block type."""
    scalar = ty.scalar
    if scalar.name not in _dtypes:
        _dtypes[scalar.name] = _storage_dtype(scalar)
    return _dtypes[scalar.name]


def _bits(data: np.ndarray) -> np.ndarray:
    # Triton's own loads and stores know no bf16.
    return np.ascontiguousarray(data).view(_BITS) if data.dtype == BF16 else data


class Builder(upstream.InterpreterBuilder):
    """What a Triton operation does to numpy arrays, where the upstream class is wrong or slow."""

    def __init__(self) -> None:
        super().__init__()
        # The overflow checks on integers report only in debug mode, but cost half of the time.
        self.options = upstream.InterpreterOptions(sanitize_overflow=False)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"Triton's interpreter has no {name.removeprefix('create_')}")

    def get_bf16(self, value: float) -> Handle:
        return Handle(np.array([value], dtype=BF16), tl.bfloat16)

    def create_masked_load(self, ptrs, mask, other, *hints):  # type: ignore[no-untyped-def]
        ty = ptrs.get_element_ty()
        dtype = np_dtype(ty)
        fill = np.zeros(ptrs.data.shape, dtype) if other is None else other.data
        raw = _BITS if dtype == BF16 else dtype
        return Handle(memory.load(ptrs.data, mask.data, _bits(fill), raw).view(dtype), ty)

    def create_masked_store(self, ptrs, value, mask, *hints):  # type: ignore[no-untyped-def]
        return memory.store(ptrs.data, _bits(value.data), mask.data)

    def cast_impl(self, src, dst_type):  # type: ignore[no-untyped-def]
        return Handle(src.data.astype(np_dtype(dst_type), copy=False), dst_type.scalar)

    def create_fp_to_fp(self, src, dst_type, rounding):  # type: ignore[no-untyped-def]
        widths = (src.dtype.scalar.primitive_bitwidth, dst_type.scalar.primitive_bitwidth)
        if rounding == ir.ROUNDING_MODE.RTNE and 8 not in widths:
            return self.cast_impl(src, dst_type)
        return super().create_fp_to_fp(src, dst_type, rounding)

    def create_fma(self, x, y, z):  # type: ignore[no-untyped-def]
        # A product of two fp32 is exact in fp64, and one of two 16-bit values in fp32.
        wide = np.float64 if z.data.itemsize >= 4 else np.float32
        value = x.data.astype(wide) * y.data.astype(wide) + z.data.astype(wide)
        return Handle(value.astype(z.data.dtype), z.dtype.scalar)

    def create_dot(self, a, b, d, *precision):  # type: ignore[no-untyped-def]
        if a.data.itemsize == 1:
            return super().create_dot(a, b, d, *precision)
        wide = np.promote_types(np.float32, d.data.dtype)
        left, right = (side.data.astype(wide, copy=False) for side in (a, b))
        k, n = right.shape[-2:]
        rows = max(1, _ONE_THREAD // (k * n))
        if left.ndim == 2 and len(left) > rows:
            left = left.reshape(-1, rows, k)
        value = np.matmul(left, right).reshape(d.data.shape)
        value += d.data
        return Handle(value.astype(d.data.dtype, copy=False), d.dtype.scalar)


_builder = Builder()
_semantic = TritonSemantic(_builder)


class _WrapAssignments(ast.NodeTransformer):
    """Assigned Python numbers become Triton scalars, as they do in compiled code."""

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        name = ast.Name("__to_tensor", ast.Load())
        node.value = ast.Call(name, [node.value, ast.Constant(False)], [])
        return node


@functools.cache
def _rewritten(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with its assignments wrapped, over the same globals and line numbers."""
    lines, first = inspect.getsourcelines(fn)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    function = _WrapAssignments().visit(tree.body[0])
    function.decorator_list = []
    # A factory's parameter carries to_tensor in, so that fn's module gets no new name.
    factory = ast.parse("def __factory(__to_tensor):\n    pass\n    return __name").body[0]
    assert isinstance(factory, ast.FunctionDef)
    factory.body[0] = function
    factory.body[1] = ast.Return(ast.Name(function.name, ast.Load()))
    module = ast.increment_lineno(ast.Module([factory], []), first - 1)
    scope: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(module), fn.__code__.co_filename, "exec")
    exec(code, fn.__globals__, scope)
    return scope["__factory"](_semantic.to_tensor)


def _call_helper(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a ``triton.jit`` function (ours, or of Triton's library) from an interpreted kernel."""
    kwargs.pop("_semantic", None)
    return _rewritten(self.fn)(*args, **kwargs)


@functools.cache
def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, attribute, value) of all that differs while interpreting; collected once."""
    scope = upstream._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    found = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
    scope.restore()
    return [
        *found,
        # 3.6 reads a scalar in a way that numpy 2.4 refuses.
        (tl.tensor, "__index__", lambda self: int(self.handle.data.item())),
        (JITFunction, "__call__", _call_helper),
        # Makes x.max() of Triton's library a method.
        (JITFunction, "__get__", lambda self, x, owner: self if x is None else partial(self, x)),
        (upstream.InterpretedFunction, "__call__", _call_helper),
    ]


@contextmanager
def _replaced(items: list[tuple[Any, str, Any]]) -> Iterator[None]:
    saved = []
    try:
        for owner, name, value in items:
            saved.append((owner, name, getattr(owner, name, _MISSING)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(saved):
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


class _Arguments:
    """Kernel arguments as Triton values; storages of CUDA tensors are copied here and back."""

    def __init__(self) -> None:
        self.copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def convert(self, arg: Any) -> Any:
        if isinstance(arg, float):
            # A launch passes a float as fp32.
            return tl.tensor(Handle(np.array([arg], np.float32), tl.float32), tl.float32)
        if isinstance(arg, torch.Tensor) and arg.device.type != "cpu":
            storage = arg.untyped_storage()
            if storage.data_ptr() not in self.copies:
                self.copies[storage.data_ptr()] = (storage, storage.cpu())
            host = self.copies[storage.data_ptr()][1]
            view = torch.empty(0, dtype=arg.dtype)
            arg = view.set_(host, arg.storage_offset(), arg.size(), arg.stride())
        return upstream._implicit_cvt(arg)

    def copy_back(self) -> None:
        for storage, host in self.copies.values():
            storage.copy_(host)


def run(jit: JITFunction, grid: tuple[int, ...], args: tuple, options: dict[str, Any]) -> None:
    """Interpret every program of ``grid`` in turn. The caller holds ``LOCK``.

    ``args`` and ``options`` are those of a launch; num_warps and the like mean nothing here.
    """
    constexprs = {k: v for k, v in options.items() if k not in _LAUNCH_OPTIONS}
    bound = inspect.signature(jit.fn).bind(*args, **constexprs)
    bound.apply_defaults()
    arguments = _Arguments()
    is_constexpr = {param.name: param.is_constexpr for param in jit.params}
    body = _rewritten(jit.fn)
    sizes = (*grid, 1, 1)[:3]
    own = [
        (upstream, "_get_np_dtype", np_dtype),
        (upstream, "interpreter_builder", _builder),
        (upstream, "interpreter_semantic", _semantic),
    ]
    with _replaced(own), _replaced(_replacements()), np.errstate(all="ignore"):
        values = {
            name: value if is_constexpr[name] else arguments.convert(value)
            for name, value in bound.arguments.items()
        }
        _builder.set_grid_dim(*sizes)
        for _builder.grid_idx in itertools.product(*map(range, sizes)):
            body(**values)
    arguments.copy_back()
