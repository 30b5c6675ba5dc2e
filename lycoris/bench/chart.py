"""A dot chart in SVG: one line a row, a mark for everyone who ran it, on a logarithmic axis.

Positions are percentages, so that the chart takes the width it is given and its text keeps its
size. Colours are CSS classes of the page, and every backend has a shape of its own beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from textwrap import wrap

from ..kernels.registry import BUILT_IN

_SHAPES = (
    '<circle r="6"/>',
    '<rect x="-5.5" y="-5.5" width="11" height="11"/>',
    '<path d="M0-7.5 7 5.5H-7z"/>',
    '<path d="M0-7.5 7.5 0 0 7.5-7.5 0z"/>',
)
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
#: The page's colours; with a shape each, twelve names are told apart.
_COLOURS = 6
#: What runs beside the backends, by number: grey is eager's.
_BESIDE = {"eager": 2, "compile": 3}
_LINE, _TOP, _LEFT, _RIGHT = 46, 34, 3.0, 97.0
#: What a phone shows of a label in one line, in characters, and how far apart its lines are.
_LABEL, _LEADING = 46, 15


@dataclass(frozen=True, slots=True)
class Mark:
    """One backend's time in a row: in multiples of the floor, and in us with the floor's own."""

    name: str
    times_floor: float
    time_us: float
    floor_us: float


def styles(names: Iterable[str]) -> dict[str, int]:
    """The numbers of everyone's colour and shape, the same in every chart of a page.

    Those in the tree and what runs beside them have theirs on every page; the others, plug-ins,
    take the next ones by name.
    """
    others = sorted(set(names) - set(BUILT_IN) - set(_BESIDE))
    free = (n for n in count() if n not in _BESIDE.values())
    return _BESIDE | dict(zip([*BUILT_IN, *others], free, strict=False))


def _svg_mark(number: int, x: str, y: float, title: str) -> str:
    shape = _SHAPES[number % len(_SHAPES)]
    return (
        f'<svg x="{x}" y="{y:g}" overflow="visible" class="m{number % _COLOURS}">'
        f"<title>{escape(title)}</title>{shape}</svg>"
    )


def chart(rows: Mapping[str, Sequence[Mark]], style: Mapping[str, int]) -> str:
    """The chart of one op, with its legend; each row's label stands above its line.

    ``style``: the number of everyone's colour and shape, see :func:`styles`.
    """
    marks = [mark for row in rows.values() for mark in row]
    names = sorted({m.name for m in marks}, key=style.__getitem__)
    low = min(1.0, *(m.times_floor for m in marks))
    high = max(m.times_floor for m in marks)
    last = next((t for t in _TICKS if t >= high), high)
    first = low if low < 1 else 1.0
    span = math.log(max(last, 2) / first)

    def x(value: float) -> str:
        return f"{_LEFT + (_RIGHT - _LEFT) * math.log(value / first) / span:.2f}%"

    labels = [wrap(name, _LABEL) for name in rows]
    extra = [_LEADING * (len(lines) - 1) for lines in labels]
    height = _TOP + _LINE * len(rows) + sum(extra) + 8
    label = f"time over the floor by backend, {len(rows)} rows; the table has every figure"
    parts = [f'<svg class="chart" width="100%" height="{height}" role="img" aria-label="{label}">']
    for tick in (t for t in _TICKS if t <= max(last, 2)):
        kind = "floor" if tick == 1 else "grid"
        word = "floor" if tick == 1 else f"{tick}x"
        anchor = "start" if tick == 1 else "end" if tick == max(last, 2) else "middle"
        parts.append(f'<line class="{kind}" x1="{x(tick)}" x2="{x(tick)}" y1="20" y2="{height}"/>')
        parts.append(
            f'<text class="tick" x="{x(tick)}" y="13" text-anchor="{anchor}">{word}</text>'
        )
    y = _TOP + 30 - _LINE
    for lines, more, row in zip(labels, extra, rows.values(), strict=True):
        y += _LINE + more
        far = max(m.times_floor for m in row)
        for up, line in enumerate(reversed(lines)):
            place = f'x="{_LEFT}%" dx="6" y="{y - 13 - _LEADING * up}"'
            parts.append(f"<text {place}>{escape(line)}</text>")
        parts.append(f'<line class="track" x1="{x(1)}" x2="{x(far)}" y1="{y}" y2="{y}"/>')
        for mark in sorted(row, key=lambda m: -style[m.name]):
            title = (
                f"{mark.name}: {mark.time_us:.1f} us, {mark.times_floor:.2f} times "
                f"the floor of {mark.floor_us:.1f} us"
            )
            parts.append(_svg_mark(style[mark.name], x(mark.times_floor), y, title))
    parts.append("</svg>")
    legend = "".join(
        f'<span><svg width="18" height="18" aria-hidden="true">'
        f"{_svg_mark(style[n], '9', 9, n)}</svg> {escape(n)}</span>"
        for n in names
    )
    return f'<div class="legend">{legend}</div>{"".join(parts)}'
