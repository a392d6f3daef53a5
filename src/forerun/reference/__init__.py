"""The bundled pair of small models, `target` and `draft`, used by the demo, the tests and the first benchmark.

This package has the models, the recipe that trains them, their evaluation, and the synthetic tasks for all of these;
see MODEL_CARD.md. Importing it imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

__all__ = ["DemoPrompt", "bundled", "demo_prompts"]

_HERE = Path(__file__).parent


class DemoPrompt(TypedDict):
    """A prompt for a demonstration. If its answer has a natural end, `max_new_tokens` tokens reach it."""

    kind: str
    title: str
    prompt: str
    max_new_tokens: int


def bundled(name: Literal["target", "draft"]) -> Path:
    """The folder of a bundled model, to be loaded with transformers' `from_pretrained`.

    Raises:
        ValueError: if `name` is neither 'target' nor 'draft'.
        FileNotFoundError: if the weights are missing, as in a source tree where they have not been trained.
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
    """One prompt of each kind (rag, code, json, maths, prose), none of which the models were trained on."""
    prompts: list[DemoPrompt] = json.loads((_HERE / "demo.json").read_text(encoding="utf-8"))
    return prompts
