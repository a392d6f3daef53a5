"""Check a model's inputs: token ids in its vocabulary, within its positions, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel, QuantizedCache

DERIVED_INPUTS = frozenset({"attention_mask", "position_ids", "use_cache", "cache_position", "logits_to_keep"})
"""Inputs that transformers derives from token ids; its empty cache's name differs between versions and models."""


def check_inputs(ids: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    """Return the mask ``[B, t]``; raise NotImplementedError for unusual positions, a filled cache, or other inputs."""
    caches = {name: value for name, value in given.items() if isinstance(value, Cache)}
    allowed = DERIVED_INPUTS | caches.keys()
    others = sorted(name for name, value in given.items() if name not in allowed and not _nothing(value))
    if others:
        raise NotImplementedError(
            f"{', '.join(others)}: Forerun passes only token ids and an attention_mask to the model"
        )
    for name, cache in caches.items():
        _check_cache(name, cache)
    mask = given.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    positions = given.get("position_ids")
    if positions is not None and not _natural(positions, mask):
        raise NotImplementedError("position_ids: Forerun counts the tokens of each sequence from 0")
    return mask


def _check_cache(name: str, cache: Cache) -> None:
    if isinstance(cache, QuantizedCache):
        raise NotImplementedError(f"{name} is a QuantizedCache, which changes outputs; Forerun's are exact")
    if not cache.layers:
        return
    if all(cache.is_linear):
        if cache.has_previous_state():
            raise NotImplementedError(f"{name} holds states: Forerun keeps its own caches; pass the whole sequence")
    elif tokens := cache.get_seq_length():
        raise NotImplementedError(
            f"{name} holds {tokens} tokens: Forerun keeps its own caches; pass the whole sequence"
        )


def _natural(positions: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether positions ``[B or 1, t]`` count tokens from 0; models with pictures have several, and all must."""
    if positions.dim() == 3:
        return all(_natural(each, mask) for each in positions)
    if positions.dim() != 2 or positions.shape[1] != mask.shape[1]:
        return False
    return bool(((positions == mask.cumsum(-1) - 1) | (mask == 0)).all())


def check_prompt(model: PreTrainedModel, prompt: Sequence[int]) -> None:
    """Raise ``ValueError`` for an empty prompt, or a token id out of range."""
    if not len(prompt):
        raise ValueError("the prompt is empty; at least one token is needed")
    rows = model.get_input_embeddings().weight.shape[0]
    wrong = next((token for token in prompt if not 0 <= token < rows), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is out of range: this model's vocabulary has {rows} tokens")


def check_length(model: PreTrainedModel, prompt_length: int, max_new_tokens: int) -> None:
    """Raise ``ValueError`` for a sequence longer than the model's positions."""
    limit = position_limit(model)
    if limit is not None and prompt_length + max_new_tokens > limit:
        raise ValueError(
            f"the prompt's {prompt_length} tokens and max_new_tokens={max_new_tokens} exceed "
            f"the model's {limit} positions; shorten the prompt or generate at most {max(0, limit - prompt_length)}"
        )


def position_limit(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that the model supports, or None; up to it, rotary embeddings do not change."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # beyond this length all keys would change
        return int(rope["original_max_position_embeddings"])
    limit = getattr(config, "max_position_embeddings", None)
    return None if limit is None else int(limit)


def learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of learned position vectors; None for rotary positions."""
    config = model.config.get_text_config(decoder=True)
    return None if getattr(config, "rope_parameters", None) else position_limit(model)


def _nothing(value: Any) -> bool:
    """Return whether an input is None, or a table without entries, which vision models get with plain text."""
    return value is None or (isinstance(value, Mapping) and all(_nothing(each) for each in value.values()))
