"""Limit schemas, regular expressions and grammars before anything is compiled.

Text without a choice is computed at once when generation reaches it. A few characters can describe gigabytes of it, by
repetition, or by rules that use others twice. So the shortest text of every grammar is bounded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from re import _parser  # type: ignore[attr-defined]  # the one way to the length of a pattern's matches
from typing import Any

from forerun.models.text.schemas import SCHEMAS_BY_NAME, SchemaError, usable_schema

MAX_REMAINDERS = 50_000
"""Remainders of all divisors in a schema, each a state: 50,000 compile in 1.3 s, and 9,999,991 in over a minute."""
MAX_SCHEMA_CHARACTERS = 1 << 16
"""A schema of 5,000 optional properties, in twice as many characters, compiled in 3.7 seconds."""
MAX_FORCED_CHARACTERS = 2_000
"""Characters of a text that a schema spells out, all computed at once: 60,000 cost 0.6 s with the GIL held."""
MAX_SHORTEST_CHARACTERS = 1 << 15
"""Characters of the shortest text of a grammar or of a part. 52,299 tokens without a choice cost 0.27 seconds."""
MAX_RULE_PASSES = 64
"""Passes over a grammar's rules to find their shortest texts."""


def checked_schema(schema: Mapping[str, Any]) -> str:
    """Check and rewrite a JSON schema for llguidance; raise SchemaError if it exceeds a limit or fits no grammar."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SchemaError(f"the schema is not JSON: {error}") from None
    _check_size("schema", text)
    remainders = sum(map(_remainders, _values(schema, "multipleOf")))
    if remainders > MAX_REMAINDERS:
        raise SchemaError(f"multipleOf has {remainders:,} remainders in all; {MAX_REMAINDERS:,} are the most")
    _check_forced("schema", max(_longest_literals(schema), default=0))
    try:
        _ShortestJson(schema).check()
        return json.dumps(usable_schema(schema))
    except RecursionError:
        raise SchemaError("the schema is nested too deeply") from None


def check_regex(pattern: str) -> None:
    """Raise ``SchemaError`` if a regular expression exceeds a limit."""
    _check_size("regex", pattern)
    _check_forced("regex", shortest_match(pattern))


def check_lark(grammar: str) -> None:
    """Raise ``SchemaError`` if a grammar in Lark exceeds a limit."""
    _check_size("grammar", grammar)
    try:
        _LarkRules(grammar).check()
    except RecursionError:
        raise SchemaError("the grammar is nested too deeply") from None


def shortest_match(pattern: str) -> int:
    """Return the length of the shortest match; 0 if Python cannot tell."""
    try:
        return int(_parser.parse(pattern).getwidth()[0])
    except (ValueError, OverflowError, RecursionError, re.error):
        return 0


def _check_size(what: str, text: str) -> None:
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise SchemaError(f"the {what} has {len(text):,} characters; {MAX_SCHEMA_CHARACTERS:,} are the most")


def _check_forced(what: str, characters: int) -> None:
    if characters > MAX_FORCED_CHARACTERS:
        raise SchemaError(f"the {what} has a text of {characters:,} characters; {MAX_FORCED_CHARACTERS:,} are the most")


def _check_shortest(what: str, characters: float) -> None:
    if math.isfinite(characters) and characters > MAX_SHORTEST_CHARACTERS:
        most = f"{MAX_SHORTEST_CHARACTERS:,} are the most"
        raise SchemaError(f"the shortest text of the {what} has {characters:,.0f} characters; {most}")


def _values(schema: Any, keyword: str) -> Iterator[Any]:
    if isinstance(schema, list):
        for inner in schema:
            yield from _values(inner, keyword)
    elif isinstance(schema, Mapping):
        if keyword in schema:
            yield schema[keyword]
        for key, inner in schema.items():
            if key in SCHEMAS_BY_NAME and isinstance(inner, Mapping):
                yield from _values(list(inner.values()), keyword)
            elif key not in ("const", "enum"):
                yield from _values(inner, keyword)


def _longest_literals(schema: Any) -> Iterator[int]:
    """Yield lengths of texts that a schema spells out: constants, and minima of patterns and arrays."""
    yield from (len(json.dumps(value)) for value in _values(schema, "const"))
    yield from (len(json.dumps(each)) for value in _values(schema, "enum") if isinstance(value, list) for each in value)
    yield from (shortest_match(value) for value in _values(schema, "pattern") if isinstance(value, str))
    yield from (value for value in _values(schema, "minItems") if isinstance(value, int))
    for properties in _values(schema, "properties"):
        yield from map(len, properties if isinstance(properties, Mapping) else ())


def _remainders(divisor: Any) -> int:
    """Count a divisor's remainders, in units of its last decimal; 0 for a non-number, which llguidance rejects."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 0
    exact = Decimal(str(divisor)).normalize()
    exponent = exact.as_tuple().exponent
    return int(abs(exact.scaleb(-exponent) if isinstance(exponent, int) and exponent < 0 else exact))


class _ShortestJson:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._lengths: dict[str, float] = {}

    def check(self) -> None:
        references = [value for value in _values(self._root, "$ref") if isinstance(value, str)]
        for each in [self._root, *({"$ref": name} for name in references)]:
            _check_shortest("schema", self.length(each))

    def length(self, schema: Any) -> float:
        if not isinstance(schema, Mapping):
            return 0
        parts = [self._own(schema)]
        if isinstance(reference := schema.get("$ref"), str):
            parts.append(self._referred(reference))
        choices = [schema[word] for word in ("anyOf", "oneOf") if isinstance(schema.get(word), list) and schema[word]]
        parts += [min(map(self.length, each)) for each in choices]
        if isinstance(every := schema.get("allOf"), list):
            parts += map(self.length, every)
        return max(parts)

    def _own(self, schema: Mapping[str, Any]) -> float:
        if "const" in schema:
            return len(json.dumps(schema["const"]))
        if isinstance(values := schema.get("enum"), list) and values:
            return min(len(json.dumps(value)) for value in values)
        if schema.get("type") in ("object", "array", None):
            return max(self._object(schema), self._array(schema))
        pattern = schema.get("pattern")
        return shortest_match(pattern) if isinstance(pattern, str) else 0

    def _object(self, schema: Mapping[str, Any]) -> float:
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            return 0
        names = [name for name in required if isinstance(name, str)]
        return sum(len(name) + 6 + self.length(properties.get(name)) for name in names)

    def _array(self, schema: Mapping[str, Any]) -> float:
        count, first = schema.get("minItems", 0), schema.get("prefixItems")
        if not isinstance(count, int) or isinstance(count, bool) or count <= 0:
            return 0
        each = [self.length(item) for item in first[:count]] if isinstance(first, list) else []
        return sum(each) + (count - len(each)) * (2 + self.length(schema.get("items")))

    def _referred(self, reference: str) -> float:
        """Measure a referenced schema. One that refers to itself without a way out matches no text, and is infinite."""
        if reference not in self._lengths:
            self._lengths[reference] = math.inf
            target: Any = self._root
            for key in reference.lstrip("#").split("/")[1:]:
                key = key.replace("~1", "/").replace("~0", "~")
                target = target.get(key) if isinstance(target, Mapping) else None
            self._lengths[reference] = self.length(target)
        return self._lengths[reference]


_LARK_TOKEN = re.compile(
    r"""(?P<skip>\s+|(?://|\#)[^\n]*)
    | (?P<directive>%\w+)
    | (?P<string>"(?:\\.|[^"\\])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[a-z]*)
    | (?P<special><[^>\s]*>)
    | (?P<times>~\s*\d+(?:\s*\.\.\s*\d*)?|\{\s*\d*\s*(?:,\s*\d*\s*)?\})
    | (?P<name>[?!@]*[A-Za-z_][\w.]*)
    | (?P<other>.)""",
    re.VERBOSE,
)
_LARK_RULE = re.compile(
    r"^[?!]*([A-Za-z_]\w*)(?:\[(?:[^\]\"]|\"(?:\\.|[^\"\\])*\")*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE
)
_Token = tuple[str, Any]


class _LarkRules:
    """Length of the shortest text of each rule of a grammar in Lark. The only directives allowed are ``%json``,
    ``%ignore`` and llguidance's heading: others could hide rules."""

    def __init__(self, grammar: str) -> None:
        begins = [*_LARK_RULE.finditer(grammar)]
        ends = [each.start() for each in begins[1:]] + [len(grammar)]
        head = grammar[: begins[0].start()] if begins else grammar
        list(_lark_tokens(head.replace("%llguidance", "", 1)))
        self._rules: dict[str, list[_Token]] = {}
        for each, end in zip(begins, ends, strict=True):
            tokens = [*_lark_tokens(grammar[each.end() : end])]
            self._rules[each[1]] = [*self._rules.get(each[1], ()), *tokens]
        self._shortest: dict[str, float] = dict.fromkeys(self._rules, math.inf)

    def check(self) -> None:
        for _ in range(MAX_RULE_PASSES):
            if not self._improve():
                break
        else:
            raise SchemaError(f"the grammar's rules refer to each other in more than {MAX_RULE_PASSES} levels")
        for name, length in self._shortest.items():
            _check_shortest(f"grammar's rule {name}", length)

    def _improve(self) -> bool:
        changed = False
        for name in reversed(self._rules):
            length, _ = self._expression(self._rules[name], 0)
            changed |= length < self._shortest[name]
            self._shortest[name] = min(length, self._shortest[name])
        return changed

    def _expression(self, tokens: list[_Token], at: int) -> tuple[float, int]:
        """Return the shortest alternative from a token on, and where the alternatives end."""
        choices, sequence, last = [], 0.0, 0.0
        while at < len(tokens) and tokens[at] not in (("other", ")"), ("other", "]")):
            kind, value = tokens[at]
            at += 1
            if (kind, value) in (("other", "("), ("other", "[")):
                inner, at = self._expression(tokens, at)
                at += 1
                last = inner if value == "(" else 0.0
                sequence += last
            elif (kind, value) == ("other", "|"):
                choices.append(sequence)
                sequence = last = 0.0
            elif kind == "times" or (kind == "other" and value in ("*", "?", "+")):
                least = value if kind == "times" else int(value == "+")
                sequence = sequence - last + least * last if math.isfinite(last) else (sequence if least else 0.0)
            else:
                last = self._shortest.get(value, 0.0) if kind == "name" else float(value if kind == "length" else 0)
                sequence += last
        return min([*choices, sequence]), at


def _lark_tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _LARK_TOKEN.match(text, at)
        assert found is not None and found.lastgroup is not None
        at, kind, value = found.end(), found.lastgroup, found[0]
        if kind == "directive":
            if value == "%json":
                schema, at = _inline_schema(text, at)
                yield "length", _ShortestJson(schema).length(schema)
            elif value != "%ignore":
                raise SchemaError(f"the grammar has {value}; allowed are %json and %ignore")
        elif kind in ("string", "regex"):
            length = len(value) - 2 if kind == "string" else shortest_match(value[1 : value.rindex("/")])
            _check_forced("grammar", length)
            yield "length", length
        elif kind == "special":
            yield "length", 1
        elif kind == "times":
            yield "times", int((re.search(r"\d+", value.split(",")[0]) or "0")[0])
        elif kind == "name":
            yield "name", value.lstrip("?!@")
        elif kind == "other":
            yield "other", value


def _inline_schema(text: str, at: int) -> tuple[Mapping[str, Any], int]:
    try:
        schema, end = json.JSONDecoder().raw_decode(text, len(text) - len(text[at:].lstrip()))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the grammar has a schema after %json that is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise SchemaError("the grammar has a schema after %json that is not a JSON object")
    checked_schema(schema)
    return schema, end
