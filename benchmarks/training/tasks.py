"""Seeded generators of tasks as (prompt, answer): one source for training, evaluation, the demo and benchmarks.

A state of ``rng`` and a material determine the task. Only 'maths', 'code' and 'prose' need material; the others invent
filler without it. The prompt contains, word for word, what the answer needs, so that strings can be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.training import facts, words

EOS = "<|endoftext|>"


@dataclass(frozen=True)
class Task:
    """A prompt and its answer, without the end-of-text token; ``sources`` are the prompt's passages that the answer
    repeats."""

    kind: str
    prompt: str
    answer: str
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Material:
    """Texts for tasks: paragraphs of prose, whole code files, (question, answer) pairs of maths."""

    prose: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    maths: tuple[tuple[str, str], ...] = ()


def paragraph(rng: Random, material: Material) -> str:
    if material.prose:
        return rng.choice(material.prose)
    return " ".join(fact.sentence for fact in facts.subject(rng).facts)


def filler(rng: Random, material: Material, chars: int) -> list[str]:
    """Return consecutive paragraphs (or invented ones) of about ``chars`` characters."""
    start = rng.randrange(len(material.prose)) if material.prose else 0
    paragraphs: list[str] = []
    while sum(map(len, paragraphs)) < chars:
        if material.prose:
            paragraphs.append(material.prose[(start + len(paragraphs)) % len(material.prose)])
        else:
            paragraphs.append(paragraph(rng, material))
    paragraphs[-1] = paragraphs[-1][: max(40, chars - sum(map(len, paragraphs[:-1])))]
    return paragraphs


def rag(rng: Random, material: Material, documents: int | None = None) -> Task:
    """Ask about several short documents; the answer quotes sentences of one."""
    subjects = [facts.subject(rng) for _ in range(documents or rng.randint(2, 5))]
    texts = [" ".join(fact.sentence for fact in subject.facts) for subject in subjects]
    if material.prose and rng.random() < 0.2:
        texts[rng.randrange(1, len(texts))] = paragraph(rng, material)[:300]
    kept = [
        subject for subject, text in zip(subjects, texts, strict=True) if text.startswith(subject.facts[0].sentence)
    ]
    question, sentences = _ask(rng, rng.choice(kept))
    listing = "\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))
    prompt = f"Documents:\n{listing}\n\nQuestion: {question}\nAnswer:"
    return Task("rag", prompt, f" According to the documents: {' '.join(sentences)}", sentences)


def _ask(rng: Random, subject: facts.FactSubject) -> tuple[str, tuple[str, ...]]:
    """Ask about one, two or all facts of a subject; return the sentences that answer it, too."""
    style = rng.choice(("one", "two", "all"))
    if style == "all":
        question = rng.choice(("What is known about {}?", "What do the documents say about {}?"))
        return question.format(subject.name), tuple(fact.sentence for fact in subject.facts)
    first = rng.randrange(len(subject.facts))
    picked = [first] if style == "one" else sorted({first, rng.randrange(len(subject.facts))})
    asked = [subject.facts[i] for i in picked]
    return " ".join(fact.question for fact in asked), tuple(fact.sentence for fact in asked)


def needle(rng: Random, material: Material, chars: int | None = None) -> Task:
    """Ask for one of a few facts hidden in a long text."""
    paragraphs = filler(rng, material, chars or int(10 ** rng.uniform(2.3, 3.2)))
    hidden = [facts.needle(rng) for _ in range(rng.randint(1, 4))]
    for fact in hidden:
        paragraphs.insert(rng.randrange(len(paragraphs) + 1), fact.sentence)
    asked = rng.choice(hidden)
    text = "\n".join(paragraphs)
    prompt = f"Text:\n{text}\n\nQuestion: {asked.question}\nAnswer:"
    return Task("needle", prompt, f" {asked.sentence}", (asked.sentence,))


def haystack(rng: Random, material: Material, chars: int, count: int) -> tuple[str, list[Task]]:
    """Return a text of about ``chars`` characters with ``count`` hidden facts, and a task for each fact, which follows
    the text."""
    paragraphs = filler(rng, material, chars)
    hidden: dict[str, facts.Fact] = {}
    while len(hidden) < count:
        fact = facts.needle(rng)
        hidden[fact.question] = fact
    for fact in hidden.values():
        paragraphs.insert(rng.randrange(len(paragraphs) + 1), fact.sentence)
    asked = [
        Task("needle", f"Question: {fact.question}\nAnswer:", f" {fact.sentence}", (fact.sentence,))
        for fact in hidden.values()
    ]
    return "Text:\n" + "\n".join(paragraphs) + "\n\n", asked


_COLUMNS: dict[str, Callable[[Random], str | int]] = {
    "name": words.person, "owner": words.person, "author": words.person, "city": words.place, "origin": words.place,
    "town": words.place, "item": words.word, "animal": words.word, "product": words.thing, "title": words.thing,
    "goods": lambda rng: rng.choice(words.GOODS), "colour": lambda rng: rng.choice(words.COLOURS),
    "material": lambda rng: rng.choice(words.MATERIALS),
    "code": lambda rng: f"{words.invent(rng)[:2].upper()}{rng.randint(10, 999)}",
    "month": lambda rng: rng.choice(words.MONTHS), "date": words.date, "id": lambda rng: rng.randint(1, 9999),
    "year": lambda rng: rng.randint(1700, 2030), "price": lambda rng: rng.randint(1, 500),
    "count": lambda rng: rng.randint(0, 99), "age": lambda rng: rng.randint(1, 99),
    "weight": lambda rng: rng.randint(1, 3000), "score": lambda rng: rng.randint(0, 100),
    "room": lambda rng: rng.randint(1, 300),
}  # fmt: skip


def table(rng: Random, material: Material, rows: int | None = None, columns: int | None = None) -> Task:
    """Ask for a table in Markdown (without outer pipes) or CSV as a JSON list with one object per line."""
    headers = rng.sample(sorted(_COLUMNS), columns or rng.randint(2, 4))
    records = [{name: _COLUMNS[name](rng) for name in headers} for _ in range(rows if rows else rng.randint(2, 7))]
    separator, rule = (" | ", ["|".join(["---"] * len(headers))]) if rng.random() < 0.5 else (",", [])
    lines = [separator.join(headers), *rule, *(separator.join(map(str, record.values())) for record in records)]
    body = ",\n".join(" " + json.dumps(record) for record in records)
    written = "\n".join(lines)
    return Task("table", f"Table:\n{written}\n\nWrite the table as JSON.\nAnswer:", f"\n[\n{body}\n]", (written,))


def quote(rng: Random, material: Material) -> Task:
    """Ask for a passage, or for its sentence with a given start."""
    passage = paragraph(rng, material)[: rng.randint(150, 900)]
    sentences = [part for part in re.split(r"(?<=[.!?]) +", passage) if len(part.split()) >= 6]
    if not sentences or rng.random() < 0.3:
        return Task("quote", f"Passage: {passage}\n\nRepeat the passage.\nAnswer:", f" {passage}", (passage,))
    sentence = rng.choice(sentences)
    start = " ".join(sentence.split()[: rng.randint(2, 4)])
    prompt = f'Passage: {passage}\n\nQuote the sentence that starts with "{start}".\nAnswer:'
    return Task("quote", prompt, f" {sentence}", (sentence,))


def maths(rng: Random, material: Material) -> Task:
    question, answer = rng.choice(material.maths)
    return Task("maths", question, answer)


def code(rng: Random, material: Material, lines: int = 16) -> Task:
    """Ask for the ``lines`` of a file after a point."""
    source = rng.choice(material.code).split("\n")
    start = rng.randrange(max(1, len(source) - 3 * lines))
    middle = start + 2 * lines
    return Task("code", "\n".join(source[start:middle]), "\n" + "\n".join(source[middle : middle + lines]))


def prose(rng: Random, material: Material) -> Task:
    """Ask for the paragraph after three of a book."""
    start = rng.randrange(max(1, len(material.prose) - 3))
    text = material.prose[start : start + 4]
    return Task("prose", "\n\n".join(text[:-1]), "\n\n" + text[-1])


KINDS: dict[str, Callable[[Random, Material], Task]] = {
    "rag": rag, "needle": needle, "table": table, "quote": quote, "maths": maths, "code": code, "prose": prose,
}  # fmt: skip


def make(kind: str, rng: Random, material: Material | None = None) -> Task:
    """Return a task of a kind of ``KINDS``; raise ValueError for another kind, or if it needs material that was not
    given."""
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    material = material or Material()
    if kind in ("maths", "code", "prose") and not getattr(material, kind):
        raise ValueError(f"tasks of kind {kind!r} need material.{kind}, which is empty")
    return KINDS[kind](rng, material)
