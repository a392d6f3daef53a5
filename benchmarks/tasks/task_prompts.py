"""From tasks to jobs: a job has prompts to measure, and other prompts of its task for warm drafters.

Tasks are functions by name that draw prompts: ``questions`` for chat models, ``continuations`` for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.bench.prompts_file import Prompt, check_length
from forerun.bench.rounds import PromptSet

Draw = Callable[[int], Sequence[Prompt]]  # gives the first n prompts of a task; the same at every call
Tasks = Mapping[str, Draw]


class LackingError(Exception):
    """A task needs an input that was not given; the message says which."""


@dataclass(frozen=True)
class Counts:
    """Prompts of a task to measure, further ones for warm drafters, and new tokens per prompt."""

    prompts: int
    warm: int
    new_tokens: int


def check_names(names: Iterable[str], tasks: Tasks) -> None:
    """Raise ValueError for an unknown task."""
    for name in names:
        if name not in tasks:
            raise ValueError(f"task is {name!r}; known are {', '.join(tasks)}")


def build_jobs(
    names: Sequence[str], tasks: Tasks, encode: Callable[[Prompt], list[int]], counts: Counts,
    positions: int | None = None,
) -> tuple[list[PromptSet], dict[str, str]]:  # fmt: skip
    """Return the jobs that can be built, and why the others cannot; raise ValueError for an unknown name, or a prompt
    too long for the model's ``positions``."""
    check_names(names, tasks)
    jobs: list[PromptSet] = []
    skipped: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            ids = [encode(prompt) for prompt in tasks[name](counts.prompts + counts.warm)]
        except LackingError as lacking:
            skipped[name] = str(lacking)
            continue
        for number, tokens in enumerate(ids, 1):
            try:
                check_length(len(tokens), positions, counts.new_tokens)
            except ValueError as error:
                raise ValueError(f"task {name}, prompt {number}: {error}; leave the task out with --task") from None
        jobs.append(PromptSet(name, ids[: counts.prompts], ids[counts.prompts :], counts.new_tokens))
    return jobs, skipped
