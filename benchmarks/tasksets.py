"""The set of tasks for a model: questions for chat models, texts to continue for others."""

from __future__ import annotations

from benchmarks.chat import Encoder
from benchmarks.continuations import continuations
from benchmarks.prompts import Tasks
from benchmarks.questions import Files, questions
from benchmarks.reference import material


def tasks_for(encoder: Encoder, files: Files) -> Tasks:
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
