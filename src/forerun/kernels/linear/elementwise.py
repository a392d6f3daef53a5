"""Elementwise functions whose rounding does not depend on where an element is stored.

torch computes whole vectors by one formula, and the remainder of a thread's share by another. So an element's bits
depend on how many tokens share the pass. Here rows are padded, so there is no remainder. For the same reason a product
of complex numbers is written out in real numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

SHARE = 64
"""A multiple of torch's vector length, in numbers, on any CPU."""
GRAIN = 32768
"""The least count of numbers per thread in most of torch's functions; some functions use all threads at once."""


def filled(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """``function(x, *rest, **options)``, with every number computed by the formula for whole vectors."""
    flat = x.reshape(-1)
    missing = _size(len(flat)) - len(flat)
    if not missing:
        return function(flat, *rest, **options).view(x.shape)
    return function(pad(flat, (0, missing)), *rest, **options)[: len(flat)].view(x.shape)


def _size(count: int) -> int:
    """A padded count, at least ``count``, that gives every thread whole vectors, however many threads torch uses."""
    size, threads = 0, torch.get_num_threads()
    while size < count:
        size = count
        whole = SHARE * math.lcm(threads, max(1, min(threads, math.ceil(size / GRAIN))))
        count = whole * math.ceil(size / whole)
    return size


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of complex numbers, with every real operation rounded separately."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
