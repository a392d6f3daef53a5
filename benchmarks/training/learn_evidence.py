"""``python -m benchmarks learn-evidence``: what evidence is worth to a new index; writes src/forerun/trie/prior.npy.

Sessions have one to thirty requests of one kind: continued prose and code, solutions of word problems, the bundled
models' tasks, passages repeated with changes, and random strings; some requests come again. Every session starts with
an empty index; what evidence was worth is kept, as a few thousand rates and weights.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated

import numpy as np
import typer
from tokenizers import Tokenizer

from benchmarks.reporting.common_options import json_lines
from benchmarks.training import material, tasks
from benchmarks.training.untrained_mixer import untrained
from forerun.cli.options import DebugOptions
from forerun.trie import logistic_mixer
from forerun.trie.trie import Trie

PROMPT_MATCH, ANSWER = 1200, 700  # characters of a continued text, at most
AGAIN = 0.25  # share of requests that repeat an earlier one

Request = tuple[str, str]
Kind = Callable[[Random], Iterator[Request]]


def continued(texts: tuple[str, ...], rng: Random) -> Iterator[Request]:
    """Yield requests to continue passages of one text after another."""
    while True:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - ANSWER))
        middle = start + rng.randrange(20, PROMPT_MATCH)
        yield text[start:middle], text[middle : middle + ANSWER]


def edited(texts: tuple[str, ...], rng: Random) -> Iterator[Request]:
    """Yield requests to repeat passages with a few words replaced, left out or put in."""
    while True:
        text = rng.choice(texts)
        start = rng.randrange(max(1, len(text) - ANSWER))
        passage = text[start : start + rng.randrange(100, ANSWER)]
        yield passage + "\n\n", edit(rng, passage, rng.choice((0, 0, 1, 2, 4, 8)))


def edit(rng: Random, text: str, changes: int) -> str:
    """Replace, leave out or put in some words."""
    words = text.split(" ")
    for _ in range(changes):
        at = rng.randrange(len(words))
        words[at : at + rng.randrange(2)] = rng.sample(words, rng.randrange(min(3, len(words))))
        words = words or [text]
    return " ".join(words)


def scrambled(rng: Random) -> Iterator[Request]:
    """Yield requests to repeat a part of a random string of few or many characters."""
    while True:
        characters = rng.sample(string.ascii_letters + string.digits, rng.choice((2, 3, 4, 8, 20, 60)))
        text = " ".join(rng.choices(characters, k=rng.randrange(60, 500)))
        start = rng.randrange(len(text) // 2)
        yield text + "\n\n", text[start:]


def asked_again(kind: Kind, rng: Random) -> Iterator[Request]:
    """Yield a kind's requests, of which some come again with almost the same answer."""
    seen: list[Request] = []
    for request in kind(rng):
        seen.append(request)
        while rng.random() < AGAIN:
            prompt, answer = rng.choice(seen)
            yield prompt, edit(rng, answer, rng.choice((0, 0, 0, 1)))
        yield request


def recorded(pairs: list[Request], rng: Random) -> Iterator[Request]:
    """Yield recorded answers, in order from a random place on."""
    start = rng.randrange(len(pairs))
    while True:
        yield pairs[start % len(pairs)]
        start += 1


def tasked(kind: str, texts: tasks.Material, rng: Random) -> Iterator[Request]:
    """Yield tasks of the bundled models, answered correctly."""
    while True:
        task = tasks.make(kind, rng, texts)
        yield task.prompt, task.answer


def kinds(books: Path, maths: Path, answers: Path, without: str) -> list[Kind]:
    texts = material.read(books, maths)
    authors: dict[str, list[Request]] = {}
    for _, row in json_lines(answers, "--answers"):
        if row["author"] != without:
            authors.setdefault(row["author"], []).append((row["prompt"], row["answer"]))
    whole = ("\n\n".join(texts.prose),)
    own = [partial(tasked, kind, texts) for kind in ("table", "rag", "quote", "needle")]
    replayed = [partial(recorded, pairs) for pairs in (list(texts.maths), *authors.values())]
    every = [partial(continued, whole), partial(continued, texts.code), *replayed, *own]
    changed = [partial(edited, whole), partial(edited, texts.code)]
    return [partial(asked_again, kind) for kind in [*every, *changed, scrambled]]


def learn(made_of: list[Kind], tokenizers: list[Tokenizer], sessions: int, most: float) -> logistic_mixer.Mixer:
    """Train on ``sessions`` sessions; no evidence counts as seen more than ``most`` times."""
    mixer = untrained()
    for session in range(sessions):
        rng = Random(session)
        requests, tokenizer = rng.choice(made_of)(rng), rng.choice(tokenizers)
        trie = Trie(mixer=mixer)
        trie.spell(tokenizer)
        for number in range(int(30 ** rng.random())):
            prompt, answer = next(requests)
            trie.begin(number, "session", tokenizer.encode(prompt, add_special_tokens=False).ids)
            trie.extend(number, tokenizer.encode(answer, add_special_tokens=False).ids[:256])
            trie.finish(number)
        mixer = logistic_mixer.restore(trie.snapshot("session")[1])
    np.minimum(mixer.cells.uses, most, out=mixer.cells.uses)
    return mixer


@dataclass(frozen=True, kw_only=True)
class EvidenceOptions(DebugOptions):
    """Learn what evidence is worth before any is seen: writes src/forerun/trie/prior.npy."""

    books: Annotated[Path, typer.Option(help="A folder of .txt books.")]
    maths: Annotated[Path, typer.Option(help="JSON lines of {prompt, answer}, by people.")]
    answers: Annotated[Path, typer.Option(help="JSON lines of {prompt, answer, author}, by models.")]
    tokenizer: Annotated[list[Path], typer.Option(help="A tokenizer.json; may be given several times.")]
    without: Annotated[str, typer.Option(help="An author to leave out.")] = "llm:gpt3-175b_verification"
    sessions: Annotated[int, typer.Option(help="How many.")] = 1800
    most: Annotated[float, typer.Option(help="How often a piece of evidence counts as seen, at most.")] = 4.0
    out: Annotated[Path, typer.Option(help="The file.")] = logistic_mixer.PRIOR_FILE


def run(options: EvidenceOptions) -> None:
    texts = kinds(options.books, options.maths, options.answers, options.without)
    tokenizers = [Tokenizer.from_file(str(file)) for file in options.tokenizer]
    mixer = learn(texts, tokenizers, options.sessions, options.most)
    np.save(options.out, logistic_mixer.dump(mixer).astype(np.float32), allow_pickle=False)
