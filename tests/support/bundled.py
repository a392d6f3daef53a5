"""The bundled model, loaded once, and tested once by the engines of it."""

import copy
import functools
from typing import Any

from transformers import PreTrainedModel

from forerun.models.loading.load import load


def bundled() -> tuple[PreTrainedModel, Any]:
    """The model, which nothing may change, and a tokenizer of one's own."""
    model, tokenizer = _loaded()
    return model, copy.deepcopy(tokenizer)


@functools.cache
def _loaded() -> tuple[PreTrainedModel, Any]:
    return load("bundled", device="cpu")
