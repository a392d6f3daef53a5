"""A client of OpenAI-compatible servers; it reads a complete answer as a stream of one chunk."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

Json = dict[str, Any]

TIMEOUT_SECONDS = 600.0
"""Silence after which a request has failed. A long prefill on a CPU lasts minutes."""
ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class TokenScore:
    """A token's bytes, its log-probability, and those of the likeliest tokens at its position."""

    spelling: bytes
    logprob: float
    top: Mapping[bytes, float]


@dataclass(frozen=True)
class EndpointAnswer:
    """A server's answer, or an ``error``; with log-probabilities if requested, and draft counts if reported."""

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    calls: Sequence[tuple[str, str]] = ()
    scores: Sequence[TokenScore] = ()
    drafted: int | None = None
    accepted: int | None = None
    error: str | None = None

    @property
    def parts(self) -> dict[str, str]:
        """What must be equal, by name; ids and times are left out."""
        calls = {f"call {i} {word}": call[n] for i, call in enumerate(self.calls) for n, word in enumerate(CALL_PARTS)}
        return {"reasoning": self.reasoning, "text": self.text, **calls, "finish_reason": self.finish}


CALL_PARTS = ("name", "arguments")


@dataclass(frozen=True)
class Endpoint:
    """A server's base address, such as ``http://127.0.0.1:8000``, and its key; raises ValueError if it is not HTTP."""

    url: str
    key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(f"the server's address is {self.url!r}; it must begin with http:// or https://")
        object.__setattr__(self, "url", self.url.rstrip("/").removesuffix("/v1"))

    def models(self) -> list[Json]:
        """List the server's models; raise OSError if it cannot be reached, ValueError if it does not list them."""
        try:
            with self._open("models") as response:
                listed = json.load(response)["data"]
        except HTTPError as error:
            raise ValueError(f"{self.url}/v1/models answers {_refusal(error)}; name the model with --name") from None
        except (OSError, HTTPException) as error:
            raise OSError(f"{self.url} cannot be reached: {error}") from None
        except (ValueError, KeyError, TypeError) as error:
            message = f"{self.url}/v1/models is not a list of models ({error!r}); name the model with --name"
            raise ValueError(message) from None
        return [each for each in listed if isinstance(each, dict) and "id" in each]

    def ask(self, address: str, body: Json) -> EndpointAnswer:
        """Request ``/v1/{address}``; a failure is an answer with ``error``."""
        try:
            with self._open(address, body) as response:
                return fold(_events(response) if body.get("stream") else [json.load(response)])
        except HTTPError as error:
            return EndpointAnswer(error=_refusal(error))
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            return EndpointAnswer(error=f"no answer: {type(error).__name__}: {error}"[:ERROR_CHARACTERS])

    def _open(self, address: str, body: Json | None = None) -> HTTPResponse:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        response: HTTPResponse = urlopen(Request(f"{self.url}/v1/{address}", data, headers), timeout=TIMEOUT_SECONDS)
        return response


def fold(chunks: Iterable[Json]) -> EndpointAnswer:
    """Fold chunks, or one complete answer, into an answer. Raise ValueError for an error within a stream, with its
    message, and for an answer that broke off."""
    text, reasoning, finish = "", "", ""
    calls: dict[int, list[str]] = {}
    scores: list[TokenScore] = []
    drafts: tuple[int, int] | None = None
    for chunk in chunks:
        if chunk.get("error"):
            raise ValueError(str(chunk["error"]))
        drafts = _drafts(chunk) or drafts
        for choice in chunk.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or choice
            text += part.get("content") or part.get("text") or ""
            reasoning += part.get("reasoning_content") or part.get("reasoning") or ""
            finish = choice.get("finish_reason") or finish
            scores += _scores(choice.get("logprobs") or {})
            for place, call in enumerate(part.get("tool_calls") or ()):
                fields = call.get("function") or {}
                known = calls.setdefault(call.get("index", place), ["", ""])
                known[0] += fields.get("name") or ""
                known[1] += fields.get("arguments") or ""
    if not finish:
        raise ValueError("the answer broke off: it has no finish_reason")
    drafted, accepted = drafts or (None, None)
    pairs = [(name, arguments) for _, (name, arguments) in sorted(calls.items())]
    return EndpointAnswer(text, reasoning, finish, pairs, scores, drafted, accepted)


def _events(response: HTTPResponse) -> Iterator[Json]:
    """Yield the chunks of a stream, up to ``[DONE]`` or its end: some servers do not send it."""
    for line in response:
        if not line.startswith(b"data:"):
            continue  # a comment, or an event's name
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _scores(fields: Json) -> list[TokenScore]:
    """Read log-probabilities in the form of chats or completions."""
    if fields.get("content") is not None:
        return [
            TokenScore(
                _spelling(each), each["logprob"], {_spelling(one): one["logprob"] for one in each["top_logprobs"]}
            )
            for each in fields["content"]
        ]
    tops = fields.get("top_logprobs") or [{} for _ in fields.get("tokens") or ()]
    return [
        TokenScore(token.encode(), logprob, {name.encode(): value for name, value in (top or {}).items()})
        for token, logprob, top in zip(
            fields.get("tokens") or (), fields.get("token_logprobs") or (), tops, strict=True
        )
        if logprob is not None
    ]


def _spelling(one: Json) -> bytes:
    return bytes(one["bytes"]) if one.get("bytes") else str(one["token"]).encode()


def _drafts(chunk: Json) -> tuple[int, int] | None:
    """Read drafted and accepted tokens as OpenAI, Forerun or llama.cpp report them."""
    usage, timings = chunk.get("usage") or {}, chunk.get("timings") or {}
    details = usage.get("completion_tokens_details") or {}
    if "accepted_prediction_tokens" in details:
        accepted = details["accepted_prediction_tokens"] or 0
        return accepted + (details.get("rejected_prediction_tokens") or 0), accepted
    if "forerun" in usage:
        return usage["forerun"]["drafted"], usage["forerun"]["accepted"]
    return (timings["draft_n"], timings.get("draft_n_accepted", 0)) if "draft_n" in timings else None


def _refusal(error: HTTPError) -> str:
    body = error.read(1 << 16).decode(errors="replace")
    try:
        fields = json.loads(body)
        fields = fields.get("error", fields)
        message = fields["message"] if isinstance(fields, dict) and "message" in fields else str(fields)
    except (ValueError, AttributeError):
        message = body
    return f"{error.code}: {' '.join(str(message).split())}"[:ERROR_CHARACTERS]
