"""Translate Anthropic's ``/v1/messages``: a request becomes a chat, and the chat's answer becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from forerun.models.text.call_formats import Json
from forerun.models.text.message_parser import CallDelta
from forerun.server.answers import Finish
from forerun.server.api_errors import ApiError, invalid
from forerun.server.chat_schema import TranslatedRequest
from forerun.server.replies import BlockFormat, compact, event
from forerun.server.schema import Count, Objects, Stop, StrictModel, Text, TopK, one_error
from forerun.server.tolerance import MAX_TURNS, Notes, bounded, content_text, function_call, function_tools, part_text

BLOCKS: Mapping[str, tuple[Json, str, str, str]] = {
    "call": ({"type": "tool_use", "input": {}}, "input_json_delta", "partial_json", "input"),
    "reasoning": ({"type": "thinking", "thinking": "", "signature": ""}, "thinking_delta", "thinking", "thinking"),
    "text": ({"type": "text", "text": ""}, "text_delta", "text", "text"),
}
"""By kind: an empty block, the type and the field of its deltas, and the block's field of the whole."""
STOP_REASONS: dict[Finish | None, str] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class ToolChoiceOptions(StrictModel):
    """The tools that may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputConfig(StrictModel):
    """Format of the answer; ``effort`` is the chat's reasoning effort."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesRequest(TranslatedRequest):
    """A request to ``/v1/messages``."""

    chat_names: ClassVar[Mapping[str, str]] = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
    }
    messages: Annotated[Objects, Field(min_length=1)]
    max_tokens: Count
    system: Annotated[Text | Objects | None, one_error("must be text or a list of text blocks")] = None
    stop_sequences: Stop = None
    top_k: TopK | None = None
    tool_choice: ToolChoiceOptions | None = None
    thinking: Any = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    thread: Any = None

    def _chat_fields(self, notes: Notes) -> Json:
        if isinstance(self.thread, dict) and self.thread.get("type") != "create":
            message = "thread: no conversation is kept here; send the whole of it"
            raise ApiError(404, message, "thread_not_found", "thread")  # makes Anthropic's client send all of it
        choice, output = self.tool_choice or ToolChoiceOptions(type="auto"), self.output_config or OutputConfig()
        named = {"type": "function", "function": {"name": choice.name}}
        words = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        system = [{"role": "system", "content": content_text(self.system, "system", notes)}] if self.system else []
        given = enumerate(bounded(self.messages, "messages", MAX_TURNS))
        turns = [turn for place, each in given for turn in _turns(each, f"messages.{place}", notes)]
        form = output.format or self.output_format
        off = isinstance(self.thinking, dict) and self.thinking.get("type") == "disabled"
        return {
            "messages": [*system, *turns],
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "tools": function_tools(self.tools, _tool, notes),
            "tool_choice": words[choice.type],
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
            "response_format": None if form is None else _schema_format(form),
            "reasoning_effort": output.effort,
            "chat_template_kwargs": {"enable_thinking": False} if off else None,
        }


class CountTokensRequest(MessagesRequest):
    """A request to ``/v1/messages/count_tokens``."""

    max_tokens: Count = 1


def _schema_format(form: Json) -> Json:
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        where = "output_config.format"
        raise invalid(where, f'{where}: must be {{"type": "json_schema", "schema": {{...}}}}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


def _tool(tool: Json) -> Json | None:
    """Convert a tool with a schema; return None for one that Anthropic runs."""
    if tool.get("type", "custom") != "custom":
        return None
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {ours: tool[name] for name, ours in names.items() if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _turns(message: Json, where: str, notes: Notes) -> list[Json]:
    """Convert a message to turns of a chat: tool results are separate turns, before its other content."""
    role, content = message.get("role"), message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if role not in ("user", "assistant", "system") or not isinstance(blocks, list):
        raise invalid(where, f"{where}: must have role user, assistant or system, and content")
    turns: list[Json] = []
    own: Json = {"role": role, "content": ""}
    for place, block in enumerate(bounded(blocks, where, MAX_TURNS)):
        kind, inside = block.get("type") if isinstance(block, dict) else None, f"{where}.content.{place}"
        if kind == "tool_result":
            result = content_text(block.get("content") or "", inside, notes)
            turns.append({"role": "tool", "content": result, "tool_call_id": block.get("tool_use_id")})
        elif kind == "tool_use":
            call = function_call(block.get("id"), block.get("name"), compact(block.get("input") or {}))
            own.setdefault("tool_calls", []).append(call)
        elif kind == "thinking":
            own["reasoning_content"] = own.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            own["content"] += part_text(block, inside, notes)
    return [*turns, own] if own["content"] or len(own) > 2 or not turns else turns


class MessagesFormat(BlockFormat):
    """The events and the complete form of one message."""

    def __init__(self, body: MessagesRequest, number: str) -> None:
        super().__init__()
        self._head = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": body.model}

    def begin(self) -> list[str]:
        usage = {"input_tokens": 0, "output_tokens": 0}
        return [_event("message_start", message={**self._message, "usage": usage})]

    def end(self, usage: Json, metrics: Json) -> list[str]:
        delta = {name: self._message[name] for name in ("stop_reason", "stop_sequence")}
        return [_event("message_delta", delta=delta, usage=_usage(usage)), _event("message_stop")]

    def error(self, error: ApiError) -> str:
        return event(error.anthropic_body, "error")

    @property
    def _message(self) -> Json:
        stop = self._stop_string if self._reason == "stop" else None
        reason = STOP_REASONS.get(self._reason) if stop is None else "stop_sequence"
        return {**self._head, "content": self._blocks, "stop_reason": reason, "stop_sequence": stop}

    def _ended(self, usage: Json, metrics: Json) -> Json:
        return {**self._message, "usage": _usage(usage), "metrics": metrics}

    def _opened(self, kind: str, call: CallDelta | None) -> list[str]:
        own: Json = {} if call is None else {"id": call.id, "name": call.name}
        self._blocks.append({**BLOCKS[kind][0], **own})
        return [self._of_block("start", content_block=self._blocks[-1])]

    def _grown(self, kind: str, text: str) -> str:
        _, name, field, _ = BLOCKS[kind]
        return self._of_block("delta", delta={"type": name, field: text})

    def _closed(self, kind: str, text: str) -> list[str]:
        self._blocks[-1][BLOCKS[kind][3]] = _object(text) if kind == "call" else text
        return [self._of_block("stop")]

    def _of_block(self, what: str, **fields: Any) -> str:
        return _event(f"content_block_{what}", index=len(self._blocks) - 1, **fields)


def _object(arguments: str) -> Json:
    """Parse a call's arguments; wrap them if they are no JSON object."""
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
