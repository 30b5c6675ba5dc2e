"""Writes the README's table of speeds from results on record: python bench/readme.py

The table stands between two comments; the first names its files, from the root of the checkout.
A test asks that this was run after a change of either.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lycoris.bench.compare import markdown_table
from lycoris.bench.records import BOTH, Results, Row, load_all, worst

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(<!-- speeds of ([^\n]*?); by bench/readme\.py -->\n).*?(<!-- end of speeds -->)", re.DOTALL
)
DTYPES = "bf16"


def chosen(results: Results) -> dict[tuple[str, str], dict[str, Row]]:
    """Of every op the first case that is timed forward plus backward: (op, case) -> backend -> row.

    A row that failed its parity check has no time, and so no place here.
    """
    found: dict[tuple[str, str], dict[str, Row]] = {}
    case: dict[str, str] = {}
    for row in results.rows:
        wanted = (row["kind"], row["dtypes"]) == ("op", DTYPES) and row["direction"] == BOTH
        if wanted and row["time_us"] and case.setdefault(row["op"], row["case"]) == row["case"]:
            found.setdefault((row["op"], row["case"]), {})[row["backend"]] = row
    return found


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def table(results: Results) -> str:
    """The table, in Markdown: device times in us, and the worst error beside its bound."""
    rows = chosen(results)
    backends = [b for b in results.backends if any(b in found for found in rows.values())]
    compiled = any(r.get("compile_us") for found in rows.values() for r in found.values())
    lines = []
    for (op, case), found in rows.items():
        any_row = next(iter(found.values()))
        verdicts = [v for row in found.values() for v in row["parity"]]
        error = max(verdicts, key=lambda v: v["ulp"] / v["bound"])
        cells = [f"`{op}`", case, _us(any_row.get("floor_us"))]
        cells += [_us(found[b]["time_us"] if b in found else None) for b in backends]
        cells += [_us(any_row.get("eager_us"))]
        cells += [_us(any_row.get("compile_us"))] if compiled else []
        cells += [
            f"{error['ulp']:.1f} of {error['bound']:g}",
            f"{worst(verdicts, 'eager_ulp'):.1f}",
        ]
        lines.append(cells)
    headings = ["op", "shape", "floor:", *(f"{b}:" for b in backends), "eager:"]
    headings += ["compiled:"] if compiled else []
    return "\n".join(markdown_table([*headings, "worst ULP:", "eager's:"], lines)) + "\n"


def rewrite(page: str, root: Path = ROOT) -> str:
    """A page with every table of speeds as its files have it.

    Raises:
        ValueError: the page has no such table.
    """

    def made(match: re.Match[str]) -> str:
        results = load_all([root / name for name in match[2].split()])
        return match[1] + table(results) + match[3]

    text, count = BLOCK.subn(made, page)
    if not count:
        raise ValueError("no table of speeds: <!-- speeds of FILES; by bench/readme.py -->")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rewrite(readme.read_text()))
