"""What a server says to what was sent, byte for byte, and what is wrong with it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from support.malformed_requests import HOST, RawRequest

PATIENCE = 60.0
"""Seconds after which a server hangs."""
SILENCE = 1.0
"""Seconds after which a client that has sent half a request goes."""
RESPONSE_ENDS = ("response.completed", "response.incomplete", "message_stop", "error")
"""Types of the events that end a stream of ``/v1/responses``."""
SERVER_FAULTS = ("failed", "closing", "kv_memory_failed")
"""Codes of errors that are the server's."""
FIELDS = ({"message", "type", "param", "code"}, {"message", "type", "details"})
"""Of an error in OpenAI's shape, and in Anthropic's."""


@dataclass(frozen=True)
class RawAnswer:
    """Bytes up to the connection's end, and the seconds that it took; ``complete`` if the server ended it."""

    said: bytes
    seconds: float
    complete: bool

    @property
    def status(self) -> int | None:
        """None if nothing came."""
        parts = self.said.split(b" ", 2)
        return int(parts[1]) if len(parts) > 1 and parts[0].startswith(b"HTTP/") else None

    @property
    def body(self) -> bytes:
        """Of the first answer, without the chunks' lengths."""
        head, _, body = self.said.partition(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            return _whole(body)
        length = re.search(rb"content-length: (\d+)", head.lower())
        return body[: int(length[1])] if length else body


async def ask(port: int, request: RawRequest) -> RawAnswer:
    """Send it; wait for the server to close, unless the client goes."""
    begun = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)
    said, complete = b"", True
    try:
        for piece in request.pieces:
            writer.write(piece)
            await writer.drain()
        if not request.leaves:
            said, complete = await _read(reader, SILENCE if request.kind == "raw" else PATIENCE)
    except ConnectionError:  # the server has refused the rest
        pass
    finally:
        writer.close()
    return RawAnswer(said, time.monotonic() - begun, complete)


def wrong(request: RawRequest, answer: RawAnswer) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if request.leaves:
        return None
    if answer.status is None:
        return None if request.kind in ("raw", "big") else "no answer"  # one that still sends may miss what it is told
    if not answer.complete and request.kind != "raw":
        return f"it hangs: {answer.seconds:.0f} s"
    if answer.status >= 500:
        return f"status {answer.status}"
    if answer.status >= 400 and not answer.said.startswith(b"HTTP/1.1 100"):
        return _shape(answer.body) if request.kind != "addressed" or answer.body else None  # HEAD has no body
    return _streamed(answer.body) if b"text/event-stream" in answer.said[:1000] else None


async def _read(reader: asyncio.StreamReader, patience: float) -> tuple[bytes, bool]:
    said = bytearray()
    try:
        async with asyncio.timeout(patience):
            while part := await reader.read(1 << 16):
                said += part
    except TimeoutError:
        return bytes(said), False
    except ConnectionError:
        pass
    return bytes(said), True


def _shape(body: bytes) -> str | None:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error in OpenAI's shape: {body[:100]!r}"
    fit = isinstance(error, dict) and set(error) in FIELDS and isinstance(error["message"], str) and error["message"]
    return None if fit else f"no error in OpenAI's shape: {body[:100]!r}"


def _streamed(body: bytes) -> str | None:
    """A stream ends by itself, or tells an error that is not the server's."""
    events = [each for each in body.decode().split("\n\n") if each and not each.startswith(":")]
    if events and events[-1] == "data: [DONE]":
        return None
    last: Any = json.loads(events[-1].rpartition("data: ")[2]) if events else {}
    if last.get("type") in RESPONSE_ENDS and last.get("code") not in SERVER_FAULTS:
        return None
    error: Any = last.get("error")
    if error is None or error["type"] == "server_error":
        return f"a stream ends with {events[-1:]}"
    return _shape(json.dumps(last).encode())


def _whole(chunked: bytes) -> bytes:
    parts: list[bytes] = []
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        length = int(size or b"0", 16)
        parts.append(chunked[:length])
        chunked = chunked[length + 2 :]
    return b"".join(parts)


async def ask_all(port: int, requests: Sequence[RawRequest], clients: int) -> list[RawAnswer]:
    """Answers to requests that ``clients`` clients send at once."""
    turn = asyncio.Semaphore(clients)

    async def one(request: RawRequest) -> RawAnswer:
        async with turn:
            return await ask(port, request)

    return await asyncio.gather(*map(one, requests))
