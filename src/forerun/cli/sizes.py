"""Sizes as people write them."""

from __future__ import annotations

import re

UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
    | {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}
)


def size_of(text: str, option: str) -> int:
    """Bytes of a size such as ``4GiB``, ``500MB`` or ``1048576``.

    Raises:
        ValueError: if it is none, with the option's name.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].upper() not in UNITS:
        raise ValueError(f"{option} is {text!r}; it must be a number of bytes, or such as 500MB or 4GiB")
    return int(float(found[1]) * UNITS[found[2].upper()])
