"""What clients are answered: OpenAI's completions and chat completions, whole and in chunks.

A field that is not set is not sent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from forerun.core.request import Request
from forerun.server.answers import Delta, Finish
from forerun.server.token_logprobs import ChatLogprobs, TextLogprobs, TokenLogprob, of_chat, of_text
from forerun.server.trace import Trace


class Speculation(BaseModel):
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


class Usage(BaseModel):
    """Tokens read and written. A prompt counts once, however many texts continue it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    forerun: Speculation


class TextChoice(BaseModel):
    """A text, or what is new of it."""

    index: int
    text: str
    finish_reason: Finish | None
    logprobs: TextLogprobs | None = None


class ChatMessage(BaseModel):
    """An answer, or what is new of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChoice(BaseModel):
    """An answer in full."""

    index: int
    message: ChatMessage
    finish_reason: Finish | None
    logprobs: ChatLogprobs | None = None


class ChatChunkChoice(BaseModel):
    """What is new of an answer."""

    index: int
    delta: ChatMessage
    finish_reason: Finish | None
    logprobs: ChatLogprobs | None = None


Choices = list[TextChoice] | list[ChatChoice] | list[ChatChunkChoice]


class Reply(BaseModel):
    """A whole answer, or a chunk of a stream; ``forerun`` tells of the step behind a chunk, if the request asks so."""

    id: str
    object: str
    created: int
    model: str
    choices: Choices
    usage: Usage | None = None
    forerun: Trace | None = None


class Form(ABC):
    """How answers look at one address.

    Args:
        model: the model's name.
        number: the request's.
        created: seconds since 1970.
        usage: whether every chunk says that the usage comes last.
    """

    prefix: str
    whole: str
    part: str

    def __init__(self, model: str, number: str, created: int, usage: bool) -> None:
        self._head: dict[str, Any] = {"id": f"{self.prefix}-{number}", "created": created, "model": model}
        self.usage = usage

    @abstractmethod
    def _choice(
        self, index: int, text: str, finish: Finish | None, told: Sequence[TokenLogprob] | None
    ) -> BaseModel: ...

    @abstractmethod
    def _new(self, delta: Delta) -> BaseModel: ...

    def begin(self, texts: int) -> list[str]:
        """Chunks before the first token."""
        return []

    def chunk(self, delta: Delta) -> str:
        """An event with what is new of one text."""
        return self._event([self._new(delta)], None, delta.trace)

    def last(self, usage: Usage) -> str:
        """The event that says what was used."""
        return self._event([], usage)

    def fold(self, deltas: Sequence[Delta], texts: int, usage: Usage) -> str:
        """The answer in one piece, out of all that a stream would have sent. Its texts become JSON one by one: while
        one does, no other thread runs."""
        parts: list[list[str]] = [[] for _ in range(texts)]
        finish: list[Finish | None] = [None] * texts
        told: list[list[TokenLogprob] | None] = [None] * texts
        for delta in deltas:
            parts[delta.index].append(delta.text)
            finish[delta.index] = delta.finish_reason
            if delta.told is not None:
                told[delta.index] = [*(told[delta.index] or ()), *delta.told]
        choices = [self._choice(i, "".join(parts[i]), finish[i], told[i]) for i in range(texts)]
        whole = ",".join(_compact(choice.model_dump(mode="json", exclude_unset=True)) for choice in choices)
        rest = self._dump(self.whole, [], {"usage": usage})
        del rest["choices"]
        return f'{_compact(rest)[:-1]},"choices":[{whole}]}}'

    def _event(self, choices: Any, usage: Usage | None, trace: Trace | None = None) -> str:
        more = ({"usage": usage} if self.usage else {}) | ({"forerun": trace} if trace else {})
        return event(self._dump(self.part, choices, more))

    def _dump(self, kind: str, choices: Any, more: dict[str, Any]) -> dict[str, Any]:
        reply = Reply(object=kind, choices=choices, **self._head, **more)
        return reply.model_dump(mode="json", exclude_unset=True)


class TextForm(Form):
    """``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _choice(self, index: int, text: str, finish: Finish | None, told: Sequence[TokenLogprob] | None) -> BaseModel:
        return TextChoice(index=index, text=text, finish_reason=finish, logprobs=of_text(told))

    def _new(self, delta: Delta) -> BaseModel:
        return self._choice(delta.index, delta.text, delta.finish_reason, delta.told or None)


class ChatForm(Form):
    """``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, texts: int) -> list[str]:
        """Whose turn it is."""
        return [
            self._event([self._part(i, ChatMessage(role="assistant", content=""), None, None)], None)
            for i in range(texts)
        ]

    def _choice(self, index: int, text: str, finish: Finish | None, told: Sequence[TokenLogprob] | None) -> BaseModel:
        message = ChatMessage(role="assistant", content=text)
        return ChatChoice(index=index, message=message, finish_reason=finish, logprobs=of_chat(told))

    def _new(self, delta: Delta) -> BaseModel:
        said = ChatMessage(content=delta.text) if delta.text else ChatMessage()
        return self._part(delta.index, said, delta.finish_reason, delta.told or None)

    def _part(
        self, index: int, said: ChatMessage, finish: Finish | None, told: Sequence[TokenLogprob] | None
    ) -> BaseModel:
        return ChatChunkChoice(index=index, delta=said, finish_reason=finish, logprobs=of_chat(told))


def usage_of(requests: Sequence[Request], prompts: int) -> Usage:
    """What ended requests have used: as many in a row for each prompt, ``prompts`` times."""
    stats = [request.stats for request in requests]
    read = sum(request.prompt_length for request in requests) // (len(requests) // prompts)
    written, steps = sum(len(request.generated) for request in requests), sum(each.steps for each in stats)
    drafted, accepted = (sum(sum(getattr(each, name)) for each in stats) for name in ("drafted", "accepted"))
    emitted = [tokens for each in stats for tokens in each.emitted]
    speculation = Speculation(
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        mean_acceptance_length=round(sum(emitted) / steps, 4) if steps else 0.0,
        acceptance_rate=round(accepted / drafted, 4) if drafted else 0.0,
        histogram={tokens: emitted.count(tokens) for tokens in sorted(set(emitted))},
    )
    return Usage(prompt_tokens=read, completion_tokens=written, total_tokens=read + written, forerun=speculation)


def event(body: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {_compact(body)}\n\n"


def _compact(body: dict[str, Any]) -> str:
    return json.dumps(body, separators=(",", ":"))
