"""Spec-Bench's questions as prompts: both turns, the second behind the model's own answer to the first.

The file is Spec-Bench's ``question.jsonl`` (hemingkx/Spec-Bench): lines of ``{category, turns}``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reporting.json_lines import json_lines
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet, Tokens

Questions = Mapping[str, Sequence[Sequence[str]]]
"""The turns of each question, by category."""


def read_questions(file: Path, limit: int | None = None) -> Questions:
    """The first ``limit`` questions of each category, in the file's order.

    Raises:
        ValueError: if there is no such file, with the first line that is no question, or if none is there.
    """
    found: dict[str, list[list[str]]] = {}
    for place, row in json_lines(file, "--questions"):
        category, turns = _question(place, row)
        found.setdefault(category, []).append(turns)
    if not found:
        raise ValueError(f"--questions {file} is empty")
    return {category: questions[:limit] for category, questions in found.items()}


def _question(place: str, row: Any) -> tuple[str, list[str]]:
    try:
        category, turns = row["category"], row["turns"]
    except (KeyError, TypeError):
        raise ValueError(f"{place} is no JSON object with category and turns") from None
    texts = [category, *turns] if isinstance(turns, list) and turns else [None]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{place} has a category or turns that are no text")
    return category, turns


def prompt_set(
    category: str,
    questions: Sequence[Sequence[str]],
    encoder: TemplateEncoder,
    answer: Callable[[Tokens], str],
    max_new_tokens: int,
    positions: int | None = None,
) -> PromptSet:
    """The prompts of all turns of a category's questions; the turns of a question follow each other.

    Args:
        category: becomes the task's name.
        questions: of that category.
        encoder: of the model.
        answer: the model's answer to a prompt, for the turns behind it.
        max_new_tokens: per turn.
        positions: the model's, or None; a question ends before the turn that does not fit.
    """
    prompts: list[Tokens] = []
    for turns in questions:
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(turns, 1):
            messages.append({"role": "user", "content": turn})
            whole = messages if encoder.chats else "\n\n".join(message["content"] for message in messages) + "\n\n"
            prompt = encoder(whole)
            if positions is not None and len(prompt) + max_new_tokens > positions:
                break
            prompts.append(prompt)
            if number < len(turns):
                messages.append({"role": "assistant", "content": answer(prompt)})
    return PromptSet(category, prompts, (), max_new_tokens)
