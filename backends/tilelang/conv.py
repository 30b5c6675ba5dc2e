"""What surrounds a convolution: small matrices times the channels, pixel by pixel.

Samples keep their layout, (channels, pixels), in every product, so that the pixels are read and
written in whole rows and nothing is transposed in memory. On a GPU a kernel is built for one image
size, whose rows must be known to be aligned; the number of samples stays symbolic.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# The ignores below are for those annotations, which are values where mypy wants types.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import CHUNK, Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, STAGES_OF_DYNAMIC_K, aligned, build, compact, is_transposed

#: The longest third dimension of a grid.
_GRID_DEPTH = 65535


@prepared
def mix(
    a: torch.Tensor,
    b: torch.Tensor,
    base: torch.Tensor | None,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out[i] = [base[i] +] scale * (a[i % G] @ b[i]) for every sample i.

    ``a``: (G, M, K), dense, or its transpose. ``b``: (B, K, S), ``base`` and ``out``: (B, M, S),
    contiguous; G divides B. a and b are cast to ``policy.compute``, sums are fp32, in two levels;
    ``out`` is rounded once. ``scale``: a number, or a 0-d fp32 tensor on the device.

    Raises:
        ValueError: ``a`` isn't dense.
        KernelBuildError: the kernel can't be built.
    """
    (groups, m, k), (batch, _, pixels) = a.shape, b.shape
    on_cpu = not out.is_cuda
    a_transposed = is_transposed(a[0], "a")
    types = [a.dtype, b.dtype, None if base is None else base.dtype]
    if on_cpu:  # where a cast costs less than a build
        types = [policy.compute, policy.compute, None if base is None else torch.float32]
    most = _GRID_DEPTH // groups * groups
    kernel = build(
        mix_kernel,
        (
            None if on_cpu else (groups, m, k, pixels),
            (plan.block_m, plan.block_n, plan.block_k),
            (*types, out.dtype, policy.compute),
            a_transposed,
            isinstance(scale, torch.Tensor),
            policy.tf32 and not on_cpu,
            32 * (1 if on_cpu else min(plan.num_warps, plan.block_m * plan.block_n // 128)),
            1 if on_cpu else plan.num_stages,
        ),
        out.device,
    )

    def launch(
        a: torch.Tensor,
        b: torch.Tensor,
        base: torch.Tensor | None,
        scale: float | torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        a = a.mT if a_transposed else a
        operands = [t for t in (a, b, base) if t is not None]
        if on_cpu:
            operands = [t.to(d) for t, d in zip(operands, types, strict=False)]
        a, *images = map(aligned, operands)
        factor = scale.reshape(1) if isinstance(scale, torch.Tensor) else scale
        for i in range(0, batch, most):
            some = slice(i, i + most)
            kernel(a, *[compact(t[some]) for t in images], factor, compact(out[some]))

    return launch


@prepared
def contract(
    left: torch.Tensor,
    right: torch.Tensor,
    scale: float | torch.Tensor,
    out: torch.Tensor,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out[:, g] = partial sums of scale * (left[i] @ right[i]^T) over the samples i = g mod G.

    ``left``: (B, M, S), ``right``: (B, K, S), ``out``: (splits, G, M, K), contiguous; G divides B.
    Each split sums a contiguous share of the samples' pixels, in fp32, in two levels. Operands are
    cast to ``policy.compute``.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    (_, m, pixels), k, groups = left.shape, right.shape[1], out.shape[1]
    on_cpu = not out.is_cuda
    types = (left.dtype, right.dtype)
    if on_cpu:  # where a cast costs less than a build
        types = (policy.compute, policy.compute)
    kernel = build(
        contract_kernel,
        (
            None if on_cpu else (groups, m, k, pixels),
            (plan.block_m, plan.block_n, plan.block_k),
            (*types, out.dtype, policy.compute),
            isinstance(scale, torch.Tensor),
            policy.tf32 and not on_cpu,
            32 * (1 if on_cpu else min(plan.num_warps, plan.block_m * plan.block_n // 128)),
            1 if on_cpu else plan.num_stages,
        ),
        out.device,
    )

    def launch(
        left: torch.Tensor, right: torch.Tensor, scale: float | torch.Tensor, out: torch.Tensor
    ) -> None:
        if on_cpu:
            left, right = left.to(types[0]), right.to(types[1])
        factor = scale.reshape(1) if isinstance(scale, torch.Tensor) else scale
        kernel(aligned(left), aligned(right), factor, compact(out))

    return launch


def _fma_layout(block_m: int, block_n: int, threads: int, by_column: bool) -> tuple[Any, Any]:
    """Which thread holds an element of a product without matrix instructions, and where.

    Threads take 4 contiguous columns each; neighbouring ones where that suits the loads.
    """
    columns = min(block_n // 4, 16, threads)
    rows = threads // columns

    def thread_of(i: Any, j: Any) -> Any:
        return i % rows * columns + (j if by_column else j // 4) % columns

    def index_of(i: Any, j: Any) -> Any:
        j_of_thread = j // columns if by_column else j // (4 * columns) * 4 + j % 4
        return i // rows * (block_n // columns) + j_of_thread

    return thread_of, index_of


def mix_kernel(
    sizes: tuple[int, int, int, int] | None,
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None, torch.dtype, torch.dtype],
    a_t: bool,
    scale_by_tensor: bool,
    tf32: bool,
    threads: int,
    stages: int,
) -> Any:
    """The prim_func behind :func:`mix`; without sizes (G, M, K, S) all of them are symbolic.

    fp32 without tf32 is a product of fused multiply-adds, as in the family ``lora``.
    """
    import tilelang.language as T  # takes seconds: not before a kernel is built

    index = "int32" if sizes else "int64"
    B = T.dynamic("n", index)
    G, M, K, S = sizes or (T.dynamic(name, index) for name in ("g", "m", "k", "s"))
    block_m, block_s, block_k = blocks
    a_dtype, b_dtype, base_dtype, out_dtype, compute = (
        None if dtype is None else NAMES[dtype] for dtype in dtypes
    )
    fused = compute == "float32" and not tf32
    long = not sizes or sizes[2] > (CHUNK // 4 if fused else CHUNK)
    pad = 4 if fused else 0  # lanes that read a column of rows need the rows 4 banks apart
    a_tile = (block_k, block_m) if a_t else (block_m, block_k + pad)
    steps = T.ceildiv(K, block_k)
    depth = max(1, min(stages, int(steps))) if sizes else 1
    thread_of, index_of = _fma_layout(block_m, block_s, threads, by_column=False)

    @T.macro
    def body(a: Any, b: Any, base: Any, scale: Any, out: Any) -> None:
        grid = T.ceildiv(S, block_s), T.ceildiv(M, block_m), B
        with T.Kernel(*grid, threads=threads) as (bx, by, sample):
            s0 = bx * block_s
            m0 = by * block_m
            group = sample % G
            a_s = T.alloc_shared(a_tile, compute)
            b_s = T.alloc_shared((block_k, block_s), compute)
            part = T.alloc_fragment((block_m, block_s), "float32")
            total = T.alloc_fragment((block_m, block_s), "float32") if long else part
            staged = T.alloc_shared((block_m, block_s), "float32")
            if fused:
                T.annotate_layout(
                    {
                        part: T.Fragment(
                            (block_m, block_s),
                            forward_thread_fn=thread_of,
                            forward_index_fn=index_of,
                        )
                    }
                )
            T.clear(part)
            if long:
                T.clear(total)
            for step in T.Pipelined(steps, num_stages=depth):
                k0 = step * block_k
                if a_t:
                    T.copy(a[group, k0, m0], a_s)
                else:
                    T.copy(a[group, m0, k0], a_s[0:block_m, 0:block_k])
                T.copy(b[sample, k0, s0], b_s)
                if long:  # the last step's product, while this one's tiles arrive
                    for i, j in T.Parallel(block_m, block_s):
                        total[i, j] += part[i, j]
                        part[i, j] = 0
                if fused:
                    for kk in T.serial(block_k):
                        for i, j in T.Parallel(block_m, block_s):
                            part[i, j] += (a_s[kk, i] if a_t else a_s[i, kk]) * b_s[kk, j]
                else:
                    T.gemm(a_s, b_s, part, transpose_A=a_t)
            if long:
                for i, j in T.Parallel(block_m, block_s):
                    total[i, j] += part[i, j]
            # Through shared memory: the accumulator's layout would store 2 elements at a time.
            T.copy(total, staged)
            for i, j in T.Parallel(block_m, block_s):
                if m0 + i < M and s0 + j < S:
                    value = staged[i, j] * (scale[0] if scale_by_tensor else scale)
                    if base is not None:
                        value += T.cast(base[sample, m0 + i, s0 + j], "float32")
                    out[sample, m0 + i, s0 + j] = value

    a_type = T.Tensor((G, K, M) if a_t else (G, M, K), a_dtype)
    b_type = T.Tensor((B, K, S), b_dtype)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32
    out_type = T.Tensor((B, M, S), out_dtype)
    if base_dtype is None:

        @T.prim_func
        def mix(a: a_type, b: b_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type]
            body(a, b, None, scale, out)

    else:
        base_type = T.Tensor((B, M, S), base_dtype)

        @T.prim_func
        def mix(a: a_type, b: b_type, base: base_type, scale: scale_type, out: out_type) -> None:  # type: ignore[valid-type, no-redef]
            body(a, b, base, scale, out)

    return mix


def contract_kernel(
    sizes: tuple[int, int, int, int] | None,
    blocks: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    scale_by_tensor: bool,
    tf32: bool,
    threads: int,
    stages: int,
) -> Any:
    """The prim_func behind :func:`contract`; without sizes (G, M, K, S) all of them are symbolic.

    Each step, ``block_s`` pixels of one sample, adds its product in a second level, so that no
    chain of matrix instructions (whose fp32 adds truncate on a GPU) is longer.
    """
    import tilelang.language as T  # takes seconds: not before a kernel is built

    index = "int32" if sizes else "int64"
    B, splits = T.dynamic("n", index), T.dynamic("splits", index)
    G, M, K, S = sizes or (T.dynamic(name, index) for name in ("g", "m", "k", "s"))
    block_m, block_k, block_s = blocks
    left_dtype, right_dtype, out_dtype, compute = (NAMES[dtype] for dtype in dtypes)
    fused = compute == "float32" and not tf32
    pad = 4 if fused else 0
    depth = min(stages, STAGES_OF_DYNAMIC_K)
    thread_of, index_of = _fma_layout(block_m, block_k, threads, by_column=True)
    scale_type = T.Tensor((1,), "float32") if scale_by_tensor else T.float32

    @T.prim_func
    def contract(
        left: T.Tensor((B, M, S), left_dtype),  # type: ignore[valid-type]
        right: T.Tensor((B, K, S), right_dtype),  # type: ignore[valid-type]
        scale: scale_type,  # type: ignore[valid-type]
        out: T.Tensor((splits, G, M, K), out_dtype),  # type: ignore[valid-type]
    ) -> None:
        with T.Kernel(
            T.ceildiv(K, block_k) * splits, T.ceildiv(M, block_m), G, threads=threads
        ) as (bx, by, group):
            split = bx % splits
            n0 = bx // splits * block_k
            m0 = by * block_m
            per_sample = T.ceildiv(S, block_s)
            steps = B // G * per_sample
            share = T.ceildiv(steps, splits)
            left_s = T.alloc_shared((block_m, block_s + pad), compute)
            right_s = T.alloc_shared((block_k, block_s + pad), compute)
            part = T.alloc_fragment((block_m, block_k), "float32")
            total = T.alloc_fragment((block_m, block_k), "float32")
            if fused:
                T.annotate_layout(
                    {
                        part: T.Fragment(
                            (block_m, block_k),
                            forward_thread_fn=thread_of,
                            forward_index_fn=index_of,
                        )
                    }
                )
            T.clear(part)
            T.clear(total)
            for i in T.Pipelined(T.max(0, T.min(share, steps - split * share)), num_stages=depth):
                step = split * share + i
                sample = step // per_sample * G + group
                s0 = step % per_sample * block_s
                T.copy(left[sample, m0, s0], left_s[0:block_m, 0:block_s])
                T.copy(right[sample, n0, s0], right_s[0:block_k, 0:block_s])
                for r, c in T.Parallel(block_m, block_k):
                    total[r, c] += part[r, c]
                    part[r, c] = 0
                if fused:
                    for s4 in T.serial(block_s // 4):
                        for r, c in T.Parallel(block_m, block_k):
                            for e in T.serial(4):  # one 16-byte load
                                part[r, c] += left_s[r, s4 * 4 + e] * right_s[c, s4 * 4 + e]
                else:
                    T.gemm(left_s, right_s, part, transpose_B=True)
            for r, c in T.Parallel(block_m, block_k):
                if m0 + r < M and n0 + c < K:
                    value = total[r, c] + part[r, c]
                    if scale_by_tensor:
                        out[split, group, m0 + r, n0 + c] = value * scale[0]  # type: ignore[index]
                    else:
                        out[split, group, m0 + r, n0 + c] = value * scale

    return contract
