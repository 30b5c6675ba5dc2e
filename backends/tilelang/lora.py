"""LoRA: one skinny matrix product serves the forward pass and every gradient.

h = x down^T, y = base + s h up^T, q = s g up, (d down)^T = x^T q and gx = q down are all
``out = [base +] scale * (a @ b)`` with one short dimension. They are bound by memory: what counts
is that the long operand streams once, in 16-byte pieces, through a pipeline of shared tiles.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, STAGES_OF_DYNAMIC_K, aligned, build, compact, is_transposed

_DYNAMIC = {"": (False, False, False), "m": (True, False, False), "k": (False, False, True)}


@prepared
def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] scale * (a @ b), or its partial sums over K where ``plan.splits`` > 1.

    ``a`` (M, K) and ``b`` (K, N) are dense, each row-major or transposed, each fp16, bf16 or fp32;
    both are cast to ``policy.compute`` before the product, which accumulates in fp32. ``base``
    (M, N), laid out like ``out``, is added in fp32. ``scale`` is a number or a 0-d fp32 tensor on
    the same device, applied in fp32 to the sum, or to each partial sum. ``out`` is (M, N), dense,
    row-major or transposed, rounded to its dtype once; with splits it is (splits, M, N) fp32, each
    slice over a contiguous share of K that is a multiple of ``plan.block_k``.

    Raises:
        ValueError: a tensor isn't dense, ``out`` doesn't start at a multiple of 16 bytes, or there
            is a base for partial sums.
        KernelBuildError: the kernel can't be built.
    """
    (m, k), n = a.shape, b.shape[1]
    block_m, block_n = plan.block_m, plan.block_n
    m_dynamic, n_dynamic, k_dynamic = _DYNAMIC[plan.dynamic]
    a_transposed, b_transposed = is_transposed(a, "a"), is_transposed(b, "b")
    swap = not out.is_contiguous()
    if swap:  # a transposed product is the product of the transposed operands
        m, n, m_dynamic, n_dynamic = n, m, n_dynamic, m_dynamic
        block_m, block_n = block_n, block_m
        a, b, a_transposed, b_transposed = b, a, not b_transposed, not a_transposed
    if not (out.mT if swap else out).is_contiguous():
        raise ValueError(f"out isn't dense: {tuple(out.shape)} with strides {out.stride()}")
    if base is not None and not (base.mT if swap else base).is_contiguous():
        raise ValueError("base isn't laid out like out")
    if plan.splits > 1 and base is not None:
        raise ValueError("every partial sum would add base")
    on_cpu = not out.is_cuda
    if on_cpu:  # nothing is compiled in, so that a build serves every shape
        m_dynamic = n_dynamic = k_dynamic = True
    elif out.data_ptr() % 16:
        raise ValueError("out must start at a multiple of 16 bytes")
    # 32 threads need 128 elements: the narrowest pair of mma tiles, and 4 a thread without mma.
    warps = 1 if on_cpu else min(plan.num_warps, block_m * block_n // 128)
    kernel = build(
        matmul_kernel,
        (
            None if m_dynamic else m,
            None if n_dynamic else n,
            None if k_dynamic else k,
            (block_m, block_n, plan.block_k),
            (a.dtype, b.dtype, None if base is None else base.dtype, out.dtype, policy.compute),
            (a_transposed, b_transposed),
            isinstance(scale, torch.Tensor),
            plan.splits,
            policy.tf32 and not on_cpu,
            32 * warps,
            1 if on_cpu else plan.num_stages,
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )
    # The kernel takes tensors as they lie in memory: row-major, by their own layout flags.
    a_flips, b_flips = a_transposed != swap, b_transposed != swap

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        base: torch.Tensor | None,
        scale: float | torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        if swap:
            a, b, out = b, a, out.mT
        operands = [aligned(a.t() if a_flips else a), aligned(b.t() if b_flips else b)]
        if base is not None:
            operands.append(aligned(base.mT if swap else base))
        factor = scale.reshape(1) if isinstance(scale, torch.Tensor) else scale
        kernel(*operands, factor, compact(out))

    return launch


def matmul_kernel(
    m: int | None,
    n: int | None,
    k: int | None,
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype, torch.dtype],
    transposed: tuple[bool, bool],
    scale_by_tensor: bool,
    splits: int,
    tf32: bool,
    threads: int,
    stages: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`matmul`; a size of None stays symbolic, of type ``index``.

    Each step adds its product in a second level, so that no chain of matrix instructions (whose
    fp32 adds truncate on a GPU) is longer than ``block_k``; a short K needs only one level.

    fp32 without tf32 is a product of fused multiply-adds, not a matrix instruction. Splitting into
    TF32 parts loses the last bit of an operand (two parts hold 23 of 24) and subnormals, and turns
    infinities into NaN; at these shapes it wouldn't be faster than the memory either.
    """
    import tilelang.language as T  # takes seconds: not before a kernel is built

    M = T.dynamic("m", index) if m is None else m
    N = T.dynamic("n", index) if n is None else n
    K = T.dynamic("k", index) if k is None else k
    block_m, block_n, block_k = blocks
    a_dtype, b_dtype, base_dtype, out_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    a_t, b_t = transposed
    fused = compute == "float32" and not tf32
    # One by one, 512 additions would use up most of fp32's bound; mma adds 8 or 16 at once.
    two_level = k is None or k > (CHUNK // 4 if fused else CHUNK)
    # Without mma's swizzle, lanes that read a column of rows need the rows 4 banks apart.
    pad = 4 if fused else 0
    a_tile = (block_k, block_m) if a_t else (block_m, block_k + pad)
    b_tile = (block_n, block_k + pad) if b_t else (block_k, block_n)
    # One dimension for all tiles: a GPU's second one ends at 65535.
    tiles_n = T.ceildiv(N, block_n)
    grid = T.ceildiv(M, block_m) * tiles_n, splits
    steps = T.ceildiv(T.ceildiv(K, block_k), splits)
    depth = min(stages, STAGES_OF_DYNAMIC_K) if k is None else max(1, min(stages, int(steps)))
    columns = min(block_n // 4, 16, threads)  # threads along N
    rows = threads // columns

    def thread_of(i: Any, j: Any) -> Any:
        # Lanes take neighbouring columns of a transposed tile, else 4 contiguous ones each.
        return i % rows * columns + (j if b_t else j // 4) % columns

    def index_of(i: Any, j: Any) -> Any:
        j_of_thread = j // columns if b_t else j // (4 * columns) * 4 + j % 4
        return i // rows * (block_n // columns) + j_of_thread

    @T.macro
    def body(a: Any, b: Any, base: Any, scale: Any, out: Any) -> None:
        with T.Kernel(*grid, threads=threads) as (tile, bz):
            bx = tile % tiles_n
            by = tile // tiles_n
            a_s = T.alloc_shared(a_tile, compute)
            b_s = T.alloc_shared(b_tile, compute)
            part = T.alloc_fragment((block_m, block_n), "float32")
            total = T.alloc_fragment((block_m, block_n), "float32") if two_level else part
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
            T.clear(part)
            if two_level:
                T.clear(total)
            for step in T.Pipelined(steps, num_stages=depth):
                k0 = (bz * steps + step) * block_k
                if a_t:
                    T.copy(a[k0, by * block_m], a_s)
                else:
                    T.copy(a[by * block_m, k0], a_s[0:block_m, 0:block_k])
                if b_t:
                    T.copy(b[bx * block_n, k0], b_s[0:block_n, 0:block_k])
                else:
                    T.copy(b[k0, bx * block_n], b_s)
                if two_level:  # the last step's product, while this one's tiles arrive
                    for i, j in T.Parallel(block_m, block_n):
                        total[i, j] += part[i, j]
                        part[i, j] = 0
                if fused:
                    for k4 in T.serial(block_k // 4):
                        for i, j in T.Parallel(block_m, block_n):
                            for c in T.serial(4):  # one 16-byte load where K is contiguous
                                kk = k4 * 4 + c
                                part[i, j] += (a_s[kk, i] if a_t else a_s[i, kk]) * (
                                    b_s[j, kk] if b_t else b_s[kk, j]
                                )
                else:
                    T.gemm(a_s, b_s, part, transpose_A=a_t, transpose_B=b_t)
            if two_level:
                for i, j in T.Parallel(block_m, block_n):
                    total[i, j] += part[i, j]
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(total, staged)
            for i, j in T.Parallel(block_m, block_n):
                row = by * block_m + i
                column = bx * block_n + j
                if row < M and column < N:
                    value = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                    if base is not None:
                        value += T.cast(base[row, column], "float32")
                    if splits > 1:
                        out[bz, row, column] = value
                    else:
                        out[row, column] = value

    a_type = T.Tensor((K, M) if a_t else (M, K), a_dtype)
    b_type = T.Tensor((N, K) if b_t else (K, N), b_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((splits, M, N) if splits > 1 else (M, N), out_dtype)
    if base_dtype is None:

        @T.prim_func
        def matmul(a: a_type, b: b_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type]
            body(a, b, None, scale, out)

    else:
        base_type = T.Tensor((M, N), base_dtype)

        @T.prim_func
        def matmul(a: a_type, b: b_type, base: base_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type, no-redef]
            body(a, b, base, scale, out)

    return matmul
