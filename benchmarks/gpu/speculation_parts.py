"""The parts of ``python -m benchmarks gpu`` that decode: ``auto``, TriForce, and offloading. Each yields rows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.gpu_bench import GpuBench, block_of
from benchmarks.long_context.long_bench import LongBench, LongSeries, Prefilled, Traffic, summarise
from benchmarks.papers.simulated_acceptance import random_prompt, simulated
from forerun.bench.machine import Row
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.models.forward.gate import admit
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.forward.runtime import default_runtime, without_folder

TEXTS = 2  # requests to a new engine: drafts must pay from the first one on
PROMPT_TOKENS = 12
ENGINES = 2  # engines of each kind: most of a part's time is their load
OFFLOADED_RATE = 0.9
SMALL_ACCEPTANCE = 0.45
DRAFTERS = ("retrieval", "triforce", "triforce-trie")
"""A chain by the target over its retrieval cache, one with a small level, and one with the trie."""
CHUNK = 8


def auto(bench: GpuBench) -> Iterator[Row]:
    """Measure ``none`` and ``auto`` on SmolLM2's shape: each output of a new engine, and its recordings."""
    model, runtime = bench.model(bench.small), without_folder(default_runtime())
    options = {"max_new_tokens": bench.new_tokens, "eos_token_id": None}
    found: dict[tuple[str, int], list[Row]] = {}
    for _ in range(min(ENGINES, bench.rounds)):
        draws = map(np.random.default_rng, range(TEXTS))
        texts = [draw.integers(0, bench.small.vocabulary, PROMPT_TOKENS).tolist() for draw in draws]
        for drafter in ("none", "auto"):
            began = time.perf_counter()
            engine = Engine(model, drafter, _runtime=runtime)
            load = time.perf_counter() - began
            for number, prompt in enumerate(texts):
                before, began = _recordings(engine), time.perf_counter()
                [generated] = engine.generate(prompt, **options).generated
                seconds = time.perf_counter() - began
                found.setdefault((drafter, number), []).append(
                    {"load_seconds": load, "milliseconds": 1000 * seconds / len(generated), "text": generated,
                     "recorded_at_load": before, "recorded_late": _recordings(engine) - before}
                )  # fmt: skip
    for (drafter, number), rows in found.items():
        own = median(row["milliseconds"] for row in rows)
        plain = median(row["milliseconds"] for row in found["none", number])
        yield {
            "drafter": drafter, "text": number + 1, "milliseconds": own, "of_none": plain / own,
            "load_seconds": median(row["load_seconds"] for row in rows),
            "recorded_at_load": rows[0]["recorded_at_load"], "recorded_late": max(row["recorded_late"] for row in rows),
            "equal": all(row["text"] == found["none", number][0]["text"] for row in rows),
        }  # fmt: skip


def _recordings(engine: Engine) -> int:
    return engine.target.recordings if isinstance(engine.target, GpuScorer) else 0


def triforce(bench: GpuBench) -> Iterator[Row]:
    """Measure drafts over a retrieval cache at simulated acceptance rates, after the parts of a step."""
    shape = next(iter(bench.shapes.values()))
    model, small = bench.model(shape, bench.whole_layers), bench.model(bench.draft)
    vocabulary = min(shape.vocabulary, bench.draft.vocabulary)
    engine, room = Engine(model, "none"), bench.new_tokens + max(bench.gammas) + 128
    prompt = random_prompt(engine.target, bench.contexts[-1], room, vocabulary)
    yield _step_parts(bench, engine, prompt)
    prompt.rewind()
    long = LongBench(engine, 1)
    for gamma in bench.gammas:
        settings = _settings(bench, small, gamma)
        for acceptance in bench.rates:
            make = simulated(acceptance, SMALL_ACCEPTANCE, bench.new_tokens, vocabulary)
            series = long.run([[prompt]], DRAFTERS, settings, make)
            for row, each in zip(summarise(series), series, strict=True):
                yield {"gamma": gamma, "rate": acceptance} | _short(row) | _step_milliseconds(each)


def _settings(bench: GpuBench, small: PreTrainedModel, gamma: int) -> LongContextConfig:
    return LongContextConfig(
        small, gamma1=2, gamma2=gamma, paced=False, cache_budget=bench.budget, chunk=min(CHUNK, bench.budget // 2),
        sparse="retrieval",
    )  # fmt: skip


@torch.inference_mode()
def _step_parts(bench: GpuBench, engine: Engine, prompt: Prefilled) -> Row:
    """Return milliseconds of a plain pass, the verification, a draft, syncing new tokens, and choosing chunks."""
    scorer, cache, verified = engine.target, prompt.cache, max(bench.gammas) + 1
    kept = scorer.queries_from
    scorer.keep_queries(0)
    budget, chunk = min(bench.budget, bench.contexts[-1] // 2), min(CHUNK, bench.budget // 2)
    view = RetrievalCache(cache, RetrievalConfig(budget, chunk))
    plain = partial(scorer.score, [block_of(1, cache.length)], [cache])
    times = {"plain": bench.seconds(plain),
             "verify": bench.seconds(partial(scorer.score, [block_of(verified, cache.length)], [cache]))}  # fmt: skip
    plain()  # its queries choose chunks
    view.sync()
    draft = partial(scorer.score, [block_of(1, view.length)], [view])
    times |= {"draft": bench.seconds(draft), "sync": bench.seconds(view.sync), "choice": bench.seconds(view.refresh)}
    scorer.queries_from = kept
    return {"contestant": "parts of a step"} | {f"{name}_ms": 1000 * seconds for name, seconds in times.items()}


def _short(row: Row) -> Row:
    kept = ("contestant", "tokens_per_second", "speed_up", "acceptance", "tokens_per_step", "same_output")
    return {name: row[name] for name in kept}


def _step_milliseconds(series: LongSeries) -> Row:
    """Return a step's milliseconds of drafting, the verifying pass, and accepting."""
    stats = [stats for rounds in series.runs for run in rounds for stats in run.stats]
    steps = max(1, sum(each.steps - 1 for each in stats))
    return {
        f"{part}_ms": 1000 * sum(getattr(each, f"{part}_seconds") for each in stats) / steps
        for part in ("propose", "score", "verify")
    }


def offload(bench: GpuBench) -> Iterator[Row]:
    """Measure keys and values in the host's memory, with few layers: equal ratios in less time."""
    layers, gamma = bench.offload
    shape = next(iter(bench.shapes.values()))
    model, small = bench.model(shape, layers), bench.model(bench.draft)
    vocabulary = min(shape.vocabulary, bench.draft.vocabulary)
    context, room = bench.contexts[-1], bench.new_tokens + gamma + 128
    bandwidth = None if bench.on_gpu else 1e8
    memory = KVMemory(min_device_bytes(admit(model).kv, context + room), bandwidth=bandwidth)
    engine = Engine(model, "none", kv_memory=memory)
    assert engine.tiers is not None
    began = time.perf_counter()
    cache = engine.tiers.cache(context + room)
    prompt = random_prompt(engine.target, context, room, vocabulary, cache=cache)
    seconds = time.perf_counter() - began
    yield {"contestant": "making the cache", "seconds": seconds, "exactness": engine.exactness.level}
    settings = _settings(bench, small, gamma)
    make = simulated(OFFLOADED_RATE, SMALL_ACCEPTANCE, bench.new_tokens, vocabulary)
    traffic = Traffic(engine.tiers.copy_engine, make)
    drafters = DRAFTERS[:2] if bench.on_gpu else DRAFTERS[:1]  # in the interpreter the chain alone
    series = LongBench(engine, 1).run([[prompt]], drafters, settings, traffic)
    for row, each in zip(summarise(series), series, strict=True):
        tokens = len(each.runs[0][0].texts[0])
        fetched = traffic.fetched(each.contestant)
        yield _short(row) | _step_milliseconds(each) | {
            "megabytes_per_token": fetched / tokens / 1e6,
            "gigabytes_per_second": fetched / tokens * row["tokens_per_second"] / 1e9,
        }  # fmt: skip
    engine.close()
