"""Answers as OpenAI's clients read them: completions and chat completions, whole and in chunks.

A whole answer is the fold over its stream. A field without a value is not sent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from forerun.core.request import Request
from forerun.server.answers import Delta, Finish, StepTrace, TokenLogprob


class Speculation(TypedDict):
    """``usage.forerun``: what drafts were worth, over all texts of the request.

    ``steps``: passes of the target. ``drafted`` and ``accepted``: tokens. ``mean_acceptance_length``: tokens a step,
    the step's own included. ``histogram``: how many steps gave 1, 2, ... tokens.
    """

    steps: int
    drafted: int
    accepted: int
    mean_acceptance_length: float
    acceptance_rate: float
    histogram: dict[int, int]


class Usage(TypedDict):
    """Tokens read and written. A prompt counts once, however many texts continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    forerun: Speculation


class TextLogprobs(TypedDict):
    """A completion's log-probabilities: one entry for each token. ``top_logprobs`` has the token itself, too."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """A token of an answer, and the likeliest at its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """A chat's log-probabilities."""

    content: list[ChatLogprob]
    refusal: None


class TextChoice(TypedDict):
    """A text, or a new piece of it."""

    index: int
    text: str
    finish_reason: Finish | None
    logprobs: TextLogprobs | None


class ChatMessage(TypedDict):
    """An answer, or a new piece of it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]


class ChatChoice(TypedDict):
    """An answer in full."""

    index: int
    message: ChatMessage
    finish_reason: Finish | None
    logprobs: ChatLogprobs | None


class ChatChunkChoice(TypedDict):
    """A new piece of an answer."""

    index: int
    delta: ChatMessage
    finish_reason: Finish | None
    logprobs: ChatLogprobs | None


Choice = TextChoice | ChatChoice | ChatChunkChoice


class Reply(TypedDict):
    """A whole answer, or a chunk of a stream. ``forerun``: the chunk's step, if the request wants it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    forerun: NotRequired[StepTrace]


class ReplyFormat(ABC):
    """The form of answers at one address.

    Args:
        model: the model's name.
        number: the request's.
        created: seconds since 1970.
        usage: whether the last chunk has the usage; then all others say so.
    """

    prefix: str
    whole: str
    part: str

    def __init__(self, model: str, number: str, created: int, usage: bool) -> None:
        self._model, self._id, self._created = model, f"{self.prefix}-{number}", created
        self.usage = usage

    @abstractmethod
    def _choice(self, delta: Delta) -> Choice:
        """A choice of a whole answer."""

    @abstractmethod
    def _piece(self, delta: Delta) -> Choice:
        """A choice of a chunk."""

    def begin(self, texts: int) -> list[str]:
        """Events before the first token."""
        return []

    def chunk(self, delta: Delta) -> str:
        """An event with new text of one choice."""
        return self._event([self._piece(delta)], None, delta.trace)

    def last(self, usage: Usage) -> str:
        """The event with the usage."""
        return self._event([], usage)

    def fold(self, deltas: Sequence[Delta], texts: int, usage: Usage) -> str:
        """The whole answer, from all deltas of a stream. Its texts become JSON one by one, as no other thread runs
        meanwhile."""
        parts: list[list[Delta]] = [[] for _ in range(texts)]
        for delta in deltas:
            parts[delta.index].append(delta)
        choices = ",".join(_compact(self._choice(_joined(part))) for part in parts)
        return f'{_compact(self._head(self.whole) | {"usage": usage})[:-1]},"choices":[{choices}]}}'

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _event(self, choices: Sequence[Choice], usage: Usage | None, trace: StepTrace | None = None) -> str:
        more = ({"usage": usage} if self.usage else {}) | ({"forerun": trace} if trace else {})
        return event(self._head(self.part) | {"choices": choices} | more)


class CompletionFormat(ReplyFormat):
    """``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _choice(self, delta: Delta) -> TextChoice:
        logprobs = None if delta.logprobs is None else _text_logprobs(delta.logprobs)
        return {
            "index": delta.index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": logprobs,
        }

    def _piece(self, delta: Delta) -> TextChoice:
        choice = self._choice(delta)
        return choice if delta.logprobs else {**choice, "logprobs": None}


class ChatFormat(ReplyFormat):
    """``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, texts: int) -> list[str]:
        """One event for each text, with the answer's role."""
        message = ChatMessage(role="assistant", content="")
        return [self._event([self._chunk_choice(Delta(index, ""), message)], None) for index in range(texts)]

    def _choice(self, delta: Delta) -> ChatChoice:
        return {
            "index": delta.index,
            "message": {"role": "assistant", "content": delta.text},
            "finish_reason": delta.finish_reason,
            "logprobs": None if delta.logprobs is None else _chat_logprobs(delta.logprobs),
        }

    def _piece(self, delta: Delta) -> ChatChunkChoice:
        return self._chunk_choice(delta, {"content": delta.text} if delta.text else {})

    def _chunk_choice(self, delta: Delta, message: ChatMessage) -> ChatChunkChoice:
        return {
            "index": delta.index,
            "delta": message,
            "finish_reason": delta.finish_reason,
            "logprobs": _chat_logprobs(delta.logprobs) if delta.logprobs else None,
        }


def usage_of(requests: Sequence[Request], prompts: int) -> Usage:
    """The usage of ended requests: equally many for each of so many prompts, one prompt after the other."""
    stats = [request.stats for request in requests]
    read = sum(request.prompt_length for request in requests) // (len(requests) // prompts)
    written, steps = sum(len(request.generated) for request in requests), sum(each.steps for each in stats)
    drafted, accepted = (sum(sum(getattr(each, name)) for each in stats) for name in ("drafted", "accepted"))
    emitted = [tokens for each in stats for tokens in each.emitted]
    speculation: Speculation = {
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "mean_acceptance_length": round(sum(emitted) / steps, 4) if steps else 0.0,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else 0.0,
        "histogram": {tokens: emitted.count(tokens) for tokens in sorted(set(emitted))},
    }
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "forerun": speculation,
    }


def event(body: Mapping[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {_compact(body)}\n\n"


def _compact(body: Mapping[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))


def _joined(parts: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = [each for part in parts for each in part.logprobs or ()]
    return Delta(parts[0].index, "".join(part.text for part in parts), parts[-1].finish_reason, logprobs)


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> TextLogprobs:
    return {
        "tokens": [_readable(each.spelling) for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [_likeliest(each) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> ChatLogprobs:
    content: list[ChatLogprob] = [
        {**_top(each.spelling, each.logprob), "top_logprobs": [_top(*other) for other in each.top]} for each in tokens
    ]
    return {"content": content, "refusal": None}


def _likeliest(one: TokenLogprob) -> dict[str, float]:
    """The likeliest first; the token itself is among them. Of two that read alike, the likelier one counts."""
    likeliest: dict[str, float] = {}
    for spelling, logprob in [*one.top, (one.spelling, one.logprob)]:
        likeliest.setdefault(_readable(spelling), logprob)
    return likeliest


def _top(spelling: bytes, logprob: float) -> TopLogprob:
    return {"token": _readable(spelling), "logprob": logprob, "bytes": list(spelling)}


def _readable(spelling: bytes) -> str:
    r"""A token as text; a part of a character as ``bytes:\xe2\x80``, as OpenAI has it."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
