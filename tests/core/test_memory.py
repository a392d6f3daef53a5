"""Memory that is given back to the system, and what pinned memory takes of the host's."""

import numpy as np
import pytest
from support.processes import resident

from forerun.core import memory, pinned
from forerun.kv.cache import KVShape, LayerShape
from forerun.kv.kv_tiers import KVMemory, layer_bytes, min_device_bytes, place

PIECE, PIECES = 64 << 10, 1024
"""Bytes of an array that comes out of an arena, not out of a mapping of its own, and how many: 64 MiB."""


@pytest.mark.skipif(memory._trim() is None, reason="not the GNU library")
def test_what_was_freed_below_what_is_in_use_goes_back():
    memory.give_back()
    before = resident()
    held = [np.ones(PIECE, np.uint8) for _ in range(PIECES)]
    last = held[-1]
    held.clear()  # the allocator gives nothing back by itself, for the last piece lies above
    assert resident() - before > PIECE * PIECES // 2
    memory.give_back()
    assert resident() - before < PIECE * PIECES // 4
    assert last.all()


def test_a_system_without_it_keeps_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "_trim", lambda: None)
    memory.give_back()


GIB = 1 << 30


def test_large_memory_is_taken_as_it_is_and_other_sizes_as_powers_of_two(monkeypatch):
    """A torch that cannot take it so rounds all of it."""
    for exact, large in ((True, 3 * GIB), (False, 4 * GIB)):
        monkeypatch.setattr(pinned, "_set_up", lambda exact=exact: exact)
        assert pinned.pinned_size(3 * GIB) == large
        assert [pinned.pinned_size(size) for size in (0, 1, 4096, 5000)] == [0, 1, 4096, 8192]


def test_a_text_is_placed_by_what_its_memory_takes():
    shape, taken = KVShape({layer: LayerShape(2, 8, 8, 2) for layer in range(6)}), {"device": 0, "host": 0, "file": 0}
    one = layer_bytes(shape, 256)[0]
    memory = KVMemory(min_device_bytes(shape, 256), host=6 * one, folder="unused")
    for host_size, layers in ((int, 6), (lambda size: 1 << (size - 1).bit_length() if size else 0, 4)):
        placed = place(memory, taken, shape, 256, host_size=host_size)
        assert len(placed.layers["host"]) == layers and placed.nbytes["host"] == host_size(layers * one)
