"""The commands ``compare`` and ``bench`` of ``python -m lycoris``."""

from __future__ import annotations

import argparse
from typing import Any

from ..kernels.report import UsageError, write
from .compare import Limits, compare
from .records import Results, load, load_all
from .report import html, markdown


def add_commands(commands: Any) -> None:
    """Adds both to the CLI's subparsers."""
    one = commands.add_parser("compare", help="two results: backends, commits or devices")
    one.set_defaults(run=_compare)
    one.add_argument("a", metavar="A.json", help="results of the benchmark matrix, or parity rows")
    one.add_argument("b", metavar="B.json", help="what is compared with it; may be the same file")
    one.add_argument(
        "--backends", nargs=2, metavar=("A", "B"), help="only this one of each, as if alone"
    )
    one.add_argument(
        "--max-slowdown",
        type=float,
        default=1.10,
        metavar="FACTOR",
        help="of device time, beyond the quartiles (default 1.10)",
    )
    one.add_argument(
        "--max-ulp-growth",
        type=float,
        metavar="ULP",
        help="of the error of any tensor (default 0; not judged between backends or devices)",
    )
    bench = commands.add_parser("bench", help="results of the benchmark matrix")
    what = bench.add_subparsers(required=True, metavar="WHAT")
    page = what.add_parser("report", help="a page of results, in one file")
    page.set_defaults(run=_report)
    page.add_argument("results", nargs="+", metavar="RESULTS.json", help="of one device")
    page.add_argument("-o", "--output", metavar="FILE", help="default: print it")
    page.add_argument("--format", choices=("html", "markdown"), help="default: by FILE's name")
    page.add_argument("--title", help="default: of what, on which device")


def _compare(args: argparse.Namespace) -> int:
    if not args.max_slowdown > 0:
        raise UsageError("--max-slowdown: expected a factor above 0")
    a, b = load(args.a), load(args.b)
    if args.backends:
        a, b = (side.only(name) for side, name in zip((a, b), args.backends, strict=True))
    growth = args.max_ulp_growth
    if growth is not None and not growth >= 0:
        raise UsageError("--max-ulp-growth: expected a number of ULP, at least 0")
    if growth is None and _alike(a, b):
        growth = 0.0
    found = compare(a, b, Limits(args.max_slowdown, growth))
    print(found.markdown)
    return 1 if found.problems else 0


def _alike(a: Results, b: Results) -> bool:
    """Whether both are of the same backends and device: then their errors should be equal."""
    devices = [{row.get("device", "cuda") for row in side.rows} for side in (a, b)]
    same = a.environment.get("name") == b.environment.get("name") and devices[0] == devices[1]
    return same and bool(set(a.backends) & set(b.backends))


def _report(args: argparse.Namespace) -> int:
    results = load_all(args.results)
    name = results.environment.get("name")
    title = args.title or f"lycoris-kernels on {name or 'an unknown device'}"
    kind = args.format
    if kind is None:
        kind = "markdown" if str(args.output or "").endswith((".md", ".markdown")) else "html"
    page = html(results, title) if kind == "html" else markdown(results, title)
    if args.output is None:
        print(page)
        return 0
    write("--output", args.output, page)
    print(f"{len(results.rows)} rows in {args.output}")
    return 0
