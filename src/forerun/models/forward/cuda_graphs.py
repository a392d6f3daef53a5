"""CUDA graphs of small passes, recorded once per size: a replay needs no Python between its kernels.

A recording reads its input from tables at fixed addresses. Sizes are rounded up to powers of two of tokens and rows,
and powers of four of the sequence's splits (``TableSizes.rounded``); other differences are read on the device, so
recordings are few. Each is made before the first pass of its size, while the clock of costs is stopped
(``core/work_clock.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from forerun.core.transfers import synchronize
from forerun.core.work_clock import made_once
from forerun.kernels.gpu.pass_tables import RECORDED_OWN_KEYS, PassDescription, PassTables, TableSizes

Result = TypeVar("Result")
RECORDED_TOKENS = 64
"""Maximum tokens of a recorded pass. Larger passes compute for longer than Python needs to launch them."""
RECORDINGS_KEPT = 128
"""Maximum recordings. One row has seven sizes of passes, several have 28; sequences have three or four lengths."""
PASSES_UNTIL_RETRY = 256
"""Passes before recording is retried after running out of memory, as ``level.RETRY_STEPS``."""

log = logging.getLogger(__name__)


class Recorder:
    """Makes CUDA graphs on one stream, in one memory pool, where each overwrites the previous one's results."""

    @cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @cached_property
    def _beside(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Run a function without waiting; return how to run it again, and its result, which that overwrites."""
        present, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._beside.wait_stream(present)
        with torch.cuda.stream(self._beside):
            work()  # compiles kernels
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may allocate
            try:
                result = work()
            finally:
                graph.capture_end()
        present.wait_stream(self._beside)
        return graph.replay, result


class _Recording(NamedTuple, Generic[Result]):
    places: PassTables
    replay: Callable[[], None]
    result: Result


class GraphCache(Generic[Result]):
    """Recordings of one kind of pass of a model; ``spare``: memory of the row of padding tokens."""

    def __init__(
        self, run: Callable[[PassTables], Result], spare: torch.Tensor, device: torch.device, recorder: Recorder
    ) -> None:
        self._run, self._spare, self._device, self._recorder = run, spare, device, recorder
        self._kept: dict[tuple[TableSizes, bool], _Recording[Result]] = {}
        self._refused, self._waits = False, 0

    @property
    def keys(self) -> frozenset[tuple[TableSizes, bool]]:
        """Recorded sizes, each with whether its rows are aligned."""
        return frozenset(self._kept)

    def run(self, batch: PassDescription, ids: torch.Tensor | None = None) -> Result:
        """Run a pass; its result is valid until the next. ``ids``: token ids ``[n]`` on the device, if only there."""
        recording = self._recording(batch)
        if recording is None:
            return self._run(PassTables.of(batch, self._device, ids))
        recording.places.fill(batch, self._spare, ids)
        recording.replay()
        return recording.result

    def _recording(self, batch: PassDescription) -> _Recording[Result] | None:
        """Return the recording of a pass's size, made now if missing; None if the pass must run unrecorded."""
        if batch.sizes.tokens > RECORDED_TOKENS or batch.sizes.own > RECORDED_OWN_KEYS:
            return None
        key = batch.sizes.rounded(batch.group), batch.aligned
        found = self._kept.get(key)
        if found is not None or self._refused or len(self._kept) >= RECORDINGS_KEPT:
            return found
        self._waits -= 1
        if self._waits > 0:
            return None
        with made_once():
            made = self._recorded(batch, key[0])
            synchronize(self._device)  # the next pass is timed
        if made is not None:
            self._kept[key] = made
        return made

    def _recorded(self, batch: PassDescription, sizes: TableSizes) -> _Recording[Result] | None:
        try:
            places = PassTables(sizes, self._device, batch.aligned)
            places.fill(batch, self._spare)
            return _Recording(places, *self._recorder.record(lambda: self._run(places)))
        except torch.OutOfMemoryError:
            _warn_once("not enough memory to record passes as CUDA graphs; until there is, they run slower")
            self._waits = PASSES_UNTIL_RETRY
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            if "captur" not in reason:
                raise
            _warn_once(f"this model's passes cannot be recorded as CUDA graphs, so they are slower: {reason}")
            self._refused = True
        return None


@cache
def _warn_once(message: str) -> None:
    log.warning(message)
