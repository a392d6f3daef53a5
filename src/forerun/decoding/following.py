"""Of rows whose prompts begin alike, one reads the beginning; the others follow it and read only what is their own."""

from __future__ import annotations

import logging

from forerun.decoding.prefixes import Keys, PrefixCache, common, keys_of
from forerun.decoding.row import Row

log = logging.getLogger(__name__)


class Following:
    """Which rows of a batch wait for which, and where they begin to read themselves.

    Args:
        prefixes: what is kept of earlier prompts.
    """

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._keys: dict[Row, Keys] = {}
        self._leaders: dict[Row, tuple[Row, int]] = {}  # the row that is followed, and the chunks that both share

    def join(self, row: Row) -> None:
        """A row with an empty cache: it begins with what is kept, or follows a row that shares more with it."""
        keys = keys_of(row.request, row.chunk)
        self._follow(row, keys)
        self._prefixes.hits += row.cache.length // row.chunk
        self._prefixes.misses += len(keys) - row.cache.length // row.chunk
        self._keys[row] = keys

    def waits(self, row: Row) -> bool:
        """Whether another row is about to read what this one needs next."""
        return row in self._leaders

    def read(self, row: Row) -> None:
        """A row has read a chunk: those that share no more with it go their own way; its prompt may be kept."""
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row and row.cache.length >= count * row.chunk:
                self._begin(follower, row, count)
        keys = self._keys.get(row, ())
        if not row.reading and 0 < len(keys) * row.chunk * row.cache.token_bytes <= self._prefixes.limit:
            try:
                self._prefixes.keep(keys, row.cache.share(len(keys) * row.chunk))
            except (OSError, MemoryError) as error:
                log.warning("there is no memory to keep a prompt's beginning: %s", error)

    def leave(self, row: Row) -> None:
        """A row ends. Those that follow it take what it has read, and look for another."""
        self._leaders.pop(row, None)
        self._keys.pop(row, None)
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row:
                self._begin(follower, row, min(count, row.cache.length // row.chunk))
                self._follow(follower, self._keys[follower])

    def _follow(self, row: Row, keys: Keys) -> None:
        kept, most = self._prefixes.find(keys)
        held, leader = row.cache.length // row.chunk, None
        for other, others in self._keys.items():
            if other is row:  # only who came before is followed, so that no two wait for each other
                break
            if (count := common(keys, others)) > max(most, held):
                most, leader = count, other
        if leader is not None and leader.cache.length < most * row.chunk:
            self._leaders[row] = leader, most
        elif leader is not None:
            self._begin(row, leader, most)
        elif kept is not None and most > held:
            row.begin_with(kept, most * row.chunk)

    def _begin(self, row: Row, leader: Row, count: int) -> None:
        self._leaders.pop(row, None)
        if count * row.chunk > row.cache.length:
            try:
                row.begin_with(leader.cache.share(count * row.chunk), count * row.chunk)
            except (OSError, MemoryError) as error:
                log.warning("there is no memory to share a beginning (%s); the row reads it itself", error)
