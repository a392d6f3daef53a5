"""Texts to continue, for models without chat training: seeded tasks, among them the bundled models' own kinds."""

from __future__ import annotations

import functools
from random import Random

from forerun.bench.prompts import LackingError, Tasks
from forerun.reference import tasks
from forerun.reference.tasks import Material

SEED = "bench"
KINDS = {"copy": "quote", "json": "table", "rag": "rag", "code": "code", "maths": "maths", "prose": "prose"}
"""Each task's name in the tables, and in ``forerun.reference.tasks``."""
NEEDED = {"maths": "--maths", "prose": "--books", "code": "Python's own sources"}


def continuations(material: Material) -> Tasks:
    """The tasks by name.

    Args:
        material: texts that no model here was trained on.
    """
    return {name: functools.partial(_draw, name, material) for name in KINDS}


def _draw(name: str, material: Material, count: int) -> list[str]:
    kind = KINDS[name]
    if kind in NEEDED and not getattr(material, kind):
        raise LackingError(f"needs a text for {kind} ({NEEDED[kind]})")
    return [tasks.make(kind, Random(f"{SEED}/{name}/{i}"), material).prompt for i in range(count)]
