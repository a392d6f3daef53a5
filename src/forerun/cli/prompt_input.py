"""Prompts from the command line, from files and from stdin."""

from __future__ import annotations

import sys
from pathlib import Path


def read_prompt(file: str) -> str:
    """Read a file, or stdin for ``-``, without the final line break; raise ValueError if it is empty or not UTF-8."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {file} is not UTF-8 text (byte {error.start})") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise ValueError(f"prompt file {file} is empty")
    return text


def check_text(text: str, name: str = "the prompt") -> str:
    """Return ``text``; raise a ValueError if it cannot be encoded, as an argument with broken bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not UTF-8 text (character {error.start + 1})") from None
    return text


def read_prompts(given: list[str] | None, files: list[str] | None) -> list[str]:
    """Return the prompts given as arguments, then those in files."""
    return [*map(check_text, given or []), *(read_prompt(file) for file in files or [])]
