"""The exchange of generated outputs between replicas, so that each indexes those of the others.

Every replica trades at intervals, with no request waiting: it sends its new outputs and receives those that the others
have sent since. The exchange keeps the latest outputs up to a number of bytes, for new replicas.
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
"""Size of the outputs that the exchange keeps: 16 million tokens."""
OUTBOX_BYTES = 4 << 20
"""Size of the outputs that wait in a replica; a trade needs a few Ray messages."""
TEXT_OVERHEAD_BYTES = 200
"""Memory of an output besides its tokens, measured with ``sys.getsizeof``."""
LEARNED_TOKENS = 16_384
"""Tokens indexed at once. All streams wait meanwhile, some 40 ms at 400,000 tokens per second."""
SILENT_SECONDS = 10.0
"""Time without a trade after which a replica has probably died and its metrics are dropped."""


class LearnedText(NamedTuple):
    """A generated output, int32 token ids, and its namespace."""

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
    """Outputs of other replicas, up to number ``until``."""

    texts: list[LearnedText]
    until: int


class Exchange:
    """A store of outputs in order of arrival, up to ``limit`` bytes; one Ray actor for all replicas."""

    def __init__(self, limit: int = EXCHANGE_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._bytes, self._number = limit, 0, 0
        self._texts: deque[tuple[int, str, LearnedText]] = deque()
        self._clock = clock
        self._metrics: dict[str, tuple[float, str]] = {}

    def trade(self, replica: str, texts: Sequence[LearnedText], since: int, metrics: str) -> ExchangeUpdate:
        """Add outputs and metrics; return the other replicas' outputs after number ``since``."""
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
        """Return the last metrics of each replica that traded recently."""
        since = self._clock() - SILENT_SECONDS
        self._metrics = {replica: last for replica, last in self._metrics.items() if last[0] >= since}
        return {replica: text for replica, (_, text) in self._metrics.items()}


class ExchangeClient:
    """A thread that trades a replica's outputs every ``interval`` seconds. ``trade`` sends some and returns those after
    a number; ``learn`` indexes outputs of one namespace."""

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
        """Fetch all outputs of the others, then trade at intervals."""
        self.trade_once()
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.trade_once()

    def add(self, request: Request) -> None:
        """Queue the output of a finished request, unless it drafts nothing."""
        if request.budget == 0 or not len(request.generated):
            return
        text = LearnedText.of(request.drafts_from, request.generated)
        with self._lock:
            self._outbox.append(text)
            self._bytes += text.nbytes
            while self._bytes > OUTBOX_BYTES:
                self._bytes -= self._outbox.popleft().nbytes

    def trade_once(self) -> None:
        """Trade once. If the exchange cannot be reached, the outputs wait."""
        with self._lock:
            texts = list(self._outbox)
        try:
            update = self._trade(texts, self._since)
        except Exception:
            log.warning("the other replicas cannot be reached; new outputs wait", exc_info=True)
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
            except Exception:  # the next outputs may be indexed
                log.exception("outputs of other replicas were not indexed")


def _parts(sequences: Sequence[list[int]]) -> Iterator[list[list[int]]]:
    """Split sequences into parts of up to ``LEARNED_TOKENS`` tokens; a longer sequence is a part by itself."""
    part, tokens = [sequences[0]], len(sequences[0])
    for each in sequences[1:]:
        if tokens + len(each) > LEARNED_TOKENS:
            yield part
            part, tokens = [], 0
        part.append(each)
        tokens += len(each)
    yield part
