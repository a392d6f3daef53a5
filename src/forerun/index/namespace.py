"""The outputs of one namespace, in arrays of a fixed size. When they are full, the oldest outputs are taken back.

An output goes as a whole, but a piece at a time, so that no step waits for a long one.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from forerun.core.tree import IntArray
from forerun.index import arrays, place
from forerun.index.arrays import Index
from forerun.index.history import UNWRITTEN
from forerun.index.pinned import Pin
from forerun.index.place import Place
from forerun.index.tables import CHUNK, SHARED

PIECE = 32
"""Tokens that are taken in, or taken back, at a time."""

PATIENCE = 4
"""Tokens that are taken back for each new one, once the namespace is full."""


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
        """Note that an output is finished; from now on it may be taken back."""
        if where.first_chunk:
            self.outputs.append(where.first_chunk)

    def make_room(self, tokens: int) -> None:
        """Take old outputs back while there is little room left, up to ``PATIENCE`` tokens for each new one."""
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
            self._leaving.ends[SHARED].position = self.outputs.popleft() * CHUNK
        done = place.withdraw(self.index, self._leaving, PIECE)
        if done:
            self._leaving = None
        return done

    def text(self, chunk: int) -> IntArray:
        """The tokens of an output by its first chunk."""
        parts = []
        while chunk:
            parts.append(self.index.text["tokens"][chunk])
            chunk = int(self.index.text["after"][chunk])
        tokens = np.concatenate(parts).astype(np.int64)
        written: IntArray = tokens[tokens != UNWRITTEN]
        return written
