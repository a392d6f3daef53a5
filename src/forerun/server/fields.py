"""The kinds of fields that requests have, and how each is checked.

A check stops at a list's first error: a body of 8 MiB may have millions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

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

MOST_CHOICES = 128
"""Texts for one prompt, at most; as OpenAI has it."""
SEEDS = 2**63
LEAST_TEMPERATURE = 1e-6
"""Logits divided by less may not fit into a float32."""


def only(*neutral: Any) -> Callable[[Any], Any]:
    """A check for a field that is not supported: it may be left out, or say that it wants nothing."""

    def check(value: Any) -> Any:
        if any(type(value) is type(each) and value == each for each in neutral):
            return value
        raise PydanticCustomError("unsupported", "is not supported yet; leave it out")

    return check


def _at_most_four(stop: Any) -> Any:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > 4:
        raise PydanticCustomError("stop", "there may be four strings at most")
    if "" in strings:
        raise PydanticCustomError("stop", "an empty string would stop everywhere")
    return stop


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "must be valid text; it has half of a surrogate pair") from None
    return text


def _not_tiny(temperature: float) -> float:
    if 0 < temperature < LEAST_TEMPERATURE:
        raise PydanticCustomError("temperature", "must be 0, which is greedy, or at least a millionth")
    return temperature


def says(message: str) -> WrapValidator:
    """One error for a field of several kinds, instead of one for each kind."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("kind", message) from None

    return WrapValidator(check)


Off = Annotated[Any, AfterValidator(only(None, False))]
Zero = Annotated[Any, AfterValidator(only(None, 0, 0.0))]
Nothing = Annotated[Any, AfterValidator(only(None, {}, "", []))]
One = Annotated[Any, AfterValidator(only(None, 1))]
FIRST = Field(fail_fast=True)
"""Of a list: its first error is enough. Four million took half a minute and 6 GiB."""
Stop = Annotated[
    str | Annotated[list[str], FIRST] | None,
    says("must be a string or a list of strings"),
    AfterValidator(_at_most_four),
]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, AfterValidator(_unicode)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_not_tiny)]
Prompt = Annotated[
    Text
    | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES), FIRST]
    | Annotated[list[Token], Field(min_length=1), FIRST]
    | Annotated[
        list[Annotated[list[Token], Field(min_length=1), FIRST]], Field(min_length=1, max_length=MOST_CHOICES), FIRST
    ],
    says(f"must be valid text, token ids, or a list of up to {MOST_CHOICES} of either, none of them empty"),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Objects = Annotated[list[dict[str, Any]], FIRST]


class Strict(BaseModel):
    """Takes no unknown field, and converts nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_number(cls, given: Any) -> Any:
        """With more fields than are known, some are not. Each would be an error, and there may be half a million."""
        if isinstance(given, dict) and len(given) > len(cls.model_fields):
            told = "there are {given} fields, of which {known} are known"
            raise PydanticCustomError("unsupported", told, {"given": len(given), "known": len(cls.model_fields)})
        return given
