"""A sparse cache in which every query finds its own chunks, by keys in a few dimensions.

TriForce's retrieval cache chooses chunks for coming tokens by the queries of earlier ones. That is too late in a text
that jumps between distant places: the next token looks elsewhere. Here every query scans all keys, in 24 dimensions of
one byte each (1/21 of a key and its value in float32). It then attends to the chunks with the best keys, where they are
in the target's own cache. Keys lie close to a space of few dimensions (Loki, Singhania et al. 2024, arXiv 2406.02542);
the one chosen here best preserves the products of queries and keys, not the keys. A chunk is worth as much as its best
key. Means, and bounds by the extremes of each dimension (Quest, Tang et al. 2024, arXiv 2406.10774), miss the single
key that a head copies from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, AttentionState, attend, attend_chosen, merge
from forerun.kernels.attention.short_key_scan import CHUNK, GROUP, QUAD
from forerun.kernels.attention.topk_attention import MARGIN
from forerun.kernels.attention.topk_rank import SoughtFields
from forerun.kv.bounded import SLACK
from forerun.kv.cache import Addresses, KVShape
from forerun.kv.chunks import HeldChunks
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_rows import attend_in_order, compact, located
from forerun.kv.shared_prefix import Tensors
from forerun.kv.short_keys import GROUPS, ShortKeys, sampled
from forerun.kv.sparse_view import LOOKED_AT, View

SHARE, LONG = 4, 60
"""A query chooses tokens for 1/4 of the budget, or for 1/60 of the text if that is more: in a long text the target's
own pass is so slow that drafts may cost more. Every query of a group sees what any of them chose."""
ROOM = 64
"""The buffer of recent tokens grows by at least this many."""


@dataclass(frozen=True)
class LowRankConfig:
    """What a query sees.

    Attributes:
        budget: the most tokens that a query sees; a text up to this length is seen whole. In a longer text, each query
            of a group (the query heads of one KV head) adds 1/4 of the budget, or 1/60 of the text if that is more.
            The group chooses its chunks of 16 tokens together, never more than the budget. The first chunk is always
            seen.
        window: most recent tokens, always seen; at most 1/8 of the budget.
        rank: dimensions of the keys that queries choose by.

    Raises:
        ValueError: for a value out of range.
    """

    budget: int = 4096
    window: int = 64
    rank: int = 24

    def __post_init__(self) -> None:
        for name in ("budget", "window", "rank"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.rank % QUAD:
            raise ValueError(f"rank is {self.rank}; it must be a multiple of {QUAD}")

    @property
    def recent(self) -> int:
        """The least number of recent tokens that are seen."""
        return max(1, min(self.window, self.budget // 8))

    def slots(self, length: int, group: int = 1) -> int:
        """Chunks of a text of ``length`` tokens that ``group`` query heads of one KV head see."""
        return max(1, min(self.budget, group * max(self.budget // SHARE, length // LONG)) // CHUNK)


class LowRankCache(View):
    """Over one row's full cache.

    Args:
        source: the target's cache; read, never changed.
        config: what a query sees.
    """

    copies = True

    def __init__(self, source: FullCache, config: LowRankConfig) -> None:
        super().__init__(source)
        self.config = config
        self._tail = 0  # position of the first recent token; the chunks before it are indexed
        self.keepsake = f"low-rank-{config.rank}"
        self._indexes = self._kept()
        self._near: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # recent and speculative tokens
        self._brought: dict[int, HeldChunks] = {}  # what the last query saw of an offloaded source
        self._table: tuple[IntArray, IntArray] | None = None  # for the source's addresses: see _sought

    @property
    def ready(self) -> bool:
        """See ``View.ready``. Finding the dimensions takes queries."""
        return bool(self.source.specs and (self._indexes or self.source.sample))

    @property
    def whole(self) -> bool:
        """See ``View.whole``."""
        return self.source.length <= self.config.budget

    def prepare(self, tokens: int) -> bool:
        """See ``View.prepare``."""
        end, piece, done = self._far(self.source.length), LOOKED_AT * tokens, True
        for layer in self.source.layers:
            if self.source.specs[layer].window is None:
                index = self._index(layer)
                last = min(end, index.known + piece)
                index.extend(self._keys(layer), last)
                done = done and last == end
        return done

    def sync(self) -> None:
        """See ``View.sync``."""
        self.length = self.settled = self.source.length
        self._tail, self._table = self._far(self.length), None
        for layer in self.source.layers:
            self._store(layer, self._tail, *self.source.read(layer, self._tail, self.length))
            if self.whole or self.source.specs[layer].window is not None:
                continue
            self._index(layer).extend(self._keys(layer), self._tail)

    def made(self, length: int) -> Tensors:
        """See ``View.made``: the index, once it is complete."""
        indexes = self._indexes if self.settled else {}
        return {f"{layer}.{name}": t for layer, index in indexes.items() for name, t in index.tensors(length).items()}

    def _kept(self) -> dict[int, ShortKeys]:
        """The index that an earlier cache made of the same beginning, by layer."""
        tensors, length = self.source.kept(self.keepsake or "")
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for name, t in tensors.items():
            layer, _, part = name.partition(".")
            parts.setdefault(int(layer), {})[part] = t
        return {layer: ShortKeys.of_tensors(each, length) for layer, each in parts.items()}

    def _far(self, length: int) -> int:
        """Tokens of a text that are chosen among: all but the most recent."""
        return max(0, length - self.config.recent) // CHUNK * CHUNK

    def _keys(self, layer: int) -> Callable[[int, int], torch.Tensor]:
        return lambda first, last: self.source.read(layer, first, last)[0][0]

    def _index(self, layer: int) -> ShortKeys:
        """A layer's index, made at the first call."""
        if layer not in self._indexes:
            keys, queries = sampled(self.source, layer), self.source.sample[layer][0]
            self._indexes[layer] = ShortKeys.of(keys, queries, self.config.rank)
        return self._indexes[layer]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``. A layer with a sliding window chooses nothing: it sees its whole window."""
        near = self._store(layer, self.length, k, v)
        if spec.window is not None:
            return self._attend_window(layer, q, near, block, spec)
        held = self.near
        if not self.choosing(layer):
            parts = attend_in_order(q, near, held, block, spec)
            far = [attend(q, *self.source.read(layer, 0, self._tail), spec)] if self._tail else []
            return merge(*far, *parts, sinks=spec.sinks)
        worth = self.worth(layer, q)
        if self.source.offloaded:
            parts = attend_in_order(q, near, held, block, spec)
            return merge(self._attend_brought(layer, q, worth, spec), *parts, sinks=spec.sinks)
        alone, (keys, values) = len(block) == 1, self.source.read(layer, 0, self._tail)
        seen = attend_chosen(q, keys, values, worth, self.slots(layer), (*near, held + alone), spec)
        local = [] if alone else [attend(q, k, v, spec, block.bias(None, range(0), q))]
        return merge(seen, *local, sinks=spec.sinks)

    def addressed(self, layers: int, like: torch.Tensor, count: int) -> Addresses | None:
        """See ``Cache.addressed``. Attention with windows, soft caps or sinks is left to ``attend``."""
        source = self.source.addressed(layers, like, 0)
        if source is None or not all(spec.plain for spec in self.source.specs.values()):
            return None
        place = self.near
        near = [self._reserve(layer, place, place + count) for layer in range(layers)]
        return located(near, place, self._sought(source))

    def _sought(self, source: Addresses) -> IntArray:
        """One row of ``SoughtFields`` per layer; made again when the index, or the source's memory, may have moved."""
        known = self._table
        if known is None or known[0] is not source.layers:
            chunks, (k_head, k_row, v_head, v_row) = self._tail // CHUNK, source.strides
            rows = []
            for layer, (k, v) in enumerate(source.layers.tolist()):
                most, index = chunks, (0, 0, 0, 0)
                if self.choosing(layer):
                    most, index = self.slots(layer), self._indexes[layer].addresses
                rows.append(SoughtFields(chunks, most, *index, k, k_head, k_row, v, v_head, v_row))
            self._table = known = source.layers, np.array(rows, np.int64)
        return known[1]

    def _attend_brought(self, layer: int, q: torch.Tensor, worth: torch.Tensor, spec: AttentionSpec) -> AttentionState:
        """Attention over each query's chunks, one query after the other. The source's memory is far away: of the chunks
        that are not here, only those are copied that could have some weight."""
        beside = worth[:: self._indexes[layer].group]
        beside[..., 0] = torch.inf  # the first chunk is always seen
        values, best = beside.topk(self.slots(layer) + 1, -1)
        wanted = (values - values[..., 1:2]) * spec.scaling >= -MARGIN
        chunks = self._brought.setdefault(layer, HeldChunks(CHUNK))
        states = []
        for i in range(q.shape[2]):
            chunks.hold(best[:, i], wanted[:, i], worth.shape[-1], self.source, layer)
            states.append(attend(q[:, :, i : i + 1], *chunks.rows, spec))
        return AttentionState(*(torch.cat(parts, 2) for parts in zip(*states, strict=True)))

    @property
    def near(self) -> int:
        """Number of recent tokens; every query sees them."""
        return self.length - self._tail

    def slots(self, layer: int) -> int:
        """The most chunks that a query of a layer sees, besides the first."""
        return self.config.slots(self._tail, self._indexes[layer].group)

    def choosing(self, layer: int) -> bool:
        """Whether queries of a layer choose chunks; otherwise they see everything."""
        return not self.whole and layer in self._indexes and self._tail // CHUNK > self.slots(layer)

    def worth(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Worth of each chunk to each of the queries ``[1, H, n, d]``, float32 ``[H, n, chunks]``.

        The queries of a group choose together, because what one of them reads costs the others nothing. A chunk's worth
        to a query is taken relative to that query's best chunk; its worth to the group is the largest of these.
        """
        found, group = self._indexes[layer].worth(q[0]), self._indexes[layer].group
        if group == 1:
            return found
        parted = found.view(-1, group, *found.shape[1:])
        beside = (parted - parted[..., 1:].amax(-1, keepdim=True)).amax(1, keepdim=True)
        return beside.expand(parted.shape).flatten(0, 1).contiguous()

    def index_bytes(self, layer: int) -> int:
        """Bytes of a layer's short keys; a query that chooses scans all of them."""
        return self._indexes[layer].known_bytes if self.choosing(layer) else 0

    def _attend_window(
        self, layer: int, q: torch.Tensor, near: tuple[torch.Tensor, torch.Tensor], block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        first = max(0, self.length - (spec.window or 0) + 1)
        before = self.source.read(layer, min(first, self._tail), self._tail)
        after = slice(max(0, first - self._tail), self.length - self._tail + len(block))
        keys, values = (torch.cat((old, new[:, :, after]), 2) for old, new in zip(before, near, strict=True))
        bias = block.bias(spec.window, range(first, self.length), q)
        return merge(attend(q, keys, values, spec, bias), sinks=spec.sinks)

    def _store(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values at a recent position; those at later positions may be lost."""
        place = position - self._tail
        end = place + k.shape[2]
        if layer not in self._near:
            self._near[layer] = (_room(k, end), _room(v, end))
        near = self._reserve(layer, place, end)
        for buffer, part in zip(near, (k, v), strict=True):
            buffer[:, :, place:end] = part
        return near

    def _reserve(self, layer: int, place: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's buffer of recent tokens, with room for ``end``; what it has from ``place`` on may be lost."""
        keys, values = self._near[layer]
        if keys.shape[2] < end + CHUNK:
            self._near[layer] = (_room(keys, end), _room(values, end))
            for new, before in zip(self._near[layer], (keys, values), strict=True):
                new[:, :, :place] = before[:, :, :place]
        return self._near[layer]

    def _compact(self, start: int, path: Sequence[int]) -> None:
        for rows in self._near.values():
            compact(rows, start - self._tail, path)

    @property
    def nbytes(self) -> int:
        """Bytes of the short keys and of the recent tokens."""
        near = sum(t.nbytes for rows in self._near.values() for t in rows)
        brought = sum(chunks.nbytes for chunks in self._brought.values())
        return near + brought + sum(index.nbytes for index in self._indexes.values())

    def needs(self, shape: KVShape, tokens: int) -> int:
        """See ``Cache.needs``."""
        near = self.config.recent + SLACK + 3 * CHUNK + ROOM
        groups = -(-tokens // (CHUNK * GROUP))
        short = (groups + groups // 16 + GROUPS) * GROUP * CHUNK
        ranks = sum(
            layer.heads * -(-min(self.config.rank, layer.dim) // QUAD) * QUAD for layer in shape.layers.values()
        )
        return near * shape.nbytes + (short * ranks if tokens > self.config.budget else 0)


def _room(like: torch.Tensor, count: int) -> torch.Tensor:
    """Zeros like ``like`` for ``count`` tokens, for room to grow, and for one chunk that is read beyond them."""
    return like.new_zeros(*like.shape[:2], count + ROOM + CHUNK, like.shape[3])
