"""OpenAI's ``/v1/responses``, without a memory: a request becomes a chat, and the chat's answer becomes items.

A whole response is what the events of its stream add up to.
"""

from __future__ import annotations

import time
import uuid
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
    NamedSchema,
    ObjectFormat,
    Objects,
    StreamOptions,
    StrictModel,
    Temperature,
    Text,
    TextFormat,
    chat_request,
    one_error,
    only,
)

TEXT_PARTS = ("input_text", "output_text", "text")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class FlatSchemaFormat(NamedSchema):
    """JSON that a schema describes."""

    type: Literal["json_schema"]


class TextOptions(StrictModel):
    """How the answer's text looks; ``verbosity`` changes nothing."""

    format: Annotated[TextFormat | ObjectFormat | FlatSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Any = None


class ReasoningOptions(StrictModel):
    """``effort`` goes to the chat template; the others change nothing."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class ChosenFunction(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    name: str


FLAT_CHOICES = 'must be auto, none, required, or {"type": "function", "name": ...}'


class ResponsesRequest(StrictModel):
    """To ``/v1/responses``. Nothing is kept, so there is no earlier response to go on with."""

    ignores = True
    model: str
    input: Annotated[Text | Objects, one_error("must be text or a list of items")]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[dict[str, Any]], FAIL_FAST] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenFunction, one_error(FLAT_CHOICES)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    forerun: Extension = Extension()
    include: Any = None
    max_tool_calls: Any = None
    truncation: Annotated[Any, AfterValidator(only(None, "disabled", "auto"))] = None
    top_logprobs: Annotated[Any, AfterValidator(only(None, 0))] = None
    background: Annotated[Any, AfterValidator(only(None, False))] = None
    previous_response_id: Annotated[Any, AfterValidator(only(None))] = None
    conversation: Annotated[Any, AfterValidator(only(None))] = None
    prompt: Annotated[Any, AfterValidator(only(None))] = None

    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
            ApiError: if it cannot be one.
        """
        named = isinstance(self.tool_choice, ChosenFunction)
        choice = {"type": "function", "function": {"name": self.tool_choice.name}} if named else self.tool_choice  # type: ignore[union-attr]
        fields: Json = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [self._tool(number, tool) for number, tool in enumerate(self.tools or ())] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "forerun": self.forerun.model_dump(),
        }
        return chat_request(fields)

    def _format(self) -> Json | None:
        form = None if self.text is None else self.text.format
        if not isinstance(form, FlatSchemaFormat):
            return None if form is None else {"type": form.type}
        return {"type": "json_schema", "json_schema": form.model_dump(by_alias=True, exclude={"type"})}

    @staticmethod
    def _tool(number: int, tool: Json) -> Json:
        if tool.get("type") != "function":
            message = f"tool {number} is of another type; allowed is function"
            raise ApiError(400, message, "unsupported", f"tools.{number}")
        function = {name: value for name, value in tool.items() if name not in ("type", "strict") and value is not None}
        return {"type": "function", "function": function}

    def _messages(self) -> list[Json]:
        messages: list[Json] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            self._add_item(messages, number, item)
        return messages

    def _add_item(self, messages: list[Json], number: int, item: Json) -> None:
        kind = item.get("type", "message")
        where = f"input.{number}"
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            messages.append({"role": role, "content": _plain(item.get("content"), where)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
            if last is None:
                messages.append(last := {"role": "assistant", "content": ""})
            last.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _plain(item.get("output"), where)
            messages.append({"role": "tool", "content": content, "tool_call_id": item.get("call_id")})
        elif kind == "reasoning":
            if text := _plain(item.get("content") or "", where):
                messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        else:
            raise ApiError(400, f"{where}: the type must be one of {', '.join(ITEM_TYPES)}", "invalid_value", where)


def _plain(content: Any, where: str) -> str:
    """Text, or parts of it, as text."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        wrong = [part for part in content if part.get("type") not in (*TEXT_PARTS, "reasoning_text")]
        if not wrong:
            return "".join(part["text"] for part in content)
    raise ApiError(400, f"{where}: must be text, or parts of type {' or '.join(TEXT_PARTS)}", "invalid_value", where)


class ResponsesFormat:
    """The events and the whole of one response.

    Args:
        body: the request.
        number: the request's name.
    """

    def __init__(self, body: ResponsesRequest, number: str) -> None:
        self._sequence = 0
        self._items: list[Json] = []
        self._kind = ""
        self._call = -1
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
        """The first events."""
        response = {"response": self._response("in_progress")}
        return [self._event("response.created", response), self._event("response.in_progress", response)]

    def chunk(self, delta: Delta) -> str:
        """The events of new text."""
        events: list[str] = []
        if delta.reasoning:
            events += self._switch("reasoning") + self._add_text("response.reasoning_text.delta", delta.reasoning)
        if delta.text:
            events += self._switch("message") + self._add_text("response.output_text.delta", delta.text)
        for call in delta.calls:
            if call.index != self._call:
                self._call = call.index
                events += self._switch("function_call", call_id=call.id, name=call.name, arguments="")
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                events.append(self._of_item("response.function_call_arguments.delta", delta=call.arguments))
        if delta.finish_reason is not None:
            if not self._items:
                events += self._switch("message")
            events += self._close("incomplete" if delta.finish_reason == "length" else "completed")
        return "".join(events)

    def end(self, usage: Json, metrics: Json) -> list[str]:
        """The last event."""
        response = self._ended(usage, metrics)
        return [self._event(f"response.{response['status']}", {"response": response})]

    def add(self, delta: Delta) -> None:
        """Add new text to the whole response."""
        self.chunk(delta)

    def whole(self, usage: Json, metrics: Json) -> str:
        """The whole response."""
        return compact(self._ended(usage, metrics))

    def error(self, error: ApiError) -> str:
        """An event that ends a stream by an error."""
        return self._event("error", {"code": error.code, "message": error.message, "param": error.param})

    def _ended(self, usage: Json, metrics: Json) -> Json:
        status = "incomplete" if any(item["status"] == "incomplete" for item in self._items) else "completed"
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            "forerun": usage.get("forerun"),
        }
        response["metrics"] = metrics
        return response

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status, "output": self._items, "usage": None}

    def _switch(self, kind: str, **more: Any) -> list[str]:
        """Go on with an item of a kind: the open one, or a new one. Each call is a new one."""
        if kind == self._kind and kind != "function_call":
            return []
        events = self._close("completed")
        self._kind = kind
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item: Json = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **more}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        events.append(self._event("response.output_item.added", {"output_index": self._place, "item": item}))
        if kind != "function_call":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"].append(part if kind == "message" else {"type": "reasoning_text", "text": ""})
            events.append(self._of_item("response.content_part.added", content_index=0, part=item["content"][0]))
        return events

    def _add_text(self, name: str, text: str) -> list[str]:
        self._items[-1]["content"][0]["text"] += text
        more: Json = {"logprobs": []} if name == "response.output_text.delta" else {}
        return [self._of_item(name, content_index=0, delta=text, **more)]

    def _close(self, status: str) -> list[str]:
        """End the open item."""
        if not self._kind:
            return []
        item, kind = self._items[-1], self._kind
        item["status"], self._kind = status, ""
        if kind == "function_call":
            arguments = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("response.function_call_arguments.done", **arguments)]
        else:
            part = item["content"][0]
            name = "output_text" if kind == "message" else "reasoning_text"
            more: Json = {"logprobs": []} if kind == "message" else {}
            events = [
                self._of_item(f"response.{name}.done", content_index=0, text=part["text"], **more),
                self._of_item("response.content_part.done", content_index=0, part=part),
            ]
        return [*events, self._event("response.output_item.done", {"output_index": self._place, "item": item})]

    @property
    def _place(self) -> int:
        return len(self._items) - 1

    def _of_item(self, event_type: str, **more: Any) -> str:
        return self._event(event_type, {"item_id": self._items[-1]["id"], "output_index": self._place, **more})

    def _event(self, name: str, body: Json) -> str:
        text = event({"type": name, "sequence_number": self._sequence, **body}, name)
        self._sequence += 1
        return text
