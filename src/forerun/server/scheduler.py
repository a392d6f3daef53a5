"""One thread that decodes for all clients, with iteration-level scheduling (Orca, Yu et al. 2022): requests join and
leave between any two steps. Their bytes are known before they start, so none is evicted for lack of memory."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from forerun.core.memory import give_back
from forerun.core.request import Request
from forerun.engine.batch import Batch
from forerun.engine.engine import Engine
from forerun.engine.prefill_pacing import STEPS_BESIDE, PrefillPacing
from forerun.engine.result import Commit
from forerun.kv.kv_tiers import NoRoomError
from forerun.server.admission import Admission, Ending, ScheduledRequest, SchedulerLimits, attempt
from forerun.server.step_shares import MAX_SLOWDOWN, StepShares
from forerun.tensor_parallel.channel import ParallelError

log = logging.getLogger(__name__)

IDLE_SECONDS = 5.0
"""Time without a request after which free memory returns to the system. Allocating it again costs 1 ms per MiB."""
OFFLOADED_CHUNKS = 8
"""Chunks of an offloaded prompt prefilled per step, which copies in everything prefilled before; others wait for it."""
MEMORY_POLL_SECONDS = 0.01
"""Interval of checks for memory that another user of the engine holds."""
LAST_STEP_SECONDS = 30.0
"""Time limit for the last step. A longer one ends with the process."""


class Scheduler:
    """A thread that runs requests of many clients through one engine, which others may use, too. Only it starts and
    ends requests. The lock guards queues, and is never held while the engine works. ``on_finished`` is called in the
    thread with each finished request, and must return at once."""

    def __init__(
        self, engine: Engine, limits: SchedulerLimits, on_finished: Callable[[Request], None] | None = None
    ) -> None:
        self.engine, self.limits = engine, limits
        self.failed = False  # whether an error ended it and all requests
        self.other_seconds = 0.0  # outside the engine's steps while requests ran: admission and delivery
        self._on_finished = on_finished
        self._batch = self._new_batch()
        self._admission, self._shares = Admission(limits, engine.tiers), StepShares(limits.tenants)
        self._cancelled: deque[ScheduledRequest] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="forerun-scheduler", daemon=True)
        self._thread.start()

    def check_places(self, tenant: str, requests: int) -> None:
        """Raise the QueueFullError or RuntimeError of ``submit`` before any work for so many requests."""
        with self._changed:
            self._check_open()
            self._admission.check_places(tenant, requests)

    def submit(
        self,
        request: Request,
        on_commit: Callable[[Commit], None],
        on_end: Callable[[Ending], None],
        tenant: str = "default",
        deadline: float | None = None,
    ) -> ScheduledRequest:
        """Queue a new request; raise ValueError beyond the memory, QueueFullError, or RuntimeError after ``close``."""
        batch = self._batch
        sizes = batch.needs(request), batch.tokens(request), batch.drafting(request)
        scheduled = ScheduledRequest(request, tenant, on_commit, on_end, deadline, *sizes)
        self._admission.check(scheduled)
        batch.verify_stored(request)  # in the calling thread
        with self._changed:
            self._check_open()
            displaced = self._admission.add(scheduled)
            self._changed.notify()
        if displaced is not None:
            displaced.end("displaced")
        return scheduled

    def cancel(self, scheduled: ScheduledRequest) -> None:
        """End a request, unless it has ended, without waiting."""
        self._cancelled.append(scheduled)
        if self._changed.acquire(blocking=False):  # otherwise its holder sees the request before it sleeps
            try:
                self._changed.notify()
            finally:
                self._changed.release()

    def close(self, patience: float = 0.0) -> None:
        """Accept no more requests, and end the others after ``patience`` seconds."""
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
            log.error("a step has not ended within %g seconds; it is abandoned", LAST_STEP_SECONDS)

    @property
    def ready(self) -> bool:
        return self._thread.is_alive() and not self._closing

    @property
    def busy(self) -> bool:
        """Whether requests run or wait."""
        with self._changed:
            return bool(self.running or self.waiting)

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    @property
    def running(self) -> int:
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
            log.critical("the server cannot continue; it accepts no more requests", exc_info=error)
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
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
            while self._cancelled:
                self._end(self._cancelled.popleft(), "cancelled")
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
            log.exception("a step failed; its requests end")
            try:
                self._batch.close()
            except ParallelError:
                raise
            except Exception:  # it may fail for the same reason
                log.exception("some resources of the failed step's requests could not be released")
            self._batch = self._new_batch()
            for scheduled in running:
                scheduled.request.fail(error)
                self._end(scheduled, "error")
            return
        rows = [self._admission.running[commit.request.id] for commit in commits]
        if len(commits) == len(running) - len(plan.skipping):
            stepped = [(row.tenant, commit) for row, commit in zip(rows, commits, strict=True)]
            self._shares.record(stepped, time.perf_counter() - began)
        with self._changed:
            for scheduled, commit in zip(rows, commits, strict=True):
                self._admission.serve(scheduled.tenant, len(commit.tokens))
        for scheduled, commit in zip(rows, commits, strict=True):
            if not attempt(partial(scheduled.on_commit, commit), "a client failed to receive its tokens"):
                self._end(scheduled, "cancelled")
            elif commit.request.finish_reason is not None:
                self._end(scheduled, "finished" if commit.request.error is None else "error")
        for commit in commits:
            if isinstance(commit.request.error, ParallelError):
                raise commit.request.error

    def _end(self, scheduled: ScheduledRequest, how: Ending) -> None:
        with self._changed:
            if not self._admission.remove(scheduled):
                return
            self._admission.forget()
        cancel = partial(self._batch.cancel, scheduled.request)
        attempt(cancel, "some resources of an ended request could not be released")
        if how == "finished" and self._on_finished is not None:
            attempt(partial(self._on_finished, scheduled.request), "an ended request could not be passed on")
        scheduled.end(how)
