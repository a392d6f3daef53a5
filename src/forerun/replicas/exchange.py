"""Texts that one replica has generated, brought to the indexes of the others.

Each replica collects its outputs and trades at intervals: it hands in its own texts and gets those that the others
handed in since its last trade. No request waits for that. The exchange keeps the latest texts within a number of bytes.
A new replica begins with them; one that was away for long misses those that were dropped.
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

EXCHANGE_BYTES = 64 << 20
"""Size of the texts that the exchange keeps: 16 million tokens."""
OUTBOX_BYTES = 4 << 20
"""Size of the texts that wait in a replica; a trade takes a few of Ray's messages."""
TEXT_OVERHEAD_BYTES = 200
"""Memory of a text beside its tokens, by ``sys.getsizeof``."""
LEARNED_TOKENS = 16_384
"""Tokens that are learned at once. All streams wait for that, some 40 ms at 400,000 tokens a second."""
SILENT_SECONDS = 10.0
"""Time without a trade after which a replica has most likely died, and its metrics are not shown any more."""


class LearnedText(NamedTuple):
    """A generated text and its namespace; the token ids are int32."""

    namespace: str
    tokens: bytes

    @classmethod
    def of(cls, namespace: str, tokens: IntArray) -> LearnedText:
        return cls(namespace, tokens.astype(np.int32).tobytes())

    @property
    def nbytes(self) -> int:
        return TEXT_OVERHEAD_BYTES + len(self.tokens)

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in np.frombuffer(self.tokens, np.int32)]


class ExchangeUpdate(NamedTuple):
    """Texts of other replicas, up to the number ``until``."""

    texts: list[LearnedText]
    until: int


class Exchange:
    """Keeps texts in the order of their arrival; a Ray actor, one for all replicas.

    Args:
        limit: bytes that are kept.
        clock: seconds.
    """

    def __init__(self, limit: int = EXCHANGE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._bytes, self._number = limit, 0, 0
        self._texts: deque[tuple[int, str, LearnedText]] = deque()
        self._clock = clock
        self._metrics: dict[str, tuple[float, str]] = {}

    def trade(self, replica: str, texts: Sequence[LearnedText], since: int, metrics: str) -> ExchangeUpdate:
        """Hand in texts and metrics, and get the texts of others after number ``since``."""
        self._metrics[replica] = self._clock(), metrics
        since = since if since <= self._number else 0  # this exchange has replaced one that died
        for text in texts:
            self._number += 1
            self._texts.append((self._number, replica, text))
            self._bytes += text.nbytes
        while self._bytes > self._limit:
            self._bytes -= self._texts.popleft()[2].nbytes
        later = takewhile(lambda item: item[0] > since, reversed(self._texts))
        return ExchangeUpdate([text for _, source, text in later if source != replica][::-1], self._number)

    def metrics(self) -> Mapping[str, str]:
        """The last metrics of each replica that has not been silent for long."""
        since = self._clock() - SILENT_SECONDS
        self._metrics = {replica: last for replica, last in self._metrics.items() if last[0] >= since}
        return {replica: text for replica, (_, text) in self._metrics.items()}


class ExchangeClient:
    """A replica's side of the exchange: a thread that trades.

    Args:
        trade: hands texts in, and gets those after a number.
        learn: takes texts of one namespace.
        interval: seconds between trades.
    """

    def __init__(
        self,
        trade: Callable[[Sequence[LearnedText], int], ExchangeUpdate],
        learn: Callable[[str, list[list[int]]], None],
        interval: float,
    ) -> None:
        self._trade, self._learn, self._interval = trade, learn, interval
        self._since, self._bytes = 0, 0
        self._outbox: deque[LearnedText] = deque()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="forerun-exchange", daemon=True)

    def start(self) -> None:
        """Begin with all texts of the others, then trade at intervals."""
        self.trade_once()
        self._thread.start()

    def close(self) -> None:
        """Hand in the last texts."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.trade_once()

    def add(self, request: Request) -> None:
        """Hand in the output of an ended request, for all that draft from its namespace."""
        if request.budget == 0 or not len(request.generated):
            return
        text = LearnedText.of(request.drafts_from, request.generated)
        with self._lock:
            self._outbox.append(text)
            self._bytes += text.nbytes
            while self._bytes > OUTBOX_BYTES:
                self._bytes -= self._outbox.popleft().nbytes

    def trade_once(self) -> None:
        """Trade. If the exchange cannot be reached, the texts wait."""
        with self._lock:
            texts = list(self._outbox)
        try:
            update = self._trade(texts, self._since)
        except Exception:
            log.warning("the other replicas cannot be reached; the new texts wait", exc_info=True)
            return
        with self._lock:
            for text in texts:
                if self._outbox and self._outbox[0] is text:
                    self._bytes -= self._outbox.popleft().nbytes
        self._since = update.until
        by_namespace: dict[str, list[list[int]]] = {}
        for text in update.texts:
            by_namespace.setdefault(text.namespace, []).append(text.ids)
        for namespace, sequences in by_namespace.items():
            for part in _parts(sequences):
                self._learn(namespace, part)

    def _work(self) -> None:
        while not self._end.wait(self._interval):
            try:
                self.trade_once()
            except Exception:  # the next texts may be learned
                log.exception("texts of other replicas were not learned")


def _parts(sequences: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Texts with ``LEARNED_TOKENS`` tokens together; a longer one alone."""
    part, tokens = [sequences[0]], len(sequences[0])
    for each in sequences[1:]:
        if tokens + len(each) > LEARNED_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(each)
        tokens += len(each)
    yield part
