"""Learn what recycled logits and known noise are worth, on top of what texts taught: writes prior.npy anew.

    python -m benchmarks learn-recycled --model M --prompts FILE

Recorded texts have no logits. So a model answers prompts, in sessions of eight, each with an empty index and the
model's static lists. Every node of its drafts is scored, and every second session is sampled. What each step brought to
the index is noted, and learned from at each rate, in sessions of one to thirty. What ``learn-evidence`` learned from
texts stays as it is: where there is no list, drafts are those of texts alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.training.untrained_mixer import untrained
from forerun.cli.options import DebugOptions
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.engine.engine import Engine
from forerun.models.forward.gate import admit
from forerun.models.forward.runtime import default_runtime
from forerun.models.forward.static_lists import extended
from forerun.models.loading.load import load
from forerun.trie import logistic_mixer
from forerun.trie.candidates import RECYCLED, RECYCLED_CELLS, SUBSTITUTE
from forerun.trie.logistic_mixer import TEXT_SETS, Mixer
from forerun.trie.recycled import RecycledRows
from forerun.trie.trie import Draft, TextUpdate, Trie, TrieConfig

SESSION_PROMPTS = 8
"""Prompts that are answered with one index."""

FIRST_WEIGHT = 0.3
"""Weight of the new inputs before anything was learned."""


@dataclass(frozen=True, kw_only=True)
class RecycledOptions(DebugOptions):
    """Learn what recycled logits and known noise are worth: writes src/forerun/trie/prior.npy."""

    model: Annotated[str, typer.Option(help="A model with a chat template.")]
    prompts: Annotated[Path, typer.Option(help="JSON lines of {prompt}.")]
    dtype: Annotated[str, typer.Option(help="Type of its weights.")] = "bfloat16"
    temperature: Annotated[float, typer.Option(help="Of every second session.")] = 0.8
    budget: Annotated[int, typer.Option(help="Nodes of a draft.")] = 24
    tokens: Annotated[int, typer.Option(help="Of an answer.")] = 96
    rates: Annotated[str, typer.Option(help="Learning rate of each time through the answers.")] = "0.02,0.01,0.005"
    most: Annotated[float, typer.Option(help="How often a piece of evidence counts as seen, at most.")] = 30.0
    out: Annotated[Path, typer.Option(help="The file.")] = logistic_mixer.PRIOR_FILE


class Answer(NamedTuple):
    """What a request brought to the index: what ``Trie.begin`` was given behind its number, and each step's update."""

    begun: tuple[Any, ...]
    updates: list[TextUpdate]


class RecordingTrie(Trie):
    """Notes what requests bring to it.

    Attributes:
        answers: of all requests, in the order in which they began.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, Answer] = {}

    def begin(self, request_id: int, *given: Any) -> None:
        """Start a request."""
        self.answers[request_id] = Answer(given, [])
        super().begin(request_id, *given)

    def step(self, updates: Sequence[TextUpdate]) -> list[Draft]:
        """Learn, then draft."""
        for update in updates:
            learned = update._replace(new=np.array(update.new), pending=(), budget=0, untaught=0)
            self.answers[update.request_id].updates.append(learned)
        return super().step(updates)


def run(options: RecycledOptions) -> None:
    """Learn, and write what was learned."""
    rows = options.prompts.read_text(encoding="utf-8").splitlines()
    lists, answers = recorded([json.loads(row)["prompt"] for row in rows], options)
    mixer = learned(answers, lists, [float(rate) for rate in options.rates.split(",")], logistic_mixer.prior())
    np.minimum(mixer.cells.uses, options.most, out=mixer.cells.uses)
    np.save(options.out, logistic_mixer.dump(mixer).astype(np.float32), allow_pickle=False)


def recorded(prompts: list[str], options: RecycledOptions) -> tuple[RecycledRows, list[Answer]]:
    """The model's static lists, and its answers."""
    model, tokenizer = load(options.model, options.dtype)
    lists = extended(admit(model, default_runtime().self_test), clock=lambda: 0.0)
    runtime, answers = replace(default_runtime(), static_lists=lambda scorer: lists), list[Answer]()
    for number, first in enumerate(range(0, len(prompts), SESSION_PROMPTS)):
        drafter = TrieDrafter(trie=(trie := RecordingTrie()))
        engine = Engine(
            model, drafter, tokenizer=tokenizer, budget=options.budget, prune_drafts=False, _runtime=runtime
        )
        for prompt in prompts[first : first + SESSION_PROMPTS]:
            engine.generate(
                [{"role": "user", "content": prompt}],
                max_new_tokens=options.tokens,
                do_sample=number % 2 == 1,
                temperature=options.temperature,
                seed=number,
            )
        answers += trie.answers.values()
        print(f"{len(answers)} of {len(prompts)} prompts are answered", flush=True)
    return lists, answers


def learned(answers: list[Answer], lists: RecycledRows, rates: list[float], texts: Mixer) -> Mixer:
    """What evidence was worth in the answers; ``texts`` is what is known of texts without lists."""
    mixer = started(texts)
    for rate, session in sessions(answers, rates):
        keep_texts(mixer, texts)
        trie = Trie(TrieConfig(learning_rate=rate), mixer)
        trie.set_static_lists(lists)
        for number, answer in enumerate(session):
            trie.begin(number, *answer.begun)
            for update in answer.updates:
                trie.step([update._replace(request_id=number)])
            trie.finish(number)
        mixer = logistic_mixer.restore(trie.snapshot("default")[1])
    keep_texts(mixer, texts)
    return mixer


def started(texts: Mixer) -> Mixer:
    """A mixer that knows of lists no more than that they are evidence like other evidence."""
    mixer, blocks = untrained(), logistic_mixer.SETS // TEXT_SETS
    mixer.weights[:] = np.tile(texts.weights[:TEXT_SETS], (blocks, 1))
    mixer.weights[:, RECYCLED:SUBSTITUTE] = FIRST_WEIGHT
    mixer.correction[:-1] = np.tile(texts.correction[:TEXT_SETS], (blocks, 1))
    keep_texts(mixer, texts)
    return mixer


def keep_texts(mixer: Mixer, texts: Mixer) -> None:
    """Put back what was learned of texts without lists."""
    for part, known in zip(mixer.cells, texts.cells, strict=True):
        part[:RECYCLED_CELLS] = known[:RECYCLED_CELLS]
    mixer.weights[:TEXT_SETS], mixer.correction[:TEXT_SETS] = texts.weights[:TEXT_SETS], texts.correction[:TEXT_SETS]


def sessions(answers: list[Answer], rates: list[float]) -> Iterator[tuple[float, list[Answer]]]:
    """All answers once for each rate, in another order each time, cut into sessions."""
    rng = Random(0)
    for rate in rates:
        left = rng.sample(answers, len(answers))
        while left:
            count = int(30 ** rng.random())
            yield rate, left[:count]
            left = left[count:]
