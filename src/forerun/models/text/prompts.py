"""From prompts in any form that users have to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from forerun.models.text.chat_template import Messages, apply_template, check_messages, is_conversation

Prompts = (
    str
    | Sequence[str]
    | Sequence[int]
    | Sequence[Sequence[int]]
    | Messages
    | Sequence[Messages]
    | torch.Tensor
    | Mapping[str, Any]
)
"""Text, token ids, messages, several of any of them, a tensor ``[t]`` or ``[B, t]``, or a tokenizer's output."""


KINDS = "text, token ids, messages, a list of one of them, a tensor, or a tokenizer's output"


def encode(prompts: Prompts, tokenizer: PreTrainedTokenizerBase | None, attention_mask: Any = None) -> list[list[int]]:
    """Token ids of each prompt, without padding.

    Raises:
        ValueError: for no prompts, text without a tokenizer, messages without a chat template or in a wrong form, or a
            mask that does not fit.
        TypeError: for anything that is not a prompt, or messages mixed with other prompts.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise TypeError(
                f"the prompt is a mapping with {', '.join(map(repr, prompts)) or 'no keys'}; a tokenizer's output has "
                "'input_ids', and messages are a list"
            )
        return encode(prompts["input_ids"], tokenizer, prompts.get("attention_mask", attention_mask))
    if isinstance(prompts, torch.Tensor):
        return _from_tensor(prompts, attention_mask)
    if not hasattr(prompts, "__getitem__"):
        raise TypeError(f"the prompt is {prompts!r}; it must be {KINDS}")
    if attention_mask is not None:
        return _from_lists(prompts, attention_mask)
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        return [_encode_one(prompts, tokenizer)]
    if not len(prompts):
        raise ValueError("there is no prompt")
    if is_conversation(prompts):
        return [apply_template(prompts, tokenizer)]
    if any(map(is_conversation, prompts)):
        return _encode_conversations(prompts, tokenizer)
    return [_encode_one(prompt, tokenizer) for prompt in prompts]


def _encode_one(prompt: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text and there is no tokenizer; pass tokenizer= or token ids")
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    if isinstance(prompt, torch.Tensor):
        return [int(token) for token in prompt.tolist()]
    if isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        return list(prompt)
    raise TypeError(f"a prompt is text or a list of token ids, not {type(prompt).__name__}")


def _encode_conversations(conversations: Sequence[Any], tokenizer: PreTrainedTokenizerBase | None) -> list[list[int]]:
    for place, conversation in enumerate(conversations):
        if not is_conversation(conversation):
            kind = type(conversation).__name__
            raise TypeError(f"prompt {place} is {kind} and others are messages; all of a batch must be messages then")
        try:
            check_messages(conversation)
        except (TypeError, ValueError) as error:
            raise type(error)(f"in conversation {place}, {error}") from None
    return [apply_template(conversation, tokenizer) for conversation in conversations]


def _from_lists(prompts: Any, mask: Any) -> list[list[int]]:
    kept = mask.tolist() if isinstance(mask, torch.Tensor) else list(mask)
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("an attention_mask is for token ids, and the prompt is text or empty")
    rows, keeps = ([prompts], [kept]) if isinstance(prompts[0], int) else (list(prompts), kept)
    ids = [_encode_one(row, None) for row in rows]
    if [*map(len, keeps)] != [*map(len, ids)]:
        raise ValueError(f"attention_mask has rows of {[*map(len, keeps)]} and the ids of {[*map(len, ids)]}")
    return [[token for token, keep in zip(row, own, strict=True) if keep] for row, own in zip(ids, keeps, strict=True)]


def _from_tensor(ids: torch.Tensor, mask: torch.Tensor | None) -> list[list[int]]:
    ids = ids[None] if ids.dim() == 1 else ids
    if mask is None:
        return ids.tolist()
    mask = mask[None] if mask.dim() == 1 else mask
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask is {tuple(mask.shape)} and the ids are {tuple(ids.shape)}")
    return [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
