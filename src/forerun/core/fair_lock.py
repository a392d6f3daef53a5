"""A fair lock: it serves threads in the order they came.

Suppose a thread takes the lock again right after each release. An ordinary lock mostly goes back to that thread, and
the others starve.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


class FairLock:
    """Used as ``with lock:``; not reentrant.

    Ctrl-C may come at any instruction, also before the lock is released. So a thread that acquires the lock while it
    holds it is taken to have been interrupted then.
    """

    def __init__(self) -> None:
        self._queue: deque[int] = deque()
        self._changed = threading.Condition(threading.RLock())

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._changed:
            if me in self._queue:
                self._queue.remove(me)
                self._changed.notify_all()
            self._queue.append(me)
            try:
                while self._queue[0] != me:
                    self._changed.wait()
            except BaseException:  # such as Ctrl-C
                self._queue.remove(me)
                self._changed.notify_all()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._queue.popleft()
            self._changed.notify_all()

    def __reduce__(self) -> tuple[type[FairLock], tuple[()]]:
        """A copy has its own, empty queue."""
        return FairLock, ()


def locked(method: Method) -> Method:
    """Let one thread at a time into the marked methods of an object that has a ``lock``."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Method, run)
