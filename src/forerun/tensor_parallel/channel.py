"""Messages from rank 0 to all others, and the detection of a dead rank.

A message is a gloo broadcast on the CPU. While the others wait, rank 0 sends an empty one every ``HEARTBEAT_SECONDS``.
So a rank detects a closed connection at once, and a dead or hanging rank within ``RANK_TIMEOUT_SECONDS``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

FRAME_BYTES = 4096
"""Size of a message's first broadcast: enough for a step of a few rows. A longer message needs a second one."""
LENGTH_BYTES = 8
RANK_TIMEOUT_SECONDS = 8.0
"""Time that a rank waits for another within a step, so that the death of one ends all within ten seconds."""
HEARTBEAT_SECONDS = 2.0
"""Time between messages; several may be late within the timeout."""
CALL_TIMEOUT_SECONDS = 600.0
"""Time that a rank waits for the next engine call, which depends on the program."""


class ParallelError(ConnectionError):
    """A rank is gone, or the ranks diverged. No more passes are possible."""


class LeaderError(ParallelError):
    """Rank 0 failed and reported it."""


class Channel:
    """A channel from rank 0 to the others of ``model_group``, created on all at the same point of the program."""

    def __init__(self, model_group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._model = model_group
        self._backend = model_group._get_backend(device)
        self.turn = threading.RLock()
        """Held from a message to the end of its work, so that all ranks work in the same order."""
        self._listeners = 0
        self._last = 0.0
        self._broken: str | None = None
        self._heartbeat: threading.Thread | None = None

    def open(self, message: str) -> None:
        """Rank 0: send the first message of a period in which the others listen; periods may overlap."""
        with self.turn:
            self._broadcast(message, RANK_TIMEOUT_SECONDS if self._listeners else CALL_TIMEOUT_SECONDS)
            self._listeners += 1
            if self._heartbeat is None:
                self._heartbeat = threading.Thread(target=self._send_heartbeats, name="forerun-beat", daemon=True)
                self._heartbeat.start()

    def close(self, message: str) -> None:
        with self.turn:
            self._listeners -= 1
            if self._broken is None:
                self._broadcast(message, RANK_TIMEOUT_SECONDS)

    @contextmanager
    def speaking(self, message: Callable[[], str]) -> Iterator[None]:
        """Rank 0: announce work of all ranks in this context; an error ends all, as their progress is unknown."""
        with self.turn:
            if not self._listeners:
                raise ParallelError("the other ranks do not listen; make passes inside of Engine.target.led")
            self._broadcast(message(), RANK_TIMEOUT_SECONDS)
            with self.together():
                yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Limit how long the model's processes wait for each other to ``RANK_TIMEOUT_SECONDS``."""
        usual = self._backend.options._timeout
        _set_pg_timeout(timedelta(seconds=RANK_TIMEOUT_SECONDS), self._model)
        try:
            yield
        except BaseException as error:
            self._broken = f"a pass failed on rank {self.rank} ({type(error).__name__}: {error})"
            if isinstance(error, RuntimeError):  # torch.distributed's error for a lost peer
                raise ParallelError(self._broken) from error
            raise
        finally:
            _set_pg_timeout(usual, self._model)

    def receive(self, first: bool) -> str:
        """Another rank: receive the next message; until the ``first`` of a period, rank 0 may be busy elsewhere."""
        timeout = CALL_TIMEOUT_SECONDS if first else RANK_TIMEOUT_SECONDS
        frame = self._broadcast_bytes(torch.empty(FRAME_BYTES, dtype=torch.uint8), timeout).numpy()
        length = int(frame[:LENGTH_BYTES].view(np.int64)[0])
        text = frame[LENGTH_BYTES : LENGTH_BYTES + length].tobytes()
        if length > FRAME_BYTES - LENGTH_BYTES:
            rest = torch.empty(length + LENGTH_BYTES - FRAME_BYTES, dtype=torch.uint8)
            text += self._broadcast_bytes(rest, RANK_TIMEOUT_SECONDS).numpy().tobytes()
        return text.decode()

    def _broadcast(self, message: str, timeout: float) -> None:
        data = np.frombuffer(message.encode(), np.uint8)
        frame, cut = np.zeros(FRAME_BYTES, np.uint8), FRAME_BYTES - LENGTH_BYTES
        frame[:LENGTH_BYTES] = np.array([len(data)], np.int64).view(np.uint8)
        frame[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data[:cut]
        self._broadcast_bytes(torch.from_numpy(frame), timeout)
        if len(data) > cut:
            self._broadcast_bytes(torch.from_numpy(data[cut:].copy()), RANK_TIMEOUT_SECONDS)

    def _broadcast_bytes(self, data: torch.Tensor, timeout: float) -> torch.Tensor:
        if self._broken is not None:
            raise ParallelError(f"the ranks are out of step: {self._broken}")
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=timeout)
        try:
            self._group.broadcast([data], options).wait()
        except RuntimeError as error:
            whom = "rank 0" if self.rank else "another rank"
            self._broken = f"{whom} is gone, or did not answer for {timeout:.0f} seconds ({error})"
            raise ParallelError(f"rank {self.rank}: {self._broken}") from error
        self._last = time.monotonic()
        return data

    def _send_heartbeats(self) -> None:
        while self._broken is None:
            time.sleep(HEARTBEAT_SECONDS / 4)
            with self.turn:
                if self._listeners and self._broken is None and time.monotonic() - self._last > HEARTBEAT_SECONDS:
                    try:
                        self._broadcast("[]", RANK_TIMEOUT_SECONDS)
                    except ParallelError:
                        return  # the next message raises it
