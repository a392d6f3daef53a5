"""The sequences in another engine's rows, step by step. Requests are recognised by their tokens alone.

Engines reuse rows, requests move between them, and request ids may be unknown. So a row continues a request only if its
tokens are exactly that request's followed by the new ones. Two requests with equal tokens are interchangeable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.core.tree import IntArray
from forerun.trie.arrays import Int32Array
from forerun.trie.trie import Trie
from forerun.trie.trie_store import checked

INITIAL_TOKENS = 256
"""Room after the prompt when a request begins; it grows."""


@dataclass(frozen=True)
class RowText:
    """A row at one step: token ids ``[n]``, of which the last ``new`` were added since the last step (0 in prefill)."""

    text: npt.NDArray[np.integer[Any]]
    new: int

    @property
    def earlier(self) -> npt.NDArray[np.integer[Any]]:
        """Tokens before the new ones."""
        return self.text[: len(self.text) - self.new]

    @property
    def added(self) -> IntArray:
        """The new tokens, int64."""
        return self.text[len(self.text) - self.new :].astype(np.int64)


class _FollowedRequest:
    def __init__(self, number: int, text: npt.NDArray[np.integer[Any]]) -> None:
        self.number, self._length = number, len(text)
        self._tokens: Int32Array = np.empty(len(text) + INITIAL_TOKENS, np.int32)
        self._tokens[: len(text)] = text

    def has_text(self, text: npt.NDArray[np.integer[Any]]) -> bool:
        return self._length == len(text) and np.array_equal(self._tokens[: self._length], text)

    def extend(self, tokens: IntArray) -> None:
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._length], np.empty(end, np.int32)])
        self._tokens[self._length : end] = tokens
        self._length = end


class FollowedTexts:
    """An engine's rows, indexed in a trie. A request that is missing at a step has ended. Requests ``share`` the
    namespace, or have private ones, dropped some time after their end."""

    def __init__(self, trie: Trie, namespace: str, share: bool = True) -> None:
        self._trie, self._namespace, self._share = trie, namespace, share
        self._requests: list[_FollowedRequest | None] = []
        self._begun = 0

    def __len__(self) -> int:
        return sum(request is not None for request in self._requests)

    def follow(self, rows: Sequence[RowText]) -> list[int | None]:
        """Index the new tokens of all rows of a step; return each row's request in the trie, or None for a row without
        a new token whose request is unknown. Raise ValueError, and index nothing, if a token is not in [0, 2**31)."""
        requests = self._continued(rows)
        for request, row in zip(requests, rows, strict=True):
            checked(row.added if request or not row.new else row.text.astype(np.int64))
        for old in self._requests:
            if old is not None and old not in requests:
                self._trie.finish(old.number)
        self._requests = [request or self._begin(row) for request, row in zip(requests, rows, strict=True)]
        for request, row in zip(self._requests, rows, strict=True):
            if request is not None and row.new:
                request.extend(row.added)
                self._trie.extend(request.number, row.added)
        return [None if request is None else request.number for request in self._requests]

    def end(self) -> None:
        self.follow([])

    def _continued(self, rows: Sequence[RowText]) -> list[_FollowedRequest | None]:
        """Find the request that each row continues, first the one in that row at the last step."""
        left = {place: request for place, request in enumerate(self._requests) if request is not None}
        continued: list[_FollowedRequest | None] = [None] * len(rows)
        for place, row in enumerate(rows):
            if place in left and left[place].has_text(row.earlier):
                continued[place] = left.pop(place)
        for place, row in enumerate(rows):
            if continued[place] is None:
                moved = next((old for old, request in left.items() if request.has_text(row.earlier)), None)
                continued[place] = None if moved is None else left.pop(moved)
        return continued

    def _begin(self, row: RowText) -> _FollowedRequest | None:
        if not row.new:
            return None
        self._begun += 1
        namespace = self._namespace if self._share else f"{self._namespace}/{self._begun}"
        self._trie.begin(self._begun, namespace, row.earlier.astype(np.int64), INITIAL_TOKENS)
        return _FollowedRequest(self._begun, row.earlier)
