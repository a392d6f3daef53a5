"""Keys and values of a shared prefix, in a file, in memory (``memfd``) or on disk (``kv_file.py``), that caches map.

Caches map it privately: unchanged pages exist once, and the operating system copies a page on a cache's first write. So
a cache stays contiguous, and kernels need no page table.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from forerun.kernels.attention.attention import Rows

ALIGNMENT = 256
"""Capacities are multiples of this many tokens, so that each head's keys start on a separate page."""
CAPACITY_FACTOR = 2
"""A file's capacity relative to its first cache's, as later sequences may be longer; unused space costs nothing."""

Kind = tuple[int, int, torch.dtype]
Tensors = Mapping[str, torch.Tensor]


def aligned(tokens: int) -> int:
    """Round a capacity up."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The order of a sequence's rows in memory: by layer, keys or values, and head, each for ``capacity`` tokens."""

    kinds: Mapping[int, tuple[Kind, ...]]
    capacity: int

    @classmethod
    def of(cls, layers: Mapping[int, Rows], capacity: int) -> Layout:
        """Return a layout for rows like these, with room for longer sequences than ``capacity``."""
        kinds = {layer: tuple((t.shape[1], t.shape[3], t.dtype) for t in rows) for layer, rows in layers.items()}
        return cls(kinds, aligned(CAPACITY_FACTOR * capacity))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(heads * width * kind.itemsize for both in self.kinds.values() for heads, width, kind in both)

    @property
    def size(self) -> int:
        """Bytes of the full capacity."""
        return self.token_bytes * self.capacity

    def cut(self, memory: torch.Tensor) -> dict[int, Rows]:
        """Return each layer's rows ``[1, heads, capacity, width]`` in memory, uint8 ``[size]``."""
        layers, place = {}, 0
        for layer, both in self.kinds.items():
            rows = []
            for heads, width, kind in both:
                size = heads * self.capacity * width * kind.itemsize
                rows.append(memory[place : place + size].view(kind).view(1, heads, self.capacity, width))
                place += size
            layers[layer] = tuple(rows)
        return layers


class SharedPrefix:
    """Keys and values of a sequence's first ``length`` tokens.

    Args:
        file: descriptor of the file that holds them, closed with this object.
        offset: where they start there, on a page.
        read_state: reads the saved state of a view by its name (``View.state_name``); None if there is none.
        written: tokens in the file, in a list that all prefixes in it share; None for a file that does not grow.
    """

    def __init__(
        self,
        layout: Layout,
        length: int,
        file: int | None,
        offset: int = 0,
        read_state: Callable[[str], Tensors | None] = lambda name: None,
        written: list[int] | None = None,
    ) -> None:
        self.layout, self.length, self._written = layout, length, written
        self.least = 0
        """Minimum length to start from: a shorter sequence would see released rows."""
        self._file, self._offset, self._read_state = file, offset, read_state
        self._states: dict[str, Tensors] = {}
        self._held: dict[int, Rows] = {}
        if file is not None:
            weakref.finalize(self, os.close, file)

    @classmethod
    def of(cls, layers: Mapping[int, Rows], length: int, capacity: int) -> SharedPrefix:
        """Copy keys and values ``[1, Hkv, >= length, d]`` into memory for caches of ``capacity`` tokens."""
        layout = Layout.of(layers, capacity)
        on_cpu = all(t.device.type == "cpu" for rows in layers.values() for t in rows)
        memory = SharedMemory.of(layout) if layers and on_cpu else None
        if memory is None:  # caches then copy it
            new = cls(layout, length, None)
            new._held = {layer: tuple(t[:, :, :length].clone() for t in rows) for layer, rows in layers.items()}
            return new
        for layer, rows in layers.items():
            for to, old in zip(memory.rows[layer], rows, strict=True):
                to[:, :, :length] = old[:, :, :length]
        return memory.prefix(length)

    def grown(self, layers: Mapping[int, Rows], length: int) -> SharedPrefix | None:
        """Return this prefix with the rows up to ``length`` of a cache that continues it, written to the same file, or
        None if it has no room or another continuation. Caches that started from it write their own rows before they
        read any there."""
        if self._written != [self.length] or length > self.layout.capacity:
            return None
        assert self._file is not None
        memory = torch.frombuffer(mmap.mmap(self._file, self.layout.size), dtype=torch.uint8)
        for layer, rows in self.layout.cut(memory).items():
            for to, new in zip(rows, layers[layer], strict=True):
                to[:, :, self.length : length] = new[:, :, self.length : length]
        self._written[0] = length
        return SharedPrefix(self.layout, length, os.dup(self._file), written=self._written)

    def layers(self, capacity: int) -> dict[int, Rows]:
        """Return private rows for a cache that starts from the prefix, with room for ``capacity`` tokens."""
        if self._file is not None and capacity <= self.layout.capacity:
            return self.layout.cut(map_private(self._file, self.layout.size, self._offset))
        held = self._held if self._file is None else self.layers(0)
        grown: dict[int, Rows] = {}
        for layer, rows in held.items():
            grown[layer] = tuple(t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in rows)
            for new, old in zip(grown[layer], rows, strict=True):
                count = min(self.length, capacity)  # a shorter sequence may start from a part of it
                new[:, :, :count] = old[:, :, :count]
        return grown

    def add_state(self, name: str, tensors: Tensors) -> None:
        """Keep a view's state under its name, unless there is one."""
        if tensors and not self.state(name):
            self._states[name] = tensors

    def state(self, name: str) -> Tensors | None:
        """Return the saved state of the view of this name, or None."""
        return self._states.get(name) or self._read_state(name)

    @property
    def nbytes(self) -> int:
        states = sum(t.nbytes for tensors in self._states.values() for t in tensors.values())
        return self.layout.token_bytes * self.length + states


class SharedMemory:
    """An unnamed file, closed with this object, with a sequence that other caches may start from without a copy. Forked
    processes do not inherit it: both would write into one sequence."""

    def __init__(self, layout: Layout, file: int) -> None:
        self.layout, self._file = layout, file
        weakref.finalize(self, os.close, file)
        os.ftruncate(file, layout.size)
        mapped = mmap.mmap(file, layout.size)
        mapped.madvise(mmap.MADV_DONTFORK)
        self.memory = torch.frombuffer(mapped, dtype=torch.uint8)
        """All of it, uint8; writes are visible to others."""
        self.rows = layout.cut(self.memory)

    @classmethod
    def of(cls, layout: Layout) -> SharedMemory | None:
        """Allocate memory with this layout; return None on systems without ``memfd``."""
        return cls(layout, os.memfd_create("forerun", os.MFD_CLOEXEC)) if hasattr(os, "memfd_create") else None

    def prefix(self, length: int) -> SharedPrefix:
        """Return the first ``length`` tokens; the cache that wrote them continues, too, and writes no more here."""
        return SharedPrefix(self.layout, length, os.dup(self._file), written=[length])


def map_private(file: int, size: int, offset: int) -> torch.Tensor:
    """Map a part of a file as memory, uint8 ``[size]``; writes stay in this process."""
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(file, size, flags=flags, offset=offset), dtype=torch.uint8)
