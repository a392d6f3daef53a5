"""Answers as OpenAI's clients read them: completions and chat completions, whole and in chunks.

A whole answer is the fold over its stream. A field without a value is not sent.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.models.text.message_parser import CallDelta
from forerun.server.answers import Delta, TokenLogprob
from forerun.server.api_errors import ApiError
from forerun.server.calls import AnswerRow

Json = dict[str, Any]


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
    def _choice(self, delta: Delta) -> Json:
        """A choice of a whole answer."""

    @abstractmethod
    def _piece(self, delta: Delta) -> Json:
        """A choice of a chunk."""

    def begin(self, texts: int) -> list[str]:
        """Events before the first token."""
        return []

    def chunk(self, delta: Delta) -> str:
        """An event with new text of one choice."""
        return self._event([self._piece(delta)], None, delta.trace)

    def end(self, usage: Json, metrics: Json) -> list[str]:
        """The last events, with the usage if it is wanted."""
        last = [self._event([], usage, None, metrics)] if self.usage else []
        return [*last, "data: [DONE]\n\n"]

    def error(self, error: ApiError) -> str:
        """An event that ends a stream by an error."""
        return event(error.body)

    def fold(self, deltas: Sequence[Delta], texts: int, usage: Json, metrics: Json) -> str:
        """The whole answer, from all deltas of a stream. Its texts become JSON one by one, as no other thread runs
        meanwhile."""
        parts: list[list[Delta]] = [[] for _ in range(texts)]
        for delta in deltas:
            parts[delta.index].append(delta)
        choices = ",".join(compact(self._choice(_joined(part))) for part in parts)
        head = self._head(self.whole) | {"usage": usage, "metrics": metrics}
        return f'{compact(head)[:-1]},"choices":[{choices}]}}'

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _event(
        self, choices: Sequence[Json], usage: Json | None, trace: Json | None = None, metrics: Json | None = None
    ) -> str:
        more = ({"usage": usage} if self.usage else {}) | ({"forerun": trace} if trace else {})
        more |= {"metrics": metrics} if metrics else {}
        return event(self._head(self.part) | {"choices": choices} | more)


class CompletionFormat(ReplyFormat):
    """``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def _choice(self, delta: Delta) -> Json:
        logprobs = None if delta.logprobs is None else _text_logprobs(delta.logprobs)
        return {
            "index": delta.index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": logprobs,
        }

    def _piece(self, delta: Delta) -> Json:
        choice = self._choice(delta)
        return choice if delta.logprobs else {**choice, "logprobs": None}


class ChatFormat(ReplyFormat):
    """``/v1/chat/completions``."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def begin(self, texts: int) -> list[str]:
        """One event for each text, with the answer's role."""
        message = {"role": "assistant", "content": ""}
        return [self._event([self._chunk_choice(Delta(index, ""), message)], None) for index in range(texts)]

    def _choice(self, delta: Delta) -> Json:
        return {
            "index": delta.index,
            "message": {"role": "assistant", **_message(delta)},
            "finish_reason": delta.finish_reason,
            "logprobs": None if delta.logprobs is None else _chat_logprobs(delta.logprobs),
        }

    def _piece(self, delta: Delta) -> Json:
        message: Json = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [_call_piece(call) for call in delta.calls]
        return self._chunk_choice(delta, message)

    def _chunk_choice(self, delta: Delta, message: Json) -> Json:
        return {
            "index": delta.index,
            "delta": message,
            "finish_reason": delta.finish_reason,
            "logprobs": _chat_logprobs(delta.logprobs) if delta.logprobs else None,
        }


def _message(delta: Delta) -> Json:
    """The content of a whole message; None beside calls without any."""
    message: Json = {"content": delta.text if delta.text or not delta.calls else None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["tool_calls"] = whole_calls(delta.calls)
    return message


def whole_calls(pieces: Sequence[CallDelta]) -> list[Json]:
    """Calls from all their pieces."""
    calls: dict[int, list[CallDelta]] = {}
    for piece in pieces:
        calls.setdefault(piece.index, []).append(piece)
    return [
        {
            "id": own[0].id,
            "type": "function",
            "function": {"name": own[0].name, "arguments": "".join(piece.arguments for piece in own)},
        }
        for own in calls.values()
    ]


def _call_piece(call: CallDelta) -> Json:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def usage_of(rows: Sequence[AnswerRow], prompts: int) -> Json:
    """The usage of ended requests: equally many for each of so many prompts, one prompt after the other. ``forerun``
    says what drafts were worth, over all texts."""
    stats = [row.request.stats for row in rows]
    read = sum(row.request.prompt_length + row.answer.echoed for row in rows) // (len(rows) // prompts)
    written = sum(len(row.request.generated) - row.answer.echoed for row in rows if row.answer.goes_on)
    steps = sum(each.steps for each in stats)
    drafted, accepted = (sum(sum(getattr(each, name)) for each in stats) for name in ("drafted", "accepted"))
    emitted = [tokens for each in stats for tokens in each.emitted]
    speculation = {
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


def speculative_metrics(rows: Sequence[AnswerRow], budget: int) -> Json:
    """What drafts were worth, in the words of vLLM's ``metrics``: of the steps that had a draft, of up to ``budget``
    tokens."""
    stats = [row.request.stats for row in rows]
    steps = [pair for each in stats for pair in zip(each.drafted, each.accepted, strict=False) if pair[0]]
    drafted, accepted = (sum(each[place] for each in steps) for place in (0, 1))
    counts = Counter(each[1] for each in steps)
    figures = {
        "mean_acceptance_length": 1 + accepted / len(steps) if steps else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [counts[tokens] for tokens in range(max(counts, default=-1) + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": budget,
    }
    return {"speculative_decoding": figures}


def event(body: Mapping[str, Any], name: str | None = None) -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {compact(body)}\n\n" if name else f"data: {compact(body)}\n\n"


def compact(body: Mapping[str, Any]) -> str:
    """JSON on one line, without spaces."""
    return json.dumps(body, separators=(",", ":"))


def _joined(parts: Sequence[Delta]) -> Delta:
    """All deltas of one choice as one."""
    logprobs = None
    if any(part.logprobs is not None for part in parts):
        logprobs = [each for part in parts for each in part.logprobs or ()]
    calls = [call for part in parts for call in part.calls]
    text, reasoning = "".join(part.text for part in parts), "".join(part.reasoning for part in parts)
    return Delta(parts[0].index, text, parts[-1].finish_reason, logprobs, None, reasoning, calls)


def _text_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    return {
        "tokens": [_readable(each.spelling) for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [None if each.logprob is None else _likeliest(each) for each in tokens],
        "text_offset": [each.offset for each in tokens],
    }


def _chat_logprobs(tokens: Sequence[TokenLogprob]) -> Json:
    content: list[Json] = [
        {**_top(each.spelling, each.logprob or 0.0), "top_logprobs": [_top(*other) for other in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _likeliest(one: TokenLogprob) -> dict[str, float]:
    """The likeliest first; the token itself is among them. Of two that read alike, the likelier one counts."""
    likeliest: dict[str, float] = {}
    for spelling, logprob in [*one.top, (one.spelling, one.logprob or 0.0)]:
        likeliest.setdefault(_readable(spelling), logprob)
    return likeliest


def _top(spelling: bytes, logprob: float) -> Json:
    return {"token": _readable(spelling), "logprob": logprob, "bytes": list(spelling)}


def _readable(spelling: bytes) -> str:
    r"""A token as text; a part of a character as ``bytes:\xe2\x80``, as OpenAI has it."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)
