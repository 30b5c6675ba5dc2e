"""Sums of partial sums: the second level of a reduction, each result rounded once."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# They are values, which mypy takes for no types, and the forms of a prim_func share its name.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan, sum_sizes
from lycoris.kernels.precision import Policy

from .common import NAMES, build

_LAST = 8  # lanes that are added last


@prepared
def add_up(
    parts: torch.Tensor,
    base: torch.Tensor | None,
    out: torch.Tensor,
    parts2: torch.Tensor | None,
    out2: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = [base +] the sum of ``parts``, rounded once; ``out2`` that of ``parts2``, if given.

    ``parts`` is fp32, (count, *shape) or (count, *shape, width), and is summed over count and
    width, in fp32 and in an order that depends on shapes and Plan alone. ``out`` has that shape,
    or its first rows. ``base``, which has the shape of ``out``, is None where there are two sums.
    Every part, ``base`` and ``out`` are dense and lie in memory alike. No sum has 2^31 terms, no
    output 2^31 elements. M of ``plan`` is how many terms of a sum are added at once, K the same for
    ``parts2``, and N terms times elements of a tile.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu = not out.is_cuda
    sizes = [sum_sizes(parts, out)[:3]]
    if parts2 is not None and out2 is not None:
        sizes.append(sum_sizes(parts2, out2)[:3])
    rows = (plan.block_m, plan.block_k)
    kernel = build(
        add_up_kernel,
        (
            tuple(None if t is None else t.dtype for t in (base, out, out2)),
            tuple(None if on_cpu else width for _, _, width in sizes),
            tuple((row, plan.block_n // row) for row in rows[: len(sizes)]),
            32 * plan.num_warps,
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )

    def launch(
        parts: torch.Tensor,
        base: torch.Tensor | None,
        out: torch.Tensor,
        parts2: torch.Tensor | None,
        out2: torch.Tensor | None,
    ) -> None:
        operands = [_flat(parts).view(sizes[0]), *(_flat(t) for t in (base, out) if t is not None)]
        if parts2 is not None and out2 is not None:
            operands += [_flat(parts2).view(sizes[1]), _flat(out2)]
        kernel(*operands)

    return launch


def _flat(t: torch.Tensor) -> torch.Tensor:
    """A dense tensor, or dense slices, as they lie in memory."""
    return (t if t.is_contiguous() else t.mT).view(-1)


def add_up_kernel(
    dtypes: tuple[torch.dtype | None, ...],
    widths: tuple[int | None, ...],
    blocks: tuple[tuple[int, int], ...],
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`add_up`, of one sum or of two; counts and sizes stay symbolic."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    base_dtype, *out_dtypes = (None if dtype is None else NAMES[dtype] for dtype in dtypes)

    def sum_of(number: int) -> tuple[Any, ...]:
        """The blocks of one sum, the types of its tensors, and a macro that makes one block."""
        count, length, width, size = (T.dynamic(f"{n}{number}", index) for n in "snjm")
        width = width if widths[number] is None else widths[number]
        rows, columns = blocks[number]
        # A thread adds several shares of one element, or the few there are of several.
        lanes = min(rows, max(1, threads // columns))
        last = min(_LAST, lanes)

        @T.macro
        def add(parts: Any, base: Any, out: Any, block: Any) -> None:
            total = T.alloc_fragment((lanes, columns), "float32")
            staged = T.alloc_shared((lanes, columns), "float32")
            terms = T.alloc_local((rows // lanes,), "float32")
            T.clear(total)
            for step in T.serial(T.ceildiv(count * width, rows)):
                for i, j in T.Parallel(lanes, columns):
                    column = block * columns + j
                    for k in T.unroll(rows // lanes):
                        share = step * rows + k * lanes + i
                        terms[k] = T.if_then_else(
                            share < count * width and column < length,
                            parts[share // width, column, share % width],
                            0.0,
                        )
                    for k in T.unroll(rows // lanes):
                        total[i, j] += terms[k]
            if lanes > 1:
                T.copy(total, staged)
            if lanes > last:
                for i, j in T.Parallel(last, columns):
                    for k in T.serial(1, lanes // last):
                        staged[i, j] += staged[k * last + i, j]
            for j in T.Parallel(columns):
                column = block * columns + j
                if column < size:
                    for i in T.serial(1, last):
                        staged[0, j] += staged[i, j]
                    value = staged[0, j] if lanes > 1 else total[0, j]
                    out[column] = value if base is None else value + T.cast(base[column], "float32")

        parts_type = T.Tensor((count, length, width), "float32")
        out_type = T.Tensor((size,), out_dtypes[number])
        return T.ceildiv(size, columns), size, parts_type, out_type, add

    first, size, parts_type, out_type, add = sum_of(0)
    if len(blocks) == 2:
        second, _, parts2_type, out2_type, add2 = sum_of(1)

        @T.prim_func
        def add_up(
            parts: parts_type,  # type: ignore[valid-type]
            out: out_type,  # type: ignore[valid-type]
            parts2: parts2_type,  # type: ignore[valid-type]
            out2: out2_type,  # type: ignore[valid-type]
        ) -> None:
            with T.Kernel(first + second, threads=threads) as block:
                if block < first:
                    add(parts, None, out, block)
                else:
                    add2(parts2, None, out2, block - first)

    elif base_dtype is None:

        @T.prim_func
        def add_up(parts: parts_type, out: out_type) -> None:  # type: ignore[valid-type, no-redef]
            with T.Kernel(first, threads=threads) as block:
                add(parts, None, out, block)

    else:
        base_type = T.Tensor((size,), base_dtype)

        @T.prim_func
        def add_up(parts: parts_type, base: base_type, out: out_type) -> None:  # type: ignore[valid-type, no-redef]
            with T.Kernel(first, threads=threads) as block:
                add(parts, base, out, block)

    return add_up
