"""Two results side by side: two backends, two commits or two devices.

A regression is: a parity failure; a row that is missing; a device time of B above ``max_slowdown``
times A's whose quartiles also lie above A's; or an error of B above A's by more than
``max_ulp_growth`` ULP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..kernels.report import text
from .records import Results, Row, key, worst

#: Failures spelt out; the rest are counted.
MOST = 50
Pair = tuple[Row | None, Row | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """What still counts as no regression.

    ``ulp_growth`` None: not judged. Two backends, or devices, add in different orders, so that
    their errors differ by nature; both are held to the same bound by their parity.
    """

    slowdown: float = 1.10
    ulp_growth: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The Markdown, and what is wrong, a line each."""

    markdown: str
    problems: list[str]


def compare(a: Results, b: Results, limits: Limits) -> Comparison:
    """Compares B with A, row by row.

    Backends are told apart where both results have the same ones; a result with one backend is
    compared with another of one backend whatever their names.
    """
    crossed = len(a.backends) == len(b.backends) == 1 and a.backends != b.backends
    left, right = (_rows(side, crossed) for side in (a, b))
    names = (a.backends[0], b.backends[0]) if crossed else ("A", "B")
    pairs = {k: (left.get(k), right.get(k)) for k in dict.fromkeys([*left, *right])}
    problems, notes = [], []
    for pair in pairs.values():
        found, new = _problems(pair, names, limits, crossed)
        problems += found
        notes += new
    lines = [f"### {_title(a, b, crossed)}", "", *_differences(a, b), *_accuracy(pairs, names)]
    lines += _times(pairs, names, limits)
    if notes:
        lines += ["", f"{len(notes)} rows are new in {names[1]}."]
    if problems:
        more = [f"- and {len(problems) - MOST} more"] if len(problems) > MOST else []
        shown = [f"- {cell(problem)}" for problem in problems[:MOST]]
        lines += ["", f"**{len(problems)} problems**", "", *shown, *more]
    else:
        lines += ["", "No parity failure and no regression."]
    return Comparison("\n".join(lines), problems)


def _rows(results: Results, crossed: bool) -> dict[tuple[str, ...], Row]:
    return {(*key(r), "" if crossed else r["backend"]): r for r in results.rows}


def where(row: Row) -> str:
    """A row in words."""
    parts = [row["op"], row["dtypes"], row["case"]]
    parts += [row["direction"]] if row["time_us"] is not None else []
    return ", ".join(parts + (["as a layer"] if row["kind"] == "layer" else []))


def _problems(
    pair: Pair, names: tuple[str, str], limits: Limits, crossed: bool
) -> tuple[list[str], list[str]]:
    """What is wrong with a pair, and whether it is new."""
    a, b = pair
    if a is None or b is None:
        row = a or b
        assert row is not None
        missing = names[0] if a is None else names[1]
        about = where(row) if crossed else f"{where(row)}, {row['backend']}"
        if a is None and not crossed:
            return ([f"{names[1]}: {about}: {row['why']}"] if not row["pass"] else []), [about]
        return [f"{missing}: {about}: no such row"], []
    about = where(b) if crossed else f"{where(b)}, {b['backend']}"
    found = [
        f"{name}: {about}: {row['why'] or 'failed'}"
        for name, row in zip(names, pair, strict=True)
        if row is not None and not row["pass"]
    ]
    if limits.ulp_growth is not None:
        before = {p["tensor"]: p["ulp"] for p in a["parity"]}
        for p in b["parity"]:
            old, new = before.get(p["tensor"]), p["ulp"]
            if old is not None and new is not None and new > old + limits.ulp_growth + 1e-9 * old:
                found.append(
                    f"{names[1]}: {about}, {p['tensor']}: {text(new)} ULP after {text(old)}"
                )
    if _slower(a, b, limits.slowdown):
        ratio = b["time_us"] / a["time_us"]
        found.append(
            f"{names[1]}: {about}: {b['time_us']:.1f} us after {a['time_us']:.1f} us, "
            f"{ratio:.2f} times as long"
        )
    if a["time_us"] is not None and b["time_us"] is None and b["pass"]:
        found.append(f"{names[1]}: {about}: not timed; {names[0]} was")
    return found, []


def spread(row: Row) -> tuple[float, float]:
    """The quartiles of a row's device time; the median twice where none were recorded."""
    low, high = row.get("time_low_us"), row.get("time_high_us")
    time = row["time_us"]
    return (time if low is None else low), (time if high is None else high)


def _quartiles(row: Row) -> str:
    low, high = spread(row)
    return f" ({low:.1f}-{high:.1f})" if low != high else ""


def _slower(a: Row, b: Row, slowdown: float) -> bool:
    """Whether B is slower than A by more than is allowed and by more than noise."""
    if not a["time_us"] or not b["time_us"]:
        return False
    return b["time_us"] > slowdown * a["time_us"] and spread(b)[0] > spread(a)[1]


# ------------------------------------------------------------------------------- Markdown


def cell(value: object) -> str:
    """A table cell: nothing in it ends the cell or starts markup."""
    plain = " ".join(str(value).split())
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """A Markdown table; a heading that ends in ``:`` is of numbers."""
    marks = ["--:" if h.endswith(":") else "---" for h in headings]
    lines = ["| " + " | ".join(cell(h.removesuffix(":")) for h in headings) + " |"]
    lines.append("|" + "|".join(marks) + "|")
    return lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows]


def _title(a: Results, b: Results, crossed: bool) -> str:
    if crossed:
        return f"{a.backends[0]} (A) and {b.backends[0]} (B)"
    labels = [cell(r.short_commit or r.source) for r in (a, b)]
    return f"{labels[0]} (A) and {labels[1]} (B)"


def _differences(a: Results, b: Results) -> list[str]:
    names = dict.fromkeys([*a.environment, *b.environment])
    changed = [
        f"{n} {text(a.environment.get(n))} and {text(b.environment.get(n))}"
        for n in names
        if a.environment and b.environment and a.environment.get(n) != b.environment.get(n)
    ]
    return [f"They differ in {cell('; '.join(changed))}.", ""] if changed else []


def _accuracy(pairs: dict[tuple[str, ...], Pair], names: tuple[str, str]) -> list[str]:
    groups: dict[tuple[str, ...], list[Pair]] = {}
    for pair in pairs.values():
        row = pair[0] or pair[1]
        assert row is not None
        groups.setdefault((row["op"], row["dtypes"]), []).append(pair)
    table = []
    for group, members in groups.items():
        sides: list[list[Row]] = [
            [v for p in members if (r := p[i]) for v in r["parity"]] for i in (0, 1)
        ]
        either = sides[0] + sides[1]
        shared = [worst(either, c) for c in ("model_ulp", "eager_ulp", "bound")]
        bad = sum(not v["pass"] for v in either)
        lacking = sum(None in p for p in members)
        errors = [text(worst(side, "ulp")) for side in sides]
        table.append([*group, max(map(len, sides)), *errors, *map(text, shared)])
        table[-1] += [bad or "none", lacking or "none"]
    title = "The worst error of every op and dtype mix, in ULP against the fp64 oracle."
    headings = ["op", "dtypes", "tensors:", f"{names[0]}:", f"{names[1]}:"]
    headings += ["model:", "eager:", "bound:", "failed", "missing"]
    return [title, "", *markdown_table(headings, table)]


def _times(pairs: dict[tuple[str, ...], Pair], names: tuple[str, str], limits: Limits) -> list[str]:
    table, ratios = [], []
    for a, b in pairs.values():
        if a is None or b is None or not a["time_us"] or not b["time_us"]:
            continue
        ratio = b["time_us"] / a["time_us"]
        ratios.append(ratio)
        sides = [f"{r['time_us']:.1f}{_quartiles(r)}" for r in (a, b)]
        verdict = "slower" if _slower(a, b, limits.slowdown) else ""
        if not verdict and _slower(b, a, 1.0):
            verdict = "faster"
        backend = b["backend"] if a["backend"] == b["backend"] else ""
        table.append([where(b), backend, *sides, f"{ratio:.2f}", verdict])
    if not table:
        return []
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    title = (
        f"Device time in us (quartiles): {len(table)} rows, {names[1]} takes {mean:.2f} times as "
        f"long as {names[0]} (geometric mean)."
    )
    headings = ["row", "backend", f"{names[0]}:", f"{names[1]}:", "ratio:", ""]
    return ["", title, "", *markdown_table(headings, table)]
