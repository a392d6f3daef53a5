"""A text's first keys and values, in memory that several caches share.

The memory is a file without a name (``memfd``). Each cache maps it privately: what it reads is there once, and what it
writes goes to pages of its own, which the operating system copies at the first write (copy on write). So a cache stays
one piece of memory, and no kernel has to know.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping

import torch

from forerun.caches.rows import Rows

ALIGNMENT = 256
"""Tokens to a multiple of which the capacity is rounded up, so that each head's keys begin on a page of their own."""
SPACE = 2
"""Tokens that the file has places for, as a multiple of what its first cache needs: the next text may be longer. This
is address space; memory is only taken by what is written."""


class Beginning:
    """Keys and values of the first ``length`` tokens of a text.

    Args:
        layers: by layer, keys ``[1, Hkv, >= length, d]`` and values ``[1, Hkv, >= length, dv]``.
        length: tokens.
        capacity: tokens that a cache which begins so will hold.
    """

    def __init__(self, layers: Mapping[int, Rows], length: int, capacity: int) -> None:
        self.length = length
        self.capacity = -(-SPACE * capacity // ALIGNMENT) * ALIGNMENT
        self._kinds = {layer: [(t.shape[1], t.shape[3], t.dtype) for t in rows] for layer, rows in layers.items()}
        first = next(iter(layers.values()))[0]
        self._file = _nameless() if first.device.type == "cpu" else None
        if self._file is None:  # then a cache copies it
            self._held = {layer: tuple(t[:, :, :length].clone() for t in rows) for layer, rows in layers.items()}
            return
        weakref.finalize(self, os.close, self._file)
        os.ftruncate(self._file, self._size)
        written = self._cut(torch.frombuffer(mmap.mmap(self._file, self._size), dtype=torch.uint8))
        for layer, rows in layers.items():
            for new, old in zip(written[layer], rows, strict=True):
                new[:, :, :length] = old[:, :, :length]

    def layers(self, capacity: int) -> dict[int, Rows]:
        """Rows for a cache of its own that begins so, with room for ``capacity`` tokens at least; on a CPU all layers
        lie in one piece, one behind the other, where nothing has to be copied."""
        if self._file is not None and capacity <= self.capacity:
            private = mmap.mmap(self._file, self._size, flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0))
            return self._cut(torch.frombuffer(private, dtype=torch.uint8))
        held = self._held if self._file is None else self.layers(0)
        grown = {layer: tuple(_room(t, capacity) for t in rows) for layer, rows in held.items()}
        for layer, rows in held.items():
            for new, old in zip(grown[layer], rows, strict=True):
                new[:, :, : self.length] = old[:, :, : self.length]
        return grown

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens' keys and values."""
        return self._token_bytes * self.length

    @property
    def _token_bytes(self) -> int:
        return sum(heads * width * kind.itemsize for both in self._kinds.values() for heads, width, kind in both)

    @property
    def _size(self) -> int:
        return self._token_bytes * self.capacity

    def _cut(self, memory: torch.Tensor) -> dict[int, Rows]:
        """The rows of each layer in a piece of memory."""
        layers, place = {}, 0
        for layer, both in self._kinds.items():
            rows = []
            for heads, width, kind in both:
                size = heads * self.capacity * width * kind.itemsize
                rows.append(memory[place : place + size].view(kind).view(1, heads, self.capacity, width))
                place += size
            layers[layer] = tuple(rows)
        return layers


def _nameless() -> int | None:
    """A file in memory; None on systems that have none."""
    return os.memfd_create("forerun", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else None


def _room(like: torch.Tensor, capacity: int) -> torch.Tensor:
    return like.new_empty(*like.shape[:2], capacity, like.shape[3])
