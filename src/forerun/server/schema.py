"""Requests of OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, as far as Forerun serves them.

A feature that is missing is refused unless its field has the neutral value, and so is an unknown field. So no request
means more than it gets. A check of a list stops at the first error: a body of 8 MiB may have millions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

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

from forerun.server.tenants import NAMESPACE_PATTERN

MAX_CHOICES = 128
"""Texts for one prompt; OpenAI's limit."""
SEED_LIMIT = 2**63
MIN_TEMPERATURE = 1e-6
"""Logits divided by less may not fit into a float32."""


def only(*neutral: Any) -> Callable[[Any], Any]:
    """A check for a missing feature: its field may be left out or have a neutral value."""

    def check(value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported yet; leave it out")

    return check


def one_error(message: str) -> WrapValidator:
    """One error for a field of several types, instead of one for each type."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kind", message) from None

    return WrapValidator(check)


def _check_stops(stop: Any) -> Any:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > 4:
        raise PydanticCustomError("stop", "there may be four strings at most")
    if "" in strings:
        raise PydanticCustomError("stop", "an empty string would stop everywhere")
    return stop


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


Off = Annotated[Any, AfterValidator(only(None, False))]
Zero = Annotated[Any, AfterValidator(only(None, 0, 0.0))]
Nothing = Annotated[Any, AfterValidator(only(None, {}, "", []))]
One = Annotated[Any, AfterValidator(only(None, 1))]
FAIL_FAST = Field(fail_fast=True)
"""A list stops at its first error. Four million errors took half a minute and 6 GiB."""
Stop = Annotated[
    str | Annotated[list[str], FAIL_FAST] | None,
    one_error("must be a string or a list of strings"),
    AfterValidator(_check_stops),
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
Objects = Annotated[list[dict[str, Any]], FAIL_FAST]


class StrictModel(BaseModel):
    """Takes no unknown field and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, given: Any) -> Any:
        """One error for many unknown fields: there may be half a million."""
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            message = "there are {given} fields, of which {known} are known"
            raise PydanticCustomError("unsupported", message, {"given": len(given), "known": len(cls.model_fields)})
        return given


class StreamOptions(StrictModel):
    """``include_usage``: a last chunk has the usage."""

    include_usage: bool = False
    include_obfuscation: Off = None


class Extension(StrictModel):
    """Forerun's own fields; none of them changes a text.

    ``namespace``: texts are drafted from those of the same namespace of the tenant. ``drafter``: the server's, or
    ``none``. ``budget``: the longest draft, in tokens. ``trace``: a stream names the source of each token.
    """

    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN)] = "default"
    drafter: str | None = None
    budget: Annotated[int, Field(ge=0)] | None = None
    trace: bool = False


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


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


class GenerationRequest(StrictModel):
    """The fields that both kinds of requests have."""

    model: str
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    max_tokens: Count | None = None
    forerun: Extension = Extension()
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    logit_bias: Nothing = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None

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
    def with_usage(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_streamed(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for streams; add stream: true")
        if self.forerun.trace and not self.stream:
            raise PydanticCustomError("trace", "forerun.trace is for streams; add stream: true")
        return self


class CompletionRequest(GenerationRequest):
    """To ``/v1/completions``. ``prompt``: text, token ids, or several of either."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Nothing = None
    echo: Off = None
    best_of: One = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class Part(StrictModel):
    """A part of a message; texts only."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Text | Annotated[list[Part], FAIL_FAST] | None, one_error("must be valid text, or a list of parts of type text")
]


class Message(StrictModel):
    """A turn of a conversation. ``tool_calls`` and their fields go to the chat template as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    refusal: Nothing = None

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise PydanticCustomError("content", "a message needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template takes it."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content} | {key: value for key, value in more.items() if value}


class ChatRequest(GenerationRequest):
    """To ``/v1/chat/completions``. With ``tool_choice: "none"`` the template sees no tools."""

    messages: Annotated[list[Message], Field(min_length=1), FAIL_FAST]
    max_completion_tokens: Count | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, AfterValidator(only(None, "auto", "none"))] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def template_tools(self) -> Objects | None:
        """The tools that the chat template sees."""
        return None if self.tool_choice == "none" else self.tools or None

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_completion_tokens and self.max_tokens and self.max_completion_tokens != self.max_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self
