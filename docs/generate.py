"""Writes docs/environment.md from the table in lycoris/kernels/config.py.

Run ``python docs/generate.py`` after a change of that table; a test asks that it was run.
"""

from __future__ import annotations

from pathlib import Path

from lycoris.kernels.config import VARIABLES

TARGET = Path(__file__).with_name("environment.md")

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


def render() -> str:
    """The page as it should be."""
    rows = [f"| `{v.name}` | {v.default} | {v.values} | {v.meaning} |\n" for v in VARIABLES]
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    TARGET.write_text(render())
