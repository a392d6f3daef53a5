"""Memory that is given back to the system."""

import os
from pathlib import Path

import numpy as np
import pytest

from forerun.core import memory

PIECE, PIECES = 64 << 10, 1024
"""Bytes of an array that comes out of an arena, not out of a mapping of its own, and how many: 64 MiB."""


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
