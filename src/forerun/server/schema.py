"""What clients ask: OpenAI's ``/v1/completions`` and ``/v1/chat/completions``, as far as Forerun does them.

What is not done yet is refused unless it has its neutral value; unknown fields are refused too. So no request means
more than it gets.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from forerun.server.fields import (
    FIRST,
    MOST_CHOICES,
    SEEDS,
    Count,
    Nothing,
    Objects,
    Off,
    One,
    Prompt,
    Stop,
    Strict,
    Temperature,
    Text,
    Zero,
    only,
    says,
)
from forerun.server.keys import NAME


class StreamOptions(Strict):
    """``include_usage``: a last chunk says what was used."""

    include_usage: bool = False
    include_obfuscation: Off = None


class Extension(Strict):
    """Forerun's own; none of it changes a text.

    ``namespace``: texts are drafted from those of the same namespace, inside the tenant's own. ``drafter``: the
    server's, or ``none``. ``budget``: tokens of a draft, at most. ``trace``: a stream says who drafted each token.
    """

    namespace: Annotated[str, Field(pattern=NAME)] = "default"
    drafter: str | None = None
    budget: Annotated[int, Field(ge=0)] | None = None
    trace: bool = False


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class ObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema. It is always kept to, whatever ``strict`` says; ``name`` and ``description`` change nothing."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class Asked(Strict):
    """What both kinds of requests have."""

    model: str
    temperature: Temperature | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-SEEDS, lt=SEEDS)] | None = None
    stop: Stop = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
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
    def limit(self) -> int | None:
        """Tokens of an answer, at most, as far as the request says."""
        return self.max_tokens

    @property
    def format(self) -> dict[str, Any] | None:
        """What the answer must be, as the engine takes it; None for any text."""
        return None if self.response_format is None else self.response_format.model_dump(by_alias=True)

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens to tell of at each place; None if log-probabilities are not wanted."""
        return None

    @property
    def stops(self) -> list[str]:
        """Strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @model_validator(mode="after")
    def _check_streamed(self) -> Asked:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for streams; add stream: true")
        if self.forerun.trace and not self.stream:
            raise PydanticCustomError("trace", "forerun.trace is for streams; add stream: true")
        return self


class CompletionRequest(Asked):
    """To ``/v1/completions``. ``prompt``: text, token ids, or several of either."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    suffix: Nothing = None
    echo: Off = None
    best_of: One = None

    @property
    def likeliest(self) -> int | None:
        """See ``Asked.likeliest``."""
        return self.logprobs

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class Part(Strict):
    """A part of a message; texts only."""

    type: Literal["text"]
    text: Text


Content = Annotated[
    Text | Annotated[list[Part], FIRST] | None, says("must be valid text, or a list of parts of type text")
]


class Message(Strict):
    """A turn of a conversation. ``tool_calls`` and what belongs to them go to the chat template as they are."""

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

    def told(self) -> dict[str, Any]:
        """As a chat template takes it."""
        parts = self.content or ""
        content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        more = {"name": self.name, "tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {"role": self.role, "content": content} | {key: value for key, value in more.items() if value}


class ChatRequest(Asked):
    """To ``/v1/chat/completions``. With ``tool_choice: "none"`` the template is told of no tools."""

    messages: Annotated[list[Message], Field(min_length=1), FIRST]
    max_completion_tokens: Count | None = None
    tools: Objects | None = None
    tool_choice: Annotated[Any, AfterValidator(only(None, "auto", "none"))] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def limit(self) -> int | None:
        """``max_completion_tokens``, or the older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """See ``Asked.likeliest``."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def shown_tools(self) -> Objects | None:
        """What the chat template is told of."""
        return None if self.tool_choice == "none" else self.tools or None

    @model_validator(mode="after")
    def _check_limits(self) -> ChatRequest:
        if self.max_completion_tokens and self.max_tokens and self.max_completion_tokens != self.max_tokens:
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; give one")
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs needs logprobs: true")
        return self
