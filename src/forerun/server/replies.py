"""Format answers as OpenAI does, complete and in chunks, and the base of answers in blocks."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forerun.models.text.call_formats import Json
from forerun.models.text.message_parser import CallDelta
from forerun.server.answers import Delta, Finish, TokenLogprob
from forerun.server.api_errors import ApiError
from forerun.server.schema import GenerationRequest, StreamOptions

PADDED_BYTES = 256
"""Sizes of padded chunks are multiples of this; a few tokens need one or two."""


class AnswerParts:
    """One choice of a complete answer, as it grows."""

    def __init__(self) -> None:
        self._text, self._reasoning = list[str](), list[str]()
        self._calls: list[CallDelta] = []
        self._finish: Finish | None = None
        self._logprobs: dict[str, list[str] | None] | None = None  # as JSON, to save memory

    def add(self, delta: Delta, logprobs: Json | None) -> None:
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._calls += delta.calls
        self._finish = delta.finish_reason or self._finish
        if logprobs is not None:
            self._logprobs = self._logprobs or {name: None if each is None else [] for name, each in logprobs.items()}
            for name, parts in self._logprobs.items():
                if parts is not None and logprobs[name]:
                    parts.append(compact(logprobs[name])[1:-1])

    def whole(self, index: int) -> Delta:
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        return Delta(index, text, self._finish, reasoning=reasoning, calls=self._calls)

    @property
    def logprobs(self) -> str:
        if self._logprobs is None:
            return "null"
        lists = {name: "null" if each is None else f"[{','.join(each)}]" for name, each in self._logprobs.items()}
        return "{" + ",".join(f'"{name}":{each}' for name, each in lists.items()) + "}"


class AnswerFormat:
    """The form of one answer."""

    _head: Json
    counts = False
    """Whether each chunk has the usage so far."""

    def note(self, notes: Sequence[str]) -> None:
        """Add notes on the request to the answer."""
        if notes:
            self._head["warnings"] = list(notes)


class ReplyFormat(AnswerFormat, ABC):
    """The form of one answer in choices."""

    prefix: str
    kind: str
    part: str

    def __init__(self, body: GenerationRequest, number: str) -> None:
        self._head = {"id": f"{self.prefix}-{number}", "created": int(time.time()), "model": body.model}
        self._options = body.stream_options or StreamOptions()
        self._parts = [AnswerParts() for _ in range(body.answers)]
        self.counts = self._options.include_usage and self._options.continuous_usage_stats

    @abstractmethod
    def _choice(self, delta: Delta) -> Json:
        """Format a choice of a complete answer, without log-probabilities."""

    @abstractmethod
    def _piece(self, delta: Delta) -> Json:
        """Format a choice of a chunk."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        """Format log-probabilities as lists."""

    def begin(self) -> list[str]:
        return []

    def chunk(self, delta: Delta, usage: Json | None = None) -> str:
        """Format new text as an event, with the usage so far if each chunk has it."""
        return self._event([self._piece(delta)], usage, trace=delta.trace)

    def end(self, usage: Json, metrics: Json) -> list[str]:
        last = [self._event([], usage, metrics=metrics)] if self._options.include_usage else []
        return [*last, "data: [DONE]\n\n"]

    def error(self, error: ApiError) -> str:
        """Format an error that ends a stream."""
        return event(error.body)

    def add(self, delta: Delta) -> None:
        self._parts[delta.index].add(delta, None if delta.logprobs is None else self._logprobs(delta.logprobs))

    def whole(self, usage: Json, metrics: Json) -> str:
        choices = []
        for index, parts in enumerate(self._parts):
            choices.append(f'{compact(self._choice(parts.whole(index)))[:-1]},"logprobs":{parts.logprobs}}}')
        head = {**self._head, "object": self.kind, "usage": usage, "metrics": metrics}
        return f'{compact(head)[:-1]},"choices":[{",".join(choices)}]}}'

    def _event(
        self, choices: Sequence[Json], usage: Json | None = None, trace: Json | None = None, metrics: Json | None = None
    ) -> str:
        more: Json = {"usage": usage} if self._options.include_usage else {}  # in all chunks or in none
        more |= {name: value for name, value in (("forerun", trace), ("metrics", metrics)) if value}
        body = {**self._head, "object": self.part, "choices": choices, **more}
        return event(padded(body) if self._options.include_obfuscation else body)


class CompletionFormat(ReplyFormat):
    """``/v1/completions``."""

    prefix, kind, part = "cmpl", "text_completion", "text_completion"

    def _choice(self, delta: Delta) -> Json:
        return {"index": delta.index, "text": delta.text, "finish_reason": delta.finish_reason}

    def _piece(self, delta: Delta) -> Json:
        return {**self._choice(delta), "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        return {
            "tokens": [_readable(each.spelling) for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [None if each.logprob is None else _likeliest(each) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }


class ChatFormat(ReplyFormat):
    """``/v1/chat/completions``."""

    prefix, kind, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self) -> list[str]:
        message = {"role": "assistant", "content": ""}
        return [self._event([self._chunk_choice(Delta(index, ""), message)]) for index in range(len(self._parts))]

    def _choice(self, delta: Delta) -> Json:
        message = {"role": "assistant", **_message(delta, _whole_call)}
        return {"index": delta.index, "message": message, "finish_reason": delta.finish_reason}

    def chunk(self, delta: Delta, usage: Json | None = None) -> str:
        """Format new text; a call starts with a delta without arguments, which clients expect in later ones."""
        begun = [replace(call, arguments="") for call in delta.calls if call.id is not None]
        if not begun:
            return super().chunk(delta, usage)
        rest = [replace(call, id=None, name=None) for call in delta.calls if call.arguments]
        first = replace(delta, calls=begun, finish_reason=None, trace=None)
        last = replace(delta, calls=rest, text="", reasoning="", logprobs=None)
        more = super().chunk(last, usage) if rest or delta.finish_reason or delta.trace else ""
        return super().chunk(first, usage) + more

    def _piece(self, delta: Delta) -> Json:
        return self._chunk_choice(delta, {name: each for name, each in _message(delta, _call_piece).items() if each})

    def _chunk_choice(self, delta: Delta, message: Json) -> Json:
        return {
            "index": delta.index,
            "delta": message,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(delta.logprobs) if delta.logprobs else None,
        }

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> Json:
        content = [
            {**_top(each.spelling, each.logprob or 0.0), "top_logprobs": [_top(*other) for other in each.top]}
            for each in tokens
        ]
        return {"content": content, "refusal": None}


class BlockFormat(AnswerFormat, ABC):
    """The form of one answer in consecutive blocks: ``reasoning``, ``text``, and one per ``call``."""

    def __init__(self) -> None:
        self._blocks: list[Json] = []
        self._kind, self._text, self._call = "", "", -1
        self._reason: Finish | None = None
        self._stop_string: str | None = None

    @abstractmethod
    def _ended(self, usage: Json, metrics: Json) -> Json:
        """Return the complete answer."""

    @abstractmethod
    def _opened(self, kind: str, call: CallDelta | None) -> list[str]:
        """Add an empty block; return its events."""

    @abstractmethod
    def _grown(self, kind: str, text: str) -> str:
        """Format new text of the last block as an event."""

    @abstractmethod
    def _closed(self, kind: str, text: str) -> list[str]:
        """Set the last block's complete text; return the events of its end."""

    def chunk(self, delta: Delta, usage: Json | None = None) -> str:
        same = [call for call in delta.calls if call.index == self._call]  # before new text, which ends the call
        events = [self._grow(call.arguments) for call in same if call.arguments]
        for kind, text in (("reasoning", delta.reasoning), ("text", delta.text)):
            if text:
                events += [*([] if kind == self._kind else self._switch(kind)), self._grow(text)]
        for call in delta.calls[len(same) :]:
            if call.index != self._call:
                self._call = call.index
                events += self._switch("call", call)
            if call.arguments:
                events.append(self._grow(call.arguments))
        if delta.finish_reason is not None:
            self._reason, self._stop_string = delta.finish_reason, delta.stop_string
            events += self._finish()
        return "".join(events)

    def add(self, delta: Delta) -> None:
        self.chunk(delta)

    def whole(self, usage: Json, metrics: Json) -> str:
        return compact(self._ended(usage, metrics))

    def _finish(self) -> list[str]:
        return self._close()

    def _switch(self, kind: str, call: CallDelta | None = None) -> list[str]:
        events = self._close()
        self._kind, self._text = kind, ""
        return events + self._opened(kind, call)

    def _grow(self, text: str) -> str:
        self._text += text
        return self._grown(self._kind, text)

    def _close(self) -> list[str]:
        kind, self._kind = self._kind, ""
        return self._closed(kind, self._text) if kind else []


def _message(delta: Delta, form: Callable[[CallDelta], Json]) -> Json:
    """Format a message, with its calls by ``form``; empty content next to calls is null."""
    message: Json = {"content": delta.text if delta.text or not delta.calls else None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["tool_calls"] = [form(call) for call in _joined(delta.calls)]
    return message


def _joined(pieces: Sequence[CallDelta]) -> list[CallDelta]:
    """Merge the pieces of each call: in a chunk, clients read a second one as another call."""
    calls: dict[int, list[CallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [replace(own[0], arguments="".join(piece.arguments for piece in own)) for own in calls.values()]


def _whole_call(call: CallDelta) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_piece(call: CallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_whole_call(call)}


def event(body: Mapping[str, Any], name: str | None = None) -> str:
    """Format a server-sent event."""
    return f"event: {name}\ndata: {compact(body)}\n\n" if name else f"data: {compact(body)}\n\n"


def padded(body: Json) -> Json:
    """Pad an event, so that its size reveals little."""
    spaces = PADDED_BYTES - (len(compact(body)) + len(',"obfuscation":""')) % PADDED_BYTES
    return {**body, "obfuscation": "x" * spaces}


def compact(body: Any) -> str:
    """Format JSON on one line, without spaces."""
    return json.dumps(body, separators=(",", ":"))


def _likeliest(one: TokenLogprob) -> dict[str, float]:
    """Map the likeliest tokens and this one to log-probabilities; of equal spellings, the likelier counts."""
    likeliest: dict[str, float] = {}
    for spelling, logprob in [*one.top, (one.spelling, one.logprob or 0.0)]:
        likeliest.setdefault(_readable(spelling), logprob)
    return likeliest


def _top(spelling: bytes, logprob: float) -> Json:
    return {"token": _readable(spelling), "logprob": logprob, "bytes": list(spelling)}


def _readable(spelling: bytes) -> str:
    r"""Spell a token; part of a character as ``bytes:\xe2\x80``, like OpenAI."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
