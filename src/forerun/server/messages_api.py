"""Anthropic's ``/v1/messages``, without a memory: a request becomes a chat, and the chat's answer becomes blocks."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.models.text.message_formats import Json
from forerun.models.text.message_parser import CallDelta
from forerun.server.answers import Finish
from forerun.server.api_errors import ApiError
from forerun.server.replies import BlockFormat, compact, event
from forerun.server.schema import (
    Count,
    Objects,
    Stop,
    StrictModel,
    Text,
    TopK,
    TranslatedRequest,
    joined_parts,
    one_error,
    only,
)  # fmt: skip

STOP_REASONS: dict[Finish | None, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
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


class MessagesRequest(TranslatedRequest):
    """To ``/v1/messages``."""

    messages: Annotated[Objects, Field(min_length=1)]
    max_tokens: Count
    system: Annotated[Text | Objects | None, one_error("must be text or a list of text blocks")] = None
    stop_sequences: Stop = None
    top_k: TopK | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: Any = None
    container: Annotated[Any, only(None)] = None

    def _chat_fields(self) -> Json:
        choice = self.tool_choice or ToolChoiceOptions(type="auto")
        named = {"type": "function", "function": {"name": choice.name}}
        words = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        system = (
            [{"role": "system", "content": joined_parts(self.system, "system", BLOCK_TYPES)}] if self.system else []
        )
        turns = [turn for place, each in enumerate(self.messages) for turn in _turns(each, f"messages.{place}")]
        return {
            "messages": [*system, *turns],
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": [_tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": words[choice.type],
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }


class CountTokensRequest(MessagesRequest):
    """To ``/v1/messages/count_tokens``."""

    max_tokens: Count = 1


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type", "custom") != "custom":
        message = f"tool {number} is run by Anthropic's servers; this one takes tools with an input_schema"
        raise ApiError(400, message, "unsupported", f"tools.{number}")
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {
        "type": "function",
        "function": {ours: tool[name] for name, ours in names.items() if tool.get(name) is not None},
    }


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
            result = joined_parts(block.get("content") or "", where, BLOCK_TYPES)
            turns.append({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": compact(block.get("input") or {})}
            own.setdefault("tool_calls", []).append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            own["content"] += joined_parts([block], where, BLOCK_TYPES)
    return [*turns, own] if own["content"] or len(own) > 2 or not turns else turns


class MessagesFormat(BlockFormat):
    """The events and the whole of one message; ``number`` is the request's name."""

    def __init__(self, body: MessagesRequest, number: str) -> None:
        super().__init__()
        self._head: Json = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body.model}

    def begin(self) -> list[str]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return [_event("message_start", message={**self._message, "usage": usage})]

    def end(self, usage: Json, metrics: Json) -> list[str]:
        delta = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        return [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def error(self, error: ApiError) -> str:
        return messages_error(error)

    @property
    def _message(self) -> Json:
        stop = self._stop_string if self._reason == "stop" else None
        reason = STOP_REASONS.get(self._reason) if stop is None else "stop_sequence"
        return {**self._head, "content": self._blocks, "stop_reason": reason, "stop_sequence": stop}

    def _ended(self, usage: Json, metrics: Json) -> Json:
        return {**self._message, "usage": _usage(usage), "metrics": metrics}

    def _opened(self, kind: str, call: CallDelta | None) -> list[str]:
        block: Json = {"type": "text", "text": ""}
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._blocks.append(block)
        return [self._of_block("start", content_block=block)]

    def _grown(self, kind: str, text: str) -> str:
        name, field = {
            "call": ("input_json_delta", "partial_json"),
            "reasoning": ("thinking_delta", "thinking"),
            "text": ("text_delta", "text"),
        }[kind]
        return self._of_block("delta", delta={"type": name, field: text})

    def _closed(self, kind: str, text: str) -> list[str]:
        field = {"call": "input", "reasoning": "thinking", "text": "text"}[kind]
        self._blocks[-1][field] = _object(text) if kind == "call" else text
        return [self._of_block("stop")]

    def _of_block(self, what: str, **fields: Any) -> str:
        return _event(f"content_block_{what}", index=len(self._blocks) - 1, **fields)


def messages_error(error: ApiError) -> str:
    """An event that ends a stream by an error."""
    kind = ANTHROPIC_ERRORS.get(error.status, "api_error")
    return _event("error", error={"type": kind, "message": error.message})


def _object(arguments: str) -> Json:
    """The input of a call is an object where its text is one."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"arguments": value}


def _usage(usage: Json) -> Json:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    return {**counts, "cache_read_input_tokens": cached, "forerun": usage.get("forerun")}


def _event(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)
