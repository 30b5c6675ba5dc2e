"""The dtype policy: which dtype a call computes in, and which it stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)


@dataclass(frozen=True, slots=True)
class Policy:
    """The dtypes of one call.

    ``compute`` is the dtype matrix operands are cast to (accumulation is fp32 always), ``output``
    the dtype the fp32 accumulator is stored in. ``tf32`` is true only where the user opted in
    to reduced-precision fp32 products.
    """

    compute: torch.dtype
    output: torch.dtype
    tf32: bool = False

    @property
    def name(self) -> str:
        """``mma16``, ``fp32`` or ``fp64``."""
        return {torch.float32: "fp32", torch.float64: "fp64"}.get(self.compute, "mma16")


def tf32_allowed() -> bool:
    """Whether the user opted in to TF32 products, through either of PyTorch's two settings."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # the newer per-backend setting is in use; the older one can't be read
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


def autocast_dtype(device: str) -> torch.dtype | None:
    """The dtype of the enclosing ``torch.autocast`` region of a device type, if there is one."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def resolve(
    op: str,
    operands: Sequence[tuple[str, torch.dtype, str]],
    *,
    out_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    device: str = "cpu",
) -> Policy:
    """The policy of one call.

    Args:
        op: the op's name, for messages.
        operands: (name, dtype, role) of every operand present.
        out_dtype: overrides the stored dtype.
        autocast: the dtype of the enclosing ``torch.autocast`` region; it replaces the dtype of
            the ``mma`` operands, as it does for ``F.linear``.
        device: the device type.

    Raises:
        TypeError: an operand or ``out_dtype`` has a dtype outside the policy, or fp16 meets
            bf16; the message names the operands.
    """
    wanted = "float16, bfloat16 or float32 (or float64 throughout, on the torch backend)"
    for name, dtype, _ in operands:
        if dtype not in FLOATS and dtype is not torch.float64:
            raise TypeError(f"{op}: {name} is {_short(dtype)}; expected {wanted}")
    seen = [
        (name, autocast if autocast and role == "mma" and dtype is not torch.float64 else dtype)
        for name, dtype, role in operands
    ]
    doubles = [name for name, dtype in seen if dtype is torch.float64]
    if doubles and len(doubles) < len(seen):
        others = ", ".join(f"{n} is {_short(d)}" for n, d in seen if d is not torch.float64)
        raise TypeError(
            f"{op}: {', '.join(doubles)} is float64 but {others}; float64 is taken all through or "
            "not at all"
        )
    halves: dict[torch.dtype, list[str]] = {}
    for name, dtype in seen:
        if dtype in HALF:
            halves.setdefault(dtype, []).append(name)
    if out_dtype is not None:
        allowed = (torch.float64,) if doubles else FLOATS
        if out_dtype not in allowed:
            raise TypeError(
                f"{op}: out_dtype is {_short(out_dtype)}; expected "
                + " or ".join(map(_short, allowed))
            )
        if out_dtype in HALF:
            halves.setdefault(out_dtype, []).append("out_dtype")
    if len(halves) > 1:
        parts = " but ".join(f"{', '.join(n)} is {_short(d)}" for d, n in halves.items())
        raise TypeError(f"{op}: {parts}; float16 and bfloat16 can't meet in one call")
    dtypes = [dtype for _, dtype in seen]
    operand_half = next((d for d in dtypes if d in HALF), None)
    compute = operand_half or dtypes[0]
    output = out_dtype or reduce(torch.promote_types, dtypes)
    tf32 = device == "cuda" and compute is torch.float32 and tf32_allowed()
    return Policy(compute, output, tf32)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
