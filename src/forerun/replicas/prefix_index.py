"""Which replica has read the beginning of a request.

Requests are compared by text, because the router has no tokenizer. A text is cut into blocks, and each cut has a digest
of all text before it. So two requests share one digest for each block that their beginnings share. Digests contain the
tenant and the namespace, so they say nothing of other tenants' texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

BLOCK_CHARACTERS = 1024
"""About 250 tokens, half of the shortest text that a store keeps."""
REMEMBERED_DIGESTS = 1 << 17
"""Enough for 128 million characters. The least recently used are forgotten."""

CHAT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""What chats and lists of prompts are in the APIs, in the order in which it is read."""

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def digests(tenant: str, body: bytes) -> list[bytes]:
    """Digests of a request's beginnings, shortest first; the first one is of its namespace alone.

    A body that the server will refuse has no beginnings.
    """
    try:
        fields = json.loads(body)
        namespace = (fields.get("forerun") or {}).get("namespace") or "default"
        text = _text(fields)
    except (ValueError, AttributeError, RecursionError):
        return []
    running = hashlib.blake2b(f"{tenant}/{namespace}\0".encode(errors="surrogatepass"), digest_size=16)
    cuts = [running.copy().digest()]
    for first in range(0, len(text) - BLOCK_CHARACTERS + 1, BLOCK_CHARACTERS):
        running.update(text[first : first + BLOCK_CHARACTERS].encode(errors="surrogatepass"))
        cuts.append(running.copy().digest())
    return cuts


def _text(fields: dict[str, Any]) -> str:
    """The prompt as text: requests that begin alike have texts that begin alike."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return json.dumps([fields.get(name) for name in CHAT_FIELDS], ensure_ascii=False)


class PrefixReaders(Generic[ReplicaT]):
    """Which replicas have read which beginnings.

    Args:
        limit: digests that are remembered.
    """

    def __init__(self, limit: int = REMEMBERED_DIGESTS) -> None:
        self._limit = limit
        self._readers: OrderedDict[bytes, set[ReplicaT]] = OrderedDict()

    def remember(self, beginnings: Sequence[bytes], replica: ReplicaT) -> None:
        """Note that a replica reads a request with these beginnings."""
        for digest in beginnings:
            self._readers.setdefault(digest, set()).add(replica)
            self._readers.move_to_end(digest)
        while len(self._readers) > self._limit:
            self._readers.popitem(last=False)

    def keep(self, replicas: Iterable[ReplicaT]) -> None:
        """Forget all replicas but these."""
        present = set(replicas)
        for digest, readers in list(self._readers.items()):
            readers &= present
            if not readers:
                del self._readers[digest]

    def depth(self, beginnings: Sequence[bytes], replica: ReplicaT) -> int:
        """The number of a request's beginnings that a replica has read."""
        return next(
            (at for at, digest in enumerate(beginnings) if replica not in self._readers.get(digest, ())),
            len(beginnings),
        )


def preferred(
    beginnings: Sequence[bytes],
    replicas: Iterable[ReplicaT],
    readers: PrefixReaders[ReplicaT],
    load: Callable[[ReplicaT], int],
    rows: int,
) -> list[ReplicaT]:
    """Replicas that have read some of a request, those that have read the most first.

    A replica with ``rows`` requests is left out. Usually a place in its batch takes longer than reading a text again,
    and a frequent text has to reach more than one replica. A replica that only knows the namespace is preferred if it
    is idle: its texts reach the others soon.

    Args:
        beginnings: digests of the request, the first one of its namespace alone.
        replicas: to choose from.
        readers: which replicas have read which beginnings.
        load: the number of a replica's requests.
        rows: requests that a replica decodes at once.
    """
    depths = {replica: readers.depth(beginnings, replica) for replica in replicas}
    idle = [each for each, depth in depths.items() if depth and load(each) < (rows if depth > 1 else 1)]
    return sorted(idle, key=lambda each: -depths[each])
