"""Measures ops on a GPU for the record: device, host and peak memory beside eager and the floor.

    python bench/kernels/record.py --out bench/results/FILE.json [--op OP] [--backend NAME]

Each row is checked against the fp64 oracle first; one that fails shows no speed. The card's copy
bandwidth and matrix rate are measured in the same run, and the floor is the larger of the OpSpec's
bytes over the one and flops over the other.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import timing
import torch
from torch import Tensor

from lycoris.functional import OPS
from lycoris.kernels import report, testing
from lycoris.kernels.inputs import draw
from lycoris.kernels.report import Mix, to_json
from lycoris.kernels.spec import SPECS, Case

HOST_CALLS = 300
B16, F32 = torch.bfloat16, torch.float32
SHAPES: dict[str, list[tuple[Case, Mix]]] = {
    "lora_apply": [
        (Case(f"{t}x{i}x{o} r={r}", {"T": t, "I": i, "O": o, "r": r}, present=p), mix)
        for t, i, o, r, p, mix in [
            (8192, 4096, 4096, 16, (), (B16, B16)),
            (8192, 4096, 4096, 16, ("base",), (B16, B16)),
            (8192, 4096, 4096, 128, (), (B16, B16)),
            (8192, 4096, 4096, 16, (), (B16, F32)),
            (8192, 4096, 4096, 16, (), (F32, F32)),
            (4096, 4096, 11008, 16, (), (B16, B16)),
            (77, 1280, 1280, 4, (), (B16, B16)),
        ]
    ],
    "lora_weight": [
        (Case(f"{o}x{n} r={r}", {"O": o, "N": n, "r": r}, present=p), mix)
        for o, n, r, p, mix in [
            (4096, 4096, 16, (), (B16, B16)),
            (4096, 4096, 16, ("base",), (B16, B16)),
            (4096, 4096, 16, (), (F32, F32)),
            (1280, 1280, 4, (), (B16, B16)),
        ]
    ],
}


def ceilings(device: torch.device) -> dict[str, float]:
    """Copy bandwidth (bytes read and written a second) and bf16 matrix rate (flop/s)."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=B16, device=device) for _ in range(2))
    copies, products = [], []
    for _ in range(12):
        copies.append(timing.elapsed(lambda: target.copy_(source)))
        products.append(timing.elapsed(lambda: a @ b))
    return {
        "copy_bytes_per_s": 2 * source.numel() / median(copies) * 1e6,
        "bf16_flop_per_s": 2 * 8192**3 / median(products) * 1e6,
    }


def caller(op: str, case: Case, mix: Mix, backend: str, device: torch.device) -> dict[str, Any]:
    """Forward, and forward with backward, as plain calls on one set of operands."""
    spec = SPECS[op]
    inputs = draw(spec, case, mix, device)
    attributes = tuple(spec.named(case.attributes).values())
    leaves = [
        None if t is None else t.clone().requires_grad_(o.differentiable)
        for o, t in zip(spec.operands, inputs.operands, strict=True)
    ]
    wanted = [t for t in leaves if t is not None and t.requires_grad]

    def forward() -> Tensor:
        return OPS[op](leaves, inputs.scale, attributes=attributes, backend=backend)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(forward(), wanted, inputs.grad)

    return {"fwd": forward, "fwd_bwd": both}


def wall(run: Callable[[], object]) -> float:
    """Wall microseconds a call in a plain Python loop, as a training step pays them."""
    for _ in range(20):
        run()
    spans = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS // 5):
            run()
        torch.cuda.synchronize()
        spans.append((time.perf_counter() - start) / (HOST_CALLS // 5) * 1e6)
    return median(spans)


def peak(run: Callable[[], object]) -> int:
    """Bytes at the peak of one call, above what was there before; nothing may wait for the GPU."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(
    op: str, backend: str, case: Case, mix: Mix, device: torch.device, limits: dict[str, float]
) -> dict[str, Any]:
    """One row of the record."""
    spec = SPECS[op]
    rows = testing.check(op, backend, case, mix, device=device)
    inputs = draw(spec, case, mix, device)
    dims = spec.bind(inputs.operands, case.attributes).dims
    cost = spec.cost(dims, inputs.grad.element_size())
    floor = 1e6 * max(
        cost.bytes / limits["copy_bytes_per_s"], cost.flops / limits["bf16_flop_per_s"]
    )
    row: dict[str, Any] = {
        "op": op,
        "backend": backend,
        "case": case.name,
        "present": list(case.present),
        "sizes": dict(case.sizes),
        "dtypes": testing.mix_name(mix),
        "pass": all(r.passed for r in rows),
        "why": "; ".join(f"{r.tensor}: {r.why}" for r in rows if r.why),
        "parity": [r.as_dict() for r in rows],
        "floor_us": floor,
        "bytes": cost.bytes,
        "flops": cost.flops,
    }
    if not row["pass"]:
        return row
    row |= timing.compare(spec, backend, case, mix, device)
    row["times_floor"] = row["time_us"] / floor
    for name, which in ((backend, ""), ("torch", "eager_")):
        calls = caller(op, case, mix, name, device)
        for phase, run in calls.items():
            row[f"{which}wall_{phase}_us"] = wall(run)
        row[f"{which}peak_bytes"] = peak(calls["fwd_bwd"])
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, writes the record, prints a table; 1 where a row fails its parity."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="the JSON file")
    parser.add_argument("--op", action="append", choices=SHAPES)
    parser.add_argument("--backend", action="append")
    args = parser.parse_args(argv)
    device = torch.device("cuda", 0)
    limits = ceilings(device)
    backends, missing = report.pick_backends(args.backend, device)
    record: dict[str, Any] = {
        "command": " ".join(["python bench/kernels/record.py", *(argv or sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": report.versions() | {"name": torch.cuda.get_device_name(device)},
        "ceilings": limits,
        "unavailable": missing,
        "rows": [],
    }
    rows: list[dict[str, Any]] = record["rows"]
    for op in args.op or SHAPES:
        for case, mix in SHAPES[op]:
            for backend in backends:
                try:
                    row = measure(op, backend, case, mix, device, limits)
                except Exception as error:  # one broken kernel must not lose the other rows
                    row = {"op": op, "backend": backend, "case": case.name, "pass": False}
                    row |= {"dtypes": testing.mix_name(mix), "why": repr(error)[:400]}
                rows.append(row)
                # After every row: a run that is cut short keeps what it measured.
                Path(args.out).write_text(to_json(record) + "\n")
    columns = ("op", "case", "dtypes", "backend", "pass", "time_us", "floor_us", "eager_us",
               "wall_fwd_us", "eager_wall_fwd_us", "wall_fwd_bwd_us", "eager_wall_fwd_bwd_us",
               "peak_bytes", "eager_peak_bytes", "why")  # fmt: skip
    print(report.table(rows, columns))
    print(limits)
    return 0 if all(row["pass"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
