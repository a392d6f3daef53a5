"""Texts to continue, for models without chat training: seeded tasks, among them the bundled models' own kinds."""

from __future__ import annotations

import functools
from random import Random

from benchmarks.tasks.task_prompts import LackingError, Tasks
from benchmarks.training import tasks
from benchmarks.training.tasks import Material

SEED = "bench"
KINDS = {"copy": "quote", "json": "table", "rag": "rag", "code": "code", "maths": "maths", "prose": "prose"}
"""Each task's name in the tables, and in ``benchmarks.training.tasks``."""
TRIES = 50  # most draws for each prompt: of n equally likely ones, a prompt is missed by a chance of n in e^50
NEEDED = {"maths": "--maths", "prose": "--books", "code": "Python's own sources"}


def continuations(material: Material) -> Tasks:
    return {name: functools.partial(_draw, name, material) for name in KINDS}


def _draw(name: str, material: Material, count: int) -> list[str]:
    """Return ``count`` different prompts: warm drafters must not have seen a measured one."""
    kind = KINDS[name]
    if kind in NEEDED and not getattr(material, kind):
        raise LackingError(f"needs a text for {kind} ({NEEDED[kind]})")
    found: dict[str, None] = {}
    for i in range(TRIES * count):
        if len(found) == count:
            break
        found[tasks.make(kind, Random(f"{SEED}/{name}/{i}"), material).prompt] = None
    if len(found) < count:
        few = f"{name} has {len(found)} different prompts and {count} are needed"
        raise ValueError(f"{few}; lower --prompts or --warm-prompts")
    return list(found)
