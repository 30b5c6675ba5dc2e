"""Checks of single arguments, for the ops and for public functions that look at one before them."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor


def check_tensor(op: str, name: str, value: Any) -> Tensor:
    """The value, if it is a dense tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Tensor):
        kind = "None" if value is None else type(value).__name__
        raise TypeError(f"{op}: {name} is {kind}; expected a tensor")
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{op}: {name} is {value.layout}; expected a dense tensor")
    return value


def check_integer(op: str, name: str, value: Any) -> int:
    """The value, if it is an int.

    Raises:
        TypeError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} is {value!r}; expected an int")
    return value


def check_number(op: str, name: str, value: Any, wanted: str = "a number") -> float:
    """The value, if it is a real number; reads nothing that a traced graph would break on.

    Raises:
        TypeError: it is not, or is a bool.
        ValueError: it is a NaN.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{op}: {name} is {type(value).__name__}; expected {wanted}")
        value = float(value)
    if value != value:  # math.isnan would break a traced graph
        raise ValueError(f"{op}: {name} is NaN; expected a number")
    return value


def as_float(op: str, name: str, number: float) -> float:
    """A number as a float.

    Raises:
        ValueError: it is an int that no float reaches.
    """
    try:
        return float(number)
    except OverflowError:
        raise ValueError(f"{op}: {name} is beyond a float's range") from None
