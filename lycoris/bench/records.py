"""Results from files, in one form whichever command wrote them.

Read are the matrix's JSON (``pytest bench --benchmark-json``), quick.py's, parity rows (``pytest
--parity-json``, ``python -m lycoris parity --json``), and objects with a list ``rows`` of the
matrix's rows.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..kernels.report import UsageError

Row = dict[str, Any]
#: Of a row: what it is about, whoever ran it.
KEY = ("kind", "op", "case", "dtypes", "direction")
BOTH = "fwd+bwd"
_TENSOR = ("tensor", "ulp", "bound", "why", "pass")


@dataclass
class Results:
    """Rows and where they come from.

    A row has ``op``, ``case``, ``dtypes``, ``backend``, ``direction``, ``kind`` (``op`` or
    ``layer``), ``pass``, ``why``, ``timing``, ``time_us`` (None where there is no speed) and
    ``parity``: the verdicts on its output and gradients.
    """

    source: str
    rows: list[Row]
    environment: dict[str, Any] = field(default_factory=dict)
    ceilings: dict[str, float] = field(default_factory=dict)
    commit: str = ""
    date: str = ""
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def backends(self) -> list[str]:
        """Every backend that has a row, in order of appearance."""
        return list(dict.fromkeys(row["backend"] for row in self.rows))

    @property
    def short_commit(self) -> str:
        """A hash in its first 10 digits; a commit described in words is left whole."""
        return self.commit[:10] if re.fullmatch("[0-9a-f]{40,64}", self.commit) else self.commit

    def only(self, backend: str) -> Results:
        """The rows of one backend.

        Raises:
            UsageError: it has none.
        """
        if backend not in self.backends:
            known = ", ".join(self.backends)
            raise UsageError(f"{self.source}: no row of backend {backend!r}; it has {known}")
        kept = [row for row in self.rows if row["backend"] == backend]
        return Results(self.source, kept, self.environment, self.ceilings, self.commit, self.date)


def load(path: str | Path) -> Results:
    """Reads one file.

    Raises:
        UsageError: it can't be read, or holds no results.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), parse_constant=_refuse)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: can't be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    try:
        _check_form(data)
        found = _parse(str(path), data)
        _check_facts(found)
    except _Malformed as error:
        raise UsageError(f"{path}: {error}; {_EXPECTED}") from error
    except KeyError as error:
        raise UsageError(f"{path}: no {error.args[0]!r} where it belongs; {_EXPECTED}") from error
    except (TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"{path}: a part of it is of another kind; {_EXPECTED}") from error
    if not found.rows:
        raise UsageError(f"{path}: no row in it")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON; what is not finite is null")


_EXPECTED = (
    "expected results of the benchmark matrix or of quick.py, or parity rows (python -m lycoris "
    "parity --json)"
)


class _Malformed(Exception):
    """What is wrong with what a file holds, in words for its user."""


def _check_form(data: Any) -> None:
    """Checks that the file is a list of rows, or an object that holds one.

    Raises:
        _Malformed: it is something else; the message says what.
    """
    if isinstance(data, Mapping):
        if "benchmarks" in data:
            rows = data["benchmarks"]
        elif "summary" in data and not isinstance(data.get("rows"), list):
            raise _Malformed("a summary without rows")
        elif "rows" in data:
            rows = data["rows"]
        else:
            raise _Malformed("an object without rows")
    else:
        rows = data
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise _Malformed("no list of rows")


def load_all(paths: Sequence[str | Path]) -> Results:
    """Several files of one device as one; of rows about the same, the last file's.

    Raises:
        UsageError: a file can't be read, or two are of different devices.
    """
    parts = [load(path) for path in paths]
    names = {part.environment.get("name") for part in parts}
    if len(names) > 1:
        raise UsageError(f"results of different devices: {', '.join(map(str, names))}")
    rows = {(key(row), row["backend"]): row for part in parts for row in part.rows}
    last = parts[-1]
    missing = {n: r for part in parts for n, r in part.unavailable.items()}
    return Results(
        source=", ".join(part.source for part in parts),
        rows=list(rows.values()),
        environment=last.environment,
        ceilings=last.ceilings,
        commit=last.commit,
        date=last.date,
        unavailable={n: r for n, r in missing.items() if n not in {k[1] for k in rows}},
    )


def key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a row is about, whoever ran it."""
    return tuple(row[name] for name in KEY)


def worst(parity: Iterable[Row], column: str) -> float | None:
    """The largest of a column over verdicts; None where none has it."""
    return max((p[column] for p in parity if p.get(column) is not None), default=None)


def out_of(row: Row) -> list[Row]:
    """The verdict on the output alone."""
    return [p for p in row["parity"] if p["tensor"] == "out"]


def gradients(row: Row) -> list[Row]:
    """The verdicts on the gradients."""
    return [p for p in row["parity"] if p["tensor"].startswith("grad")]


def _parse(source: str, data: Any) -> Results:
    if isinstance(data, list):
        if data and "tensor" in data[0]:
            return Results(source, _by_case(data))
        rows = [_whole(row | {"case": row["path"], "parity": row["tensors"]}) for row in data]
        return Results(source, rows, rows[0].get("environment", {}) if rows else {})
    if "benchmarks" in data:
        machine = data["machine_info"]["lycoris"]
        return Results(
            source,
            [_whole(entry["extra_info"]) for entry in data["benchmarks"]],
            machine["environment"],
            machine["ceilings"],
            (data.get("commit_info") or {}).get("id") or "",
            data.get("datetime", "")[:10],
            machine["unavailable"],
        )
    return Results(
        source,
        [_whole(row) for row in data["rows"]],
        data["environment"],
        data.get("ceilings", {}),
        data.get("commit", ""),
        data.get("date", ""),
        data.get("unavailable", {}),
    )


def _by_case(verdicts: list[Row]) -> list[Row]:
    """Parity rows, one a tensor, as rows of their cases."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for v in verdicts:
        groups.setdefault((v["op"], v["backend"], v["case"], v["dtypes"]), []).append(v)
    return [
        _whole(
            {k: members[0][k] for k in ("op", "backend", "case", "dtypes")}
            | {"device": members[0].get("device", "cpu"), "parity": members}
        )
        for members in groups.values()
    ]


def _whole(row: Row) -> Row:
    """A row with every column that readers take for granted."""
    parity = row["parity"]
    if not parity:
        raise _Malformed("a row has an empty parity; expected a verdict on its output at least")
    for verdict in parity:
        verdict.setdefault("pass", not verdict["why"])
        _check(verdict, _TENSOR)
        if verdict["pass"] and verdict["ulp"] is None:
            raise _Malformed(f"{verdict['tensor']} passes without an error in ulp")
    why = "; ".join(f"{p['tensor']}: {p['why']}" for p in parity if p["why"])
    present = "".join(f" +{name}" for name in row.get("present", ()))
    case = row["case"]
    whole: Row = {
        "kind": "op",
        "direction": BOTH,
        "pass": not why,
        "why": why,
        "time_us": None,
        "timing": "simulated" if row.get("device") == "cpu" else "not timed",
    } | row
    # Rows that differ in their optional operands alone are not the same.
    whole["case"] = case if present in case else case + present
    whole["parity"] = parity
    _check(whole, ("op", "backend", "dtypes"))
    return whole


_TEXT = {*KEY, "backend", "device", "timing", "why", "tensor"}
_NUMBERS = ("_us", "_bytes", "ulp", "rms", "bound", "times_floor")


def _check(found: Row, names: Iterable[str]) -> None:
    """Checks that a row or a verdict has these columns, and that readers can read all it has.

    Raises:
        _Malformed: a column is missing, or holds what it can't hold.
    """
    missing = [name for name in names if name not in found]
    if missing:
        raise _Malformed(f"a row without {', '.join(missing)}")
    for name, value in found.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in _TEXT and not isinstance(value, str):
            raise _Malformed(f"{name} is {value!r}; expected text")
        if name == "pass" and not isinstance(value, bool):
            raise _Malformed(f"{name} is {value!r}; expected true or false")
        if name.endswith(_NUMBERS) and not (number or value is None):
            raise _Malformed(f"{name} is {value!r}; expected a number or null")
        if number and abs(value) > sys.float_info.max:
            raise _Malformed(f"{name} is beyond a double's range")
        if number and name.endswith("_us") and not name.endswith("added_us") and value <= 0:
            raise _Malformed(f"{name} is {value}; expected a time above 0, or null")


def _check_facts(results: Results) -> None:
    """Checks what stands beside the rows.

    Raises:
        _Malformed: a part of it is of another kind.
    """
    for name, kind in (
        ("environment", dict),
        ("ceilings", dict),
        ("unavailable", dict),
        ("commit", str),
        ("date", str),
    ):
        value = getattr(results, name)
        if not isinstance(value, kind):
            wanted = "an object" if kind is dict else "text"
            raise _Malformed(f"{name} is {value!r}; expected {wanted}")
    device = results.environment.get("name")
    if device is not None and not isinstance(device, str):
        raise _Malformed(f"the environment's name is {device!r}; expected text")
    for name, rate in results.ceilings.items():
        _check({name: rate}, ())
        if not isinstance(rate, int | float) or rate <= 0:
            raise _Malformed(f"ceiling {name} is {rate!r}; expected a number above 0")
