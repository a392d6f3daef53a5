"""The outputs of one namespace, in arrays of fixed size; when full, the oldest are removed: entirely, but piece by
piece, so that no step waits for a long one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from forerun.core.array_handles import ArrayHandles
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.trie import arrays, text_cursor, token_store
from forerun.trie.arrays import Index
from forerun.trie.logistic_mixer import Mixer
from forerun.trie.tables import CHUNK_TOKENS, SHARED, TEXT_CHUNK
from forerun.trie.text_cursor import TextCursor

PIECE_TOKENS = 32
"""Tokens added, or removed, at a time."""

WITHDRAWN_PER_TOKEN = 4
"""Tokens removed per new one, once the namespace is full."""

MIN_GROWTH_BYTES = 1 << 16
"""Minimum growth of a bounded namespace: room for some 900 tokens."""


class Texts(NamedTuple):
    """Raw outputs, decoded later: rows of ``Index.text``, and each output's first chunk, int64, oldest first."""

    rows: RecordArray
    firsts: IntArray

    def read(self) -> list[IntArray]:
        out = np.empty(len(self.rows) * CHUNK_TOKENS, np.int32)
        ends = np.zeros(len(self.firsts), np.int64)
        token_store.collect(self.rows, self.firsts, out, ends)
        return np.split(out[: ends[-1]], ends[:-1]) if len(ends) else []


NO_TEXTS = Texts(np.zeros(0, TEXT_CHUNK), np.zeros(0, np.int64))


class Namespace:
    """An index of outputs.

    Args:
        capacity: maximum bytes of its arrays, at least 2**16.
        allow: called with the namespace and the bytes it requests; returns those granted. Without it, the full capacity
            is granted at once.

    Attributes:
        granted: bytes it may use, at most ``capacity``.
        outputs: first chunks of finished outputs, oldest first.
        changed: number of its last change; 0 before the first.
        mixer: private to the namespace, so that drafts reveal nothing about other namespaces.
    """

    def __init__(self, capacity: int, mixer: Mixer, allow: Callable[[Namespace, int], int] | None = None) -> None:
        self.capacity = capacity
        self.granted = capacity if allow is None else 0
        self.outputs: deque[int] = deque()
        self.writers: dict[int, TextCursor] = {}
        self.changed = 0
        self.mixer = mixer
        self.handles: tuple[ArrayHandles[Index], ArrayHandles[Mixer]] = (ArrayHandles(), ArrayHandles())
        self._allow = allow
        self.index = self._reserved = Index.for_bytes(capacity)
        self._resize()
        self._leaving: TextCursor | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._resize()

    def publish(self, tokens: IntArray) -> bool:
        """Add an output; return False, adding nothing, if it does not fit."""
        if len(tokens) > CHUNK_TOKENS * (len(self._reserved.text) - 1):  # evict nothing for an output that cannot stay
            return False
        cursor = TextCursor.start()
        for start in range(0, len(tokens), PIECE_TOKENS):
            piece = tokens[start : start + PIECE_TOKENS]
            self.make_room(len(piece))
            text_cursor.publish(self.index, cursor, piece)
        if cursor.cut:
            text_cursor.withdraw(self.index, _front(cursor.first_chunk), len(tokens) + 1)
            return False
        self._finish(cursor)
        return True

    def close(self, request_id: int) -> None:
        """Mark a request's output as finished: it may now be removed."""
        self._finish(self.writers.pop(request_id))

    def _finish(self, cursor: TextCursor) -> None:
        if cursor.first_chunk:
            self.outputs.append(cursor.first_chunk)

    def make_room(self, tokens: int) -> None:
        """Grow if little room is left, or else remove old outputs, up to ``WITHDRAWN_PER_TOKEN`` tokens per new one."""
        if self._allow is not None and self.granted < self.capacity and arrays.tight(self.index):
            self._grow(self._allow)
        patience = WITHDRAWN_PER_TOKEN * tokens
        while patience > 0 and (self._leaving or self.outputs) and arrays.tight(self.index):
            self._withdraw()
            patience -= PIECE_TOKENS
        self.index = self.index.with_hints()

    def _grow(self, allow: Callable[[Namespace, int], int]) -> None:
        allowed = allow(self, min(max(MIN_GROWTH_BYTES, self.granted // 8), self.capacity - self.granted))
        if allowed:
            self.granted += allowed
            self._resize()

    def _resize(self) -> None:
        """Limit the index to the granted bytes; its small arrays do not count."""
        self.index = self.index.within(self._reserved, self.granted)

    def withdraw(self) -> None:
        """Remove the oldest finished output, in time proportional to its length."""
        if self._leaving or self.outputs:
            while not self._withdraw():
                pass

    def _withdraw(self) -> bool:
        """Remove a piece of the oldest output; return whether it was the last."""
        if self._leaving is None:
            self._leaving = _front(self.outputs.popleft())
        done = text_cursor.withdraw(self.index, self._leaving, PIECE_TOKENS)
        if done:
            self._leaving = None
        return done

    def texts(self) -> Texts:
        """Copy the outputs, oldest first, those in progress last."""
        growing = (cursor.first_chunk for cursor in self.writers.values())
        firsts = [chunk for chunk in (*self.outputs, *growing) if chunk]
        top = int(self.index.state["chunk_top"].item())
        return Texts(self.index.text[:top].copy(), np.array(firsts, np.int64))


def _front(first_chunk: int) -> TextCursor:
    cursor = TextCursor.start()
    cursor.ends[SHARED].position = first_chunk * CHUNK_TOKENS
    return cursor
