"""The texts of an engine, step by step. They are told from each other by their content alone.

Engines use their rows again: a row may hold another request at the next step, and requests move between rows. What a
request is called may not be known at all. So a row goes on with what was learned of a request only if its text is,
token for token, the text of that request and then the tokens that came. Two requests of the same text are
interchangeable.
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

AT_FIRST = 256
"""Tokens that a request gets room for beyond its prompt when it begins; room for more is made when they come."""


@dataclass(frozen=True)
class Shown:
    """A row at a step.

    Attributes:
        text: token ids ``[n]``, its new tokens included.
        new: how many tokens at its end came since the last step; 0 while its prompt is still being read.
    """

    text: npt.NDArray[np.integer[Any]]
    new: int

    @property
    def known(self) -> npt.NDArray[np.integer[Any]]:
        """The text before its new tokens."""
        return self.text[: len(self.text) - self.new]

    @property
    def came(self) -> IntArray:
        """Its new tokens, int64 ``[new]``."""
        return self.text[len(self.text) - self.new :].astype(np.int64)


class _Followed:
    """A request under way, and its text."""

    def __init__(self, request: int, text: npt.NDArray[np.integer[Any]]) -> None:
        self.request, self._length = request, len(text)
        self._tokens: Int32Array = np.empty(len(text) + AT_FIRST, np.int32)
        self._tokens[: len(text)] = text

    def is_at(self, text: npt.NDArray[np.integer[Any]]) -> bool:
        """Whether this is its whole text."""
        return self._length == len(text) and np.array_equal(self._tokens[: self._length], text)

    def take(self, tokens: IntArray) -> None:
        """Its text goes on."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens[: self._length], np.empty(end, np.int32)])
        self._tokens[self._length : end] = tokens
        self._length = end


class Texts:
    """Keeps a trie along the rows of an engine. A request that is not shown at a step has ended.

    Args:
        trie: that learns.
        namespace: whose outputs they are.
        share: whether they have one namespace, or one each, which is dropped some time after its end.
    """

    def __init__(self, trie: Trie, namespace: str, share: bool = True) -> None:
        self._trie, self._namespace, self._share = trie, namespace, share
        self._rows: list[_Followed | None] = []
        self._begun = 0

    def __len__(self) -> int:
        """Requests under way."""
        return sum(row is not None for row in self._rows)

    def follow(self, shown: Sequence[Shown]) -> list[int | None]:
        """Learn what came.

        Args:
            shown: all rows of the step.

        Returns:
            By row, the number of its request in the trie; None for a row that has no new token and is not under way.

        Raises:
            ValueError: if a token is not in [0, 2**31); nothing is learned then.
        """
        rows = self._recognised(shown)
        for row, each in zip(rows, shown, strict=True):
            checked(each.came if row or not each.new else each.text.astype(np.int64))
        for old in self._rows:
            if old is not None and old not in rows:
                self._trie.finish(old.request)
        self._rows = [row or self._begin(each) for row, each in zip(rows, shown, strict=True)]
        for row, each in zip(self._rows, shown, strict=True):
            if row is not None and each.new:
                row.take(each.came)
                self._trie.extend(row.request, each.came)
        return [None if row is None else row.request for row in self._rows]

    def end(self) -> None:
        """All requests have ended."""
        self.follow([])

    def _recognised(self, shown: Sequence[Shown]) -> list[_Followed | None]:
        """Whose texts the rows go on with, first looked for where they were at the last step."""
        left = {place: row for place, row in enumerate(self._rows) if row is not None}
        found: list[_Followed | None] = [None] * len(shown)
        for place, each in enumerate(shown):
            if place in left and left[place].is_at(each.known):
                found[place] = left.pop(place)
        for place, each in enumerate(shown):
            if found[place] is None:
                moved = next((old for old, row in left.items() if row.is_at(each.known)), None)
                found[place] = None if moved is None else left.pop(moved)
        return found

    def _begin(self, each: Shown) -> _Followed | None:
        if not each.new:
            return None
        self._begun += 1
        namespace = self._namespace if self._share else f"{self._namespace}/{self._begun}"
        self._trie.begin(self._begun, namespace, each.known.astype(np.int64), AT_FIRST)
        return _Followed(self._begun, each.known)
