"""Writes docs/environment.md from the table of variables, and docs/ops.md from the OpSpecs.

Run ``python docs/generate.py`` after a change of either; a test asks that it was run.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lycoris import functional
from lycoris.kernels.config import VARIABLES
from lycoris.kernels.explain import describe
from lycoris.kernels.spec import SPECS, OpSpec

FOLDER = Path(__file__).parent

HEAD = """\
# Environment variables

<!-- Written by docs/generate.py from lycoris/kernels/config.py; change it there. -->

Read when an op is called, not at import: setting one later takes effect. An empty value counts as
unset. `python -m lycoris info` prints the same table with the present values.

| variable | default | values | meaning |
|---|---|---|---|
"""

TAIL = """
`<OP>` is the op's public name in capitals. A backend is chosen by the most specific of: `backend=`
in the call, `with lycoris.use_backend(...)`, the op's variable, the variable for all ops, `auto`.
A backend that was named and can't serve a call raises `lycoris.BackendError` with the reason;
`auto` steps on to the next one and logs each reason once.
"""


OPS_HEAD = """\
# Ops

<!-- Written by docs/generate.py from the OpSpecs and the public functions; change them there. -->

Everything in `lycoris.functional` that kernels serve. `mma` operands are cast to the compute dtype,
`wide` ones are read as they are ([precision.md](precision.md)); trailing ones of a shape, as a 1x1
convolution has them, go without saying. `help(lycoris.functional.NAME)` has shapes, errors and
sources. The bound is the declared worst error in ULP against the fp64 oracle, 16-bit and fp32
(that of fp32 grows with the reduction: [numerics.md](numerics.md)). How to use them in a training
loop: [training.md](training.md).

Two things look different in a call. A half of LoKr is one argument: `w1` is the matrix or the tuple
(w1_a, w1_b), `w2` the same, or (w2_a, w2_b, t2). And `oft_apply` and `boft_apply` take `y` of any
shape with `axis`: (..., O, B) is what a kernel sees, B being all that follows the axis (1 for a
linear layer).
"""


def _op(spec: OpSpec) -> str:
    about = describe(spec)
    signature = str(inspect.signature(getattr(functional, spec.name)))
    signature = re.sub(r": [^,()]*?(?=,|\)| =)| -> .*", "", signature.replace("'", "")).replace(
        " = ", "="
    )
    bound = about["bound"]
    lines = [
        f"\n## {spec.name}\n\n`{spec.name}{signature}`\n\n`{spec.doc}`. Family `{spec.family}`; "
        f"bound {bound['half']:g} and {bound['fp32']:g}.\n\n"
        "| operand | shape | role | dtype of |\n|---|---|---|---|\n"
    ]
    for o in about["operands"]:
        shapes = "; ".join(f"{s} with {w}" if w else s for w, s in o["shapes"].items())
        name = f"`{o['name']}`" + (" (optional)" if o["optional"] else "")
        kind = o["role"] + ("" if o["differentiable"] else ", no gradient")
        side = "the model" if o["side"] == "data" else "the adapter"
        lines.append(f"| {name} | {shapes} | {kind} | {side} |\n")
    return "".join(lines)


def pages() -> dict[str, str]:
    """Every page by file name, as it should be."""
    rows = [f"| `{v.name}` | {v.default} | {v.values} | {v.meaning} |\n" for v in VARIABLES]
    listed = sorted(SPECS.values(), key=lambda spec: (spec.family, spec.name))
    return {
        "environment.md": HEAD + "".join(rows) + TAIL,
        "ops.md": OPS_HEAD + "".join(map(_op, listed)),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
