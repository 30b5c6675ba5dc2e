"""``python -m lycoris``: what is installed, what the ops are, which backend runs and why, parity,
comparisons and reports of results.

Exit status: 0 done; 1 a parity failure, a regression, or no backend can serve the call explained;
2 usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from ._version import __version__
from .bench.cli import add_commands
from .functional import OPS  # importing it registers every op
from .kernels import config, explain, registry, report, testing
from .kernels.call import resolve_policy
from .kernels.errors import BackendError
from .kernels.report import DTYPES, UsageError, table, to_json
from .kernels.spec import Case, OpSpec

# ---------------------------------------------------------------------------------- info


def _info(args: argparse.Namespace) -> int:
    backends: list[dict[str, Any]] = []
    for name in registry.names():
        reasons = {k: report.unavailable(name, torch.device(k)) for k in ("cpu", "cuda")}
        backends.append(
            {"name": name}
            | {k: {"available": not reason, "reason": reason} for k, reason in reasons.items()}
        )
    warnings = [
        f"the distribution {rival!r} also owns the import name 'lycoris', so that the two "
        f"overwrite each other's files: uninstall one, then reinstall the other"
        for rival in report.rivals()
    ]
    warnings += [f"no variable of that name is read: {name}" for name in config.unknown(OPS)]
    warnings += [
        f"{v['name']} names the unknown backend {v['value']!r}"
        for v in config.report(OPS)
        if v["name"].startswith(config.BACKEND.name)
        and v["set"] == "yes"
        and v["value"] not in ("", registry.AUTO, *registry.names())
    ]
    try:
        config.strict()
    except ValueError as error:
        warnings.append(str(error))
    versions, devices, variables = report.versions(), report.devices(), config.report(OPS)
    if args.json:
        found = {
            "versions": versions,
            "devices": devices,
            "backends": backends,
            "environment": variables,
            "warnings": warnings,
        }
        print(to_json(found))
        return 0
    packages = [{"package": k, "version": v} for k, v in versions.items()]
    print(table(packages, ("package", "version")))
    print("\n" + table(devices, ("device", "name", "capability")))
    spelt: list[dict[str, Any]] = [
        {"backend": b["name"]}
        | {k: "yes" if b[k]["available"] else f"no: {b[k]['reason']}" for k in ("cpu", "cuda")}
        for b in backends
    ]
    print("\n" + table(spelt, ("backend", "cpu", "cuda")))
    print("\n" + table(variables, ("name", "value", "set", "values", "meaning")))
    for warning in warnings:
        print(f"\nwarning: {warning}", file=sys.stderr)
    return 0


# ----------------------------------------------------------------------------------- ops


def _ops(args: argparse.Namespace) -> int:
    found = [explain.describe(spec) for spec in report.pick_ops(None)]
    if args.json:
        print(to_json(found))
        return 0
    for op in found:
        print(f"{op['name']}: {op['doc']}\n")
        print(table(explain.operand_rows(op), explain.OPERAND_COLUMNS) + "\n")
        if op["conditions"]:
            print(f"  sizes: {op['conditions']}")
        print(f"  backends: {', '.join(op['backends'])}")
        for name, reason in op["without"].items():
            print(f"  not {name}: {reason}")
        half, fp32 = op["bound"]["half"], op["bound"]["fp32"]
        print(f"  bound: {half:g} ULP in 16 bits; {fp32:g} * (2 + sqrt(min(K, 512))) in fp32\n")
    return 0


# ------------------------------------------------------------------------------- explain


def _parse_sizes(given: str) -> dict[str, int | tuple[int, ...]]:
    sizes: dict[str, int | tuple[int, ...]] = {}
    for part in filter(None, given.replace(" ", "").split(",")):
        symbol, _, value = part.partition("=")
        numbers = value.split("x")
        if not symbol or not all(n.isascii() and n.isdigit() and len(n) < 20 for n in numbers):
            raise UsageError(f"--shape: {part!r} is not SYMBOL=SIZE, like T=8192 or k=3x3")
        if symbol in sizes:
            raise UsageError(f"--shape: {symbol} is given twice")
        group = tuple(map(int, numbers))
        sizes[symbol] = group if len(group) > 1 else group[0]
    return sizes


def _others(
    spec: OpSpec, choice: registry.Choice | None, wanted: str, call: tuple[Any, ...]
) -> dict[str, str]:
    """Why each backend that was not chosen was not."""
    passed = dict(choice.passed_over) if choice else {}
    device: torch.device = call[-1]
    tried = registry.RANKING.get(device.type, registry.DEFAULT_RANKING)
    others = {}
    for name in registry.names():
        if choice and name == choice.backend:
            continue
        reason = passed.get(name) or report.incapable(name, spec, *call)
        if reason:
            others[name] = reason
        elif wanted != registry.AUTO:
            others[name] = f"able; {wanted} was named"
        elif name in tried:
            others[name] = "able; ranked lower"
        else:
            others[name] = f"able; auto never takes it on {device.type}"
    return others


def _explain(args: argparse.Namespace) -> int:
    (spec,) = report.pick_ops([args.op])
    device = report.pick_device(args.device)
    mix = (DTYPES[args.dtype], DTYPES[args.adapter_dtype or args.dtype])
    sizes = _parse_sizes(args.shape)
    wanted = None if args.present is None else [n for n in args.present.split(",") if n]
    present = explain.pick_variant(spec, sizes, wanted)
    choice, failure = None, ""
    try:
        operands = explain.blanks(spec, Case("", sizes, present=tuple(present)), mix)
    except (TypeError, RuntimeError) as error:
        # PyTorch counts no such sizes, and says it at length.
        raise UsageError(f"--shape: {args.shape}: no tensor has sizes like these") from error
    except ValueError as error:  # sizes that don't go together
        raise UsageError(f"--shape: {error}") from error
    try:
        binding = spec.bind(operands)
        policy = resolve_policy(spec, operands, device, None, None)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    call = (binding.dims, policy, device)
    try:
        choice = registry.select(spec.name, spec.family, *call, args.backend)
    except ValueError as error:  # a backend's name
        raise UsageError(str(error)) from error
    except BackendError as error:
        failure = str(error)
    except Exception as error:  # a plug-in's check may fail in any way
        failure = f"selection failed: {type(error).__name__}: {error}"
    asked = args.backend or config.backend_override(spec.name)
    found: dict[str, Any] = {
        "op": spec.name,
        "device": device.type,
        "operands": {
            o.name: list(t.shape)
            for o, t in zip(spec.operands, operands, strict=True)
            if t is not None
        },
        "dims": binding.dims,
        "backend": choice.backend if choice else None,
        "reason": choice.reason if choice else failure,
        "others": _others(spec, choice, asked, call),
        "policy": {
            "name": policy.name,
            "compute": str(policy.compute).removeprefix("torch."),
            "output": str(policy.output).removeprefix("torch."),
            "tf32": policy.tf32,
        },
        # A folded call runs fp32 kernels on operands already rounded to the compute dtype.
        "folded": spec.fold_with if spec.fold and spec.fold_with in present else None,
        "launches": explain.launches(spec, binding, operands, policy, device),
    }
    if args.json:
        print(to_json(found))
    else:
        _print_explained(found)
    return 0 if choice else 1


def _print_explained(found: dict[str, Any]) -> None:
    operands = ", ".join(f"{n} {tuple(s)}" for n, s in found["operands"].items())
    print(f"{found['op']} on {found['device']}: {operands}")
    print(f"backend: {found['backend'] or 'none'} ({found['reason']})")
    for name, reason in found["others"].items():
        print(f"  not {name}: {reason}")
    policy = found["policy"]
    print(
        f"policy: {policy['name']}: products in {policy['compute']}, sums in fp32, "
        f"output in {policy['output']}{', TF32 allowed' if policy['tf32'] else ''}"
    )
    if found["folded"]:
        print(f"  {found['folded']} is folded first, by PyTorch; the kernels then run in float32")
    if not found["launches"]:
        return
    used = found["backend"] and not report.is_fused(found["backend"])
    print("\nlaunches" + (" a fused backend would make:" if used else ":"))
    rows = [
        {
            "pass": launch["phase"],
            "kernel": launch["kernel"],
            "shapes": " ".join("x".join(map(str, s)) for s in launch["shapes"]),
            **launch["plan"],
        }
        for launch in found["launches"]
    ]
    print(table(rows, list(dict.fromkeys(c for row in rows for c in row))))


# -------------------------------------------------------------------------------- parity


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _show(rows: Sequence[testing.Row]) -> None:
    summary = testing.summarise(rows)
    if summary:
        print(table(summary, list(summary[0])))
    for row in rows:
        if not row.passed:
            where = f"{row.op}, {row.backend}, {row.case}, {row.dtypes}, {row.tensor}"
            print(f"FAIL {where}: {row.why}")
    sys.stdout.flush()


def _parity(args: argparse.Namespace) -> int:
    device = report.pick_device(args.device)
    if args.json:
        report.check_target("--json", args.json)
    if abs(args.seed) >= 2**63:
        raise UsageError("--seed: expected a number of at most 63 bits")
    specs = report.pick_ops(args.op)
    backends, missing = report.pick_backends(args.backend, device)
    mixes = report.pick_mixes(args.dtype, testing.MIXES)
    todo = [
        (spec, backend, case, mix)
        for spec in specs
        for backend in backends
        for case, mix in testing.cases(spec.name, device.type)
        if args.case in case.name and mix in mixes
    ]
    for name, reason in missing.items():
        print(f"unavailable: {name}: {reason}", file=sys.stderr)
    if not todo:
        raise UsageError("nothing to run: no available backend has such a case")
    rows: list[testing.Row] = []
    declined: dict[str, int] = {}
    group, shown = "", 0
    for done, (spec, backend, case, mix) in enumerate(todo, 1):
        if group != (group := f"{spec.name} on {backend}"):
            _progress("")
            _show(rows[shown:])  # a run that is interrupted has shown what it had
            shown = len(rows)
            print(f"{group} ({device.type})", file=sys.stderr, flush=True)
        _progress(f"[{done}/{len(todo)}] {group}: {case.name}, {testing.mix_name(mix)}")
        refusal = explain.refusal(spec, backend, case, mix, device)
        # A backend named must serve every case; otherwise it may decline one, if it says so.
        if refusal and not args.backend:
            declined[f"{group}: {refusal}"] = declined.get(f"{group}: {refusal}", 0) + 1
            continue
        try:
            rows += testing.check(spec.name, backend, case, mix, device=device, seed=args.seed)
        except Exception as error:  # one broken kernel must not hide the others' verdicts
            rows.append(report.broken(spec.name, backend, case, mix, device, error))
    _progress("")
    if shown:  # of several
        _show(rows[shown:])
        print("\nall of them:")
    _show(rows)
    for reason, count in declined.items():
        print(f"declined {count} cases: {reason}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} tensors, {failed} failed", flush=True)
    if args.json:  # what can't be written has been shown
        report.write("--json", args.json, to_json([row.as_dict() for row in rows]) + "\n")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------- main


def _parser() -> argparse.ArgumentParser:
    installed = Path(sys.argv[0]).stem == report.DISTRIBUTION
    program = report.DISTRIBUTION if installed else "python -m lycoris"
    parser = argparse.ArgumentParser(program, description=__doc__)
    version = f"{report.DISTRIBUTION} {__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="versions, devices, backends and variables")
    info.set_defaults(run=_info)
    ops = commands.add_parser("ops", help="every op with its operands, backends and bound")
    ops.set_defaults(run=_ops)
    why = commands.add_parser("explain", help="which backend a call would take, and why")
    why.set_defaults(run=_explain)
    for command in (info, ops, why):
        command.add_argument("--json", action="store_true", help="print JSON")
    why.add_argument("op", help="the op's name")
    why.add_argument(
        "--shape", default="", help="sizes of its shape symbols: T=8192,I=4096,O=4096,r=16 or k=3x3"
    )
    why.add_argument("--with", dest="present", help="optional operands given, like base,mid")
    why.add_argument("--dtype", default="bf16", choices=DTYPES, help="of the model (default bf16)")
    why.add_argument("--adapter-dtype", choices=DTYPES, help="of the adapter (default the same)")
    why.add_argument("--backend", help="as in backend= of a call")

    parity = commands.add_parser("parity", help="score backends in ULP against the fp64 oracle")
    parity.set_defaults(run=_parity)
    parity.add_argument("--op", action="append", help="only this op; may be repeated")
    parity.add_argument("--backend", action="append", help="default every fused one there is")
    parity.add_argument("--dtype", action="append", help="bf16 or bf16/fp32; may be repeated")
    parity.add_argument("--case", default="", help="only cases whose name contains this")
    parity.add_argument("--seed", type=int, default=0, help="of the operands (default 0)")
    parity.add_argument("--json", metavar="FILE", help="write every row here")
    for command in (why, parity):
        command.add_argument("--device", choices=("cpu", "cuda"), help="default a GPU, if any")
    add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def command() -> int:
    """The program: :func:`main` on whatever stdout there is."""
    if isinstance(sys.stdout, TextIOWrapper):  # None where it is closed
        # A name from a file may have characters that the terminal has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        status = 0  # whoever read it has seen enough
        if not isinstance(error, BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
            status = 2
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


if __name__ == "__main__":
    raise SystemExit(command())
