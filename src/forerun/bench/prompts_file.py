"""Prompts as token ids, from a user's file of JSON lines, checked completely before any work."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.bench.rounds import PromptSet
from forerun.models.text.prompts import Messages, apply_template, check_messages, has_template

Prompt = str | Messages
"""A string, or the messages of a chat, each with ``role`` and ``content``."""
WRONG_LINES_SHOWN = 5


class TemplateEncoder:
    """An encoder of prompts as token ids. If the tokenizer has a chat template, a string becomes one user message, and
    the template writes all special tokens. Else, or if ``raw``, the tokenizer adds its own, unless a string starts with
    them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False) -> None:
        self.tokenizer = tokenizer
        self.raw = raw
        self.chats = has_template(tokenizer) and not raw

    def __call__(self, prompt: Prompt) -> list[int]:
        """Encode a prompt; raise ValueError for messages that no template accepts, or for a prompt without tokens."""
        if self.chats:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return apply_template(messages, self.tokenizer)
        if not isinstance(prompt, str):
            reason = "--raw turns it off" if self.raw else "this model's tokenizer has none"
            raise ValueError(f"messages need a chat template, and {reason}; give a prompt instead")
        begins = self.tokenizer.bos_token
        ids = self._ids(prompt, special=not (begins and prompt.startswith(begins)))
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def count(self, text: str) -> int:
        """Count the tokens of a string, without template and special tokens."""
        return len(self._ids(text, special=False))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]


@dataclass(frozen=True)
class PromptLine:
    """One prompt of the file; ``number`` is its line, from 1."""

    number: int
    task: str
    prompt: Prompt


def read_prompts_file(file: Path) -> list[PromptLine]:
    """Read lines of ``{"task": ..., "prompt": ...}`` or ``{"task": ..., "messages": [{role, content}, ...]}``. Other
    keys and blank lines are ignored. Raise ValueError with the wrong lines, or if there is no prompt."""
    lines: list[PromptLine] = []
    wrong: list[str] = []
    for number, text in enumerate(_lines(file), 1):
        if text.strip():
            try:
                lines.append(_parse(number, text))
            except ValueError as error:
                wrong.append(f"line {number} {error}")
    _refuse(file, wrong)
    if not lines:
        raise ValueError(f"--prompts-file {file} is empty")
    return lines


def encode_lines(
    file: Path, lines: Iterable[PromptLine], encoder: TemplateEncoder, positions: int | None, new: int
) -> list[list[int]]:
    """Encode each prompt; raise ValueError with the lines that the chat template refuses, or that leave no room in
    ``positions`` (None for no limit) for ``new`` tokens."""
    encoded: list[list[int]] = []
    wrong: list[str] = []
    for line in lines:
        try:
            ids = encoder(line.prompt)
            check_length(len(ids), positions, new)
            encoded.append(ids)
        except ValueError as error:
            wrong.append(f"line {line.number}: {error}")
    _refuse(file, wrong)
    return encoded


def prompt_sets(
    lines: Sequence[PromptLine], ids: Sequence[list[int]], prompts: int | None, warm: int, new_tokens: int
) -> list[PromptSet]:
    """Make a prompt set for each task of the file, in its order, of up to ``prompts`` prompts (None for all) and
    ``warm`` further ones, whose answers warm drafters have indexed."""
    by_task: dict[str, list[list[int]]] = {}
    for line, tokens in zip(lines, ids, strict=True):
        by_task.setdefault(line.task, []).append(tokens)
    return [
        PromptSet(task, encoded[:prompts], encoded[len(encoded[:prompts]) :][:warm], new_tokens)
        for task, encoded in by_task.items()
    ]


def check_length(tokens: int, positions: int | None, new: int) -> None:
    """Raise ValueError if a prompt leaves no room for the tokens to generate."""
    if positions is not None and tokens + new > positions:
        raise ValueError(f"{tokens} tokens and {new} new ones are more than the model's {positions} positions")


def _lines(file: Path) -> list[str]:
    if not file.is_file():
        raise ValueError(f"--prompts-file is {file}; there is no such file")
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts-file {file} is not UTF-8 text (byte {error.start})") from None


def _refuse(file: Path, wrong: list[str]) -> None:
    if wrong:
        more = f"; and {len(wrong) - WRONG_LINES_SHOWN} more lines" if len(wrong) > WRONG_LINES_SHOWN else ""
        raise ValueError(f"--prompts-file {file}: {'; '.join(wrong[:WRONG_LINES_SHOWN])}{more}")


def _parse(number: int, text: str) -> PromptLine:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {_kind(row)}; it must be an object with task, and prompt or messages")
    if "task" not in row:
        raise ValueError("has no task")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"has {'both' if 'prompt' in row else 'neither'} of prompt and messages; give one of them")
    task = _text("task", row["task"])
    return PromptLine(number, task, _text("prompt", row["prompt"]) if "prompt" in row else _messages(row["messages"]))


def _messages(value: Any) -> Prompt:
    if not isinstance(value, list) or not value:
        raise ValueError(f"has messages that are {_kind(value)}; they must be a list of one or more")
    try:
        check_messages(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"has wrong messages: {error}") from None
    for message in value:
        _text("message", message["content"], empty=True)
    return value


def _text(name: str, value: Any, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a {name} that is {_kind(value)}; it must be text")
    if not value.strip() and not empty:
        raise ValueError(f"has a {name} without any text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has a {name} that is not Unicode text (character {error.start + 1})") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    name = names.get(type(value), "a number")
    return "an empty list" if value == [] else name
