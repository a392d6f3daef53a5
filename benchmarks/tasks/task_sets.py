"""The set of tasks for a model: questions for chat models, texts to continue for others."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reporting.common_options import SourceOptions
from benchmarks.tasks.continuations import continuations
from benchmarks.tasks.questions import questions, read_questions
from benchmarks.tasks.task_prompts import Counts, Tasks, build_jobs
from benchmarks.training import material
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet
from forerun.cli.terminal import say


def jobs_for(
    names: Sequence[str] | None, sources: SourceOptions, encoder: TemplateEncoder, counts: Counts, positions: int | None
) -> tuple[list[PromptSet], dict[str, str]]:
    """Build the jobs of the named tasks, or of all; say which cannot be built, and raise if none can."""
    tasks = tasks_for(encoder, sources)
    jobs, skipped = build_jobs(names or list(tasks), tasks, encoder, counts, positions)
    for name, reason in skipped.items():
        say(f"skipped {name}: {reason}")
    if not jobs:
        raise ValueError(f"no task is left: {'; '.join(f'{task} {why}' for task, why in skipped.items())}")
    return jobs, skipped


def tasks_for(encoder: TemplateEncoder, sources: SourceOptions) -> Tasks:
    """Return the tasks by name; raise ValueError for a wrong file."""
    check_sources(sources)
    if encoder.chats:
        return questions(sources, encoder.count)
    if sources.code is not None:
        raise ValueError("--code is for models that chat; there is no chat template here, or --raw turns it off")
    return continuations(material.read_held_out(sources.books, sources.maths))


def check_sources(sources: SourceOptions) -> None:
    """Raise ValueError for a wrong file, with its option and line."""
    for option, file in (("--maths", sources.maths), ("--code", sources.code)):
        if file is not None and not read_questions(option, file):
            raise ValueError(f"{option} {file} is empty")
    if sources.books is not None and not any(sources.books.glob("*.txt")):
        raise ValueError(f"--books is {sources.books}; there is no such folder, or no .txt file in it")
