"""DoRA: what programs left of parts of lines, added up line by line; see dora_lines.py."""

# No annotations import from __future__: TileLang evaluates a prim_func's annotations in its scope,
# where mypy finds values, not types.
# mypy: disable-error-code="valid-type, index"
from typing import Any

from .dora_tiles import power_of, ratio, unpower_of

_JOIN = 32  # lines of a block, a thread each


def _sizes(index: str, sizes: tuple[int | None, ...]) -> Any:
    import tilelang.language as T

    named = zip(("splits", "lanes", "l", "k"), sizes, strict=True)
    return [T.dynamic(name, index) if size is None else size for name, size in named]


def lengths_kernel(
    sizes: tuple[int | None, ...],
    m_dtype: str,
    has_made: bool,
    by_tensor: bool,
    index: str,
) -> Any:
    """The prim_func behind :func:`lengths`."""
    import tilelang.language as T

    S, lanes, L, K = _sizes(index, sizes)
    f32 = "float32"
    parts_type, m_type, n_type = (
        T.Tensor((S, 2, lanes), f32),
        T.Tensor((L,), m_dtype),
        T.Tensor((L,), f32),
    )
    made_type = T.Tensor((L,), f32)
    s_type = T.Tensor((1,), f32) if by_tensor else T.float32
    line_type = T.Tensor((K,), f32)

    @T.prim_func
    def lengths(
        parts: parts_type, magnitude: m_type, multiplier: s_type, norm: n_type, made: made_type,
        one_line: line_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(L, _JOIN), threads=_JOIN) as bx:
            peak = T.alloc_fragment((_JOIN,), f32)
            total = T.alloc_fragment((_JOIN,), f32)
            change = T.alloc_fragment((_JOIN,), f32)
            f = multiplier[0] if by_tensor else multiplier
            for l in T.Parallel(_JOIN):
                peak[l] = 0
                total[l] = 0
                if bx * _JOIN + l < L:
                    for split, q in T.grid(S, K):
                        peak[l] = T.max(peak[l], parts[split, 0, (bx * _JOIN + l) * K + q])
                    for split, q in T.grid(S, K):
                        at = (bx * _JOIN + l) * K + q
                        change[l] = power_of(T, peak[l]) * unpower_of(T, parts[split, 0, at])
                        total[l] += parts[split, 1, at] * change[l] * change[l]
                    total[l] = T.sqrt(total[l]) * unpower_of(T, peak[l])
                    norm[bx * _JOIN + l] = total[l]
                    if has_made:
                        m = T.cast(magnitude[bx * _JOIN + l], f32)
                        made[bx * _JOIN + l] = f * ratio(T, m, total[l]) + (1 - f)

    return lengths


def radial_kernel(
    sizes: tuple[int | None, ...],
    dtypes: tuple[str, str | None],
    has_parts: bool,
    has_made: bool,
    by_tensor: bool,
    detach: bool,
    index: str,
) -> Any:
    """The prim_func behind :func:`radial`."""
    import tilelang.language as T

    S, lanes, L, K = _sizes(index, sizes)
    m_dtype, gm_dtype = dtypes
    f32 = "float32"
    n_type, m_type = T.Tensor((L,), f32), T.Tensor((L,), m_dtype)
    parts_type = T.Tensor((S, lanes) if has_parts else (L,), f32)
    gm_type = T.Tensor((L,), f32 if gm_dtype is None else gm_dtype)
    made_type = T.Tensor((2, L) if has_made else (L,), f32)
    s_type = T.Tensor((1,), f32) if by_tensor else T.float32
    line_type = T.Tensor((K,), f32)

    @T.prim_func
    def radial(
        norm: n_type, parts: parts_type, magnitude: m_type, multiplier: s_type,
        grad_magnitude: gm_type, made: made_type, one_line: line_type,
    ) -> None:  # fmt: skip
        with T.Kernel(T.ceildiv(L, _JOIN), threads=_JOIN) as bx:
            total = T.alloc_fragment((_JOIN,), f32)
            along = T.alloc_fragment((_JOIN,), f32)
            f = multiplier[0] if by_tensor else multiplier
            for l in T.Parallel(_JOIN):
                total[l] = 0
                if bx * _JOIN + l < L:
                    if has_parts:
                        for split, q in T.grid(S, K):
                            total[l] += parts[split, (bx * _JOIN + l) * K + q]
                    total[l] = f * total[l]
                    if gm_dtype is not None:
                        grad_magnitude[bx * _JOIN + l] = total[l]
                    if has_made:
                        m = T.cast(magnitude[bx * _JOIN + l], f32)
                        along[l] = ratio(T, m, norm[bx * _JOIN + l])
                        made[0, bx * _JOIN + l] = f * along[l] + (1 - f)
                        made[1, bx * _JOIN + l] = T.float32(0) if detach else -along[l] * total[l]

    return radial
