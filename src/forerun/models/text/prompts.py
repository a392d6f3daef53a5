"""Turn prompts of any form into token ids.

Conversations go through the tokenizer's chat template, which writes all special tokens, so none are added.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, TypeGuard

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all tokens and their ids, equal for tokenizers whose ids mean the same."""
    tokens = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.blake2b(json.dumps(tokens).encode(), digest_size=16).hexdigest()


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Encode a text of any length, without special tokens."""
    return [int(token) for token in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def compiled_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return a copy of the tokenizer's compiled part, if any, without the truncation and padding of its file."""
    backend = copy(getattr(tokenizer, "backend_tokenizer", None))
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
    return backend


Messages = Sequence[Mapping[str, Any]]
"""The turns of a conversation, oldest first: ``{"role": "user", "content": "..."}``."""
REQUIRED = ("role", "content")
ANSWERER = "assistant"
RESERVED_VARIABLES = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
"""Names that a chat template's own variables cannot have."""


def is_conversation(prompt: Any) -> TypeGuard[Messages]:
    """Return whether a prompt is a conversation: a list with at least one message."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return not isinstance(next(iter(prompt), 0), int) and any(isinstance(message, Mapping) for message in prompt)


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Return whether this tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


class TemplateError(ValueError):
    """The chat template rejects a conversation."""


def check_messages(messages: Messages, continued: bool = False) -> None:
    """Reject anything but a conversation that waits for an answer, or with ``continued`` for the rest of its last turn.

    Raises:
        ValueError: for no messages, a message without role or content, or an answer as the last message.
        TypeError: for a message, key, role or content of a wrong type.
    """
    if not len(messages):
        raise ValueError("there is no message")
    for place, message in enumerate(messages):
        _check_message(f"message {place}", message)
    if messages[-1]["role"] == ANSWERER and not continued:
        raise ValueError(f"the last message is the {ANSWERER}'s; it must be from another role, to be answered")


def apply_template(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    continued: bool = False,
) -> list[int]:
    """Encode a conversation, up to where the answer starts.

    Args:
        tools: JSON descriptions of functions, for the template.
        options: further variables of the template.
        continued: whether the answer continues the last turn, which is the assistant's.

    Raises:
        ValueError: as from ``check_messages``; without a tokenizer or a chat template; or if the template raises.
        TypeError: as from ``check_messages``.
    """
    encoded = _applied(messages, tokenizer, tools, options, True, continued)
    return [int(token) for token in encoded["input_ids"]]


def encodes_messages(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer encodes messages itself, not from the text that its chat template writes."""
    return type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template


def rendered(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    continued: bool = False,
) -> str:
    """Return the text whose token ids ``apply_template`` returns."""
    return str(_applied(messages, tokenizer, tools, options, False, continued))


def _applied(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    tokenize: bool,
    continued: bool,
) -> Any:
    check_messages(messages, continued)
    if tokenizer is None:
        raise ValueError("the prompt is messages, and there is no tokenizer; pass tokenizer= or token ids")
    if not has_template(tokenizer):
        raise ValueError("the prompt is messages, and the tokenizer has no chat template; pass text instead")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tokenize=tokenize,
            **(options or {}),
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise TemplateError(f"the chat template refuses these messages: {error}") from error


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise TypeError(f"{name} is {type(message).__name__}; it must be a dict with {' and '.join(REQUIRED)}")
    wrong = next((key for key in message if not isinstance(key, str)), None)
    if wrong is not None:
        raise TypeError(f"{name} has the key {wrong!r}; keys are text")
    for key in REQUIRED:
        if key not in message:
            raise ValueError(f"{name} has no {key!r}; it has {', '.join(map(repr, message)) or 'no keys'}")
        if not isinstance(message[key], str):
            raise TypeError(f"the {key} of {name} is {type(message[key]).__name__}; it must be text")
    if not message["role"]:
        raise ValueError(f"the role of {name} is empty; it must be user, system, {ANSWERER} or what the template knows")


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
    """Return the token ids of each prompt, without padding.

    Raises:
        ValueError: for no prompts, text without a tokenizer, messages without a chat template or malformed, or a mask
            of another shape.
        TypeError: for anything that is not a prompt, or messages mixed with other prompts.
        NotImplementedError: for a tokenizer's output with more than ids and their mask, such as pictures.
    """
    if isinstance(prompts, Mapping):
        if "input_ids" not in prompts:
            raise TypeError(
                f"the prompt is a mapping with {', '.join(map(repr, prompts)) or 'no keys'}; a tokenizer's output has "
                "'input_ids', and messages are a list"
            )
        _check_others(prompts)
        own = prompts.get("attention_mask")
        return encode(prompts["input_ids"], tokenizer, attention_mask if own is None else own)
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


def _check_others(given: Mapping[str, Any]) -> None:
    """Reject inputs that a model would read besides the ids; all-zero token types are ignored."""
    kinds = given.get("token_type_ids")
    plain = kinds is None or not torch.as_tensor(kinds).any()
    allowed = {"input_ids", "attention_mask"} | ({"token_type_ids"} if plain else set())
    if others := sorted(name for name in given.keys() - allowed if given[name] is not None):
        raise NotImplementedError(
            f"the prompt has {', '.join(others)}: Forerun passes only input_ids and attention_mask to the model"
        )


def encode_prediction(prediction: Any, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the token ids of an expected answer, without special tokens. Raise ValueError for text without a
    tokenizer, or an id below 0; TypeError for anything but text or token ids."""
    if isinstance(prediction, str):
        if tokenizer is None:
            raise ValueError("the prediction is text and there is no tokenizer; pass tokenizer= or token ids")
        return text_ids(tokenizer, prediction)
    if not isinstance(prediction, Sequence) or not all(isinstance(token, int) for token in prediction):
        raise TypeError(f"prediction is {type(prediction).__name__}; it must be text or a list of token ids")
    if min(prediction, default=0) < 0:
        raise ValueError(f"prediction has the token id {min(prediction)}; ids are 0 or more")
    return list(prediction)


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
            raise TypeError(f"prompt {place} is {kind} and others are messages; a batch must be all messages or none")
        try:
            check_messages(conversation)
        except (TypeError, ValueError) as error:
            raise type(error)(f"in conversation {place}, {error}") from None
    return [apply_template(conversation, tokenizer) for conversation in conversations]


def _from_lists(prompts: Any, mask: Any) -> list[list[int]]:
    mask_rows = mask.tolist() if isinstance(mask, torch.Tensor) else list(mask)
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("an attention_mask is for token ids, and the prompt is text or empty")
    rows, keeps = ([prompts], [mask_rows]) if isinstance(prompts[0], int) else (list(prompts), mask_rows)
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
