"""The set of tasks for a model: questions for chat models, texts to continue for others."""

from __future__ import annotations

from benchmarks.tasks.continuations import continuations
from benchmarks.tasks.questions import Files, questions
from benchmarks.tasks.task_prompts import Tasks
from benchmarks.training import material
from forerun.bench.prompts_file import TemplateEncoder


def tasks_for(encoder: TemplateEncoder, files: Files) -> Tasks:
    """The tasks by name.

    Args:
        encoder: of the model.
        files: what some tasks are drawn from.

    Raises:
        ValueError: for a file of a wrong format.
    """
    files.check()
    if encoder.chats:
        return questions(files, encoder.count)
    if files.code is not None:
        raise ValueError("--code is for models that chat; there is no chat template here, or --raw turns it off")
    return continuations(material.read_held_out(files.books, files.maths))
