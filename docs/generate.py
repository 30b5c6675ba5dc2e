"""Writes docs/environment.md from the table of variables, and docs/ops.md from the OpSpecs.

Run ``python docs/generate.py`` after a change of either; a test asks that it was run.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from lycoris import functional
from lycoris.kernels.config import VARIABLES
from lycoris.kernels.explain import OPERAND_COLUMNS, describe, operand_rows
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

Everything in `lycoris.functional`; `python -m lycoris ops` prints the same of the ops. `mma`
operands are cast to the compute dtype, `wide` ones are read as they are
([precision.md](precision.md)); each has the dtype of one side, the model's or the adapter's.
In the formulas o is the elementwise product, s the scale, [ ] what is optional. Trailing ones of a
shape, as a 1x1 convolution has them, go without saying. `help(lycoris.functional.NAME)` has shapes,
errors and sources. The bound is the declared worst error in ULP against the fp64 oracle, 16-bit and
fp32 (that of fp32 grows with the reduction: [numerics.md](numerics.md)). How to use them in a
training loop: [training.md](training.md).

Two things look different in a call. A half of LoKr is one argument: `w1` is the matrix or the tuple
(w1_a, w1_b), `w2` the same, or (w2_a, w2_b, t2). And `oft_apply` and `boft_apply` take `y` of any
shape with `axis`: (..., O, B) is what a kernel sees, B being all that follows the axis (1 for a
linear layer).
"""


def _title(name: str) -> str:
    signature = str(inspect.signature(getattr(functional, name)))
    signature = re.sub(r": [^,()]*?(?=,|\)| =)| -> .*", "", signature.replace("'", "")).replace(
        " = ", "="
    )
    return f"\n## {name}\n\n`{name}{signature}`\n\n"


def _op(spec: OpSpec) -> str:
    about = describe(spec)
    bound = about["bound"]
    lines = [_title(spec.name) + f"`{spec.doc}`. "]
    if spec.conditions:
        lines.append(f"Sizes: {spec.conditions}. ")
    lines.append(f"Family `{spec.family}`; bound {bound['half']:g} and {bound['fp32']:g}.\n\n")
    lines.append(f"| {' | '.join(OPERAND_COLUMNS)} |\n{'|---' * len(OPERAND_COLUMNS)}|\n")
    for row in operand_rows(about):
        named = re.sub(r"^\w+", r"`\g<0>`", row["operand"])
        cells = [named, *(row[c] for c in OPERAND_COLUMNS[1:])]
        lines.append(re.sub(" +", " ", f"| {' | '.join(cells)} |\n"))
    return "".join(lines)


def _function(name: str) -> str:
    """A public function that no kernel serves, by its docstring's first two paragraphs."""
    text = inspect.getdoc(getattr(functional, name)) or ""
    about = "\n\n".join(text.split("\n\n")[:2])
    return _title(name) + about.replace("``", "`") + "\n"


def pages() -> dict[str, str]:
    """Every page by file name, as it should be."""
    rows = [f"| `{v.name}` | {v.default} | {v.values} | {v.meaning} |\n" for v in VARIABLES]
    listed = sorted(SPECS.values(), key=lambda spec: (spec.family, spec.name))
    helpers = [name for name in functional.__all__ if name not in {"OPS", *SPECS}]
    return {
        "environment.md": HEAD + "".join(rows) + TAIL,
        "ops.md": OPS_HEAD + "".join([*map(_op, listed), *map(_function, helpers)]),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
