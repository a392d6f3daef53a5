"""A sparse cache in which every query selects its own chunks, by low-dimensional keys.

TriForce's retrieval cache selects chunks for coming tokens by earlier queries: too late for a sequence that jumps
between distant places. Here every query scans all keys, in 24 dimensions of one byte each (1/21 of a key and its value
in float32), and attends to the chunks with the best keys, in place in the target's cache. Keys are close to a
low-dimensional space (Loki, Singhania et al. 2024, arXiv 2406.02542); the one chosen here best preserves the products
of queries and keys, not the keys. A chunk scores as high as its best key. Means, and bounds by the extremes of each
dimension (Quest, Tang et al. 2024, arXiv 2406.10774), miss the single key that a head copies from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.checks import check_integer
from forerun.core.tree import DraftTree, IntArray
from forerun.kernels.attention.attention import (
    BACKENDS,
    AttentionSpec,
    AttentionState,
    Rows,
    attend_in_order,
    attend_topk,
    merge,
    rank_chunks,
    states_in_order,
    takes_topk,
)
from forerun.kernels.attention.topk_attention import MARGIN_NATS
from forerun.kernels.attention.topk_rank import (
    CHUNK_KEYS,
    GROUP_CHUNKS,
    QUAD_NUMBERS,
    ZERO_BYTE,
    TopkFields,
    by_definition,
)
from forerun.kernels.runtime.addresses import head_rows
from forerun.kernels.runtime.vector_ir import fused
from forerun.kv.cache import ROLLBACK_TOKENS, Addresses, KVShape, addresses_of, compact, reserve
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import Tensors
from forerun.kv.view import ChunkedView

BUDGET_DIVISOR, LENGTH_DIVISOR = 4, 60
"""A query selects tokens for 1/4 of the budget, or 1/60 of the sequence if that is more: after a long prompt the
target's pass is so slow that drafts may cost more. All queries of a group share their selections."""
NEAR_GROWTH_TOKENS = 64

MIN_GROWTH_GROUPS = 8
SAMPLED_KEYS = 2048
"""Maximum keys, evenly spread, to find the dimensions from."""


@dataclass(frozen=True)
class LowRankConfig:
    """What a query sees; raise ValueError for a value out of range.

    Attributes:
        budget: maximum tokens that a query sees; it sees all of a shorter sequence. In a longer one, each query of a
            group (the query heads of one KV head) adds 1/4 of the budget, or 1/60 of the sequence if that is more. The
            group selects its chunks of 16 tokens together, never more than the budget. The first chunk is always seen.
        window: most recent tokens, always seen; at most 1/8 of the budget.
        rank: dimensions of the keys that queries select by.
    """

    budget: int = 4096
    window: int = 64
    rank: int = 24

    def __post_init__(self) -> None:
        for name in ("budget", "window", "rank"):
            check_integer(name, getattr(self, name), 1)
        if self.rank % QUAD_NUMBERS:
            raise ValueError(f"rank is {self.rank}; it must be a multiple of {QUAD_NUMBERS}")

    @property
    def recent(self) -> int:
        return max(1, min(self.window, self.budget // 8))

    def slots(self, length: int, group: int = 1) -> int:
        """Return the chunks of a ``length``-token sequence that ``group`` query heads of one KV head see."""
        tokens = group * max(self.budget // BUDGET_DIVISOR, length // LENGTH_DIVISOR)
        return max(1, min(self.budget, tokens) // CHUNK_KEYS)


class LowRankCache(ChunkedView):
    """Low-rank selection over one row's full cache, which it never changes."""

    def __init__(self, source: FullCache, config: LowRankConfig) -> None:
        super().__init__(source, config.budget, CHUNK_KEYS, config.recent)
        self.config = config
        self.state_name = f"low-rank-{config.rank}"
        self._indexes = self._kept()
        self._near: dict[int, Rows] = {}  # recent and speculative tokens
        self._fetched: dict[int, RecentChunks] = {}  # the chunks that the last query selected from an offloaded source
        self._table: tuple[IntArray, IntArray] | None = None  # for the source's addresses: see _topk_table

    @property
    def ready(self) -> bool:
        return bool(self.source.specs and (self._indexes or self.source.sample))

    def sync(self) -> None:
        self.length = self.synced = self.source.length
        self._tail, self._table = self._far(self.length), None
        for layer in self.source.layers:
            self._write(layer, self._tail, *self.source.read(layer, self._tail, self.length))
            if self.whole or self.source.specs[layer].window is not None:
                continue
            self._index(layer).extend(self._keys(layer), self._tail)

    def saved_state(self, length: int) -> Tensors:
        """Return the index, if complete."""
        indexes = self._indexes if self.synced else {}
        return {f"{layer}.{name}": t for layer, index in indexes.items() for name, t in index.tensors(length).items()}

    def _kept(self) -> dict[int, ShortKeys]:
        """Return the indexes that an earlier cache saved with this prefix, by layer."""
        tensors, length = self.source.saved_state(self.state_name or "")
        parts: dict[int, dict[str, torch.Tensor]] = {}
        for name, t in tensors.items():
            layer, _, part = name.partition(".")
            parts.setdefault(int(layer), {})[part] = t
        return {layer: ShortKeys.of_tensors(each, length) for layer, each in parts.items()}

    def _index(self, layer: int) -> ShortKeys:
        if layer not in self._indexes:
            source = self.source
            keys = source.strided_keys(layer, -(-source.length // SAMPLED_KEYS))[0]
            self._indexes[layer] = ShortKeys.of(keys, source.sample[layer][0], self.config.rank)
        return self._indexes[layer]

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows | None:
        near = self._write(layer, self.length, k, v)
        if spec.window is not None:
            return self._window_rows(layer, spec.window, self._tail, near)
        if self.choosing(layer) or self._in_place(q, near):
            return None
        far = self.source.read(layer, 0, self._tail)
        return tuple(torch.cat(parts, 2) for parts in zip(far, near, strict=True)) if self._tail else near

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        rows = self.store(layer, q, k, v, block, spec)
        if rows is not None:
            return attend_in_order(q, [rows], [block], spec)
        near = tuple(t[:, :, : self.near + len(block)] for t in self._near[layer])
        if self._in_place(q, near):
            far = (head_rows(t) for t in self.source.read(layer, 0, self._tail))
            return attend_topk(q, near, block, np.array(self._topk_fields(layer, *far), np.int64), spec)
        if self.source.offloaded:
            return self._attend_fetched(layer, q, near, block, spec)
        states = states_in_order(q, near, Block(block.pending, block.tree, self.near), spec)
        return merge(self._attend_gathered(layer, q, spec), *states, sinks=spec.sinks)

    def _in_place(self, q: torch.Tensor, near: Rows) -> bool:
        return not self.source.offloaded and takes_topk(q, *near)

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        """Leave attention with windows to ``attend``."""
        source = self.source.addressed(layers, like, 0)
        if source is None or any(spec.window is not None for spec in self.source.specs.values()):
            return None
        place = self.near
        near = [self._reserve(layer, self._near[layer], place, place + count) for layer in layers]
        return addresses_of(near, place, self.length, self._topk_table(layers, source))

    def _topk_table(self, layers: Sequence[int], source: Addresses) -> IntArray:
        """Return ``TopkFields`` by layer, cached until the index or the source's memory may move."""
        known = self._table
        if known is None or known[0] is not source.layers:
            k_strides, v_strides = source.strides[:2], source.strides[2:]
            both = zip(layers, source.layers.tolist(), strict=True)
            rows = [self._topk_fields(layer, (k, *k_strides), (v, *v_strides)) for layer, (k, v) in both]
            self._table = known = source.layers, np.array(rows, np.int64)
        return known[1]

    def _topk_fields(self, layer: int, k: tuple[int, int, int], v: tuple[int, int, int]) -> TopkFields:
        """Return what a layer's queries select from; for ``k`` and ``v``, all keys and values, see ``head_rows``."""
        chunks = self._tail // CHUNK_KEYS
        if self.choosing(layer):
            return TopkFields(chunks, self.slots(layer), *self._indexes[layer].addresses, *k, *v)
        return TopkFields(chunks, chunks, 0, 0, 0, 0, *k, *v)

    def _attend_fetched(
        self, layer: int, q: torch.Tensor, near: Rows, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend to each query's chunks and its recent tokens, query by query, copying from the offloaded source only
        missing chunks that could have some weight."""
        worth, held = self.worth(layer, q), self.near
        beside = worth[:: self._indexes[layer].group]
        beside[..., 0] = torch.inf  # the first chunk is always seen
        values, best = beside.topk(self.slots(layer) + 1, -1)
        wanted = (values - values[..., 1:2]) * spec.scaling >= -MARGIN_NATS
        chunks = self._fetched.setdefault(layer, RecentChunks())
        alone, outs = Block(block.pending[:1], DraftTree.empty(), 0), []
        for i, visible in enumerate(block.visible):
            chunks.hold(best[:, i], wanted[:, i], worth.shape[-1], self.source, layer)
            seen = torch.from_numpy(np.concatenate((np.arange(held), held + visible.nonzero()[0]))).to(q.device)
            rows = tuple(torch.cat((far, t[:, :, seen]), 2) for far, t in zip(chunks.rows, near, strict=True))
            outs.append(attend_in_order(q[:, :, i : i + 1], [rows], [alone], spec))
        return torch.cat(outs, 2)

    def _attend_gathered(self, layer: int, q: torch.Tensor, spec: AttentionSpec) -> AttentionState:
        """Attend to copies of each query's chunks, with torch."""
        worth, heads, n = self.worth(layer, q), q.shape[1], q.shape[2]
        worth[..., 0] = -torch.inf
        best, chunks = worth.topk(self.slots(layer), -1)
        hidden = best * spec.scaling < best[..., :1] * spec.scaling - MARGIN_NATS
        chunks, hidden = (torch.nn.functional.pad(t, (1, 0)) for t in (chunks, hidden))
        owner = (torch.arange(heads, device=q.device) // self._indexes[layer].group)[:, None, None]
        cut = (t[0].view(t.shape[1], -1, CHUNK_KEYS, t.shape[3]) for t in self.source.read(layer, 0, self._tail))
        keys, values = (t[owner, chunks].flatten(2, 3).flatten(0, 1) for t in cut)
        bias = torch.where(hidden, -torch.inf, 0.0).repeat_interleave(CHUNK_KEYS, -1).flatten(0, 1)
        out, lse = BACKENDS["math"](q.reshape(heads * n, 1, -1), keys, values, spec, bias.unsqueeze(1))
        return AttentionState(out.view(1, heads, n, -1), lse.view(1, heads, n))

    @property
    def near(self) -> int:
        """Number of recent tokens, which every query sees."""
        return self.length - self._tail

    def slots(self, layer: int) -> int:
        """Return the maximum chunks that a query of a layer sees, besides the first."""
        return self.config.slots(self._tail, self._indexes[layer].group)

    def choosing(self, layer: int) -> bool:
        """Return whether queries of a layer select chunks; otherwise they see all tokens."""
        return not self.whole and layer in self._indexes and self._tail // CHUNK_KEYS > self.slots(layer)

    def worth(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Score each chunk for each of the queries ``[1, H, n, d]``, float32 ``[H, n, chunks]``.

        A group's queries select together, because what one reads costs the others nothing: a chunk's score is its
        largest for any of them, relative to that query's best chunk.
        """
        found, group = self._indexes[layer].worth(q[0]), self._indexes[layer].group
        if group == 1:
            return found
        parted = found.view(-1, group, *found.shape[1:])
        beside = (parted - parted[..., 1:].amax(-1, keepdim=True)).amax(1, keepdim=True)
        return beside.expand(parted.shape).flatten(0, 1).contiguous()

    def _write(self, layer: int, position: int, k: torch.Tensor, v: torch.Tensor) -> Rows:
        place = position - self._tail
        end = place + k.shape[2]
        near = self._reserve(layer, (k, v), place, end)
        for buffer, part in zip(near, (k, v), strict=True):
            buffer[:, :, place:end] = part
        return tuple(t[:, :, :end] for t in near)

    def _reserve(self, layer: int, like: Rows, place: int, end: int) -> Rows:
        """Return a buffer of recent tokens with room for ``end`` and a chunk more, without rows from ``place`` on."""
        before = self._near.get(layer)
        room = end + CHUNK_KEYS
        near = self._near[layer] = reserve(before, like, place, room, room + NEAR_GROWTH_TOKENS)
        if near is not before:  # rows that are read must be finite
            for t in near:
                t[:, :, place:] = 0
        return near

    def _compact(self, start: int, path: Sequence[int]) -> None:
        for rows in self._near.values():
            compact(rows, start - self._tail, path)

    @property
    def nbytes(self) -> int:
        near = sum(t.nbytes for rows in self._near.values() for t in rows)
        fetched = sum(chunks.nbytes for chunks in self._fetched.values())
        return near + fetched + sum(index.nbytes for index in self._indexes.values())

    def needs(self, shape: KVShape, tokens: int) -> int:
        near = self.config.recent + ROLLBACK_TOKENS + 3 * CHUNK_KEYS + NEAR_GROWTH_TOKENS
        groups = -(-tokens // (CHUNK_KEYS * GROUP_CHUNKS))
        short = (groups + groups // 16 + MIN_GROWTH_GROUPS) * GROUP_CHUNKS * CHUNK_KEYS
        ranks = sum(
            layer.heads * -(-min(self.config.rank, layer.dim) // QUAD_NUMBERS) * QUAD_NUMBERS
            for layer in shape.layers.values()
        )
        return near * shape.nbytes + (short * ranks if tokens > self.config.budget else 0)


class ShortKeys:
    """One layer's keys in a few dimensions, chunk by chunk.

    Args:
        of_keys, of_queries: projections ``[Hkv, d, rank]`` of keys (minus their mean) and of queries (float32).
        mean: of the keys, ``[Hkv, 1, d]``.
    """

    def __init__(self, of_keys: torch.Tensor, of_queries: torch.Tensor, mean: torch.Tensor, group: int) -> None:
        self.group = group
        self._of_keys, self._of_queries, self._mean = of_keys, of_queries.contiguous(), mean
        shape = (len(mean), 0, CHUNK_KEYS, of_keys.shape[2] // QUAD_NUMBERS, GROUP_CHUNKS, QUAD_NUMBERS)
        self._short = torch.empty(shape, dtype=torch.uint8, device=mean.device)
        self._indexed = 0  # chunks
        self._kept = 0  # groups that others may read

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor, rank: int) -> ShortKeys:
        """Return an index, from some keys ``[Hkv, m, d]`` and queries ``[H, n, d]`` of a sequence.

        The rank-r keys whose products with the queries are closest to the true products come from the r largest
        eigenvectors of ``R^T K R``, where Q = R R^T and K are the second moments of queries and keys.
        """
        heads, _, d = keys.shape
        some = keys.float()
        mean = some.mean(1, keepdim=True)
        sampled = queries.float().reshape(heads, -1, d)
        moments, one = _moments(sampled), torch.eye(d, dtype=torch.float32, device=keys.device)
        even = moments.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None] * one
        root = torch.linalg.cholesky(moments + (0.01 + 1 / sampled.shape[1]) * even)
        inverse = torch.linalg.solve_triangular(root, one.expand_as(root), upper=False).mT
        best = torch.linalg.eigh(root.mT @ _moments(some - mean) @ root)[1][:, :, -rank:]
        best = torch.nn.functional.pad(best, (0, -best.shape[2] % QUAD_NUMBERS))  # narrow heads have fewer
        of_keys = root @ best
        scale = ((some - mean) @ of_keys).abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        of_queries = inverse @ best * scale
        return cls((of_keys / scale).to(keys.dtype), of_queries, mean.to(keys.dtype), len(queries) // heads)

    def tensors(self, length: int) -> Tensors:
        """Return the complete groups in the first ``length`` tokens, for ``of_tensors``: final, so not copied."""
        groups = min(self._indexed, length // CHUNK_KEYS) // GROUP_CHUNKS
        self._kept = max(self._kept, groups)
        return {
            "short": self._short[:, :groups],
            "of_keys": self._of_keys,
            "of_queries": self._of_queries,
            "mean": self._mean,
            "group": torch.tensor([self.group]),
        }

    @classmethod
    def of_tensors(cls, tensors: Tensors, length: int) -> ShortKeys:
        """Restore an index from ``tensors``, for a sequence with the same first ``length`` tokens."""
        index = cls(tensors["of_keys"], tensors["of_queries"], tensors["mean"], int(tensors["group"]))
        groups = min(tensors["short"].shape[1], length // CHUNK_KEYS // GROUP_CHUNKS)
        index._short, index._indexed, index._kept = tensors["short"][:, :groups], groups * GROUP_CHUNKS, groups
        return index

    def extend(self, read: Callable[[int, int], torch.Tensor], length: int) -> None:
        count = length // CHUNK_KEYS
        groups = -(-count // GROUP_CHUNKS)
        if self._short.shape[1] < groups:
            capacity = groups + groups // 16 + MIN_GROWTH_GROUPS
            room = self._short.new_zeros(len(self._short), capacity, *self._short.shape[2:])
            room[:, : self._short.shape[1]] = self._short
            self._short, self._kept = room, 0
        if self._indexed < count:
            first = self._indexed // GROUP_CHUNKS
            if first < self._kept:  # the index was truncated into them
                self._short, self._kept = self._short.clone(), 0
            new = (read(first * GROUP_CHUNKS * CHUNK_KEYS, length) - self._mean) @ self._of_keys
            quads = (new.round() + ZERO_BYTE).clamp_(0, 255).to(torch.uint8).view(torch.int32)  # moved four at a time
            quads = torch.nn.functional.pad(quads, (0, 0, 0, (groups * GROUP_CHUNKS - count) * CHUNK_KEYS))
            chunks = quads.view(len(quads), -1, GROUP_CHUNKS, CHUNK_KEYS, quads.shape[2]).permute(0, 1, 3, 4, 2)
            self._short.view(torch.int32)[:, first:groups, ..., 0] = chunks
        self._indexed = count

    def worth(self, queries: torch.Tensor) -> torch.Tensor:
        """Score each chunk for each of the queries ``[H, n, d]``, float32 ``[H, n, chunks]``."""
        if queries.device.type == "cpu" and fused():
            fields = TopkFields(self._indexed, 0, *self.addresses, *(0,) * 6)
            return rank_chunks(queries, len(self._of_queries), np.array(fields, np.int64))
        heads, n, d = queries.shape
        turned = (queries.float().reshape(len(self._of_queries), -1, d) @ self._of_queries).view(heads, n, -1)
        return by_definition(self._short, self._indexed, turned)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """``rank``, ``short``, ``short_head`` and ``turn`` of ``TopkFields``."""
        return self._of_queries.shape[2], self._short.data_ptr(), self._short.stride(0), self._of_queries.data_ptr()

    @property
    def known(self) -> int:
        return self._indexed * CHUNK_KEYS

    @property
    def nbytes(self) -> int:
        return self._short.nbytes


def _moments(rows: torch.Tensor) -> torch.Tensor:
    return rows.mT @ rows / rows.shape[1]


class RecentChunks:
    """Chunks of one layer in slots, with least-recently-used eviction."""

    def __init__(self) -> None:
        self._held = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], the chunk in each slot
        self._age = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], calls since it was wanted
        self._slots: Rows = ()  # [Hkv, slots, chunk, d]

    def hold(self, best: torch.Tensor, wanted: torch.Tensor, known: int, source: FullCache, layer: int) -> None:
        """Load the ``wanted``, bool ``[Hkv, slots]``, of the chunks ``best`` ``[Hkv, slots]`` among a layer's first
        ``known``; the first call loads all."""
        if self._held.shape != best.shape:
            heads, count = best.shape
            head = torch.arange(heads, device=best.device).repeat_interleave(count)
            new = source.chunks(layer, head, best.flatten(), CHUNK_KEYS)
            self._slots = tuple(t.view(heads, count, *t.shape[1:]) for t in new)
            self._held, self._age = best.clone(), torch.zeros_like(best)
            return
        mark = torch.zeros(best.shape[0], known, dtype=torch.bool, device=best.device).scatter_(1, best, wanted)
        self._age = torch.where(mark.gather(1, self._held), 0, self._age + 1)
        mark.scatter_(1, self._held, False)
        head, chunk = mark.nonzero(as_tuple=True)
        if len(head):
            oldest = self._age.argsort(1, descending=True)  # wanted ones come last, and there is room for all
            slot = oldest[torch.arange(best.shape[1], device=best.device) < mark.sum(1, keepdim=True)]
            self._held[head, slot], self._age[head, slot] = chunk, 0
            for slots, rows in zip(self._slots, source.chunks(layer, head, chunk, CHUNK_KEYS), strict=True):
                slots[head, slot] = rows

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, ``[1, Hkv, slots * chunk, d]``."""
        keys, values = (t.flatten(1, 2)[None] for t in self._slots)
        return keys, values

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self._slots)
