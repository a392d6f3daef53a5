"""Rewrite JSON schemas for llguidance, and reject those that it cannot enforce.

An unknown ``format`` is an annotation, as in JSON Schema; entries of an array may repeat despite ``uniqueItems``; and
``oneOf`` is ``anyOf`` where its choices overlap. Alternatives that cannot be enforced are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Json = dict[str, Any]
SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values have schemas under user-defined names, which may read like keywords."""
FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
REFUSED = (
    "if", "then", "else", "not", "dependentRequired", "dependentSchemas", "dependencies", "contains", "minContains",
    "maxContains", "unevaluatedProperties", "unevaluatedItems",
)  # fmt: skip
"""Keywords that no grammar here enforces."""
LOOK_AROUND = re.compile(r"(?<!\\)(?:\\\\)*\(\?(?:[=!]|<[=!])|(?<!\\)(?:\\\\)*\\[1-9]")
"""Parts of a regular expression that look around, or refer to a group."""


class SchemaError(ValueError):
    """A response format that cannot be met, or is malformed."""


def usable_schema(schema: Any, where: str = "schema") -> Any:
    """Rewrite a JSON schema for llguidance; raise SchemaError with place (``where``) and keyword if impossible."""
    try:
        return _Usable(schema if isinstance(schema, Mapping) else {}).of(schema, where)
    except RecursionError:
        raise SchemaError(f"{where.split('.')[0]}: it is nested too deeply") from None


class _Usable:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def of(self, schema: Any, where: str) -> Any:
        if isinstance(schema, list):
            return [self.of(each, f"{where}.{number}") for number, each in enumerate(schema)]
        if not isinstance(schema, Mapping):
            return schema
        self._check(schema, where)
        kept = {key: value for key, value in schema.items() if not self._says_nothing(key, value)}
        if "propertyNames" in kept:
            kept = self._with_names(kept, where)
        return {key: self._inner(key, value, f"{where}.{key}") for key, value in kept.items()}

    def _check(self, schema: Mapping[str, Any], where: str) -> None:
        for key in REFUSED:
            if key in schema:
                raise SchemaError(f"{where}: the keyword {key} cannot be enforced")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and LOOK_AROUND.search(pattern):
            raise SchemaError(f"{where}: a pattern with look-around or references to groups cannot be enforced")

    def _says_nothing(self, key: str, value: Any) -> bool:
        return key == "uniqueItems" or (key == "format" and value not in FORMATS)

    def _inner(self, key: str, value: Any, where: str) -> Any:
        if key in ("const", "enum", "default", "examples", "example"):
            return value
        if key in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            return {name: self.of(each, f"{where}.{name}") for name, each in value.items()}
        if key in ("anyOf", "oneOf") and isinstance(value, list) and value:
            return self._alternatives(value, where)
        return self.of(value, where)

    def _alternatives(self, choices: list[Any], where: str) -> list[Any]:
        kept, refusal = [], None
        for number, each in enumerate(choices):
            try:
                kept.append(self.of(each, f"{where}.{number}"))
            except SchemaError as error:
                refusal = error
        if refusal is not None and not kept:
            raise refusal
        return kept

    def _with_names(self, schema: Json, where: str) -> Json:
        names, own = self._found(schema["propertyNames"]), {k: v for k, v in schema.items() if k != "propertyNames"}
        others = own.get("additionalProperties", {})
        listed = names.get("enum", [names["const"]] if "const" in names else None)
        if isinstance(listed, list):
            missing = {} if others is False else {str(name): others for name in listed}
            properties = {name: each for name, each in (own.get("properties") or {}).items() if name in listed}
            return {**own, "properties": {**missing, **properties}, "additionalProperties": False}
        if isinstance(names.get("pattern"), str) and not own.keys() & {"properties", "patternProperties"}:
            return {**own, "patternProperties": {names["pattern"]: others}, "additionalProperties": False}
        if names.keys() <= {"type", "title", "description"}:
            return own
        raise SchemaError(f"{where}: propertyNames can be enforced with an enum or a pattern only")

    def _found(self, schema: Any) -> Mapping[str, Any]:
        target: Any = schema
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str) and reference.startswith("#"):
            target = self._root
            for key in reference.lstrip("#").split("/")[1:]:
                target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        return target if isinstance(target, Mapping) else {}
