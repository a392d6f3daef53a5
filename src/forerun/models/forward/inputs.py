"""Checks of a model's inputs: token ids of its vocabulary, at positions that it has, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, QuantizedCache

DERIVED_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep"})
"""Inputs that transformers itself derives from token ids and passes to every generate function. It adds an empty cache,
whose name differs between versions and models: ``past_key_values``, ``cache_params``, ``cache``."""


def check_inputs(ids: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Refuse inputs that would change the text, because Forerun does not pass them on to the model.

    Args:
        ids: token ids, ``[B, t]``.
        given: the model's other inputs, as transformers prepared them.

    Returns:
        The attention mask, ``[B, t]``: 1 where there is text, 0 where there is padding.

    Raises:
        NotImplementedError: for other inputs, positions that are not those of the text, or a cache that holds text.
    """
    caches = {name: value for name, value in given.items() if isinstance(value, Cache)}
    allowed = DERIVED_INPUTS | caches.keys()
    others = sorted(name for name, value in given.items() if name not in allowed and not _nothing(value))
    if others:
        raise NotImplementedError(
            f"{', '.join(others)}: Forerun reads token ids and an attention_mask and hands nothing else to the model"
        )
    for name, cache in caches.items():
        _check_cache(name, cache)
    mask = given.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = given.get("position_ids")
    if positions is not None and not _natural(positions, mask):
        raise NotImplementedError("position_ids: Forerun counts the tokens of each text from 0, and takes nothing else")
    return mask


def _check_cache(name: str, cache: Cache) -> None:
    """Refuse a cache that holds text, or that would change it."""
    if isinstance(cache, QuantizedCache):
        raise NotImplementedError(f"{name} is a QuantizedCache, which changes the text; Forerun's are exact")
    if not cache.layers:
        return
    if all(cache.is_linear):
        if cache.has_previous_state():
            raise NotImplementedError(f"{name} holds states: Forerun keeps caches of its own; give all the text")
    elif tokens := cache.get_seq_length():
        raise NotImplementedError(f"{name} holds {tokens} tokens: Forerun keeps caches of its own; give all the text")


def _natural(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether positions ``[B or 1, t]`` count the text from 0; models of pictures have several, which all have to."""
    if positions.dim() == 3:
        return all(_natural(each, mask) for each in positions)
    if positions.dim() != 2 or positions.shape[1] != mask.shape[1]:
        return False
    return bool(((positions == mask.cumsum(-1) - 1) | (mask == 0)).all())


def check_prompt(model: PreTrainedModel, prompt: Sequence[int]) -> None:
    """Refuse a prompt that the model cannot read."""
    if not len(prompt):
        raise ValueError("the prompt is empty; at least one token is needed")
    rows = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for token in prompt if not 0 <= token < rows), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is out of range: this model's vocabulary has {rows} tokens")


def check_length(model: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
    """Refuse a text that would be longer than the model's positions."""
    limit = position_limit(model)
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise ValueError(
            f"the prompt's {prompt_length} tokens and max_new_tokens={max_new_tokens} exceed "
            f"the model's {limit} positions; shorten the prompt or generate at most {max(0, limit - prompt_length)}"
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """The longest text the model can take, or None if its configuration sets no limit.

    Rotary embeddings that change with the length of the text do not change up to this length.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length all keys would change
        return int(rope["original_max_position_embeddings"])
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def learned_positions(model: PreTrainedModel) -> int | None:
    """How many positions have a learned vector; None for rotary positions, which have no end."""
    config = model.config.get_text_config(decoder=True)
    return None if getattr(config, "rope_parameters", None) else position_limit(model)


def _nothing(value: Any) -> bool:
    """Whether an input is empty: None, or a table without entries, as vision models get with plain text."""
    return value is None or (isinstance(value, Mapping) and all(_nothing(each) for each in value.values()))
