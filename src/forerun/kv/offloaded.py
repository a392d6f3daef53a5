"""A full cache whose keys and values do not all fit on the device (TriForce, section 5.3: offloading).

The first layers stay on the device, the others are in the host's memory, or in a file. A pass fetches them layer by
layer, into two buffers in turn: while one layer is computed, the next one is prefetched. Only new rows are written
back. The buffers are in text order, as a full cache is, so the bits of a pass are the same.

Copies run beside the computation, in the order in which they were requested. On a CPU a thread copies, piece by piece,
and lets urgent copies pass between two pieces. On CUDA a copy stream does, and events order it with the stream that
computes; nothing waits for the whole device (since its copies lie in one piece, not run on a GPU).
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
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import SharedPrefix

COPY_PIECE_BYTES = 4 << 20
"""Bytes that are copied without a break: 0.2 ms at 20 GB/s, the longest wait of an urgent copy."""

Parts = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors ``[1, Hkv, m, d]`` to write, each with the one that is copied there."""
BUFFERS = 2
"""Layers that are on the device besides those that stay: the one that is computed with, and the next."""


class OffloadError(OSError):
    """Keys and values cannot be stored off the device, or cannot be copied to it."""


class PendingCopy(Protocol):
    """A copy that was requested."""

    def wait(self) -> None:
        """Let all later computation come after the copy.

        Raises:
            OffloadError: if it failed.
        """

    def finish(self) -> None:
        """Wait here until it has ended, for what the CPU reads.

        Raises:
            OffloadError: if it failed.
        """

    def done(self) -> bool:
        """True if it has ended.

        Raises:
            OffloadError: if it failed.
        """


class CopyEngine:
    """Copies between tiers, beside the computation.

    Args:
        device: that computes.
        bandwidth: bytes a second that copies on a CPU are slowed down to; None for full speed.

    Raises:
        ValueError: for a bandwidth given for another device than a CPU.
    """

    def __init__(self, device: torch.device, bandwidth: float | None = None) -> None:
        if bandwidth is not None and device.type != "cpu":
            raise ValueError(f"a bandwidth is simulated on a CPU only, and the model is on {device}")
        self.device, self.bandwidth = device, bandwidth
        self.fetched = 0
        """Bytes copied to the device so far."""
        self.written = 0
        """Bytes copied away from it so far."""
        self._free = 0.0  # when the last copy has had its time
        self._channel, self._urgent_done, self._urgent = threading.Lock(), threading.Condition(), 0
        self._thread = ThreadPoolExecutor(1, "forerun-link") if device.type == "cpu" else None
        self._stream = None if self._thread is not None else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def fetch(self, parts: Parts) -> PendingCopy:
        """Request a copy to the device."""
        self.fetched += size(parts)
        return self._submit(lambda: self._copy(parts))

    def write(self, parts: Parts) -> PendingCopy:
        """Request a copy away from the device."""
        self.written += size(parts)
        return self._submit(lambda: self._copy(parts))

    def run_in_order(self, job: Callable[[], None]) -> PendingCopy:
        """Request a job of the CPU that runs in order with the copies and moves nothing between tiers."""
        if self._stream is not None:  # it would come before copies that the stream has not made yet
            self._stream.synchronize()
        return self._submit(torch.inference_mode()(job))  # a mode belongs to a thread

    def fetch_now(self, parts: Parts) -> None:
        """Copy to the device now, before copies that were requested earlier.

        Raises:
            OffloadError: if it failed.
        """
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
        """Let the device that computes copy chunks from pinned memory, in order with what it computes; see
        ``FullCache.chunks``. The memory may go once the copy has ended."""
        from forerun.kernels.gpu.gather import gather_chunks  # which needs Triton

        found = list[torch.Tensor]()
        copy = _StreamCopy(
            lambda: found.extend(gather_chunks(t, head, chunk, size, self.device) for t in rows),
            torch.cuda.current_stream(self.device),
        )
        self.fetched += sum(t.nbytes for t in found)
        return tuple(found), copy

    def close(self) -> None:
        """End the thread after the requested copies."""
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
                if t.is_cuda:  # its memory is not given to others before the copy has ended
                    t.record_stream(torch.cuda.current_stream(t.device))
        if self.bandwidth is not None:
            self._free = begin + to.nbytes / self.bandwidth
            time.sleep(max(0.0, self._free - time.perf_counter()))


class _ThreadCopy:
    """By a thread."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        try:
            self._done.result()
        except Exception as error:
            told = f"keys and values could not be copied: {error}"
            raise OffloadError(told) from error.with_traceback(None)  # its frames would keep them alive

    finish = wait

    def done(self) -> bool:
        if not self._done.done():
            return False
        self.wait()
        return True


class _StreamCopy:
    """By a stream of its own: after what the present stream was given so far."""

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
    """Bytes of all parts."""
    return sum(to.nbytes for to, _ in parts)


def by_head(to: torch.Tensor, source: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of a copy ``[1, Hkv, n, d]`` that lie in one piece on both sides: each head's rows, or all at once.

    Between a GPU and the host torch copies anything else through memory that is not pinned. That takes many times as
    long, and the thread that asked waits for it.
    """
    if to.is_contiguous() and source.is_contiguous():
        return ((to, source),)
    return zip(to.flatten(0, 1), source.flatten(0, 1), strict=True)


@dataclass
class _Buffer:
    """What a buffer holds: a layer's first rows, or will hold when the copies are done."""

    layer: int
    held: int
    copies: list[PendingCopy] = field(default_factory=list)


class OffloadedCache(FullCache):
    """A full cache of a fixed size, with some layers off the device.

    Args:
        capacity: the most tokens.
        resident: keys and values of the layers that stay on the device, ``[1, Hkv, capacity, d]``.
        host: those of the others, in the host's memory or mapped from a file.
        buffers: for each of the others, in order, its rows in one of the buffers on the device, which take turns.
        copy_engine: copies between the two.
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
        """The layers that are not on the device."""
        self._buffers = [_Buffer(layer, 0) for layer in self.offloaded_layers[:BUFFERS]]
        self._writes: list[PendingCopy] = []
        self._failure: OffloadError | None = None

    @property
    def lost(self) -> Exception | None:
        """It waits for what is being copied."""
        try:
            for copy in self._pending_copies():
                copy.wait()
        except OffloadError as error:
            return error
        return self._failure

    def clear(self) -> None:
        """Copies on their way end first: they read and write this memory."""
        for copy in self._pending_copies():
            with suppress(OffloadError):
                copy.finish()
        super().clear()
        self._rows, self.offloaded_layers, self._buffers, self._writes = {}, [], [], []

    def fetch_layer(self, layer: int, count: int) -> Rows:
        """A layer's rows on the device, with room for ``count`` after the committed ones. Prefetches the next layer.

        Raises:
            ValueError: if there is no room.
            OffloadError: if a copy failed.
        """
        self._check_room(count)
        if layer not in self._rows:
            return self._layers[layer]
        buffer = self._prefetch(layer)
        for copy in buffer.copies:
            copy.wait()
        buffer.copies = []
        self._writes = [copy for copy in self._writes if not copy.done()]
        following = self.offloaded_layers[(self.offloaded_layers.index(layer) + 1) % len(self.offloaded_layers)]
        if self._buffer(following) is not buffer:  # the first layer, after the last one, may have the same
            self._prefetch(following)
        return self._rows[layer]

    def write_back(self, layer: int, count: int) -> None:
        """Copy the ``count`` rows that were written after the committed ones back to the host."""
        if layer in self._rows:
            first, last = self.length, self.length + count
            parts = [
                (host[:, :, first:last], new[:, :, first:last])
                for host, new in zip(self._layers[layer], self._rows[layer], strict=True)
            ]
            copy = self.copy_engine.write(parts)
            self._buffer(layer).copies.append(copy)
            self._writes.append(copy)

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = k.shape[2]
        keys, values = self.fetch_layer(layer, count)
        keys[:, :, self.length : self.length + count] = k
        values[:, :, self.length : self.length + count] = v
        self.write_back(layer, count)
        return keys, values

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """Rows on the host are moved there."""
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
        """Rows that are not on the device are copied to it."""
        keys, values = super().read(layer, first, last)
        if layer in self._rows:
            keys, values = self._fetch_now((keys, values))
        return keys, values

    def read_keys(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Keys that are not on the device are copied to it."""
        keys = super().read_keys(layer, first, last)
        return keys if layer not in self._rows else self._fetch_now((keys,))[0]

    @property
    def likes(self) -> Mapping[int, Rows]:
        return {layer: tuple(t[:, :, :0] for t in self._rows.get(layer, rows)) for layer, rows in self._layers.items()}

    def reserve_layers(self, likes: Mapping[int, Rows], count: int) -> Mapping[int, Rows]:
        """Each layer's rows where a pass reads them, once ``fetch_layer`` brought them there."""
        self._check_room(count)
        return self._layers | self._rows

    def _check_room(self, count: int) -> None:
        """Refuse more tokens than there is room for."""
        if self.length + count > self._capacity:
            raise ValueError(f"this cache has room for {self._capacity} tokens, not for {self.length + count}")

    def strided_keys(self, layer: int, step: int) -> torch.Tensor:
        """Rows that are not on the device are copied to it."""
        keys = super().strided_keys(layer, step)
        return keys if layer not in self._rows else self._fetch_now((keys,))[0]

    def chunks(self, layer: int, head: torch.Tensor, chunk: torch.Tensor, size: int) -> Rows:
        """Rows that are not on the device are copied to it: by the device itself, if it can address them."""
        if layer not in self._rows:
            return super().chunks(layer, head, chunk, size)
        rows = self._layers[layer]
        if gpu.runs_on(self.copy_engine.device) and all(t.is_pinned() for t in rows):
            for copy in self._writes:
                copy.wait()
            found, gathered = self.copy_engine.gather(rows, head, chunk, size)
            self._writes.append(gathered)
            return found
        self._wait_for_writes()
        place = rows[0].device
        found = super().chunks(layer, head.to(place), chunk.to(place), size)
        return tuple(t[0] for t in self._fetch_now([t[None] for t in found]))

    def reserve(self, layers: Sequence[int], like: torch.Tensor, count: int) -> torch.Tensor:
        """Not possible: an offloaded cache is not one piece of memory."""
        raise TypeError(
            "an offloaded cache is not in one piece; its passes go layer by layer (fetch_layer, write_back)"
        )

    def share(self, length: int) -> SharedPrefix:
        """Not possible: the text is too large to be kept twice."""
        raise TypeError("the beginning of an offloaded cache cannot be shared")

    def needs(self, shape: KVShape, tokens: int) -> int:
        """On all tiers."""
        return shape.nbytes * self._capacity

    def _buffer(self, layer: int) -> _Buffer:
        return self._buffers[self.offloaded_layers.index(layer) % BUFFERS]

    def _prefetch(self, layer: int) -> _Buffer:
        """Copy a layer's committed rows to its buffer, unless they are there or being copied."""
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
        """Copies of rows from the host, on the device."""
        self._wait_for_writes()
        to = tuple(t.new_empty(t.shape, device=self.copy_engine.device) for t in rows)
        try:
            self.copy_engine.fetch_now(list(zip(to, rows, strict=True)))
        except OffloadError as error:
            self._failure = error
            raise
        return to

    def _pending_copies(self) -> list[PendingCopy]:
        """Copies that may not have ended."""
        return [*self._writes, *(copy for buffer in self._buffers for copy in buffer.copies)]

    def _wait_for_writes(self) -> None:
        """Wait until all rows are written back, for what the CPU does with them."""
        for copy in self._writes:
            copy.finish()
        self._writes = []


def _compact_all(layers: Sequence[Rows], start: int, path: Sequence[int]) -> None:
    for rows in layers:
        compact(rows, start, path)
