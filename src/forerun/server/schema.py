"""Fields that all requests share, and requests to OpenAI's ``/v1/completions``."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
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

from forerun.server.api_errors import ApiError
from forerun.server.tenants import NAMESPACE_PATTERN
from forerun.server.tolerance import NEUTRAL, Notes, content_text, requested

MAX_CHOICES = 128
"""Answers per prompt; OpenAI's limit."""
MAX_BIASES = 1024
SEED_LIMIT = 2**63
MAX_STOPS = 64
"""Stop strings or tokens of a request. Each string is searched for in all new text."""
MIN_TEMPERATURE = 1e-6
"""Logits divided by less may overflow a float32."""
LISTED_FAULTS = 8


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
"""A list's check stops at its first error. Four million errors cost half a minute and 6 GiB."""
StopString = Annotated[str, Field(min_length=1)]
Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS), FAIL_FAST] | None,
    one_error(f"must be a string or a list of up to {MAX_STOPS}, none of them empty: it would stop everywhere"),
]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = str
"""Text without halves of surrogate pairs, which ``bodies.py`` refuses."""
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
    """A chat's fields that have another name here, for errors."""

    @model_validator(mode="before")
    @classmethod
    def _tolerate(cls, given: Any, info: ValidationInfo) -> Any:
        """Remove ignored fields, and report many unknown ones as one error."""
        if not isinstance(given, dict):
            return given
        known = _own_names(cls)
        if cls.tolerant:
            given = requested(given, known)
        else:
            given = {name: value for name, value in given.items() if value is not None or name not in known}
        if len(given) > len(known):
            message = f"there are {len(given)} fields, of which {len(known)} are known"
            raise PydanticCustomError("unsupported", message)
        return cls._translated(given, info.context if isinstance(info.context, Notes) else Notes())

    @classmethod
    def _translated(cls, given: dict[str, Any], notes: Notes) -> dict[str, Any]:
        """Convert the fields to the one form that is checked."""
        return given

    @classmethod
    @contextmanager
    def own_names(cls) -> Iterator[None]:
        """Rename the fields of errors about the translated request."""
        try:
            yield
        except ApiError as error:
            error.param = cls.chat_names.get(error.param or "", error.param)
            raise

    @classmethod
    def checked(cls, given: Any, notes: Notes, asked: type[StrictModel] | None = None) -> Self:
        """Check a request; raise ApiError, with the names of ``asked`` if it was translated from one."""
        try:
            return cls.model_validate(given, context=notes)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False, include_input=False)
            raise _validation_error(faults, asked or cls, asked.chat_names if asked else {}) from None


def _validation_error(errors: Sequence[Any], model: type[BaseModel], renamed: Mapping[str, str]) -> ApiError:
    """Merge pydantic's errors about a request, with ``renamed`` fields; ``param`` and ``code`` are the first one's. The
    message repeats only field names of the client's, and suggests the nearest known name for an unknown one."""
    errors = [{**each, "loc": tuple(renamed.get(str(part), part) for part in each["loc"])} for each in errors]
    first = errors[0]
    code = "unsupported" if first["type"] in ("unsupported", "extra_forbidden") else "invalid_value"
    message = "; ".join(_fault(each, model) for each in errors[:LISTED_FAULTS])
    if len(errors) > LISTED_FAULTS:
        message += f"; and {len(errors) - LISTED_FAULTS} more fields are wrong"
    # a check of several fields has no location, and is named after the one to change
    named = first["type"] if first["type"] in _own_names(model) | _inner_names(model) else None
    return ApiError(400, message, code, ".".join(map(str, first["loc"])) or named)


def _fault(error: Any, model: type[BaseModel]) -> str:
    message, place = str(error["msg"]), error["loc"]
    if error["type"] == "extra_forbidden":
        names = _inner_names(model) if len(place) > 1 else _own_names(model)
        near = get_close_matches(str(place[-1])[:64], sorted(names), 1)
        message = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
        if len(place) == 1 and place[0] in NEUTRAL:
            message = "it is not supported; leave it out"
    message = message[:1].lower() + message[1:]
    return f"{'.'.join(map(str, place))}: {message}" if place else message


@functools.cache
def _own_names(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(each.alias or name for name, each in model.model_fields.items())


@functools.cache
def _inner_names(model: type[BaseModel]) -> frozenset[str]:
    parts = model.model_json_schema().get("$defs", {}).values()
    return frozenset(name for part in parts for name in part.get("properties", ()))


class StreamOptions(StrictModel):
    """What chunks contain besides new text."""

    include_usage: bool = False  # in a last chunk
    include_obfuscation: bool | None = None  # whether chunks are padded
    continuous_usage_stats: bool = False  # the usage so far, in each chunk


class Extension(StrictModel):
    """Forerun's fields; none of them changes an output."""

    namespace: Annotated[str, Field(pattern=NAMESPACE_PATTERN)] = "default"  # of outputs to draft from
    drafter: str | None = None  # the server's, or ``none``
    budget: Annotated[int, Field(ge=0)] | None = None  # maximum draft length
    trace: bool = False  # whether a stream names the source of each token


class PlainFormat(StrictModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class NamedSchema(StrictModel):
    """A JSON schema, which is always enforced; the other fields are ignored."""

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
    """The fields of both completions and chats."""

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
        """The requested limit on the answer's tokens."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """The field of ``token_limit``."""
        return "max_tokens"

    @property
    def format(self) -> dict[str, Any] | None:
        """The response format for the engine; None for any text."""
        return None if self.response_format is None else self.response_format.model_dump(by_alias=True)

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives listed per token; None without log-probabilities."""
        return None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def answers(self) -> int:
        """The number of answers."""
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
    """A request to ``/v1/completions``."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Text | None = None  # text after the answer
    echo: bool | None = None  # whether the answer begins with the prompt
    add_special_tokens: bool = True
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def answers(self) -> int:
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
        """The prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


class DetokenizeRequest(StrictModel):
    """A request to ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[Token], FAIL_FAST]
