"""Questions whose answers a program can check: quotes, tables as JSON, and word problems (by their last number).

With them texts and correct answers in bfloat16 are compared, with and without drafts (the Lookahead paper's table 6).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.tasks.task_prompts import LackingError
from benchmarks.training import tasks
from benchmarks.training.tasks import Material, Task
from forerun.bench.machine import Row
from forerun.bench.rounds import BASELINE, PLAIN, Decode, Series, Tokens

SEED = "graded"
PATIENCE = 50
"""Draws per wanted question before giving up."""
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class GradedQuestion:
    """A prompt, and a check whether a text answers it correctly."""

    prompt: str
    right: Callable[[str], bool]


def questions(kind: str, count: int, material: Material, fits: Callable[[str], bool]) -> list[GradedQuestion]:
    """``count`` different questions, or as many as there are.

    Args:
        kind: of ``KINDS``.
        count: number of questions.
        material: their source.
        fits: whether an answer is short enough.

    Raises:
        LackingError: if word problems are asked for and there are none.
    """
    name, grade = KINDS[kind]
    if name == "maths" and not material.maths:
        raise LackingError("needs word problems with answers (--maths)")
    found: dict[str, GradedQuestion] = {}
    for number in range(PATIENCE * count):
        task = tasks.make(name, Random(f"{SEED}/{kind}/{number}"), material)
        if fits(task.answer):
            found.setdefault(task.prompt, GradedQuestion(task.prompt, grade(task)))
        if len(found) == count:
            break
    return list(found.values())


def last_number(text: str) -> float | None:
    """The last number in a text; commas may group its digits."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def first_json(text: str) -> Any:
    """The first JSON list in a text, or None."""
    for match in re.finditer(r"\[", text):
        try:
            return _DECODER.raw_decode(text, match.start())[0]
        except ValueError:
            continue
    return None


def _quotes(task: Task) -> Callable[[str], bool]:
    """A check that everything to be quoted is in the text, word for word."""
    return lambda text: all(source in text for source in task.sources)


def _writes(task: Task) -> Callable[[str], bool]:
    wanted = json.loads(task.answer)
    return lambda text: bool(first_json(text) == wanted)


def _reckons(task: Task) -> Callable[[str], bool]:
    wanted = last_number(task.answer)
    return lambda text: wanted is not None and last_number(text) == wanted


KINDS: dict[str, tuple[str, Callable[[Task], Callable[[str], bool]]]] = {
    "copy": ("quote", _quotes),
    "json": ("table", _writes),
    "rag": ("rag", _quotes),
    "maths": ("maths", _reckons),
}
"""By a kind's name in the tables: its name in ``benchmarks.training.tasks``, and its check."""


def share_right(found: Sequence[GradedQuestion], texts: Sequence[str]) -> float:
    """The share of texts that answer their question correctly."""
    return sum(question.right(text) for question, text in zip(found, texts, strict=True)) / len(found)


@dataclass(frozen=True)
class Exam:
    """Questions of one kind, and their prompts as tokens."""

    kind: str
    questions: Sequence[GradedQuestion]
    prompts: Sequence[Tokens]


def grade(exam: Exam, series: Sequence[Series], decode: Decode) -> list[Row]:
    """One row per contestant: correct answers, and texts equal to those of ``transformers`` and of plain Forerun."""
    by_name = {one.contestant: one for one in series}
    return [
        {
            "task": exam.kind,
            "contestant": one.contestant,
            "questions": len(exam.questions),
            "right": share_right(exam.questions, [_text(rounds[0].texts[0], decode) for rounds in one.runs]),
            "same_as_plain": one.same_texts(by_name[PLAIN], decode),
            "same_as_transformers": one.same_texts(by_name[BASELINE], decode),
        }
        for one in series
    ]


def _text(text: Tokens | str, decode: Decode) -> str:
    return text if isinstance(text, str) else decode(text)
