"""Messages from rank 0 to all others, and the news that a rank is gone.

A message is a broadcast over gloo on the CPU, whatever device the model is on. While the others wait for messages, rank
0 sends an empty one every ``BEAT`` seconds if it has nothing to say. So no rank waits longer than ``PATIENCE`` for one
that died or hangs; a closed connection is noticed at once.
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

FRAME = 4096
"""Bytes of a message's first broadcast: enough for a step of a few rows. Longer ones need a second one."""
HEAD = 8
"""Bytes of the length before it."""
PATIENCE = 8.0
"""Seconds that a rank waits for another one inside a step, so that the death of one ends all within ten."""
BEAT = 2.0
"""Seconds between signs of life; several may be late within ``PATIENCE``."""
ARRIVAL = 600.0
"""Seconds that ranks may come apart between two calls of an engine, where the program's own work lies."""


class ParallelError(ConnectionError):
    """A rank is gone, or the ranks do different things. No more passes are possible."""


class LeaderError(ParallelError):
    """Rank 0 failed, and said so."""


class Channel:
    """From rank 0 to the others; made on all ranks at the same point of the program.

    Args:
        model_group: the processes that hold the model.
        device: of the model.
    """

    def __init__(self, model_group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo")
        self._model = model_group
        self._backend = model_group._get_backend(device)
        self.turn = threading.RLock()
        """Held while something is told and done, so that all ranks do the same in the same order."""
        self._listeners = 0
        self._last = 0.0
        self._broken: str | None = None
        self._beating: threading.Thread | None = None

    def open(self, message: str) -> None:
        """Rank 0: begin a time in which the others listen, with a message; times may overlap."""
        with self.turn:
            self._broadcast(message, PATIENCE if self._listeners else ARRIVAL)
            self._listeners += 1
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat, name="forerun-beat", daemon=True)
                self._beating.start()

    def close(self, message: str) -> None:
        """Rank 0: end it, with a message that the others know as the last one."""
        with self.turn:
            self._listeners -= 1
            if self._broken is None:
                self._broadcast(message, PATIENCE)

    @contextmanager
    def speaking(self, message: Callable[[], str]) -> Iterator[None]:
        """Rank 0: send a message, and run with all ranks what it announces. An error there is the end: nobody knows how
        far the others came."""
        with self.turn:
            if not self._listeners:
                raise ParallelError("the other ranks do not listen; make passes inside of Engine.target.led")
            self._broadcast(message(), PATIENCE)
            with self.together():
                yield

    @contextmanager
    def together(self) -> Iterator[None]:
        """Operations of the model's processes, none of which waits longer than ``PATIENCE`` for another."""
        usual = self._backend.options._timeout
        _set_pg_timeout(timedelta(seconds=PATIENCE), self._model)
        try:
            yield
        except BaseException as error:
            self._broken = f"a pass failed on rank {self.rank} ({type(error).__name__}: {error})"
            if isinstance(error, RuntimeError):  # what torch.distributed raises for a lost peer
                raise ParallelError(self._broken) from error
            raise
        finally:
            _set_pg_timeout(usual, self._model)

    def receive(self, first: bool) -> str:
        """Another rank: the next message.

        Args:
            first: whether rank 0 may still be busy elsewhere.
        """
        patience = ARRIVAL if first else PATIENCE
        frame = self._move(torch.empty(FRAME, dtype=torch.uint8), patience).numpy()
        length = int(frame[:HEAD].view(np.int64)[0])
        text = frame[HEAD : HEAD + length].tobytes()
        if length > FRAME - HEAD:
            text += self._move(torch.empty(length + HEAD - FRAME, dtype=torch.uint8), PATIENCE).numpy().tobytes()
        return text.decode()

    def _broadcast(self, message: str, patience: float) -> None:
        data = np.frombuffer(message.encode(), np.uint8)
        frame, cut = np.zeros(FRAME, np.uint8), FRAME - HEAD
        frame[:HEAD] = np.array([len(data)], np.int64).view(np.uint8)
        frame[HEAD : HEAD + len(data)] = data[:cut]
        self._move(torch.from_numpy(frame), patience)
        if len(data) > cut:
            self._move(torch.from_numpy(data[cut:].copy()), PATIENCE)

    def _move(self, data: torch.Tensor, patience: float) -> torch.Tensor:
        if self._broken is not None:
            raise ParallelError(f"the ranks are out of step: {self._broken}")
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, timedelta(seconds=patience)
        try:
            self._group.broadcast([data], options).wait()
        except RuntimeError as error:
            whom = "rank 0" if self.rank else "another rank"
            self._broken = f"{whom} is gone, or did not answer for {patience:.0f} seconds ({error})"
            raise ParallelError(f"rank {self.rank}: {self._broken}") from error
        self._last = time.monotonic()
        return data

    def _beat(self) -> None:
        while self._broken is None:
            time.sleep(BEAT / 4)
            with self.turn:
                if self._listeners and self._broken is None and time.monotonic() - self._last > BEAT:
                    try:
                        self._broadcast("[]", PATIENCE)
                    except ParallelError:
                        return  # the next message says it
