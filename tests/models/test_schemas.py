"""Schemas in the words of llguidance: what pydantic writes can be kept to, and what cannot is refused by name."""

import enum
import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, TypeAdapter
from support.bundled import allows, bundled

from forerun.models.text.call_formats import HERMES
from forerun.models.text.message_formats import MessageFormat
from forerun.models.text.schemas import SchemaError, usable_schema

pytest.importorskip("llguidance")
Json = dict[str, Any]


class Color(enum.StrEnum):
    """Names of an object."""

    RED = "red"
    BLUE = "blue"


class Everything(BaseModel):
    """Types whose schemas have formats, names of lists, and patterns that look ahead."""

    counts: dict[Color, int]
    data: bytes
    words: set[str]
    place: Path
    secret: SecretStr
    price: Decimal
    day: date


def follows(schema: Any, text: str) -> bool:
    return allows(bundled()[1], {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, text)


def test_a_model_of_pydantics_types_can_be_followed():
    value: Json = {"counts": {"red": 1}, "data": "x", "words": ["a"], "place": "/a", "secret": "s", "price": 1.5}
    value["day"] = "2026-11-29"
    assert follows(Everything.model_json_schema(), json.dumps(value))
    assert Everything.model_validate(value)
    assert not follows(Everything.model_json_schema(), json.dumps({**value, "counts": {"green": 1}}))
    assert not follows(Everything.model_json_schema(), json.dumps({**value, "day": "today"}))


@pytest.mark.parametrize(("schema", "right", "wrong"), [
    ({"type": "string", "format": "no-such"}, '"x"', "1"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", '["x"]'),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, "7", '"7"'),
    (TypeAdapter(dict[Color, int]).json_schema(), '{"blue": 2}', '{"green": 2}'),
    ({"type": "object", "propertyNames": {"enum": ["a"]}}, '{"a": "x"}', '{"b": 1}'),
    ({"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}}, '{"x1": 2}', '{"y": 2}'),
    ({"type": "object", "propertyNames": {"type": "string"}}, '{"y": 2}', "[]"),
    ({"properties": {"if": {"type": "integer"}}, "required": ["if"]}, '{"if": 1}', '{"if": "x"}'),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!x)"}]}, "1", '"y"'),
])  # fmt: skip
def test_what_says_the_same_can_be_followed(schema, right, wrong):
    assert follows(schema, right) and not follows(schema, wrong)


REFUSED = [
    ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "keyword if"),
    ({"dependentRequired": {"a": ["b"]}}, "keyword dependentRequired"),
    ({"type": "array", "contains": {"type": "integer"}}, "keyword contains"),
    ({"unevaluatedProperties": False}, "keyword unevaluatedProperties"),
    ({"not": {"type": "string"}}, "keyword not"),
    ({"type": "string", "pattern": "^(?=a)"}, "look-around"),
    ({"type": "string", "pattern": "(?<!a)b"}, "look-around"),
    ({"type": "string", "pattern": r"(a)\1"}, "look-around or references"),
    ({"type": "object", "propertyNames": {"minLength": 3}}, "propertyNames"),
    ({"anyOf": [{"not": {}}, {"contains": {}}]}, "keyword contains"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED)
def test_what_cannot_be_kept_to_is_refused_with_its_place(schema, said):
    with pytest.raises(SchemaError, match=f"schema.properties.x.*{said}"):
        usable_schema({"type": "object", "properties": {"x": schema}})


@pytest.mark.parametrize("pattern", [r"\(?=a", r"a\\(?:b)", r"[0-9]{2}", r"\\1"])
def test_what_only_looks_like_look_around_is_none(pattern):
    assert usable_schema({"pattern": pattern}) == {"pattern": pattern}


def test_a_call_that_cannot_follow_its_schema_is_refused_where_it_must_be_made_and_else_is_free():
    form = MessageFormat(HERMES, None, None, {}, {})
    parameters = {"type": "object", "properties": {"x": {"type": "array", "contains": {"type": "integer"}}}}
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    with pytest.raises(SchemaError, match=r"tool find.properties.x: the keyword contains cannot"):
        form.grammar(None, tools, True, "closed")
    beside = form.grammar({"type": "json_object"}, tools, True, "closed")
    assert "forerun_call_0" in beside["grammar"] and "contains" not in beside["grammar"]


def test_a_wrong_pattern_is_refused_with_the_reason():
    with pytest.raises(SchemaError, match=r"regex parse error: \w+"):
        follows({"type": "string", "pattern": "(((("}, '"x"')
