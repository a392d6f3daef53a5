"""``python -m benchmarks learn-recycled``: what recycled logits and known noise are worth; writes prior.npy anew.

Recorded texts have no logits. So a model answers prompts, in sessions of one to thirty, each with an empty index and
the model's static lists. Every node of its drafts is scored, and every second session is sampled. What
``learn-evidence`` learned from texts stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer

from benchmarks.reporting.common_options import json_lines
from benchmarks.training.untrained_mixer import untrained
from forerun.cli.options import DebugOptions
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import Engine
from forerun.models.forward.gate import admit
from forerun.models.forward.runtime import default_runtime
from forerun.models.forward.static_lists import extended
from forerun.models.loading.load import load
from forerun.trie import logistic_mixer
from forerun.trie.candidates import RECYCLED, RECYCLED_CELLS, SUBSTITUTE
from forerun.trie.logistic_mixer import TEXT_SETS, Mixer
from forerun.trie.trie import Trie, TrieConfig

FIRST_WEIGHT = 0.3  # weight of the new inputs before anything was learned


@dataclass(frozen=True, kw_only=True)
class RecycledOptions(DebugOptions):
    """Learn what recycled logits and known noise are worth: writes src/forerun/trie/prior.npy."""

    model: Annotated[str, typer.Option(help="A model with a chat template.")]
    prompts: Annotated[Path, typer.Option(help="JSON lines of {prompt}.")]
    dtype: Annotated[str, typer.Option(help="Type of its weights.")] = "bfloat16"
    temperature: Annotated[float, typer.Option(help="Of every second session.")] = 0.8
    budget: Annotated[int, typer.Option(help="Nodes of a draft.")] = 24
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96
    rates: Annotated[str, typer.Option(help="Learning rate of each time through the prompts.")] = "0.02,0.01,0.005"
    most: Annotated[float, typer.Option(help="How often a piece of evidence counts as seen, at most.")] = 30.0
    out: Annotated[Path, typer.Option(help="The file.")] = logistic_mixer.PRIOR_FILE


def run(options: RecycledOptions) -> None:
    prompts = [row["prompt"] for _, row in json_lines(options.prompts, "--prompts")]
    texts = logistic_mixer.prior()
    mixer = started(texts)
    model, tokenizer = load(options.model, options.dtype)
    lists = extended(admit(model, default_runtime().self_test), clock=lambda: 0.0)
    runtime = replace(default_runtime(), static_lists=lambda scorer: lists)
    for number, (rate, session) in enumerate(sessions(prompts, [float(rate) for rate in options.rates.split(",")])):
        keep_texts(mixer, texts)
        source = TrieSource(trie=Trie(TrieConfig(learning_rate=rate), mixer))
        engine = Engine(model, source, tokenizer=tokenizer, budget=options.budget, prune_drafts=False, _runtime=runtime)
        for prompt in session:
            engine.generate(
                [{"role": "user", "content": prompt}], max_new_tokens=options.tokens, do_sample=number % 2 == 1,
                temperature=options.temperature, seed=number,
            )  # fmt: skip
        mixer = logistic_mixer.restore(source.trie.snapshot("default")[1])
        print(f"session {number}: {len(session)} prompts, rate {rate}", flush=True)
    keep_texts(mixer, texts)
    np.minimum(mixer.cells.uses, options.most, out=mixer.cells.uses)
    np.save(options.out, logistic_mixer.dump(mixer).astype(np.float32), allow_pickle=False)


def started(texts: Mixer) -> Mixer:
    """Return a mixer for which lists are evidence like other evidence."""
    mixer, blocks = untrained(), logistic_mixer.SETS // TEXT_SETS
    mixer.weights[:] = np.tile(texts.weights[:TEXT_SETS], (blocks, 1))
    mixer.weights[:, RECYCLED:SUBSTITUTE] = FIRST_WEIGHT
    mixer.correction[:-1] = np.tile(texts.correction[:TEXT_SETS], (blocks, 1))
    keep_texts(mixer, texts)
    return mixer


def keep_texts(mixer: Mixer, texts: Mixer) -> None:
    """Restore what was learned from texts without lists."""
    for part, known in zip(mixer.cells, texts.cells, strict=True):
        part[:RECYCLED_CELLS] = known[:RECYCLED_CELLS]
    mixer.weights[:TEXT_SETS], mixer.correction[:TEXT_SETS] = texts.weights[:TEXT_SETS], texts.correction[:TEXT_SETS]


def sessions(prompts: list[str], rates: list[float]) -> Iterator[tuple[float, list[str]]]:
    """Yield all prompts once for each rate, in another order each time, cut into sessions."""
    rng = Random(0)
    for rate in rates:
        left = rng.sample(prompts, len(prompts))
        while left:
            count = int(30 ** rng.random())
            yield rate, left[:count]
            left = left[count:]
