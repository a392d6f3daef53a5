"""One thread that decodes for all clients: it admits requests while their caches fit, steps, and hands out tokens.

Iteration-level scheduling (Orca, Yu et al. 2022): requests join and leave between any two steps. A request's bytes of
keys and values are known before it starts, so none is ever put out again for want of memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from forerun.core.memory import give_back
from forerun.core.request import Request
from forerun.engine.batch import Batch
from forerun.engine.commit import Commit
from forerun.engine.engine import Engine
from forerun.engine.prefill_pacing import PrefillPacing
from forerun.kv.placement import NoRoomError
from forerun.server.kv_admission import KVAdmission, TieredRoom
from forerun.server.limits import Limits
from forerun.server.ticket import Ending, Ticket
from forerun.server.waiting import QueueFullError, Waiting
from forerun.tensor_parallel.channel import ParallelError

log = logging.getLogger(__name__)

RECENT = 32
"""Ended requests by whose times a place's is guessed."""

REST = 5.0
"""Seconds without a request after which free memory goes back to the system. Whoever comes then pays for the pages that
are taken again, 1 ms or more for each MiB; so it is kept between requests that follow each other."""

PIECES = 8
"""Chunks of a prompt that is not on the device that a step reads, at most. With fewer the others would wait less, but
each step brings in all that was read before."""

POLL = 0.01
"""Seconds between two looks for memory that another user of the engine has."""


class Scheduler:
    """Runs requests of many clients through one engine.

    Args:
        engine: decodes; others may use it meanwhile.
        limits: what it takes on.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self._batch = self._fresh()
        self._waiting = Waiting()
        self._running: dict[int, Ticket] = {}
        tiers, free = engine.tiers, lambda: limits.rows - len(self._running)
        self._room = KVAdmission(limits.memory) if tiers is None else TieredRoom(tiers, free)
        self._cancelled: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._durations: deque[float] = deque(maxlen=RECENT)
        self.on_finished: Callable[[Request], None] = lambda request: None
        """Called in the scheduler's thread with each request that has ended by itself; must return at once."""
        self.on_failed: Callable[[], None] = lambda: None
        """Called in the scheduler's thread if it cannot go on: all requests have ended, and it takes no more."""
        self._thread = threading.Thread(target=self._work, name="forerun-scheduler", daemon=True)
        self._thread.start()

    def submit(
        self,
        request: Request,
        on_commit: Callable[[Commit], None],
        on_end: Callable[[Ending], None],
        tenant: str = "default",
        deadline: float | None = None,
    ) -> Ticket:
        """Let a request wait for its turn.

        Args:
            request: a fresh one.
            on_commit, on_end, tenant, deadline: see ``Ticket``.

        Raises:
            ValueError: if its caches take more than there is memory for.
            QueueFullError: if as many wait as may.
            RuntimeError: after ``close``.
        """
        needs, drafting = self._batch.needs(request), self._batch.drafting(request)
        ticket = Ticket(request, tenant, on_commit, on_end, deadline, needs, self._batch.tokens(request), drafting)
        self._room.check(ticket)
        with self._changed:
            if self._closing:
                raise RuntimeError("the scheduler is closed")
            if len(self._waiting) >= self.limits.waiting and not self._fits(ticket):
                raise QueueFullError(len(self._waiting), self._retry_after())
            self._waiting.add(ticket)
            self._changed.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, wherever it is; one that has ended stays as it is.

        It waits for no lock, so that an event loop may call it: if the thread holds the lock, it looks here before it
        sleeps, unless nobody runs or waits, and then there is nothing to end.
        """
        self._cancelled.append(ticket)
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def close(self, patience: float = 0.0) -> None:
        """Take no more requests, and end those that are there.

        Args:
            patience: seconds that they may take to end by themselves.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
        until = time.monotonic() + patience
        while time.monotonic() < until and self.busy:
            time.sleep(0.01)
        with self._changed:
            self._cancelled += [*self._running.values(), *self._waiting]
            self._changed.notify()
        self._thread.join()

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._thread.is_alive() and not self._closing

    @property
    def busy(self) -> bool:
        """Whether anyone runs or waits."""
        with self._changed:
            return bool(self._running or len(self._waiting))

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def memory(self) -> int:
        """Bytes of keys and values that the running requests were admitted with."""
        return sum(ticket.needs for ticket in list(self._running.values()))

    @property
    def usage(self) -> float:
        """The part that is taken of all memory for keys and values."""
        return self._room.usage

    def _fits(self, ticket: Ticket) -> bool:
        """Whether it could start now."""
        alone = not len(self._waiting) and len(self._running) < self.limits.rows
        return alone and self._room.fits(ticket)

    def _retry_after(self) -> float:
        """Seconds until a place in the queue is likely free: by how long requests took of late."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(1.0, mean / self.limits.rows)

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.critical("the server cannot go on; it takes no more requests", exc_info=error)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End everybody: nobody would ever be served."""
        with self._changed:
            self._closing = True
            left = [*self._running.values(), *self._waiting]
            self._running, self._waiting = {}, Waiting()
        for ticket in left:
            ticket.request.fail(error)
            ticket.end("error")
        self.on_failed()

    def _serve(self) -> None:
        stepped = False
        while True:
            with self._changed:
                called = self._changed.wait_for(self._called, REST if stepped else None)
                if self._closing and not (self._running or len(self._waiting)):
                    self._batch.close()
                    return
                self._end_cancelled()
                self._end_late()
                self._admit()
            if self._running:
                self._step()
                stepped = True
            elif len(self._waiting):  # others use the engine, and have the memory
                time.sleep(POLL)
            elif not called:
                give_back()
                stepped = False

    def _fresh(self) -> Batch:
        batch = self.engine.batch(self.limits.step)
        batch.pieces = PIECES
        batch.pace = PrefillPacing() if self.engine.exactness.level == "bitwise" else None
        return batch

    def _called(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._running or len(self._waiting) or self._cancelled or self._closing)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            self._end(self._cancelled.popleft(), "cancelled")

    def _end_late(self) -> None:
        now = time.monotonic()
        for ticket in [*self._running.values(), *self._waiting]:
            if ticket.deadline is not None and ticket.deadline <= now:
                self._end(ticket, "deadline")

    def _admit(self) -> None:
        """Whose turn it is starts, if its caches fit; nobody overtakes it, or a large one might wait for ever."""
        while (ticket := self._waiting.next()) is not None:
            if len(self._running) >= self.limits.rows or not self._room.fits(ticket):
                return
            self._room.take(ticket)
            try:
                self._batch.admit(ticket.request)
            except NoRoomError:  # another thread has used the engine meanwhile
                self._room.give(ticket)
                return
            except Exception as error:
                self._room.give(ticket)
                self._waiting.remove(ticket)
                ticket.request.fail(error)
                ticket.end("error")
                continue
            self._waiting.remove(ticket)
            ticket.admitted = time.monotonic()
            self._running[ticket.request.id] = ticket
            self._waiting.serve(ticket.tenant, ticket.request.prompt_length)

    def _step(self) -> None:
        try:
            commits = self._batch.step()
        except ParallelError:
            raise  # the processes that hold the model are out of step for good
        except Exception as error:
            log.exception("a step failed; the requests that ran in it end")
            self._batch.close()
            self._batch = self._fresh()
            for ticket in list(self._running.values()):
                ticket.request.fail(error)
                self._end(ticket, "error")
            return
        for commit in commits:
            ticket = self._running[commit.request.id]
            self._waiting.serve(ticket.tenant, len(commit.tokens))
            if not self._tell(ticket, commit):
                self._end(ticket, "cancelled")
            elif commit.request.finish_reason is not None:
                self._end(ticket, "finished" if commit.request.error is None else "error")
        for commit in commits:
            if isinstance(commit.request.error, ParallelError):
                raise commit.request.error

    def _tell(self, ticket: Ticket, commit: Commit) -> bool:
        """Whether the client takes its tokens; one that cannot must not stop the others."""
        try:
            ticket.on_commit(commit)
        except Exception:
            log.exception("a client does not take its tokens; its request ends")
            return False
        return True

    def _end(self, ticket: Ticket, how: Ending) -> None:
        with self._changed:
            if self._running.pop(ticket.request.id, None) is not None:
                self._batch.cancel(ticket.request)
                self._room.give(ticket)
                self._durations.append(time.monotonic() - (ticket.admitted or ticket.submitted))
            elif not self._waiting.remove(ticket):
                return
            self._waiting.forget({each.tenant for each in self._running.values()})
        if how == "finished":
            self.on_finished(ticket.request)
        ticket.end(how)
