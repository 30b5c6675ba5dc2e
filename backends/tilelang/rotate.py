"""Rotations: v + v M here, v^T g in :mod:`.rotation_gram`.

The solve is in :mod:`.cayley`; what makes M of its blocks, and leads back, in :mod:`.butterfly`.
Activations (tokens, channels) and weights (channels, columns) go through the same kernels by
strides: nothing is transposed in memory. On CUDA a kernel is made for one geometry; on a CPU the
geometry is arguments, so that one build serves every shape.
"""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope.
# mypy: disable-error-code="valid-type"
from typing import Any

import torch

from lycoris.kernels.launch import Launch, prepared
from lycoris.kernels.plan import Plan
from lycoris.kernels.precision import Policy
from lycoris.kernels.rotation import Pass

from . import rotation_dense as dense
from .butterfly import compose, pack, stage_gradient, unpack
from .cayley import cayley_gradient, eliminate
from .common import NAMES, build
from .rotation_gram import gram
from .rotation_layout import div, fixed_of, flat, flat_or, index_macro, integers_of, layout, mod

__all__ = [
    "cayley_gradient",
    "compose",
    "eliminate",
    "gram",
    "pack",
    "rotate",
    "stage_gradient",
    "unpack",
]


@prepared
def rotate(
    x: torch.Tensor,
    base: torch.Tensor | None,
    extra: torch.Tensor | None,
    rescale: torch.Tensor | None,
    parts: torch.Tensor,
    power: torch.Tensor | None,
    out: torch.Tensor,
    part: Pass,
    diff: bool,
    transposed: bool,
    *,
    plan: Plan,
    policy: Policy,
) -> Launch:
    """out = x M + rescale * extra + (rescale - diff) * base, on the middle axis.

    ``x``, ``base``, ``extra`` and ``out`` are contiguous (A, C, B) tensors of any dtypes; x is cast
    to that of ``parts``. Their sum, times ``power`` (packs,) if given, is M, as ``pack`` leaves it;
    M^T where ``transposed``. Without ``rescale`` (C,), that is 1 and ``diff`` nothing. Sums are
    fp32, and rounded once.

    Raises:
        KernelBuildError: the kernel can't be built.
    """
    if extra is None and rescale is None and dense.serves(part, parts.dtype, x, base):
        streamed = dense.rotate(x, base, parts, power, out, part, transposed, plan)
        return lambda x, base, extra, rescale, *rest: streamed(x, base, *rest[:3])
    on_cpu = not out.is_cuda
    integers = integers_of(x, part, plan.block_m, 1)
    given = (t is not None for t in (base, extra, rescale, power))
    flags = (*given, diff, transposed)
    dtypes = (x.dtype, flat_or(base, x).dtype, parts.dtype, out.dtype)
    rows = on_cpu or layout(x)[3]
    params = (
        (fixed_of(integers, on_cpu), None if on_cpu else flags, dtypes),
        None if on_cpu else parts.shape[0],
        part.padded,
        (plan.block_m, plan.block_n, plan.block_k),
        (rows, policy.tf32 and not on_cpu, on_cpu),
        (32 * plan.num_warps, plan.num_stages),
    )
    kernel = build(rotate_kernel, params, out.device)
    numbers = [v for v, f in zip(integers.values(), params[0][0], strict=True) if f is None]  # type: ignore[index]
    if on_cpu:
        numbers += [*map(int, flags), parts.shape[0]]

    def launch(
        x: torch.Tensor,
        base: torch.Tensor | None,
        extra: torch.Tensor | None,
        rescale: torch.Tensor | None,
        parts: torch.Tensor,
        power: torch.Tensor | None,
        out: torch.Tensor,
        *_: Any,
    ) -> None:
        spare = torch.empty(1, device=x.device) if extra is None or rescale is None else x
        factors = spare if rescale is None else rescale.float()
        kernel(
            *(flat(x), flat_or(base, x), flat_or(extra, spare), flat(factors), flat(parts)),
            *(flat_or(power, factors), flat(out), *numbers),
        )

    return launch


def rotate_kernel(
    call: tuple[Any, Any, tuple[torch.dtype, ...]],
    count: int | None,
    padded: int,
    blocks: tuple[int, int, int],
    how: tuple[bool, bool, bool],
    launch: tuple[int, int],
) -> Any:
    """A tile of tokens by columns of one pack; integers of None, and then flags, are arguments.

    fp32 without tf32 is a product of fused multiply-adds, for the LoRA kernel's reason.
    """
    import tilelang.language as T

    fixed, flags, dtypes = call
    x_dtype, base_dtype, compute, out_dtype = (NAMES[dtype] for dtype in dtypes)
    block_t, block_n, block_k = blocks
    rows, tf32, on_cpu = how
    threads = launch[0]
    columns = padded // block_n
    steps = padded // block_k
    fused = compute == "float32" and not tf32 and not on_cpu
    x_tile = (block_t, block_k) if rows else (block_k, block_t)
    index = index_macro(T, padded)

    @T.macro
    def body(
        x: Any, base: Any, extra: Any, rescale: Any, parts: Any, power: Any, out: Any,
        integers: Any, given: Any, pieces: Any,
    ) -> None:  # fmt: skip
        tiles, per, tokens = integers[:3]
        outer_step, token_step, channel_step = integers[4:7]
        unit, stages, low, width, pack, groups, packs = integers[7:]
        based, extended, rescaled, scaled, diff, transposed = given
        with T.Kernel(tiles * packs * columns, threads=threads) as pid:
            xs = T.alloc_shared(x_tile, compute)
            ms = T.alloc_shared((block_k, block_n), compute)
            acc = T.alloc_fragment((block_t, block_n), "float32")
            staged = T.alloc_shared((block_t, block_n), "float32")
            channels = T.alloc_shared((padded,), "int32")
            tile = div(pid, packs * columns) if rows else mod(pid, tiles)
            column = mod(pid, packs * columns) if rows else div(pid, tiles)
            which = div(column, columns)
            z0 = mod(column, columns) * block_n
            t0 = mod(tile, per) * block_t
            origin = T.cast(div(tile, per), "int64") * outer_step + T.cast(t0, "int64") * token_step
            index(channels, which, unit, stages, low, width, pack, groups)
            T.clear(acc)
            for k in T.serial(steps):
                for a, b in T.Parallel(*x_tile):
                    i = a if rows else b
                    c = channels[k * block_k + (b if rows else a)]
                    if t0 + i < tokens and c >= 0:
                        at = origin + i * token_step + T.cast(c, "int64") * channel_step
                        xs[a, b] = T.cast(x[at], compute)
                    else:
                        xs[a, b] = T.cast(0, compute)
                for piece in T.serial(pieces):
                    which_part = (pieces - 1 - piece) * packs + which  # the least first
                    start = T.cast(which_part, "int64") * (padded * padded)
                    for a, b in T.Parallel(block_k, block_n):
                        if transposed:
                            ms[a, b] = parts[start + (z0 + b) * padded + k * block_k + a]
                        else:
                            ms[a, b] = parts[start + (k * block_k + a) * padded + z0 + b]
                    if fused:
                        for kk in T.serial(block_k):
                            for i, j in T.Parallel(block_t, block_n):
                                acc[i, j] += (xs[i, kk] if rows else xs[kk, i]) * ms[kk, j]
                    else:
                        T.gemm(xs, ms, acc, transpose_A=not rows)
            T.copy(acc, staged)
            for a, b in T.Parallel(*((block_t, block_n) if rows else (block_n, block_t))):
                i = a if rows else b
                j = b if rows else a
                c = channels[z0 + j]
                if t0 + i < tokens and c >= 0:
                    at = origin + i * token_step + T.cast(c, "int64") * channel_step
                    if scaled:
                        staged[i, j] *= power[which]
                    if extended:
                        if rescaled:
                            staged[i, j] += rescale[c] * extra[at]
                        else:
                            staged[i, j] += extra[at]
                    if based:
                        own = T.cast(base[at], "float32")
                        if rescaled:
                            staged[i, j] += (rescale[c] - T.cast(diff, "float32")) * own
                        elif staged[i, j] == 0:  # keeps the sign of a zero
                            staged[i, j] = own
                        else:
                            staged[i, j] += own
                    out[at] = T.cast(staged[i, j], out_dtype)

    sizes = [T.dynamic(name, "int64") for name in ("nx", "nb", "ne", "nr", "np", "ni", "no")]
    nx, nb, ne, nr, np, ni, no = sizes

    if on_cpu:

        @T.prim_func
        def rotate(
            x: T.Tensor((nx,), x_dtype),
            base: T.Tensor((nb,), base_dtype),
            extra: T.Tensor((ne,), "float32"),
            rescale: T.Tensor((nr,), "float32"),
            parts: T.Tensor((np,), compute),
            power: T.Tensor((ni,), "float32"),
            out: T.Tensor((no,), out_dtype),
            tiles: T.int32, per: T.int32, tokens: T.int32, share: T.int32,
            outer_step: T.int32, token_step: T.int32, channel_step: T.int32,
            unit: T.int32, stages: T.int32, low: T.int32, width: T.int32, pack: T.int32,
            groups: T.int32, packs: T.int32, based: T.int32, extended: T.int32,
            rescaled: T.int32, scaled: T.int32, diff: T.int32, transposed: T.int32,
            pieces: T.int32,
        ) -> None:  # fmt: skip
            body(
                x, base, extra, rescale, parts, power, out,
                (tiles, per, tokens, share, outer_step, token_step, channel_step,
                 unit, stages, low, width, pack, groups, packs),
                (based != 0, extended != 0, rescaled != 0, scaled != 0, diff, transposed != 0),
                pieces,
            )  # fmt: skip

    else:
        given = (*flags[:4], int(flags[4]), flags[5])

        @T.prim_func
        def rotate(  # type: ignore[no-redef]
            x: T.Tensor((nx,), x_dtype),
            base: T.Tensor((nb,), base_dtype),
            extra: T.Tensor((ne,), "float32"),
            rescale: T.Tensor((nr,), "float32"),
            parts: T.Tensor((np,), compute),
            power: T.Tensor((ni,), "float32"),
            out: T.Tensor((no,), out_dtype),
            tiles: T.int32,
            per: T.int32,
            tokens: T.int32,
            share: T.int32,
        ) -> None:
            integers = (tiles, per, tokens, share, *fixed[4:])
            body(x, base, extra, rescale, parts, power, out, integers, given, count)

    return rotate
