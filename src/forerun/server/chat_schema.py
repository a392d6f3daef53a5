"""Requests to OpenAI's ``/v1/chat/completions``, and the parts that other APIs and ``/tokenize`` share with it."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from forerun.models.text.prompts import RESERVED_VARIABLES
from forerun.server.schema import (
    FAIL_FAST,
    CompletionRequest,
    Count,
    Extension,
    GenerationRequest,
    Objects,
    StrictModel,
    Temperature,
    Text,
    TopP,
    one_error,
)
from forerun.server.tolerance import Notes, chat_turns, function_tools


class Message(StrictModel):
    """A turn of a conversation. A call's arguments go to the chat template as an object if they are one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None:
            raise PydanticCustomError("content", "a message needs content")
        for number, call in enumerate(self.tool_calls or ()):
            function = call.get("function")
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                message = f"call {number} needs a function, with its name and arguments"
                raise PydanticCustomError("tool_calls", message)
        return self

    def for_template(self) -> dict[str, Any]:
        """Convert the message to a chat template's form."""
        more = self.model_dump(include={"name", "tool_call_id", "reasoning_content"})
        more["tool_calls"] = [_with_object(call) for call in self.tool_calls or ()]
        given = {name: value for name, value in more.items() if value}
        return {"role": self.role, "content": self.content, **given}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments: OpenAI's clients send a string, and templates write JSON."""
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Remove a tool's hints; return None if it runs elsewhere. A later check refuses invalid ones."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind not in ("function", "custom"):
        return None
    return {name: value for name, value in tool.items() if name != "cache_control"}


def _allowed(given: dict[str, Any]) -> dict[str, Any]:
    """Reduce the tools to those that ``tool_choice`` allows, and the choice to its mode."""
    choice: Any = given.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return given
    inner = choice.get("allowed_tools", choice)  # chats nest what responses do not
    allowed, tools = (inner.get("tools") or [] if isinstance(inner, dict) else None), given.get("tools") or []
    if not isinstance(allowed, list) or not isinstance(tools, list):
        return given  # to be refused
    names = [_name(each.get("function") or each) for each in allowed if isinstance(each, dict)]
    chosen = [tool for tool in tools if isinstance(tool, dict) and _name(tool.get("function")) in names]
    return {**given, "tools": chosen, "tool_choice": inner.get("mode", "auto")}


def _name(function: Any) -> Any:
    return function.get("name") if isinstance(function, dict) else None


def _check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise PydanticCustomError("tools", f"tool {number} must be {TOOL_SHAPE}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(TOOL_NAME_PATTERN, name):
            raise PydanticCustomError("tools", f"the name of tool {number} must match {TOOL_NAME_PATTERN}")
        if parameters is not None and not isinstance(parameters, dict):
            raise PydanticCustomError("tools", f"the parameters of tool {number} must be a schema")
        names.append(name)
    if len(set(names)) < len(names):
        raise PydanticCustomError("tools", "two tools have the same name")
    return tools


TOOL_SHAPE = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
TOOL_NAME_PATTERN = r"[A-Za-z0-9_.-]{1,64}"
TOOL_CHOICES = 'must be auto, none, required, or {"type": "function", "function": {"name": ...}}'


class FunctionName(StrictModel):
    """A tool's name."""

    name: str


class NamedChoice(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedChoice, one_error(TOOL_CHOICES)]


def _check_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name in RESERVED_VARIABLES or not isinstance(value, str | int | float | None):
            message = "must be variables of the chat template: texts, numbers, true or false"
            raise PydanticCustomError("chat_template_kwargs", message)
    return options


TemplateOptions = Annotated[dict[str, Any], Field(max_length=16), AfterValidator(_check_options)]


Messages = Annotated[list[Message], Field(min_length=1), FAIL_FAST]


class ConversationFields(StrictModel):
    """The fields of a conversation."""

    tools: Annotated[Objects, AfterValidator(_check_tools)] | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @classmethod
    def _translated(cls, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
        if "messages" in given:
            given["messages"] = chat_turns(given["messages"], notes)
        if "tools" in given:
            given["tools"] = function_tools(given["tools"], _chat_tool, notes)
        return _allowed(given)

    @property
    def template_tools(self) -> Objects | None:
        """The tools for the chat template, whose calls are parsed."""
        return self.tools or None

    @property
    def template_options(self) -> dict[str, Any]:
        """Further variables for the chat template."""
        return self.chat_template_kwargs or {}


class ChatRequest(ConversationFields, GenerationRequest):
    """A request to ``/v1/chat/completions``."""

    messages: Messages
    max_completion_tokens: Count | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_name(self) -> str:
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def continued(self) -> bool:
        """Whether the answer continues the assistant's last turn."""
        if self.continue_final_message is not None:
            return self.continue_final_message
        last = self.messages[-1]
        return last.role == "assistant" and not last.tool_calls and self.add_generation_prompt is not True

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def template_tools(self) -> Objects | None:
        return None if self.tool_choice == "none" else super().template_tools

    @property
    def required_tools(self) -> Objects | None:
        """The tools of which one must be called, or None."""
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools or () if tool["function"]["name"] == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else None

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedChoice)

    @property
    def template_options(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | super().template_options

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_completion_tokens and self.max_tokens and self.max_completion_tokens != self.max_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        if self.continued and (self.messages[-1].role != "assistant" or self.add_generation_prompt):
            message = "it is for an assistant's turn at the end, and not with add_generation_prompt: true"
            raise PydanticCustomError("continue_final_message", message)
        if self.add_generation_prompt is False and not self.continued:
            message = "it is false, which is for a last turn that is continued: continue_final_message: true"
            raise PydanticCustomError("add_generation_prompt", message)
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            names = ", ".join(tool["function"]["name"] for tool in self.tools or ()) or "none"
            raise PydanticCustomError("tool_choice", f"tool_choice requires a call; the available tools: {names}")
        return self


class FittingChat(ChatRequest):
    """A chat from another API."""

    clamps = True


GenerationBody = CompletionRequest | ChatRequest


class TokenizeRequest(ConversationFields):
    """A request to ``/tokenize``."""

    tolerant = True
    model: str | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    continued: ClassVar[bool] = False

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give a prompt or messages")
        return self


class TranslatedRequest(StrictModel):
    """A request to another API that is translated into a chat."""

    tolerant = True
    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Objects | None = None
    forerun: Extension = Extension()

    def chat(self, notes: Notes | None = None) -> ChatRequest:
        """Translate the request; raise ApiError if it cannot be a chat."""
        notes = Notes() if notes is None else notes
        same = {"model", "temperature", "top_p", "stream", "top_k", "parallel_tool_calls", "forerun"}
        return FittingChat.checked(self.model_dump(include=same) | self._chat_fields(notes), notes, type(self))

    def _chat_fields(self, notes: Notes) -> dict[str, Any]:
        """Return the chat's fields with another name or form."""
        raise NotImplementedError
