"""Rows that come and go: requests are admitted at any time, step together, and leave when they end.

A long prompt does not hold up the rows that decode: the tokens of prompts that a step reads are limited, and fewer if
that takes long (``prefill_pacing.py``). A beginning that several prompts share is read once (``prefix_sharing.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
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
    """Requests that are decoded together; made by ``Engine.batch``.

    One thread at a time may use it; other threads may use the same engine meanwhile.

    Args:
        step: takes a step for some rows.
        lock: the engine's, held for each step.
        chunk: maximum prompt tokens that a row reads in one pass.
        limit: maximum tokens of texts that a pass reads; drafts come on top. Each row that decodes reads one. A chunk
            of one prompt is read in any case, so that every prompt is read some day. The fewer, the sooner rows that
            decode get their next token while another row reads its prompt.
        sharing: keeps what prompts begin with; its chunks are no longer than those of reading.
        make: makes a cache with room for a number of tokens; whether its memory can be shared, whether it releases what
            nobody reads any more, and what it leaves free on the device, comes with that.
        free: lets go of such a cache's memory when its row ends; by default it goes with the cache.
        offloaded_chunks: maximum chunks of a prompt off the device that one pass reads; None for all, as each pass
            brings in what lies before.
        pacing: bounds the time of steps that work on prompts, by cutting these anywhere; so only where passes are
            bitwise exact. None to do as much as a step may.
    """

    def __init__(
        self, step: DecodingStep, lock: FairLock, chunk: int, limit: int, sharing: PrefixSharing,
        make: Callable[[int, bool, bool, DeviceReserve | None], FullCache],
        free: Callable[[FullCache], None] | None = None,
        offloaded_chunks: int | None = None, pacing: PrefillPacing | None = None,
    ) -> None:  # fmt: skip
        self._step, self._lock, self._sharing, self._make, self._free = step, lock, sharing, make, free
        self._fixed = step.level.model.prompt_chunk is not None
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
        """Requests that have not ended."""
        return len(self._rows)

    @property
    def requests(self) -> list[Request]:
        """Those that have not ended, in the order of their admission."""
        return [row.request for row in self._rows.values()]

    @property
    def unread(self) -> int:
        """Tokens of prompts that are read before their rows' first steps."""
        return sum(row.unread for row in self._rows.values())

    def admit(self, request: Request, cache: FullCache | None = None, reserve: DeviceReserve | None = None) -> None:
        """Let a request take part from the next step on.

        Args:
            request: a fresh one.
            cache: holds the first tokens of its prompt, and goes on to hold what is generated; by default a new one.
            reserve: what a new cache leaves free on the device for other texts, where ``kv_memory`` bounds it.

        Raises:
            ValueError: if the cache holds as many tokens as the prompt has, or more; or the request is in the batch.
            MemoryError: if there is no room for its keys and values.
            OSError: if they cannot be kept in a file.
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
            with self._lock, present(self._step.level.model.device), self._step.seconds.reading():
                self._sharing.refresh()
                if request.drafts:
                    self._step.level.begin(row)
                if own and not cache.offloaded:
                    self._sharing.join(row)
        except BaseException:
            self._remove(request)
            raise

    def verify_stored(self, request: Request) -> None:
        """Verify what the store keeps of a prompt, so that ``admit`` does not have to; from any thread."""
        self._sharing.verify(request)

    def tokens(self, request: Request) -> int:
        """Places that a request's cache has: its text at its longest, and a tree."""
        return len(request) + request.remaining + self._step.budget

    def needs(self, request: Request) -> int:
        """Maximum bytes of keys and values that a request takes once it is admitted: those of the target and of all
        draft levels. What it shares with others is counted as if it were alone."""
        tokens = self.tokens(request)
        cache = FullCache(tokens, releases=self._releases(request))
        return cache.needs(self._step.level.model.kv, tokens) + self.drafting(request)

    def _releases(self, request: Request) -> bool:
        """Whether a request's cache gives back what layers with windows see no more: its prompt is not kept for others,
        and blocks of it are no longer than what is kept behind a window."""
        target = self._step.level.model
        if not target.windowed or not releases(target.device.type) or self.chunk > MIN_SLACK_TOKENS:
            return False
        return not self._sharing.keeps(request, target.kv.nbytes)

    def drafting(self, request: Request) -> int:
        """Maximum bytes that all draft levels take for a request."""
        sources = self._step.level.planner.sources if request.drafts else ()
        return sum(source.needs(self.tokens(request)) for source in sources)

    def step(self, resting: Collection[int] = (), budgets: Mapping[int, int] | None = None) -> list[Commit]:
        """Take one step with all rows.

        Args:
            resting: ids of requests that sit it out.
            budgets: the longest drafts of some requests by their ids, where they are shorter than usual.

        Returns:
            A commit for each row that got tokens, and for each that ended by an error of its own (``Request.error``).
        """
        if not self._rows:
            return []
        with self._lock, present(self._step.level.model.device):
            beside = any(row.begun for row in self._rows.values())
            working = self._pacing is None or self._pacing.works(beside)
            with self._step.seconds.reading():
                worked, failed = self._catch_up(beside, resting) if working else (False, [])
            commits = [Commit(row.request, [], 0) for row in failed]
            decoding, reading = self._schedule(beside, working, resting)
            if decoding or reading:
                commits += self._timed(decoding, reading, beside, worked, budgets or {})
            for row in (*decoding, *reading):
                self._sharing.read(row)
        for commit in commits:
            if commit.request.finish_reason is not None:
                try:
                    self._remove(commit.request)
                except Exception:  # the others' tokens must reach them
                    log.exception("not all that an ended request had could be let go of")
        return commits

    def cancel(self, request: Request) -> None:
        """End a request here and now, with its tokens kept; one that has ended already stays as it is."""
        if request.id in self._rows:
            self._remove(request)

    def close(self) -> None:
        """End all requests, with their tokens kept."""
        with ExitStack() as each:  # all of them, whatever fails
            for request in self.requests:
                each.callback(self._remove, request)

    def _schedule(
        self, beside: bool, working: bool, resting: Collection[int]
    ) -> tuple[list[BatchRow], dict[BatchRow, int]]:
        """The rows that decode in the next step, and if it works on prompts the rows that read a chunk of theirs.

        A row whose prompt is not read yet takes part if there is room for its chunk; who waited longest comes first.
        """
        rows = [row for row in self._rows.values() if row.request.id not in resting and row.request.error is None]
        decoding: list[BatchRow] = [row for row in rows if row.begun]
        reading: dict[BatchRow, int] = {}
        paced = self._pacing is not None and beside
        left, share, first = self.limit - len(decoding), 1.0, True  # tokens, and of the time that is allowed
        for row in sorted((row for row in rows if working and not row.begun), key=lambda row: row.served):
            if self._sharing.waits(row):
                continue
            tokens = row.next_chunk(max(1, int(share * row.reads)) if paced and not row.drafting else None)
            reads = tokens < len(row.pending)
            if not (reads or row.ready):
                continue
            if not first and (tokens > left or (paced and share * row.reads < 1)):
                break
            left, share, first = left - tokens, share - tokens / row.reads, False
            if reads:
                reading[row] = tokens
            else:
                decoding.append(row)
            row.served = self._steps
        self._steps += 1
        return decoding, reading

    def _timed(
        self,
        decoding: list[BatchRow],
        reading: dict[BatchRow, int],
        beside: bool,
        worked: bool,
        budgets: Mapping[int, int],
    ) -> list[Commit]:
        """Take a step with these rows. Its time decides how much of prompts the next ones read.

        Args:
            beside: whether it holds other rows up.
            worked: whether drafts for a prompt were prepared before.
        """
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
        """Take a step. If it fails while drafts are made, and keys and values of some rows are lost, these rows end."""
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

    def _catch_up(self, beside: bool, resting: Collection[int]) -> tuple[bool, list[BatchRow]]:
        """Let the drafter read the prompts that the target has read, in pieces; whether there was one, and the rows
        that failed."""
        worked, failed = False, []
        pacing = self._pacing if beside else None
        end = 0.0 if pacing is None else pacing.clock() + pacing.allowed
        for row in self._rows.values():
            limit = row.reads if pacing is not None and not row.drafting else None
            if row.ready or row.request.id in resting or row.next_chunk(limit) < len(row.pending):
                continue
            if pacing is not None and pacing.clock() > end:
                break
            worked = True
            try:
                self._prepare(row, pacing)
            except Exception as error:
                row.request.fail(error)
                failed.append(row)
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
        """Let go of all that a request has, whatever of that fails. Where the garbage collector closes a text in the
        middle of another one's step, that step ends first."""
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
