"""Requests of OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, as far as Forerun serves them.

``forerun.server.tolerance`` removes what may be ignored; any other unknown field is refused. So no request silently
gets less than it says. A list's check stops at the first error: there may be a hundred thousand.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from forerun.models.text.prompts import RESERVED_VARIABLES
from forerun.server.api_errors import ApiError
from forerun.server.field_errors import validation_error
from forerun.server.tenants import NAMESPACE_PATTERN
from forerun.server.tolerance import Notes, chat_turns, chosen, content_text, function_tools, requested

MAX_CHOICES = 128
"""Answers per prompt; OpenAI's limit."""
MAX_BIASES = 1024
"""Tokens that a request may have a bias for."""
SEED_LIMIT = 2**63
MAX_STOPS = 64
"""Stop strings and tokens of a request. Each string is searched for in every new text."""
MIN_TEMPERATURE = 1e-6
"""Logits divided by less may overflow a float32."""


def one_error(message: str) -> WrapValidator:
    """Report one error for a field of several types, instead of one per type."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kind", message) from None

    return WrapValidator(check)


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("temperature", "must be 0, which is greedy, or at least a millionth")
    return temperature


FAIL_FAST = Field(fail_fast=True)
"""A list stops at its first error. Four million errors cost half a minute and 6 GiB."""
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS), FAIL_FAST] | None,
    one_error(f"must be a string or a list of up to {MAX_STOPS}, none of them empty: it would stop everywhere"),
]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = str
"""Whole characters: the body was checked for halves of surrogate pairs."""
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_check_temperature)]
Tokens = Annotated[list[Token], Field(min_length=1), FAIL_FAST]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), FAIL_FAST]
    | Tokens
    | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_CHOICES), FAIL_FAST],
    one_error(f"must be valid text, token ids, or a list of up to {MAX_CHOICES} of either, none of them empty"),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[
    dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Bias],
    Field(max_length=MAX_BIASES),
    one_error(f"must have token ids and numbers from -100 to 100, {MAX_BIASES} of them at most"),
]
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]


class StrictModel(BaseModel):
    """A model that accepts no unknown field and converts nothing; null equals a missing field."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    tolerant: ClassVar[bool] = False
    """Whether hints and unused features are ignored."""
    chat_names: ClassVar[Mapping[str, str]] = {}
    """Its names of a chat's fields, for errors, where they differ."""

    @model_validator(mode="before")
    @classmethod
    def _tolerate(cls, given: Any, info: ValidationInfo) -> Any:
        """Remove ignored fields, and report many unknown ones as one error: there may be thousands."""
        if not isinstance(given, dict):
            return given
        known = _own_names(cls)
        if cls.tolerant:
            given = requested(given, known)
        else:
            given = {name: value for name, value in given.items() if value is not None or name not in known}
        if len(given) > len(known):
            message = "there are {given} fields, of which {known} are known"
            raise PydanticCustomError("unsupported", message, {"given": len(given), "known": len(known)})
        return cls._translated(given, info.context if isinstance(info.context, Notes) else Notes())

    @classmethod
    def _translated(cls, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
        """Bring the fields into the one form that is checked."""
        return given

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Rename the fields of errors about the chat that a request was translated into."""
        try:
            yield
        except ApiError as error:
            error.param = cls.chat_names.get(error.param or "", error.param)
            raise

    @classmethod
    def checked(cls, given: Any, notes: Notes, asked: type[StrictModel] | None = None) -> Self:
        """Check a request; raise an ApiError with the names of ``asked``, if it was translated from one."""
        try:
            return cls.model_validate(given, context=notes)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            names = functools.partial(field_names, asked or cls)
            raise validation_error(faults, names, asked.chat_names if asked else {}) from None


@functools.cache
def _own_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


class StreamOptions(StrictModel):
    """``include_usage``: a last chunk has the usage; with ``continuous_usage_stats`` each has that so far.
    ``include_obfuscation``: chunks are padded."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool = False


class Extension(StrictModel):
    """Forerun's fields; none of them changes an output.

    ``namespace``: drafts come from the tenant's outputs in this namespace. ``drafter``: the server's, or ``none``.
    ``budget``: maximum draft length. ``trace``: a stream names the source of each token.
    """

    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN)] = "default"
    drafter: str | None = None
    budget: Annotated[int, Field(ge=0)] | None = None
    trace: bool = False


class PlainFormat(StrictModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(StrictModel):
    """A JSON schema, always enforced, whatever ``strict`` says; ``name`` and ``description`` are ignored."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictModel):
    """Text that a regular expression matches completely."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


class GrammarFormat(StrictModel):
    """Text that follows a grammar in llguidance's form of Lark."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[PlainFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]


class Prediction(StrictModel):
    """Expected content of the answer, to draft from."""

    type: Literal["content"]
    content: Text

    @classmethod
    def _translated(cls, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
        if isinstance(given.get("content"), list):
            given["content"] = content_text(given["content"], "prediction.content", notes)
        return given


class GenerationRequest(StrictModel):
    """The fields that both kinds of requests have."""

    tolerant = True
    clamps: ClassVar[bool] = False
    """Whether a length limit beyond the available room is cut instead of refused."""
    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    forerun: Extension = Extension()
    response_format: ResponseFormat | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Biases | None = None
    prediction: Prediction | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOPS), FAIL_FAST] = []
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    skip_special_tokens: bool = True

    @property
    def token_limit(self) -> int | None:
        """Return the requested maximum length of the answer, in tokens."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """Return the field of ``token_limit``."""
        return "max_tokens"

    @property
    def format(self) -> dict[str, Any] | None:
        """Return the response format for the engine; None for any text."""
        return None if self.response_format is None else self.response_format.model_dump(by_alias=True)

    @property
    def alternatives(self) -> int | None:
        """Return the number of alternatives listed per token; None without log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """Return the strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def texts(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _check_streamed(self) -> GenerationRequest:
        if self.min_tokens and self.stops:
            raise PydanticCustomError("min_tokens", "min_tokens and stop do not go together")
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for streams; add stream: true")
        if self.forerun.trace and not self.stream:
            raise PydanticCustomError("trace", "forerun.trace is for streams; add stream: true")
        return self


class CompletionRequest(GenerationRequest):
    """A request to ``/v1/completions``, with ``prompt`` as text, token ids, or several of either.

    ``suffix``: text after the answer. ``echo``: the answer begins with the prompt.
    """

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Text | None = None
    echo: bool | None = None
    add_special_tokens: bool = True
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def texts(self) -> int:
        return len(self.prompts) * (self.n or 1)

    @model_validator(mode="after")
    def _check_echo(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "max_tokens is 0, which is for echo: true; it must be at least 1")
        if self.echo and self.suffix is not None:
            raise PydanticCustomError("echo", "echo and suffix do not go together")
        if self.echo and self.logprobs is not None and self.format is not None:
            raise PydanticCustomError("echo", "echo with logprobs does not go together with response_format")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Return a list of prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


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
                raise PydanticCustomError(
                    "tool_calls", "call {number} needs a function, with its name and arguments", {"number": number}
                )
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message in a chat template's form."""
        more = self.model_dump(include={"name", "tool_call_id", "reasoning_content"})
        more["tool_calls"] = [_with_object(call) for call in self.tool_calls or ()]
        given = {name: value for name, value in more.items() if value}
        return {"role": self.role, "content": self.content, **given}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments into an object: OpenAI's clients send a string, and templates write JSON."""
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any] | None:
    """Remove a tool's hints; return None for one that runs elsewhere. Invalid ones are refused later."""
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
    listed = [each for each in inner.get("tools") or () if isinstance(each, dict)]
    names = [(each.get("function") or each).get("name") for each in listed]
    return {**given, "tools": chosen(given.get("tools") or (), names), "tool_choice": inner.get("mode", "auto")}


def _check_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise PydanticCustomError("tools", "tool {number} must be {shape}", {"number": number, "shape": TOOL_SHAPE})
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not re.fullmatch(TOOL_NAME_PATTERN, name):
            message = "the name of tool {number} must match {pattern}"
            raise PydanticCustomError("tools", message, {"number": number, "pattern": TOOL_NAME_PATTERN})
        if parameters is not None and not isinstance(parameters, dict):
            raise PydanticCustomError("tools", "the parameters of tool {number} must be a schema", {"number": number})
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
    """The fields of a conversation; ``chat_template_kwargs`` go to the chat template."""

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
        """Return the tools that the chat template sees, and whose calls are parsed."""
        return self.tools or None

    @property
    def template_options(self) -> dict[str, Any]:
        """Return further variables for the chat template."""
        return self.chat_template_kwargs or {}


class ChatRequest(ConversationFields, GenerationRequest):
    """A request to ``/v1/chat/completions``. With ``tool_choice: "none"`` the template sees no tools.
    ``reasoning_effort`` goes to the chat template, too."""

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
        """Return whether the answer continues the assistant's last turn: by default, if there is one."""
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
        """Return the tools of which one must be called; None if none must be."""
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools or () if tool["function"]["name"] == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else None

    @property
    def parallel(self) -> bool:
        """Return whether an answer may have several calls."""
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
            message = "tool_choice requires a call; the available tools: {names}"
            raise PydanticCustomError("tool_choice", message, {"names": names})
        return self


class FittingChat(ChatRequest):
    """A chat from another API, whose length limit is cut to the available room."""

    clamps = True


GenerationBody = CompletionRequest | ChatRequest


class TokenizeRequest(ConversationFields):
    """A request to ``/tokenize``: a ``prompt``, or ``messages`` for the chat template."""

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


class DetokenizeRequest(StrictModel):
    """A request to ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Token], FAIL_FAST]


@functools.cache
def field_names(model: type[BaseModel], nested: bool = False) -> frozenset[str]:
    """Return the names of a request's fields, or of those inside them."""
    if not nested:
        return _own_names(model)
    parts = model.model_json_schema().get("$defs", {}).values()
    return frozenset(name for part in parts for name in part.get("properties", ()))


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
        """Translate the request; raise an ApiError if it cannot be a chat."""
        notes = Notes() if notes is None else notes
        same = {"model", "temperature", "top_p", "stream", "top_k", "parallel_tool_calls", "forerun"}
        return FittingChat.checked(self.model_dump(include=same) | self._chat_fields(notes), notes, type(self))

    def _chat_fields(self, notes: Notes) -> dict[str, Any]:
        """Return the chat's fields that have another name or form here."""
        raise NotImplementedError
