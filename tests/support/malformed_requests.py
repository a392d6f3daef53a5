"""Requests out of a server's own description: most are nearly right, the others are nonsense of every kind.

The same seed gives the same requests. They know nothing of the server but its OpenAPI description and which of its
fields may cost much.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = Any
HOST = "127.0.0.1"


@dataclass(frozen=True)
class RawRequest:
    """What one client sends.

    Attributes:
        kind: of request.
        pieces: sent one after the other.
        leaves: whether the client goes away then, and reads no answer.
    """

    kind: str
    pieces: tuple[bytes, ...]
    leaves: bool = False


REGEXES = ("a|b/c", "(((", "(.*a){20}.*", "(a{1,1000}){1,1000}")
GRAMMARS = (
    'start: "a" b*\nb: /[xy]{2}/',
    "start: a a\na: start start",
    "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "ab"',
    'start: %json {"type": "integer"} | %lark {}',
    'start: %json {"a": ' + "[" * 5000,
    "start: " + "(" * 3000 + '"a"' + ")" * 3000,
)
FUNCTIONS: list[Json] = [{"name": "f", **more} for more in (
    {}, {"parameters": {"properties": {"a": {"const": 1}}}}, {"parameters": {"$ref": "#"}},
)]  # fmt: skip
TOOLS: list[Json] = [
    *({"type": "function", "function": each} for each in FUNCTIONS),
    {"type": "function", "name": "f", "parameters": {"properties": {"a": {"enum": ["b", "c"]}}}},
    {"type": "web_search"}, {},
]  # fmt: skip
SCHEMAS: list[Json] = [
    {}, {"$ref": "#"}, {"$ref": "http://127.0.0.1/x"},
    {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(200)}},
    {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}, {"type": "string", "pattern": "(.*a){20}.*"},
    {"type": "string", "pattern": "^" + "a?" * 500 + "a" * 500 + "$"}, {"type": "string", "pattern": "(((("},
    {"type": "string", "pattern": "^" + "|".join(f"(.{{{i}}}a.{{{40 - i}}}b)" for i in range(40)) + "$"},
    {"type": "string", "minLength": 10**9}, {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "array", "minItems": 10**9, "items": {"type": "integer"}}, {"type": "integer", "multipleOf": 9_999_991},
    {"type": "integer", "multipleOf": 997}, {"type": "number", "multipleOf": 1e-300, "maximum": 1e300},
    {"type": "integer", "minimum": -(10**40), "maximum": 10**40}, {"enum": []},
    {"enum": [f"v{i}" for i in range(2000)]}, {"const": float("nan")}, {"type": "nothing"}, {"not": {}},
    {"allOf": [{"properties": {f"k{i}": {"type": "string"}}} for i in range(300)]},
    {"$defs": {"n": {"properties": {"a": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"type": "object", "properties": {"\ud800": {"type": "string"}}, "required": ["\ud800"]}, {"const": "a" * 1900},
    {"const": "a" * 60_000}, {"const": "\ufffd" * 600}, {"const": {"a": ["b" * 300] * 5}},
    {"enum": ["a" * 1500, "b" * 1500]}, {"type": "string", "pattern": "^a{1900}$"},
    {"type": "string", "pattern": "^a{60000}$"}, {"type": "array", "minItems": 300, "items": {"const": "ab"}},
    {"allOf": [{"pattern": f"[a-z]{{{i}}}.*x"} for i in range(9)]},
]  # fmt: skip
"""Schemas that are wrong, cannot be met, are hard to compile or to follow, or spell out long texts."""
HOSTS = (*f"{HOST} localhost localhost:1 [::1] example.com evil.example evil.example:80 [ é".split(), "", "a b")
"""What requests name as the server; from the fifth on they are foreign where hosts are checked."""
ORIGINS = ("http://evil.example", "null", f"http://{HOST}", "", "http://[")
SCALARS: list[Json] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "\0", "\ud800", "\udfff x", "x" * 5000, "é" * 300, "\U0010ffff",
    "../../etc/passwd", "{{ 7 * 7 }}", "bundled", "none", [], {}, [[]], [None], {"": None}, [[1], ["a"]], [-1],
    [2**31 - 1], [49_152, 10**6],
]  # fmt: skip
USUAL: dict[str, tuple[Json, ...]] = {
    "model": ("bundled",), "prompt": ("Hi", "def f(x):", ["a", "b"], [5, 6, 7], [[1], [2, 3]], "x " * 400),
    "input": ("Hi", [{"role": "user", "content": "Hi"}], [{"type": "reasoning"}]),
    "tool_choice": ("auto", "none", "required", {"type": "function", "name": "f"}),
    "logit_bias": ({"5": 1.5}, {"5": 200}, {"9999": 1}, {"x": 1}), "n": (1, 1, 2, 3, 128),
    "stop": ("e", ["a", "\n"], "long " * 2000, ["e" * 100_000]), "min_tokens": (0, 0, 1),
    "stop_token_ids": ([], [5], [10**6]), "continue_final_message": (None, False, True),
    "add_generation_prompt": (None, True, False), "output_format": (None,), "role": ("user", "system"),
    "content": ("Hi", "", [{"type": "text", "text": "Hi"}], "y " * 300),
}  # fmt: skip
"""Values of fields that may cost much, or that have a form of their own."""
TYPES = ("application/json",) * 60 + ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "é")
POST, GET = (line + b" HTTP/1.1\r\nHost: x\r\n" for line in (b"POST /v1/completions", b"GET /health"))
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
TLS = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
WITHOUT_HOST = b"GET /health HTTP/1.1\r\n\r\n"
RAW: list[tuple[bytes, ...]] = [
    (b"\0" * 2000,), (TLS,), (b"GET / HTTP/9.9\r\n\r\n",), (WITHOUT_HOST,), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",), (GET + b"X: y\r\n" * 20_000 + b"\r\n",),
    (GET + b"X: " + b"y" * 100_000 + b"\r\n\r\n",), (GET + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",),
    *((POST + b"Content-Length: %b\r\n\r\n" % length,) for length in (b"-5", b"1e9")),
    *((POST + b"Content-Length: %b\r\n\r\n{}" % length,) for length in (b"9" * 14, b"5\r\nContent-Length: 6")),
    (CHUNKED, b"zz\r\nnonsense\r\n"), (CHUNKED, b"2\r\n{}\r\n0\r\n\r\n"),
    (POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n", b"{}"),
    (POST + b"Transfer-Encoding: gzip\r\n\r\n{}",),
    ((GET + b"\r\n") * 20 + b"nonsense\r\n\r\n",), (b"GET /health HTTP/1.0\r\nAuthorization: \xff\xfe\r\n\r\n",),
]  # fmt: skip
"""What is no HTTP, or strange HTTP."""


class RequestFuzzer:
    """Draws requests.

    Args:
        description: the server's ``/openapi.json``.
        seed: of all that is random.
        large: bytes of the largest bodies.
    """

    def __init__(self, description: Json, seed: int, large: int) -> None:
        self._all, self._large = description, large
        self._random = random.Random(seed)
        self._posts = [path for path, how in description["paths"].items() if "post" in how]
        self._makers: list[tuple[Callable[[], RawRequest], float]] = [
            (self._posted, 0.75), (self._broken, 0.08), (self._addressed, 0.06), (self._raw, 0.05), (self._gone, 0.058),
            (self._big, 0.002),
        ]  # fmt: skip

    def draw(self) -> RawRequest:
        """The next request."""
        makers, weights = zip(*self._makers, strict=True)
        maker: Callable[[], RawRequest] = self._random.choices(makers, weights)[0]
        return maker()

    def _posted(self) -> RawRequest:
        """A request in the described form, of which most have something wrong."""
        path = self._random.choice(self._posts)
        return RawRequest("posted", (self._post(path, _bytes(self._body(path))),))

    def _broken(self) -> RawRequest:
        """A body that is cut, changed, or no text at all."""
        path = self._random.choice(self._posts)
        body = _bytes(self._body(path))
        place = self._random.randrange(len(body))
        changed = self._random.choice([
            body[:place], body[:place] + self._random.randbytes(3) + body[place:], b"\xef\xbb\xbf" + body,
            body.decode().encode("utf-16"), b'{"prompt":' + b"[" * self._random.choice((500, 5000, 100_000)),
            b'{"prompt": ' + b"9" * 5000 + b"}",
        ])  # fmt: skip
        return RawRequest("broken", (self._post(path, changed),))

    def _addressed(self) -> RawRequest:
        """Other methods and addresses."""
        others = ("/", "/v1", "//", "/%00", "/%ff%fe", "/v1/models/%2e%2e", "/*")
        path = self._random.choice([*self._all["paths"], *others])
        path = path.replace("{given}", self._random.choice(("bundled", "gpt", "%F0%9F%92%A9", "a/b", "")))
        method = self._random.choice(("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW"))
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n"
        return RawRequest("addressed", (head.encode(),))

    def _raw(self) -> RawRequest:
        return RawRequest("raw", self._random.choice(RAW), self._random.random() < 0.2)

    def _gone(self) -> RawRequest:
        """A client that goes: in the midst of its request, or before its answer."""
        whole = self._posted().pieces[0]
        cut = whole if self._random.random() < 0.5 else whole[: self._random.randrange(1, len(whole))]
        return RawRequest("gone", (cut,), leaves=True)

    def _big(self) -> RawRequest:
        """As large as may be, or one byte more."""
        unit, around = self._random.choice(
            [("1,", "[%s1]"), ('"a",', '["a",%s"a"]'), ("{},", "[%s{}]"), ("a", '"%s"'), ("[1],", "[%s[1]]")]
        )
        path, field = self._random.choice(self._posts), self._random.choice(("prompt", "messages", "stop"))
        head = '{"model": "bundled", "%s": %s}'
        room = self._large - len(head) - len(around) - len(field) + self._random.choice((0, 200))
        body = head % (field, around % (unit * (room // len(unit))))
        return RawRequest("big", (self._post(path, body.encode()),))

    def _post(self, path: str, body: bytes) -> bytes:
        kind = self._random.choice(TYPES)
        said = f"Content-Type: {kind}\r\n".encode("latin-1") if kind else b""
        head = f"POST {path} HTTP/1.1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n{self._who()}"
        return head.encode("latin-1") + said + b"\r\n" + body

    def _who(self) -> str:
        """Whom a request asks, and from where: mostly as the server wants it."""
        host = HOST if self._random.random() < 0.93 else self._random.choice(HOSTS)
        lines = [f"Host: {host}"]
        if self._random.random() < 0.05:
            lines.append(f"Origin: {self._random.choice(ORIGINS)}")
        return "".join(f"{line}\r\n" for line in lines)

    def _body(self, path: str) -> Json:
        content = self._all["paths"][path]["post"]["requestBody"]["content"]
        schema = self._found(content["application/json"]["schema"])
        body = copy.deepcopy(self._object(schema))  # what is spoiled is no part of the description
        for _ in range(self._random.choices((0, 1, 2), (0.6, 0.3, 0.1))[0]):
            self._spoil(body)
        return body

    def _object(self, schema: Json) -> Json:
        required = schema.get("required", [])
        wanted = [name for name in schema.get("properties", {}) if name in required or self._random.random() < 0.12]
        return {name: self._field(name, schema["properties"][name]) for name in wanted}

    def _field(self, name: str, schema: Json) -> Json:
        """A value of a field: a cheap one for those that cost time, one that the description allows for others."""
        chance = self._random.choice
        made: dict[str, Callable[[], Json]] = {
            **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), self._length),
            "tools": lambda: [copy.deepcopy(chance(TOOLS))] * chance((1, 1, 2)),
            "response_format": self._format,
            "messages": lambda: chance(([{"role": "user", "content": "Hi"}], self._value(schema))),
            "forerun": lambda: {
                "namespace": chance(("a", "b", "c", f"n{self._random.randrange(10**6)}")), "budget": chance((0, 4, 64)),
            },
        }  # fmt: skip
        if name in USUAL:
            return copy.deepcopy(chance(USUAL[name]))
        return made[name]() if name in made else self._value(schema)

    def _length(self) -> int:
        """Of an answer in tokens: short ones as a rule, so that thousands take minutes."""
        return self._random.randint(1, 6) if self._random.random() < 0.9 else self._random.choice((48, 64, 65))

    def _format(self) -> Json:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
        found = copy.deepcopy(self._random.choice([schema, schema, *SCHEMAS]))
        forms = [{"type": "json_schema", "json_schema": {"name": "x", "schema": found}}] * 4 + [{"type": "json_object"}]
        forms += [{"type": "regex", "regex": text} for text in REGEXES]
        return self._random.choice(forms + [{"type": "grammar", "grammar": text} for text in GRAMMARS])

    def _value(self, schema: Json) -> Json:
        """A value that a description allows, as far as its simple keywords say."""
        schema = self._found(schema)
        if "anyOf" in schema or "oneOf" in schema:
            return self._value(self._random.choice(schema.get("anyOf") or schema["oneOf"]))
        if "const" in schema or "enum" in schema:
            return self._random.choice(schema.get("enum") or [schema.get("const")])
        made: dict[str, Callable[[], Json]] = {
            "object": lambda: self._object(schema),
            "array": lambda: [self._value(schema.get("items", {})) for _ in range(self._random.randint(0, 3))],
            "string": lambda: self._random.choice(("a", "default", "Hi")),
            "integer": lambda: self._random.randint(int(schema.get("minimum", 0)), int(schema.get("maximum", 9))),
            "number": lambda: self._random.uniform(schema.get("minimum", 0.1), schema.get("maximum", 1)),
            "boolean": lambda: self._random.random() < 0.5,
            "null": lambda: None,
        }
        return made[schema["type"]]() if schema.get("type") in made else None

    def _found(self, schema: Json) -> Json:
        while "$ref" in schema:
            schema = self._all["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema

    def _spoil(self, body: Json) -> None:
        """Put something strange somewhere, at any depth equally often."""
        places = [[(body, self._random.choice(("", "unknown", "\ud800", "__class__"))), *((body, key) for key in body)]]
        while inner := [holder[key] for holder, key in places[-1] if isinstance(holder, list) or key in holder]:
            below = [(each, key) for each in inner for key in _keys(each)]
            if not below:
                break
            places.append(below)
        holder, key = self._random.choice(self._random.choice(places))
        scalar, schema = copy.deepcopy((self._random.choice(SCALARS), self._random.choice(SCHEMAS)))
        strange = [scalar, _nested(self._random.choice((3, 50, 400))), schema]
        holder[key] = self._random.choices(strange, (0.8, 0.1, 0.1))[0]


def _keys(value: Json) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    return list(range(len(value))) if isinstance(value, list) else []


def _nested(depth: int) -> Json:
    return json.loads('{"a": [' * (depth // 2) + "1" + "]}" * (depth // 2))


def _bytes(body: Json) -> bytes:
    """As JSON, with NaN and halves of surrogate pairs as they are written there, and integers of any length."""
    return json.dumps(body).encode()
