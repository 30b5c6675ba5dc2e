"""A page of results: one HTML file that loads nothing, or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ..kernels.report import text
from .chart import Mark, chart, styles
from .compare import cell, markdown_table, where
from .records import BOTH, Results, Row, gradients, out_of, worst

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the main table. ``number`` aligns and sorts it as one; ``unit`` is its unit."""

    name: str
    heading: str
    meaning: str
    number: bool = True
    unit: str = ""

    @property
    def label(self) -> str:
        """The heading with the unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


def _us(name: str, heading: str, meaning: str) -> Column:
    return Column(name, heading, meaning, unit="us")


COLUMNS = (
    Column("op", "op", "the op; as a layer: one step of a frozen linear layer with it", False),
    Column("case", "shape", "sizes of the shape symbols, and the optional operands", False),
    Column("dtypes", "dtypes", "the model's dtype, and the adapter's where it is another", False),
    Column("direction", "direction", "forward, or forward and all gradients", False),
    Column("backend", "backend", "who computes", False),
    _us("time", "time", "device time; CUDA-graph replays, operands out of the L2 cache"),
    _us("floor", "floor", "least bytes or flops over the measured ceilings"),
    Column("times_floor", "x floor", "time over the floor"),
    _us("eager", "eager", "device time of the unfused run"),
    Column("speedup", "speed-up", "eager's time over this one"),
    Column("spread", "quartiles", "of the device time", False, "us"),
    _us("compile", "compile", "the formula under torch.compile"),
    _us("peft", "PEFT", "device time of HF PEFT's layer with the same adapter"),
    _us("added", "added", "what the adapter adds to its frozen layer's step"),
    _us("eager_added", "eager adds", "what the unfused adapter adds"),
    _us("peft_added", "PEFT adds", "what HF PEFT's adapter adds"),
    _us("host", "host", "host time of a call in a plain loop"),
    _us("wall", "wall", "wall time of a call in a plain loop"),
    _us("eager_wall", "eager wall", "that of the unfused run"),
    _us("peft_wall", "PEFT wall", "that of HF PEFT's layer"),
    Column("memory", "peak", "memory at the peak of a call, above what was there", unit="MiB"),
    Column("eager_memory", "eager peak", "that of the unfused run", unit="MiB"),
    Column("peft_memory", "PEFT peak", "that of HF PEFT's layer", unit="MiB"),
    Column("ulp", "ULP out", "largest error of the output against fp64"),
    Column("grad_ulp", "ULP grad", "largest error of a gradient"),
    Column("model_ulp", "model ULP", "that of a perfect kernel"),
    Column("floor_ulp", "rounding ULP", "that of one rounding of the exact result"),
    Column("eager_ulp", "eager ULP", "that of the unfused run"),
    Column("bound", "bound", "the declared bound, in ULP"),
    Column("pass", "parity", "whether output and gradients meet the rule", False),
)
_NEEDED = {"op", "case", "dtypes", "direction", "backend", "ulp", "bound", "pass"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One value: what is shown, and the number it sorts by."""

    column: Column
    shown: str
    sort: float | None = None


def _values(row: Row) -> dict[str, Any]:
    """A row by the names of the columns; None where it has nothing to say."""
    low, high = row.get("time_low_us"), row.get("time_high_us")
    timed = row["time_us"] is not None
    base = row.get("base_us")
    eager, peft = (row.get(f"{n}_us") if timed else None for n in ("eager", "peft"))
    return {
        "op": row["op"] + (" as a layer" if row["kind"] == "layer" else ""),
        "case": row["case"],
        "dtypes": row["dtypes"],
        "direction": row["direction"],
        "backend": row["backend"],
        "time": row["time_us"],
        "spread": f"{low:.1f}-{high:.1f}" if timed and low is not None else None,
        "floor": row.get("floor_us"),
        "times_floor": row.get("times_floor") if timed else None,
        "eager": eager,
        "speedup": eager / row["time_us"] if eager else None,
        "compile": row.get("compile_us"),
        "peft": peft,
        "added": row.get("added_us"),
        "eager_added": eager - base if eager and base else None,
        "peft_added": peft - base if peft and base else None,
        "host": row.get("host_us"),
        "wall": row.get("wall_us"),
        "eager_wall": row.get("eager_wall_us"),
        "peft_wall": row.get("peft_wall_us"),
        "memory": _mib(row.get("peak_bytes")),
        "eager_memory": _mib(row.get("eager_peak_bytes")),
        "peft_memory": _mib(row.get("peft_peak_bytes")),
        "ulp": worst(out_of(row), "ulp"),
        "grad_ulp": worst(gradients(row), "ulp"),
        "model_ulp": worst(row["parity"], "model_ulp"),
        "floor_ulp": worst(row["parity"], "floor_ulp"),
        "eager_ulp": worst(row["parity"], "eager_ulp"),
        "bound": worst(row["parity"], "bound"),
        "pass": "pass" if row["pass"] else "FAIL",
    }


def _mib(size: int | None) -> float | None:
    return None if size is None else size / MIB


def shown(value: Any) -> str:
    """A value as a reader wants it: its decimals below those of its neighbours, none as a dash."""
    if isinstance(value, float) and 0.1 <= abs(value) < 1e5:
        return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
    return text(value)


def columns(results: Results) -> list[Column]:
    """The columns that any row has something for."""
    values = [_values(row) for row in results.rows]
    return [c for c in COLUMNS if c.name in _NEEDED or any(v[c.name] is not None for v in values)]


def _cells(row: Row, which: Sequence[Column]) -> list[Cell]:
    values = _values(row)
    return [Cell(c, shown(values[c.name]), values[c.name] if c.number else None) for c in which]


def facts(results: Results) -> list[tuple[str, str]]:
    """The environment, as (name, value)."""
    found = [("device", text(results.environment.get("name")))]
    found += [(k, text(v)) for k, v in results.environment.items() if k != "name"]
    rates = {
        "copy_bytes_per_s": ("copy", 1e12, "TB/s"),
        "bf16_flop_per_s": ("bf16", 1e12, "TFLOP/s"),
    }
    for name, value in results.ceilings.items():
        label, unit, spelt = rates.get(name, (name, 1.0, ""))
        if isinstance(value, (int, float)):
            found.append((f"measured {label}", f"{value / unit:.3g} {spelt}".strip()))
    found += [("commit", results.short_commit)] if results.commit else []
    found += [("date", results.date)] if results.date else []
    found += [(f"unavailable: {n}", reason) for n, reason in results.unavailable.items()]
    return found


def summary(results: Results) -> list[str]:
    """What the rows come to, in sentences."""
    rows = results.rows
    failed = sum(not row["pass"] for row in rows)
    lines = [f"{len(rows)} rows, {failed} failed their parity check."]
    if not any(row["time_us"] for row in rows):
        lines.append("Kernels were simulated or not timed: accuracy only, no speed is claimed.")
    else:
        lines.append("A row that fails its parity check shows no speed.")
    timings = {
        name for row in rows for name, v in row.items() if "timing" in name and "events" in v
    }
    if timings:
        who = sorted(name.removesuffix("timing").strip("_") or "ours" for name in timings)
        lines.append(
            f"Some chains can't be captured: times include launch gaps ({', '.join(who)})."
        )
    return lines


# --------------------------------------------------------------------------------- charts


def charts(results: Results) -> list[dict[str, str]]:
    """For each op, its times over the floor, by backend; nothing without times."""
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Mark]]] = {}
    for row in results.rows:
        floor = row.get("floor_us")
        if row["time_us"] is None or not floor:
            continue
        group = groups.setdefault((row["op"], row["direction"]), {})
        marks = group.setdefault((row["case"], row["dtypes"]), [])
        times = {row["backend"]: row["time_us"]}
        times |= {n: row[f"{n}_us"] for n in ("eager", "compile") if row.get(f"{n}_us")}
        known = {mark.name for mark in marks}
        marks += [Mark(n, t / floor, t, floor) for n, t in times.items() if n not in known]
    style = styles(m.name for group in groups.values() for row in group.values() for m in row)
    return [
        {
            "title": f"{op}, {'forward and backward' if direction == BOTH else 'forward'}",
            "svg": chart({f"{case}, {dtypes}": m for (case, dtypes), m in rows.items()}, style),
        }
        for (op, direction), rows in groups.items()
    ]


# --------------------------------------------------------------------------------- output


def html(results: Results, title: str) -> str:
    """The page. It loads nothing, and its table is there without JavaScript."""
    from jinja2 import Environment, StrictUndefined

    which = columns(results)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("page.html.j2").read_text()
    return environment.from_string(template).render(
        title=title,
        source=results.source,
        summary=summary(results),
        facts=facts(results),
        charts=charts(results),
        columns=which,
        rows=[{"row": row, "cells": _cells(row, which)} for row in results.rows],
        failed=[
            (where(row), row["backend"], row["why"]) for row in results.rows if not row["pass"]
        ],
    )


def markdown(results: Results, title: str) -> str:
    """The same without charts."""
    which = columns(results)
    lines = [f"# {cell(title)}", "", *summary(results), ""]
    lines += markdown_table(["environment", "value"], facts(results))
    headings = [c.label + (":" if c.number else "") for c in which]
    table = [[c.shown for c in _cells(row, which)] for row in results.rows]
    lines += ["", *markdown_table(headings, table), ""]
    lines += [f"- {c.label}: {c.meaning}" for c in which]
    failed = [row for row in results.rows if not row["pass"]]
    if failed:
        lines += ["", "## Failed", ""]
        lines += [f"- {cell(where(r))}, {cell(r['backend'])}: {cell(r['why'])}" for r in failed]
    return "\n".join(lines) + "\n"
