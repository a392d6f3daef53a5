"""Sparse views of a full cache, which draft for the same model, and what those share that choose chunks of a text."""

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
"""Keys that a view indexes in about the time in which the target reads one token of a long text. A rough figure: steps
that read 256 tokens then index 8,192 keys. Where the time of a step is bounded, it is measured instead."""


class View(Cache):
    """A sparse view of one row's full cache, for the same model.

    Tokens committed here are speculative. ``sync`` drops them and takes over what the full cache has committed since,
    so that all settled keys come from full attention.

    Args:
        source: the target's cache; read, never changed.
    """

    state_name: str | None = None
    """Under this name ``saved_state`` is kept with a text; None if the state is cheap to compute again."""

    uses_queries = False
    """True if it chooses by the queries of the source's last pass."""

    copies = False
    """True if it copies the chunks it chooses. A view that reads the source's memory in each pass cannot work over an
    offloaded cache."""

    def __init__(self, source: FullCache) -> None:
        if source.offloaded and not self.copies:
            raise ValueError(
                f"a {type(self).__name__} reads all keys in each of its passes, and some are not on the device; "
                "allowed is one that copies what it chooses: low-rank or retrieval, or a small model of its own"
            )
        self.source: FullCache = source
        source.views.add(self)
        self.length = self.settled = 0
        self._states: RecurrentStates | None = None
        self._states_from = 0  # what was settled when they were forked

    def recurrent(self) -> RecurrentStates:
        """The source's states, forked at the last ``sync``: recurrent layers see all of the text."""
        states = self._states
        if states is None or self._states_from != self.settled or states.length != self.length:
            states = self._states = self.source.recurrent().fork()
            self._states_from = self.settled
        return states

    @property
    def ready(self) -> bool:
        return bool(self.source.layers)

    def saved_state(self, length: int) -> Tensors:
        """State for the text's first ``length`` tokens that is expensive to compute, as tensors that must not be
        changed. A later view with the same ``state_name``, over a text with the same beginning, reads it from the
        source's ``saved_state``."""
        return {}

    @abstractmethod
    def sync(self) -> None: ...

    def _window_rows(self, layer: int, window: int, tail: int, near: Rows) -> Rows:
        """Rows of a layer with a sliding window, which chooses nothing: it sees its whole window.

        Args:
            window: as in ``AttentionSpec``.
            tail: position of the first of the rows ``near``, which end with the block being scored.
        """
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
        """Only speculative tokens can be dropped."""
        if not self.settled <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between {self.settled} and {self.length}")
        if self._states:
            self._states.truncate(length)
        self.length = length

    @abstractmethod
    def _compact(self, start: int, path: Sequence[int]) -> None:
        """Move the nodes of ``path``, of a tree at position ``start``, side by side; all are speculative."""


class ChunkIndex(Protocol):
    """What the chunks of a layer are chosen by."""

    @property
    def known(self) -> int:
        """Tokens whose keys it has taken in."""

    def extend(self, read: Callable[[int, int], torch.Tensor], length: int) -> None:
        """Take in a text's keys up to ``length``, a whole number of chunks.

        Args:
            read: gives the keys of some positions, ``[Hkv, m, d]``.
        """


class ChunkedView(View):
    """A view that chooses chunks of a long text, and sees the recent tokens behind them.

    Args:
        source: the target's cache; read, never changed.
        budget: tokens up to which a text is seen whole.
        chunk: tokens of a chunk.
        recent: the least number of recent tokens.
    """

    copies = True

    def __init__(self, source: FullCache, budget: int, chunk: int, recent: int) -> None:
        super().__init__(source)
        self._budget, self._chunk, self._recent = budget, chunk, recent
        self._tail = 0  # position of the first recent token; chunks are chosen among those before it

    @property
    def whole(self) -> bool:
        return self.source.length <= self._budget

    def prepare(self, tokens: int) -> bool:
        """Index a piece of each layer's keys."""
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
        """A layer's index, made at the first call."""

    def _far(self, length: int) -> int:
        """Tokens of a text that are chosen among: all but the most recent."""
        return max(0, length - self._recent) // self._chunk * self._chunk

    def _keys(self, layer: int) -> Callable[[int, int], torch.Tensor]:
        return lambda first, last: self.source.read_keys(layer, first, last)[0]
