"""What another process needs to repeat a cache: what it is made of, and its operations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.cache import Cache
from forerun.kv.cache_kinds import CacheParts, made_of, parts_of
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import Rotation, StreamingCache

CACHES: dict[str, Callable[[FullCache], Cache]] = {
    "full": lambda source: FullCache(40, releases=True),
    "retrieval": lambda source: RetrievalCache(source, RetrievalConfig(64, 4, threshold=0.5)),
    "low-rank": lambda source: LowRankCache(source, LowRankConfig(64, 16, 8)),
    "streaming": lambda source: StreamingCache(30, 2, 5, Rotation({})),
}


class Truncating(FullCache):
    """Truncates in two steps."""

    def truncate(self, length: int) -> None:
        super().truncate(min(self.length, length + 1))
        super().truncate(length)


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_made_of_the_parts_of_another_has_the_same_parts(kind):
    source, rotation = FullCache(), Rotation({})
    cache = CACHES[kind](source)
    parts = parts_of(cache)
    made = made_of(CacheParts(*parts), rotation)
    assert parts.kind == kind and type(made) is type(cache) and parts_of(made) == parts and made.source is cache.source


def test_what_has_no_parts_is_refused_by_name():
    with pytest.raises(ValueError, match=r"a Truncating cannot be used in several processes; allowed are full, "):
        parts_of(Truncating())
    with pytest.raises(ValueError, match="which only rank 0 has"):
        made_of(parts_of(CACHES["streaming"](FullCache())), None)


def test_operations_that_succeed_are_logged_once_with_their_arguments():
    cache, logged = Truncating(), list[tuple[Any, ...]]()
    cache.log_to(lambda *entry: logged.append(entry))
    block = Block(np.zeros(4, np.int64), DraftTree.empty(), 0)
    cache.commit(block, [])
    with pytest.raises(ValueError, match="length is 5"):
        cache.truncate(5)
    cache.truncate(2)
    assert logged == [(cache, "commit", (block, []), None), (cache, "truncate", (2,), None)]
