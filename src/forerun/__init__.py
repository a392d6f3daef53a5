"""Forerun: Hugging Face language models generate exactly the same text, faster.

``forerun.generate(model, prompts)``, ``forerun.Engine(model)`` and ``model.generate(..., custom_generate=
forerun.custom_generate)`` are three doors to one engine. Names are imported when first used, so that importing the
package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api import custom_generate, generate
    from forerun.core.settings import Settings
    from forerun.core.stats import Stats
    from forerun.core.tree import DraftTree
    from forerun.decoding.batch import Batch
    from forerun.decoding.commit import Commit
    from forerun.decoding.conversation import Conversation
    from forerun.decoding.engine import Engine
    from forerun.decoding.result import GenerationInterrupted, GenerationResult
    from forerun.drafters.base import Drafter, NoDrafter
    from forerun.model.gate import UnsupportedModelError
    from forerun.model.grammar import SchemaError
    from forerun.parallel.channel import ParallelError

__version__ = "0.1.0"

_HOMES = {
    "Batch": "decoding.batch",
    "Commit": "decoding.commit",
    "Conversation": "decoding.conversation",
    "DraftTree": "core.tree",
    "Drafter": "drafters.base",
    "Engine": "decoding.engine",
    "GenerationInterrupted": "decoding.result",
    "GenerationResult": "decoding.result",
    "NoDrafter": "drafters.base",
    "ParallelError": "parallel.channel",
    "SchemaError": "model.grammar",
    "Settings": "core.settings",
    "Stats": "core.stats",
    "UnsupportedModelError": "model.gate",
    "custom_generate": "api",
    "generate": "api",
}

__all__ = [
    "Batch",
    "Commit",
    "Conversation",
    "DraftTree",
    "Drafter",
    "Engine",
    "GenerationInterrupted",
    "GenerationResult",
    "NoDrafter",
    "ParallelError",
    "SchemaError",
    "Settings",
    "Stats",
    "UnsupportedModelError",
    "custom_generate",
    "generate",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forerun.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
