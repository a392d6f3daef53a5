"""Sparse caches over a full one: they copy or read a part of what the target has read, and try tokens on top of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from forerun.caches.base import Cache
from forerun.caches.full import FullCache
from forerun.core.block import Block


class View(Cache):
    """Over one row's full cache; the same weights read through both.

    What is committed here is on trial: ``sync`` takes it back and takes over what the full cache has committed since,
    whose keys come from full attention.

    Args:
        source: the target's own; read, never changed.
    """

    def __init__(self, source: FullCache) -> None:
        self.source = source
        self.length = 0
        self.settled = 0
        """Tokens that the source had committed at the last ``sync``; those behind them are on trial."""

    @property
    def ready(self) -> bool:
        """Whether the source has read enough to look at."""
        return bool(self.source.layers)

    @property
    def whole(self) -> bool:
        """Whether it holds all that the source holds: reading through it saves nothing then."""
        return False

    def prepare(self, tokens: int) -> bool:
        """Do a piece of what the first ``sync`` needs, looking at about so many of the source's tokens.

        Returns:
            Whether all is done.
        """
        return True

    @abstractmethod
    def sync(self) -> None:
        """Follow the source."""

    def verified(self, rows: Sequence[int], drafted: int, accepted: int) -> None:
        """The source has committed what it accepted of a draft that was made with this cache.

        Args:
            rows: where the accepted tokens' queries are in ``source.queries``.
            drafted, accepted: tokens.
        """

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``."""
        start = self.length + len(block.pending)
        self._compact(start, path)
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``; only tokens on trial can be forgotten."""
        if not self.settled <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between {self.settled} and {self.length}")
        self.length = length

    @abstractmethod
    def _compact(self, start: int, path: Sequence[int]) -> None:
        """Bring the nodes of a tree at position ``start`` side by side; all of them are on trial."""
