"""Rows that come and go: requests are admitted at any time, step together, and leave when they end.

A long prompt does not hold up the rows that decode: every step reads at most so many tokens of prompts, and fewer if
that takes long (``pace.py``). A beginning that several prompts share is read once (``following.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

import torch

from forerun.core.request import Request
from forerun.core.turns import Turns
from forerun.engine.commit import Commit
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.engine.prefix_sharing import PrefixSharing
from forerun.engine.row import Row
from forerun.engine.step import Step
from forerun.kv.full_cache import FullCache


class Batch:
    """Requests that are decoded together; made by ``Engine.batch``.

    One thread at a time may use it; other threads may use the same engine meanwhile.

    Args:
        step: takes a step for some rows.
        turns: the engine's; a step is one turn.
        chunk: prompt tokens that a row reads in one pass, at most.
        limit: tokens of texts that a pass reads, at most; drafts come on top. Each row that decodes reads one. A chunk
            of one prompt is read in any case, so that every prompt is read some day. The fewer, the sooner rows that
            decode get their next token while another row reads its prompt.
        following: keeps what prompts begin with; its chunks are no longer than those of reading.
        make: makes a cache that has room for so many tokens.
        free: lets go of such a cache's memory when its row ends; by default it goes with the cache.
    """

    def __init__(
        self, step: Step, turns: Turns, chunk: int, limit: int, following: PrefixSharing,
        make: Callable[[int], FullCache] = FullCache, free: Callable[[FullCache], None] | None = None,
    ) -> None:  # fmt: skip
        self._step, self._turns, self._make, self._free = step, turns, make, free
        self.chunk, self.limit = min(chunk, limit), limit
        self.pieces: int | None = None
        """Chunks of a prompt off the device that one pass reads, at most; None for all, as each pass brings in what
        lies before."""
        self.pace: PrefillPacing | None = None
        """Bounds the time of steps that work on prompts, by cutting these anywhere; so only where passes are bitwise
        exact. None to do as much as a step may."""
        self._following = following
        self._rows: dict[int, Row] = {}
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

    def admit(self, request: Request, cache: FullCache | None = None) -> None:
        """Let a request take part from the next step on.

        Args:
            request: a fresh one.
            cache: holds the first tokens of its prompt, and goes on to hold what is generated; by default a new one.

        Raises:
            ValueError: if the cache holds as many tokens as the prompt has, or more; or the request is in the batch.
            MemoryError: if there is no room for its keys and values.
            OSError: if they cannot be kept in a file.
        """
        if request.id in self._rows:
            raise ValueError(f"request {request.id} is in this batch already")
        if cache is not None and cache.length >= request.prompt_length:
            raise ValueError(f"a cache holds {cache.length} tokens; it may hold at most {request.prompt_length - 1}")
        held = self._make(self.tokens(request)) if cache is None else cache
        piece = None if self.pieces is None else self.pieces * self.chunk
        row = Row(request, held, self.chunk, self._step.target.reads_whole(held), piece, cache is None)
        self._rows[request.id] = row
        try:
            with self._turns:
                self._step.drafter.begin(request)
                if row.own and not held.offloaded:
                    self._following.join(row)
        except BaseException:
            self._remove(request)
            raise

    def tokens(self, request: Request) -> int:
        """Places that a request's cache has: its text at its longest, and a tree."""
        return len(request) + request.remaining + self._step.budget

    def needs(self, request: Request) -> int:
        """Bytes of keys and values that a request takes, at most, once it is admitted: those of the target and of all
        draft levels. What it shares with others is counted as if it were alone."""
        tokens = self.tokens(request)
        return FullCache(tokens).needs(self._step.target.kv, tokens) + self.drafting(request)

    def drafting(self, request: Request) -> int:
        """Of the bytes that a request needs, those of all draft levels."""
        return 0 if request.budget == 0 else self._step.drafter.needs(self.tokens(request))

    def step(self) -> list[Commit]:
        """One pass over all rows; what it adds to each.

        Returns:
            A commit for each row that got tokens, and for each that ended by an error of its own (``Request.error``).
        """
        if not self._rows:
            return []
        with self._turns:
            beside = any(row.begun for row in self._rows.values())
            working = self.pace is None or self.pace.works(beside)
            worked, failed = self._catch_up(beside) if working else (False, [])
            commits = [Commit(row.request, [], 0) for row in failed]
            decoding, reading = self._schedule(beside, working)
            if decoding or reading:
                commits += self._timed(decoding, reading, beside, worked)
            for row in (*decoding, *reading):
                self._following.read(row)
        for commit in commits:
            if commit.request.finish_reason is not None:
                self._remove(commit.request)
        return commits

    def cancel(self, request: Request) -> None:
        """End a request here and now, with its tokens kept; one that has ended already stays as it is."""
        if request.id in self._rows:
            self._remove(request)

    def close(self) -> None:
        """End all requests, with their tokens kept."""
        for request in self.requests:
            self._remove(request)

    def _schedule(self, beside: bool, working: bool) -> tuple[list[Row], list[Row]]:
        """The rows that decode in the next step, and those that read a chunk of their prompt if it works on prompts.

        A row whose prompt is not read yet takes part if there is room for its chunk; who waited longest comes first.
        """
        rows = [row for row in self._rows.values() if row.request.error is None]
        decoding: list[Row] = [row for row in rows if row.begun]
        reading: list[Row] = []
        paced = self.pace is not None and beside
        left, share, taken = self.limit - len(decoding), 1.0, False  # tokens, and of the time that is allowed
        for row in sorted((row for row in rows if working and not row.begun), key=lambda row: row.served):
            if self._following.waits(row):
                continue
            if not row.drafting:
                row.most = max(1, int(share * row.reads)) if paced else None
            if not (row.reading or row.ready):
                continue
            if taken and (row.next_chunk > left or (paced and share * row.reads < 1)):
                break
            left, share, taken = left - row.next_chunk, share - row.next_chunk / row.reads, True
            (reading if row.reading else decoding).append(row)
            row.served = self._steps
        self._steps += 1
        return decoding, reading

    def _timed(self, decoding: list[Row], reading: list[Row], beside: bool, worked: bool) -> list[Commit]:
        """A step of these rows, beside others or not. Its time tells how much of prompts the next ones read.

        Args:
            decoding, reading: see ``_pass``.
            beside: whether it holds other rows up.
            worked: whether drafts for a prompt were prepared before.
        """
        if self.pace is None or not beside:
            return self._pass(decoding, reading)
        read = {row: row.next_chunk for row in (*decoding, *reading) if not row.begun}
        began = self.pace.clock()
        commits = self._pass(decoding, reading)
        seconds = self.pace.clock() - began
        self.pace.learn(seconds, worked or bool(read))
        for row, tokens in read.items():
            row.reads = self.pace.adjusted(row.reads, seconds, row.chunk, tokens == row.reads)
        return commits

    def _pass(self, decoding: list[Row], reading: list[Row]) -> list[Commit]:
        """A step of rows that decode, and of rows that read a chunk of their prompt. If it fails while drafts are made,
        and keys and values of some rows are lost, it is these rows that end."""
        try:
            return self._step(decoding, reading)
        except Exception:
            going = [row for row in self._rows.values() if row.request.error is None]
            lost = {row: why for row in going if (why := row.cache.lost) is not None}
            if not lost:
                raise
        for row, why in lost.items():
            row.request.fail(why)
        return [Commit(row.request, [], 0) for row in lost]

    def _catch_up(self, beside: bool) -> tuple[bool, list[Row]]:
        """Let the drafter read the prompts that the target has read, in pieces; gives whether there was one, and the
        rows that failed."""
        worked, failed = False, []
        pace = self.pace if beside else None
        end = 0.0 if pace is None else pace.clock() + pace.allowed
        for row in self._rows.values():
            if row.ready or row.reading:
                continue
            if pace is not None and pace.clock() > end:
                break
            worked = True
            try:
                self._prepare(row, pace)
            except Exception as error:
                row.request.fail(error)
                failed.append(row)
        return worked, failed

    @torch.inference_mode()
    def _prepare(self, row: Row, pace: PrefillPacing | None) -> None:
        drafter = self._step.drafter
        if not row.drafting:
            drafter.prefilled(row.request, row.cache)
            row.drafting, row.prepares = True, row.reads
        if pace is None:
            row.ready = drafter.catch_up(row.request, self.limit)
            return
        began = pace.clock()
        row.ready = drafter.catch_up(row.request, row.prepares)
        row.prepares = pace.adjusted(row.prepares, pace.clock() - began, self.limit)

    def _remove(self, request: Request) -> None:
        """Let go of all that a request has, whatever of that fails."""
        row = self._rows.pop(request.id)
        with ExitStack() as last:
            last.callback(self._let_go, row)
            last.enter_context(self._turns)
            last.callback(self._step.drafter.finish, request)
            self._following.leave(row)

    def _let_go(self, row: Row) -> None:
        if row.own and self._free is not None:
            self._free(row.cache)
