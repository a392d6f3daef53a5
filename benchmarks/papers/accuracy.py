"""Texts and correct answers in bfloat16, with and without drafts (the Lookahead paper's table 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.lookahead_methods import PLAIN
from benchmarks.tasks.graded import GradedQuestion, share_right
from forerun.bench.rounds import BASELINE, Decode, Series, Tokens

Row = dict[str, Any]


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
