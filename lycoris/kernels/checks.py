"""Checks of single arguments, for the ops and for public functions that look at one before them."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import UninitializedBuffer, UninitializedParameter


def check_tensor(op: str, name: str, value: Any) -> Tensor:
    """The value, if it is a dense tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Tensor):
        kind = "None" if value is None else type(value).__name__
        raise TypeError(f"{op}: {name} is {kind}; expected a tensor")
    if isinstance(value, UninitializedParameter | UninitializedBuffer):
        raise TypeError(f"{op}: {name} is an uninitialized parameter; expected a tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{op}: {name} is {kind}; expected a dense tensor")
    return value


def check_floating(op: str, name: str, value: Any) -> Tensor:
    """The value, if it is a dense tensor of real floating-point numbers.

    Raises:
        TypeError: it is not.
    """
    t = check_tensor(op, name, value)
    if not t.is_floating_point():
        raise TypeError(f"{op}: {name} is {t.dtype}; expected a floating-point tensor")
    return t


def check_integer(op: str, name: str, value: Any) -> int:
    """The value as an int, if it is an int or NumPy's.

    Raises:
        TypeError: it is not, or is a bool.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"{op}: {name} is {value!r}; expected an int")
        value = int(value)
    return value


def check_flag(op: str, name: str, value: Any) -> bool:
    """The value, if it is a bool: the string "False" would be taken for True.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{op}: {name} is {value!r}; expected True or False")
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
