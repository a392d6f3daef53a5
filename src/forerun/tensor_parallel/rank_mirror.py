"""What rank 0 does to caches, as a log that the other ranks follow.

Caches are made of the same few operations everywhere (``OPERATIONS``). On rank 0 a cache notes them down; on the other
ranks a cache of the same kind, with the keys and values of other heads, does the same. A sparse cache chooses for each
head by itself, so it needs no word from others. A log entry is JSON; what it means is in ``MirroredCache``.
"""

from __future__ import annotations

import functools
import json
import weakref
from abc import ABCMeta
from collections import deque
from collections.abc import Callable
from dataclasses import astuple
from typing import Any, cast

import numpy as np

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.heavy_hitter import HeavyHitterCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.rerotation import Rotation
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.shared_prefix import SharedPrefix
from forerun.kv.sparse_view import View
from forerun.kv.streaming import StreamingCache
from forerun.kv.topk_cache import TopKCache

OPERATIONS = ("begin_with", "blank", "commit", "prepare", "share", "skip", "sync", "truncate", "verified")
"""What changes a cache between passes."""

Entry = list[Any]
"""A log entry: its name, and what belongs to it."""


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
        """Let the other ranks have this cache, too, and note from now on what is done to it.

        Raises:
            ValueError: for a cache of a kind that cannot be, or one that holds tokens already.
        """
        if cache in self._numbers:
            return
        if isinstance(cache, View):
            self.adopt(cache.source)
        if cache.length:
            raise ValueError(f"this cache holds {cache.length} tokens that other ranks do not know; use an empty one")
        kind = _kind(cache)
        self.note("make", self._number(cache), kind, _parts(cache))
        cache.__class__ = _noting(type(cache))
        cache.__dict__["_mirror"] = self

    def done(self, cache: Cache, operation: str, arguments: tuple[Any, ...], result: object) -> None:
        """Note what was done to a cache."""
        number = self._number(result) if isinstance(result, SharedPrefix) else None
        self.note("do", self._number(cache), operation, arguments, number)

    def _number(self, thing: Cache | SharedPrefix) -> int:
        """By which the other ranks know it, until it is gone here."""
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


class MirroredCache:
    """Another rank's caches."""

    def __init__(self) -> None:
        self._things: dict[int, Any] = {}

    def read(self, message: str) -> list[Entry]:
        """A message's entries."""
        entries: list[Entry] = json.loads(message)
        return entries

    def make(self, number: int, kind: str, parts: list[Any], rotation: Rotation | None) -> None:
        """A cache as rank 0 made one."""
        self._things[number] = _MAKE[kind]([self.value(part) for part in parts], rotation)

    def do(self, number: int, operation: str, arguments: list[Any], result: int | None) -> None:
        """What rank 0 did to a cache."""
        if operation not in OPERATIONS:
            raise ValueError(f"operation is {operation!r}; allowed are {', '.join(OPERATIONS)}")
        found = getattr(self._things[number], operation)(*(self.value(each) for each in arguments))
        if result is not None:
            self._things[result] = found

    def drop(self, number: int) -> None:
        """Rank 0 has it no more."""
        del self._things[number]

    def value(self, plain: Any) -> Any:
        """What a part of an entry stands for."""
        if isinstance(plain, dict) and "block" in plain:
            pending, tokens, parents, start = plain["block"]
            tree = DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))
            return Block(np.array(pending, np.int64), tree, start)
        return self._things[plain["number"]] if isinstance(plain, dict) else plain


def _kind(cache: Cache) -> str:
    kind = next((name for name, known in _KINDS.items() if type(cache) is known), None)
    if kind is None:
        raise ValueError(f"a {type(cache).__name__} cannot lie in several processes; allowed are {', '.join(_KINDS)}")
    return kind


def _parts(cache: Any) -> list[Any]:
    """What ``_MAKE`` makes the same cache of."""
    match cache:
        case RetrievalCache() | LowRankCache():
            return [cache.source, *astuple(cache.config)]
        case TopKCache():
            return [cache.source, cache.budget]
        case StreamingCache():
            return [cache.window, cache.sinks, cache.slack, cache.rotation is not None]
        case HeavyHitterCache():
            return [cache.heavy, cache.recent, cache.slack]
    return [cache.capacity]


_KINDS: dict[str, type[Cache]] = {
    "full": FullCache,
    "retrieval": RetrievalCache,
    "low-rank": LowRankCache,
    "topk": TopKCache,
    "streaming": StreamingCache,
    "h2o": HeavyHitterCache,
}

_MAKE: dict[str, Callable[[list[Any], Rotation | None], Cache]] = {
    "full": lambda parts, rotation: FullCache(*parts),
    "retrieval": lambda parts, rotation: RetrievalCache(parts[0], RetrievalConfig(*parts[1:])),
    "low-rank": lambda parts, rotation: LowRankCache(parts[0], LowRankConfig(*parts[1:])),
    "topk": lambda parts, rotation: TopKCache(*parts),
    "streaming": lambda parts, rotation: _streaming(parts, rotation),
    "h2o": lambda parts, rotation: HeavyHitterCache(*parts),
}


def _streaming(parts: list[Any], rotation: Rotation | None) -> StreamingCache:
    window, sinks, slack, rotated = parts
    if rotated and rotation is None:
        raise ValueError("rank 0 found how the model's keys rotate, and this rank did not")
    return StreamingCache(window, sinks, slack, rotation if rotated else None)


@functools.cache
def _noting(kind: type[Cache]) -> type[Cache]:
    """The same class, with operations that note themselves down."""
    noted = {name: _noted(getattr(kind, name)) for name in OPERATIONS if hasattr(kind, name)}
    return cast(type[Cache], ABCMeta(kind.__name__, (kind,), noted))


def _noted(operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that is noted once it succeeded; those that it consists of are not."""

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
