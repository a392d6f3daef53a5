"""Translate OpenAI's ``/v1/responses``: a request becomes a chat, and the chat's answer becomes items."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from forerun.models.text.call_formats import Json
from forerun.models.text.message_parser import CallDelta
from forerun.server.api_errors import ApiError, invalid
from forerun.server.chat_schema import FunctionName, TranslatedRequest
from forerun.server.replies import BlockFormat, compact, event, padded
from forerun.server.schema import Count, NamedSchema, Objects, PlainFormat, StreamOptions, StrictModel, Text, one_error
from forerun.server.tolerance import (
    CUSTOM_FIELD,
    MAX_TURNS,
    Notes,
    bounded,
    content_text,
    custom_arguments,
    custom_input,
    function_call,
    function_tools,
)

ITEMS = {"text": ("message", "msg"), "reasoning": ("reasoning", "rs"), "call": ("function_call", "fc")}
"""Types and id prefixes of an answer's items, by kind of block."""
OWN_FIELDS = ("id", "type", "status", "call_id", "name", "namespace")
"""Fields of a call's item that are not its arguments."""


class FlatSchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


class TextOptions(StrictModel):
    """Format of the answer."""

    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ReasoningOptions(StrictModel):
    """``effort`` is the chat's reasoning effort; the others are ignored."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None
    context: Any = None
    mode: Any = None


class ChosenFunction(FunctionName):
    """The one tool that must be called."""

    type: Literal["function", "custom"]


class AllowedTools(StrictModel):
    """The tools among which the model chooses."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Objects


FLAT_CHOICES = (
    'must be auto, none, required, {"type": "function", "name": ...}, or '
    '{"type": "allowed_tools", "mode": ..., "tools": [...]}'
)


class ResponsesRequest(TranslatedRequest):
    """A request to ``/v1/responses``. Nothing is stored, so no earlier response can be continued."""

    chat_names: ClassVar[Mapping[str, str]] = {
        "messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
    }  # fmt: skip
    input: Annotated[Text | Objects, one_error("must be text or a list of items")]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None, one_error(FLAT_CHOICES)
    ] = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def custom_tools(self) -> frozenset[str]:
        """The names of tools whose input is any text."""
        return frozenset(str(tool.get("name")) for tool in self.tools or () if tool.get("type") == "custom")

    def _chat_fields(self, notes: Notes) -> Json:
        choice: Any = self.tool_choice
        if isinstance(choice, AllowedTools):
            choice = choice.model_dump()
        elif isinstance(choice, ChosenFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": self._messages(notes),
            "max_completion_tokens": self.max_output_tokens,
            "tools": function_tools(self.tools, _tool, notes),
            "tool_choice": choice,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }

    def _format(self) -> Json | None:
        form = None if self.text is None else self.text.format
        if not isinstance(form, FlatSchemaFormat):
            return None if form is None else {"type": form.type}
        return {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"})}

    def _messages(self, notes: Notes) -> list[Json]:
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(bounded(self.input, "input", MAX_TURNS)):
            _add_item(messages, item, f"input.{number}", notes)
        return messages


def _tool(tool: Json) -> Json | None:
    """Convert a function, or a custom tool to one with a text argument; return None for one that OpenAI runs."""
    if tool.get("type") not in ("function", "custom"):
        return None
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    if tool["type"] == "custom":
        given = tool.get("format")
        form: Json = given if isinstance(given, dict) else {}
        if definition := form.get("definition"):
            syntax = f"Its input follows this {form.get('syntax', '')} grammar:\n{definition}"
            function["description"] = "\n\n".join(filter(None, (function.get("description"), syntax)))
        text = {"type": "string", "description": "All that the tool is given, as it is."}
        function["parameters"] = {"type": "object", "properties": {CUSTOM_FIELD: text}, "required": [CUSTOM_FIELD]}
    return {"type": "function", "function": function}


def _add_item(messages: list[Json], item: Json, where: str, notes: Notes) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        turn = {"role": item.get("role"), "content": content_text(item.get("content"), f"{where}.content", notes)}
        if turn["role"] == "assistant" and messages and messages[-1].keys() == {"role", "content", "reasoning_content"}:
            turn = messages.pop() | turn  # that is reasoning that still lacks its answer
        messages.append(turn)
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ""
        if text := content_text(parts, f"{where}.content", notes):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    elif isinstance(kind, str) and kind.endswith("_output") and "call_id" in item:
        output = item.get("output", item.get("tools")) or ""
        text = content_text(output, f"{where}.output", notes) if _is_content(output) else compact(output)
        messages.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
    elif isinstance(kind, str) and kind.endswith("_call") and "call_id" in item:
        _own_turn(messages).setdefault("tool_calls", []).append(_past_call(item, kind))
    elif isinstance(kind, str) and kind.endswith("_call"):
        notes.add(f"the results of {kind} were left out: they are kept elsewhere")
        given = {name: value for name, value in item.items() if name not in OWN_FIELDS and name != "result"}
        _own_turn(messages)["content"] += f"[{kind.removesuffix('_call')}: {compact(given)}]"
    elif kind in UNREADABLE_ITEMS:
        notes.add(f"{where} ({kind}) was left out: it is kept elsewhere")
    else:
        known = "message, function_call, function_call_output, custom_tool_call, reasoning"
        raise invalid(where, f"{where}: the type must be one that is known, such as {known}")


UNREADABLE_ITEMS = (
    "item_reference", "compaction", "compaction_summary", "context_compaction", "mcp_list_tools", "ghost_snapshot",
    "mcp_approval_request", "mcp_approval_response", "tool_search_output", "additional_tools", "compaction_trigger",
)  # fmt: skip
"""Items that refer to content on OpenAI's servers."""


def _is_content(output: Any) -> bool:
    if isinstance(output, list):
        return all(isinstance(part, dict) and "type" in part for part in output)
    return isinstance(output, str)


def _own_turn(messages: list[Json]) -> Json:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _past_call(item: Json, kind: str) -> Json:
    """Convert a past call; one of OpenAI's tools is named after its type."""
    if kind == "function_call":
        arguments = item.get("arguments")
        return function_call(item.get("call_id"), item.get("name"), "{}" if arguments is None else arguments)
    if kind == "custom_tool_call":
        return function_call(item.get("call_id"), item.get("name"), custom_arguments(item.get("input")))
    given = {name: value for name, value in item.items() if name not in OWN_FIELDS}
    return function_call(item.get("call_id"), kind.removesuffix("_call"), json.dumps(given, ensure_ascii=False))


class ResponsesFormat(BlockFormat):
    """The events and the complete form of one response."""

    def __init__(self, body: ResponsesRequest, number: str) -> None:
        super().__init__()
        self._sequence = 0
        self._pads = body.stream_options is not None and bool(body.stream_options.include_obfuscation)
        self._custom = body.custom_tools
        given = body.model_dump(include={"model", "instructions", "max_output_tokens", "tool_choice"})
        self._head = {"id": f"resp_{number}", "object": "response", "created_at": int(time.time()), **given}
        self._head |= dict.fromkeys(("error", "incomplete_details", "previous_response_id"))
        self._head |= {
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": given["tool_choice"] or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def note(self, notes: Sequence[str]) -> None:
        self._head["metadata"] = {f"forerun_note_{number}": note[:512] for number, note in enumerate(notes, 1)}

    def begin(self) -> list[str]:
        response = {"response": self._response("in_progress")}
        return [self._event("response.created", response), self._event("response.in_progress", response)]

    def end(self, usage: Json, metrics: Json) -> list[str]:
        response = self._ended(usage, metrics)
        return [self._event(f"response.{response['status']}", {"response": response})]

    def error(self, error: ApiError) -> str:
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _ended(self, usage: Json, metrics: Json) -> Json:
        response = self._response(self._status)
        if self._reason == "length":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "forerun": usage.get("forerun"),
        }
        return {**response, "metrics": metrics}

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status, "output": self._blocks, "usage": None}

    def _finish(self) -> list[str]:
        return [*([] if self._blocks else self._switch("text")), *super()._finish()]  # an empty answer is an item, too

    def _opened(self, kind: str, call: CallDelta | None) -> list[str]:
        name, prefix = ITEMS[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": name, "status": "in_progress"}
        self._blocks.append(item)
        if call is not None:
            custom = call.name in self._custom
            own = {"id": item["id"].replace("fc", "ctc", 1), "type": "custom_tool_call"} if custom else {}
            item |= {**own, "call_id": call.id, "name": call.name, "input" if custom else "arguments": ""}
            return [self._of_list("added")]
        item |= {"role": "assistant", "content": []} if kind == "text" else {"summary": [], "content": []}
        added = self._of_list("added")
        more: Json = {"annotations": [], "logprobs": []} if kind == "text" else {}
        item["content"].append({"type": _part_type(kind), "text": "", **more})
        return [added, self._of_item("content_part.added", content_index=0, part=item["content"][0])]

    def _grown(self, kind: str, text: str) -> str:
        if kind == "call" and "input" in self._blocks[-1]:
            return ""  # parsed when the arguments' JSON is complete
        if kind == "call":
            return self._of_item("function_call_arguments.delta", delta=text)
        return self._of_item(f"{_part_type(kind)}.delta", content_index=0, delta=text, **_no_logprobs(kind))

    def _closed(self, kind: str, text: str) -> list[str]:
        item = self._blocks[-1]
        item["status"] = self._status
        if kind == "call" and "input" in item:
            item["input"] = text = custom_input(text)
            events = [
                self._of_item("custom_tool_call_input.delta", delta=text),
                self._of_item("custom_tool_call_input.done", input=text),
            ]
        elif kind == "call":
            item["arguments"] = text
            events = [self._of_item("function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            (part,) = item["content"]
            part["text"] = text
            events = [
                self._of_item(f"{_part_type(kind)}.done", content_index=0, text=text, **_no_logprobs(kind)),
                self._of_item("content_part.done", content_index=0, part=part),
            ]
        return [*events, self._of_list("done")]

    def _of_list(self, what: str) -> str:
        place = {"output_index": len(self._blocks) - 1, "item": self._blocks[-1]}
        return self._event(f"response.output_item.{what}", place)

    def _of_item(self, what: str, **more: Any) -> str:
        place = {"item_id": self._blocks[-1]["id"], "output_index": len(self._blocks) - 1}
        return self._event(f"response.{what}", {**place, **more})

    def _event(self, name: str, body: Json) -> str:
        body = {"type": name, "sequence_number": self._sequence, **body}
        self._sequence += 1
        return event(padded(body) if self._pads and name.endswith(".delta") else body, name)


def _part_type(kind: str) -> str:
    return "output_text" if kind == "text" else "reasoning_text"


def _no_logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "text" else {}
