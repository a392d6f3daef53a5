"""How a model's messages are written: a template for transformers' parser, and grammars for answers that must be calls.

A tokenizer's own response template takes precedence over its family's forms in ``call_formats``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from forerun.models.text.call_formats import (
    CALL_FORMATS,
    HARMONY_CONTENT,
    HERMES,
    THINKING_FORMATS,
    Body,
    CallFormat,
    Json,
    ThinkingFormat,
)
from forerun.models.text.grammar import JSON_STYLE
from forerun.models.text.schemas import SCHEMAS_BY_NAME, SchemaError, usable_schema

OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref", "minProperties"}
)
"""Schema keywords that may allow arguments beyond the properties."""
ANNOTATIONS = ("description", "title", "examples", "default")
Thinking = Literal["open", "free", "closed"]
"""Whether a prompt ends inside reasoning, leaves it to the model, or has ended it."""


@dataclass(frozen=True)
class MessageFormat:
    """How a model's messages are written."""

    calls: CallFormat | None  # None if only the tokenizer's response template, ``own``, describes them
    thinking: ThinkingFormat | None
    own: Json | None
    special: Mapping[str, int]  # the tokenizer's special tokens by text; they are left out of texts
    added: Mapping[str, int]  # all added tokens, including special ones

    def response_template(self, with_tools: bool) -> Json | None:
        """Return the response template for transformers' parser, or None if a message is all content."""
        if self.own is not None:
            return self.own
        thinking, calls = self.thinking, self.calls if with_tools else None
        if thinking is None and calls is None:
            return None
        text: Json = {"content_args": {"strip": False}}
        fields: Json = {"content": (HARMONY_CONTENT if thinking and thinking.answer else {}) | text}
        noise = [*((thinking.following,) if thinking and thinking.following else ()), *(calls.noise if calls else ())]
        if thinking is not None:
            fields["reasoning_content"] = {"open": thinking.begin, "close": thinking.end, **text}
        if calls is not None:
            fields["tool_calls"] = {**text, **calls.field, "repeats": True}
        if noise:
            fields["noise"] = {"open": noise, "close_pattern": ""}
        return {"start_anchor": "\0", "fields": fields}

    def kept_tokens(self, with_tools: bool) -> frozenset[int]:
        """Return special tokens that are part of a message's text, because they mark its parts."""
        template = self.response_template(with_tools)
        if template is None:
            return frozenset()
        if self.own is not None:
            return frozenset(self.special.values())
        patterns = json.dumps(template, ensure_ascii=False).replace("\\", "")
        return frozenset(token for text, token in self.special.items() if text in patterns)

    def thinking_after(self, prompt: str) -> Thinking:
        """Return the reasoning state in which a message after a prompt starts."""
        end = prompt.rstrip()
        if self.thinking is None or end.endswith(self.thinking.end):
            return "closed"
        return "open" if end.endswith(self.thinking.begin) else "free"

    def grammar(
        self, response_format: Json | None, tools: Sequence[Json], parallel: bool, thinking: Thinking
    ) -> Json | None:
        """Return a response format for a complete message: optional reasoning, and then an answer or calls.

        Without ``response_format``, the answer must be calls, or any text if there are no tools. Calls that are
        optional may have any arguments if the tool's schema cannot be enforced; raise SchemaError for a required one.
        """
        free = response_format is None or response_format["type"] == "text"
        if free and not tools:
            return None
        if not tools and thinking == "closed" and not (self.thinking and self.thinking.answer):
            return response_format
        rules = [] if free or response_format is None else [_answer_rules(response_format)]
        choices = [] if free else [self._lark(self.thinking.answer if self.thinking else "") + " forerun_answer"]
        if tools:
            rules += self._call_rules(tools if free else list(map(_keepable, tools)), parallel)
            choices.append("forerun_calls")
        reasoning, more = self._thinking_rules(thinking)
        return {"type": "grammar", "grammar": "\n".join([f"start: {reasoning} ({' | '.join(choices)})", *more, *rules])}

    def _thinking_rules(self, thinking: Thinking) -> tuple[str, list[str]]:
        if self.thinking is None or thinking == "closed":
            return "", []
        end, following = self._lark(self.thinking.end), self._lark(self.thinking.following) or r"/\n{0,2}/"
        if self.thinking.end in self.added:
            rules = [f"forerun_reasoning: FORERUN_ANY {end} {following}", "FORERUN_ANY: /(?s:.*)/"]
        else:
            rules = [f"forerun_reasoning: forerun_thoughts {following}", f"forerun_thoughts[suffix={end}]: /(?s:.*)/"]
        if thinking == "open":
            return "forerun_reasoning", rules
        return f"({self._lark(self.thinking.begin)} forerun_reasoning)?", rules

    def _call_rules(self, tools: Sequence[Json], parallel: bool) -> list[str]:
        calls = self.calls
        assert calls is not None
        more = f"({self._lark(calls.between)} forerun_call)*" if parallel else ""
        rules = [
            f"forerun_calls: {self._lark(calls.begin)} forerun_call {more} {self._lark(calls.end)}",
            "forerun_call: " + " | ".join(f"forerun_call_{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            function = tool["function"]
            before = calls.before.replace("{name}", function["name"])
            arguments, own_rules = self._arguments(calls.body, function, i)
            rules += [f"forerun_call_{i}: {self._lark(before)} {arguments} {self._lark(calls.after)}", *own_rules]
        return rules

    def _arguments(self, body: Body, function: Json, number: int) -> tuple[str, list[str]]:
        schema = usable_schema(dict(function.get("parameters") or {}), f"tool {function['name']}")
        properties = schema.get("properties") or {}
        if body in ("object", "named"):
            closed = {} if schema.keys() & OPEN_KEYWORDS else {"additionalProperties": False}
            return _lark_json({"type": "object", **closed, **schema}), []
        if body != "tags":
            return self._named_arguments(schema, number)
        parts, rules = [], []
        shared = _shared_schemas(schema)
        for place, (name, inner) in enumerate(properties.items()):
            rule = f"forerun_value_{number}_{place}"
            begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
            words = _bare(inner, shared)
            if words is None:
                suffix = json.dumps(end)
                rules.append(f"{rule}[suffix={suffix}]: /(?s:.*)/")
                part = f"{self._lark(begin)} {rule}"
            else:
                part = f"{self._lark(begin)} ({' | '.join(words)}) {self._lark(end)}"
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        return " ".join(parts), rules

    def _named_arguments(self, schema: Json, number: int) -> tuple[str, list[str]]:
        assert self.calls is not None
        shared, required, mark = _shared_schemas(schema), schema.get("required", ()), self.calls.separator
        rules, first, later = [f"forerun_first_{number}_end: "], "end", "end"
        for place, (name, inner) in reversed([*enumerate((schema.get("properties") or {}).items())]):
            one = f"forerun_one_{number}_{place}"
            words = _bare(inner, shared, self._lark(mark)) if mark else [_lark_json({**shared, **inner})]
            begin = self._lark(f"{name}{':' if mark else '='}")
            if words is None:
                rules.append(f"{one}_text[suffix={self._lark(mark)}]: /(?s:.*)/")
                rules.append(f"{one}: {begin} {self._lark(mark)} {one}_text")
            else:
                rules.append(f"{one}: {begin} ({' | '.join(words)})")
            comma = self._lark("," if mark else ", ")
            rest = "" if later == "end" else f"forerun_later_{number}_{later}"
            skip = "" if name in required else f" | forerun_first_{number}_{first}"
            rules.append(f"forerun_first_{number}_{place}: {one} {rest}{skip}")
            rules.append(f"forerun_later_{number}_{place}: ({comma} {one}){'' if name in required else '?'} {rest}")
            first = later = str(place)
        return f"forerun_first_{number}_{first}", rules

    def _lark(self, text: str) -> str:
        """Write text in Lark, added tokens as numbers: some are special to llguidance, and no text spells those."""
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(self.added, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self.added[part]}]>" if part in self.added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def message_format(tokenizer: PreTrainedTokenizerBase) -> MessageFormat:
    """Find the format of a tokenizer's messages."""
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
    own = getattr(tokenizer, "response_template", None)
    unknown = HERMES if own is None else None
    words = tokenizer.get_added_vocab() if text else {}
    shown = (each for each in CALL_FORMATS if all(mark in text for mark in each.marks))
    # a template may leave its family's marks to the model, which has tokens for them
    spelled = (each for each in CALL_FORMATS if all(mark in words for mark in each.marks))
    calls = next(chain(shown, spelled), unknown)

    def is_known(thinking: ThinkingFormat) -> bool:
        if thinking.answer:  # its end may be any turn's, as in Phi-3
            return thinking.begin in text
        return thinking.end in text or (thinking.end in words and thinking.begin in words) or thinking.begin in text

    thinking = next((each for each in THINKING_FORMATS if is_known(each)), None)
    tokens = tokenizer.added_tokens_decoder
    added = {each.content: token for token, each in tokens.items() if each.content.strip()}
    special = {each.content: token for token, each in tokens.items() if each.special}
    return MessageFormat(calls, thinking, own, special, added)


def _keepable(tool: Json) -> Json:
    try:
        usable_schema(tool["function"].get("parameters"))
        return tool
    except SchemaError:
        return {
            **tool,
            "function": {**tool["function"], "parameters": {"type": "object", "additionalProperties": True}},
        }


def _lark_json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**_constraints(schema), "x-guidance": dict(JSON_STYLE)}, ensure_ascii=False)


def _constraints(schema: Any) -> Any:
    """Drop what only people and models read from a schema, because a request may have dozens of tools."""
    if isinstance(schema, list):
        return [_constraints(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: Json = {}
    for key, inner in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(inner, Mapping):
            kept[key] = {name: _constraints(each) for name, each in inner.items()}
        elif key not in ANNOTATIONS:
            kept[key] = inner if key in ("const", "enum") else _constraints(inner)
    return kept


def _shared_schemas(parameters: Mapping[str, Any]) -> Json:
    return {key: parameters[key] for key in ("$defs", "definitions") if isinstance(parameters.get(key), Mapping)}


def _alternatives(schema: Any, shared: Json) -> list[Any]:
    """Expand a schema into its alternatives: follow references, and split unions and lists of types."""
    waiting, found, seen = [schema], [], set[str]()
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, Mapping):
            reference = str(each.get("$ref", ""))
            place, _, name = reference.removeprefix("#/").rpartition("/")
            if name in shared.get(place, {}):
                waiting += [] if reference in seen else [shared[place][name]]
                seen.add(reference)
                continue
            kinds = each.get("type")
            choices = next((each[key] for key in ("anyOf", "oneOf") if kinds is None and each.get(key)), ())
            if isinstance(kinds, list):
                choices = [{**each, "type": kind} for kind in kinds]
            if isinstance(choices, list):
                waiting += choices
                continue
        found.append(each)
    return found


BARE_FORMATS = {
    "date": r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    "time": r"[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][0-2][0-9]:[0-5][0-9])?",
    "date-time": r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    r"(Z|[+-][0-2][0-9]:[0-5][0-9])?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""Formats enforced even without quotes, as regular expressions."""


def _bare(schema: Any, shared: Json, mark: str = "") -> list[str] | None:
    """Return what may be between tags, in Lark: listed strings, else JSON; None if any text may."""
    found: list[str] = []
    for each in _alternatives(schema, shared):
        own = each if isinstance(each, Mapping) else {}
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list) and values:
            texts = [(value, mark) if isinstance(value, str) else (json.dumps(value), "") for value in values]
            found += [f"{around} {json.dumps(text, ensure_ascii=False)} {around}" for text, around in texts]
        elif own.get("type") == "string" and own.get("format") in BARE_FORMATS:
            found.append(f"{mark} /{BARE_FORMATS[own['format']]}/ {mark}")
        elif own.get("type") == "string":
            return None
        else:
            found.append(_lark_json({**shared, **own}))
    return found


def with_types(tools: Sequence[Json]) -> list[Json]:
    """Move parameters' types to where transformers looks for them, resolving references."""
    typed = []
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        shared, properties = _shared_schemas(parameters), {}
        given = parameters.get("properties")
        for name, schema in given.items() if isinstance(given, Mapping) else ():
            choices = _alternatives(schema, shared)
            properties[name] = choices[0] if len(choices) == 1 else {"anyOf": choices}
        function = {**tool["function"], "parameters": {**parameters, "properties": properties}}
        typed.append({**tool, "function": function})
    return typed


def _answer_rules(response_format: Json) -> str:
    kind = response_format["type"]
    if kind == "grammar":
        kept = r'("(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/)'  # strings, comments and expressions
        return re.sub(kept + r"|\bstart\b", _renamed, str(response_format["grammar"]))
    if kind == "regex":
        pattern = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], response_format["regex"])
        return f"forerun_answer: /{pattern}/"
    schema = {"type": "object"} if kind == "json_object" else usable_schema(response_format["json_schema"]["schema"])
    return f"forerun_answer: {_lark_json(schema)}"


def _renamed(found: re.Match[str]) -> str:
    return found[1] or "forerun_answer"
