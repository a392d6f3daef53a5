"""The way between tiers of memory: copies in the order in which they are asked for, beside what computes.

On a CPU a thread copies. On CUDA a stream of its own does, and events order it with the stream that computes; nothing
waits for the whole device (not run on a GPU yet).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class Ticket(Protocol):
    """A copy that was asked for."""

    def wait(self) -> None:
        """What computes from now on comes after the copy.

        Raises:
            Exception: the copy's own.
        """

    def done(self) -> bool:
        """Whether it is over.

        Raises:
            Exception: the copy's own.
        """


class Link:
    """Copies beside what computes.

    Args:
        device: that computes.
        bandwidth: bytes a second; copies of a CPU are held back to it. None for as fast as it goes.

    Raises:
        ValueError: for a bandwidth that is not positive, or one given for another device than a CPU.
    """

    def __init__(self, device: torch.device, bandwidth: float | None = None) -> None:
        if bandwidth is not None and not bandwidth > 0:
            raise ValueError(f"the bandwidth is {bandwidth} bytes a second; it must be more than 0")
        if bandwidth is not None and device.type != "cpu":
            raise ValueError(f"a bandwidth is simulated on a CPU only, and the model is on {device}")
        self.device, self.bandwidth = device, bandwidth
        self.fetched = 0
        """Bytes brought to the device so far."""
        self.written = 0
        """Bytes brought away from it so far."""
        self._free = 0.0  # when the last copy has had its time
        self._thread = ThreadPoolExecutor(1, "forerun-link") if device.type == "cpu" else None
        self._stream = None if self._thread is not None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, job: Callable[[], None], nbytes: int) -> Ticket:
        """Ask for a copy of so many bytes to the device."""
        self.fetched += nbytes
        return self._submit(job, nbytes)

    def write(self, job: Callable[[], None], nbytes: int) -> Ticket:
        """Ask for a copy of so many bytes away from the device."""
        self.written += nbytes
        return self._submit(job, nbytes)

    def close(self) -> None:
        """End the thread, once what was asked for is done."""
        if self._thread is not None:
            self._thread.shutdown()

    def _submit(self, job: Callable[[], None], nbytes: int) -> Ticket:
        if self._thread is not None:
            return _Copied(self._thread.submit(self._paced, job, nbytes))
        return _Ordered(job, self._stream)

    def _paced(self, job: Callable[[], None], nbytes: int) -> None:
        begin = max(time.perf_counter(), self._free)
        with torch.inference_mode():
            job()
        if self.bandwidth is not None:
            self._free = begin + nbytes / self.bandwidth
            time.sleep(max(0.0, self._free - time.perf_counter()))


class _Copied:
    """By a thread."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()

    def done(self) -> bool:
        return self._done.done() and self._done.result() is None


class _Ordered:
    """By a stream of its own: after what the present stream was given so far."""

    def __init__(self, job: Callable[[], None], stream: Any) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            job()
            self._done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def done(self) -> bool:
        return bool(self._done.query())
