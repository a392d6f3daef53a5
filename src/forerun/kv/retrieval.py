"""TriForce's retrieval cache (sections 4.1 and 4.2): the chunks of a context that matter now, within a fixed budget.

A chunk's score is query . mean key, per layer and KV head, summed over the query heads of a group. The best chunks,
always including the first (the attention sink), and then the most recent tokens are copied from the full cache into one
dense buffer, so attention is one kernel without a mask. Unlike the authors' code it maintains itself: chunk means are
updated incrementally, chunks are selected again as the sequence grows, and only changed ones are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from forerun.core.block import Block
from forerun.core.checks import check_integer
from forerun.core.long_context import Policy
from forerun.core.pinned import to_device
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kv.cache import ROLLBACK_TOKENS, Addresses, KVShape, addresses_of, compact, stacked
from forerun.kv.full_cache import FullCache
from forerun.kv.view import ChunkedView


@dataclass(frozen=True)
class RetrievalConfig:
    """What is kept, and when chunks are selected again; raise ValueError for a value out of range.

    Attributes:
        budget: tokens held per layer and KV head, besides the block being scored.
        window: most recent tokens, always held; at most 1/8 of the budget.
        stride: tokens after which chunks are selected again under every policy; at most 1/8 of the budget.
        refresh: when else to select. ``stride``: never. ``acceptance``: when the rolling acceptance rate of drafts over
            this cache (of tested tokens, up to the first rejected one) falls below ``threshold``. ``verify``: after
            each verification, by its queries.
    """

    budget: int = 4096
    chunk: int = 8
    window: int = 64
    stride: int = 64
    refresh: Policy = "acceptance"
    threshold: float = 0.85

    def __post_init__(self) -> None:
        for name in ("chunk", "window", "stride"):
            check_integer(name, getattr(self, name), 1)
        if self.budget < self.chunk:
            raise ValueError(f"budget is {self.budget}; it must be at least one chunk of {self.chunk} tokens")
        if self.refresh not in ("stride", "acceptance", "verify"):
            raise ValueError(f"refresh is {self.refresh!r}; allowed are 'stride', 'acceptance' and 'verify'")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; it must be between 0 and 1")

    @property
    def recent(self) -> int:
        """Minimum recent tokens held after a selection."""
        return max(1, min(self.window, self.budget // 8))

    @property
    def growth(self) -> int:
        """Tokens by which the sequence may grow before the next selection."""
        return max(1, min(self.stride, self.budget // 8))

    @property
    def slots(self) -> int:
        return max(1, (self.budget - self.recent - self.growth) // self.chunk)


BUFFER_GROWTH_TOKENS = 64

ACCEPTANCE_DECAY = 0.7
"""Decay of the rolling acceptance rate per verification."""


class RetrievalCache(ChunkedView):
    """The selected chunks of one row's full cache, which it never changes."""

    uses_queries = True

    def __init__(self, source: FullCache, config: RetrievalConfig) -> None:
        super().__init__(source, config.budget, config.chunk, config.recent)
        self.config = config
        self.refreshes = 0
        self._layers: dict[int, ChosenChunks] = {}
        self._chunks = 0  # selected, per layer
        self._rows: Mapping[int, Rows] = {}  # selected chunks in slots, recent tokens, and the block being scored
        self._store: torch.Tensor | None = None  # all of them, if layers are alike: [layers, 2, Hkv, room, d]
        self._room = 0  # tokens per layer
        self._where: Addresses | None = None
        self._acceptance = 1.0

    @property
    def ready(self) -> bool:
        return bool(self._layers or self.source.queries)

    def sync(self) -> None:
        known, self.length = self.synced, self.source.length
        self.synced = self.length
        if not self.refreshes or self.length - self._tail > self.config.recent + self.config.growth + self.config.chunk:
            self.refresh()
        else:
            self._write(self._place(known), known)

    def verified(self, rows: Sequence[int], drafted: int, accepted: int) -> None:
        if not self.refreshes:
            return
        if drafted:
            rate = accepted / (accepted + (accepted < drafted))
            self._acceptance = ACCEPTANCE_DECAY * self._acceptance + (1 - ACCEPTANCE_DECAY) * rate
        poor = self.config.refresh == "acceptance" and self._acceptance < self.config.threshold
        if poor or self.config.refresh == "verify":
            self.length = self.synced = self.source.length
            self.refresh(rows)
            self._acceptance = max(self._acceptance, self.config.threshold)

    def refresh(self, rows: Sequence[int] = (-1,)) -> None:
        """Select chunks by queries of the target's last pass, at indices ``rows``."""
        self._tail = self._far(self.length)
        self._chunks = min(self._tail // self._chunk, self.config.slots)
        chosen_by = torch.tensor(rows)
        self._reserve(self._place(self.length))
        for layer in self.source.layers:
            mine = self._index(layer)
            if self.source.specs[layer].window is None:
                queries = self.source.queries[layer]
                if chosen_by.device != queries.device:
                    chosen_by = to_device(chosen_by, queries.device)
                query = queries[:, :, chosen_by].sum(2)
                mine.extend(self._keys(layer), self._tail)
                mine.choose(query, self.source, layer, self._rows[layer], self._chunks)
        self._write(self._chunks * self._chunk, self._tail)
        self.refreshes += 1

    def _write(self, place: int, first: int) -> None:
        end = place + self.length - first
        self._reserve(end)
        if self._store is not None and (together := self.source.read_together(first, self.length)) is not None:
            self._store[:, :, :, place:end] = together
            return
        for layer, rows in self._rows.items():
            for mine, new in zip(rows, self.source.read(layer, first, self.length), strict=True):
                mine[:, :, place:end] = new

    def _reserve(self, end: int) -> None:
        """Make room for ``end`` tokens per layer. Memory moves only to grow."""
        if end <= self._room:
            return
        before, kept, self._room, self._where = self._rows, self._room, _grown(end), None
        likes = self.source.likes
        self._store = stacked(likes.values(), self._room)
        if self._store is not None:
            self._rows = {layer: (both[:1], both[1:]) for layer, both in zip(likes, self._store, strict=True)}
        else:
            self._rows = {
                layer: tuple(t.new_empty(*t.shape[:2], self._room, t.shape[3]) for t in both)
                for layer, both in likes.items()
            }
        for layer, old in before.items():
            for new, t in zip(self._rows[layer], old, strict=True):
                new[:, :, :kept] = t

    def _index(self, layer: int) -> ChosenChunks:
        return self._layers.setdefault(layer, ChosenChunks(self._chunk))

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows:
        held = self._place(self.length)
        end = held + len(block)
        self._reserve(end)
        for mine, new in zip(self._rows[layer], (k, v), strict=True):
            mine[:, :, held:end] = new
        tail = min(self.synced, self.length)
        near = tuple(t[:, :, 0 if spec.window is None else self._place(tail) : end] for t in self._rows[layer])
        return near if spec.window is None else self._window_rows(layer, spec.window, tail, near)

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        """Return None for layers with a sliding window, which read more than this cache's memory."""
        if any(self.source.specs[layer].window is not None for layer in self._rows):
            return None
        held = self._place(self.length)
        self._reserve(held + count)
        if self._where is None:
            self._where = addresses_of([self._rows[layer] for layer in layers], 0, 0)
        return None if self._where is None else replace(self._where, place=held, position=self.length)

    def _compact(self, start: int, path: Sequence[int]) -> None:
        every = self._rows.values() if self._store is None else [(self._store.flatten(0, 1),)]
        for rows in every:
            compact(rows, self._place(start), path)

    def _place(self, position: int) -> int:
        return self._chunks * self._chunk + position - self._tail

    @property
    def held(self) -> int:
        """Committed tokens that a pass attends to."""
        return self._place(self.length)

    def needs(self, shape: KVShape, tokens: int) -> int:
        config = self.config
        places = min(tokens, config.budget) + config.recent + config.growth + 2 * config.chunk + ROLLBACK_TOKENS
        chunks = tokens // config.chunk
        means = sum(layer.heads * layer.dim * torch.bfloat16.itemsize for layer in shape.layers.values())
        most = _grown(places) * shape.nbytes
        return most + ((chunks + chunks // 8 + BUFFER_GROWTH_TOKENS) * means if tokens > config.budget else 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, and of the chunk means (1/32 of a full cache in float32)."""
        means = sum(layer.mean_bytes for layer in self._layers.values())
        return means + sum(t.nbytes for rows in self._rows.values() for t in rows)


class ChosenChunks:
    """One layer's chunks: each one's mean key, and which are selected."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._means = torch.empty(0)  # [Hkv, room, d]; half precision suffices to select
        self._indexed = 0  # number of means
        self._chosen = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], the chunk in each slot

    def choose(self, query: torch.Tensor, source: FullCache, layer: int, rows: Rows, count: int) -> None:
        """Hold the ``count`` best of a layer's known chunks for the query ``[1, H, d]`` in the slots of ``rows``."""
        held = self._chosen.shape[1]
        if held < count:  # all chunks so far are held, in order: append the next ones
            first = held * self._chunk
            for mine, new in zip(rows, source.read(layer, first, count * self._chunk), strict=True):
                mine[:, :, first : count * self._chunk] = new
            self._chosen = torch.arange(count, device=query.device).repeat(rows[0].shape[1], 1)
        if count < self._indexed:
            self._replace(self._best(query, count), source, layer, rows)

    def extend(self, read: Callable[[int, int], torch.Tensor], length: int) -> None:
        count = length // self._chunk
        if count <= self._indexed:
            return
        chunks = self._in_chunks(read(self.known, length))
        heads, _, _, d = chunks.shape
        if not self._indexed or self._means.shape[1] < count:
            room = chunks.new_empty(heads, count + count // 8 + BUFFER_GROWTH_TOKENS, d, dtype=torch.bfloat16)
            if self._indexed:
                room[:, : self._indexed] = self._means[:, : self._indexed]
            self._means = room
        self._means[:, self._indexed : count] = chunks.mean(2)
        self._indexed = count

    @property
    def known(self) -> int:
        return self._indexed * self._chunk

    @property
    def mean_bytes(self) -> int:
        """Bytes reserved for means."""
        return self._means.nbytes

    def _in_chunks(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.view(rows.shape[0], -1, self._chunk, rows.shape[2])

    def _best(self, query: torch.Tensor, count: int) -> torch.Tensor:
        """Return the chunks with the best scores, ``[Hkv, count]``, the first chunk first. Half precision finds
        candidates, single precision decides. All of the buffer is multiplied: oneDNN compiles and keeps a program per
        shape."""
        means, summed = self._means, query.view(self._means.shape[0], -1, self._means.shape[2]).sum(1)
        coarse = torch.bmm(means, summed.to(means.dtype).unsqueeze(-1))[:, : self._indexed, 0]
        coarse[:, 0] = torch.inf
        some = coarse.topk(min(self._indexed, count + max(BUFFER_GROWTH_TOKENS, count // 4)), -1, sorted=False).indices
        near = means.gather(1, some.unsqueeze(-1).expand(-1, -1, means.shape[2]))
        scores = torch.bmm(near.float(), summed.float().unsqueeze(-1)).squeeze(-1)
        scores[some == 0] = torch.inf
        return some.gather(1, scores.topk(count, -1).indices)

    def _replace(self, best: torch.Tensor, source: FullCache, layer: int, rows: Rows) -> None:
        """Copy missing chunks of ``best`` into unwanted slots; on a GPU all, as counting would cost more."""
        heads, count = best.shape
        if not (best.is_cpu or source.offloaded):
            self._chosen, head = best, torch.arange(heads, device=best.device).repeat_interleave(count)
            for mine, new in zip(rows, source.chunks(layer, head, best.flatten(), self._chunk), strict=True):
                mine[0, :, : count * self._chunk] = new.view(heads, -1, new.shape[2])
            return
        wanted = torch.zeros(heads, self._indexed, dtype=torch.bool, device=best.device)
        wanted.scatter_(1, best, True)
        stays = wanted.gather(1, self._chosen)
        wanted.scatter_(1, self._chosen, False)
        head, slot = (~stays).nonzero(as_tuple=True)  # per head as many as in `wanted`, in the same order
        chunk = wanted.nonzero(as_tuple=True)[1]
        self._chosen[head, slot] = chunk
        for mine, new in zip(rows, source.chunks(layer, head, chunk, self._chunk), strict=True):
            slots = self._in_chunks(mine[0, :, : count * self._chunk])
            slots[head, slot] = new


def _grown(end: int) -> int:
    return end + max(BUFFER_GROWTH_TOKENS, end // 32)
