"""Logs that kernels are being compiled, which is otherwise a silent minute in the first command on a machine."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

log = logging.getLogger(__name__)

NOTICE_SECONDS = 2.0
"""Seconds of compiling before the notice: a few functions for new types do not need one."""
MESSAGE = "compiling kernels, once, about a minute"


class CompileNotice(event.Listener):  # type: ignore[misc]  # numba has no types
    """Counts compiled functions of this package for ``on_function``, and logs one line if compiling lasts."""

    def __init__(self) -> None:
        self.functions = 0
        self.on_function: Callable[[int], None] = lambda functions: None
        self._began: float | None = None
        self._logged = False

    def on_start(self, happened: Any) -> None:
        if _is_ours(happened) and self._began is None:
            self._began = time.monotonic()

    def on_end(self, happened: Any) -> None:
        if not _is_ours(happened) or self._began is None:
            return
        self.functions += 1
        self.on_function(self.functions)
        if not self._logged and time.monotonic() - self._began > NOTICE_SECONDS:
            self._logged = True
            log.warning(MESSAGE)


@functools.cache
def compile_notice() -> CompileNotice:
    """Return this process's listener, registered on the first call."""
    notice = CompileNotice()
    event.register("numba:compile", notice)
    return notice


@contextmanager
def counted_functions(on_function: Callable[[int], None]) -> Iterator[None]:
    """Call ``on_function`` with the number of functions so far, after each one that this context compiles."""
    notice = compile_notice()
    before, notice.on_function = notice.on_function, on_function
    try:
        yield
    finally:
        notice.on_function = before


def _is_ours(happened: Any) -> bool:
    return str(happened.data["dispatcher"].py_func.__module__).startswith(__package__.partition(".")[0] + ".")
