"""A log of rank 0's cache operations (``CACHE_OPERATIONS``), which the other ranks repeat on caches with other heads. A
sparse cache selects per head, so its selection needs no message. Log entries are JSON."""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.cache import CACHE_OPERATIONS, Cache
from forerun.kv.cache_kinds import CacheParts, made_of, parts_of
from forerun.kv.shared_prefix import SharedPrefix
from forerun.kv.streaming import Rotation

Entry = list[Any]


class RankMirror:
    """Rank 0's log since the last message."""

    def __init__(self) -> None:
        self._entries: deque[str] = deque()  # encoded at once, so that no entry keeps a cache alive
        self._numbers: weakref.WeakKeyDictionary[Cache | SharedPrefix, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def note(self, *entry: Any) -> None:
        self._entries.append(json.dumps(entry, default=self._plain))

    def message(self) -> str:
        """Return and remove all entries."""
        entries = []
        while self._entries:  # another thread may be adding some
            entries.append(self._entries.popleft())
        return f"[{','.join(entries)}]"

    def adopt(self, cache: Cache) -> None:
        """Create an equal cache on the other ranks, and log this one's operations from now on; raise ValueError for a
        cache that cannot be mirrored, or holds tokens."""
        if cache in self._numbers:
            return
        if cache.source is not None:
            self.adopt(cache.source)
        if cache.length:
            raise ValueError(f"this cache holds {cache.length} tokens that other ranks lack; use an empty one")
        kind, values = parts_of(cache)
        self.note("make", self._number(cache), kind, values)
        cache.log_to(self._log)

    def _log(self, cache: Cache, operation: str, arguments: tuple[Any, ...], result: object) -> None:
        number = self._number(result) if isinstance(result, SharedPrefix) else None
        self.note("do", self._number(cache), operation, arguments, number)

    def _number(self, thing: Cache | SharedPrefix) -> int:
        """Return the number of a cache or prefix on all ranks, valid until it is deleted here."""
        if thing not in self._numbers:
            self._numbers[thing] = self._next
            weakref.finalize(thing, self._entries.append, f'["drop",{self._next}]').atexit = False
            self._next += 1
        return self._numbers[thing]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Block):
            tree = value.tree
            return {"block": [value.pending.tolist(), tree.tokens.tolist(), tree.parents.tolist(), value.start]}
        if isinstance(value, np.generic):
            return value.item()
        known = isinstance(value, Hashable) and value in self._numbers
        return {"number": self._number(value)} if known else list(value)


class MirroredCaches:
    """Another rank's caches, which repeat rank 0's operations."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}

    def make(self, number: int, kind: str, parts: list[Any], rotation: Rotation | None) -> None:
        """Create a cache as rank 0 did."""
        self._things[number] = made_of(CacheParts(kind, [self.value(part) for part in parts]), rotation)

    def do(self, number: int, operation: str, arguments: list[Any], result: int | None) -> None:
        """Repeat an operation of rank 0."""
        if operation not in CACHE_OPERATIONS:
            raise ValueError(f"operation is {operation!r}; allowed are {', '.join(CACHE_OPERATIONS)}")
        made = getattr(self._things[number], operation)(*(self.value(each) for each in arguments))
        if result is not None:
            self._things[result] = made

    def drop(self, number: int) -> None:
        del self._things[number]

    def value(self, plain: Any) -> Any:
        """Decode an argument of an entry."""
        if isinstance(plain, dict) and "block" in plain:
            pending, tokens, parents, start = plain["block"]
            tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
            return Block(np.array(pending, np.int64), tree, start)
        return self._things[plain["number"]] if isinstance(plain, dict) else plain
