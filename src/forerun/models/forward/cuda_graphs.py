"""Passes of few tokens, recorded once for each size and replayed: a replay needs no Python between its kernels.

A recording reads its input from tables that stay where they are, so sizes are rounded up to few: powers of two of
tokens and of rows, and powers of four of the text's splits (``TableSizes.rounded``). All else that differs between
passes is read on the device. So there is a bound on recordings, and none is made twice. A recording is made when a size
comes for the second time. It takes as long as some passes; the first one compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from forerun.kernels.gpu.pass_tables import RECORDED_OWN_KEYS, PassDescription, PassTables, TableSizes

Result = TypeVar("Result")
RECORDED_TOKENS = 64
"""The largest pass that is recorded, in tokens. Larger ones compute for longer than Python takes to launch them."""
RECORDINGS_KEPT = 128
"""The most recordings. Passes have seven sizes for one row, and 28 for any; texts have three or four lengths."""

log = logging.getLogger(__name__)


class Recorder:
    """Makes CUDA graphs that share one pool of memory: what one leaves there, the next one that runs overwrites."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Run a function and return how to run it again, and its result, which is overwritten then.

        ``torch.cuda.graph`` would wait for the device and empty the allocator's memory first; here other work goes on.
        """
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(beside):
            work()  # compiles kernels
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads may allocate
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(beside)
        return graph.replay, result


class _Recording(NamedTuple, Generic[Result]):
    places: PassTables
    replay: Callable[[], None]
    result: Result


class GraphCache(Generic[Result]):
    """The recordings of one model.

    Args:
        run: a pass, given its tables.
        spare: memory of a row for tokens that only fill up a size.
        device: where passes run.
    """

    def __init__(self, run: Callable[[PassTables], Result], spare: torch.Tensor, device: torch.device) -> None:
        self._run, self._spare, self._device = run, spare, device
        self._recorder = Recorder()
        self._kept: dict[tuple[TableSizes, bool], _Recording[Result] | None] = {}
        self._refused = False

    @property
    def recordings(self) -> int:
        """The number of recordings made so far."""
        return sum(each is not None for each in self._kept.values())

    def run(self, batch: PassDescription) -> Result:
        """A pass's result; it is valid until the next pass."""
        small = batch.sizes.tokens <= RECORDED_TOKENS and batch.sizes.own <= RECORDED_OWN_KEYS
        sizes = batch.sizes.rounded(batch.group)
        if self._refused or not small:
            return self._at_once(batch)
        key = sizes, batch.aligned
        if key not in self._kept:
            self._kept[key] = None
            return self._at_once(batch)
        recording = self._kept[key]
        if recording is None and self.recordings < RECORDINGS_KEPT:
            recording = self._kept[key] = self._recorded(batch, sizes)
        if recording is None:
            return self._at_once(batch)
        recording.places.fill(batch, self._spare)
        recording.replay()
        return recording.result

    def _at_once(self, batch: PassDescription) -> Result:
        places = PassTables(batch.sizes, self._device, batch.aligned)
        places.fill(batch)
        return self._run(places)

    def _recorded(self, batch: PassDescription, sizes: TableSizes) -> _Recording[Result] | None:
        places = PassTables(sizes, self._device, batch.aligned)
        places.fill(batch, self._spare)
        try:
            replay, result = self._recorder.record(lambda: self._run(places))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            log.warning("this model's passes cannot be recorded as CUDA graphs, so they are slower: %s", reason)
            self._refused = True
            return None
        return _Recording(places, replay, result)
