"""What the parts of ``python -m benchmarks gpu`` measure, with which sizes, and how they take times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.papers.simulated_acceptance import random_prompt
from benchmarks.studies.passes import BufferReader
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer

READ_BYTES = 1 << 31  # bytes that are read to measure a GPU's bandwidth
SMOLLM2 = replace(ModelShape.parse("smollm2-135m"), tied=False)


@dataclass(frozen=True)
class GpuBench:
    """Sizes, and how times are measured.

    Attributes:
        shapes: of the large models, of ``whole_layers`` layers; the first drafts in ``triforce`` and ``offload``.
        layers: of the large models in ``kernels``, few and more; one layer's cost is the difference.
        contexts, far: tokens in the cache, and those of ``bits``.
        rows: of a batch in ``bits``.
        passes: tokens of passes.
        rounds: of each measurement; medians count.
        buffer: bytes read to measure the bandwidth; copies have half of it, and pinning twice.
        small, draft: SmolLM2's shape, and that of TriForce's small model.
        budget: tokens of the retrieval cache.
        gammas, rates: draft lengths and acceptance rates of ``triforce``.
        offload: layers and draft length of ``offload``.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, ModelShape]
    layers: tuple[int, int]
    contexts: Sequence[int]
    far: Sequence[int]
    rows: int
    passes: Sequence[int]
    rounds: int
    buffer: int
    small: ModelShape
    draft: ModelShape
    new_tokens: int
    budget: int
    gammas: Sequence[int]
    rates: Sequence[float]
    offload: tuple[int, int]
    whole_layers: int

    @classmethod
    def of_card(cls) -> GpuBench:
        """Return the sizes for this machine's GPU."""
        shapes = {name: ModelShape.parse(name) for name in ("llama-2-7b", "llama-3-8b")}
        return cls(
            torch.device("cuda"), torch.bfloat16, shapes, (2, 8), (2048, 122_000), (5000, 20_000), 16,
            (1, 2, 5, 8, 16, 64), 5, READ_BYTES, SMOLLM2, ModelShape.parse("llama-68m"), 96, 4096, (6, 8),
            (0.9, 0.923), (8, 32), 32,
        )  # fmt: skip

    @classmethod
    def smallest(cls) -> GpuBench:
        """Return sizes for a CPU, in Triton's interpreter, where times mean nothing."""
        shape = ModelShape(1, 32, 48, 2, 1, 61)
        return cls(
            torch.device("cpu"), torch.float32, {"smallest": shape}, (1, 2), (40, 280), (270,), 2, (1, 2), 1, 1 << 20,
            shape, shape, 4, 8, (2,), (0.9,), (3, 2), 2,
        )  # fmt: skip

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def model(self, shape: ModelShape, layers: int | None = None) -> PreTrainedModel:
        chosen = shape if layers is None else replace(shape, layers=layers)
        return random_model(chosen, self.dtype, str(self.device))

    def seconds(self, work: Callable[[], Any], rounds: int | None = None) -> float:
        """Return the median time of a call and of what it launches, after two warm-up calls."""
        times = []
        for _ in range((rounds or self.rounds) + 2):
            self.wait()
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return median(times[2:])

    def device_seconds(self, work: Callable[[], Any], repeats: int) -> float:
        """Return the median time of what a call launches, from ``repeats`` in one CUDA graph; on a CPU, of a call."""

        def works() -> None:
            for _ in range(repeats if self.on_gpu else 1):
                work()

        if not self.on_gpu:
            return self.seconds(works)
        work()  # compiles kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            works()
        return self.seconds(graph.replay) / repeats

    def host_seconds(self, work: Callable[[], Any]) -> float:
        """Return the median time until a call returns; what it launched may still run."""
        times = []
        for _ in range(self.rounds):
            self.wait()
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
        return median(times)

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second that the device reads."""
        reader = BufferReader(self.device, self.buffer)
        return reader.nbytes / self.seconds(reader)

    def prompt(self, scorer: Scorer, context: int, seed: int = 0) -> FullCache:
        """Return a cache of random tokens, with room for a pass."""
        return random_prompt(scorer, context, max(self.passes) + 1, scorer.vocabulary, seed).cache


def block_of(tokens: int, at: int) -> Block:
    """Return a draft chain: ``tokens`` with the token before it."""
    ids = torch.arange(tokens).numpy()
    return Block(ids[:1], DraftTree.chain(ids[1:]), at)
