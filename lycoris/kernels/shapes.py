"""Shape symbols: a short notation for operand shapes, checked and bound to sizes.

A shape is a row of tokens. ``O`` is one dimension; ``...`` (first only) any number of leading
dimensions, flattened into the symbol ``T``; ``N+`` (last only) one or more dimensions flattened
into ``N``; ``k*`` (last only) zero or more; ``1*`` (last only) trailing ones, which are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import cache

from torch import Tensor

LEADING = "T"
#: Elements that no output has: PyTorch counts a tensor's bytes in 63 bits, a workspace's too.
LARGEST = 2**56
#: The sizes each symbol stands for: one, or several for a group of dimensions.
Groups = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Binding:
    """The outcome of :func:`bind`.

    ``dims`` maps each symbol to its size; ``flat`` each operand (and ``out``) to the shape the
    kernels see; ``out_shape`` is the shape the caller sees.
    """

    dims: dict[str, int]
    flat: dict[str, tuple[int, ...]]
    out_shape: tuple[int, ...]


@cache
def parse(shape: str) -> tuple[tuple[str, str], ...]:
    """A shape as (symbol, kind) pairs: kind is ``one``, ``lead``, ``some``, ``any`` or ``ones``."""
    kinds = {"+": "some", "*": "any"}
    tokens = []
    for token in shape.split():
        if token == "...":
            tokens.append((LEADING, "lead"))
        elif token == "1*":
            tokens.append(("1", "ones"))
        else:
            tokens.append((token.rstrip("+*"), kinds.get(token[-1], "one")))
    return tuple(tokens)


def spell(shape: str) -> str:
    """A shape as a reader writes it: ``(..., I)``, ``(r, *N)``; trailing ones go without saying."""
    names = {"lead": "...", "one": "{}", "some": "*{}", "any": "*{}"}
    parts = [names[kind].format(symbol) for symbol, kind in parse(shape) if kind != "ones"]
    return "(" + ", ".join(parts) + ")"


def outermost_first(t: Tensor) -> list[int]:
    """A tensor's dimensions by falling strides, in their order where strides are equal."""
    strides = t.stride()
    order: list[int] = []
    for i in range(len(strides)):  # sorted() takes no symbolic strides, which a traced tensor has
        at = len(order)
        while at and strides[order[at - 1]] < strides[i]:
            at -= 1
        order.insert(at, i)
    return order


def _slices(op: str, name: str, shape: str, actual: tuple[int, ...]) -> list[tuple[int, ...]]:
    tokens = parse(shape)
    least = sum(kind in ("one", "some") for _, kind in tokens)
    flexible = any(kind != "one" for _, kind in tokens)
    if len(actual) < least or (len(actual) > least and not flexible):
        raise ValueError(f"{op}: {name} has shape {actual}; expected {spell(shape)}")
    if tokens[0][1] == "lead":
        cut = len(actual) - (len(tokens) - 1)
        return [actual[:cut], *((size,) for size in actual[cut:])]
    parts: list[tuple[int, ...]] = [(size,) for size in actual[: len(tokens) - 1]]
    rest = actual[len(tokens) - 1 :]
    return [*parts, rest]


def bind(
    op: str,
    shapes: Mapping[str, str],
    actual: Mapping[str, tuple[int, ...]],
    positive: tuple[str, ...] = (),
    derive: Callable[[Groups], Groups] | None = None,
    late: Set[str] = frozenset(),
) -> Binding:
    """Fits every operand's shape to its notation.

    Args:
        op: named in errors.
        shapes: the notation of every operand and of ``out``.
        actual: the operands' shapes.
        positive: symbols that may not be 0.
        derive: the symbols bound so far -> sizes that follow from them.
        late: operands that are bound after ``derive``, since they have what it derives.

    Raises:
        ValueError: naming the operand, its shape, and the sizes expected with where they
            came from.
    """
    groups: dict[str, tuple[int, ...]] = {}
    dims: dict[str, int] = {}
    source: dict[str, str] = {}
    flat: dict[str, tuple[int, ...]] = {}
    derived = derive is None
    # A stable sort: what is late comes last, the rest stays in order.
    for name, shape in sorted(shapes.items(), key=lambda item: item[0] in late or item[0] == "out"):
        if not derived and derive is not None and (name in late or name == "out"):
            for symbol, part in derive(groups).items():
                groups[symbol], dims[symbol] = part, math.prod(part)
                source[symbol] = "the other operands"
            derived = True
        if name not in actual:
            continue
        sizes = []
        for (symbol, kind), part in zip(
            parse(shape), _slices(op, name, shape, actual[name]), strict=True
        ):
            size = math.prod(part)
            if kind == "ones":
                if size != 1:
                    raise ValueError(
                        f"{op}: {name} has shape {actual[name]}; expected {spell(shape)}, "
                        "then only ones"
                    )
                continue
            sizes.append(size)
            known = groups.get(symbol)
            if known is None:
                groups[symbol], dims[symbol], source[symbol] = part, size, name
            elif known != part:
                # A flattened group fits its full form; the full form is the one kept.
                loose = kind == "some" and 1 in (len(known), len(part)) and size == dims[symbol]
                if not loose:
                    found = known[0] if len(known) == 1 else known
                    raise ValueError(
                        f"{op}: {name} has shape {actual[name]}; expected {spell(shape)} with "
                        f"{'...' if kind == 'lead' else symbol} = {found}, from {source[symbol]}"
                    )
                groups[symbol] = max(known, part, key=len)
        flat[name] = tuple(sizes)
    for symbol in positive:
        if dims.get(symbol) == 0:
            raise ValueError(
                f"{op}: {source[symbol]} has shape {actual[source[symbol]]}; "
                f"expected {symbol} to be at least 1"
            )
    out = [(symbol, groups[symbol]) for symbol, _ in parse(shapes["out"])]
    sizes_out = [size for _, part in out for size in part]
    # Expanded operands, or a padding, can ask for what no tensor counts; traced sizes are symbols.
    if all(type(size) is int for size in sizes_out) and math.prod(sizes_out) >= LARGEST:
        raise ValueError(
            f"{op}: the output would have shape {tuple(sizes_out)}; expected fewer than 2^56 "
            "elements"
        )
    flat["out"] = tuple(dims[symbol] for symbol, _ in out)
    return Binding(dims, flat, tuple(size for _, part in out for size in part))
