"""One call of a client: requests go to the scheduler's thread, and their tokens return to the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from forerun.core.request import Request
from forerun.core.stats import Stats
from forerun.engine.result import Commit
from forerun.kv.offloaded import OffloadError
from forerun.models.text.call_formats import Json
from forerun.models.text.grammar import GrammarError
from forerun.models.text.message_parser import MessageDelta, MessageParser
from forerun.server.admission import Ending, QueueFullError, ScheduledRequest
from forerun.server.answers import FINISH, AnswerText, Delta, Finish, LogprobStreamer, prompt_trace, step_trace
from forerun.server.api_errors import ApiError, invalid
from forerun.server.metrics import RequestMeter
from forerun.server.scheduler import Scheduler

log = logging.getLogger(__name__)
PING_SECONDS = 15.0
"""Silence after which a stream sends a ping: proxies cut those that are silent for a minute."""


class LoopDispatcher:
    """A queue of callbacks from other threads that run in an event loop, in order; waiting ones share one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: deque[Callable[[], None]] = deque()
        self._woken = False

    def put(self, callback: Callable[[], None]) -> None:
        """Run a callback in the loop soon, unless the loop is closed."""
        self._waiting.append(callback)
        if not self._woken:
            self._woken = True
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._woken = False  # so that a later ``put`` wakes the loop again
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            if self._waiting:  # a callback failed; the others still run
                self.loop.call_soon(self._run)


@dataclass
class AnswerRow:
    """One answer of a call."""

    request: Request
    answer: AnswerText
    meter: RequestMeter
    logprobs: LogprobStreamer | None = None
    parser: MessageParser | None = None
    reasoning_tokens: int = 0
    held_tokens: int = 0  # tokens so far whose characters are held back
    decode: Callable[[Sequence[int]], str] | None = None  # of prompt tokens, for the first step's trace; then None

    def step(self, index: int, texts: Sequence[str], trace: Json | None = None) -> list[Delta]:
        """Return the deltas that a step's tokens add; none if all characters are held back."""
        if not (trace or any(texts)):
            self.held_tokens += len(texts)
            return []
        text = "".join(texts)
        logprobs = None if self.logprobs is None else self.logprobs.advance(len(text), False)
        if self.parser is None:
            return [Delta(index, text, None, logprobs, trace)]
        parts = list[MessageDelta]()
        for each in texts:  # one at a time, so that parts come in the order of plain decoding
            self.held_tokens += 1
            if each:
                self._add(self.parser.feed(each), parts)
        if not parts and (logprobs or trace):
            parts.append(MessageDelta())
        deltas = [Delta(index, part.content, reasoning=part.reasoning, calls=part.calls) for part in parts]
        return deltas and [*deltas[:-1], replace(deltas[-1], logprobs=logprobs, trace=trace)]

    def end(self, index: int, finish: Finish) -> Delta:
        text, stop, parts = self.answer.end(), self.answer.stop_string, list[MessageDelta]()
        logprobs = None if self.logprobs is None else self.logprobs.advance(len(text), stop is None)
        if self.parser is None:
            return Delta(index, text, finish, logprobs, stop_string=stop)
        rest = self.parser.feed(text, True, finish == "length")
        self._add(rest, parts)
        if finish == "stop" and self.parser.calls:
            finish = "tool_calls"
        return Delta(index, rest.content, finish, logprobs, None, rest.reasoning, rest.calls, stop)

    def _add(self, part: MessageDelta, parts: list[MessageDelta]) -> None:
        """Count a part's tokens, and append the part, merged with the last if both are of one kind."""
        if not any(kinds := _kinds(part)):
            return
        if part.reasoning:
            self.reasoning_tokens += round(self.held_tokens * len(part.reasoning) / len(part.reasoning + part.content))
        self.held_tokens = 0
        if parts and sum(kinds) == 1 and kinds == _kinds(parts[-1]):
            last = parts.pop()
            part = MessageDelta(last.content + part.content, last.reasoning + part.reasoning, last.calls + part.calls)
        parts.append(part)


def _kinds(part: MessageDelta) -> tuple[bool, bool, bool]:
    return bool(part.content), bool(part.reasoning), bool(part.calls)


class Call:
    """The requests that answer one call; all end when one fails or the client goes. Create it in the event loop,
    ``start`` it, then iterate over it once. ``nbytes`` is its answer's maximum size. If tenants share drafts
    (``shared``), nothing about them is reported."""

    def __init__(
        self,
        scheduler: Scheduler,
        rows: Sequence[AnswerRow],
        number: str,
        dispatcher: LoopDispatcher,
        prompts: int = 1,  # each with equally many rows
        budget: int = 0,
        trace: bool = False,
        shared: bool = False,
        nbytes: int = 0,
    ) -> None:
        self.rows, self.number, self.nbytes = rows, number, nbytes
        self._prompts, self._budget, self._trace, self._shared = prompts, budget, trace, shared
        self._scheduler = scheduler
        self._dispatcher = dispatcher
        self._events: asyncio.Queue[tuple[int, Commit | Ending]] = asyncio.Queue()
        self._scheduled: list[ScheduledRequest] = []
        self._cancelled = False

    async def start(self, tenant: str, deadline: float | None) -> None:
        """Submit all requests. Raises ApiError: 429 for a full queue, 400 for too much memory, 503 when closing."""
        try:
            await asyncio.to_thread(self._submit, tenant, deadline)  # the scheduler's lock may be held
        except BaseException as error:
            self.cancel()
            raise refusal(error) from error

    def cancel(self) -> None:
        """End all running rows, without waiting."""
        self._cancelled = True
        while self._scheduled:  # they refer to this call; the cycle would keep its prompts until a collection
            scheduled = self._scheduled.pop()
            if scheduled.ending is None:
                self._scheduler.cancel(scheduled)

    async def __aiter__(self) -> AsyncIterator[Delta | None]:
        """Yield new text, or None after ``PING_SECONDS`` without any; raise ApiError if it fails or is cancelled."""
        left, clock = len(self.rows), asyncio.get_running_loop().time
        sent = clock()
        while left:
            deltas: Sequence[Delta | None] = [None]
            try:
                async with asyncio.timeout_at(sent + PING_SECONDS):
                    index, what = await self._events.get()
            except TimeoutError:
                if self._cancelled:  # before all rows were submitted
                    raise ClientGoneError from None
            else:
                if isinstance(what, Commit):
                    deltas = self._step(index, what)
                else:
                    left -= 1
                    deltas = [self._last_delta(index, what)]
                if not deltas and clock() < sent + PING_SECONDS:
                    continue
            for delta in deltas or [None]:
                yield delta
            sent = clock()

    def figures(self) -> tuple[Json, Json]:
        """Return the usage of the finished requests, and draft statistics as in vLLM's ``metrics``."""
        usage = self.usage
        if self._shared:
            return usage, {}
        stats = Stats()
        for row in self.rows:
            stats.drafted += row.request.stats.drafted
            stats.accepted += row.request.stats.accepted
            stats.emitted += row.request.stats.emitted
        accepted = sum(stats.accepted)
        usage["completion_tokens_details"] |= {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(stats.drafted) - accepted,
        }
        return {**usage, "forerun": _speculation(stats)}, _speculative_metrics(stats, self._budget)

    @property
    def usage(self) -> Json:
        rows, each = self.rows, len(self.rows) // self._prompts  # ordered by prompt
        read = sum(row.request.prompt_length + row.answer.echoed for row in rows) // each
        written = sum(len(row.request.generated) - row.answer.echoed for row in rows if row.answer.continues)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(row.request.cached_tokens for row in rows[::each])},
            "completion_tokens_details": {"reasoning_tokens": sum(row.reasoning_tokens for row in rows)},
        }

    def _step(self, index: int, commit: Commit) -> list[Delta]:
        row = self.rows[index]
        texts = row.answer.add(commit.tokens)
        if not (self._trace and texts and len(commit.origins) == len(commit.tokens)):
            return row.step(index, texts)
        trace = step_trace(commit, texts, self._shared)
        if row.decode is not None:
            trace["prompt"], row.decode = prompt_trace(row.request, row.decode), None
        return row.step(index, texts, trace)

    def _last_delta(self, index: int, how: Ending) -> Delta:
        row = self.rows[index]
        if how == "finished" and row.request.finish_reason in FINISH:
            return row.end(index, FINISH[row.request.finish_reason])
        if how == "cancelled":
            raise ClientGoneError
        if how == "displaced":
            message = "another tenant, within its share, has taken this request's place in the queue"
            raise ApiError(429, message, "queue_full", headers={"Retry-After": "1"})
        if how == "deadline":
            message = f"the request timed out after {len(row.request.generated)} tokens; request fewer"
            raise ApiError(504, message, "timeout", headers={"x-should-retry": "false"})
        if isinstance(row.request.error, GrammarError):
            raise invalid("response_format", str(row.request.error))
        log.error("call %s failed", self.number, exc_info=row.request.error)
        if isinstance(row.request.error, OffloadError):
            raise _kv_failure(row.request.error, self.number)
        raise ApiError(500, f"the request failed in the server; its log says more about {self.number}", "failed")

    def _submit(self, tenant: str, deadline: float | None) -> None:
        for index, row in enumerate(self.rows):
            deliver = partial(self._deliver, index)
            scheduled = self._scheduler.submit(row.request, deliver, deliver, tenant, deadline)
            self._scheduled.append(scheduled)
            if self._cancelled:  # while this was submitted
                self._scheduler.cancel(scheduled)
                return

    def _deliver(self, index: int, what: Commit | Ending) -> None:
        self._dispatcher.put(partial(self._receive, index, what, time.monotonic()))

    def _receive(self, index: int, what: Commit | Ending, at: float) -> None:
        meter = self.rows[index].meter  # it also counts tokens that the client no longer reads
        if isinstance(what, Commit):
            meter.count(len(what.tokens), at)
        else:
            meter.end(what, at)
        self._events.put_nowait((index, what))


def _speculation(stats: Stats) -> Json:
    return {
        "steps": stats.steps,
        "drafted": sum(stats.drafted),
        "accepted": sum(stats.accepted),
        "mean_acceptance_length": round(stats.tokens_per_step, 4),
        "acceptance_rate": round(stats.acceptance, 4),
        "histogram": stats.histogram(),
    }


def _speculative_metrics(stats: Stats, budget: int) -> Json:
    steps = [accepted for drafted, accepted in zip(stats.drafted, stats.accepted, strict=False) if drafted]
    figures = {
        "mean_acceptance_length": 1 + sum(steps) / len(steps) if steps else 0.0,
        "draft_acceptance_rate": stats.acceptance,
        "acceptance_histogram": np.bincount(steps).tolist() if steps else [],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(steps),
        "num_draft_tokens": sum(stats.drafted),
        "num_spec_tokens": budget,
    }
    return {"speculative_decoding": figures}


class ClientGoneError(ApiError):
    """The client has gone, or the server closes and tells it so."""

    def __init__(self) -> None:
        super().__init__(503, "the server is closing and has cancelled the request", "closing")


def _kv_failure(error: OffloadError, number: str) -> ApiError:
    why = "copying failed" if error.errno is None else os.strerror(error.errno)
    failed = f"the keys and values of this request could not be kept off the device: {why}"
    headers = {"x-should-retry": "false"}
    return ApiError(500, f"{failed}; the log says more about {number}", "kv_memory_failed", headers=headers)


def refusal(error: BaseException) -> BaseException:
    """Return the client's error for one of ``Scheduler.submit``."""
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), "queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, ValueError):
        return ApiError(400, str(error), "too_large")
    if isinstance(error, RuntimeError):
        return ApiError(503, "the server is closing", "closing")
    return error
