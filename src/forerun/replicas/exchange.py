"""What replicas learn from each other: texts that one has generated, brought to the indexes of the others.

Each replica collects what it generates, and trades at intervals: it hands in its own texts, and gets what the others
handed in since it last asked. No request waits for that. The exchange keeps the latest texts up to a number of bytes. A
new replica begins with them; one that was away for long misses what was dropped.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from forerun.core.request import Request
from forerun.core.tree import IntArray

log = logging.getLogger(__name__)

KEPT = 64 << 20
"""Bytes of texts that the exchange keeps: 16 million tokens."""
OVERHEAD = 200
"""Bytes that a text takes beside its tokens: the objects around them, by ``sys.getsizeof``."""
SLICE = 16_384
"""Tokens that are learned at once. All streams wait for that, some 40 ms at 400,000 tokens a second."""
SILENT = 10.0
"""Seconds without a trade after which a replica's figures are no longer shown: it has died, most likely."""
OUTBOX = 4 << 20
"""Bytes of texts that wait in a replica; a trade is a few of Ray's messages at most."""


class Text(NamedTuple):
    """What was generated in a namespace: token ids, as int32."""

    namespace: str
    tokens: bytes

    @classmethod
    def of(cls, namespace: str, tokens: IntArray) -> Text:
        """From token ids."""
        return cls(namespace, tokens.astype(np.int32).tobytes())

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return OVERHEAD + len(self.tokens)

    @property
    def ids(self) -> list[int]:
        """Token ids."""
        return [int(token) for token in np.frombuffer(self.tokens, np.int32)]


class News(NamedTuple):
    """What a replica gets: texts of others, up to the number ``until``."""

    texts: list[Text]
    until: int


class Exchange:
    """Keeps texts in the order in which they came; a Ray actor, one for all replicas.

    Args:
        limit: bytes that are kept.
        clock: seconds.
    """

    def __init__(self, limit: int = KEPT, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._taken, self._number = limit, 0, 0
        self._texts: deque[tuple[int, str, Text]] = deque()
        self._clock = clock
        self._figures: dict[str, tuple[float, str]] = {}

    def trade(self, who: str, texts: Sequence[Text], since: int, figures: str) -> News:
        """Hand in texts and figures, and get what others handed in behind number ``since``; all of it, if an exchange
        that had come further than this one was replaced by it."""
        self._figures[who] = self._clock(), figures
        since = since if since <= self._number else 0
        for text in texts:
            self._number += 1
            self._texts.append((self._number, who, text))
            self._taken += text.nbytes
        while self._taken > self._limit:
            self._taken -= self._texts.popleft()[2].nbytes
        later = takewhile(lambda item: item[0] > since, reversed(self._texts))
        return News([text for _, source, text in later if source != who][::-1], self._number)

    def figures(self) -> Mapping[str, str]:
        """The last metrics of each replica that has not been silent for long."""
        since = self._clock() - SILENT
        self._figures = {who: said for who, said in self._figures.items() if said[0] >= since}
        return {who: text for who, (_, text) in self._figures.items()}


class Trader:
    """A replica's side: a thread that trades.

    Args:
        trade: hands texts in, with the number of what is known, and returns what is new.
        learn: takes texts of one namespace in.
        interval: seconds between trades.
    """

    def __init__(
        self,
        trade: Callable[[Sequence[Text], int], News],
        learn: Callable[[str, list[list[int]]], None],
        interval: float,
    ) -> None:
        self._trade, self._learn, self._interval = trade, learn, interval
        self._since, self._held = 0, 0
        self._outbox: deque[Text] = deque()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="forerun-exchange", daemon=True)

    def start(self) -> None:
        """Begin with all that others know, then trade at intervals."""
        self.turn()
        self._thread.start()

    def close(self) -> None:
        """Hand in what is left."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.turn()

    def take(self, request: Request) -> None:
        """A request has ended; what it generated is for all who draft from the same namespace."""
        if request.budget == 0 or not len(request.generated):
            return
        text = Text.of(request.drafts_from, request.generated)
        with self._lock:
            self._outbox.append(text)
            self._held += text.nbytes
            while self._held > OUTBOX:
                self._held -= self._outbox.popleft().nbytes

    def turn(self) -> None:
        """Trade once. Where the exchange cannot be reached, the texts wait."""
        with self._lock:
            texts = list(self._outbox)
        try:
            news = self._trade(texts, self._since)
        except Exception:
            log.warning("the other replicas cannot be reached; what was learned waits", exc_info=True)
            return
        with self._lock:
            for text in texts:
                if self._outbox and self._outbox[0] is text:
                    self._held -= self._outbox.popleft().nbytes
        self._since = news.until
        together: dict[str, list[list[int]]] = {}
        for text in news.texts:
            together.setdefault(text.namespace, []).append(text.ids)
        for namespace, sequences in together.items():
            for some in _slices(sequences):
                self._learn(namespace, some)

    def _work(self) -> None:
        while not self._end.wait(self._interval):
            try:
                self.turn()
            except Exception:  # the next texts may be learned
                log.exception("texts of other replicas were not learned")


def _slices(sequences: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """As many texts at once as have ``SLICE`` tokens together; a longer one alone."""
    some, held = [sequences[0]], len(sequences[0])
    for each in sequences[1:]:
        if held + len(each) > SLICE:
            yield some
            some, held = [], 0
        some.append(each)
        held += len(each)
    yield some
