"""The bundled pair of small models, `target` and `draft`, for the demo and the tests; see MODEL_CARD.md.

Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

__all__ = ["DemoPrompt", "bundled", "demo_prompts"]

_HERE = Path(__file__).parent


class DemoPrompt(TypedDict):
    """A demo prompt. If its answer has a natural end, `max_new_tokens` tokens reach it."""

    kind: str
    title: str
    prompt: str
    max_new_tokens: int


def bundled(name: Literal["target", "draft"]) -> Path:
    """Return the folder of a bundled model, for transformers' `from_pretrained`.

    Raises ValueError for another name, and FileNotFoundError if the weights have not been trained.
    """
    if name not in ("target", "draft"):
        raise ValueError(f"name must be 'target' or 'draft', not {name!r}")
    folder = _HERE / "weights" / name
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"the bundled model {name!r} has no weights in {folder}; train them with: make reference"
        )
    return folder


def demo_prompts() -> list[DemoPrompt]:
    """Return one prompt of each kind (rag, code, json, maths, prose); the models were trained on none of them."""
    prompts: list[DemoPrompt] = json.loads((_HERE / "demo.json").read_text(encoding="utf-8"))
    return prompts
