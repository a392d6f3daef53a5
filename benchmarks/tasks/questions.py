"""Six tasks for models that chat: maths, code, answers from a passage, summaries, edits of code, tables to JSON.

They differ in how predictable the output is: an edit repeats its prompt, a summary rephrases it, maths and code are
new.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.reporting.common_options import SourceOptions, json_lines
from benchmarks.tasks.passages import Passages, functions, sentences
from benchmarks.tasks.task_prompts import LackingError, Tasks
from benchmarks.training import tasks
from benchmarks.training.tasks import Material

SEED = "questions"
ROWS, COLUMNS = (4, 14), (3, 6)  # the least and the most rows and columns of a table
EDITS = (
    "Add type hints to this Python function.",
    "Add type hints and a docstring to this Python function.",
    "Add type hints to this Python function, and comments where the code is hard to follow.",
)
_WORD = re.compile(r"[A-Za-z]{6,}")


def questions(files: SourceOptions, count: Callable[[str], int]) -> Tasks:
    """Return the tasks by name, drawn from ``files``; ``count`` counts tokens."""
    passages = functools.cache(lambda: Passages.read(files.books, SEED))
    complete = "Complete this Python function. Return the whole function."
    summarise = "Summarise the following passage."
    return {
        "maths": lambda wanted: [f"Solve step by step: {text}" for text in _asked("--maths", files.maths, wanted)],
        "code": lambda wanted: [_about(complete, text) for text in _asked("--code", files.code, wanted)],
        "rag": lambda wanted: [_from_passage(_rng("rag", i), passages(), count) for i in range(wanted)],
        "summary": lambda wanted: [
            f"{summarise}\n\n{passages().draw(_rng('summary', i), count)}" for i in range(wanted)
        ],
        "edit": lambda wanted: [
            _about(f"{EDITS[i % len(EDITS)]} Return the whole function.", text)
            for i, text in enumerate(functions(SEED, wanted))
        ],
        "table": lambda wanted: [_table(_rng("table", i)) for i in range(wanted)],
    }


def _rng(task: str, number: int) -> Random:
    return Random(f"{SEED}/{task}/{number}")


def _asked(option: str, file: Path | None, wanted: int) -> list[str]:
    """Return ``wanted`` different questions of a file, in a seeded order."""
    if file is None:
        raise LackingError(f"needs a file of questions ({option})")
    found = sorted(set(read_questions(option, file)))
    Random(f"{SEED}/{option}").shuffle(found)
    if len(found) < wanted:
        few = f"{option} {file} has {len(found)} different prompts and {wanted} are needed"
        raise ValueError(f"{few}; lower --prompts or --warm-prompts")
    return found[:wanted]


def read_questions(option: str, file: Path) -> Sequence[str]:
    """Return a file's prompts without the template around a question; raise ValueError for a line without one."""
    return [_question(place, row) for place, row in json_lines(file, option)]


def _question(place: str, row: Any) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"{place} has no prompt")
    return prompt.strip("\n").removeprefix("Question: ").rstrip().removesuffix("Answer:").rstrip()


def _about(request: str, code: str) -> str:
    return f"{request}\n\n```python\n{code.rstrip()}\n```"


def _from_passage(rng: Random, passages: Passages, count: Callable[[str], int]) -> str:
    """Ask about a word of a sentence of a passage."""
    passage = passages.draw(rng, count)
    about = _topic(rng.choice(sentences(passage)), passage)
    question = f'What does the passage say about "{about}"? Quote the sentences that you use.'
    return f"Answer the question from the passage.\n\nPassage:\n{passage}\n\nQuestion: {question}"


def _topic(sentence: str, passage: str) -> str:
    """Return the word of a sentence, except its first, that is most frequent in the passage; ties go to the longest."""
    words = _WORD.findall(sentence.partition(" ")[2]) or _WORD.findall(passage)
    return max(words, key=lambda word: (passage.count(word), len(word)), default="this")


def _table(rng: Random) -> str:
    task = tasks.table(rng, Material(), rng.randint(*ROWS), rng.randint(*COLUMNS))
    return f"Write this table as JSON: a list with one object for each row.\n\n{task.sources[0]}"
