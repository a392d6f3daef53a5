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
    from forerun.commit import Commit
    from forerun.conversation import Conversation
    from forerun.drafters.base import Drafter, NoDrafter
    from forerun.engine import Engine
    from forerun.model.gate import UnsupportedModelError
    from forerun.result import GenerationInterrupted, GenerationResult
    from forerun.settings import Settings
    from forerun.stats import Stats
    from forerun.tree import DraftTree

__version__ = "0.1.0"

_HOMES = {
    "Commit": "commit",
    "Conversation": "conversation",
    "DraftTree": "tree",
    "Drafter": "drafters.base",
    "Engine": "engine",
    "GenerationInterrupted": "result",
    "GenerationResult": "result",
    "NoDrafter": "drafters.base",
    "Settings": "settings",
    "Stats": "stats",
    "UnsupportedModelError": "model.gate",
    "custom_generate": "api",
    "generate": "api",
}

__all__ = [
    "Commit",
    "Conversation",
    "DraftTree",
    "Drafter",
    "Engine",
    "GenerationInterrupted",
    "GenerationResult",
    "NoDrafter",
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
