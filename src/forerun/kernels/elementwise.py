"""Elementwise functions that round alike wherever an element lies.

torch computes whole vectors by one formula and what is left over at the end of a thread's share by another, so an
element's bits depend on how many tokens share the pass. Here there is nothing left over: rows are filled up. A product
of complex numbers is written out in real ones, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad

SHARE = 64
"""A multiple of the numbers that torch computes at a time on any CPU."""
GRAIN = 32768
"""Numbers for a thread, at least, in most of torch's functions; some give all threads a share."""


def filled(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """``function(x, *rest, **options)``, each number by the formula for whole vectors."""
    flat = x.reshape(-1)
    missing = _size(len(flat)) - len(flat)
    if not missing:
        return function(flat, *rest, **options).view(x.shape)
    return function(pad(flat, (0, missing)), *rest, **options)[: len(flat)].view(x.shape)


def _size(count: int) -> int:
    """Numbers, ``count`` at least, of which every thread gets whole vectors, whether all have a share or only some."""
    size, threads = 0, torch.get_num_threads()
    while size < count:
        size = count
        whole = SHARE * math.lcm(threads, max(1, min(threads, math.ceil(size / GRAIN))))
        count = whole * math.ceil(size / whole)
    return size


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product of complex numbers, each part rounded operation by operation."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
