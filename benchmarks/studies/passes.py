"""The time of passes over 1 to 64 tokens, Forerun's and the model's own, compared with the machine's own speeds.

Everything is measured in turns in one process, in an order that rotates from round to round, so that disturbances of
the machine affect all of it. Decoding is bound by reading the weights. A pass over several tokens that reads them once
costs little more than a pass over one; that is why drafts pay.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.studies.memory_bandwidth import BUFFER, BufferReader, Multiplier, weight_bytes, weight_operations
from forerun.bench.machine import Row
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.models.forward.architecture import STORED, dtype_name
from forerun.models.forward.inputs import position_limit

FORERUN, TRANSFORMERS, MEMORY, MATMUL = "forerun", "transformers", "memory", "torch's matmul"
PEAKS = {"float32": torch.float32, "bfloat16": torch.bfloat16, STORED: torch.int8}
"""The arithmetic that bounds a pass, by the type of the weights; others have none here."""
THEIR_SIZES = (1, 8)
"""Sizes of the model's own passes, in tokens."""


@dataclass(frozen=True)
class PassSizes:
    """What to measure.

    Attributes:
        passes: sizes of the passes after the context, in tokens.
        context: tokens in the cache.
        prompts: lengths of prompts to read; may be empty.
        rounds: measurements of each.
        buffer: bytes read to measure the bandwidth.
    """

    passes: Sequence[int]
    context: int
    prompts: Sequence[int]
    rounds: int
    buffer: int = BUFFER

    @property
    def longest(self) -> int:
        """The number of positions that the model must have."""
        return max([self.context + max([*self.passes, *THEIR_SIZES]), *self.prompts])


@dataclass
class Work:
    """Something to measure, and the seconds of its runs.

    Attributes:
        who: ``forerun``, ``transformers``, ``memory`` or ``torch's matmul``.
        kind: ``pass``, ``prompt``, ``read`` or ``multiply``.
        nbytes: bytes of memory that it must read.
        operations: multiplications and additions with weights.
    """

    dtype: str
    who: str
    kind: str
    tokens: int
    nbytes: int
    run: Callable[[], None]
    undo: Callable[[], None] = lambda: None
    operations: int = 0
    seconds: list[float] = field(default_factory=list)

    def once(self, clock: Callable[[], float]) -> None:
        """Run it, timed, and undo its effect on the cache."""
        begin = clock()
        self.run()
        self.seconds.append(clock() - begin)
        self.undo()


@torch.inference_mode()
def measure(
    models: Sequence[PreTrainedModel],
    sizes: PassSizes,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Row]:
    """One row per kind of work.

    Args:
        models: one model in the dtypes to compare.
        sizes: what to measure.
        clock: gives seconds.
        progress: called with rounds done and to do.

    Raises:
        ValueError: if the model has too few positions.
    """
    check_positions(models[0], sizes)
    reader = BufferReader(models[0].device, sizes.buffer)
    works = [Work("-", MEMORY, "read", 0, reader.nbytes, reader)]
    for name in dict.fromkeys(map(dtype_name, models)):
        if name in PEAKS:
            multiplier = Multiplier(PEAKS[name], models[0].device)
            works.append(Work(name, MATMUL, "multiply", 0, 0, multiplier, operations=multiplier.operations))
    works += [work for model in models for work in _works(model, sizes)]
    for turn in range(sizes.rounds + 1):
        progress(turn, sizes.rounds + 1)
        shift = turn % len(works)
        for work in works[shift:] + works[:shift]:
            work.once(clock)
    return summarise(works)


def check_positions(model: PreTrainedModel, sizes: PassSizes) -> None:
    """Refuse lengths for which the model has no positions.

    Raises:
        ValueError: with the length and the number of positions.
    """
    limit = position_limit(model)
    if limit is not None and sizes.longest > limit:
        raise ValueError(
            f"{sizes.longest} tokens are to be measured and the model has {limit} positions; shorten --context, "
            "--passes or --prompt-tokens"
        )


def _works(model: PreTrainedModel, sizes: PassSizes) -> Iterator[Work]:
    dtype = dtype_name(model)
    engine = Engine(model, "none")
    text = np.random.default_rng(0).integers(0, engine.target.vocabulary, sizes.longest + 1)
    nbytes, each = weight_bytes(model), weight_operations(model)
    for count, run in _our_passes(engine, text, sizes):
        yield Work(dtype, FORERUN, "pass", count, nbytes, run, operations=count * each)
    for count, run, undo in _their_passes(model, text, sizes.context):
        yield Work(dtype, TRANSFORMERS, "pass", count, nbytes, run, undo, count * each)
    for count in sizes.prompts:
        yield Work(dtype, FORERUN, "prompt", count, nbytes, _our_reading(engine, text[: count + 1]))
        yield Work(dtype, TRANSFORMERS, "prompt", count, nbytes, _their_reading(model, text[:count]))


def _our_passes(engine: Engine, text: np.ndarray, sizes: PassSizes) -> Iterator[tuple[int, Callable[[], None]]]:
    """Forerun's scorer over a chain, as in a verifying step; nothing of it stays in the cache."""
    cache = engine.prefill(text[: sizes.context + 1].tolist(), max(sizes.passes) + 1)
    for count in sizes.passes:
        tokens = text[sizes.context : sizes.context + count]
        block = Block(tokens[:1], DraftTree.chain(tokens[1:]), cache.length)

        def run(block: Block = block) -> None:
            engine.target.score([block], [cache])[0][-1, -1].item()

        yield count, run


def _their_passes(
    model: PreTrainedModel, text: np.ndarray, context: int
) -> Iterator[tuple[int, Callable[[], None], Callable[[], None]]]:
    """The model's own call with a ``DynamicCache``; what it appends is cut off again."""
    cache = DynamicCache()
    if context:
        _call(model, text[:context], cache, logits_to_keep=1)
    for count in THEIR_SIZES:

        def run(tokens: np.ndarray = text[context : context + count]) -> None:
            _call(model, tokens, cache).logits[0, -1, -1].item()

        yield count, run, functools.partial(cache.crop, -count)


def _our_reading(engine: Engine, text: np.ndarray) -> Callable[[], None]:
    """Read all tokens but the last, as the engine does before it generates."""
    tokens = text.tolist()

    def run() -> None:
        engine.prefill(tokens)
        _wait(engine.target.device)

    return run


def _their_reading(model: PreTrainedModel, text: np.ndarray) -> Callable[[], None]:
    def run() -> None:
        _call(model, text, DynamicCache(), logits_to_keep=1).logits[0, -1, -1].item()

    return run


def _call(model: PreTrainedModel, tokens: np.ndarray, cache: DynamicCache, **options: Any) -> Any:
    ids = torch.from_numpy(tokens)[None].to(model.device)
    if not model._supports_logits_to_keep():
        options = {}
    return model(input_ids=ids, past_key_values=cache, use_cache=True, **options)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def summarise(works: Sequence[Work]) -> list[Row]:
    """Medians over all rounds except the first, which is a warm-up."""
    times = [median(work.seconds[1:]) for work in works]
    ones = {(w.dtype, w.who): t for w, t in zip(works, times, strict=True) if (w.kind, w.tokens) == ("pass", 1)}
    speed = next(w.nbytes / t for w, t in zip(works, times, strict=True) if w.who == MEMORY)
    peaks = {w.dtype: w.operations / t for w, t in zip(works, times, strict=True) if w.who == MATMUL}
    return [_row(work, seconds, ones, speed, peaks) for work, seconds in zip(works, times, strict=True)]


def _row(work: Work, seconds: float, ones: dict[tuple[str, str], float], speed: float, peaks: dict[str, float]) -> Row:
    one = ones.get((work.dtype, work.who))
    reads = work.kind in ("read", "pass")  # a prompt is bound by arithmetic, not by reading
    peak = peaks.get(work.dtype) if work.operations else None
    return {
        "dtype": work.dtype,
        "who": work.who,
        "kind": work.kind,
        "tokens": work.tokens,
        "milliseconds": 1000 * seconds,
        "slowest": 1000 * max(work.seconds[1:]),
        "fastest": 1000 * min(work.seconds[1:]),
        "ratio_to_one_token": seconds / one if one and work.kind == "pass" else None,
        "tokens_per_second": work.tokens / seconds if work.tokens else None,
        "bytes_read": work.nbytes,
        "gigabytes_per_second": work.nbytes / seconds / 1e9 if reads else None,
        "share_of_bandwidth": work.nbytes / seconds / speed if reads else None,
        "gigaflops": work.operations / seconds / 1e9 if work.operations else None,
        "share_of_peak": work.operations / seconds / peak if peak else None,
    }
