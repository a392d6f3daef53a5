"""Fair sharing between threads and tenants: a first-come lock, executors, and eviction by owner."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])
KeyT = TypeVar("KeyT")
ResultT = TypeVar("ResultT")


class FairLock:
    """A lock that serves threads in order of arrival, used as ``with lock:``; not reentrant.

    An ordinary lock mostly returns to the thread that just released it, and the others starve. Ctrl-C may arrive even
    before a release, so a thread that acquires the lock while holding it counts as interrupted. Code that the garbage
    collector may run uses ``when_free``.
    """

    def __init__(self) -> None:
        self._queue: deque[int] = deque()  # the holder, then the waiting threads
        self._inside: FrameType | None = None  # the frame whose ``with`` holds it
        self._later: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition(threading.RLock())

    def __enter__(self) -> None:
        me = threading.get_ident()
        if me in self._queue:
            self._leave(me)
        self._queue.append(me)  # atomic: who finds the queue empty holds the lock
        if self._queue[0] != me:
            try:
                with self._changed:
                    while self._queue[0] != me:
                        self._changed.wait()
            except BaseException:  # such as Ctrl-C
                self._leave(me)
                raise
        self._inside = sys._getframe(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside = None
        self._queue.popleft()
        if self._queue:
            self._wake()
        while self._later:
            try:
                job = self._later.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                job()
            except Exception:
                log.exception("a job deferred until a lock was free failed")

    def when_free(self, job: Callable[[], None]) -> None:
        """Run a job that needs the lock: now, or after the current holder if the job interrupts it."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._inside and not self._enters(frame):
            frame = frame.f_back
        if frame is None:
            job()
        else:
            self._later.append(job)

    def _enters(self, frame: FrameType) -> bool:
        return frame.f_code is FairLock.__enter__.__code__ and frame.f_locals["self"] is self

    def _leave(self, thread: int) -> None:
        self._queue.remove(thread)
        self._wake()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        return FairLock, ()


class FairExecutor:
    """Runs jobs of up to ``threads`` owners at once: each owner's jobs in order, owners in turn."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, name)
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        self._lock = threading.Lock()

    def submit(self, owner: str, job: Callable[[], ResultT]) -> Future[ResultT]:
        """Queue a job of an owner."""
        future: Future[ResultT] = Future()
        with self._lock:
            begun = owner in self._waiting
            self._waiting.setdefault(owner, deque()).append((future, job))
        if not begun:
            self._threads.submit(self._run_next, owner)
        return future

    def _run_next(self, owner: str) -> None:
        with self._lock:
            future, job = self._waiting[owner].popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
        with self._lock:
            if self._waiting[owner]:
                self._threads.submit(self._run_next, owner)
            else:
                del self._waiting[owner]


BACKGROUND_NICE = 10
"""Steps of priority below the process's: beside a thread of the process, a tenth of a processor's time."""


def background(name: str) -> ThreadPoolExecutor:
    """Return an executor of one thread of lower priority, for compiled code without Python's lock: with that lock, a
    thread that waits for a processor would keep all others waiting."""
    return ThreadPoolExecutor(1, name, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # elsewhere, threads have no such priority
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + BACKGROUND_NICE)


def locked(method: Method) -> Method:
    """Serialise calls of a method by its object's ``lock``."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method, run)


def owner_of(namespace: str) -> str:
    """Return the owner of a namespace that a server named ``tenant/name``; other names share one owner."""
    return namespace.partition("/")[0] if "/" in namespace else ""


def eviction(entries: Sequence[tuple[KeyT | None, str, int]]) -> KeyT | None:
    """Return the oldest key of the largest owner, or None; ``entries``: keys (None to stay), owners, sizes."""
    sizes: Counter[str] = Counter()
    for _, owner, size in entries:
        sizes[owner] += size
    going = [(key, owner) for key, owner, _ in entries if key is not None]
    largest = max((owner for _, owner in going), key=sizes.__getitem__, default=None)
    return next((key for key, owner in going if owner == largest), None)
