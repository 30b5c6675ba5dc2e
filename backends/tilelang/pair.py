"""Two low-rank products that meet in one store, and the diagonal between T-LoRA's factors."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, STAGES_OF_DYNAMIC_K, aligned, build, compact, is_transposed


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
    kernel = build(
        diagonal_kernel,
        (
            tuple(t.dtype for t in (a, lam, mask, out)),
            (plan.block_m, plan.block_n),
            32 * plan.num_warps if out.is_cuda else 32,
            "int32" if out.is_cuda else "int64",
        ),
        out.device,
    )
    return _with_last_stride(kernel)


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
    kernel = build(
        diagonal_gradient_kernel,
        (
            (a.dtype, b.dtype, mask.dtype),
            (plan.block_m, plan.block_n),
            32 * plan.num_warps if a.is_cuda else 32,
            "int32" if a.is_cuda else "int64",
        ),
        a.device,
    )
    return _with_last_stride(kernel)


def _with_last_stride(launch: Any) -> Launch:
    """A launch of dense tensors, whose last stride is 1 even where that size is 1."""
    return lambda *args: launch(*map(compact, args))


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
    depth = STAGES_OF_DYNAMIC_K
    if longest is not None:
        depth = max(1, min(stages, -(-min(k or 1, k0 or 1) // block_k)))
    columns = min(block_n // 4, 16, threads)  # threads along N
    rows = threads // columns

    def thread_of(i: Any, j: Any) -> Any:
        # As in lora.matmul: lanes take neighbours of a transposed tile, else 4 contiguous each.
        return i % rows * columns + (j if b_t else j // 4) % columns

    def index_of(i: Any, j: Any) -> Any:
        j_of_thread = j // columns if b_t else j // (4 * columns) * 4 + j % 4
        return i // rows * (block_n // columns) + j_of_thread

    def sum_over(size: Any) -> Any:
        """A macro that leaves a tile of a @ b, over ``size`` columns of a, in ``total``."""

        @T.macro
        def accumulate(
            a: Any, b: Any, by: Any, bx: Any, a_s: Any, b_s: Any, part: Any, total: Any
        ) -> None:
            T.clear(part)
            if two_level:
                T.clear(total)
            for step in T.Pipelined(T.ceildiv(size, block_k), num_stages=depth):
                at = step * block_k
                T.copy(a[by * block_m, at], a_s[0:block_m, 0:block_k])
                if b_t:
                    T.copy(b[bx * block_n, at], b_s[0:block_n, 0:block_k])
                else:
                    T.copy(b[at, bx * block_n], b_s)
                if two_level:
                    for i, j in T.Parallel(block_m, block_n):
                        total[i, j] += part[i, j]
                        part[i, j] = 0
                if fused:
                    for k4 in T.serial(block_k // 4):
                        for i, j in T.Parallel(block_m, block_n):
                            for c in T.serial(4):
                                part[i, j] += a_s[i, k4 * 4 + c] * (
                                    b_s[j, k4 * 4 + c] if b_t else b_s[k4 * 4 + c, j]
                                )
                else:
                    T.gemm(a_s, b_s, part, transpose_B=b_t)
            if two_level:
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]

        return accumulate

    sum_first, sum_second = sum_over(K), sum_over(K0)

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
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32") if two_level else part
            first = T.alloc_fragment((block_m, block_n), "float32")
            staged = T.alloc_shared((block_m, block_n), "float32")
            if fused:
                T.annotate_layout(
                    {
                        part: T.Fragment(
                            (block_m, block_n),
                            forward_thread_fn=thread_of,
                            forward_index_fn=index_of,
                        )
                    }
                )
            sum_first(a, b, by, bx, a_s, b_s, part, total)
            for i, j in T.Parallel(block_m, block_n):
                first[i, j] = total[i, j]
            sum_second(a0, b0, by, bx, a_s, b_s, part, total)
            for i, j in T.Parallel(block_m, block_n):
                first[i, j] += sign * total[i, j]
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(first, staged)
            for i, j in T.Parallel(block_m, block_n):
                row = by * block_m + i
                column = bx * block_n + j
                if row < M and column < N:
                    out[row, column] = staged[i, j] * (
                        scale[0] if scale_by_tensor else scale  # type: ignore[index]
                    )

    return product


def diagonal_kernel(
    dtypes: tuple[torch.dtype, ...], blocks: tuple[int, int], threads: int, index: str
) -> Any:
    """The prim_func of :func:`diagonal`; every size is symbolic."""
    import tilelang.language as T

    M, R, B = (T.dynamic(name, index) for name in ("m", "r", "samples"))
    a_dtype, lam_dtype, mask_dtype, out_dtype = (NAMES[d] for d in dtypes)
    block_m, block_n = blocks

    @T.prim_func
    def diagonal(
        a: T.Tensor((M, R), a_dtype),  # type: ignore[valid-type]
        lam: T.Tensor((R,), lam_dtype),  # type: ignore[valid-type]
        mask: T.Tensor((B, R), mask_dtype),  # type: ignore[valid-type]
        out: T.Tensor((M, R), out_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(R, block_n), T.ceildiv(M, block_m), threads=threads) as (bx, by):
            for i, j in T.Parallel(block_m, block_n):
                row = by * block_m + i
                column = bx * block_n + j
                if row < M and column < R:
                    out[row, column] = T.cast(a[row, column], "float32") * (
                        T.cast(lam[column], "float32")
                        * T.cast(mask[row // (M // B), column], "float32")
                    )

    return diagonal


def diagonal_gradient_kernel(
    dtypes: tuple[torch.dtype, ...], blocks: tuple[int, int], threads: int, index: str
) -> Any:
    """The prim_func of :func:`diagonal_gradient`; every size is symbolic."""
    import tilelang.language as T

    M, R, B, S = (T.dynamic(name, index) for name in ("m", "r", "samples", "s"))
    a_dtype, b_dtype, mask_dtype = (NAMES[d] for d in dtypes)
    block_m, block_n = blocks

    @T.prim_func
    def diagonal_gradient(
        a: T.Tensor((M, R), a_dtype),  # type: ignore[valid-type]
        b: T.Tensor((M, R), b_dtype),  # type: ignore[valid-type]
        mask: T.Tensor((B, R), mask_dtype),  # type: ignore[valid-type]
        partials: T.Tensor((S, R), "float32"),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(T.ceildiv(R, block_n), S, threads=threads) as (bx, by):
            total = T.alloc_fragment((block_m, block_n), "float32")
            staged = T.alloc_shared((block_m, block_n), "float32")
            steps = T.ceildiv(T.ceildiv(M, S), block_m)
            T.clear(total)
            for step in T.serial(steps):
                for i, j in T.Parallel(block_m, block_n):
                    row = (by * steps + step) * block_m + i
                    column = bx * block_n + j
                    if row < M and column < R:
                        total[i, j] += (
                            T.cast(a[row, column], "float32")
                            * T.cast(b[row, column], "float32")
                            * T.cast(mask[row // (M // B), column], "float32")
                        )
            T.copy(total, staged)
            for j in T.Parallel(block_n):
                column = bx * block_n + j
                if column < R:
                    for i in T.serial(1, block_m):
                        staged[0, j] += staged[i, j]
                    partials[by, column] = staged[0, j]

    return diagonal_gradient
