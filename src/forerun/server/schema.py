"""Requests of OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, as far as Forerun serves them.

A feature that is missing is refused unless its field has the neutral value, and so is an unknown field. So no request
means more than it gets. A check of a list stops at the first error: a body of 8 MiB may have millions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from forerun.models.text.prompts import RESERVED_VARIABLES
from forerun.server.api_errors import ApiError, validation_error
from forerun.server.tenants import NAMESPACE_PATTERN

MAX_CHOICES = 128
"""Texts for one prompt; OpenAI's limit."""
MAX_BIASES = 1024
"""Tokens that a request may have a bias for."""
SEED_LIMIT = 2**63
IGNORED_FIELDS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "verbosity",
    }
)  # fmt: skip
"""Fields that are for somebody else, and change no text here. Any value is accepted, and has no effect."""
MIN_TEMPERATURE = 1e-6
"""Logits divided by less may not fit into a float32."""


def only(*neutral: Any) -> AfterValidator:
    """A check for a missing feature: its field may be left out or have a neutral value."""

    def check(value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported yet; leave it out")

    return AfterValidator(check)


def one_error(message: str) -> WrapValidator:
    """One error for a field of several types, instead of one for each type."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kind", message) from None

    return WrapValidator(check)


def _check_unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "must be valid text; it has half of a surrogate pair") from None
    return text


def _check_temperature(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise PydanticCustomError("temperature", "must be 0, which is greedy, or at least a millionth")
    return temperature


Nothing = Annotated[Any, only(None, {}, "", [])]
One = Annotated[Any, only(None, 1)]
FAIL_FAST = Field(fail_fast=True)
"""A list stops at its first error. Four million errors took half a minute and 6 GiB."""
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=4), FAIL_FAST] | None,
    one_error("must be a string or a list of up to four strings, none of them empty: it would stop everywhere"),
]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, AfterValidator(_check_unicode)]
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
    """Takes no unknown field and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ignores: ClassVar[bool] = False
    """Whether it leaves out ``IGNORED_FIELDS``."""

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, given: Any) -> Any:
        """Leave out what is ignored. One error for many unknown fields: there may be half a million."""
        if isinstance(given, dict) and cls.ignores:
            given = {name: value for name, value in given.items() if name not in IGNORED_FIELDS}
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            message = "there are {given} fields, of which {known} are known"
            raise PydanticCustomError("unsupported", message, {"given": len(given), "known": len(cls.model_fields)})
        return given


class StreamOptions(StrictModel):
    """``include_usage``: a last chunk has the usage. ``include_obfuscation``: chunks are padded."""

    include_usage: bool = False
    include_obfuscation: bool | None = None
    continuous_usage_stats: Annotated[Any, only(None, False)] = None


class Extension(StrictModel):
    """Forerun's own fields; none of them changes a text.

    ``namespace``: texts are drafted from those of the same namespace of the tenant. ``drafter``: the server's, or
    ``none``. ``budget``: the longest draft, in tokens. ``trace``: a stream names the source of each token.
    """

    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN)] = "default"
    drafter: str | None = None
    budget: Annotated[int, Field(ge=0)] | None = None
    trace: bool = False


class PlainFormat(StrictModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(StrictModel):
    """A JSON schema. It is always kept to, whatever ``strict`` says; ``name`` and ``description`` change nothing."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(StrictModel):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(StrictModel):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Annotated[str, Field(min_length=1)]


class GrammarFormat(StrictModel):
    """Text of a grammar in llguidance's form of Lark."""

    type: Literal["grammar"]
    grammar: Annotated[str, Field(min_length=1)]


ResponseFormat = Annotated[PlainFormat | SchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]


class Part(StrictModel):
    """A part of a message; texts only."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Text | Annotated[list[Part], FAIL_FAST] | None, one_error("must be valid text, or a list of parts of type text")
]


def plain_text(content: str | list[Part] | None) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Prediction(StrictModel):
    """A text that the answer is expected to resemble, to draft from."""

    type: Literal["content"]
    content: Content


class GenerationRequest(StrictModel):
    """The fields that both kinds of requests have."""

    ignores = True
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

    @property
    def token_limit(self) -> int | None:
        """The longest answer that the request names, in tokens."""
        return self.max_tokens

    @property
    def format(self) -> dict[str, Any] | None:
        """The response format as the engine takes it; None for any text."""
        return None if self.response_format is None else self.response_format.model_dump(by_alias=True)

    @property
    def alternatives(self) -> int | None:
        """How many of the likeliest tokens are listed at each place; None without log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def texts(self) -> int:
        return self.n or 1

    @model_validator(mode="after")
    def _check_streamed(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for streams; add stream: true")
        if self.forerun.trace and not self.stream:
            raise PydanticCustomError("trace", "forerun.trace is for streams; add stream: true")
        return self


class CompletionRequest(GenerationRequest):
    """To ``/v1/completions``. ``prompt``: text, token ids, or several of either. ``suffix``: text that comes after the
    answer. ``echo``: the answer begins with the prompt."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Text | None = None
    echo: bool | None = None
    best_of: One = None
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
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class Message(StrictModel):
    """A turn of a conversation. A call's arguments go to the chat template as an object where they are one."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: Text | None = None
    refusal: Nothing = None
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "a message needs content")
        for number, call in enumerate(self.tool_calls or ()):
            if not isinstance(call.get("function"), dict):
                raise PydanticCustomError(
                    "tool_calls", "call {number} needs a function, with its name and arguments", {"number": number}
                )
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        more = self.model_dump(include={"name", "tool_call_id", "reasoning_content"})
        more["tool_calls"] = [_with_object(call) for call in self.tool_calls or ()]
        given = {name: value for name, value in more.items() if value}
        return {"role": self.role, "content": plain_text(self.content), **given}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """A call whose arguments are an object: OpenAI's clients send them as text, and templates write them as JSON."""
    function = call["function"]
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


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


class ChatRequest(GenerationRequest):
    """To ``/v1/chat/completions``. With ``tool_choice: "none"`` the template sees no tools. ``reasoning_effort`` and
    ``chat_template_kwargs`` go to the chat template."""

    messages: Annotated[list[Message], Field(min_length=1), FAIL_FAST]
    max_completion_tokens: Count | None = None
    tools: Annotated[Objects, AfterValidator(_check_tools)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    modalities: Annotated[Any, only(None, ["text"])] = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def template_tools(self) -> Objects | None:
        """The tools that the chat template sees, and whose calls are read."""
        return None if self.tool_choice == "none" else self.tools or None

    @property
    def required_tools(self) -> Objects | None:
        """The tools of which one must be called; None if none must be."""
        if isinstance(self.tool_choice, NamedChoice):
            return [tool for tool in self.tools or () if tool["function"]["name"] == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else None

    @property
    def parallel(self) -> bool:
        """Whether an answer may have several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedChoice)

    @property
    def template_options(self) -> dict[str, Any]:
        """What else the chat template is given."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **(self.chat_template_kwargs or {})}

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_completion_tokens and self.max_tokens and self.max_completion_tokens != self.max_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            names = ", ".join(tool["function"]["name"] for tool in self.tools or ()) or "none"
            message = "tool_choice asks for a call; the tools that there are: {names}"
            raise PydanticCustomError("tool_choice", message, {"names": names})
        return self


GenerationBody = CompletionRequest | ChatRequest


class TokenizeRequest(StrictModel):
    """To ``/tokenize``: a ``prompt``, or ``messages`` as the chat template writes them."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1), FAIL_FAST] | None = None
    tools: Annotated[Objects, AfterValidator(_check_tools)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def template_tools(self) -> Objects | None:
        """The tools that the chat template sees."""
        return self.tools or None

    @property
    def template_options(self) -> dict[str, Any]:
        """What else it is given."""
        return self.chat_template_kwargs or {}

    @model_validator(mode="after")
    def _check_kind(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give a prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """To ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Token], FAIL_FAST]


def field_names(model: type[BaseModel] = StrictModel) -> set[str]:
    """The names of all fields of requests."""
    own = {each.alias or name for name, each in model.model_fields.items()}
    return own.union(*map(field_names, model.__subclasses__()))


class TranslatedRequest(StrictModel):
    """A request at another address that is a chat in other words."""

    ignores = True
    model: str
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Objects | None = None
    forerun: Extension = Extension()

    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
            ApiError: if it cannot be one.
        """
        same = ("model", "temperature", "top_p", "stream", "top_k", "parallel_tool_calls", "forerun")
        fields = self.model_dump(include={*same}) | self._chat_fields()
        try:
            return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise validation_error(error.errors(), field_names()) from None

    def _chat_fields(self) -> dict[str, Any]:
        """The fields that a chat has under another name or in another form."""
        raise NotImplementedError


def joined_parts(content: Any, where: str, types: Sequence[str]) -> str:
    """Text, or parts of some types that have text, as one text.

    Raises:
        ApiError: for anything else; it names ``where`` in the request that is.
    """
    parts = [{"type": types[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") in types and isinstance(part.get("text"), str) for part in parts
    ):
        message = f"{where}: must be text, or parts of type {' or '.join(types)}"
        raise ApiError(400, message, "invalid_value", where)
    return "".join(part["text"] for part in parts)
