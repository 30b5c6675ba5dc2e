"""Two parity files side by side, as a Markdown table: compare_parity.py A.json B.json

The files come from ``python -m lycoris parity --backend NAME --json FILE``. Standard library only:
it runs in a job that installs nothing.

Exit status: 0 both pass and hold the same rows; 1 not; 2 usage.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def load(path: str) -> tuple[str, dict[tuple[str, ...], Row]]:
    """The backend's name, and its rows by what they are about; a missing file has none."""
    file = Path(path)
    rows = json.loads(file.read_text()) if file.exists() else []
    name = rows[0]["backend"] if rows else file.stem.removeprefix("parity-")
    keys = ("op", "dtypes", "case", "tensor")
    return name, {tuple(row[k] for k in keys): row for row in rows}


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def compare(paths: list[str]) -> tuple[str, bool]:
    """The Markdown, and whether all is well."""
    (first, left), (second, right) = map(load, paths)
    groups: dict[tuple[str, ...], list[tuple[Row | None, Row | None]]] = defaultdict(list)
    for key in sorted(left.keys() | right.keys()):
        groups[key[:2]].append((left.get(key), right.get(key)))
    lines = [
        f"### Parity: {first} and {second}",
        "",
        "The worst error of every op and dtype mix, in ULP against the fp64 oracle.",
        "",
        f"| op | dtypes | tensors | {first} | {second} | model | eager | bound | failed |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    failures = []
    for (op, dtypes), pairs in groups.items():

        def worst(side: int, column: str, pairs: Any = pairs) -> str:
            found = [p[side][column] for p in pairs if p[side] is not None]
            return number(max((v for v in found if v is not None), default=None))

        either = [a or b for a, b in pairs]
        failed = 0
        for pair in pairs:
            for name, row in zip((first, second), pair, strict=True):
                why = "no such row" if row is None else row["why"]
                if why:
                    about = pair[0] or pair[1] or {}
                    where = f"{about['op']}, {about['dtypes']}, {about['case']}, {about['tensor']}"
                    failures.append(f"- {name}: {where}: {why}")
                    failed += 1
        shared = [number(max(r[c] or 0 for r in either)) for c in ("model_ulp", "eager_ulp")]
        cells = [op, dtypes, str(len(pairs)), worst(0, "ulp"), worst(1, "ulp"), *shared]
        cells += [number(max(r["bound"] or 0 for r in either)), str(failed) if failed else "none"]
        lines.append("| " + " | ".join(cells) + " |")
    if not groups:
        failures.append("- neither file has a row")
    if failures:
        more = [f"- and {len(failures) - 50} more"] if len(failures) > 50 else []
        lines += ["", f"**{len(failures)} failures**", "", *failures[:50], *more]
    return "\n".join(lines), not failures


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    text, good = compare(arguments)
    print(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
