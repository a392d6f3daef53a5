"""Rows whose prompts begin alike: one reads the beginning; the others follow it and read only what is their own.

What is shared ends with a chunk of the prompt. Where passes are bitwise exact, a token's bits do not depend on where
prompts are cut for reading; then chunks are short. Elsewhere they are the chunks of reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from forerun.core.request import Request
from forerun.engine.prefix_cache import Keys, PrefixCache, common, keys_of
from forerun.engine.step import Row
from forerun.kv.shared_prefix import SharedPrefix

if TYPE_CHECKING:
    from forerun.engine.kv_store import KVStore, StoredText

log = logging.getLogger(__name__)

SHARED_CHUNK_TOKENS = 64
"""Granularity of prefix sharing, in tokens. Up to this many common tokens are read again, which takes about as long as
a few steps. Fewer would make more keys."""


class PrefixSharing:
    """Which rows of a batch wait for which, and where they begin to read themselves.

    Args:
        prefixes: what is kept of earlier prompts in memory.
        store: what is kept of them on disk, or None.
        chunk: tokens of a chunk.
    """

    def __init__(self, prefixes: PrefixCache, store: KVStore | None, chunk: int) -> None:
        self._prefixes, self._store, self.chunk = prefixes, store, chunk
        self._keys: dict[Row, Keys] = {}
        self._leaders: dict[Row, tuple[Row, int]] = {}  # the row to follow, and the chunks that both share
        self._unkept: set[Row] = set()
        self._stored: dict[Row, StoredText] = {}  # the text on disk that holds most of a row's

    def join(self, row: Row) -> None:
        """A row with an empty cache: it begins with what is kept, or follows a row that shares more with it."""
        keys = keys_of(row.request, self.chunk)
        self._follow(row, keys)
        hits = row.cache.length // self.chunk
        self._prefixes.count(self.chunk * hits, self.chunk * (len(keys) - hits))
        self._keys[row] = keys
        if keys:
            self._unkept.add(row)

    def shares(self, request: Request) -> bool:
        """Whether other rows are likely to begin with a request's prompt, read from its cache."""
        return self._store is None and self._prefixes.limit > 0 and request.prompt_length > self.chunk

    def waits(self, row: Row) -> bool:
        """Whether another row is about to read what this one needs next."""
        return row in self._leaders

    def read(self, row: Row) -> None:
        """A row has read on: those that share no more with it go their own way; its prompt may be kept."""
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row and row.cache.length >= count * self.chunk:
                self._begin(follower, row, count)
        if row in self._unkept and row.cache.length >= len(self._keys[row]) * self.chunk:
            self._unkept.discard(row)
            self._keep(row, self._keys[row])

    def leave(self, row: Row) -> None:
        """A row ends. Those that follow it take what it has read, and look for another; what its views made is kept."""
        self._leaders.pop(row, None)
        self._unkept.discard(row)
        self._note(row, self._keys.pop(row, ()))
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row:
                self._begin(follower, row, min(count, row.cache.length // self.chunk))
                self._follow(follower, self._keys[follower])

    def _keep(self, row: Row, keys: Keys) -> None:
        """Keep a prompt on disk; if that does not take it, in memory."""
        if self._store is not None:
            kept = self._store.keep(keys, row.request.namespace, self.chunk, row.cache)
            if kept is not None:
                self._stored[row] = kept
                return
        length = len(keys) * self.chunk
        if length * row.cache.token_bytes <= self._prefixes.limit:
            try:
                self._prefixes.keep(keys, row.cache.share(length))
            except (OSError, MemoryError) as error:
                log.warning("there is no memory to keep a prompt's beginning: %s", error)

    def _note(self, row: Row, keys: Keys) -> None:
        """Keep what views made of a prompt beside it: on disk only of what the text there has in common with it."""
        kept = self._stored.pop(row, None)
        if row.request.error is not None:
            return
        for view in row.cache.views:
            if view.state_name is None:
                continue
            if self._store is not None and kept is not None:
                name, chunks = kept
                self._store.add_state(
                    name, view.state_name, view.saved_state(min(row.cache.length, chunks * self.chunk))
                )
            elif row.cache.length >= len(keys) * self.chunk:
                self._prefixes.add_state(keys, view.state_name, view.saved_state(len(keys) * self.chunk))

    def _follow(self, row: Row, keys: Keys) -> None:
        kept, most = self._kept(row, keys)
        own, leader = row.cache.length // self.chunk, None
        for other, others in self._keys.items():
            if other is row:  # only who came before is followed, so that no two wait for each other
                break
            if (count := common(keys, others)) > max(most, own):
                most, leader = count, other
        if leader is not None and leader.cache.length < most * self.chunk:
            self._leaders[row] = leader, most
        elif leader is not None:
            self._begin(row, leader, most)
        elif kept is not None and most > own:
            self._begin_with(row, lambda: kept, most)

    def _kept(self, row: Row, keys: Keys) -> tuple[SharedPrefix | None, int]:
        """The beginning that shares the most chunks with a prompt, and how many; on disk, if there is as much as in
        memory: there lies what views made of it."""
        kept, most = self._prefixes.find(keys)
        if self._store is None:
            return kept, most
        stored = self._store.find(keys, row.request.namespace, max(0, most - 1))
        return (kept, most) if stored is None else (stored.prefix, stored.chunks)

    def _begin(self, row: Row, leader: Row, count: int) -> None:
        self._leaders.pop(row, None)
        if count * self.chunk > row.cache.length:
            self._begin_with(row, lambda: leader.cache.share(count * self.chunk), count)

    def _begin_with(self, row: Row, beginning: Callable[[], SharedPrefix], count: int) -> None:
        try:
            row.begin_with(beginning(), count * self.chunk)
        except (OSError, MemoryError) as error:
            log.warning("there is no memory to share a beginning (%s); the row reads it itself", error)
