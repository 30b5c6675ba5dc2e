"""Sums of partial sums: the second level of a reduction, each result rounded once."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy

from .common import NAMES, build

_LAST = 8  # sums of an element that are added last


@prepared
def add_up(
    parts: torch.Tensor,
    out: torch.Tensor,
    parts2: torch.Tensor | None,
    out2: torch.Tensor | None,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out (size,) = the sum of ``parts`` (count, size, width) over both other dimensions.

    In fp32, in an order that depends on shapes and Plan alone. ``out2`` is that of ``parts2``,
    where there is one. Tensors are contiguous and no sum has 2^31 terms. M of ``plan`` is how many
    terms of a sum are added at once, K the same for ``parts2``, and N the elements of a tile.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    on_cpu, rows = not out.is_cuda, (plan.block_m, plan.block_k)
    kernel = build(
        add_up_kernel,
        (
            tuple(t.dtype for t in (out, out2) if t is not None),
            tuple(None if on_cpu else t.shape[2] for t in (parts, parts2) if t is not None),
            tuple((row, plan.block_n // row) for row in rows),
            32 if on_cpu else 32 * plan.num_warps,
            "int64" if on_cpu else "int32",
        ),
        out.device,
    )

    def launch(
        parts: torch.Tensor,
        out: torch.Tensor,
        parts2: torch.Tensor | None,
        out2: torch.Tensor | None,
    ) -> None:
        kernel(parts, out, *(t for t in (parts2, out2) if t is not None))

    return launch


def add_up_kernel(
    dtypes: tuple[torch.dtype, ...],
    widths: tuple[int | None, ...],
    blocks: tuple[tuple[int, int], ...],
    threads: int,
    index: str,
) -> Any:
    """The prim_func behind :func:`add_up`, of one sum or of two; counts and sizes stay symbolic."""
    import tilelang.language as T  # takes seconds: not before a kernel is built

    def sum_of(number: int) -> tuple[Any, ...]:
        """The blocks of one sum, the types of its tensors, and a macro that makes one block."""
        count, size, width = (T.dynamic(f"{name}{number}", index) for name in ("s", "n", "j"))
        width = width if widths[number] is None else widths[number]
        rows, columns = blocks[number]
        last = min(_LAST, rows)

        @T.macro
        def add(parts: Any, out: Any, block: Any) -> None:
            total = T.alloc_fragment((rows, columns), "float32")
            staged = T.alloc_shared((rows, columns), "float32")
            fewer = T.alloc_shared((last, columns), "float32")
            T.clear(total)
            for step in T.serial(T.ceildiv(count * width, rows)):
                for i, j in T.Parallel(rows, columns):
                    share = step * rows + i
                    column = block * columns + j
                    if share < count * width and column < size:
                        total[i, j] += parts[share // width, column, share % width]
            T.copy(total, staged)
            for i, j in T.Parallel(last, columns):
                fewer[i, j] = 0
                for k in T.serial(rows // last):
                    fewer[i, j] += staged[k * last + i, j]
            for j in T.Parallel(columns):
                column = block * columns + j
                if column < size:
                    for i in T.serial(1, last):
                        fewer[0, j] += fewer[i, j]
                    out[column] = fewer[0, j]

        parts_type = T.Tensor((count, size, width), "float32")
        out_type = T.Tensor((size,), NAMES[dtypes[number]])
        return T.ceildiv(size, columns), parts_type, out_type, add

    first, parts_type, out_type, add = sum_of(0)
    if len(dtypes) == 1:

        @T.prim_func
        def add_up(parts: parts_type, out: out_type) -> None:  # type: ignore[valid-type]
            with T.Kernel(first, threads=threads) as block:
                add(parts, out, block)

    else:
        second, parts2_type, out2_type, add2 = sum_of(1)

        @T.prim_func
        def add_up(  # type: ignore[no-redef]
            parts: parts_type,  # type: ignore[valid-type]
            out: out_type,  # type: ignore[valid-type]
            parts2: parts2_type,  # type: ignore[valid-type]
            out2: out2_type,  # type: ignore[valid-type]
        ) -> None:
            with T.Kernel(first + second, threads=threads) as block:
                if block < first:
                    add(parts, out, block)
                else:
                    add2(parts2, out2, block - first)

    return add_up
