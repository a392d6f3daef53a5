"""Prefill prompts before clients send them: JSON lines with ``messages``, each like the body of a chat."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.server.admission import FairShare
from forerun.server.api_errors import ApiError
from forerun.server.bodies import parsed
from forerun.server.chat_schema import ChatRequest
from forerun.server.middleware import HeldBytes

if TYPE_CHECKING:
    from forerun.server.service import Service

log = logging.getLogger(__name__)

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson")
"""Names of files with JSON lines; all others are plain text."""


@dataclass(frozen=True)
class WarmPrompt:
    """A conversation to prefill, and its place in a file."""

    fields: dict[str, Any]
    file: Path
    line: int

    def request(self, model: str) -> ChatRequest:
        """Make a chat of one token that is not indexed; raise ValueError, with file and line, for a wrong field."""
        namespace = {"namespace": self.fields["namespace"]} if "namespace" in self.fields else {}
        fields = {name: value for name, value in self.fields.items() if name not in ("namespace", "model", "stream")}
        own = {"model": model, "max_tokens": 1, "forerun": {**namespace, "drafter": "none"}}
        try:
            return parsed(json.dumps({**fields, **own}).encode(), ChatRequest, model)[0]
        except ApiError as error:
            raise ValueError(f"{self.file}:{self.line} is no prompt of a chat: {error.message}") from None


def warm_prompts(files: Iterable[Path]) -> Iterator[WarmPrompt]:
    """Yield the prompts of files; raise ValueError for a line that is not JSON."""
    for file in files:
        if file.suffix in JSON_LINES_SUFFIXES:
            for number, row in json_rows(file):
                if is_prompt(row):
                    yield WarmPrompt(row, file, number)


def is_prompt(row: Any) -> bool:
    """Return whether a line is a prompt to prefill, rather than text to index."""
    return isinstance(row, dict) and "messages" in row


async def prefill_prompts(service: Service, prompts: Iterable[WarmPrompt], tenants: Iterable[str]) -> None:
    """Prefill prompts for all tenants, one by one, as requests of theirs; log failures."""
    share = FairShare(float("inf"))
    for prompt in prompts:
        for tenant in tenants:
            place = f"{prompt.file}:{prompt.line}"
            try:
                body = prompt.request(service.settings.served_name)
                call = await service.call(body, tenant, place, HeldBytes(share, tenant))
                await call.start(tenant, None)
                async for _ in call:
                    pass
            except (ApiError, ValueError) as error:
                log.warning("%s was not prefilled: %s", place, error)
                continue
            usage, _ = call.figures()
            log.info("%s was prefilled: %s tokens", place, f"{usage['prompt_tokens']:,}")


def json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield a file's JSON lines with their numbers; raise ValueError, with file and line, for a wrong one."""
    for number, line in text_lines(file):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}:{number} is no JSON: {error}") from None


def text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield a file's lines with their numbers; raise ValueError, with file and line, if one is not UTF-8."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{file}:{number} is not UTF-8 text (byte {error.start} of the line)") from None
