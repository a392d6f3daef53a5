"""OpenAI's ``/v1/responses``, without a memory: a request becomes a chat, and the chat's answer becomes items."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from forerun.models.text.message_formats import Json
from forerun.models.text.message_parser import CallDelta
from forerun.server.api_errors import ApiError
from forerun.server.replies import BlockFormat, event, padded
from forerun.server.schema import (
    Count,
    FunctionName,
    NamedSchema,
    Objects,
    PlainFormat,
    StreamOptions,
    StrictModel,
    Text,
    TranslatedRequest,
    joined_parts,
    one_error,
    only,
)  # fmt: skip

TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
ITEMS = {"text": ("message", "msg"), "reasoning": ("reasoning", "rs"), "call": ("function_call", "fc")}
"""Types of an answer's items and what their ids begin with, by the kind of block."""


class FlatSchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


class TextOptions(StrictModel):
    """How the answer's text looks; ``verbosity`` changes nothing."""

    format: Annotated[PlainFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ReasoningOptions(StrictModel):
    """``effort`` goes to the chat template; the others change nothing."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ChosenFunction(FunctionName):
    """The one tool that must be called."""

    type: Literal["function"]


FLAT_CHOICES = 'must be auto, none, required, or {"type": "function", "name": ...}'


class ResponsesRequest(TranslatedRequest):
    """To ``/v1/responses``. Nothing is kept, so there is no earlier response to go on with."""

    input: Annotated[Text | Objects, one_error("must be text or a list of items")]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenFunction, one_error(FLAT_CHOICES)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: Any = None
    max_tool_calls: Any = None
    truncation: Annotated[Any, only(None, "disabled", "auto")] = None
    top_logprobs: Annotated[Any, only(None, 0)] = None
    background: Annotated[Any, only(None, False)] = None
    previous_response_id: Annotated[Any, only(None)] = None
    conversation: Annotated[Any, only(None)] = None
    prompt: Annotated[Any, only(None)] = None

    def _chat_fields(self) -> Json:
        choice: Any = self.tool_choice
        if isinstance(choice, ChosenFunction):
            choice = {"type": "function", "function": {"name": choice.name}}
        return {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": choice,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
        }

    def _format(self) -> Json | None:
        form = None if self.text is None else self.text.format
        if not isinstance(form, FlatSchemaFormat):
            return None if form is None else {"type": form.type}
        return {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"})}

    def _messages(self) -> list[Json]:
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            _add_item(messages, item, f"input.{number}")
        return messages


def _tool(number: int, tool: Json) -> Json:
    if tool.get("type") != "function":
        message = f"tool {number} is of another type; allowed is function"
        raise ApiError(400, message, "unsupported", f"tools.{number}")
    function = {name: value for name, value in tool.items() if name not in ("type", "strict") and value is not None}
    return {"type": "function", "function": function}


def _add_item(messages: list[Json], item: Json, where: str) -> None:
    """Add what an item says to the turns of a chat."""
    kind = item.get("type", "message")
    if kind == "message":
        turn = {"role": item.get("role"), "content": joined_parts(item.get("content"), where, TEXT_PARTS)}
        if turn["role"] == "assistant" and _is_thought(messages):
            turn = messages.pop() | turn
        messages.append(turn)
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = joined_parts(item.get("output"), where, TEXT_PARTS)
        messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
    elif kind == "reasoning":
        if text := joined_parts(item.get("content") or "", where, TEXT_PARTS):
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
    else:
        raise ApiError(400, f"{where}: the type must be one of {', '.join(ITEM_TYPES)}", "invalid_value", where)


def _is_thought(messages: list[Json]) -> bool:
    """Whether the last turn is reasoning, for which the answer is still to come."""
    return bool(messages) and messages[-1].keys() == {"role", "content", "reasoning_content"}


class ResponsesFormat(BlockFormat):
    """The events and the whole of one response; ``number`` is the request's name."""

    def __init__(self, body: ResponsesRequest, number: str) -> None:
        super().__init__()
        self._sequence = 0
        self._pads = body.stream_options is not None and bool(body.stream_options.include_obfuscation)
        self._head: Json = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "model": body.model,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}} if body.text is None else body.text.model_dump(by_alias=True),
            "tool_choice": body.model_dump()["tool_choice"] or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

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
        """An answer has an item, also if it has no text."""
        return [*([] if self._blocks else self._switch("text")), *super()._finish()]

    def _opened(self, kind: str, call: CallDelta | None) -> list[str]:
        name, prefix = ITEMS[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": name, "status": "in_progress"}
        self._blocks.append(item)
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, "arguments": ""}
            return [self._of_list("added")]
        item |= {"role": "assistant", "content": []} if kind == "text" else {"summary": [], "content": []}
        added = self._of_list("added")
        more: Json = {"annotations": [], "logprobs": []} if kind == "text" else {}
        item["content"].append({"type": _part_type(kind), "text": "", **more})
        return [added, self._of_item("content_part.added", content_index=0, part=item["content"][0])]

    def _grown(self, kind: str, text: str) -> str:
        if kind == "call":
            return self._of_item("function_call_arguments.delta", delta=text)
        return self._of_item(f"{_part_type(kind)}.delta", content_index=0, delta=text, **_no_logprobs(kind))

    def _closed(self, kind: str, text: str) -> list[str]:
        item = self._blocks[-1]
        item["status"] = self._status
        if kind == "call":
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
        said = {"type": name, "sequence_number": self._sequence, **body}
        self._sequence += 1
        return event(padded(said) if self._pads and name.endswith(".delta") else said, name)


def _part_type(kind: str) -> str:
    return "output_text" if kind == "text" else "reasoning_text"


def _no_logprobs(kind: str) -> Json:
    return {"logprobs": []} if kind == "text" else {}
