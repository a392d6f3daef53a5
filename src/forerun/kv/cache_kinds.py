"""Caches as plain values, from which another process makes equal ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, NamedTuple

from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import Rotation, StreamingCache


class CacheParts(NamedTuple):
    """A cache's kind in ``_KINDS``, and its parts: plain values, and a view's source."""

    kind: str
    values: Sequence[Any]


def parts_of(cache: Cache) -> CacheParts:
    """Describe an empty cache; raise ValueError for a kind that plain values cannot describe."""
    for name, kind in _KINDS.items():
        if type(cache) is kind.cache:
            return CacheParts(name, kind.values(cache))
    raise ValueError(f"a {type(cache).__name__} cannot be used in several processes; allowed are {', '.join(_KINDS)}")


def made_of(parts: CacheParts, rotation: Rotation | None) -> Cache:
    """Make a cache from ``parts_of``; raise ValueError if it needs a rotation and that is None."""
    return _KINDS[parts.kind].make(parts.values, rotation)


class _CacheKind(NamedTuple):
    cache: type[Cache]
    values: Callable[[Any], list[Any]]
    make: Callable[[Sequence[Any], Rotation | None], Cache]


def _streaming(values: Sequence[Any], rotation: Rotation | None) -> StreamingCache:
    window, sinks, slack, rotated = values
    if rotated and rotation is None:
        raise ValueError("this cache needs the rotation of the model's keys, which only rank 0 has")
    return StreamingCache(window, sinks, slack, rotation if rotated else None)


_KINDS = {
    "full": _CacheKind(
        FullCache, lambda cache: [cache.capacity, False, cache.releases], lambda values, rotation: FullCache(*values)
    ),
    "retrieval": _CacheKind(
        RetrievalCache,
        lambda cache: [cache.source, *astuple(cache.config)],
        lambda values, rotation: RetrievalCache(values[0], RetrievalConfig(*values[1:])),
    ),
    "low-rank": _CacheKind(
        LowRankCache,
        lambda cache: [cache.source, *astuple(cache.config)],
        lambda values, rotation: LowRankCache(values[0], LowRankConfig(*values[1:])),
    ),
    "streaming": _CacheKind(
        StreamingCache,
        lambda cache: [cache.window, cache.sinks, cache.slack, cache.rotation is not None],
        _streaming,
    ),
}
