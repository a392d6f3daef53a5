"""Forerun: Hugging Face language models generate exactly the same text, faster.

``forerun.generate``, ``forerun.Engine`` and ``forerun.custom_generate`` (for ``model.generate``) share one engine.
Names are imported on first use, so importing the package does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.api import custom_generate as custom_generate
    from forerun.api import generate as generate
    from forerun.core.long_context import LongContextConfig as LongContextConfig
    from forerun.core.origin import Origin as Origin
    from forerun.core.request import Request as Request
    from forerun.core.stats import Stats as Stats
    from forerun.core.tree import DraftTree as DraftTree
    from forerun.decoding.level import Level as Level
    from forerun.decoding.row import Row as Row
    from forerun.decoding.source import Limit as Limit
    from forerun.decoding.source import Source as Source
    from forerun.engine.batch import Batch as Batch
    from forerun.engine.conversation import Conversation as Conversation
    from forerun.engine.engine import Engine as Engine
    from forerun.engine.result import Commit as Commit
    from forerun.engine.result import GenerationInterrupted as GenerationInterrupted
    from forerun.engine.result import GenerationResult as GenerationResult
    from forerun.models.forward.gate import UnsupportedModelError as UnsupportedModelError
    from forerun.models.loading.load import load as load
    from forerun.models.text.requests import GenerationOptions as GenerationOptions
    from forerun.models.text.schemas import SchemaError as SchemaError
    from forerun.tensor_parallel.channel import ParallelError as ParallelError

__version__ = "0.1.0"

_NAMES = {
    "api": ("custom_generate", "generate"),
    "core.long_context": ("LongContextConfig",),
    "core.origin": ("Origin",),
    "core.request": ("Request",),
    "core.stats": ("Stats",),
    "core.tree": ("DraftTree",),
    "decoding.level": ("Level",),
    "decoding.row": ("Row",),
    "decoding.source": ("Limit", "Source"),
    "engine.batch": ("Batch",),
    "engine.conversation": ("Conversation",),
    "engine.engine": ("Engine",),
    "engine.result": ("Commit", "GenerationInterrupted", "GenerationResult"),
    "models.forward.gate": ("UnsupportedModelError",),
    "models.loading.load": ("load",),
    "models.text.schemas": ("SchemaError",),
    "models.text.requests": ("GenerationOptions",),
    "tensor_parallel.channel": ("ParallelError",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(importlib.import_module(f"forerun.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
