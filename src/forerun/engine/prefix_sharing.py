"""Prefix sharing: a common prefix of prompts is prefilled once, and kept for later prompts.

Prompts are compared chunk by chunk. If passes are bitwise exact, bits do not depend on where prompts are cut, so chunks
are short. Otherwise they are the chunks of the prefill, so that each token shares its pass with the same others as
alone. Namespaces share nothing, because the duration of a prefill must not reveal what another tenant sent.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from forerun.core.fairness import eviction, owner_of
from forerun.core.request import PrefixBreak, Request
from forerun.core.tree import IntArray
from forerun.engine.step import BatchRow
from forerun.kv.recurrent import RECURRENT_STATES
from forerun.kv.shared_prefix import SharedPrefix, Tensors

if TYPE_CHECKING:
    from forerun.engine.kv_store import KVStore, StoredText

log = logging.getLogger(__name__)

SHARED_CHUNK_TOKENS = 64
"""Granularity in which prompts are compared; fewer common tokens are not shared. Less would need more keys."""

NO_MEMORY = (OSError, MemoryError, torch.OutOfMemoryError)
"""Errors of copying a prefix, which is then prefilled instead."""

Keys = Sequence[bytes]
"""A prompt's chunks but the last; each key identifies the prefix up to a chunk's end."""

KEY_BYTES = 16
SHOWN_TOKENS = 16
"""Tokens in a ``PrefixBreak``: about a line of text."""


def keys_of(request: Request, chunk: int) -> Keys:
    """Return the keys of a request's prompt, for chunks of ``chunk`` tokens. They differ between namespaces."""
    return _keys(request.prompt[:-1], request.namespace, chunk)


def _keys(tokens: IntArray, namespace: str, chunk: int) -> Keys:
    digest = hashlib.blake2b(repr((namespace, chunk)).encode(), digest_size=KEY_BYTES)
    keys = []
    for end in range(chunk, len(tokens) + 1, chunk):
        digest.update(tokens[end - chunk : end].tobytes())
        keys.append(digest.digest())
    return keys


def common(a: Keys, b: Keys) -> int:
    """Count the chunks that two prompts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class _Kept(NamedTuple):
    """A cached prefix: keys of its complete chunks, keys and values, the namespace that may use it, and its ids."""

    keys: Keys
    beginning: SharedPrefix
    namespace: str
    tokens: IntArray


class PrefixCache:
    """Prefixes of prompts, up to ``limit`` bytes (0 or more, else ValueError), and at most half the limit of open
    files, as each may keep one open; evicts the least recently used one of the largest tenant."""

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise ValueError(f"the prefix cache's limit is {limit} bytes; it must be 0 or more")
        self.limit = limit
        self.hits = self.misses = 0
        """Prompt tokens found here or in a store, and prompt tokens to prefill."""
        self._entries: OrderedDict[bytes, _Kept] = OrderedDict()  # by the last key

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(kept.beginning.nbytes for kept in self._entries.values())

    def find(self, keys: Keys, prompt: IntArray) -> tuple[SharedPrefix | None, int, int]:
        """Return the prefix that shares the most with a prompt, and how many chunks and tokens."""
        shared = {last: count for last, kept in self._entries.items() if (count := common(keys, kept.keys))}
        most = max(shared.values(), default=0)
        lengths = {
            last: _common_tokens(self._entries[last].tokens, prompt) for last, count in shared.items() if count == most
        }
        if not lengths:
            return None, 0, 0
        best = max(lengths, key=lengths.__getitem__)
        self._entries.move_to_end(best)
        return self._entries[best].beginning, most, lengths[best]

    def prefix_break(self, request: Request) -> PrefixBreak | None:
        """Return where a prompt diverges from its namespace's most similar prefix; None if one extends the other."""
        ids = request.prompt
        others = [kept.tokens for kept in self._entries.values() if kept.namespace == request.namespace]
        lengths = [_common_tokens(ids, tokens) for tokens in others]
        best = max(range(len(others)), key=lengths.__getitem__, default=None)
        if best is None or lengths[best] == min(len(ids), len(others[best])):
            return None
        at = lengths[best]
        return PrefixBreak(at, *(each[at : at + SHOWN_TOKENS].copy() for each in (others[best], ids)))

    def keep(self, keys: Keys, beginning: SharedPrefix, namespace: str, tokens: IntArray) -> None:
        """Keep a prompt's prefix, unless a longer one contains it; drop a shorter one that it contains."""
        if beginning.nbytes > self.limit or not keys:
            return
        for last, kept in list(self._entries.items()):
            others, shared = kept.keys, common(keys, kept.keys)
            if shared == len(keys) < len(others) or _begins(kept.tokens, tokens):
                self._entries.move_to_end(last)
                return
            if shared == len(others):
                del self._entries[last]
        self._entries[keys[-1]] = _Kept(keys, beginning, namespace, tokens.copy())
        self._trim()

    def add_state(self, keys: Keys, name: str, tensors: Tensors) -> None:
        """Keep the tensors of a view with its prefix, if that is still cached."""
        entry = self._entries.get(keys[-1]) if keys else None
        if entry is not None:
            entry.beginning.add_state(name, tensors)
            self._trim()

    def count(self, hits: int, misses: int) -> None:
        """Count a lookup: tokens of complete chunks found, and not found."""
        self.hits += hits
        self.misses += misses

    def clear(self) -> None:
        self._entries.clear()

    def _trim(self) -> None:
        most = _files()
        while self.nbytes > self.limit or len(self) > most:
            held = [(key, owner_of(kept.namespace), kept.beginning.nbytes) for key, kept in self._entries.items()]
            oldest = eviction(held)
            assert oldest is not None
            del self._entries[oldest]


def _begins(longer: IntArray, tokens: IntArray) -> bool:
    return len(tokens) < len(longer) and _common_tokens(longer, tokens) == len(tokens)


def _common_tokens(a: IntArray, b: IntArray) -> int:
    count = min(len(a), len(b))
    different = np.flatnonzero(a[:count] != b[:count])
    return int(different[0]) if len(different) else count


def _files() -> int:
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2


class PrefixSharing:
    """Which rows of a batch wait for which, and where their own prefill starts.

    Args:
        store: returns prefixes on disk, or None. It is replaced after the model has changed.
        refresh: checks whether the model has changed; returns a number that changes with it.
        anywhere: whether bits do not depend on where prompts are cut; prompts in memory and answers are then shared to
            the token.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        store: Callable[[], KVStore | None],
        chunk: int,
        refresh: Callable[[], int],
        anywhere: bool,
    ) -> None:
        self._prefixes, self._current_store, self.chunk, self._look = prefixes, store, chunk, refresh
        self._anywhere = anywhere
        self._version: int | None = None
        self._keys: dict[BatchRow, Keys] = {}
        self._leaders: dict[BatchRow, tuple[BatchRow, int]] = {}  # the row to follow, and the number of common chunks
        self._unkept: set[BatchRow] = set()
        self._stored: dict[BatchRow, StoredText] = {}  # the prefix on disk that holds most of a row's

    @property
    def _store(self) -> KVStore | None:
        return self._current_store()

    def refresh(self) -> None:
        """Check whether the model has changed; if so, keep and share nothing of earlier rows."""
        version = self._look()
        if version != self._version:
            self._version = version
            self._keys.clear()
            self._leaders.clear()
            self._unkept.clear()
            self._stored.clear()

    def join(self, row: BatchRow) -> None:
        """Start a row with an empty cache from a kept prefix, or let it follow a row that shares more."""
        keys = keys_of(row.request, self.chunk)
        if row.cache.stateful:
            row.cache.recurrent().keep_at(row.request.turns)
        if row.request.wants_prefix_break:
            row.request.prefix_break = self._prefixes.prefix_break(row.request)
        self._follow(row, keys)
        hits = row.cache.length // self.chunk
        self._prefixes.count(self.chunk * hits, self.chunk * (len(keys) - hits))
        self._keys[row] = keys
        if keys:
            self._unkept.add(row)

    def shares(self, request: Request) -> bool:
        """Return whether other rows are likely to start from this request's cache."""
        return self._store is None and self._prefixes.limit > 0 and request.prompt_length > self.chunk

    def keeps(self, request: Request, token_bytes: int) -> bool:
        """Return whether a prompt may be kept for later ones, at ``token_bytes`` bytes of keys and values per token."""
        if self._store is not None:
            return True
        return request.prompt_length > self.chunk and request.prompt_length * token_bytes <= self._prefixes.limit

    def verify(self, request: Request) -> None:
        """Verify the stored file that a request's prompt may start with; from any thread."""
        if self._store is not None:
            self._store.find(keys_of(request, self.chunk), request.namespace)

    def waits(self, row: BatchRow) -> bool:
        """Return whether another row is about to prefill what this one needs next."""
        return row in self._leaders

    def read(self, row: BatchRow) -> None:
        """Release followers once a row has prefilled all that they share; keep its prompt when complete."""
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row and row.cache.length >= count * self.chunk:
                self._begin(follower, row, count)
        if row in self._unkept and row.cache.length >= len(self._keys[row]) * self.chunk:
            self.refresh()
            if row in self._unkept:
                self._unkept.discard(row)
                self._keep(row, self._keys[row])

    def leave(self, row: BatchRow) -> None:
        """Remove a row, keeping its answer and views' state; followers start from its tokens and look for another."""
        self._leaders.pop(row, None)
        keys = self._keys.pop(row, ())
        if row in self._unkept:
            self._unkept.discard(row)
        elif keys:
            keys = self._keep_answer(row) or keys
        self._note(row, keys)
        for follower, (leader, count) in list(self._leaders.items()):
            if leader is row:
                self._begin(follower, row, min(count, row.cache.length // self.chunk))
                self._follow(follower, self._keys[follower])

    def _keep(self, row: BatchRow, keys: Keys) -> None:
        """Keep a prompt on disk, or else in memory."""
        if self._store is not None:
            text = self._store.keep(keys, row.request.namespace, self.chunk, row.cache)
            if text is not None:
                self._stored[row] = name, chunks = text
                self._store.add_state(name, RECURRENT_STATES, row.cache.recurrent().saved_state(chunks * self.chunk))
                return
        length = len(keys) * self.chunk
        if length * row.cache.shape.nbytes <= self._prefixes.limit:
            try:
                beginning, request = row.cache.share(length), row.request
                tokens = request.tokens[: row.cache.shared_length if self._anywhere else length]
                self._prefixes.keep(keys, beginning, request.namespace, tokens)
            except NO_MEMORY as error:
                log.warning("no memory to keep a prefix: %s", error)

    def _keep_answer(self, row: BatchRow) -> Keys | None:
        """Keep a prompt in memory together with its answer, unless that would need a copy; return their keys."""
        request, cache = row.request, row.cache
        if not self._anywhere or self._store is not None or request.error is not None or not cache.shared_length:
            return None
        try:
            grown = cache.grow_prefix()
        except NO_MEMORY as error:
            log.warning("no memory to keep an answer: %s", error)
            return None
        if grown is None:
            return None
        tokens = request.tokens[: grown.length]
        keys = _keys(tokens, request.namespace, self.chunk)
        self._prefixes.keep(keys, grown, request.namespace, tokens)
        return keys

    def _note(self, row: BatchRow, keys: Keys) -> None:
        """Keep the state of views beside a prompt's prefix: on disk only for the part that the stored file shares."""
        text = self._stored.pop(row, None)
        if row.request.error is not None or not keys:
            return
        for view in row.cache.views:
            if view.state_name is None:
                continue
            if self._store is not None and text is not None:
                name, chunks = text
                length = min(row.cache.length, chunks * self.chunk)
                self._store.add_state(name, view.state_name, view.saved_state(length))
            elif row.cache.length >= len(keys) * self.chunk:
                self._prefixes.add_state(keys, view.state_name, view.saved_state(len(keys) * self.chunk))

    def _follow(self, row: BatchRow, keys: Keys) -> None:
        prefix, most, length = self._kept(row, keys)
        own, leader = row.cache.length // self.chunk, None
        for other, others in self._keys.items():
            if other is row:  # follow only earlier rows, so that no two wait for each other
                break
            if (count := common(keys, others)) > max(most, own):
                most, leader = count, other
        if leader is not None and leader.cache.length < most * self.chunk:
            self._leaders[row] = leader, most
        elif leader is not None:
            self._begin(row, leader, most)
        elif prefix is not None and most > own:
            self._begin_with(row, lambda: prefix, length)

    def _kept(self, row: BatchRow, keys: Keys) -> tuple[SharedPrefix | None, int, int]:
        """Return the prefix that shares the most chunks with a prompt, how many, and how many tokens to start with.
        Between equals, disk wins, as it has the views' state."""
        prefix, most, length = self._prefixes.find(keys, row.request.prompt[:-1])
        if self._store is not None:
            stored = self._store.find(keys, row.request.namespace, max(0, most - 1))
            if stored is not None:
                return *stored, stored[1] * self.chunk
        return prefix, most, length if self._anywhere else most * self.chunk

    def _begin(self, row: BatchRow, leader: BatchRow, count: int) -> None:
        self._leaders.pop(row, None)
        if count * self.chunk > row.cache.length:
            self._begin_with(row, lambda: leader.cache.share(count * self.chunk), count * self.chunk)

    def _begin_with(self, row: BatchRow, beginning: Callable[[], SharedPrefix], length: int) -> None:
        try:
            row.begin_with(beginning(), length)
        except NO_MEMORY as error:
            log.warning("no memory to share a prefix (%s); it needs another prefill", error)
