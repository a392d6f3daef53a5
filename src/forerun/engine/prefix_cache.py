"""A prefix cache: keys and values of prompts that were read, for later prompts that begin alike.

Prompts are compared chunk by chunk, as they are read. What two of them share ends with a chunk, so that a token is read
in the same pass as it would be alone, and gets the same bits. Prompts of different namespaces share nothing: how long a
prompt takes to read must not tell what another tenant has sent.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from forerun.core.request import Request
from forerun.kv.shared_prefix import SharedPrefix, Tensors

Keys = Sequence[bytes]
"""A prompt's chunks but for the last: each key stands for the text up to the end of a chunk."""

KEY_BYTES = 16
"""Bytes of a key."""


def keys_of(request: Request, chunk: int) -> Keys:
    """The keys of a request's prompt, for chunks of ``chunk`` tokens. They differ between namespaces."""
    digest = hashlib.blake2b(repr((request.namespace, chunk)).encode(), digest_size=KEY_BYTES)
    keys = []
    for end in range(chunk, request.prompt_length, chunk):
        digest.update(request.prompt[end - chunk : end].tobytes())
        keys.append(digest.digest())
    return keys


def common(a: Keys, b: Keys) -> int:
    """Chunks that two prompts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class PrefixCache:
    """Beginnings of prompts, up to a number of bytes; those that were used least recently go first. Each may have a
    file open, so there are never more of them than half of what the process may have.

    Args:
        limit: maximum bytes of keys and values; 0 keeps nothing.

    Raises:
        ValueError: for a limit below 0.
    """

    def __init__(self, limit: int = 0) -> None:
        if limit < 0:
            raise ValueError(f"the prefix cache's limit is {limit} bytes; it must be 0 or more")
        self.limit = limit
        self.hits = self.misses = 0
        """Tokens of prompts that were kept here or in a store, and tokens that had to be read."""
        self._entries: OrderedDict[bytes, tuple[Keys, SharedPrefix]] = OrderedDict()  # by the last key

    def __len__(self) -> int:
        """Prompts whose beginnings are kept."""
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes kept."""
        return sum(beginning.nbytes for _, beginning in self._entries.values())

    def find(self, keys: Keys) -> tuple[SharedPrefix | None, int]:
        """The beginning that shares the most chunks with a prompt, and how many."""
        best, count = None, 0
        for last, (others, _) in self._entries.items():
            if (shared := common(keys, others)) > count:
                best, count = last, shared
        if best is None:
            return None, 0
        self._entries.move_to_end(best)
        return self._entries[best][1], count

    def keep(self, keys: Keys, beginning: SharedPrefix) -> None:
        """Keep a prompt's beginning, unless a longer one that holds it is kept. A shorter one that it holds is
        dropped."""
        if beginning.nbytes > self.limit or not keys:
            return
        for last, (others, _) in list(self._entries.items()):
            shared = common(keys, others)
            if shared == len(keys) < len(others):
                self._entries.move_to_end(last)
                return
            if shared == len(others):
                del self._entries[last]
        self._entries[keys[-1]] = keys, beginning
        self._trim()

    def add_state(self, keys: Keys, name: str, tensors: Tensors) -> None:
        """Keep the tensors of a view of this name with a prompt's beginning, if that is still kept itself."""
        entry = self._entries.get(keys[-1]) if keys else None
        if entry is not None:
            entry[1].add_state(name, tensors)
            self._trim()

    def count(self, hits: int, misses: int) -> None:
        """Count a lookup: tokens of whole chunks that were kept, and that were not."""
        self.hits += hits
        self.misses += misses

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()

    def _trim(self) -> None:
        most = _files()
        while self.nbytes > self.limit or len(self) > most:
            self._entries.popitem(last=False)


def _files() -> int:
    """Half of the files that this process may have open."""
    try:
        import resource
    except ImportError:  # not on Windows
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft // 2
