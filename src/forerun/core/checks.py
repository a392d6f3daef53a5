"""Type checks of arguments. Errors name the field, the value and what is allowed."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def check_integer(name: str, value: Any, least: int | None = None, *, optional: bool = False) -> None:
    """Raise TypeError unless the value is an integer, and ValueError if it is below ``least``."""
    _check_kind(name, value, Integral, "an integer", optional)
    if least is not None and value is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def check_number(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise TypeError unless the value is a real number."""
    _check_kind(name, value, Real, "a number", optional)


def check_text(name: str, value: Any, *, optional: bool = False) -> None:
    """Raise TypeError unless the value is a string."""
    _check_kind(name, value, str, "a text", optional)


def _check_kind(name: str, value: Any, kind: type, words: str, optional: bool) -> None:
    if not (isinstance(value, kind) or (optional and value is None)):
        raise TypeError(f"{name} is {value!r}; it must be {words}{' or None' if optional else ''}")
