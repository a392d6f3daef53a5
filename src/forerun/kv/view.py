"""Sparse views of a full cache, which draft for the same model, and a base for those that select chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from forerun.core.block import Block
from forerun.kernels.attention.attention import Rows
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.recurrent import RecurrentStates
from forerun.kv.shared_prefix import Tensors

KEYS_PER_READ_TOKEN = 32
"""Keys that a view indexes in about the time of the target's prefill of one token after a long prompt, roughly;
measured instead where step times are bounded."""


class View(Cache):
    """A sparse view of one row's full cache, its source, for the same model.

    Tokens committed here are speculative: ``sync`` replaces them by the source's, so that all synced keys come from
    full attention.
    """

    state_name: str | None = None
    """Name of ``saved_state`` in a prefix; None if the state is cheap to recompute."""

    uses_queries = False
    """Whether it selects by the queries of the source's last pass."""

    copies = False
    """Whether it copies the chunks it selects; other views cannot use an offloaded source."""

    def __init__(self, source: FullCache) -> None:
        if source.offloaded and not self.copies:
            raise ValueError(
                f"a {type(self).__name__} reads all keys in each pass, but some are offloaded; use one that copies "
                "what it selects (low-rank or retrieval), or a small model"
            )
        self.source: FullCache = source
        source.views.add(self)
        self.length = self.synced = 0
        self._states: RecurrentStates | None = None
        self._states_from = 0  # what was synced when they were forked

    def recurrent(self) -> RecurrentStates:
        """Return the source's states, forked at the last ``sync``: recurrent layers see all of the sequence."""
        states = self._states
        if states is None or self._states_from != self.synced or states.length != self.length:
            states = self._states = self.source.recurrent().fork()
            self._states_from = self.synced
        return states

    @property
    def ready(self) -> bool:
        return bool(self.source.layers)

    def saved_state(self, length: int) -> Tensors:
        """Return state of the first ``length`` tokens that is expensive to compute and must not be changed. Views with
        this ``state_name`` get it from a source with the same prefix."""
        return {}

    @abstractmethod
    def sync(self) -> None: ...

    def _window_rows(self, layer: int, window: int, tail: int, near: Rows) -> Rows:
        """Return a sliding window of a layer; ``near``, with the current block, starts at position ``tail``."""
        first = max(0, self.length - window + 1)
        before = self.source.read(layer, min(first, tail), tail)
        return tuple(
            torch.cat((old, new[:, :, max(0, first - tail) :]), 2) for old, new in zip(before, near, strict=True)
        )

    def commit(self, block: Block, path: Sequence[int]) -> None:
        start = self.length + len(block.pending)
        self._compact(start, path)
        if self._states:
            self._states.commit(block, path)
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        if not self.synced <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between {self.synced} and {self.length}")
        if self._states:
            self._states.truncate(length)
        self.length = length

    @abstractmethod
    def _compact(self, start: int, path: Sequence[int]) -> None:
        """Move the nodes of ``path``, of a speculative tree at position ``start``, together."""


class ChunkIndex(Protocol):
    """What a layer's chunks are selected by."""

    @property
    def known(self) -> int:
        """Tokens whose keys are indexed."""

    def extend(self, read: Callable[[int, int], torch.Tensor], length: int) -> None:
        """Index a sequence's keys up to ``length``, a multiple of the chunk; ``read`` returns some, ``[Hkv, m, d]``."""


class ChunkedView(View):
    """A view that selects chunks of a sequence of over ``budget`` tokens, and sees the recent tokens after them."""

    copies = True

    def __init__(self, source: FullCache, budget: int, chunk: int, recent: int) -> None:
        super().__init__(source)
        self._budget, self._chunk, self._recent = budget, chunk, recent
        self._tail = 0  # position of the first recent token; chunks are selected before it

    @property
    def whole(self) -> bool:
        return self.source.length <= self._budget

    def prepare(self, tokens: int) -> bool:
        end, done = self._far(self.source.length), True
        piece = max(1, KEYS_PER_READ_TOKEN * tokens // self._chunk) * self._chunk
        for layer in self.source.layers:
            if self.source.specs[layer].window is None:
                index = self._index(layer)
                last = min(end, index.known + piece)
                index.extend(self._keys(layer), last)
                done = done and last == end
        return done

    @abstractmethod
    def _index(self, layer: int) -> ChunkIndex:
        """Return a layer's index, created at the first call."""

    def _far(self, length: int) -> int:
        """Return the number of tokens to select from: all but the most recent."""
        return max(0, length - self._recent) // self._chunk * self._chunk

    def _keys(self, layer: int) -> Callable[[int, int], torch.Tensor]:
        return lambda first, last: self.source.read_keys(layer, first, last)[0]
