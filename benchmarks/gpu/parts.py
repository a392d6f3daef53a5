"""The parts of ``python -m benchmarks gpu`` about the card and the kernels. Each yields rows."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.profiler import ProfilerActivity

from benchmarks.capacity.shapes import ModelShape
from benchmarks.gpu import kernel_checks
from benchmarks.gpu.gpu_bench import GpuBench, block_of
from forerun.bench.machine import Row
from forerun.models.forward.gpu_scorer import GpuScorer

TRIVIAL_KERNELS = 300  # kernels of a graph that do nothing: what is measured is the time from one to the next
REGISTER_THREADS = 8


def machine(bench: GpuBench) -> Iterator[Row]:
    """Measure reads, copies from and to pinned memory, pinning, and a kernel in a graph."""
    yield {"what": "reading", "gigabytes_per_second": bench.bandwidth / 1e9}
    host = torch.empty(bench.buffer // 2, dtype=torch.uint8, pin_memory=bench.on_gpu)
    there = torch.empty_like(host, device=bench.device)
    for what, to, source in (("copies to the card", there, host), ("copies from the card", host, there)):
        seconds = bench.seconds(partial(to.copy_, source, non_blocking=True))
        yield {"what": what, "gigabytes_per_second": host.nbytes / seconds / 1e9}
    number = torch.zeros(1, device=bench.device)
    trivial = bench.device_seconds(partial(number.add_, 1), TRIVIAL_KERNELS)
    yield {"what": "a kernel in a graph", "microseconds": 1e6 * trivial}
    size = 2 * bench.buffer
    pinned = partial(torch.empty, size, dtype=torch.uint8, pin_memory=bench.on_gpu)
    registered = partial(_registered, size, bench.on_gpu)
    for what, pin in (("torch's pinned memory", pinned), ("pages registered after they were written", registered)):
        began = time.perf_counter()
        pin()
        yield {"what": what, "gigabytes": size / 1e9, "seconds": time.perf_counter() - began}


def _registered(size: int, on_gpu: bool) -> None:
    memory = torch.empty(size, dtype=torch.uint8)
    torch.set_num_threads(max(torch.get_num_threads(), REGISTER_THREADS) if on_gpu else torch.get_num_threads())
    memory.zero_()
    if on_gpu:
        runtime = torch.cuda.cudart()
        runtime.cudaHostRegister(memory.data_ptr(), size, 0)
        runtime.cudaHostUnregister(memory.data_ptr())


@torch.inference_mode()
def bits(bench: GpuBench) -> Iterator[Row]:
    """Check that a token's bits do not depend on what shares its pass: kernels, and ragged rows."""
    shape = next(iter(bench.shapes.values()))
    yield kernel_checks.product(shape, bench.passes, bench.dtype, bench.device)
    scorer = GpuScorer(bench.model(shape, bench.layers[0]))
    for context in bench.far:
        yield kernel_checks.attention(shape, context, bench.passes, bench.dtype, bench.device)
        lengths = [context, *(7 + 37 * row for row in range(bench.rows - 1))]  # one long row among short ones
        caches = [bench.prompt(scorer, length, seed) for seed, length in enumerate(lengths)]
        blocks = [block_of(1, cache.length) for cache in caches]
        alone = [scorer.score([block], [cache])[0].clone() for block, cache in zip(blocks, caches, strict=True)]
        together = scorer.score(blocks, caches)
        same = all(map(torch.equal, alone, together))
        yield {"kernel": f"{bench.rows} rows", "context": context, "same_bits": same}
        yield {
            "kernel": "a draft chain", "context": context, "same_bits": all(
                torch.equal(scorer.score([block_of(count, caches[0].length)], caches[:1])[0][:1], alone[0])
                for count in bench.passes
            ),
        }  # fmt: skip
    for name in kernel_checks.RECURRENCES:
        yield kernel_checks.recurrence(name, bench.device, 1 if bench.on_gpu else 16)


@torch.inference_mode()
def kernels(bench: GpuBench) -> Iterator[Row]:
    """Measure passes over one token: the share of the bandwidth, the host's part, and each kernel with the gap before
    it.

    A model of all layers costs what one of few does, and the rest of the layers.
    """
    few, more = bench.layers
    for name, shape in bench.shapes.items():
        scorers = [GpuScorer(bench.model(shape, layers)) for layers in bench.layers]
        for context in bench.contexts:
            seconds, host, events = [], 0.0, kernel_rows([])
            for scorer in scorers:
                cache = bench.prompt(scorer, context)
                work = partial(scorer.score, [block_of(1, cache.length)], [cache])
                seconds.append(bench.seconds(work))
                host = bench.host_seconds(work)
                events = kernel_rows(kernel_events(work, bench.device))
            layer = (seconds[1] - seconds[0]) / (more - few)
            whole = seconds[1] + layer * (bench.whole_layers - more)
            yield _decoded(bench, name, context, whole) | {"layer_microseconds": 1e6 * layer, "host_ms": 1000 * host}
            for row in events:
                yield {"model": name, "context": context} | row


def _decoded(bench: GpuBench, name: str, context: int, seconds: float) -> Row:
    """Return plain decoding's bytes a token and share of the bandwidth."""
    sizes = replace(bench.shapes[name], layers=bench.whole_layers)
    nbytes = sizes.read_weights * bench.dtype.itemsize + sizes.token_kv_bytes * context
    return {
        "model": name, "context": context, "milliseconds": 1000 * seconds, "gigabytes": nbytes / 1e9,
        "share_of_bandwidth": nbytes / seconds / bench.bandwidth,
    }  # fmt: skip


PROGRAMS = (2, 4, 8)  # programs of a scan for each processor: 264, 528 and 1,056 on an H100
ATTENDED_PASSES = (1, 8, 16)
PADDED_ROWS = 64
REPEATS = 8  # calls in one graph, so that the host's part of each is not measured


@torch.inference_mode()
def choices(bench: GpuBench) -> Iterator[Row]:
    """Measure what a card has to decide: programs of a scan, its registers, and the library's products against ours."""
    from forerun.kernels.gpu import attend, pass_tables

    for name, shape in bench.shapes.items():
        for programs in PROGRAMS:
            for registers in (attend.SCAN_REGISTERS, None):
                with (
                    mock.patch.object(pass_tables, "SCAN_PROGRAMS_PER_PROCESSOR", programs),
                    mock.patch.object(attend, "SCAN_REGISTERS", registers),
                ):
                    for tokens in (each for each in ATTENDED_PASSES if each <= max(bench.passes)):
                        seconds = bench.device_seconds(_attention(bench, shape, bench.contexts[-1], tokens), REPEATS)
                        yield {
                            "choice": "scan", "model": name, "programs": programs, "registers": registers,
                            "tokens": tokens, "microseconds": 1e6 * seconds,
                        }  # fmt: skip
    yield from _products(bench, next(iter(bench.shapes.values())))


def _attention(bench: GpuBench, shape: ModelShape, context: int, tokens: int) -> Callable[[], Any]:
    text = torch.zeros(2, shape.kv_heads, context + tokens, shape.head_dim, dtype=bench.dtype, device=bench.device)
    q = torch.zeros(1, shape.heads, tokens, shape.head_dim, dtype=bench.dtype, device=bench.device)
    return kernel_checks.attention_call(q, *text, context)


def _products(bench: GpuBench, shape: ModelShape) -> Iterator[Row]:
    """Compare our product with the library's at 64 rows, for each matrix of a layer: time, bandwidth and bits."""
    from forerun.kernels.gpu import linear

    width = shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    sizes = {
        "qkv": (width, shape.hidden), "output": (shape.hidden, shape.hidden),
        "gate and up": (2 * shape.intermediate, shape.hidden), "down": (shape.hidden, shape.intermediate),
    }  # fmt: skip
    for name, size in sizes.items():
        # more than an L2 holds
        weights = [torch.randn(*size, dtype=bench.dtype, device=bench.device) for _ in range(3)]
        x = torch.randn(max(bench.passes), size[1], dtype=bench.dtype, device=bench.device)
        for who, product in (("ours", linear.sums), ("library, 64 rows", padded)):

            def work(product: Any = product, weights: Any = weights, x: Any = x) -> None:
                for weight in weights:
                    product(x[:1], weight)

            seconds = bench.device_seconds(work, REPEATS) / len(weights)
            whole = product(x, weights[0])
            same = all(torch.equal(product(x[:count], weights[0]), whole[:, :count]) for count in bench.passes)
            moved = [torch.equal(product(x.roll(1, 0), weights[0]).roll(-1, 1), whole)]
            yield {
                "choice": "product", "matrix": name, "who": who, "microseconds": 1e6 * seconds,
                "share_of_bandwidth": weights[0].nbytes / seconds / bench.bandwidth, "same_bits": same and all(moved),
            }  # fmt: skip


def padded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x @ weight.T`` by torch's library, ``[1, n, O]``. Every call has 64 rows, so that the library uses one
    algorithm per matrix; a token's bits then depend neither on the pass nor, if ``same_bits``, on its row. Where this
    reaches three quarters of the bandwidth with equal bits, our kernels can go."""
    padded_x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % PADDED_ROWS))
    parts = [torch.nn.functional.linear(part, weight) for part in padded_x.split(PADDED_ROWS)]
    return torch.cat(parts)[None, : len(x)]


class KernelEvent(NamedTuple):
    """A kernel's name, and when it ran, in microseconds."""

    name: str
    start: float
    end: float


def kernel_events(work: Callable[[], Any], device: torch.device) -> list[KernelEvent]:
    """Return the kernels of one call in order; on a CPU, torch's operations."""
    on_gpu = device.type == "cuda"
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    own = (event for event in found.events() if event.device_type == kind)
    events = [KernelEvent(event.name, event.time_range.start, event.time_range.end) for event in own]
    return sorted(events, key=lambda event: event.start)


def kernel_rows(events: Sequence[KernelEvent]) -> list[Row]:
    """Return each kernel's calls, mean time and mean gap before it, by total time."""
    times, gaps = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for event in events:
        times[event.name].append(event.end - event.start)
    for before, after in pairwise(events):
        gaps[after.name].append(max(0.0, after.start - before.end))
    rows = [
        {"kernel": name[:48], "calls": len(each), "microseconds": sum(each) / len(each),
         "gap": sum(gaps[name]) / max(1, len(gaps[name]))}
        for name, each in times.items()
    ]  # fmt: skip
    return sorted(rows, key=lambda row: -row["calls"] * row["microseconds"])
