"""One call of a client: its requests go to the scheduler's thread, what they give comes back to the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from forerun.core.request import Request
from forerun.engine.commit import Commit
from forerun.kv.copy_engine import AwayError
from forerun.models.text.grammar import GrammarError
from forerun.server.answers import FINISH, Delta, Finish, Writer
from forerun.server.errors import ApiError
from forerun.server.metrics import Meter
from forerun.server.post import Post
from forerun.server.scheduler import Scheduler
from forerun.server.ticket import Ending, Ticket
from forerun.server.token_logprobs import LogprobStreamer
from forerun.server.trace import Trace, trace_of
from forerun.server.waiting import QueueFullError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One text of a call; with a teller, its tokens' log-probabilities are told, too."""

    request: Request
    writer: Writer
    meter: Meter
    teller: LogprobStreamer | None = None

    def delta(self, index: int, text: str, finish: Finish | None = None, trace: Trace | None = None) -> Delta:
        """What is new, as it is sent."""
        rest = finish is not None and not self.writer.stopped
        told = None if self.teller is None else self.teller.tell(len(text), rest)
        return Delta(index, text, finish, told, trace)


@dataclass(frozen=True)
class _News:
    """What the scheduler said of a row, and when, by ``time.monotonic``."""

    index: int
    what: Commit | Ending
    at: float


class Call:
    """The requests that answer one call. All of them end when one fails, or the client goes.

    Made in the event loop. ``start`` it, then iterate over it once; ``cancel`` ends it at any time.

    Args:
        scheduler: runs them.
        rows: the texts, in order.
        number: names the call in the log.
        post: brings what the scheduler says to this event loop.
        trace: whether to say of each step who drafted its tokens.
    """

    def __init__(self, scheduler: Scheduler, rows: Sequence[Row], number: str, post: Post, trace: bool = False) -> None:
        self.rows, self.number = rows, number
        self._trace = trace
        self._scheduler = scheduler
        self._post = post
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        self._submitting = threading.Lock()
        self._gone = False

    async def start(self, tenant: str, deadline: float | None) -> None:
        """Submit all requests, in another thread, so that nobody waits for the scheduler's lock here.

        Raises:
            ApiError: 429 if the queue is full, 400 for more than there is memory for, 503 when the server closes.
        """
        try:
            await asyncio.to_thread(self._submit, tenant, deadline)
        except BaseException as error:
            self.cancel()
            raise _refusal(error) from error

    def cancel(self) -> None:
        """End whatever has not ended; returns at once."""
        self._gone = True
        for ticket in list(self._tickets):
            if ticket.ending is None:
                self._scheduler.cancel(ticket)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """What is new of each text, as it comes; each text's last delta has a finish reason.

        Raises:
            ApiError: if the server failed, the text's schema is too much for it, or the time was over.
            ClientGoneError: if it was cancelled.
        """
        left = len(self.rows)
        while left:
            news = await self._news.get()
            row = self.rows[news.index]
            if isinstance(news.what, Commit):
                texts = row.writer.add(news.what.tokens)
                traced = self._trace and texts and len(news.what.origins) == len(news.what.tokens)
                trace = trace_of(news.what, texts) if traced else None
                if trace or any(texts):
                    yield row.delta(news.index, "".join(texts), trace=trace)
                continue
            left -= 1
            yield self._end(news.index, news.what)

    def _end(self, index: int, how: Ending) -> Delta:
        row = self.rows[index]
        if how == "finished" and row.request.finish_reason in FINISH:
            return row.delta(index, row.writer.end(), FINISH[row.request.finish_reason])
        if how == "cancelled":
            raise ClientGoneError
        if how == "deadline":
            told = f"the time for a request was over after {len(row.request.generated)} tokens; ask for fewer"
            raise ApiError(504, told, "timeout", headers={"x-should-retry": "false"})
        if isinstance(row.request.error, GrammarError):
            raise ApiError(400, str(row.request.error), "invalid_value", "response_format")
        log.error("call %s failed", self.number, exc_info=row.request.error)
        if isinstance(row.request.error, AwayError):
            raise _not_kept(row.request.error, self.number)
        raise ApiError(500, f"the request failed in the server, whose log says more of {self.number}", "failed")

    def _submit(self, tenant: str, deadline: float | None) -> None:
        for index, row in enumerate(self.rows):
            tell = self._teller(index)
            ticket = self._scheduler.submit(row.request, tell, tell, tenant, deadline)
            self._tickets.append(ticket)
            if self._gone:  # while this was submitted
                self._scheduler.cancel(ticket)
                return

    def _teller(self, index: int) -> Callable[[Commit | Ending], None]:
        def tell(what: Commit | Ending) -> None:
            self._post.put(partial(self._take, _News(index, what, time.monotonic())))

        return tell

    def _take(self, news: _News) -> None:
        """In the event loop. It counts, too, what nobody iterates over any more."""
        meter = self.rows[news.index].meter
        if isinstance(news.what, Commit):
            meter.count(len(news.what.tokens), news.at)
        else:
            meter.end(news.what, news.at)
        self._news.put_nowait(news)


class ClientGoneError(Exception):
    """The client is not there any more, or the server closes."""


def _not_kept(error: AwayError, number: str) -> ApiError:
    """What a client is told; where the files are is for the log alone."""
    why = "copying failed" if error.errno is None else os.strerror(error.errno)
    told = f"the keys and values of this text could not be kept off the device: {why}; the log says more of {number}"
    return ApiError(500, told, "kv_memory_failed", headers={"x-should-retry": "false"})


def _refusal(error: BaseException) -> BaseException:
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "queue_full", headers={"Retry-After": f"{error.retry_after:.0f}"})
    if isinstance(error, ValueError):
        return ApiError(400, str(error), "too_large")
    if isinstance(error, RuntimeError):
        return ApiError(503, "the server is closing", "closing")
    return error
