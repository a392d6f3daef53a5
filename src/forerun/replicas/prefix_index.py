"""Which replica has read how a request begins.

Requests are compared by text, because whoever routes them has no tokenizer. A text is cut at multiples of ``BLOCK``
characters, and each cut has a digest of all before it. So two requests share as many digests as they share blocks at
their beginnings. Digests contain the tenant and the namespace, so they say nothing of anybody else's texts.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

BLOCK = 1024
"""Characters of a block: about 250 tokens, half of the least text that a store keeps."""
KNOWN = 1 << 17
"""Digests that are remembered: those of 128 million characters. The least recently used are forgotten."""

R = TypeVar("R", bound=Hashable)


def digests(tenant: str, body: bytes) -> list[bytes]:
    """Digests of a request's beginnings, shortest first; the first one is of its namespace alone.

    A body that the server will refuse has no beginnings.
    """
    try:
        asked = json.loads(body)
        namespace = (asked.get("forerun") or {}).get("namespace") or "default"
        text = _text(asked)
    except (ValueError, AttributeError, RecursionError):
        return []
    running = hashlib.blake2b(f"{tenant}/{namespace}\0".encode(errors="surrogatepass"), digest_size=16)
    found = [running.copy().digest()]
    for first in range(0, len(text) - BLOCK + 1, BLOCK):
        running.update(text[first : first + BLOCK].encode(errors="surrogatepass"))
        found.append(running.copy().digest())
    return found


def _text(asked: dict[str, Any]) -> str:
    """What the model is asked, in an order in which requests that begin alike have texts that begin alike."""
    prompt = asked.get("prompt")
    if isinstance(prompt, str):
        return prompt
    return json.dumps([asked.get("tools"), asked.get("messages"), prompt], ensure_ascii=False)


class Places(Generic[R]):
    """Which replicas have read which beginnings.

    Args:
        known: digests that are remembered, at most.
    """

    def __init__(self, known: int = KNOWN) -> None:
        self._known = known
        self._readers: OrderedDict[bytes, set[R]] = OrderedDict()

    def remember(self, beginnings: Sequence[bytes], replica: R) -> None:
        """A replica reads a request with these beginnings."""
        for digest in beginnings:
            self._readers.setdefault(digest, set()).add(replica)
            self._readers.move_to_end(digest)
        while len(self._readers) > self._known:
            self._readers.popitem(last=False)

    def keep(self, replicas: Iterable[R]) -> None:
        """Forget all replicas but these."""
        there = set(replicas)
        for digest, readers in list(self._readers.items()):
            readers &= there
            if not readers:
                del self._readers[digest]

    def depth(self, beginnings: Sequence[bytes], replica: R) -> int:
        """How many of a request's beginnings a replica has read."""
        return next(
            (at for at, digest in enumerate(beginnings) if replica not in self._readers.get(digest, ())),
            len(beginnings),
        )


def preferred(
    beginnings: Sequence[bytes], replicas: Iterable[R], places: Places[R], load: Callable[[R], int], rows: int
) -> list[R]:
    """Replicas that have read some of a request, those that have read the most first.

    One with ``rows`` requests is left out: as a rule, to wait for a place in its batch takes longer than to read a text
    again, and what is often asked has to come to more than one replica. One that has read nothing but the namespace is
    preferred if it has nothing to do: what it learned there reaches the others soon.

    Args:
        beginnings: digests of the request, the first one of its namespace alone.
        replicas: to choose from.
        places: who has read what.
        load: requests that a replica has.
        rows: requests that a replica decodes at once.
    """
    depths = {replica: places.depth(beginnings, replica) for replica in replicas}
    free = [each for each, depth in depths.items() if depth and load(each) < (rows if depth > 1 else 1)]
    return sorted(free, key=lambda each: -depths[each])
