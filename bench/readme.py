"""Writes the README's tables of speeds and layers from results on record: python bench/readme.py

A table stands between two comments; the first names its files, from the root of the checkout.
A test asks that this was run after a change of either.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lycoris.bench.compare import markdown_table
from lycoris.bench.records import BOTH, Results, Row, load_all

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(
    r"(<!-- (speeds|layers) of ([^\n]*?); by bench/readme\.py -->\n).*?(<!-- end of \2 -->)",
    re.DOTALL,
)
DTYPES = "bf16"


Case = tuple[str, str]


def chosen(results: Results, kind: str, *, every: bool) -> dict[Case, dict[str, Row]]:
    """What is timed forward plus backward: (op, case) -> backend -> row.

    Of every op the first case, unless ``every``. A row that failed its parity check has no time,
    and so no place here.
    """
    found: dict[Case, dict[str, Row]] = {}
    case: dict[str, str] = {}
    for row in results.rows:
        wanted = (row["kind"], row["dtypes"]) == (kind, DTYPES) and row["direction"] == BOTH
        first = case.setdefault(row["op"], row["case"]) if wanted and row["time_us"] else None
        if first and (every or first == row["case"]):
            found.setdefault((row["op"], row["case"]), {})[row["backend"]] = row
    return found


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _backends(results: Results, rows: dict[Case, dict[str, Row]]) -> list[str]:
    return [b for b in results.backends if any(b in found for found in rows.values())]


def speeds(results: Results) -> str:
    """Of the ops, in Markdown: device times in us, and the worst error beside its bound."""
    rows = chosen(results, "op", every=False)
    backends = _backends(results, rows)
    lines = []
    for (op, case), found in rows.items():
        any_row = next(iter(found.values()))
        verdicts = [v for row in found.values() for v in row["parity"]]
        error = max(verdicts, key=lambda v: v["ulp"] / v["bound"])
        cells = [f"`{op}`", case, _us(any_row.get("floor_us"))]
        cells += [_us(found[b]["time_us"] if b in found else None) for b in backends]
        cells += [_us(any_row.get(f"{name}_us")) for name in ("eager", "compile")]
        cells += [f"{error['ulp']:.1f} of {error['bound']:g}"]
        lines.append([*cells, "-" if error["eager_ulp"] is None else f"{error['eager_ulp']:.1f}"])
    headings = ["op", "shape", "floor:", *(f"{b}:" for b in backends), "eager:", "compile:"]
    return "\n".join(markdown_table([*headings, "worst ULP:", "eager's:"], lines)) + "\n"


def layers(results: Results) -> str:
    """Of the layers, in Markdown: us that an adapter adds, and the peak memory of all in MB."""
    rows = chosen(results, "layer", every=True)
    backends = _backends(results, rows)
    lines = []
    for (op, case), found in rows.items():
        row = next(iter(found.values()))
        base = row["base_us"]
        others = [row.get(f"{name}_us") for name in ("eager", "peft")]
        cells = [f"`{op}`", case]
        cells += [_us(found[b]["added_us"] if b in found else None) for b in backends]
        cells += [_us(t and t - base) for t in others]
        peaks = [max(r["peak_bytes"] for r in found.values())]
        peaks += [row.get(f"{name}_peak_bytes") for name in ("eager", "peft")]
        lines.append([*cells, *("-" if p is None else f"{p / 1e6:.0f}" for p in peaks)])
    headings = ["op", "layer", *(f"{b}:" for b in backends), "eager:", "PEFT:"]
    headings += ["MB:", "eager's:", "PEFT's:"]
    return "\n".join(markdown_table(headings, lines)) + "\n"


def rewrite(page: str, root: Path = ROOT) -> str:
    """A page with every such table as its files have it.

    Raises:
        ValueError: the page has no such table.
    """

    def made(match: re.Match[str]) -> str:
        results = load_all([root / name for name in match[3].split()])
        make = {"speeds": speeds, "layers": layers}[match[2]]
        return match[1] + make(results) + match[4]

    text, count = BLOCK.subn(made, page)
    if not count:
        raise ValueError("no table of speeds: <!-- speeds of FILES; by bench/readme.py -->")
    return text


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rewrite(readme.read_text()))
