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
    from forerun.core.long_context import LongContextConfig
    from forerun.core.origin import Origin
    from forerun.core.request import Request
    from forerun.core.stats import Stats
    from forerun.core.tree import DraftTree
    from forerun.drafting.drafter import Drafter, NoDrafter
    from forerun.engine.batch import Batch
    from forerun.engine.conversation import Conversation
    from forerun.engine.engine import Engine
    from forerun.engine.result import Commit, GenerationInterrupted, GenerationResult
    from forerun.models.forward.gate import UnsupportedModelError
    from forerun.models.text.generation_options import GenerationOptions
    from forerun.models.text.grammar_limits import SchemaError
    from forerun.tensor_parallel.channel import ParallelError

__version__ = "0.1.0"

_HOMES = {
    "Batch": "engine.batch",
    "Commit": "engine.result",
    "Conversation": "engine.conversation",
    "DraftTree": "core.tree",
    "Drafter": "drafting.drafter",
    "Engine": "engine.engine",
    "GenerationInterrupted": "engine.result",
    "GenerationResult": "engine.result",
    "GenerationOptions": "models.text.generation_options",
    "NoDrafter": "drafting.drafter",
    "Origin": "core.origin",
    "Request": "core.request",
    "ParallelError": "tensor_parallel.channel",
    "SchemaError": "models.text.grammar_limits",
    "LongContextConfig": "core.long_context",
    "Stats": "core.stats",
    "UnsupportedModelError": "models.forward.gate",
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
    "GenerationOptions",
    "GenerationResult",
    "LongContextConfig",
    "NoDrafter",
    "Origin",
    "ParallelError",
    "Request",
    "SchemaError",
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
