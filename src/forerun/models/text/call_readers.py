"""Read tool calls whose arguments are not JSON: between tags, as Python, or with special marks around strings."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]
Calls = list[tuple[str, Any]]
NOTHING = ("null", "None")
PYTHON_NAMES = {"true": True, "false": False, "null": None, "none": None}
"""JSON's words, which models mix with Python's."""
TEXT_MARKS = ('<|"|>', "<escape>")
"""Marks around strings in calls of Gemma 4 and FunctionGemma."""


def read_tags(body: str, properties: Mapping[str, Any], required: Sequence[str]) -> Json:
    """Read ``<parameter=name>value</parameter>`` after a function's name; a missing end tag ends at the next one."""
    arguments: Json = {}
    for part in re.split(r"<parameter=", body)[1:]:
        name, _, rest = part.partition(">")
        text = re.split(r"\n?</parameter>|\n?</function>|\n?</tool_call>", rest, maxsplit=1)[0]
        text = text.removeprefix("\n").removesuffix("\n")
        value = _typed(text, properties.get(name.strip()))
        if value is not _MISSING or name.strip() in required:
            arguments[name.strip()] = None if value is _MISSING else value
    return arguments


_MISSING = object()


def _typed(text: str, schema: Any) -> Any:
    """Convert text to the type of a schema; ``_MISSING`` without a value."""
    own = schema if isinstance(schema, Mapping) else {}
    kinds = _kinds(own)
    values = own.get("enum", [own["const"]] if "const" in own else ())
    for value in values if isinstance(values, list) else ():
        if text == (value if isinstance(value, str) else json.dumps(value)):
            return value
    if "null" in kinds and text.strip() in NOTHING:
        return None
    for kind in kinds:
        value = _TYPED[kind](text) if kind in _TYPED else _MISSING
        if value is not _MISSING:
            return value
    return _MISSING if kinds and "string" not in kinds and text.strip() in (*NOTHING, "") else text


def _kinds(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    kinds = schema.get("type") or []
    found = [kinds] if isinstance(kinds, str) else [each for each in kinds if isinstance(each, str)]
    for choices in (schema.get("anyOf"), schema.get("oneOf")):
        found += [kind for each in (choices if isinstance(choices, list) else ()) for kind in _kinds(each)]
    return found


def _json_of(*types: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            try:
                value = _plain(ast.parse(text.strip(), mode="eval").body)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                return _MISSING
        wrong = isinstance(value, bool) and bool not in types
        return value if isinstance(value, types) and not wrong else _MISSING

    return read


def _integer(text: str) -> Any:
    number = _json_of(int, float)(text)
    return int(number) if number is not _MISSING and number == int(number) else _MISSING


def _boolean(text: str) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), _MISSING)


_TYPED: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _json_of(int, float),
    "boolean": _boolean,
    "object": _json_of(dict),
    "array": _json_of(list),
}


def read_python(body: str) -> Calls:
    """Read calls in Python, one or a list: ``[f(a=1, b="x")]``, as in LFM2; raise ValueError for anything else."""
    try:
        tree = ast.parse(body.strip(), mode="eval").body
        return [_python_call(each) for each in (tree.elts if isinstance(tree, ast.List) else [tree])]
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("no calls in Python") from error


def _python_call(node: ast.expr) -> tuple[str, Json]:
    if not isinstance(node, ast.Call) or node.args or any(each.arg is None for each in node.keywords):
        raise ValueError("no call in Python")
    return ast.unparse(node.func), {str(each.arg): _plain(each.value) for each in node.keywords}


def _plain(node: ast.expr) -> Any:
    """Return the value of a Python literal, which may contain JSON's words."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id.lower() in PYTHON_NAMES:
        return PYTHON_NAMES[node.id.lower()]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_plain(each) for each in node.elts]
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {str(_plain(key)): _plain(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _plain(node.operand)
        if isinstance(number, int | float):
            return -number
    raise ValueError("no value in Python")


def read_braces(body: str) -> Calls:
    """Read a call ``call:f{a:1,b:<|"|>x<|"|>}`` with unquoted names, as in Gemma; raise ValueError otherwise."""
    name, brace, _ = body.strip().removeprefix("call:").partition("{")
    reader = _Braces(body[body.find("{") :] if brace else "{}")
    value = reader.value()
    if not name or reader.rest.strip():
        raise ValueError("no call in braces")
    return [(name.strip(), value)]


class _Braces:
    def __init__(self, text: str) -> None:
        self.rest = text.lstrip()

    def value(self) -> Any:
        mark = next((each for each in (*TEXT_MARKS, '"') if self.rest.startswith(each)), None)
        if mark == '"':
            text, end = json.JSONDecoder().raw_decode(self.rest)
            self.rest = self.rest[end:]
            return text
        if mark is not None:
            text, closed, self.rest = self.rest[len(mark) :].partition(mark)
            if not closed:
                raise ValueError("a text without an end")
            return text
        if self._skip("{"):
            return dict(self._entries("}", self._field))
        if self._skip("["):
            return self._entries("]", self.value)
        return self._word()

    def _field(self) -> tuple[str, Any]:
        if self.rest.startswith((*TEXT_MARKS, '"')):
            name = self.value()
        else:
            name, _, rest = self.rest.partition(":")
            self.rest = ":" + rest
        if not self._skip(":"):
            raise ValueError("a name without a value")
        return str(name).strip(), self.value()

    def _entries(self, end: str, entry: Callable[[], Any]) -> list[Any]:
        found = []
        while not self._skip(end):
            found.append(entry())
            if not self._skip(",") and not self.rest.startswith(end):
                raise ValueError("entries without a comma")
        return found

    def _word(self) -> Any:
        word = re.match(r"[^,}\]]*", self.rest)
        text = word[0] if word else ""
        self.rest = self.rest[len(text) :]
        if not text.strip():
            raise ValueError("no value")
        try:
            return json.loads(text)
        except ValueError:
            return PYTHON_NAMES.get(text.strip().lower(), text.strip())

    def _skip(self, mark: str) -> bool:
        self.rest = self.rest.lstrip()
        if not self.rest.startswith(mark):
            return False
        self.rest = self.rest[len(mark) :].lstrip()
        return True


def read_bare(text: str, names: Sequence[str]) -> Calls:
    """Read calls as JSON objects that name tools; raise ValueError if the text has more than a code fence."""
    text = re.sub(r"^\s*```\w*\s*|\s*```\s*$", "", text).strip()
    calls, decoder = Calls(), json.JSONDecoder()
    while text:
        value, end = decoder.raw_decode(text)
        if not isinstance(value, dict) or value.get("name") not in names or not value.keys() <= {"name", "arguments"}:
            raise ValueError("an object that is no call")
        calls.append((value["name"], value.get("arguments", {})))
        text = text[end:].lstrip(" \t\r\n;,")
    return calls
