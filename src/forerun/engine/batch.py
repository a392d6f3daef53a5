"""Continuous batching: requests join at any time, step together, and leave when they end.

Prompt tokens per step are limited, by time too (``prefill_pacing.py``), so that long prompts do not hold up rows that
decode. A prefix that several prompts share is prefilled once (``prefix_sharing.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from forerun.core.fairness import FairLock
from forerun.core.request import Request
from forerun.core.transfers import present
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.engine.prefix_sharing import PrefixSharing
from forerun.engine.result import Commit
from forerun.engine.step import BatchRow, DecodingStep
from forerun.kv.cache import MIN_SLACK_TOKENS, releases
from forerun.kv.full_cache import FullCache

if TYPE_CHECKING:
    from forerun.kv.kv_tiers import DeviceReserve

log = logging.getLogger(__name__)


class Batch:
    """Requests decoded together; made by ``Engine.batch``. One thread at a time may use a batch; others may use the
    same engine meanwhile.

    Args:
        chunk: maximum prompt tokens per row and pass.
        limit: maximum tokens per pass, besides drafts; a decoding row counts as one. A pass always has room for one
            chunk, so that no prompt starves. Smaller limits keep other rows from waiting during a prefill.
        sharing: shares prefixes, in chunks no longer than ``chunk``.
        make: makes a cache, given its room in tokens, whether its memory can be shared, whether it releases keys that
            no layer sees any more, and what it leaves free on the device.
        free: frees a cache's memory when its row ends; by default it goes with the cache.
        offloaded_chunks: maximum chunks of an offloaded prompt per pass, which fetches all before them; None for no
            limit.
        pacing: bounds the time of steps with prefill by cutting prompts anywhere, if passes are bitwise exact; or None.
    """

    def __init__(
        self, step: DecodingStep, lock: FairLock, chunk: int, limit: int, sharing: PrefixSharing,
        make: Callable[[int, bool, bool, DeviceReserve | None], FullCache],
        free: Callable[[FullCache], None] | None = None,
        offloaded_chunks: int | None = None, pacing: PrefillPacing | None = None,
    ) -> None:  # fmt: skip
        self._step, self._lock, self._sharing, self._make, self._free = step, lock, sharing, make, free
        self._fixed, self._present = step.level.model.prompt_chunk is not None, present(step.level.model.device)
        self.chunk, self.limit = min(chunk, limit), limit
        self._offloaded_chunks, self._pacing = offloaded_chunks, pacing
        self._rows: dict[int, BatchRow] = {}
        self._steps = 0

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def requests(self) -> list[Request]:
        return [row.request for row in self._rows.values()]

    @property
    def unread(self) -> int:
        """Prompt tokens to prefill before their rows' first steps."""
        return sum(row.unread for row in self._rows.values())

    def admit(self, request: Request, cache: FullCache | None = None, reserve: DeviceReserve | None = None) -> None:
        """Add a request, from the next step on.

        Args:
            cache: holds the first tokens of the prompt, and then the output; by default a new one.
            reserve: what a new cache leaves free on the device for other requests, if ``kv_memory`` bounds it.

        Raises:
            ValueError: if the cache holds the complete prompt, or the request is in the batch.
            MemoryError, OSError: if there is no room for its keys and values, in memory or in a file.
        """
        if request.id in self._rows:
            raise ValueError(f"request {request.id} is in this batch already")
        if cache is not None and cache.length >= request.prompt_length:
            raise ValueError(f"a cache holds {cache.length} tokens; it may hold at most {request.prompt_length - 1}")
        own = cache is None
        if cache is None:
            shares, gives_back = self._sharing.shares(request), self._releases(request)
            cache = self._make(self.tokens(request), shares, gives_back, reserve)
        pass_tokens = None if self._offloaded_chunks is None else self._offloaded_chunks * self.chunk
        row = BatchRow(
            request, cache, chunk=self.chunk, whole=self._step.level.model.reads_whole(cache),
            pass_tokens=pass_tokens, fixed=self._fixed, own=own,
        )  # fmt: skip
        if self._pacing is not None and self._pacing.first is not None:
            row.reads = min(row.chunk, self._pacing.first)
        self._rows[request.id] = row
        try:
            with self._lock, self._present, self._step.seconds.reading():
                self._sharing.refresh()
                if request.drafts:
                    self._step.level.begin(row)
                if own and not cache.offloaded:
                    self._sharing.join(row)
        except BaseException:
            self._remove(request)
            raise

    def verify_stored(self, request: Request) -> None:
        """Verify what the store has of a prompt, to save ``admit`` the work; from any thread."""
        self._sharing.verify(request)

    def tokens(self, request: Request) -> int:
        """Return the room of a request's cache, in tokens: the longest sequence, and a tree."""
        return len(request) + request.remaining + self._step.budget

    def needs(self, request: Request) -> int:
        """Return the maximum bytes of a request's keys and values at all levels, if it shares none."""
        tokens = self.tokens(request)
        cache = FullCache(tokens, releases=self._releases(request))
        return cache.needs(self._step.level.model.kv, tokens) + self.drafting(request)

    def _releases(self, request: Request) -> bool:
        """Return whether a request's cache releases keys outside of sliding windows: if its prompt is not kept for
        others, and chunks are no longer than the slack beyond a window."""
        target = self._step.level.model
        if not target.windowed or not releases(target.device.type) or self.chunk > MIN_SLACK_TOKENS:
            return False
        return not self._sharing.keeps(request, target.kv.nbytes)

    def drafting(self, request: Request) -> int:
        """Return the maximum bytes of all draft levels for a request."""
        sources = self._step.level.planner.sources if request.drafts else ()
        return sum(source.needs(self.tokens(request)) for source in sources)

    def step(self, resting: Collection[int] = (), budgets: Mapping[int, int] | None = None) -> list[Commit]:
        """Run one step with all rows but the ``resting`` ones, with shorter draft ``budgets`` by id; return a commit
        for each row with new tokens, and for each that failed (``Request.error``)."""
        if not self._rows:
            return []
        with self._lock, self._present:
            rows = [row for row in self._rows.values() if row.request.id not in resting]
            decoding, unread = [row for row in rows if row.begun], [row for row in rows if not row.begun]
            first, reading, commits = list[BatchRow](), dict[BatchRow, int](), list[Commit]()
            worked, beside = False, bool(decoding)
            if unread:
                beside = any(row.begun for row in self._rows.values())
                if self._pacing is None or self._pacing.works(beside):
                    with self._step.seconds.reading():
                        worked, commits = self._catch_up(unread, beside)
                    first, reading = self._schedule(unread, beside, self.limit - len(decoding))
            if decoding or first or reading:
                commits += self._timed([*decoding, *first], reading, beside, worked, budgets or {})
            for row in (*first, *reading):
                self._sharing.read(row)
        for commit in commits:
            if commit.request.finish_reason is not None:
                try:
                    self._remove(commit.request)
                except Exception:  # other rows must get their tokens
                    log.exception("releasing an ended request failed")
        return commits

    def cancel(self, request: Request) -> None:
        """End a request now, if it has not ended, keeping its tokens."""
        if request.id in self._rows:
            self._remove(request)

    def close(self) -> None:
        with ExitStack() as each:  # all of them, even if one fails
            for request in self.requests:
                each.callback(self._remove, request)

    def _schedule(
        self, unread: Sequence[BatchRow], beside: bool, left: int
    ) -> tuple[list[BatchRow], dict[BatchRow, int]]:
        """Return which rows in prefill run their first step, and which prefill how many tokens: those that waited
        longest first, while there is room for ``left`` tokens."""
        first: list[BatchRow] = []
        reading: dict[BatchRow, int] = {}
        paced, share = self._pacing is not None and beside, 1.0  # share of the allowed time
        for row in sorted(unread, key=lambda row: row.served):
            if row.request.error is not None or self._sharing.waits(row):
                continue
            tokens = row.next_chunk(max(1, int(share * row.reads)) if paced and not row.drafting else None)
            reads = tokens < len(row.pending)
            if not (reads or row.ready):
                continue
            if (first or reading) and (tokens > left or (paced and share * row.reads < 1)):
                break
            left, share = left - tokens, share - tokens / row.reads
            if reads:
                reading[row] = tokens
            else:
                first.append(row)
            row.served = self._steps
        self._steps += 1
        return first, reading

    def _timed(
        self,
        decoding: list[BatchRow],
        reading: dict[BatchRow, int],
        beside: bool,
        worked: bool,
        budgets: Mapping[int, int],
    ) -> list[Commit]:
        """Run a step; its time sets the length of the next chunks. ``beside``: it holds up other rows. ``worked``:
        drafts for a prompt were prepared before."""
        if self._pacing is None or not beside:
            return self._pass(decoding, reading, budgets)
        read = reading | {row: len(row.pending) for row in decoding if not row.begun}
        began = self._pacing.clock()
        commits = self._pass(decoding, reading, budgets)
        seconds = self._pacing.clock() - began
        self._pacing.learn(seconds, worked or bool(read))
        if read:
            extra, used = seconds - self._pacing.decoding, sum(tokens / row.reads for row, tokens in read.items())
            for row in read:
                row.reads = self._pacing.first = self._pacing.adjusted(row.reads, extra, row.chunk, used)
        return commits

    def _pass(self, decoding: list[BatchRow], reading: dict[BatchRow, int], budgets: Mapping[int, int]) -> list[Commit]:
        """Run a step. If it fails and some rows lost keys and values, end only these rows."""
        try:
            return self._step(decoding, reading, budgets)
        except Exception:
            rows = [row for row in self._rows.values() if row.request.error is None]
            lost = {row: why for row in rows if (why := row.cache.lost) is not None}
            if not lost:
                raise
        for row, why in lost.items():
            row.request.fail(why)
        return [Commit(row.request, [], 0) for row in lost]

    def _catch_up(self, unread: Sequence[BatchRow], beside: bool) -> tuple[bool, list[Commit]]:
        """Prefill drafters, in pieces, with prompts that the target has prefilled; return whether there were any, and
        failed rows' commits."""
        worked, failed = False, []
        pacing = self._pacing if beside else None
        end = 0.0 if pacing is None else pacing.clock() + pacing.allowed
        for row in unread:
            limit = row.reads if pacing is not None and not row.drafting else None
            if row.ready or row.next_chunk(limit) < len(row.pending):
                continue
            if pacing is not None and pacing.clock() > end:
                break
            worked = True
            try:
                self._prepare(row, pacing)
            except Exception as error:
                row.request.fail(error)
                failed.append(Commit(row.request, [], 0))
        return worked, failed

    @torch.inference_mode()
    def _prepare(self, row: BatchRow, pacing: PrefillPacing | None) -> None:
        if not row.drafting:
            row.drafting, row.prepares = True, row.reads
        if not row.request.drafts:
            row.ready = True
        elif pacing is None:
            row.ready = self._step.level.planner.read(row, self.limit)
        else:
            began = pacing.clock()
            row.ready = self._step.level.planner.read(row, row.prepares)
            row.prepares = pacing.adjusted(row.prepares, pacing.clock() - began, self.limit)

    def _remove(self, request: Request) -> None:
        """Free everything that a request holds, even if parts of that fail; during another's step, after that step."""
        row = self._rows.pop(request.id)
        self._lock.when_free(lambda: self._let_go(row))

    def _let_go(self, row: BatchRow) -> None:
        try:
            with self._lock:
                try:
                    self._sharing.leave(row)
                finally:
                    row.close()
        finally:
            if row.own and self._free is not None:
                self._free(row.cache)
