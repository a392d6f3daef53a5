"""The requests of an audit: typical ones, chosen so that every kind of drafter finds something to draft from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from forerun.audit.endpoint.client import Json

Kind = Literal["greedy", "seeded", "tools", "schema", "stops", "logprobs", "long", "own"]
CASE_KINDS: tuple[Kind, ...] = get_args(Kind)
Address = Literal["completions", "chat/completions"]

PROMPTS = (
    "Copy this list of records, and add two more of the same form:\n"
    '[{"id": 1, "name": "Ada", "city": "London"}, {"id": 2, "name": "Alan", "city": "London"},',
    "def mean(values):\n    return sum(values) / len(values)\n\n\ndef variance(values):\n    ",
    "The Alder Bridge was designed by Ruth Halden and finished in 1871. The Alder Bridge is 412 metres long.\n"
    "Question: Who designed the Alder Bridge, and how long is it?\nAnswer:",
    "Once upon a time there was a small town by the sea, and in this town",
)
"""A list to copy, code, a quotation and free text: drafts are accepted often, sometimes and hardly ever."""
STOPS: Sequence[Sequence[str]] = (("\n",), ("and", ". "))
"""Stops within a line, and stops that begin and end inside tokens."""
RECORD = "Record {0}: the crate of dock {1} holds {2} lamps, {0} ropes and {1} clocks, and was sealed on day {2}.\n"
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Read the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
        },
    },
}
SEARCH: Json = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Find files whose text contains a phrase.",
        "parameters": {
            "type": "object",
            "properties": {"phrase": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["phrase"],
        },
    },
}
ASKED: Json = {"role": "user", "content": "What is the weather in Paris and in Rome, in celsius? Use the tool."}
CALLED: Json = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
        }
    ],
}
RESULT: Json = {"role": "tool", "tool_call_id": "call_1", "content": '{"city": "Paris", "degrees": 21, "sky": "clear"}'}
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 2,
            "maxItems": 4,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "member": {"type": "boolean"}},
                "required": ["name", "age", "member"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["people"],
    "additionalProperties": False,
}
CHOICE: Json = {"type": "object", "properties": {"colour": {"enum": ["red", "green", "blue"]}}, "required": ["colour"]}


@dataclass(frozen=True)
class Case:
    """One request, without the model's name; ``name`` is for reports."""

    kind: Kind
    name: str
    address: Address
    body: Json

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy, so that a small margin explains a difference."""
        return self.body.get("temperature") == 0

    def scored(self) -> Json:
        """Return the body with log-probabilities."""
        return {**self.body, **(LOGPROBS if self.address == "completions" else CHAT_LOGPROBS)}


LOGPROBS: Json = {"logprobs": 5}
CHAT_LOGPROBS: Json = {"logprobs": True, "top_logprobs": 5}


@dataclass(frozen=True)
class CasePlan:
    """Which cases to send: the built-in prompts, further ``prompts``, and bodies of the user's ``own`` requests."""

    kinds: Sequence[Kind] = CASE_KINDS
    prompts: Sequence[str] = ()
    max_tokens: int = 64
    seeds: int = 1
    temperature: float = 1.0
    long_characters: int = 8000
    own: Sequence[Json] = field(default=())

    def cases(self) -> list[Case]:
        made = {"own": self._own(), **{kind: make(self) for kind, make in _MAKERS.items()}}
        return [case for kind in CASE_KINDS if kind in self.kinds for case in made[kind]]

    @property
    def texts(self) -> list[str]:
        return [*self.prompts, *PROMPTS]

    def both(self, kind: Kind, name: str, prompt: str, **more: object) -> Iterator[Case]:
        """Yield a prompt as a completion and as a chat."""
        body = {"max_tokens": self.max_tokens, "temperature": 0, **more}
        yield Case(kind, f"{name}, completion", "completions", {"prompt": prompt, **body})
        yield self.chat(kind, f"{name}, chat", [{"role": "user", "content": prompt}], **body)

    def chat(self, kind: Kind, name: str, messages: Sequence[Json], **more: object) -> Case:
        body = {"max_tokens": self.max_tokens, "temperature": 0, **more}
        return Case(kind, name, "chat/completions", {"messages": list(messages), **body})

    def _own(self) -> Iterator[Case]:
        for number, body in enumerate(self.own, 1):
            yield Case("own", f"request {number}", "chat/completions" if "messages" in body else "completions", body)


def _greedy(plan: CasePlan) -> Iterator[Case]:
    for number, prompt in enumerate(plan.texts, 1):
        yield from plan.both("greedy", f"prompt {number}", prompt)


def _seeded(plan: CasePlan) -> Iterator[Case]:
    for seed in range(plan.seeds):
        for number, prompt in enumerate(plan.texts, 1):
            more = {"temperature": plan.temperature, "seed": seed}
            yield from plan.both("seeded", f"prompt {number}, seed {seed}", prompt, **more)


def _tools(plan: CasePlan) -> Iterator[Case]:
    both = [WEATHER, SEARCH]
    for choice in ("auto", "required"):
        yield plan.chat("tools", f"a call, {choice}", [ASKED], tools=both, tool_choice=choice)
    yield plan.chat("tools", "after a result", [ASKED, CALLED, RESULT], tools=both)
    named = {"type": "function", "function": {"name": "search_files"}}
    find = {"role": "user", "content": "Find the files that mention 'copper kite'."}
    yield plan.chat("tools", "a named tool", [find], tools=both, tool_choice=named)


def _schema(plan: CasePlan) -> Iterator[Case]:
    for name, schema, question in (
        ("people", SCHEMA, "Ada is 36 and a member, Alan is 41 and none. Write them as JSON."),
        ("colour", CHOICE, "Which colour is grass? Answer as JSON."),
    ):
        wanted = {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}
        yield plan.chat("schema", name, [{"role": "user", "content": question}], response_format=wanted)


def _stops(plan: CasePlan) -> Iterator[Case]:
    for stops in STOPS:
        for number, prompt in enumerate(plan.texts[:2], 1):
            yield from plan.both("stops", f"prompt {number}, {'/'.join(map(repr, stops))}", prompt, stop=list(stops))


def _logprobs(plan: CasePlan) -> Iterator[Case]:
    for number, prompt in enumerate(plan.texts[:2], 1):
        for case in plan.both("logprobs", f"prompt {number}", prompt):
            yield Case(case.kind, case.name, case.address, case.scored())


def _long(plan: CasePlan) -> Iterator[Case]:
    records = [RECORD.format(n, n * 7 % 31, n * 13 % 97) for n in range(1, 2 + plan.long_characters // len(RECORD))]
    text = "".join(records)[: plan.long_characters]
    yield from plan.both("long", "records", f"{text}\nCopy the third record, and go on with the fourth.\n{records[2]}")


_MAKERS = {
    "greedy": _greedy, "seeded": _seeded, "tools": _tools, "schema": _schema, "stops": _stops, "logprobs": _logprobs,
    "long": _long,
}  # fmt: skip


def read_requests(file: Path) -> list[Json]:
    """Read the user's requests: JSON lines of bodies as sent, each with ``messages`` or a ``prompt``; raise ValueError,
    with the line's number, for any other."""
    bodies = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{file}:{number} is not JSON: {error}") from None
        if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
            raise ValueError(f"{file}:{number} must be an object with either messages or prompt")
        if body.get("n") not in (None, 1):
            raise ValueError(f"{file}:{number} has n {body['n']}; one answer to each request is compared")
        bodies.append(
            {name: value for name, value in body.items() if name not in ("model", "stream", "stream_options")}
        )
    if not bodies:
        raise ValueError(f"{file} has no request")
    return bodies
