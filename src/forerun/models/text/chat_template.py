"""From conversations to token ids, by the tokenizer's chat template.

A template writes all special tokens itself, including the first one, so none are added to its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
"""The turns of a conversation, oldest first: ``{"role": "user", "content": "..."}``."""
REQUIRED = ("role", "content")
ANSWERER = "assistant"


def is_conversation(prompt: Any) -> TypeGuard[Messages]:
    """Whether a prompt is a conversation: a list with at least one message."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return False
    return not isinstance(next(iter(prompt), 0), int) and any(isinstance(message, Mapping) for message in prompt)


def has_template(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether this tokenizer can turn conversations into text."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_messages(messages: Messages) -> None:
    """Refuse anything but a conversation that waits for an answer.

    Raises:
        ValueError: for no messages, a message without role or content, or an answer as the last message.
        TypeError: for a message, key, role or content of a wrong type.
    """
    if not len(messages):
        raise ValueError("there is no message")
    for place, message in enumerate(messages):
        _check_message(f"message {place}", message)
    if messages[-1]["role"] == ANSWERER:
        raise ValueError(f"the last message is the {ANSWERER}'s; the last one must be another's, which it answers")


def apply_template(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    text: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins.

    Args:
        messages: the turns, oldest first.
        tokenizer: has the chat template.
        tools: descriptions of functions, as JSON, that the template tells the model of; None for none.
        text: the conversation as ``rendered`` returned it, so that the template runs once.
        options: further variables of the template.

    Raises:
        ValueError: as from ``check_messages``; without a tokenizer or a chat template; or if the template refuses.
        TypeError: as from ``check_messages``.
    """
    own = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
    if text is not None and own:  # it does the same; other tokenizers may encode messages in another way
        encoded = tokenizer(text, add_special_tokens=False)  # type: ignore[misc]
    else:
        encoded = _applied(messages, tokenizer, tools, options, True)
    return [int(token) for token in encoded["input_ids"]]


def rendered(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation, whose token ids ``apply_template`` gives; see there."""
    return str(_applied(messages, tokenizer, tools, options, False))


def _applied(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase | None,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    tokenize: bool,
) -> Any:
    check_messages(messages)
    if tokenizer is None:
        raise ValueError("the prompt is messages and there is no tokenizer; pass tokenizer= or token ids")
    if not has_template(tokenizer):
        raise ValueError("the prompt is messages and the tokenizer has no chat template; give text instead")
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else [dict(tool) for tool in tools],
            add_generation_prompt=True,
            tokenize=tokenize,
            **(options or {}),
        )
    except Exception as error:  # a template is a program, and may raise anything
        raise ValueError(f"the chat template refuses these messages: {error}") from error


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
