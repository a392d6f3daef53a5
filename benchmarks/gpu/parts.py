"""The parts of ``python -m benchmarks gpu`` that measure Forerun itself. Each yields rows."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.capacity.shapes import ModelShape
from benchmarks.gpu import kernel_checks
from benchmarks.gpu.counting import WaitCounter, compilations
from benchmarks.gpu.gpu_bench import SMALLEST_OFFLOADED, GpuBench
from benchmarks.papers.simulated_acceptance import random_model, random_prompt
from forerun.audit.audit import Comparison, Plan
from forerun.audit.audit import audit as audit_of
from forerun.bench.machine import Row
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.kv.cache import Cache
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.kv.offloaded import CopyEngine, PendingCopy
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.forward.runtime import default_runtime, without_folder
from forerun.models.loading.load import BUNDLED, BUNDLED_DRAFT, load, load_draft
from forerun.models.text.prompts import encode
from forerun.reference import demo_prompts


@torch.inference_mode()
def kernels(bench: GpuBench) -> Iterator[Row]:
    """Errors against float64, and whether a token's bits depend on the pass."""
    shape = next(iter(bench.shapes.values()))
    for dtype in dict.fromkeys((torch.float32, bench.dtype)):
        yield kernel_checks.product(shape, bench.passes, dtype, bench.device)
        yield kernel_checks.mean(shape, bench.passes, dtype, bench.device)
        for context in bench.contexts[:2]:
            yield kernel_checks.attention(shape, context, bench.passes, dtype, bench.device)
    for name in kernel_checks.RECURRENCES:
        yield kernel_checks.recurrence(name, bench.device, 1 if bench.on_gpu else 16)


def exactness(bench: GpuBench) -> Iterator[Row]:
    """What the probe says of each trained model, and of each shape."""
    for name, model, _ in _trained(bench):
        yield {"model": name} | _probed(model)
    for name in bench.shapes:
        yield {"model": f"{name}, random weights"} | _probed(bench.shaped(name))


def _probed(model: PreTrainedModel) -> Row:
    engine = Engine(model, "none", _runtime=without_folder(default_runtime()))  # nothing that was measured earlier
    return {
        "dtype": str(engine.target.model.dtype),
        "scorer": type(engine.target).__name__,
        "level": engine.exactness.level,
        "reason": engine.exactness.reason,
    }


CELLS_OF_ATTENTION = {"many KV heads": (4, 4), "groups": (4, 2), "one KV head": (4, 1)}
"""Query heads and KV heads of the models of ``cells``."""
DRAFTERS_OF_CELLS = ("trie", "auto", "triforce-trie", "retrieval")
"""In the interpreter the last of them alone; other parts have the others."""


def cells(bench: GpuBench) -> Iterator[Row]:
    """Texts of small random models with each drafter, against none: heads, sampling, and one row or three."""
    kinds = CELLS_OF_ATTENTION if bench.on_gpu else {"groups": (4, 2)}
    for name, (heads, kv_heads) in kinds.items():
        model = random_model(
            ModelShape(2 if bench.on_gpu else 1, 64, 96, heads, kv_heads, 61), bench.dtype, str(bench.device)
        )
        texts = np.random.default_rng(0).integers(0, 4, (3, 40 if bench.on_gpu else 8)).tolist()
        settings = LongContextConfig(cache_budget=16 if bench.on_gpu else 6, chunk=2, gamma2=4, paced=False)
        plain = Engine(model, "none")
        for drafter in DRAFTERS_OF_CELLS[0 if bench.on_gpu else -1 :]:
            engine = Engine(model, drafter, settings=settings, prune_drafts=drafter == "auto")
            for sample, batch in itertools.product((False, True), (1, 3)) if bench.on_gpu else [(False, 1)]:
                options: dict[str, Any] = {"do_sample": sample, "seed": 1, "eos_token_id": None}
                options["max_new_tokens"] = 48 if bench.on_gpu else 6
                pair = [each.generate(texts[:batch], **options) for each in (plain, engine)]
                yield {
                    "heads": name, "drafter": drafter, "sampled": sample, "rows": batch,
                    "exactness": plain.exactness.level, "equal": pair[0].generated == pair[1].generated,
                    "accepted": sum(sum(stats.accepted) for stats in pair[1].stats),
                }  # fmt: skip


def _trained(bench: GpuBench) -> Iterator[tuple[str, PreTrainedModel, Any]]:
    """Each trained model with its name and tokenizer."""
    for name in bench.models:
        try:
            yield name, *load(name, "auto", device=str(bench.device))
        except (OSError, ValueError) as error:
            bench.skipped[f"model {name}"] = str(error).splitlines()[0]


def audit(bench: GpuBench) -> Iterator[Row]:
    """``forerun audit`` of each trained model, of the bundled one with its small model; of random weights elsewhere."""
    for name, model, tokenizer in _trained(bench):
        small = load_draft(BUNDLED_DRAFT, model, tokenizer) if name == BUNDLED else None
        prompts = encode([prompt["prompt"] for prompt in demo_prompts()][:3], tokenizer)
        settings = LongContextConfig(small, paced=False)
        drafters = ("trie", "auto", "retrieval", *(["triforce"] if small is not None else []))
        yield from _audited(name, model, prompts, Plan(drafters, settings, 48))
    if not bench.on_gpu:
        settings = LongContextConfig(cache_budget=6, chunk=2, gamma2=3, paced=False)
        for name in bench.shapes:
            yield from _audited(name, bench.shaped(name), [[1, 2, 3, 1, 2, 3, 1, 2]], Plan(("retrieval",), settings, 5))


def _audited(name: str, model: PreTrainedModel, prompts: list[list[int]], plan: Plan) -> Iterator[Row]:
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for each in audit_of(model, prompts, plan).comparisons:
        groups.setdefault((each.drafter, each.check), []).append(each)
    for (drafter, check), own in groups.items():
        different = sum(each.failed for each in own)
        yield {"model": name, "drafter": drafter, "check": check, "texts": len(own), "different": different}


@torch.inference_mode()
def decoding(bench: GpuBench) -> Iterator[Row]:
    """Plain passes over one token."""
    for name, context in bench.texts():
        scorer = GpuScorer(bench.shaped(name))
        cache = random_prompt(scorer, context, max(bench.passes) + 1, scorer.vocabulary).cache
        seconds = bench.seconds(partial(scorer.score, [_one_token(cache)], [cache]))
        yield bench.decoded(name, context, "forerun", seconds)


@torch.inference_mode()
def passes(bench: GpuBench) -> Iterator[Row]:
    """Passes over several tokens, relative to one."""
    for name, context in bench.texts():
        scorer, one = GpuScorer(bench.shaped(name)), None
        cache = random_prompt(scorer, context, max(bench.passes) + 1, scorer.vocabulary).cache
        for count in bench.passes:
            block = Block(np.zeros(1, np.int64), DraftTree.chain([0] * (count - 1)), cache.length)
            seconds = bench.seconds(partial(scorer.score, [block], [cache]))
            one = one or seconds
            yield {
                "model": name, "context": context, "tokens": count, "milliseconds": 1000 * seconds,
                "ratio_to_one_token": seconds / one,
            }  # fmt: skip


@torch.inference_mode()
def sparse(bench: GpuBench) -> Iterator[Row]:
    """What drafting over a retrieval cache is made of: its passes, beside one over the whole text, and its choices."""
    for name, context in bench.texts():
        scorer = GpuScorer(bench.shaped(name))
        cache = random_prompt(scorer, context, max(bench.passes) + 1, scorer.vocabulary).cache
        scorer.keep_queries(0)
        view = RetrievalCache(cache, RetrievalConfig(min(SPARSE_BUDGET, context // 2)))
        whole = bench.seconds(partial(scorer.score, [_one_token(cache)], [cache]))
        view.sync()
        over = bench.seconds(partial(scorer.score, [_one_token(view)], [view]))
        times = {"whole": whole, "view": over, "choosing": bench.seconds(view.refresh)}
        yield {"model": name, "context": context} | {which: 1000 * seconds for which, seconds in times.items()}


def _one_token(cache: Cache) -> Block:
    return Block(np.zeros(1, np.int64), DraftTree.empty(), cache.length)


def steps(bench: GpuBench) -> Iterator[Row]:
    """What a step takes beside its pass, what it waits for, and what is recorded or compiled after the first texts.

    A shape writes one text again and again, so that drafts are right. Trained models write others.
    """
    name = next(iter(bench.shapes))
    for drafter in ("none", "trie"):
        yield {"model": name, "drafter": drafter} | _stepped(
            bench, Engine(bench.shaped(name), drafter), [0] * TEXTS_OF_STEPS
        )
    for trained, model, _ in _trained(bench):
        for drafter in ("none", "auto"):
            yield {"model": trained, "drafter": drafter} | _stepped(
                bench, Engine(model, drafter), range(TEXTS_OF_STEPS)
            )


TEXTS_OF_STEPS = 5
"""Texts, of which the last one counts: a pass is recorded when its size comes for the second time, and drafts grow at
first."""


def _stepped(bench: GpuBench, engine: Engine, seeds: Sequence[int]) -> Row:
    """Texts after random tokens; the steps of the last one."""
    options = {"max_new_tokens": 8 * bench.rounds, "eos_token_id": None}
    *before, last = [np.random.default_rng(seed).integers(0, engine.target.vocabulary, 12).tolist() for seed in seeds]
    for prompt in before:
        engine.generate(prompt, **options)
    recorded = recordings(engine)
    with compilations() as compiled, WaitCounter(bench.device) as counter:
        began = time.perf_counter()
        [stats] = engine.generate(last, **options).stats
        seconds = time.perf_counter() - began
    return {
        "steps": stats.steps, "milliseconds": 1000 * seconds / stats.steps,
        "passes": 1000 * stats.score_seconds / max(1, stats.steps - 1),
        **{kind: counter.counts[kind] / stats.steps for kind in ("transfers", "synchronisations", "blocking")},
        "recorded_late": recordings(engine) - recorded, "compiled_late": len(compiled),
    }  # fmt: skip


def recordings(engine: Engine) -> int:
    """The number of passes recorded so far, by all engines of the model."""
    return engine.target.recordings if isinstance(engine.target, GpuScorer) else 0


class NoCopies(CopyEngine):
    """Copies nothing, so that a pass computes with what the buffers hold."""

    def _submit(self, job: Any) -> PendingCopy:
        return self

    def wait(self) -> None:
        """Nothing to wait for."""

    def finish(self) -> None:
        """Nothing to wait for."""

    def done(self) -> bool:
        """At once."""
        return True


SPARSE_BUDGET = 4096
"""Tokens that a retrieval cache holds, as in the paper."""
OVERLAP_ROOM = 8
"""Tokens after the text, for the pass."""


@torch.inference_mode()
def overlap(bench: GpuBench) -> Iterator[Row]:
    """Passes over keys and values in the host's memory: copies alone, computing alone, and both.

    The text is the middle one, because the host's memory takes long to be allocated. On a CPU a link is simulated, over
    which the copies take some tenths of a second.
    """
    name, context = next(iter(bench.shapes)), bench.contexts[len(bench.contexts) // 2]
    bandwidth = None
    if not bench.on_gpu:
        bench.shapes[name], context = SMALLEST_OFFLOADED
        bandwidth = 4 * bench.shapes[name].token_kv_bytes * context
    model = bench.shaped(name)
    memory = KVMemory(min_device_bytes(GpuScorer(model).kv, context + OVERLAP_ROOM), bandwidth=bandwidth)
    engine = Engine(model, "none", kv_memory=memory)
    assert engine.tiers is not None
    scorer, room = engine.target, engine.tiers.cache(context + OVERLAP_ROOM)
    cache: Any = random_prompt(scorer, context, OVERLAP_ROOM, scorer.vocabulary, cache=room).cache
    block = _one_token(cache)

    def copy() -> None:
        for layer in cache.offloaded_layers:
            cache.fetch_layer(layer, 1)

    both = bench.seconds(partial(scorer.score, [block], [cache]))
    before, copies = cache.copy_engine.fetched, bench.seconds(copy)
    fetched = (cache.copy_engine.fetched - before) / (bench.rounds + 2)
    cache.copy_engine = NoCopies(bench.device)
    computing = bench.seconds(partial(scorer.score, [block], [cache]))
    engine.close()
    yield {
        "model": name, "context": context, "gigabytes": fetched / 1e9, "copies": 1000 * copies,
        "gigabytes_per_second": fetched / copies / 1e9, "computing": 1000 * computing, "both": 1000 * both,
        "hidden": (copies + computing - both) / min(copies, computing),
    }  # fmt: skip
