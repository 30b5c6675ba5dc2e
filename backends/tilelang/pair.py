"""Two low-rank products that meet in one store, and the diagonal between T-LoRA's factors."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan, tile_count
from lycoris.kernels.precision import Policy

from .common import NAMES, STAGES_OF_DYNAMIC_K, aligned, build, compact, is_transposed
from .rotation_layout import div


@prepared
def product(
    a: torch.Tensor,
    b: torch.Tensor,
    a0: torch.Tensor,
    b0: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    subtract: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = scale * (a @ b + a0 @ b0), or of the difference where ``subtract``; rounded once.

    ``a`` (M, K), ``b`` (K, N), ``a0`` (M, L), ``b0`` (L, N), each fp16, bf16 or fp32, cast to
    ``policy.compute``; a, a0 and ``out`` are dense, b and b0 dense or both transposed. Both sums
    are fp32 and made in one order, in two levels where they are long, so that equal products give
    exactly 0. ``scale``: a float, or a 0-d fp32 tensor on the device.

    Raises:
        ValueError: a tensor isn't laid out so.
        KernelBuildError: the kernel can't be built.
    """
    (m, n), k, k0 = out.shape, a.shape[1], a0.shape[1]
    b_t = is_transposed(b, "b")
    if is_transposed(a, "a") or is_transposed(a0, "a0") or is_transposed(out, "out"):
        raise ValueError("a, a0 or out is transposed")
    if is_transposed(b0, "b0") != b_t:
        raise ValueError("b0 isn't laid out like b")
    on_cpu = not out.is_cuda
    by_tensor = isinstance(scale, torch.Tensor)
    warps = 1 if on_cpu else min(plan.num_warps, plan.block_m * plan.block_n // 128)
    kernel = build(
        product_kernel,
        (
            *((None,) * 4 if on_cpu else (None if plan.dynamic == "m" else m, n, k, k0)),
            (plan.block_m, plan.block_n, plan.block_k),
            (a.dtype, b.dtype, a0.dtype, b0.dtype, out.dtype, policy.compute),
            b_t,
            by_tensor,
            policy.tf32 and not on_cpu,
            32 * warps,
            1 if on_cpu else plan.num_stages,
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )
    sign = -1.0 if subtract else 1.0

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        a0: torch.Tensor,
        b0: torch.Tensor,
        scale: float | torch.Tensor,
        out: torch.Tensor,
        subtract: bool,
    ) -> None:
        operands = (a, b.t(), a0, b0.t()) if b_t else (a, b, a0, b0)
        number = scale.view(1) if isinstance(scale, torch.Tensor) else scale
        kernel(*map(aligned, operands), number, sign, compact(out))

    return launch


@prepared
def diagonal(
    a: torch.Tensor,
    lam: torch.Tensor,
    mask: torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = a * lam * mask, in fp32, rounded once.

    ``a`` and ``out`` (M, r), ``lam`` (r,), ``mask`` (samples, r), whose row i is that of the i-th
    M / samples rows of ``a``; all dense.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    kernel: Any = build(
        diagonal_kernel,
        (
            out.shape[1] if out.is_cuda else None,
            tuple(t.dtype for t in (a, lam, mask, out)),
            (plan.block_m, plan.block_n),
            32 * plan.num_warps if out.is_cuda else 32,
            "int32" if out.is_cuda else "int64",
        ),
        out.device,
    )
    rows = out.shape[0] // mask.shape[0]
    return lambda *operands: kernel(*map(compact, operands), rows)


@prepared
def diagonal_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    partials: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """partials[s] = the sum over a share of the rows of a * b * mask, in fp32.

    ``a`` and ``b`` (M, r), ``mask`` as in :func:`diagonal`, ``partials`` (splits, r)
    fp32; all dense. Shares are contiguous and multiples of ``plan.block_m``.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    kernel: Any = build(
        diagonal_gradient_kernel,
        (
            a.shape[1] if a.is_cuda else None,
            (a.dtype, b.dtype, mask.dtype),
            (plan.block_m, plan.block_n),
            32 * plan.num_warps if a.is_cuda else 32,
            "int32" if a.is_cuda else "int64",
        ),
        a.device,
    )
    rows = a.shape[0] // mask.shape[0]
    steps = tile_count(a.shape[0], partials.shape[0] * plan.block_m)
    return lambda *operands: kernel(*map(compact, operands), rows, steps)


# ---------------------------------------------------------------------------- the kernels


def product_kernel(
    m: int | None,
    n: int | None,
    k: int | None,
    k0: int | None,
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, ...],
    b_t: bool,
    scale_by_tensor: bool,
    tf32: bool,
    threads: int,
    stages: int,
    index: str,
) -> Any:
    """The prim_func of :func:`product`; a size of None stays symbolic, of type ``index``.

    The arithmetic of each half is that of ``lora.matmul``: matrix instructions in chains of at
    most ``CHUNK``, fused multiply-adds for fp32 without tf32.
    """
    import tilelang.language as T  # takes seconds: not before a kernel is built

    M, N, K, K0 = (
        T.dynamic(name, index) if size is None else size
        for name, size in zip(("m", "n", "k", "l"), (m, n, k, k0), strict=True)
    )
    block_m, block_n, block_k = blocks
    a_dtype, b_dtype, a0_dtype, b0_dtype, out_dtype, compute = (NAMES[d] for d in dtypes)
    fused = compute == "float32" and not tf32
    longest = None if k is None or k0 is None else max(k, k0)
    two_level = longest is None or longest > (CHUNK // 4 if fused else CHUNK)
    pad = 4 if fused else 0
    b_tile = (block_n, block_k + pad) if b_t else (block_k, block_n)
    # Both halves go through their sums together: what one has more of is zero in the other.
    steps = T.ceildiv(T.max(K, K0) if longest is None else longest, block_k)
    depth = STAGES_OF_DYNAMIC_K if longest is None else max(1, min(stages, int(steps)))
    columns = min(block_n // 4, 16, threads)  # threads along N
    rows = threads // columns

    def thread_of(i: Any, j: Any) -> Any:
        # As in lora.matmul: lanes take neighbours of a transposed tile, else 4 contiguous each.
        return i % rows * columns + (j if b_t else j // 4) % columns

    def index_of(i: Any, j: Any) -> Any:
        j_of_thread = j // columns if b_t else j // (4 * columns) * 4 + j % 4
        return i // rows * (block_n // columns) + j_of_thread

    @T.macro
    def load(a: Any, b: Any, by: Any, bx: Any, at: Any, a_s: Any, b_s: Any) -> None:
        T.copy(a[by * block_m, at], a_s[0:block_m, 0:block_k])
        if b_t:
            T.copy(b[bx * block_n, at], b_s[0:block_n, 0:block_k])
        else:
            T.copy(b[at, bx * block_n], b_s)

    @T.macro
    def multiply(a_s: Any, b_s: Any, part: Any) -> None:
        if fused:
            for k4 in T.serial(block_k // 4):
                for i, j in T.Parallel(block_m, block_n):
                    for c in T.serial(4):
                        part[i, j] += a_s[i, k4 * 4 + c] * (
                            b_s[j, k4 * 4 + c] if b_t else b_s[k4 * 4 + c, j]
                        )
        else:
            T.gemm(a_s, b_s, part, transpose_B=b_t)

    @T.macro
    def add(part: Any, total: Any) -> None:
        for i, j in T.Parallel(block_m, block_n):
            total[i, j] += part[i, j]
            part[i, j] = 0

    def rows_of(size: Any) -> Any:
        return (N, size) if b_t else (size, N)

    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32

    @T.prim_func
    def product(
        a: T.Tensor((M, K), a_dtype),  # type: ignore[valid-type]
        b: T.Tensor(rows_of(K), b_dtype),  # type: ignore[valid-type]
        a0: T.Tensor((M, K0), a0_dtype),  # type: ignore[valid-type]
        b0: T.Tensor(rows_of(K0), b0_dtype),  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        sign: T.float32,
        out: T.Tensor((M, N), out_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(N, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            a_s = T.alloc_shared((block_m, block_k + pad), compute)
            b_s = T.alloc_shared(b_tile, compute)
            a0_s = T.alloc_shared((block_m, block_k + pad), compute)
            b0_s = T.alloc_shared(b_tile, compute)
            part = T.alloc_fragment((block_m, block_n), "float32")
            part0 = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32") if two_level else part
            total0 = T.alloc_fragment((block_m, block_n), "float32") if two_level else part0
            # A matrix instruction's result is stored 8 rows at once, each to banks of its own.
            staged = T.alloc_shared((block_m, block_n + 8), out_dtype)
            if fused:
                layout = T.Fragment(
                    (block_m, block_n), forward_thread_fn=thread_of, forward_index_fn=index_of
                )
                T.annotate_layout({part: layout, part0: layout})
            for tile in (part, part0, *((total, total0) if two_level else ())):
                T.clear(tile)
            for step in T.Pipelined(steps, num_stages=depth):
                load(a, b, by, bx, step * block_k, a_s, b_s)
                load(a0, b0, by, bx, step * block_k, a0_s, b0_s)
                if two_level:
                    add(part, total)
                    add(part0, total0)
                multiply(a_s, b_s, part)
                multiply(a0_s, b0_s, part0)
            if two_level:
                add(part, total)
                add(part0, total0)
            # mypy has one type for scale, which is a number here and a tensor of one there.
            for i, j in T.Parallel(block_m, block_n):
                staged[i, j] = (total[i, j] + sign * total0[i, j]) * (
                    scale[0] if scale_by_tensor else scale  # type: ignore[index]
                )
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(staged[0:block_m, 0:block_n], out[by * block_m, bx * block_n])

    return product


def diagonal_kernel(
    rank: int | None,
    dtypes: tuple[torch.dtype, ...],
    blocks: tuple[int, int],
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`diagonal`; a mask's row is that of ``rows`` rows of ``a``.

    The rank is compiled in on CUDA, so that a thread takes neighbours; other sizes are symbolic.
    """
    import tilelang.language as T

    M, B = T.dynamic("m", index), T.dynamic("samples", index)
    R = T.dynamic("r", index) if rank is None else rank
    a_dtype, lam_dtype, mask_dtype, out_dtype = (NAMES[d] for d in dtypes)
    block_m, block_n = blocks

    @T.prim_func
    def diagonal(
        a: T.Tensor((M, R), a_dtype),  # type: ignore[valid-type]
        lam: T.Tensor((R,), lam_dtype),  # type: ignore[valid-type]
        mask: T.Tensor((B, R), mask_dtype),  # type: ignore[valid-type]
        out: T.Tensor((M, R), out_dtype),  # type: ignore[valid-type]
        rows: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(R, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            for i, j in T.Parallel(block_m, block_n):
                row = by * block_m + i
                column = bx * block_n + j
                if row < M and column < R:
                    out[row, column] = T.cast(a[row, column], "float32") * (
                        T.cast(lam[column], "float32")
                        * T.cast(mask[div(row, rows), column], "float32")
                    )

    return diagonal


def diagonal_gradient_kernel(
    rank: int | None,
    dtypes: tuple[torch.dtype, ...],
    blocks: tuple[int, int],
    threads: int,
    index: str,
) -> Any:
    """The prim_func of :func:`diagonal_gradient`, of ``steps`` tiles a share.

    As in :func:`diagonal_kernel`.
    """
    import tilelang.language as T

    M, B, S = (T.dynamic(name, index) for name in ("m", "samples", "s"))
    R = T.dynamic("r", index) if rank is None else rank
    a_dtype, b_dtype, mask_dtype = (NAMES[d] for d in dtypes)
    block_m, block_n = blocks

    @T.prim_func
    def diagonal_gradient(
        a: T.Tensor((M, R), a_dtype),  # type: ignore[valid-type]
        b: T.Tensor((M, R), b_dtype),  # type: ignore[valid-type]
        mask: T.Tensor((B, R), mask_dtype),  # type: ignore[valid-type]
        partials: T.Tensor((S, R), "float32"),  # type: ignore[valid-type]
        rows: T.int32,
        steps: T.int32,
    ) -> None:
        with T.Kernel(T.ceildiv(R, block_n), S, threads=threads) as (bx, by):
            total = T.alloc_fragment((block_m, block_n), "float32")
            sums = T.alloc_fragment((block_n,), "float32")
            T.clear(total)
            for step in T.serial(steps):
                for i, j in T.Parallel(block_m, block_n):
                    row = (by * steps + step) * block_m + i
                    column = bx * block_n + j
                    if row < M and column < R:
                        total[i, j] += (
                            T.cast(a[row, column], "float32")
                            * T.cast(b[row, column], "float32")
                            * T.cast(mask[div(row, rows), column], "float32")
                        )
            T.reduce_sum(total, sums, dim=0)
            for j in T.Parallel(block_n):
                if bx * block_n + j < R:
                    partials[by, bx * block_n + j] = sums[j]

    return diagonal_gradient
