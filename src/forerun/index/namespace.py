"""The outputs of one namespace under a hard capacity: the oldest go first, as whole outputs, a piece at a time."""

from __future__ import annotations

from collections import deque

import numpy as np

from forerun.core.tree import IntArray
from forerun.index import arrays, place
from forerun.index.arrays import AFTER, CHUNK, Index
from forerun.index.history import UNWRITTEN
from forerun.index.pinned import Pin
from forerun.index.place import Place

PIECE = 32
"""Tokens that are taken in, or back, between two looks at the capacity."""
PATIENCE = 4
"""Tokens that old outputs give up for each new one, once the namespace is full."""


class Namespace:
    """An index of outputs.

    Args:
        capacity: most bytes of its arrays.

    Attributes:
        index: what is shared.
        outputs: first chunks of the finished outputs, oldest first.
        pin: of the index.
    """

    def __init__(self, capacity: int) -> None:
        self.index = Index.for_bytes(capacity)
        self.outputs: deque[int] = deque()
        self.pin: Pin[Index] = Pin()
        self._leaving: Place | None = None

    def publish(self, tokens: IntArray) -> None:
        """Take in a whole output."""
        where = Place.start()
        for start in range(0, len(tokens), PIECE):
            piece = tokens[start : start + PIECE]
            self.make_room(len(piece))
            place.publish(self.index, where, piece)
        self.close(where)

    def close(self, where: Place) -> None:
        """An output is finished and may be given up."""
        if where.ends[3]:
            self.outputs.append(int(where.ends[3]))

    def make_room(self, tokens: int) -> None:
        """Let the oldest outputs go while there is little room left, a few tokens for each new one."""
        patience = PATIENCE * tokens
        while patience > 0 and (self._leaving or self.outputs) and arrays.tight(self.index):
            self._withdraw()
            patience -= PIECE
        self.index = self.index.with_hints()

    def withdraw(self) -> None:
        """Take the oldest finished output back, in time proportional to its length."""
        if self._leaving or self.outputs:
            while not self._withdraw():
                pass

    def _withdraw(self) -> bool:
        """Take a piece of the oldest output back; whether that was its last."""
        if self._leaving is None:
            self._leaving = Place.start()
            self._leaving.ends[1] = self.outputs.popleft() * CHUNK
        done = place.withdraw(self.index, self._leaving, PIECE)
        if done:
            self._leaving = None
        return done

    def text(self, chunk: int) -> IntArray:
        """The tokens of an output by its first chunk."""
        parts = []
        while chunk:
            parts.append(self.index.text[chunk, :CHUNK])
            chunk = int(self.index.text[chunk, AFTER])
        tokens = np.concatenate(parts).astype(np.int64)
        written: IntArray = tokens[tokens != UNWRITTEN]
        return written
