"""A full cache whose keys and values do not all fit on the device (TriForce, section 5.3: offloading).

The first layers stay on the device, the others are in host memory or a file. A pass fetches them layer by layer into
two alternating buffers, prefetching the next while one is computed, and writes only new rows back. The buffers are in
sequence order, as a full cache is, so a pass has the same bits.

Copies run in parallel with the computation, in the order of requests. On a CPU a thread copies piece by piece, and lets
urgent copies pass in between. On CUDA a copy stream does, ordered with the computing stream by events; nothing waits
for all of the device (not run on a GPU since copies became contiguous).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from forerun.core.block import Block
from forerun.kernels import gpu
from forerun.kernels.attention.attention import Rows
from forerun.kv.cache import KVShape, compact
from forerun.kv.full_cache import FullCache, joined
from forerun.kv.shared_prefix import SharedPrefix

COPY_PIECE_BYTES = 4 << 20
"""Bytes copied without interruption: 0.2 ms at 20 GB/s, the longest wait of an urgent copy."""

Parts = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors ``[1, Hkv, m, d]`` to write, each with its source."""
BUFFERS = 2
"""Offloaded layers on the device at a time: the one being computed, and the next."""


class OffloadError(OSError):
    """Keys and values cannot be stored off the device, or copied to it."""


class PendingCopy(Protocol):
    """A requested copy; all methods raise ``OffloadError`` if it failed."""

    def wait(self) -> None:
        """Make all later computation wait for the copy."""

    def finish(self) -> None:
        """Block until the copy has ended, so that the CPU can use it."""

    def done(self) -> bool:
        """Return whether the copy has ended."""


class CopyEngine:
    """Copies between tiers while ``device`` computes, on a CPU optionally at ``bandwidth`` bytes per second."""

    def __init__(self, device: torch.device, bandwidth: float | None = None) -> None:
        if bandwidth is not None and device.type != "cpu":
            raise ValueError(f"a bandwidth can only be simulated on a CPU, and the model is on {device}")
        self.device, self.bandwidth = device, bandwidth
        self.fetched = 0
        self.written = 0
        self._free = 0.0  # end of the last copy at the simulated bandwidth
        self._channel, self._urgent_done, self._urgent = threading.Lock(), threading.Condition(), 0
        self._thread = ThreadPoolExecutor(1, "forerun-link") if device.type == "cpu" else None
        self._stream = None if self._thread is not None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, parts: Parts) -> PendingCopy:
        """Request a copy to the device."""
        self.fetched += size(parts)
        return self._submit(lambda: self._copy(parts))

    def write(self, parts: Parts) -> PendingCopy:
        """Request a copy from the device."""
        self.written += size(parts)
        return self._submit(lambda: self._copy(parts))

    def run_in_order(self, job: Callable[[], None]) -> PendingCopy:
        """Request a CPU job that runs in order with the copies and moves nothing between tiers."""
        if self._stream is not None:  # it would overtake copies pending on the stream
            self._stream.synchronize()
        return self._submit(torch.inference_mode()(job))  # a mode belongs to a thread

    def fetch_now(self, parts: Parts) -> None:
        """Copy to the device now, before pending copies; raise ``OffloadError`` if it fails."""
        self.fetched += size(parts)
        with self._urgent_done:
            self._urgent += 1
        try:
            with self._channel:
                for to, source in parts:
                    self._copy_at_bandwidth(to, source)
        except Exception as error:
            raise OffloadError(f"keys and values could not be copied: {error}") from error
        finally:
            with self._urgent_done:
                self._urgent -= 1
                self._urgent_done.notify_all()

    def gather(self, rows: Rows, head: torch.Tensor, chunk: torch.Tensor, size: int) -> tuple[Rows, PendingCopy]:
        """Copy chunks from pinned memory by the device, in order with its computation; see ``FullCache.chunks``."""
        from forerun.kernels.gpu.gather import gather_chunks  # needs Triton

        found = list[torch.Tensor]()
        copy = _StreamCopy(
            lambda: found.extend(gather_chunks(t, head, chunk, size, self.device) for t in rows),
            torch.cuda.current_stream(self.device),
        )
        self.fetched += sum(t.nbytes for t in found)
        return tuple(found), copy

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _submit(self, job: Callable[[], None]) -> PendingCopy:
        if self._thread is not None:
            return _ThreadCopy(self._thread.submit(job))
        return _StreamCopy(job, self._stream)

    def _copy(self, parts: Parts) -> None:
        for to, source in parts:
            rows = to.shape[2] if self._thread is None else max(1, COPY_PIECE_BYTES * to.shape[2] // max(1, to.nbytes))
            for first in range(0, to.shape[2], rows):
                with self._urgent_done:
                    self._urgent_done.wait_for(lambda: not self._urgent)
                with self._channel:
                    self._copy_at_bandwidth(to[:, :, first : first + rows], source[:, :, first : first + rows])

    @torch.inference_mode()
    def _copy_at_bandwidth(self, to: torch.Tensor, source: torch.Tensor) -> None:
        begin = max(time.perf_counter(), self._free)
        for mine, given in ((to, source),) if self._thread is not None else by_head(to, source):
            mine.copy_(given, non_blocking=True)
            for t in (mine, given):
                if t.is_cuda:  # keeps its memory from being reused before the copy has ended
                    t.record_stream(torch.cuda.current_stream(t.device))
        if self.bandwidth is not None:
            self._free = begin + to.nbytes / self.bandwidth
            time.sleep(max(0.0, self._free - time.perf_counter()))


class _ThreadCopy:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        try:
            self._done.result()
        except Exception as error:
            message = f"keys and values could not be copied: {error}"
            raise OffloadError(message) from error.with_traceback(None)  # its frames would keep them alive

    finish = wait

    def done(self) -> bool:
        if not self._done.done():
            return False
        self.wait()
        return True


class _StreamCopy:
    """A copy by a stream, after what the current stream has queued so far."""

    def __init__(self, job: Callable[[], None], stream: Any) -> None:
        self._device = stream.device
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            job()
            self._done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)

    def finish(self) -> None:
        self._done.synchronize()

    def done(self) -> bool:
        return bool(self._done.query())


def size(parts: Parts) -> int:
    """Return the bytes of all parts."""
    return sum(to.nbytes for to, _ in parts)


def by_head(to: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Split a copy ``[1, Hkv, n, d]`` into contiguous parts: heads, or everything. Between a GPU and the host, torch
    copies anything else through unpinned memory, many times slower, while the thread waits."""
    if to.is_contiguous() and source.is_contiguous():
        return ((to, source),)
    return zip(to.flatten(0, 1), source.flatten(0, 1), strict=True)


@dataclass
class _Buffer:
    """A buffer with the first ``held`` rows of a layer, once its copies have ended."""

    layer: int
    held: int
    copies: list[PendingCopy] = field(default_factory=list)


class OffloadedCache(FullCache):
    """A full cache of a fixed size, with some layers off the device.

    Args:
        resident: keys and values of the layers on the device, ``[1, Hkv, capacity, d]``.
        host: those of the others, in host memory or mapped from a file.
        buffers: for each of the others, in order, its rows in one of the alternating buffers on the device.
    """

    offloaded = True

    def __init__(
        self, capacity: int, resident: Mapping[int, Rows], host: Mapping[int, Rows], buffers: Mapping[int, Rows],
        copy_engine: CopyEngine,
    ) -> None:  # fmt: skip
        super().__init__(capacity)
        every = {**resident, **host}
        self._layers = {layer: every[layer] for layer in sorted(every)}
        self._rows, self.copy_engine = dict(buffers), copy_engine
        self.offloaded_layers = sorted(host)
        self._buffers = [_Buffer(layer, 0) for layer in self.offloaded_layers[:BUFFERS]]
        self._pieces = joined(resident), joined(host)
        self._writes: list[PendingCopy] = []
        self._failure: OffloadError | None = None

    @property
    def lost(self) -> Exception | None:
        try:
            for copy in self._pending_copies():
                copy.wait()
        except OffloadError as error:
            return error
        return self._failure

    def clear(self) -> None:
        """Clear the cache after pending copies, which use its memory."""
        for copy in self._pending_copies():
            with suppress(OffloadError):
                copy.finish()
        super().clear()
        self._rows, self.offloaded_layers, self._buffers, self._writes = {}, [], [], []
        self._pieces = None, None

    def fetch_layer(self, layer: int, count: int) -> Rows:
        """Return a layer's rows as ``FullCache`` does, and prefetch the next layer. Raises ValueError if there is no
        room, OffloadError if a copy failed."""
        self._check_room(count)
        if layer not in self._rows:
            return self._layers[layer]
        buffer = self._prefetch(layer)
        for copy in buffer.copies:
            copy.wait()
        buffer.copies = []
        self._writes = [copy for copy in self._writes if not copy.done()]
        following = self.offloaded_layers[(self.offloaded_layers.index(layer) + 1) % len(self.offloaded_layers)]
        if self._buffer(following) is not buffer:  # the first and the last layer may share a buffer
            self._prefetch(following)
        return self._rows[layer]

    def write_back(self, layer: int, count: int) -> None:
        if layer in self._rows:
            first, last = self.length, self.length + count
            parts = [
                (host[:, :, first:last], new[:, :, first:last])
                for host, new in zip(self._layers[layer], self._rows[layer], strict=True)
            ]
            copy = self.copy_engine.write(parts)
            self._buffer(layer).copies.append(copy)
            self._writes.append(copy)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor, ahead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        assert not ahead  # no view writes to it
        count = k.shape[2]
        keys, values = self.fetch_layer(layer, count)
        keys[:, :, self.length : self.length + count] = k
        values[:, :, self.length : self.length + count] = v
        self.write_back(layer, count)
        return keys, values

    def commit(self, block: Block, path: Sequence[int]) -> None:
        start = self.length + len(block.pending)
        moved = list(path)
        for layer in self._layers:
            if layer not in self._rows:
                compact(self._layers[layer], start, moved)
        if moved != list(range(len(moved))):
            away = [self._layers[layer] for layer in self.offloaded_layers]
            self._writes.append(self.copy_engine.run_in_order(lambda: _compact_all(away, start, moved)))
        self.length = start + len(moved)
        for layer in self.offloaded_layers[:BUFFERS]:
            self._prefetch(layer)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        for buffer in self._buffers:
            buffer.held = min(buffer.held, length)

    def blank(self, length: int) -> None:
        self._wait_for_writes()
        super().blank(length)
        for buffer in self._buffers:
            buffer.held = 0

    def read(self, layer: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(layer, first, last)
        if layer in self._rows:
            keys, values = self._fetch_now((keys, values))
        return keys, values

    def read_keys(self, layer: int, first: int, last: int) -> torch.Tensor:
        keys = super().read_keys(layer, first, last)
        return keys if layer not in self._rows else self._fetch_now((keys,))[0]

    @property
    def likes(self) -> Mapping[int, Rows]:
        return {layer: tuple(t[:, :, :0] for t in self._rows.get(layer, rows)) for layer, rows in self._layers.items()}

    def reserve_layers(self, likes: Mapping[int, Rows], count: int) -> Mapping[int, Rows]:
        self._check_room(count)
        return self._layers | self._rows

    def _check_room(self, count: int) -> None:
        if self.length + count > self._capacity:
            raise ValueError(f"this cache has room for {self._capacity} tokens, not for {self.length + count}")

    def strided_keys(self, layer: int, step: int) -> torch.Tensor:
        keys = super().strided_keys(layer, step)
        return keys if layer not in self._rows else self._fetch_now((keys,))[0]

    def chunks(self, layer: int, head: torch.Tensor, chunk: torch.Tensor, size: int) -> Rows:
        """Copy offloaded rows to the device: by the device itself, if it can address them."""
        if layer not in self._rows:
            return super().chunks(layer, head, chunk, size)
        rows = self._layers[layer]
        if self._reaches(rows):
            return self._gather(rows, head, chunk, size)
        self._wait_for_writes()
        place = rows[0].device
        found = super().chunks(layer, head.to(place), chunk.to(place), size)
        return tuple(t[0] for t in self._fetch_now([t[None] for t in found]))

    def read_together(self, first: int, last: int) -> torch.Tensor | None:
        """Copy all layers' rows at some positions to the device with one kernel; None if it cannot address them."""
        here, away = self._pieces
        known = sum(len(each) for each in self._pieces if each is not None)
        if away is None or known < len(self._layers) or not self._reaches((away,)):
            return None
        rows = away.view(1, -1, *away.shape[3:])[:, :, first:]
        head = torch.arange(rows.shape[1], device=self.copy_engine.device)
        [found] = self._gather((rows,), head, torch.zeros_like(head), last - first)
        found = found.view(*away.shape[:3], last - first, away.shape[4])
        return found if here is None else torch.cat((here[:, :, :, first:last], found))

    def _reaches(self, rows: Sequence[torch.Tensor]) -> bool:
        """Return whether the device can address these rows in the host's memory."""
        return gpu.runs_on(self.copy_engine.device) and all(t.is_pinned() for t in rows)

    def _gather(self, rows: Rows, head: torch.Tensor, chunk: torch.Tensor, size: int) -> Rows:
        for copy in self._writes:
            copy.wait()
        found, gathered = self.copy_engine.gather(rows, head, chunk, size)
        self._writes.append(gathered)
        return found

    def reserve(self, layers: Sequence[int], like: torch.Tensor, count: int, ahead: int = 0) -> torch.Tensor:
        """Raise ``TypeError``: an offloaded cache is not one block of memory."""
        raise TypeError(
            "an offloaded cache is not one block of memory; its passes go layer by layer (fetch_layer, write_back)"
        )

    def share(self, length: int) -> SharedPrefix:
        """Raise ``TypeError``: the request is too large to be stored twice."""
        raise TypeError("an offloaded cache cannot share a prefix")

    def needs(self, shape: KVShape, tokens: int) -> int:
        return shape.nbytes * self._capacity

    def _buffer(self, layer: int) -> _Buffer:
        return self._buffers[self.offloaded_layers.index(layer) % BUFFERS]

    def _prefetch(self, layer: int) -> _Buffer:
        """Copy a layer's committed rows to its buffer, unless they are there or on their way."""
        buffer = self._buffer(layer)
        if buffer.layer != layer:
            buffer.layer, buffer.held = layer, 0
        first, last = buffer.held, self.length
        if first < last:
            parts = [
                (to[:, :, first:last], host[:, :, first:last])
                for to, host in zip(self._rows[layer], self._layers[layer], strict=True)
            ]
            buffer.copies.append(self.copy_engine.fetch(parts))
            buffer.held = last
        return buffer

    def _fetch_now(self, rows: Sequence[torch.Tensor]) -> Rows:
        self._wait_for_writes()
        to = tuple(t.new_empty(t.shape, device=self.copy_engine.device) for t in rows)
        try:
            self.copy_engine.fetch_now(list(zip(to, rows, strict=True)))
        except OffloadError as error:
            self._failure = error
            raise
        return to

    def _pending_copies(self) -> list[PendingCopy]:
        return [*self._writes, *(copy for buffer in self._buffers for copy in buffer.copies)]

    def _wait_for_writes(self) -> None:
        for copy in self._writes:
            copy.finish()
        self._writes = []


def _compact_all(layers: Sequence[Rows], start: int, path: Sequence[int]) -> None:
    for rows in layers:
        compact(rows, start, path)
