"""The bundled pair of small models, `target` and `draft`: what the demo, the tests and the first benchmark run on.

The models, the recipe that trains them, their evaluation and the synthetic tasks behind all three live here; see
MODEL_CARD.md. Importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

__all__ = ["DemoPrompt", "bundled", "demo_prompts"]

_HERE = Path(__file__).parent


class DemoPrompt(TypedDict):
    """A prompt for a demonstration; generating `max_new_tokens` is enough for a natural end, where there is one."""

    kind: str
    title: str
    prompt: str
    max_new_tokens: int


def bundled(name: Literal["target", "draft"]) -> Path:
    """Return the folder of a bundled model, to be loaded with transformers' `from_pretrained`.

    Raises
    ------
    ValueError
        If `name` is neither 'target' nor 'draft'.
    FileNotFoundError
        If the weights are not there, as in a source tree in which they have not been trained.
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
    """Return one prompt of each kind (rag, code, json, maths, prose), none of which the models were trained on."""
    prompts: list[DemoPrompt] = json.loads((_HERE / "demo.json").read_text(encoding="utf-8"))
    return prompts
