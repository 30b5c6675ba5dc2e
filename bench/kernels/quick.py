"""Every path of every op x fp16, bf16, fp32 x every fused backend, in one table.

    python bench/kernels/quick.py [--op OP] [--backend NAME] [--dtype bf16] [--json FILE]

A path is one random case of an op for each set of optional operands and attributes. Each row is
scored in ULP against the fp64 oracle, under the rule of the parity suite. On a GPU each row is
also timed, forward and backward together, against the unfused PyTorch run beside it; a row that
fails its parity shows no time. On a CPU the kernels are simulated: accuracy only.

Exit status: 0 every row passed; 1 one did not; 2 usage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any

# Also from a checkout that is not installed, and ahead of another distribution's `lycoris`.
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

try:
    from rich import box
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
    from rich.table import Table
except ModuleNotFoundError:
    print("error: quick.py needs rich: pip install -e '.[bench]'", file=sys.stderr)
    raise SystemExit(2) from None

from lycoris.kernels import explain, report, testing
from lycoris.kernels.report import Mix, UsageError, to_json
from lycoris.kernels.spec import SPECS, Case, OpSpec

DTYPES = tuple((d, d) for d in (torch.float16, torch.bfloat16, torch.float32))
#: Field of a row -> heading of its column.
COLUMNS = {
    "op": "op",
    "path": "path",
    "shape": "shape",
    "dtypes": "dtypes",
    "backend": "backend",
    "time_us": "time",
    "eager_us": "eager",
    "ratio": "ratio",
    "ulp": "ULP out",
    "grad_ulp": "ULP grad",
    "model_ulp": "model",
    "floor_ulp": "floor",
    "eager_ulp": "eager ULP",
    "pass": "pass",
}
Row = dict[str, Any]


def paths(spec: OpSpec, device: str) -> list[Case]:
    """One random case for each set of optional operands and attributes, the first of each.

    On a GPU the sizes are those meant for one, where the op has any.
    """
    usable = [
        c
        for c in spec.cases
        if c.fill == "random" and c.layout == "contiguous" and c.device in ("any", device)
    ]
    sized = [c for c in usable if c.device == device] or usable
    found: dict[Any, Case] = {}
    for case in sized:
        found.setdefault((case.present, tuple(sorted(case.attributes.items()))), case)
    return list(found.values())


def run_row(op: str, backend: str, case: Case, mix: Mix, device: str, timed: bool) -> Row:
    """One row of the table; an error becomes a row that failed."""
    spec, where = SPECS[op], torch.device(device)
    try:
        scored = testing.check(op, backend, case, mix, device=where)
    except Exception as error:  # one broken kernel must not hide the other rows
        scored = [report.broken(op, backend, case, mix, where, error)]
    out = scored[0]
    worst = max(scored[1:], key=lambda r: r.ulp, default=None)
    row: Row = {
        "op": op,
        "backend": backend,
        "path": case.name,
        "shape": " ".join(
            f"{k}={'x'.join(map(str, v)) if isinstance(v, tuple) else v}"
            for k, v in case.sizes.items()
        ),
        "dtypes": testing.mix_name(mix),
        "device": device,
        "timing": "simulated",
        "time_us": None,
        "eager_us": None,
        "ratio": None,
        "ulp": out.ulp,
        "grad_ulp": worst.ulp if worst else None,
        "worst_grad": worst.tensor if worst else None,
        "model_ulp": out.model_ulp,
        "floor_ulp": out.floor_ulp,
        "eager_ulp": out.eager_ulp,
        "bound": out.bound,
        "pass": all(r.passed for r in scored),
        "why": "; ".join(f"{r.tensor}: {r.why}" for r in scored if r.why),
        "tensors": [r.as_dict() for r in scored],
    }
    if device == "cuda":
        row["timing"] = "not timed"
        if timed and row["pass"]:  # never a speed without its accuracy
            sys.path.insert(1, str(Path(__file__).parent))
            import timing

            row |= timing.compare(spec, backend, case, mix, where)
    return row


def _start_worker() -> None:
    torch.set_num_threads(1)  # the workers are as many as the cores


Chunk = tuple[str, str, Mix, list[Case]]


def _run_chunk(chunk: Chunk) -> list[Row]:
    op, backend, mix, cases = chunk
    return [run_row(op, backend, case, mix, "cpu", False) for case in cases]


def _run(chunks: Sequence[Chunk], device: str, jobs: int) -> Iterator[list[Row]]:
    """Rows as they get done: on a GPU here, one by one, for speed; on a CPU in processes."""
    if device == "cuda":
        for op, backend, mix, cases in chunks:
            for case in cases:
                yield [run_row(op, backend, case, mix, device, True)]
        return
    # Workers are spawned: a fork would copy the thread pools that torch has started. A chunk
    # stays in one process, because its rows share kernels that are built once there.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(chunks)), context, _start_worker) as pool:
        for done in as_completed([pool.submit(_run_chunk, chunk) for chunk in chunks]):
            yield done.result()


def plan_chunks(
    args: argparse.Namespace, device: torch.device, backends: Sequence[str]
) -> tuple[list[Chunk], dict[str, int]]:
    """What to run, and what backends decline by their own check, by reason.

    A backend the user named runs everything: what it declines then fails.
    """
    chunks: list[Chunk] = []
    declined: dict[str, int] = {}
    mixes = report.pick_mixes(args.dtype, DTYPES)
    for spec, backend, mix in product(report.pick_ops(args.op), backends, mixes):
        cases = []
        for case in paths(spec, device.type):
            refusal = explain.refusal(spec, backend, case, mix, device)
            if refusal and not args.backend:
                reason = f"{spec.name} on {backend}: {refusal}"
                declined[reason] = declined.get(reason, 0) + 1
            else:
                cases.append(case)
        if cases:
            chunks.append((spec.name, backend, mix, cases))
    return chunks, declined


def _in_order(rows: Sequence[Row], chunks: Sequence[Chunk], device: str) -> list[Row]:
    """By op and path, then dtypes, then backends: what is to be compared stands together."""
    places = {(op, c.name): i for op in SPECS for i, c in enumerate(paths(SPECS[op], device))}
    ops = list(SPECS)
    mixes = list(dict.fromkeys(testing.mix_name(mix) for _, _, mix, _ in chunks))
    backends = list(dict.fromkeys(backend for _, backend, _, _ in chunks))

    def key(row: Row) -> tuple[int, ...]:
        place = places[row["op"], row["path"]]
        mix, backend = mixes.index(row["dtypes"]), backends.index(row["backend"])
        return ops.index(row["op"]), place, mix, backend

    return sorted(rows, key=key)


def _print(console: Console, rows: Sequence[Row], notes: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name, heading in COLUMNS.items():
        number = name.endswith(("_us", "ulp", "ratio"))
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        shown = dict(row)
        if row["time_us"] is None:
            shown["time_us"] = row["timing"]
        else:
            # Not captured in a CUDA graph: the host's launch gaps are in the time.
            mark = "" if row["timing"] == "cuda graph" else " *"
            shown |= {k: f"{row[k]:.1f} us{mark}" for k in ("time_us", "eager_us")}
            shown["ratio"] = f"{row['ratio']:.2f}x"
        shown["pass"] = "pass" if row["pass"] else "FAIL"
        style = None if row["pass"] else "bold red"
        table.add_row(*(report.text(shown[name]) for name in COLUMNS), style=style)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
    for row in rows:
        if not row["pass"]:
            where = ", ".join(row[k] for k in ("op", "path", "dtypes", "backend"))
            console.print(f"FAIL {where}: {row['why']}", markup=False, highlight=False)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", help="only this op; may be repeated")
    parser.add_argument("--backend", action="append", help="default every fused one there is")
    parser.add_argument("--dtype", action="append", help="bf16 or bf16/fp32; may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default a GPU, if any")
    parser.add_argument("--json", metavar="FILE", help="write every row here, with its environment")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes on a CPU (default: cores)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and returns the exit status."""
    try:
        return _main(_parse(argv))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _main(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    device = report.pick_device(args.device)
    if args.json:
        report.check_target("--json", args.json)
    backends, missing = report.pick_backends(args.backend, device)
    chunks, declined = plan_chunks(args, device, backends)
    if args.jobs < 1:
        raise UsageError("--jobs: expected at least 1")
    if not chunks:
        reasons = [f"{n}: {r}" for n, r in missing.items()] + list(declined)
        raise UsageError(f"no backend can run any of this ({'; '.join(reasons)})")
    rows: list[Row] = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rows", total=sum(len(cases) for *_, cases in chunks))
        for found in _run(chunks, device.type, args.jobs):
            rows += found
            progress.advance(task, len(found))
    rows = _in_order(rows, chunks, device.type)
    environment = report.versions() | {"name": report.devices()[-1]["name"]}
    captured = {"cuda graph", "simulated", "not timed"}.issuperset(r["timing"] for r in rows)
    notes = [] if captured else ["* timed by events around a loop, launch gaps included"]
    notes += [f"unavailable: {name}: {reason}" for name, reason in missing.items()]
    notes += [f"declined {count} rows: {reason}" for reason, count in declined.items()]
    failed = sum(not row["pass"] for row in rows)
    seconds = time.perf_counter() - started
    where = "CPU, simulated: no speed is claimed" if device.type == "cpu" else environment["name"]
    notes.append(f"{len(rows)} rows, {failed} failed, {seconds:.0f} s ({where})")
    # A pipe has no width; rich would then cut the table to 80 columns.
    _print(Console(width=None if sys.stdout.isatty() else 200), rows, notes)
    if args.json:  # what can't be written has been shown
        text = to_json([r | {"environment": environment} for r in rows]) + "\n"
        report.write("--json", args.json, text)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
