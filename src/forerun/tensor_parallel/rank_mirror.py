"""A log of rank 0's cache operations, which the other ranks repeat.

All caches change by the same few operations (``CACHE_OPERATIONS``). On rank 0 a cache logs them; on the other ranks a
cache of the same kind, with the keys and values of other heads, repeats them. A sparse cache chooses for each head by
itself, so its choice needs no message. A log entry is JSON.
"""

from __future__ import annotations

import functools
import json
import weakref
from abc import ABCMeta
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, NamedTuple, cast

import numpy as np

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.shared_prefix import SharedPrefix
from forerun.kv.streaming import Rotation, StreamingCache
from forerun.kv.view import View

CACHE_OPERATIONS = ("begin_with", "blank", "commit", "prepare", "share", "skip", "sync", "truncate", "verified")
"""Methods that change a cache between passes."""

Entry = list[Any]
"""A log entry: its name and its arguments."""


class RankMirror:
    """Rank 0's log since the last message."""

    def __init__(self) -> None:
        self._entries: deque[str] = deque()  # encoded at once, so that no entry keeps a cache alive
        self._numbers: weakref.WeakKeyDictionary[Cache | SharedPrefix, int] = weakref.WeakKeyDictionary()
        self._next = 0

    def note(self, *entry: Any) -> None:
        """Add an entry."""
        self._entries.append(json.dumps(entry, default=self._plain))

    def message(self) -> str:
        """All entries since the last call."""
        entries = []
        while self._entries:  # another thread may be adding some
            entries.append(self._entries.popleft())
        return f"[{','.join(entries)}]"

    def adopt(self, cache: Cache) -> None:
        """Make the same cache on the other ranks, and log its operations from now on.

        Raises:
            ValueError: for a kind of cache that cannot be mirrored, or one that holds tokens already.
        """
        if cache in self._numbers:
            return
        if isinstance(cache, View):
            self.adopt(cache.source)
        if cache.length:
            raise ValueError(f"this cache holds {cache.length} tokens that other ranks do not know; use an empty one")
        kind = next((name for name, known in _KINDS.items() if type(cache) is known.cache), None)
        if kind is None:
            allowed = ", ".join(_KINDS)
            raise ValueError(f"a {type(cache).__name__} cannot lie in several processes; allowed are {allowed}")
        self.note("make", self._number(cache), kind, _KINDS[kind].parts(cache))
        cache.__class__ = _logging_class(type(cache))
        cache.__dict__["_mirror"] = self

    def done(self, cache: Cache, operation: str, arguments: tuple[Any, ...], result: object) -> None:
        """Log an operation of a cache."""
        number = self._number(result) if isinstance(result, SharedPrefix) else None
        self.note("do", self._number(cache), operation, arguments, number)

    def _number(self, thing: Cache | SharedPrefix) -> int:
        """The number of a cache or prefix on all ranks, until it is deleted here."""
        if thing not in self._numbers:
            self._numbers[thing] = self._next
            weakref.finalize(thing, self._entries.append, f'["drop",{self._next}]').atexit = False
            self._next += 1
        return self._numbers[thing]

    def _plain(self, value: Any) -> Any:
        if isinstance(value, Block):
            tree = value.tree
            return {"block": [value.pending.tolist(), tree.tokens.tolist(), tree.parents.tolist(), value.start]}
        if isinstance(value, Cache | SharedPrefix):
            return {"number": self._number(value)}
        return value.item() if isinstance(value, np.generic) else list(value)


class MirroredCaches:
    """The caches of another rank, which repeats rank 0's operations."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}

    def make(self, number: int, kind: str, parts: list[Any], rotation: Rotation | None) -> None:
        """Make a cache as rank 0 did."""
        self._things[number] = _KINDS[kind].make([self.value(part) for part in parts], rotation)

    def do(self, number: int, operation: str, arguments: list[Any], result: int | None) -> None:
        """Repeat an operation of rank 0."""
        if operation not in CACHE_OPERATIONS:
            raise ValueError(f"operation is {operation!r}; allowed are {', '.join(CACHE_OPERATIONS)}")
        made = getattr(self._things[number], operation)(*(self.value(each) for each in arguments))
        if result is not None:
            self._things[result] = made

    def drop(self, number: int) -> None:
        """Delete a cache or prefix that rank 0 has deleted."""
        del self._things[number]

    def value(self, plain: Any) -> Any:
        """The argument that a part of an entry describes."""
        if isinstance(plain, dict) and "block" in plain:
            pending, tokens, parents, start = plain["block"]
            tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
            return Block(np.array(pending, np.int64), tree, start)
        return self._things[plain["number"]] if isinstance(plain, dict) else plain


class _CacheKind(NamedTuple):
    """A kind of cache; what it is made of on rank 0, in plain values; and how it is made of that on another rank."""

    cache: type[Cache]
    parts: Callable[[Any], list[Any]]
    make: Callable[[list[Any], Rotation | None], Cache]


def _streaming(parts: list[Any], rotation: Rotation | None) -> StreamingCache:
    window, sinks, slack, rotated = parts
    if rotated and rotation is None:
        raise ValueError("rank 0 knows the rotation of the model's keys, and this rank does not")
    return StreamingCache(window, sinks, slack, rotation if rotated else None)


_KINDS = {
    "full": _CacheKind(
        FullCache, lambda cache: [cache.capacity, False, cache.releases], lambda parts, rotation: FullCache(*parts)
    ),
    "retrieval": _CacheKind(
        RetrievalCache,
        lambda cache: [cache.source, *astuple(cache.config)],
        lambda parts, rotation: RetrievalCache(parts[0], RetrievalConfig(*parts[1:])),
    ),
    "low-rank": _CacheKind(
        LowRankCache,
        lambda cache: [cache.source, *astuple(cache.config)],
        lambda parts, rotation: LowRankCache(parts[0], LowRankConfig(*parts[1:])),
    ),
    "streaming": _CacheKind(
        StreamingCache,
        lambda cache: [cache.window, cache.sinks, cache.slack, cache.rotation is not None],
        _streaming,
    ),
}


@functools.cache
def _logging_class(kind: type[Cache]) -> type[Cache]:
    """The same class, with operations that are logged."""
    logged = {name: _logged(getattr(kind, name)) for name in CACHE_OPERATIONS if hasattr(kind, name)}
    return cast(type[Cache], ABCMeta(kind.__name__, (kind,), logged))


def _logged(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, which is logged once it has succeeded; operations inside it are not."""

    @functools.wraps(operation)
    def run(self: Any, *arguments: Any) -> Any:
        mirror, self._mirror = self._mirror, None
        try:
            result = operation(self, *arguments)
        finally:
            self._mirror = mirror
        if mirror is not None:
            mirror.done(self, operation.__name__, arguments, result)
        return result

    return run
