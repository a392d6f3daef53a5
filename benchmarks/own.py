"""The user's own prompts: a file of JSON lines, checked completely before any work."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chat import Encoder, Prompt
from forerun.models.text.chat_template import check_messages

SHOWN = 5
"""The most wrong lines that an error lists."""


@dataclass(frozen=True)
class Line:
    """One prompt of the file; ``number`` is its line, from 1."""

    number: int
    task: str
    prompt: Prompt


def read(file: Path) -> list[Line]:
    """The prompts of ``{"task": ..., "prompt": ...}`` or ``{"task": ..., "messages": [{role, content}, ...]}`` lines.

    Other keys and blank lines are ignored.

    Raises:
        ValueError: with the wrong lines, or if the file has no prompt.
    """
    lines: list[Line] = []
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


def encode(file: Path, lines: Iterable[Line], encoder: Encoder, positions: int | None, new: int) -> list[list[int]]:
    """The token ids of each prompt.

    Args:
        file: named in errors.
        lines: of the file.
        encoder: of the model.
        positions: the model's, or None if there is no limit.
        new: tokens to generate after each prompt.

    Raises:
        ValueError: with the lines that the chat template refuses or that are too long.
    """
    found: list[list[int]] = []
    wrong: list[str] = []
    for line in lines:
        try:
            ids = encoder(line.prompt)
            check_length(len(ids), positions, new)
            found.append(ids)
        except ValueError as error:
            wrong.append(f"line {line.number}: {error}")
    _refuse(file, wrong)
    return found


def check_length(tokens: int, positions: int | None, new: int) -> None:
    """Refuse a prompt that leaves no room for the tokens to generate.

    Raises:
        ValueError: with the lengths.
    """
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
        more = f"; and {len(wrong) - SHOWN} more lines" if len(wrong) > SHOWN else ""
        raise ValueError(f"--prompts-file {file}: {'; '.join(wrong[:SHOWN])}{more}")


def _parse(number: int, text: str) -> Line:
    try:
        row = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"is {_kind(row)}; it must be an object with task, and prompt or messages")
    if "task" not in row:
        raise ValueError("has no task")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError(f"has {'both' if 'prompt' in row else 'neither'} of prompt and messages; give one of them")
    task = _text("task", row["task"])
    return Line(number, task, _text("prompt", row["prompt"]) if "prompt" in row else _messages(row["messages"]))


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
    found = names.get(type(value), "a number")
    return "an empty list" if value == [] else found
