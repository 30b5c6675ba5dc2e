"""LoKr: rows of x or of an intermediate mixed by w1, token by token; w1 as kernels take it."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan, power_of_2
from lycoris.kernels.precision import Policy

from .common import NAMES, build
from .lokr_common import Half, Scale, factor_of, is_exact, operand, product_of, stored, threads_of
from .lokr_mix_grad import mix_grad as mix_grad  # a family's launchers are looked for in one module


def mixer_params(w: torch.Tensor, w_b: Half, policy: Policy) -> tuple[Any, ...]:
    """What of W (q, p) a kernel depends on: its sizes, rank, tile of the rank, layout and dtype.

    On a CPU every size is symbolic and no layout is transposed; see :func:`operand`.
    """
    rank = 0 if w_b is None else w.shape[1]
    sizes: tuple[Any, ...] = (w.shape[0], w.shape[1] if w_b is None else w_b.shape[1], rank)
    if not w.is_cuda:
        sizes = (None, None, None if rank else 0)
    flipped = w.is_cuda and not w.is_contiguous()
    block = min(64, max(16, power_of_2(rank))) if w.is_cuda else 16
    return sizes, block, flipped, stored(w, policy.compute)


def mixer_tensors(w: torch.Tensor, w_b: Half, compute: torch.dtype) -> tuple[torch.Tensor, ...]:
    """W, or its pair, as kernels take it: two tensors, by rows."""
    pair = (w, w if w_b is None else w_b)
    return tuple(operand(t if t.is_contiguous() or not t.is_cuda else t.t(), compute) for t in pair)


def mixer_types(T: Any, params: tuple[Any, ...], index: str) -> tuple[Any, ...]:
    """Q, P and the rank of W, and the types of its two tensors."""
    sizes, _, flipped, dtype = params
    q, p, rank = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("q", "p", "r"), sizes, strict=True)
    )
    low = sizes[2] != 0
    shapes = ((q, rank), (rank, p)) if low else ((q, p), (q, p))
    types = (T.Tensor(s[::-1] if flipped else s, NAMES[dtype]) for s in shapes)
    return q, p, rank, *types


def mixer_of(
    T: Any, params: tuple[Any, ...], compute: str | None, exact: bool, m: int, n: int
) -> Any:
    """A macro that fills a shared tile with W[row % q, column % p] where row // q == column // p.

    ``rows`` and ``columns`` say how many of them there are; the rest is 0. Row 0 of the tile is
    ``row``, column 0 is ``column``.
    """
    sizes, block, flipped, _ = params
    low = sizes[2] != 0
    product = product_of(T, exact)

    @T.macro
    def mixer(
        w: Any, w_b: Any, tile: Any, q: Any, p: Any, rank: Any,
        row: Any, rows: Any, column: Any, columns: Any,
    ) -> None:  # fmt: skip
        if low:
            left = T.alloc_shared((m, block), compute)
            right = T.alloc_shared((block, n), compute)
            part = T.alloc_fragment((m, n), "float32")
            total = T.alloc_fragment((m, n), "float32")
            T.clear(total)
            for step in T.serial(T.ceildiv(rank, block)):
                for i, k in T.Parallel(m, block):
                    left[i, k] = T.if_then_else(
                        step * block + k < rank,
                        T.cast(
                            w[step * block + k, (row + i) % q]
                            if flipped
                            else w[(row + i) % q, step * block + k],
                            compute,
                        ),
                        T.cast(0, compute),
                    )
                for k, j in T.Parallel(block, n):
                    right[k, j] = T.if_then_else(
                        step * block + k < rank,
                        T.cast(
                            w_b[(column + j) % p, step * block + k]
                            if flipped
                            else w_b[step * block + k, (column + j) % p],
                            compute,
                        ),
                        T.cast(0, compute),
                    )
                T.clear(part)
                product(part, left, right, m, n, block, False, False)
                for i, j in T.Parallel(m, n):
                    total[i, j] += part[i, j]
            for i, j in T.Parallel(m, n):
                tile[i, j] = T.if_then_else(
                    T.And(
                        T.And(row + i < rows, column + j < columns),
                        (row + i) // q == (column + j) // p,
                    ),
                    T.cast(total[i, j], compute),
                    T.cast(0, compute),
                )
        else:
            for i, j in T.Parallel(m, n):
                tile[i, j] = T.if_then_else(
                    T.And(
                        T.And(row + i < rows, column + j < columns),
                        (row + i) // q == (column + j) // p,
                    ),
                    T.cast(
                        w[(column + j) % p, (row + i) % q]
                        if flipped
                        else w[(row + i) % q, (column + j) % p],
                        compute,
                    ),
                    T.cast(0, compute),
                )

    return mixer


@prepared
def mix(
    value: torch.Tensor,
    w: torch.Tensor,
    w_b: Half,
    base: torch.Tensor | None,
    scale: Scale,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (T * q, n) = [base +] scale * W (q, p) @ value (T * p, n), token by token.

    W is ``w`` where ``w_b`` is None, else ``w @ w_b``, rounded to ``policy.compute``; both may be
    transposed. ``value``, ``base`` and ``out`` are contiguous. M and N of ``plan`` are rows and
    columns of ``out``, K rows of ``value``; where whole tokens fit, at most ``splits`` programs
    take the tiles in turn.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu, compute = not out.is_cuda, policy.compute
    dtypes = (
        stored(value, compute),
        None if base is None else stored(base, torch.float32),
        out.dtype,
        compute,
    )
    q, p = w.shape[0], w.shape[1] if w_b is None else w_b.shape[1]
    fits = q <= plan.block_m and p <= plan.block_k
    kernel = build(
        mix_tokens_kernel if fits else mix_kernel,
        (
            mixer_params(w, w_b, policy),
            None if on_cpu else out.shape[1],
            (plan.block_m, plan.block_n, plan.block_k),
            plan.splits,
            dtypes,
            isinstance(scale, torch.Tensor),
            is_exact(policy, on_cpu),
            threads_of(plan, on_cpu, (plan.block_m, plan.block_n), (plan.block_m, plan.block_k)),
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )

    def launch(
        value: torch.Tensor,
        w: torch.Tensor,
        w_b: Half,
        base: torch.Tensor | None,
        scale: Scale,
        out: torch.Tensor,
    ) -> None:
        added = out if base is None else operand(base, torch.float32)
        pair = mixer_tensors(w, w_b, compute)
        kernel(operand(value, compute), *pair, added, factor_of(scale), out)

    return launch


def mix_kernel(
    params: tuple[Any, ...],
    n: int | None,
    blocks: tuple[int, int, int],
    programs: int,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype, torch.dtype],
    scale_by_tensor: bool,
    exact: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`mix`; the numbers of rows stay symbolic.

    Tokens stand on the diagonal: a tile of W holds W[q, p] where row and column are of one token.
    """
    import tilelang.language as T  # takes seconds: not before a kernel is built

    N = T.dynamic("n", index) if n is None else n
    ROWS, INNER = T.dynamic("rows", index), T.dynamic("inner", index)
    Q, P, R, w_type, w_b_type = mixer_types(T, params, index)
    block_m, block_n, block_k = blocks
    value_dtype, base_dtype, out_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    mixer = mixer_of(T, params, compute, exact, block_m, block_k)
    product = product_of(T, exact)
    value_type = T.Tensor((INNER, N), value_dtype)
    base_type = T.Tensor((ROWS, N), base_dtype or out_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((ROWS, N), out_dtype)

    @T.macro
    def body(value: Any, w: Any, w_b: Any, base: Any, scale: Any, out: Any) -> None:
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(ROWS, block_m), threads=threads) as (bx, by):
            tile = T.alloc_shared((block_m, block_k), compute)
            inner = T.alloc_shared((block_k, block_n), compute)
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32")
            staged = T.alloc_shared((block_m, block_n), "float32")
            token = by * block_m // Q
            row = by * block_m - token * Q
            rows = T.min(row + block_m, ROWS - token * Q)
            columns = ((rows - 1) // Q + 1) * P
            T.clear(total)
            for step in T.serial(T.ceildiv(columns, block_k)):
                T.copy(value[token * P + step * block_k, bx * block_n], inner)
                mixer(w, w_b, tile, Q, P, R, row, rows, step * block_k, columns)
                T.clear(part)
                product(part, tile, inner, block_m, block_n, block_k, False, False)
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            T.copy(total, staged)
            for i, j in T.Parallel(block_m, block_n):
                at = by * block_m + i
                column = bx * block_n + j
                if at < ROWS and column < N:
                    result = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                    if base_dtype is not None:
                        result += T.cast(base[at, column], "float32")
                    out[at, column] = result

    @T.prim_func
    def mix(
        value: value_type,  # type: ignore[valid-type]
        w: w_type,  # type: ignore[valid-type]
        w_b: w_b_type,  # type: ignore[valid-type]
        base: base_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        out: out_type,  # type: ignore[valid-type]
    ) -> None:
        body(value, w, w_b, base, scale, out)

    return mix


def mix_tokens_kernel(
    params: tuple[Any, ...],
    n: int | None,
    blocks: tuple[int, int, int],
    programs: int,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype, torch.dtype],
    scale_by_tensor: bool,
    exact: bool,
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`mix` where whole tokens fit: W is the same for all tiles."""
    import tilelang.language as T

    N = T.dynamic("n", index) if n is None else n
    ROWS, INNER = T.dynamic("rows", index), T.dynamic("inner", index)
    Q, P, R, w_type, w_b_type = mixer_types(T, params, index)
    block_m, block_n, block_k = blocks
    value_dtype, base_dtype, out_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    mixer = mixer_of(T, params, compute, exact, block_m, block_k)
    product = product_of(T, exact)
    group = T.min(T.floordiv(block_m, Q), T.floordiv(block_k, P))  # tokens of a tile
    across = T.ceildiv(N, block_n)
    tiles = T.ceildiv(ROWS, group * Q) * across
    grid = T.min(tiles, programs)
    value_type = T.Tensor((INNER, N), value_dtype)
    base_type = T.Tensor((ROWS, N), base_dtype or out_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((ROWS, N), out_dtype)

    @T.macro
    def body(value: Any, w: Any, w_b: Any, base: Any, scale: Any, out: Any) -> None:
        with T.Kernel(grid, threads=threads) as bx:
            mixing = T.alloc_shared((block_m, block_k), compute)
            inner = T.alloc_shared((block_k, block_n), compute)
            mixed = T.alloc_fragment((block_m, block_n), "float32")
            staged = T.alloc_shared((block_m, block_n), "float32")
            mixer(w, w_b, mixing, Q, P, R, 0, group * Q, 0, group * P)
            for step in T.serial(T.ceildiv(tiles - bx, grid)):
                token = (bx + step * grid) // across * group
                first = (bx + step * grid) % across * block_n
                # Not the next tile's tokens: 0 times an infinity of theirs would be no 0.
                for k, j in T.Parallel(block_k, block_n):
                    inner[k, j] = T.if_then_else(
                        T.And(k < group * P, T.And(token * P + k < INNER, first + j < N)),
                        T.cast(value[token * P + k, first + j], compute),
                        T.cast(0, compute),
                    )
                T.clear(mixed)
                product(mixed, mixing, inner, block_m, block_n, block_k, False, False)
                T.copy(mixed, staged)
                for i, j in T.Parallel(block_m, block_n):
                    row = token * Q + i
                    column = first + j
                    if i < group * Q and row < ROWS and column < N:
                        result = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                        if base_dtype is not None:
                            result += T.cast(base[row, column], "float32")
                        out[row, column] = result

    @T.prim_func
    def mix(
        value: value_type,  # type: ignore[valid-type]
        w: w_type,  # type: ignore[valid-type]
        w_b: w_b_type,  # type: ignore[valid-type]
        base: base_type,  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        out: out_type,  # type: ignore[valid-type]
    ) -> None:
        body(value, w, w_b, base, scale, out)

    return mix
