"""Anthropic's ``/v1/messages``, without a memory: a request becomes a chat, and the chat's answer becomes blocks.

A whole message is what the events of its stream add up to.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from forerun.server.answers import Delta
from forerun.server.api_errors import ApiError
from forerun.server.replies import Json, compact, event
from forerun.server.schema import (
    FAIL_FAST,
    ChatRequest,
    Count,
    Extension,
    Objects,
    Stop,
    StrictModel,
    Temperature,
    Text,
    chat_request,
    one_error,
    only,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's types of errors by their status; others are ``api_error``."""
BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking")


class ToolChoiceOptions(StrictModel):
    """Which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessagesRequest(StrictModel):
    """To ``/v1/messages``."""

    ignores = True
    model: str
    messages: Annotated[Objects, Field(min_length=1)]
    max_tokens: Count
    system: Annotated[Text | Objects | None, one_error("must be text or a list of text blocks")] = None
    stop_sequences: Annotated[Stop, one_error("must be a list of up to four strings")] = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: Any = None
    container: Annotated[Any, AfterValidator(only(None))] = None
    forerun: Extension = Extension()

    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
            ApiError: if it cannot be one.
        """
        choice = self.tool_choice
        named = {"type": "function", "function": {"name": choice.name}} if choice is not None else None
        words = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        fields: Json = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "tools": [_tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": None if choice is None else words[choice.type],
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "forerun": self.forerun.model_dump(),
        }
        return chat_request(fields)

    def _messages(self) -> list[Json]:
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": _plain(self.system, "system")})
        for number, message in enumerate(self.messages):
            messages += _turns(message, f"messages.{number}")
        return messages


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        message = f"tool {number} is run by Anthropic's servers; this one takes tools with an input_schema"
        raise ApiError(400, message, "unsupported", f"tools.{number}")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _turns(message: Json, where: str) -> list[Json]:
    """A message as turns of a chat: results of tools are turns of their own, before what else it says."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant") or not isinstance(blocks, list):
        raise ApiError(400, f"{where}: must have role user or assistant, and content", "invalid_value", where)
    turns: list[Json] = []
    own: Json = {"role": role, "content": ""}
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = _plain(block.get("content") or "", where)
            turns.append({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": compact(block.get("input") or {})}
            own.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            own["content"] += _plain([block], where)
    return [*turns, own] if own["content"] or len(own) > 2 or not turns else turns


def _plain(content: Any, where: str) -> str:
    """Text, or blocks of it, as text."""
    if isinstance(content, str):
        return content
    texts = [block.get("text") if isinstance(block, dict) else None for block in content or [None]]
    if any(not isinstance(text, str) for text in texts):
        message = f"{where}: must be text, or blocks of type {', '.join(BLOCK_TYPES)}"
        raise ApiError(400, message, "invalid_value", where)
    return "".join(map(str, texts))


class MessagesFormat:
    """The events and the whole of one message.

    Args:
        body: the request.
        number: the request's name.
    """

    def __init__(self, body: MessagesRequest, number: str) -> None:
        self._blocks: list[Json] = []
        self._call = -1
        self._arguments: list[str] = []
        self._head: Json = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body.model}
        self._reason: str | None = None

    def begin(self) -> list[str]:
        """The first event."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        return [_event("message_start", message={**self._ended(), "usage": usage})]

    def chunk(self, delta: Delta) -> str:
        """The events of new text."""
        events: list[str] = []
        if delta.reasoning:
            events += self._add("thinking", "thinking", delta.reasoning)
        if delta.text:
            events += self._add("text", "text", delta.text)
        for call in delta.calls:
            if call.index != self._call:
                self._call = call.index
                events += self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
                self._arguments.append("")
            if call.arguments:
                self._arguments[-1] += call.arguments
                events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}))
        if delta.finish_reason is not None:
            self._reason = STOP_REASONS[delta.finish_reason]
            events += self._close()
        return "".join(events)

    def end(self, usage: Json, metrics: Json) -> list[str]:
        """The last events."""
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        return [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def error(self, error: ApiError) -> str:
        """An event that ends a stream by an error."""
        kind = ANTHROPIC_ERRORS.get(error.status, "api_error")
        return _event("error", error={"type": kind, "message": error.message})

    def add(self, delta: Delta) -> None:
        """Add new text to the whole message."""
        self.chunk(delta)

    def whole(self, usage: Json, metrics: Json) -> str:
        """The whole message."""
        return compact({**self._ended(), "usage": _usage(usage), "metrics": metrics})

    def _ended(self) -> Json:
        return {**self._head, "content": self._blocks, "stop_reason": self._reason, "stop_sequence": None}

    def _add(self, kind: str, field: str, text: str) -> list[str]:
        events: list[str] = []
        if not self._blocks or self._blocks[-1]["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events += self._open({"type": kind, field: "", **signature})
        self._blocks[-1][field] += text
        return [*events, self._delta({"type": f"{kind}_delta", field: text})]

    def _open(self, block: Json) -> list[str]:
        events = self._close()
        self._blocks.append(block)
        return [*events, _event("content_block_start", index=len(self._blocks) - 1, content_block=block)]

    def _delta(self, delta: Json) -> str:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> list[str]:
        """End the open block; the input of a call is an object where its text is one."""
        if not self._blocks:
            return []
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = _object(self._arguments[-1])
        return [_event("content_block_stop", index=len(self._blocks) - 1)]


def _object(arguments: str) -> Json:
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return {**counts, "cache_read_input_tokens": cached, "forerun": usage.get("forerun")}


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)
