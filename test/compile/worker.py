"""Compiles the kernels of every registered op for GPUs that are not there, and reports on them.

    python test/compile/worker.py --backend triton --arch sm_90 [--json] [--op NAME]

It makes real calls, forward and backward, of the parity cases of every OpSpec, on operands that
have no memory and claim to be on a GPU. What core and the backend then ask of Triton and TileLang
is what a user's call would ask on that GPU; only the launch itself is left out. Everything in
builders.py replaces parts of torch, Triton and TileLang for the whole process, hence a process of
its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import torch
from builders import (
    ARCHS,
    GPU,
    MIXES,
    TARGETS,
    Build,
    Launch,
    OnStandIns,
    Request,
    StandIn,
    TileLang,
    Triton,
    pretend,
    watch,
)

from lycoris import functional  # noqa: F401  (registers every op)
from lycoris.kernels import testing
from lycoris.kernels.call import Call, resolve_policy
from lycoris.kernels.errors import BackendError
from lycoris.kernels.explain import blanks
from lycoris.kernels.report import table
from lycoris.kernels.spec import SPECS, Case, OpSpec

# ------------------------------------------------------------------------------ calls of every op


def calls(only: str | None) -> Iterator[tuple[OpSpec, Case, Any, bool]]:
    """Every op, case and dtype mix, the sizes that are made for a GPU first; scale as a tensor?"""
    for spec in SPECS.values():
        if only not in (None, spec.name):
            continue
        cases = [c for c in spec.cases if c.device != "cpu"]
        for case in sorted(cases, key=lambda c: c.device != "cuda"):
            for mix in MIXES:
                yield spec, case, mix, False
        # The scale may be a tensor in any call: once for each variant is enough.
        for case in {c.present: c for c in cases}.values():
            for mix in MIXES:
                yield spec, case, mix, True


def make_call(
    spec: OpSpec, case: Case, mix: Any, tensor_scale: bool, backend: str, place: Any
) -> str:
    """One call, forward and backward; why the backend declines it, or nothing."""
    operands = [None if t is None else t.as_subclass(StandIn) for t in blanks(spec, case, mix)]
    policy = resolve_policy(spec, operands, GPU, None, None)
    attributes = spec.named(case.attributes)
    place.op, place.case, place.mix = spec.name, case.name, testing.mix_name(mix)
    place.large = case.device == "cuda"
    place.aligned = all(size % 16 == 0 for size in spec.bind(operands, attributes).dims.values())
    try:
        call = Call(spec, operands, policy, GPU, attributes, backend)
    except BackendError as error:
        return str(error)
    # No backend serves ROCm yet, but launchers may suit their kernels to it: only from here on.
    torch.version.hip = place.hip
    with OnStandIns():
        scale = torch.ones((), device=GPU) if tensor_scale else case.scale
        place.phase = "forward"
        out, saved = call.forward(operands, scale)
        place.phase = "backward"
        needs = [
            o.differentiable and not o.additive and t is not None
            for o, t in zip(spec.operands, operands, strict=True)
        ]
        grad = torch.empty(out.shape, dtype=out.dtype, device=GPU)
        call.backward(grad, operands, saved, scale, needs)
    torch.version.hip = None
    return ""


# ------------------------------------------------------------------------------------------ main


def sample(requests: list[Request], level: int) -> list[Request]:
    """Few kernels that show every feature there is: the greedy cover, in the order asked for."""
    wanted = {id(r): r.features(level) for r in requests}
    left = set().union(*wanted.values())
    chosen = []
    while left:
        best = max(requests, key=lambda r: len(wanted[id(r)] & left))
        chosen.append(best)
        left -= wanted[id(best)]
    return chosen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", required=True, choices=("triton", "tilelang"))
    parser.add_argument("--arch", required=True, choices=ARCHS)
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--level", type=int, choices=(0, 1, 2), help="see builders.TARGETS")
    parser.add_argument("--list", action="store_true", help="only say what would be built")
    args = parser.parse_args()
    pretend(ARCHS[args.arch])
    requests: dict[Any, Request] = {}
    place = SimpleNamespace(hip="7.0" if args.arch.startswith("gfx") else None)

    def note(key: Any, compile: Callable[[], Any]) -> None:
        if key not in requests:
            launch: Launch = place.launch
            plan = launch.plan
            tile = (
                f"{plan.block_m}x{plan.block_n}x{plan.block_k} w{plan.num_warps} s{plan.num_stages}"
            )
            where = {k: getattr(place, k) for k in ("op", "phase", "case", "mix", "aligned")}
            build = Build(
                *(args.backend, args.arch, launch.kernel, " ".join(launch.dtypes), tile), **where
            )
            requests[key] = Request(launch, place.large, build, compile)

    watch(place)
    start = time.perf_counter()
    compiler = {"triton": Triton, "tilelang": TileLang}[args.backend](args.arch, note)
    declined = {make_call(*call, args.backend, place) for call in calls(args.op)} - {""}
    level = TARGETS[args.backend, args.arch] if args.level is None else args.level
    chosen = sample(list(requests.values()), level)
    if not args.list:
        compiler.compile(chosen)
    builds = [request.build for request in chosen]
    if args.json:
        report = {
            "distinct": len(requests),
            "ops": sorted({request.build.op for request in requests.values()}),
            "declined": sorted(declined),
            "seconds": round(time.perf_counter() - start, 1),
            "builds": [asdict(b) for b in builds],
        }
        print(json.dumps(report))
        return 0
    columns = [name for name in asdict(builds[0]) if name not in ("error", "code")]
    print(table([asdict(b) for b in builds], columns))
    for build in builds:
        if build.error:
            print(f"{build.kernel} {build.dtypes} {build.tile}: {build.error}")
    print(f"{len(requests)} distinct kernels, {len(builds)} built; declined: {declined or 'none'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
