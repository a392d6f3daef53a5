"""The bench's prompts: seeded tasks of every kind, none of which the bundled models were trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from forerun.bench.speed import Job
from forerun.reference import tasks
from forerun.reference.tasks import Material

SEED = "bench"
KINDS = {"copy": "quote", "json": "table", "rag": "rag", "code": "code", "maths": "maths", "prose": "prose"}
"""Task by its name in the tables, and in ``forerun.reference.tasks``."""


def build_jobs(
    names: Sequence[str],
    material: Material,
    encode: Callable[[str], list[int]],
    prompts: int,
    warm_prompts: int,
    max_new_tokens: int,
) -> tuple[list[Job], dict[str, str]]:
    """The jobs that can be built, and why the others cannot.

    Args:
        names: of ``KINDS``.
        material: held-out texts.
        encode: text to token ids.
        prompts: measured, per task.
        warm_prompts: of each task, which warm drafters have drafted the answers to.
        max_new_tokens: per prompt.

    Raises:
        ValueError: for an unknown name.
    """
    jobs: list[Job] = []
    skipped: dict[str, str] = {}
    for name in names:
        if name not in KINDS:
            raise ValueError(f"task is {name!r}; known are {', '.join(KINDS)}")
        if KINDS[name] in ("maths", "code", "prose") and not getattr(material, KINDS[name]):
            skipped[name] = f"needs a text for {KINDS[name]}"
            continue
        drawn = [tasks.make(KINDS[name], Random(f"{SEED}/{name}/{i}"), material) for i in range(prompts + warm_prompts)]
        ids = [encode(task.prompt) for task in drawn]
        jobs.append(Job(name, ids[:prompts], ids[prompts:], max_new_tokens))
    return jobs, skipped
