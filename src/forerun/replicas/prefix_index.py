"""An index of which replicas have prefilled which prompt prefixes.

The router has no tokenizer, so it cuts prompts into blocks of characters; each cut has a digest of everything before
it. Digests cover tenant and namespace, so they reveal nothing about other tenants' prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

BLOCK_CHARACTERS = 1024
"""About 250 tokens, half of the shortest prefix that a store keeps."""
REMEMBERED_DIGESTS = 1 << 17
"""Enough for 128 million characters. The least recently used are dropped."""

CHAT_FIELDS = ("tools", "system", "instructions", "messages", "input", "prompt")
"""Fields that hold a prompt in the APIs, in the order in which templates use them."""

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


def digests(tenant: str, body: bytes) -> list[bytes]:
    """Return digests of a request's prefixes, the shortest (its namespace) first; none for a body to be refused."""
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
    """Return the prompt as characters. Requests that share a prefix share one here, too."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return json.dumps([fields.get(name) for name in CHAT_FIELDS], ensure_ascii=False)


class PrefixReaders(Generic[ReplicaT]):
    """Which replicas have prefilled which prefixes, for up to ``limit`` digests."""

    def __init__(self, limit: int = REMEMBERED_DIGESTS) -> None:
        self._limit = limit
        self._readers: OrderedDict[bytes, set[ReplicaT]] = OrderedDict()

    def remember(self, beginnings: Sequence[bytes], replica: ReplicaT) -> None:
        """Record that a replica prefills a request with these prefixes."""
        for digest in beginnings:
            self._readers.setdefault(digest, set()).add(replica)
            self._readers.move_to_end(digest)
        while len(self._readers) > self._limit:
            self._readers.popitem(last=False)

    def keep(self, replicas: Iterable[ReplicaT]) -> None:
        present = set(replicas)
        for digest, readers in list(self._readers.items()):
            readers &= present
            if not readers:
                del self._readers[digest]

    def depth(self, beginnings: Sequence[bytes], replica: ReplicaT) -> int:
        """Count a request's prefixes that a replica has prefilled."""
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
    """Return the replicas that share a prefix with a request, longest first.

    A replica whose ``load`` is ``rows`` requests is left out: waiting for a place in its batch usually costs more than
    prefilling again, and a frequent prefix must reach more than one. One that shares only the namespace, the first of
    ``beginnings``, is preferred only if idle, because the others soon index its outputs.
    """
    depths = {replica: readers.depth(beginnings, replica) for replica in replicas}
    idle = [each for each, depth in depths.items() if depth and load(each) < (rows if depth > 1 else 1)]
    return sorted(idle, key=lambda each: -depths[each])
