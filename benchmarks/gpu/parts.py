"""The parts of ``python -m benchmarks gpu`` that are measured in its own process. Each returns rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.capacity.shapes import ModelShape
from benchmarks.gpu.counting import WaitCounter
from benchmarks.long_context.rows import Row
from benchmarks.papers.simulated_acceptance import random_model, random_prompt
from benchmarks.studies.memory_bandwidth import BufferReader, weight_bytes
from forerun.audit.audit import Comparison, Plan
from forerun.audit.audit import audit as audit_of
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.loading.load import BUNDLED, load
from forerun.models.text.prompts import encode
from forerun.reference import demo_prompts


@dataclass
class GpuBench:
    """What is measured, and with which sizes.

    Attributes:
        device: of the models.
        dtype: of the weights.
        shapes: of the models with random weights, by name.
        contexts: tokens in the cache.
        passes: tokens of passes.
        rounds: measurements of each; medians count.
        models: names of trained models.
        buffer: bytes read to measure the bandwidth.
        skipped: what was not measured, and why.
    """

    device: torch.device
    dtype: torch.dtype
    shapes: dict[str, ModelShape]
    contexts: Sequence[int]
    passes: Sequence[int]
    rounds: int
    models: Sequence[str]
    buffer: int
    skipped: dict[str, str] = field(default_factory=dict)
    _model: tuple[str, PreTrainedModel] | None = None

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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def fits(self, name: str, context: int) -> bool:
        """Whether a model and a text fit the device's memory; if not, that is noted."""
        if self.device.type != "cuda":
            return True
        shape, free = self.shapes[name], torch.cuda.get_device_properties(self.device).total_memory
        needed = shape.stored_bytes + shape.token_kv_bytes * (context + max(self.passes)) * 1.05 + 2e9
        if needed > free:
            self.skipped[f"{name} at {context:,} tokens"] = f"needs {needed / 1e9:.0f} GB of {free / 1e9:.0f}"
        return needed <= free


@torch.inference_mode()
def kernels(bench: GpuBench) -> list[Row]:
    """Errors of products against float64, and whether a token's bits depend on the pass."""
    from forerun.kernels.gpu import linear

    generator, rows = torch.Generator().manual_seed(0), []
    shape = next(iter(bench.shapes.values()))
    for dtype in (torch.float32, bench.dtype) if bench.dtype != torch.float32 else (torch.float32,):
        x = torch.randn(max(bench.passes) + 1, shape.hidden, generator=generator).to(bench.device, dtype)
        weight = torch.randn(shape.intermediate, shape.hidden, generator=generator).to(bench.device, dtype)
        whole = linear.product(x, weight)
        right = x.double() @ weight.double().T
        same = all(torch.equal(linear.product(x[:n], weight), whole[:n]) for n in {*bench.passes})
        error = float((whole.double() - right).abs().max() / right.abs().max())
        rows.append({"kernel": "product", "dtype": str(dtype), "relative_error": error, "same_bits": same})
    return rows


def exactness(bench: GpuBench) -> list[Row]:
    """What the probe says of each trained model, and of a shape's first one."""
    rows = []
    for name, model in _trained(bench):
        rows.append({"model": name} | _probed(Engine(model, "none")))
    name = next(iter(bench.shapes))
    rows.append({"model": f"{name}, random weights"} | _probed(Engine(bench.shaped(name), "none")))
    return rows


CELLS_OF_ATTENTION = {"many KV heads": (4, 4), "groups": (4, 2), "one KV head": (4, 1)}
"""Query heads and KV heads of the models of ``cells``."""


def cells(bench: GpuBench) -> list[Row]:
    """Texts of small random models with each drafter, against none: heads, sampling, and one row or three."""
    rows = []
    whole = bench.device.type == "cuda"
    for name, (heads, kv_heads) in CELLS_OF_ATTENTION.items() if whole else [("groups", (4, 2))]:
        model = random_model(ModelShape(2, 64, 96, heads, kv_heads, 61), bench.dtype, str(bench.device))
        texts = np.random.default_rng(0).integers(0, 4, (3, 40 if whole else 8)).tolist()
        settings = LongContextConfig(cache_budget=16, chunk=4, gamma2=4, paced=False)
        plain = Engine(model, "none")
        for drafter in ("trie", "retrieval", "triforce-trie") if whole else ("trie",):
            engine = Engine(model, drafter, settings=settings, prune_drafts=False)
            for sample, batch in itertools.product((False, True), (1, 3)) if whole else [(False, 1)]:
                options: dict[str, Any] = {"do_sample": sample, "seed": 1, "eos_token_id": None}
                options["max_new_tokens"] = 48 if whole else 6
                pair = [each.generate(texts[:batch], **options) for each in (plain, engine)]
                rows.append(
                    {
                        "heads": name, "drafter": drafter, "sampled": sample, "rows": batch,
                        "exactness": plain.exactness.level, "equal": pair[0].generated == pair[1].generated,
                        "accepted": sum(sum(stats.accepted) for stats in pair[1].stats),
                    }
                )  # fmt: skip
    return rows


def _probed(engine: Engine) -> Row:
    return {
        "dtype": str(engine.target.model.dtype),
        "scorer": type(engine.target).__name__,
        "level": engine.exactness.level,
        "reason": engine.exactness.reason,
    }


def _trained(bench: GpuBench) -> Iterator[tuple[str, PreTrainedModel]]:
    for name in bench.models:
        try:
            yield name, load(name, "auto", device=str(bench.device))[0]
        except (OSError, ValueError) as error:
            bench.skipped[f"model {name}"] = str(error).splitlines()[0]


def audit(bench: GpuBench) -> list[Row]:
    """``forerun audit`` of the bundled model, with drafters that need no second model."""
    model, tokenizer = load(BUNDLED, "float32", device=str(bench.device))
    prompts = encode([prompt["prompt"] for prompt in demo_prompts()][:3], tokenizer)
    report = audit_of(model, prompts, Plan(drafters=("trie", "auto", "retrieval"), max_new_tokens=48))
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in report.comparisons:
        groups.setdefault((each.drafter, each.check), []).append(each)
    return [
        {"drafter": drafter, "check": check, "texts": len(own), "different": sum(each.failed for each in own)}
        for (drafter, check), own in groups.items()
    ]


@torch.inference_mode()
def decoding(bench: GpuBench) -> list[Row]:
    """Plain passes over one token: share of the device's bandwidth, which is measured beside them."""
    reader, rows = BufferReader(bench.device, bench.buffer), []
    speed = reader.nbytes / bench.seconds(reader)
    for name in bench.shapes:
        for context in bench.contexts:
            if not bench.fits(name, context):
                continue
            scorer = GpuScorer(bench.shaped(name))
            nbytes = weight_bytes(scorer.model) + int(bench.shapes[name].token_kv_bytes * context)
            for who, work in _one_token(bench, scorer, context):
                seconds = bench.seconds(work)
                rows.append(
                    {
                        "model": name, "context": context, "who": who, "milliseconds": 1000 * seconds,
                        "gigabytes": nbytes / 1e9, "share_of_bandwidth": nbytes / seconds / speed,
                    }
                )  # fmt: skip
    return rows


def _one_token(bench: GpuBench, scorer: GpuScorer, context: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    vocabulary = scorer.vocabulary
    cache = random_prompt(scorer, context, max(bench.passes) + 1, vocabulary).cache
    block = Block(np.zeros(1, np.int64), DraftTree.empty(), cache.length)
    yield "forerun", lambda: scorer.score([block], [cache])
    if bench.device.type != "cuda":
        bench.skipped["transformers with torch.compile"] = "needs a GPU"
        return
    if find_spec("vllm") is None:
        bench.skipped["vLLM"] = "not installed"
    else:
        bench.skipped["vLLM"] = "installed, but not called here: measure it with its own `vllm bench latency`"
    try:
        yield "transformers, compiled, static cache", _compiled(scorer.model, context)
    except Exception as error:  # whatever another library raises is no failure of this command
        bench.skipped["transformers with torch.compile"] = str(error).splitlines()[0]


def _compiled(model: PreTrainedModel, context: int) -> Callable[[], Any]:
    """transformers' pass over one token with a static cache, compiled, as its documentation advises."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=context + 8)
    call = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    place = torch.tensor([context], device=model.device)

    def run() -> None:
        call(input_ids=ids, past_key_values=cache, cache_position=place, position_ids=place[None], use_cache=True)

    run()
    return run


@torch.inference_mode()
def passes(bench: GpuBench) -> list[Row]:
    """Passes over several tokens, relative to one."""
    rows = []
    for name in bench.shapes:
        for context in bench.contexts:
            if not bench.fits(name, context):
                continue
            scorer, one = GpuScorer(bench.shaped(name)), None
            cache = random_prompt(scorer, context, max(bench.passes) + 1, scorer.vocabulary).cache
            for count in bench.passes:
                block = Block(np.zeros(1, np.int64), DraftTree.chain([0] * (count - 1)), cache.length)
                seconds = bench.seconds(partial(scorer.score, [block], [cache]))
                one = one or seconds
                rows.append(
                    {
                        "model": name, "context": context, "tokens": count, "milliseconds": 1000 * seconds,
                        "ratio_to_one_token": seconds / one,
                    }
                )  # fmt: skip
    return rows


def steps(bench: GpuBench) -> list[Row]:
    """What a step takes beside its pass, what it waits for, and whether anything is recorded after the first text."""
    rows = []
    name = next(iter(bench.shapes))
    for drafter in ("none", "trie"):
        engine = Engine(bench.shaped(name), drafter)
        prompt = np.random.default_rng(0).integers(0, engine.target.vocabulary, 12).tolist()
        options = {"max_new_tokens": 8 * bench.rounds, "eos_token_id": None}
        engine.generate(prompt, **options)
        before = recordings(engine)
        with WaitCounter(bench.device) as counter:
            began = time.perf_counter()
            [stats] = engine.generate(prompt, **options).stats
            seconds = time.perf_counter() - began
        rows.append(
            {
                "model": name, "drafter": drafter, "steps": stats.steps,
                "milliseconds": 1000 * seconds / stats.steps,
                "passes": 1000 * stats.score_seconds / max(1, stats.steps - 1),
                "transfers": counter.counts["transfers"] / stats.steps,
                "synchronisations": counter.counts["synchronisations"] / stats.steps,
                "recorded_again": recordings(engine) - before,
            }
        )  # fmt: skip
    return rows


def recordings(engine: Engine) -> int:
    """The number of passes recorded so far."""
    return engine.target.recordings if isinstance(engine.target, GpuScorer) else 0
