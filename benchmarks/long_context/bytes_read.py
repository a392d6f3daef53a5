"""How many bytes of keys, values and indexes a token reads through a cache. Sparse caches are compared by this.

What counts is what the cache holds or chooses for the pass, not what it reserves. Each KV head counts once, since the
queries of a group read shared keys from memory once. The token's own key and value count as well. Weights do not: they
are the same for all caches. The oracle counts as reading everything, as it scores all keys. When a retrieval cache
chooses, it also reads the means of all chunks (and copies the new chunks). That is reported separately, because it
depends on the acceptance rate how often this happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.long_context.long_bench import Prefilled
from benchmarks.papers.h2o import HeavyHitterCache
from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.decoding.level import CacheFactory
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.attention.topk_attention import MARGIN_NATS
from forerun.kernels.attention.topk_rank import CHUNK_KEYS
from forerun.kv.cache import Cache
from forerun.kv.low_rank import LowRankCache
from forerun.kv.retrieval import RetrievalCache
from forerun.kv.streaming import StreamingCache
from forerun.models.forward.prefill import read_prompt
from forerun.models.forward.scorer import Scorer


@dataclass(frozen=True)
class Reading:
    """Bytes that a token reads.

    Attributes:
        rows: bytes of keys and values, by layer; a mean over tokens.
        index: bytes of the index that a token chooses by, by layer; a mean over tokens.
        choice: bytes that one choice for coming tokens reads, over all layers.
    """

    rows: dict[int, float]
    index: dict[int, float]
    choice: int = 0

    @property
    def total(self) -> float:
        """Bytes over all layers, without ``choice``."""
        return sum(self.rows.values()) + sum(self.index.values())

    def columns(self) -> dict[str, object]:
        """As plain values."""
        layers = [round(self.rows[layer] + self.index[layer]) for layer in sorted(self.rows)]
        return {
            "bytes_read": round(self.total),
            "index_bytes_read": round(sum(self.index.values())),
            "bytes_read_by_layer": layers,
            "choice_bytes_read": self.choice,
        }


class Meter(Cache):
    """A wrapper that measures what is read through a cache.

    Args:
        cache: does the work; passes of one token per row are counted.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._rows: dict[int, list[int]] = {}
        self._index: dict[int, list[int]] = {}

    @property
    def length(self) -> int:  # type: ignore[override]
        return self.cache.length

    def positions(self, block: Block) -> IntArray:
        return self.cache.positions(block)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        row = k.element_size() * (k.shape[3] + v.shape[3])
        self._rows.setdefault(layer, []).append(row * rows_read(self.cache, layer, q, k.shape[1], spec))
        self._index.setdefault(layer, []).append(index_read(self.cache, layer, spec))
        return self.cache.attend(layer, q, k, v, block, spec)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        self.cache.commit(block, path)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.nbytes

    @property
    def reading(self) -> Reading:
        """The average reading of a token so far."""
        rows, index = ({layer: sum(b) / len(b) for layer, b in each.items()} for each in (self._rows, self._index))
        return Reading(rows, index, self.cache.choice_bytes if isinstance(self.cache, RetrievalCache) else 0)


def rows_read(cache: Cache, layer: int, q: torch.Tensor, heads: int, spec: AttentionSpec) -> int:
    """Number of keys, summed over all ``heads`` KV heads, that one token's queries ``[1, H, 1, d]`` read."""
    if spec.window is not None:
        return heads * min(spec.window, 1 + _held(cache))
    if isinstance(cache, LowRankCache) and cache.choosing(layer):
        return _chosen(cache.worth(layer, q), cache.slots(layer), heads, spec) + heads * (cache.near + 1)
    return heads * (1 + _held(cache))


def _chosen(worth: torch.Tensor, slots: int, heads: int, spec: AttentionSpec) -> int:
    """Number of keys in the chunks that the queries choose by worth ``[H, 1, chunks]``; each KV head counts once."""
    worth[..., 0] = -torch.inf
    best, chunks = worth.topk(slots, -1)
    seen = torch.zeros_like(worth, dtype=torch.bool)
    seen.scatter_(-1, chunks, best * spec.scaling >= best[..., :1] * spec.scaling - MARGIN_NATS)
    seen[..., 0] = True
    return CHUNK_KEYS * int(seen.view(heads, -1, worth.shape[2]).any(1).sum())


def index_read(cache: Cache, layer: int, spec: AttentionSpec) -> int:
    """Bytes of the index that a token chooses by."""
    return cache.index_bytes(layer) if isinstance(cache, LowRankCache) and spec.window is None else 0


def _held(cache: Cache) -> int:
    """Tokens that a pass sees if it chooses nothing."""
    return cache.held if isinstance(cache, StreamingCache | HeavyHitterCache | RetrievalCache) else cache.length


@torch.inference_mode()
def at_end(target: Scorer, prompt: Prefilled, make: CacheFactory | None) -> Reading:
    """What the token after a prompt reads, through the full cache, or the sparse cache that ``make`` gives."""
    prompt.rewind()
    cache = prompt.cache if make is None else make(target, prompt.cache)
    if cache.source is not None:
        cache.sync()
    else:
        read_prompt(target, cache, np.array(prompt.tokens[: prompt.held]))
    meter = Meter(cache)
    target.score([Block(np.array(prompt.tokens[-1:]), DraftTree.empty(), cache.length)], [meter])
    return meter.reading
