"""From the bytes that came to a text, the moments at which it grew, and what the server says it used."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.server.client import Reply
from benchmarks.server.load_requests import LoadRequest

SHOWN = 200
"""The most characters of an error that a report quotes."""


@dataclass(frozen=True)
class Answer:
    """A reply, understood.

    Attributes:
        request: the request.
        text: the answer.
        sent, ended: by ``time.perf_counter``.
        grew: when new text came. Chunks that came together are one: nobody sees the time between them.
        usage: as the server told; empty if it told none.
        error: why it is no whole answer, or None.
    """

    request: LoadRequest
    text: str
    sent: float
    ended: float
    grew: Sequence[float]
    usage: dict[str, Any]
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return int(self.usage.get("completion_tokens", 0))

    @property
    def first(self) -> float:
        """Seconds to the first text; to the end, if there is no text."""
        return (self.grew[0] if self.grew else self.ended) - self.sent

    @property
    def seconds(self) -> float:
        """From end to end."""
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between moments at which text came."""
        return [after - before for before, after in pairwise(self.grew)]

    @property
    def each(self) -> float | None:
        """Seconds a token, after the first text; None for an answer of less than two tokens."""
        return (self.ended - self.grew[0]) / (self.tokens - 1) if self.tokens > 1 and self.grew else None

    @property
    def digest(self) -> str | None:
        """Names the text; None for one that is not whole."""
        return None if self.error else hashlib.sha256(self.text.encode()).hexdigest()[:16]


def understand(reply: Reply) -> Answer:
    """What a reply says."""
    parts, grew, usage, done, error = list[str](), list[float](), dict[str, Any](), False, _failure(reply)
    for at, event in events(reply.reads) if error is None else ():
        if "error" in event:
            error = _short(event["error"])
            break
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            done = done or choice.get("finish_reason") is not None
            if new := choice.get("text") or (choice.get("delta") or {}).get("content"):
                parts.append(new)
                if not grew or grew[-1] != at:
                    grew.append(at)
    if error is None and not done:
        error = "the stream ended before the answer did"
    return Answer(reply.request, "".join(parts), reply.sent, reply.ended, grew, usage, error)


def events(reads: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """The server-sent events but for comments, each with the time at which the last of it came."""
    rest = b""
    for at, part in reads:
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            told = event.removeprefix(b"data:").strip()
            if told and told != b"[DONE]" and not told.startswith(b":"):
                yield at, json.loads(told)


def _failure(reply: Reply) -> str | None:
    if reply.error is not None:
        return reply.error
    if reply.status != 200:
        return f"status {reply.status}: {_short(b''.join(part for _, part in reply.reads).decode(errors='replace'))}"
    return None


def _short(told: Any) -> str:
    return " ".join(str(told).split())[:SHOWN]
