"""The way between tiers of memory: copies in the order in which they are asked for, beside what computes.

On a CPU a thread copies, piece by piece, and lets urgent copies pass between two pieces. On CUDA a stream of its own
does, and events order it with the stream that computes; nothing waits for the whole device (not run on a GPU yet).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

PIECE = 4 << 20
"""Bytes that are copied without a break: 0.2 ms of a link of 20 GB/s, for which something urgent waits at most."""

Parts = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors ``[1, Hkv, m, d]`` to write, each with the one that is copied there."""


class AwayError(OSError):
    """Keys and values cannot be kept off the device, or not be brought there."""


class Ticket(Protocol):
    """A copy that was asked for."""

    def wait(self) -> None:
        """What computes from now on comes after the copy.

        Raises:
            AwayError: if it failed.
        """

    def done(self) -> bool:
        """Whether it is over.

        Raises:
            AwayError: if it failed.
        """


class CopyEngine:
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
        self._way, self._turn, self._hurried = threading.Lock(), threading.Condition(), 0
        self._thread = ThreadPoolExecutor(1, "forerun-link") if device.type == "cpu" else None
        self._stream = None if self._thread is not None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, parts: Parts) -> Ticket:
        """Ask for a copy to the device."""
        self.fetched += size(parts)
        return self._submit(lambda: self._copy(parts))

    def write(self, parts: Parts) -> Ticket:
        """Ask for a copy away from the device."""
        self.written += size(parts)
        return self._submit(lambda: self._copy(parts))

    def then(self, job: Callable[[], None]) -> Ticket:
        """Ask for something that takes its turn among the copies and moves nothing between tiers."""
        return self._submit(torch.inference_mode()(job))  # a mode belongs to a thread

    def urgent(self, parts: Parts) -> None:
        """Copy to the device now, before what was asked for earlier.

        Raises:
            AwayError: if it failed.
        """
        self.fetched += size(parts)
        with self._turn:
            self._hurried += 1
        try:
            with self._way:
                for to, source in parts:
                    self._paced(to, source)
        except Exception as error:
            raise AwayError(f"keys and values could not be copied: {error}") from error
        finally:
            with self._turn:
                self._hurried -= 1
                self._turn.notify_all()

    def close(self) -> None:
        """End the thread, once what was asked for is done."""
        if self._thread is not None:
            self._thread.shutdown()

    def _submit(self, job: Callable[[], None]) -> Ticket:
        if self._thread is not None:
            return _Copied(self._thread.submit(job))
        return _Ordered(job, self._stream)

    def _copy(self, parts: Parts) -> None:
        for to, source in parts:
            rows = to.shape[2] if self._thread is None else max(1, PIECE * to.shape[2] // max(1, to.nbytes))
            for first in range(0, to.shape[2], rows):
                with self._turn:
                    self._turn.wait_for(lambda: not self._hurried)
                with self._way:
                    self._paced(to[:, :, first : first + rows], source[:, :, first : first + rows])

    @torch.inference_mode()
    def _paced(self, to: torch.Tensor, source: torch.Tensor) -> None:
        begin = max(time.perf_counter(), self._free)
        to.copy_(source, non_blocking=True)
        if self.bandwidth is not None:
            self._free = begin + to.nbytes / self.bandwidth
            time.sleep(max(0.0, self._free - time.perf_counter()))


class _Copied:
    """By a thread."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        try:
            self._done.result()
        except Exception as error:
            told = f"keys and values could not be copied: {error}"
            raise AwayError(told) from error.with_traceback(None)  # its frames would keep them alive

    def done(self) -> bool:
        if not self._done.done():
            return False
        self.wait()
        return True


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


def size(parts: Parts) -> int:
    """Bytes of all parts."""
    return sum(to.nbytes for to, _ in parts)
