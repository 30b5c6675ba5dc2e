"""LoKr of two small halves applied to x: both products, and all their gradients, in one pass."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .lokr_common import Half, Scale, factor_of, operand, product_of, stored, threads_of
from .lokr_mix import mixer_of, mixer_params, mixer_tensors, mixer_types


@prepared
def fused(
    x: torch.Tensor,
    w1: torch.Tensor,
    w1_b: Half,
    w2: torch.Tensor,
    base: torch.Tensor | None,
    scale: Scale,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (T * a, c) = [base +] scale * W1 (a, b) @ rnd(x (T * b, d) @ w2 (c, d)^T), by token.

    W1 is ``w1`` where ``w1_b`` is None, else ``w1 @ w1_b``, rounded to ``policy.compute``. N and K
    of ``plan`` hold all of c and d, M as many tokens' rows as fit; at most ``splits`` programs take
    the tiles in turn. Compute is 16-bit; tensors are contiguous.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu, compute = not out.is_cuda, policy.compute
    kernel = build(
        fused_kernel,
        (
            mixer_params(w1, w1_b, policy),
            (None, None) if on_cpu else tuple(w2.shape),
            _blocks(plan, on_cpu),
            plan.splits,
            (
                *(stored(t, compute) for t in (x, w2)),
                None if base is None else stored(base, torch.float32),
                out.dtype,
                compute,
            ),
            isinstance(scale, torch.Tensor),
            threads_of(plan, on_cpu, (plan.block_m, plan.block_n)),
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )

    def launch(
        x: torch.Tensor,
        w1: torch.Tensor,
        w1_b: Half,
        w2: torch.Tensor,
        base: torch.Tensor | None,
        scale: Scale,
        out: torch.Tensor,
    ) -> None:
        halves = (*mixer_tensors(w1, w1_b, compute), operand(w2, compute))
        added = out if base is None else operand(base, torch.float32)
        kernel(operand(x, compute), *halves, added, factor_of(scale), out)

    return launch


def _blocks(plan: Plan, on_cpu: bool) -> tuple[int, int, int]:
    """Tiles; on a CPU the largest, so that a build serves every shape."""
    return (plan.block_m, *((plan.block_m,) * 2 if on_cpu else (plan.block_n, plan.block_k)))


def fused_kernel(
    params: tuple[Any, ...],
    sizes: tuple[int | None, int | None],
    blocks: tuple[int, int, int],
    programs: int,
    dtypes: tuple[torch.dtype | None, ...],
    scale_by_tensor: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`fused`; the number of tokens stays symbolic."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    C, D = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("c", "d"), sizes, strict=True)
    )
    ROWS, INNER = T.dynamic("rows", index), T.dynamic("inner", index)
    A, B, R, w_type, w_b_type = mixer_types(T, params, index)
    block_m, block_n, block_k = blocks
    x_dtype, w2_dtype, base_dtype, out_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    mixer = mixer_of(T, params, compute, False, block_m, block_m)
    product = product_of(T, False)
    group = T.floordiv(block_m, T.max(A, B))  # tokens of a tile
    tiles = T.ceildiv(ROWS, group * A)
    grid = T.min(tiles, programs)
    x_type = T.Tensor((INNER, D), x_dtype)
    w2_type = T.Tensor((C, D), w2_dtype)
    base_type = T.Tensor((ROWS, C), base_dtype or out_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((ROWS, C), out_dtype)

    @T.macro
    def body(x: Any, w1: Any, w1_b: Any, w2: Any, base: Any, scale: Any, out: Any) -> None:
        with T.Kernel(grid, threads=threads) as bx:
            mixing = T.alloc_shared((block_m, block_m), compute)
            w2_s = T.alloc_shared((block_n, block_k), compute)
            x_s = T.alloc_shared((block_m, block_k), compute)
            hidden_s = T.alloc_shared((block_m, block_n), compute)
            staged = T.alloc_shared((block_m, block_n), "float32")
            hidden = T.alloc_fragment((block_m, block_n), "float32")
            mixed = T.alloc_fragment((block_m, block_n), "float32")
            mixer(w1, w1_b, mixing, A, B, R, 0, group * A, 0, group * B)
            T.copy(w2[0, 0], w2_s)
            for step in T.serial(T.ceildiv(tiles - bx, grid)):
                token = (bx + step * grid) * group
                T.copy(x[token * B, 0], x_s)
                T.clear(hidden)
                product(hidden, x_s, w2_s, block_m, block_n, block_k, False, True)
                T.copy(hidden, hidden_s)
                T.clear(mixed)
                product(mixed, mixing, hidden_s, block_m, block_n, block_m, False, False)
                T.copy(mixed, staged)
                for i, j in T.Parallel(block_m, block_n):
                    row = token * A + i
                    if i < group * A and row < ROWS and j < C:
                        result = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                        if base_dtype is not None:
                            result += T.cast(base[row, j], "float32")
                        out[row, j] = result

    @T.prim_func
    def fused(
        x: x_type,  # type: ignore[valid-type]
        w1: w_type,  # type: ignore[valid-type]
        w1_b: w_b_type,  # type: ignore[valid-type]
        w2: w2_type,  # type: ignore[valid-type]
        base: base_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        out: out_type,  # type: ignore[valid-type]
    ) -> None:
        body(x, w1, w1_b, w2, base, scale, out)

    return fused


@prepared
def fused_grad(
    grad: torch.Tensor,
    x: torch.Tensor,
    mixer: torch.Tensor,
    mixer_b: Half,
    w2: torch.Tensor,
    scale: Scale,
    gx: torch.Tensor | None,
    w1_parts: torch.Tensor | None,
    w2_parts: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """The gradient of x, and fp32 partial sums of those of W1 and w2; see :func:`fused`.

    ``gx`` (T * b, d); ``w1_parts`` (programs * tokens of a tile, a, b); ``w2_parts``
    (programs, c, d); None where no gradient is wanted. ``mixer`` (b, a), or the pair of that
    product, is W1 transposed. x and ``grad`` (T * a, c) are read once.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu, compute = not grad.is_cuda, policy.compute
    kernel = build(
        fused_grad_kernel,
        (
            mixer_params(mixer, mixer_b, policy),
            (None, None) if on_cpu else tuple(w2.shape),
            _blocks(plan, on_cpu),
            plan.splits,
            (
                *(stored(t, compute) for t in (grad, x, w2)),
                None if gx is None else gx.dtype,
                compute,
            ),
            (w1_parts is not None, w2_parts is not None),
            isinstance(scale, torch.Tensor),
            threads_of(plan, on_cpu, (plan.block_n, plan.block_k)),
            "int64" if on_cpu else "int32",
        ),
        grad.device,
    )

    def launch(
        grad: torch.Tensor,
        x: torch.Tensor,
        mixer: torch.Tensor,
        mixer_b: Half,
        w2: torch.Tensor,
        scale: Scale,
        gx: torch.Tensor | None,
        w1_parts: torch.Tensor | None,
        w2_parts: torch.Tensor | None,
    ) -> None:
        read = (
            operand(grad, compute),
            operand(x, compute),
            *mixer_tensors(mixer, mixer_b, compute),
        )
        wanted = (gx, w1_parts, w2_parts)
        some = next(t for t in wanted if t is not None)
        made = (some if t is None else t for t in wanted)
        kernel(*read, operand(w2, compute), factor_of(scale), *made)

    return launch


def fused_grad_kernel(
    params: tuple[Any, ...],
    sizes: tuple[int | None, int | None],
    blocks: tuple[int, int, int],
    programs: int,
    dtypes: tuple[torch.dtype | None, ...],
    wanted: tuple[bool, bool],
    scale_by_tensor: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`fused_grad`; the number of tokens stays symbolic."""
    import tilelang.language as T

    C, D = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("c", "d"), sizes, strict=True)
    )
    ROWS, INNER = T.dynamic("rows", index), T.dynamic("inner", index)
    PARTS, OWN = T.dynamic("parts", index), T.dynamic("own", index)
    B, A, R, w_type, w_b_type = mixer_types(T, params, index)
    block_m, block_n, block_k = blocks
    grad_dtype, x_dtype, w2_dtype, gx_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    want_1, want_2 = wanted
    mixer_tile = mixer_of(T, params, compute, False, block_m, block_m)
    product = product_of(T, False)
    group = T.floordiv(block_m, T.max(A, B))
    tiles = T.ceildiv(ROWS, group * A)
    grid = T.min(tiles, programs)
    grad_type = T.Tensor((ROWS, C), grad_dtype)
    x_type = T.Tensor((INNER, D), x_dtype)
    w2_type = T.Tensor((C, D), w2_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    specs = [
        ((INNER, D), gx_dtype) if gx_dtype is not None else None,
        ((OWN, A, B), "float32") if want_1 else None,
        ((PARTS, C, D), "float32") if want_2 else None,
    ]
    some = next(spec for spec in specs if spec is not None)
    # A type of its own for each: parameters of one type object would become one buffer.
    gx_type, parts_1, parts_2 = (T.Tensor(*(spec or some)) for spec in specs)

    @T.macro
    def body(
        grad: Any,
        x: Any,
        w: Any,
        w_b: Any,
        w2: Any,
        scale: Any,
        gx: Any,
        w1_parts: Any,
        w2_parts: Any,
    ) -> None:
        with T.Kernel(grid, threads=threads) as bx:
            mixing = T.alloc_shared((block_m, block_m), compute)
            w2_s = T.alloc_shared((block_n, block_k), compute)
            g_s = T.alloc_shared((block_m, block_n), compute)
            x_s = T.alloc_shared((block_m, block_k), compute)
            hidden_s = T.alloc_shared((block_m, block_n), compute)
            hidden = T.alloc_fragment((block_m, block_n), "float32")
            part_1 = T.alloc_fragment((block_m, block_m), "float32")
            total_1 = T.alloc_fragment((block_m, block_m), "float32")
            part_2 = T.alloc_fragment((block_n, block_k), "float32")
            total_2 = T.alloc_fragment((block_n, block_k), "float32")
            back = T.alloc_fragment((block_m, block_k), "float32")
            staged = T.alloc_shared((block_m, block_k), "float32")
            mixer_tile(w, w_b, mixing, B, A, R, 0, group * B, 0, group * A)
            T.copy(w2[0, 0], w2_s)
            T.clear(total_1)
            T.clear(total_2)
            for step in T.serial(T.ceildiv(tiles - bx, grid)):
                token = (bx + step * grid) * group
                T.copy(grad[token * A, 0], g_s)
                T.copy(x[token * B, 0], x_s)
                if want_1:
                    T.clear(hidden)
                    product(hidden, x_s, w2_s, block_m, block_n, block_k, False, True)
                    T.copy(hidden, hidden_s)
                    T.clear(part_1)
                    product(part_1, g_s, hidden_s, block_m, block_m, block_n, False, True)
                    for i, j in T.Parallel(block_m, block_m):
                        total_1[i, j] += part_1[i, j]
                if want_2 or gx_dtype is not None:
                    T.clear(hidden)
                    product(hidden, mixing, g_s, block_m, block_n, block_m, False, False)
                    for i, j in T.Parallel(block_m, block_n):
                        hidden[i, j] *= scale[0] if scale_by_tensor else scale
                    T.copy(hidden, hidden_s)
                    if gx_dtype is not None:
                        T.clear(back)
                        product(back, hidden_s, w2_s, block_m, block_k, block_n, False, False)
                        T.copy(back, staged)
                        for i, j in T.Parallel(block_m, block_k):
                            if i < group * B and token * B + i < INNER and j < D:
                                gx[token * B + i, j] = staged[i, j]
                    if want_2:
                        T.clear(part_2)
                        product(part_2, hidden_s, x_s, block_n, block_k, block_m, True, False)
                        for i, j in T.Parallel(block_n, block_k):
                            total_2[i, j] += part_2[i, j]
            if want_1:
                for i, j in T.Parallel(block_m, block_m):
                    # (token of the tile, a, b): the blocks of one token lie on the diagonal.
                    if i < group * A and j < group * B and i // A == j // B:
                        w1_parts[bx * group + i // A, i % A, j % B] = total_1[i, j] * (
                            scale[0] if scale_by_tensor else scale
                        )
            if want_2:
                for i, j in T.Parallel(block_n, block_k):
                    if i < C and j < D:
                        w2_parts[bx, i, j] = total_2[i, j]

    @T.prim_func
    def fused_grad(
        grad: grad_type,  # type: ignore[valid-type]
        x: x_type,  # type: ignore[valid-type]
        w: w_type,  # type: ignore[valid-type]
        w_b: w_b_type,  # type: ignore[valid-type]
        w2: w2_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        gx: gx_type,  # type: ignore[valid-type]
        w1_parts: parts_1,  # type: ignore[valid-type]
        w2_parts: parts_2,  # type: ignore[valid-type]
    ) -> None:
        body(grad, x, w, w_b, w2, scale, gx, w1_parts, w2_parts)

    return fused_grad
