"""The set of tasks for a model: questions for chat models, texts to continue for others."""

from __future__ import annotations

from benchmarks.reporting.common_options import SourceOptions
from benchmarks.tasks.continuations import continuations
from benchmarks.tasks.questions import questions, read_questions
from benchmarks.tasks.task_prompts import Tasks
from benchmarks.training import material
from forerun.bench.prompts_file import TemplateEncoder


def tasks_for(encoder: TemplateEncoder, sources: SourceOptions) -> Tasks:
    """The tasks by name.

    Args:
        encoder: of the model.
        sources: what some tasks are drawn from.

    Raises:
        ValueError: for a file of a wrong format.
    """
    check_sources(sources)
    if encoder.chats:
        return questions(sources, encoder.count)
    if sources.code is not None:
        raise ValueError("--code is for models that chat; there is no chat template here, or --raw turns it off")
    return continuations(material.read_held_out(sources.books, sources.maths))


def check_sources(sources: SourceOptions) -> None:
    """Refuse files of a wrong format.

    Raises:
        ValueError: with the option, and the wrong line if there is one.
    """
    for option, file in (("--maths", sources.maths), ("--code", sources.code)):
        if file is not None and not read_questions(option, file):
            raise ValueError(f"{option} {file} is empty")
    if sources.books is not None and not any(sources.books.glob("*.txt")):
        raise ValueError(f"--books is {sources.books}; there is no such folder, or no .txt file in it")
