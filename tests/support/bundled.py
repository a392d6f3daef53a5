"""The bundled model, loaded once, and tested once by the engines of it; and grammars for its tokenizer."""

import copy
import functools
from typing import Any

import pytest
from transformers import PreTrainedModel

from forerun.models.loading.load import load
from forerun.models.text.grammar import Grammars


def bundled() -> tuple[PreTrainedModel, Any]:
    """The model, which nothing may change, and a tokenizer of one's own."""
    model, tokenizer = _loaded()
    return model, copy.deepcopy(tokenizer)


def allows(tokenizer: Any, response_format: Any, text: str) -> bool:
    """Whether a text follows a grammar, to its end."""
    pytest.importorskip("llguidance")
    matcher = _grammars(tokenizer, len(tokenizer)).of(response_format).matcher.deep_copy()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@functools.lru_cache(1)
def _grammars(tokenizer: Any, size: int) -> Grammars:
    return Grammars(tokenizer, size, [])


@functools.cache
def _loaded() -> tuple[PreTrainedModel, Any]:
    return load("bundled", device="cpu")
