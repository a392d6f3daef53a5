"""A layer's keys and values in one pair of tensors that grows as it is written to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ROOM = 64
"""Places by which a buffer grows at least."""


class Buffer:
    """Keys and values by place, ``[1, Hkv, places, d]``; what was not written yet is undefined."""

    def __init__(self) -> None:
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, place: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put keys and values ``[1, Hkv, n, d]`` at a place."""
        end = place + k.shape[2]
        keys, values = self.reserve(k, v, end)
        keys[:, :, place:end] = k
        values[:, :, place:end] = v

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the places ``first`` to ``last`` (not included)."""
        assert self._pair is not None
        keys, values = self._pair
        return keys[:, :, first:last], values[:, :, first:last]

    def move(self, place: int, rows: Sequence[int]) -> None:
        """Copy rows, in order, to the places from ``place`` on."""
        assert self._pair is not None
        index = torch.tensor(rows, device=self._pair[0].device)
        for buffer in self._pair:
            buffer[:, :, place : place + len(rows)] = buffer.index_select(2, index)

    def reserve(self, k: torch.Tensor, v: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make room for ``size`` places of such keys and values, and return all there is."""
        if self._pair is None or self._pair[0].shape[2] < size:
            room = size + max(ROOM, size // 32)
            grown = (_room(k, room), _room(v, room))
            if self._pair is not None:
                for new, old in zip(grown, self._pair, strict=True):
                    new[:, :, : old.shape[2]] = old
            self._pair = grown
        return self._pair

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return 0 if self._pair is None else sum(t.nbytes for t in self._pair)


def _room(like: torch.Tensor, places: int) -> torch.Tensor:
    return like.new_empty(1, like.shape[1], places, like.shape[3])
