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
from forerun.engine.engine import Engine
from forerun.engine.prefill_pacing import STEPS_BESIDE, PrefillPacing
from forerun.engine.result import Commit
from forerun.kv.kv_tiers import NoRoomError
from forerun.server.admission import Admission, Ending, ScheduledRequest, SchedulerLimits
from forerun.server.step_shares import MAX_SLOWDOWN, StepShares
from forerun.tensor_parallel.channel import ParallelError

log = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""Time without a request after which free memory goes back to the system. The next request pays 1 ms or more for each
MiB that it takes again, so memory is kept between requests that follow each other."""
OFFLOADED_CHUNKS = 8
"""Chunks of an offloaded prompt that one step reads. Fewer would hold others up less, but every step copies in all that
was read before."""
MEMORY_POLL_SECONDS = 0.01
"""Time between two looks for memory that another user of the engine holds."""
LAST_STEP_SECONDS = 30.0
"""Time for the step that is under way at the end. A longer one ends with the process."""


class Scheduler:
    """Runs requests of many clients through one engine.

    Its own thread alone starts and ends requests. The lock is held to look at who waits and runs, never while the
    engine works.

    Args:
        engine: decodes; others may use it meanwhile.
        limits: what it takes on.
        on_finished: called in the scheduler's thread with each request that ended by itself; must return at once.

    Attributes:
        failed: true once it cannot go on. All requests have ended then, and it takes no more.
        other_seconds: what it did beside the engine's steps while requests ran: who is next, and handing tokens out.
    """

    def __init__(
        self, engine: Engine, limits: SchedulerLimits, on_finished: Callable[[Request], None] | None = None
    ) -> None:
        self.engine, self.limits, self.failed, self.other_seconds = engine, limits, False, 0.0
        self._on_finished = on_finished
        self._batch = self._new_batch()
        self._admission, self._shares = Admission(limits, engine.tiers), StepShares()
        self._cancelled: deque[ScheduledRequest] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="forerun-scheduler", daemon=True)
        self._thread.start()

    def check_places(self, tenant: str, texts: int) -> None:
        """Refuse texts that ``submit`` would refuse, before any work for them is done.

        Raises:
            QueueFullError: if there are not enough places for them.
            RuntimeError: after ``close``.
        """
        with self._changed:
            self._check_open()
            self._admission.check_places(tenant, texts)

    def submit(
        self,
        request: Request,
        on_commit: Callable[[Commit], None],
        on_end: Callable[[Ending], None],
        tenant: str = "default",
        deadline: float | None = None,
    ) -> ScheduledRequest:
        """Put a request into the queue. What the store keeps of its prompt is verified here, in the caller's thread.

        Args:
            request: a new one.
            on_commit, on_end, tenant, deadline: see ``ScheduledRequest``.

        Raises:
            ValueError: if its caches take more than there is memory for.
            QueueFullError: if the queue is full.
            RuntimeError: after ``close``.
        """
        batch = self._batch
        needs, drafting = batch.needs(request), batch.drafting(request)
        scheduled = ScheduledRequest(
            request, tenant, on_commit, on_end, deadline, needs, batch.tokens(request), drafting
        )
        self._admission.check(scheduled)
        batch.verify_stored(request)
        with self._changed:
            self._check_open()
            displaced = self._admission.add(scheduled)
            self._changed.notify()
        if displaced is not None:
            displaced.end("displaced")
        return scheduled

    def cancel(self, scheduled: ScheduledRequest) -> None:
        """End a request that waits or runs; one that has ended stays as it is.

        It waits for no lock, so an event loop may call it. A thread that holds the lock looks at the cancelled requests
        before it sleeps.
        """
        self._cancelled.append(scheduled)
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def close(self, patience: float = 0.0) -> None:
        """Take no more requests, and end all others.

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
            self._cancelled += self._admission
            self._changed.notify()
        self._thread.join(LAST_STEP_SECONDS)
        if self._thread.is_alive():
            log.error("a step has not ended within %g seconds; it is left alone", LAST_STEP_SECONDS)

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        with self._changed:
            return bool(self.running or self.waiting)

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def running(self) -> int:
        """How many requests run."""
        return len(self._admission.running)

    @property
    def usage(self) -> float:
        return self._admission.usage

    def _check_open(self) -> None:
        if self._closing:
            raise RuntimeError("the scheduler is closed")

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.critical("the server cannot go on; it takes no more requests", exc_info=error)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """End all requests: none of them would ever be served."""
        with self._changed:
            self._closing = True
            left = list(self._admission)
            self._admission = Admission(self.limits)
        for scheduled in left:
            scheduled.request.fail(error)
            scheduled.end("error")
        self.failed = True

    def _serve(self) -> None:
        stepped = False
        while True:
            with self._changed:
                has_work = self._changed.wait_for(
                    lambda: self.running or self.waiting or self._cancelled or self._closing,
                    IDLE_SECONDS if stepped else None,
                )
                ended = self._closing and not (self.running or self.waiting)
            if ended:
                self._batch.close()
                return
            began, stepping = time.perf_counter(), self.engine.step_seconds.total
            self._end_cancelled()
            self._end_late()
            self._admit()
            if self.running:
                self._step()
                stepped = True
                stepping = self.engine.step_seconds.total - stepping
                self.other_seconds += max(0.0, time.perf_counter() - began - stepping)
            elif self.waiting:  # another user of the engine holds the memory
                time.sleep(MEMORY_POLL_SECONDS)
            elif not has_work:
                give_back()
                stepped = False

    def _new_batch(self) -> Batch:
        beside = STEPS_BESIDE if self.limits.tenants == 1 else MAX_SLOWDOWN
        pacing = PrefillPacing(beside=beside) if self.engine.exactness.level == "bitwise" else None
        return self.engine.batch(self.limits.step, offloaded_chunks=OFFLOADED_CHUNKS, pacing=pacing)

    def _end_cancelled(self) -> None:
        while self._cancelled:
            self._end(self._cancelled.popleft(), "cancelled")

    def _end_late(self) -> None:
        now = time.monotonic()
        with self._changed:
            late = [each for each in self._admission if each.deadline is not None and each.deadline <= now]
        for scheduled in late:
            self._end(scheduled, "deadline")

    def _admit(self) -> None:
        while True:
            with self._changed:
                scheduled = self._admission.next()
            if scheduled is None:
                return
            try:
                self._batch.admit(scheduled.request, reserve=self._admission.reserve(scheduled))
            except NoRoomError:  # another thread has used the engine meanwhile
                with self._changed:
                    self._admission.postpone(scheduled)
                return
            except Exception as error:
                scheduled.request.fail(error)
                self._end(scheduled, "error")
                continue
            finally:
                self._admission.started()
            scheduled.admitted = time.monotonic()
            with self._changed:
                self._admission.serve(scheduled.tenant, scheduled.request.prompt_length)

    def _step(self) -> None:
        running = list(self._admission.running.values())
        plan = self._shares.plan(running)
        began = time.perf_counter()
        try:
            commits = self._batch.step(*plan)
        except ParallelError:
            raise  # the ranks are out of step for good
        except Exception as error:
            log.exception("a step failed; the requests that ran in it end")
            try:
                self._batch.close()
            except ParallelError:
                raise
            except Exception:  # it may well fail for the same reason
                log.exception("not all that the failed step's requests had could be let go of")
            self._batch = self._new_batch()
            for scheduled in running:
                scheduled.request.fail(error)
                self._end(scheduled, "error")
            return
        rows = [self._admission.running[commit.request.id] for commit in commits]
        if len(commits) == len(running) - len(plan.resting):
            stepped = [(row.tenant, commit) for row, commit in zip(rows, commits, strict=True)]
            self._shares.learn(stepped, time.perf_counter() - began)
        with self._changed:
            for scheduled, commit in zip(rows, commits, strict=True):
                self._admission.serve(scheduled.tenant, len(commit.tokens))
        for scheduled, commit in zip(rows, commits, strict=True):
            if not self._deliver(scheduled, commit):
                self._end(scheduled, "cancelled")
            elif commit.request.finish_reason is not None:
                self._end(scheduled, "finished" if commit.request.error is None else "error")
        for commit in commits:
            if isinstance(commit.request.error, ParallelError):
                raise commit.request.error

    def _deliver(self, scheduled: ScheduledRequest, commit: Commit) -> bool:
        """Hand tokens to a client; return False if it fails, which must not stop the others."""
        try:
            scheduled.on_commit(commit)
        except Exception:
            log.exception("a client failed to take its tokens; its request ends")
            return False
        return True

    def _end(self, scheduled: ScheduledRequest, how: Ending) -> None:
        with self._changed:
            if not self._admission.remove(scheduled):
                return
            self._admission.forget()
        try:
            self._batch.cancel(scheduled.request)
        except Exception:  # its client is told all the same
            log.exception("not all that an ended request had could be let go of")
        if how == "finished" and self._on_finished is not None:
            try:
                self._on_finished(scheduled.request)
            except Exception:
                log.exception("an ended request was not handed on")
        scheduled.end(how)
