"""What the parts of ``python -m benchmarks gpu`` measure, with which sizes, and how they take times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.capacity.shapes import ModelShape
from benchmarks.papers.simulated_acceptance import random_model
from benchmarks.studies.memory_bandwidth import BufferReader
from forerun.bench.machine import Row

SMALLEST = ModelShape(1, 32, 48, 2, 1, 61)
"""A model for Triton's interpreter."""
SMALLEST_OFFLOADED = (ModelShape(3, 32, 48, 2, 1, 61), 248)
"""The same with one layer more than there are buffers on the device, and a text that fills whole pages."""
READ_BYTES = 1 << 31
"""Bytes that are read to measure a GPU's bandwidth."""


@dataclass
class GpuBench:
    """What is measured.

    Attributes:
        device: of the models.
        dtype: of the weights.
        shapes: of the models with random weights, by name.
        contexts: tokens in the cache.
        passes: tokens of passes.
        rounds: measurements of each; medians count.
        models: names of trained models.
        buffer: bytes read to measure the bandwidth.
        sources: arguments that say what tasks are drawn from.
        skipped: what was not measured, and why.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, ModelShape]
    contexts: Sequence[int]
    passes: Sequence[int]
    rounds: int
    models: Sequence[str]
    buffer: int = READ_BYTES
    sources: Sequence[str] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    _model: tuple[str, PreTrainedModel] | None = None

    @classmethod
    def smallest(cls) -> GpuBench:
        """Without a GPU."""
        return cls(torch.device("cpu"), torch.float32, {"smallest": SMALLEST}, [40], [1, 2, 4], 1, [], 1 << 20)

    @property
    def sizes(self) -> Row:
        """What a part's rows depend on, besides the card."""
        return {
            "shapes": [*self.shapes], "contexts": [*self.contexts], "passes": [*self.passes], "rounds": self.rounds,
        }  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        """Whether anything here is worth a time."""
        return self.device.type == "cuda"

    def shaped(self, name: str) -> PreTrainedModel:
        """The model of a shape; one is kept at a time."""
        if self._model is None or self._model[0] != name:
            self._model = None
            self._model = name, random_model(self.shapes[name], self.dtype, str(self.device))
        return self._model[1]

    def seconds(self, work: Callable[[], Any]) -> float:
        """Median time of a call, after two that warm up: the second one may record it."""
        times = []
        for _ in range(self.rounds + 2):
            self._wait()
            began = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - began)
        return median(times[2:])

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that the device reads."""
        reader = BufferReader(self.device, self.buffer)
        return reader.nbytes / self.seconds(reader)

    def texts(self) -> Iterator[tuple[str, int]]:
        """Each shape with each number of tokens that fits the device beside it. What does not fit is noted."""
        for name, shape in self.shapes.items():
            for context in self.contexts:
                needed = shape.stored_bytes + shape.token_kv_bytes * (context + max(self.passes)) * 1.05 + 2e9
                free = torch.cuda.get_device_properties(self.device).total_memory if self.on_gpu else needed
                if needed > free:
                    self.skipped[f"{name} at {context:,} tokens"] = f"needs {needed / 1e9:.0f} GB of {free / 1e9:.0f}"
                else:
                    yield name, context

    def decoded(self, name: str, context: int, who: str, seconds: float) -> Row:
        """A row of plain decoding: what a token must read, and how much of the bandwidth that is."""
        shape = self.shapes[name]
        nbytes = shape.read_weights * self.dtype.itemsize + shape.token_kv_bytes * context
        return {
            "model": name, "context": context, "who": who, "milliseconds": 1000 * seconds,
            "gigabytes": nbytes / 1e9, "share_of_bandwidth": nbytes / seconds / self.bandwidth,
        }  # fmt: skip
