"""Checksum tensors by samples of their memory, fast enough to check a model before every request.

Small tensors are read completely; of larger ones, pieces spread evenly over the rows and cycling through the columns.
This detects a change of all weights, of a column (in rows of up to 4 KiB), or of an eighth of the rows in sequence. It
may miss a change of a few single weights or rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from forerun.core.compiling import COMPILES, compiled
from forerun.core.tree import IntArray
from forerun.kernels.runtime.addresses import bytes_at, integers

READ_WHOLE_BYTES = 1 << 14
"""16 KiB: norms, biases, rotary frequencies."""
SAMPLED_PIECES = 64
SAMPLED_BYTES = 64
"""A cache line: reading less costs as much."""
_WORDS = SAMPLED_BYTES // 8
_PRIME, _ODD = np.uint64(0x9E3779B185EBCA87), np.uint64(0xC2B2AE3D27D4EB4F)
_LEFT, _RIGHT = np.uint64(31), np.uint64(33)


class MemorySample(NamedTuple):
    """A tensor's pieces: from ``offset`` in its storage, ``step`` bytes apart; the last ends with the tensor."""

    offset: int
    size: int
    step: int
    pieces: int


def sample_of(t: torch.Tensor) -> MemorySample:
    """Choose the pieces to read. Between rows with gaps, they may cover other memory of the storage."""
    width = t.element_size()
    strides = [(stride * width, count) for stride, count in zip(t.stride(), t.shape, strict=True) if count > 1]
    size = sum(stride * (count - 1) for stride, count in strides) + width if t.numel() else 0
    offset = int(t.storage_offset()) * width
    if size <= READ_WHOLE_BYTES:
        return MemorySample(offset, size, SAMPLED_BYTES, -(-size // SAMPLED_BYTES))
    lines = (size - SAMPLED_BYTES) // (SAMPLED_PIECES - 1) // SAMPLED_BYTES
    row = min((stride for stride, _ in strides if stride > width), default=SAMPLED_BYTES)
    while row % SAMPLED_BYTES == 0 and gcd(lines, row // SAMPLED_BYTES) > 1:  # else some columns would never be read
        lines -= 1
    return MemorySample(offset, size, lines * SAMPLED_BYTES, SAMPLED_PIECES)


def checksum(tensors: Sequence[torch.Tensor], table: IntArray | None = None) -> int:
    """Return a number that changes with the sampled bytes of dense tensors; ``table``: their ``address_table``."""
    if table is not None:
        return int(_digest(table))
    parts = [_pieces(each) for each in tensors if each.numel()]
    devices = {each.device for each in parts}
    return hash(tuple(_hash([each for each in parts if each.device == device]) for device in sorted(devices, key=str)))


def address_table(tensors: Sequence[torch.Tensor]) -> IntArray | None:
    """Return the places of the tensors' pieces, int64 ``[tensors, 4]``; None off the CPU, or if nothing is compiled."""
    if not COMPILES or any(each.device.type != "cpu" for each in tensors):
        return None
    rows = [(each.data_ptr(), *sample_of(each)[1:]) for each in tensors]
    return np.array(rows, np.int64).reshape(-1, 4)


def _hash(parts: Sequence[torch.Tensor]) -> int:
    return hash(torch.cat(list(parts)).cpu().numpy().tobytes())


def _pieces(t: torch.Tensor) -> torch.Tensor:
    offset, size, step, count = sample_of(t)
    memory = torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage(), offset, (size,), (1,))
    if size <= READ_WHOLE_BYTES:
        return memory
    return torch.cat(
        [memory.as_strided((count - 1, SAMPLED_BYTES), (step, 1), offset).reshape(-1), memory[-SAMPLED_BYTES:]]
    )


def _digest(table: IntArray) -> int:
    sums = np.zeros(_WORDS, np.int64)
    _add(table.ctypes.data, len(table), sums.ctypes.data)
    return hash(sums.tobytes())


@compiled
def _add(table: int, count: int, sums: int) -> None:
    """Mix the pieces of all tensors into ``_WORDS`` independent sums, which do not wait for each other."""
    state = integers(sums, _WORDS)
    for n in range(count):
        row = integers(table + 32 * n, 4)
        address, size, step, pieces = row[0], row[1], row[2], row[3]
        if size < SAMPLED_BYTES:
            rest = bytes_at(address, size)
            for i in range(size):
                state[0] = _mixed(state[0], rest[i])
            continue
        for piece in range(pieces):
            words = integers(address + (piece * step if piece < pieces - 1 else size - SAMPLED_BYTES), _WORDS)
            for i in range(_WORDS):
                state[i] = _mixed(state[i], words[i])


@compiled
def _mixed(state: np.int64, word: np.int64) -> np.int64:
    """Apply xxHash's round: each bit of the word reaches the state's high half, and the rotation brings it down."""
    total = np.uint64(state) + np.uint64(word) * _ODD
    return np.int64(((total << _LEFT) | (total >> _RIGHT)) * _PRIME)
