"""What is wrong in a request is refused by the name of its field, with what is allowed."""

import json
import re
from typing import Any

import pytest
from support.chat_models import QWEN, TOOLS, json_schema
from support.live_server import Json, LiveServer, error_of, serving

from forerun.server.tolerance import MAX_TOOLS, MAX_TURNS

pytest.importorskip("llguidance")
USER: Json = {"role": "user", "content": "Weather in Rome?"}
CHATS, MESSAGES, RESPONSES, TEXTS = "chat/completions", "messages", "responses", "completions"
BASES: dict[str, Json] = {
    CHATS: {"messages": [USER]}, MESSAGES: {"messages": [USER], "max_tokens": 4}, RESPONSES: {"input": [USER]},
    TEXTS: {"prompt": "Hi"},
}  # fmt: skip
DOUBLING = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(20)) + 'r20: "abc"'
"""Three megabytes of text without a choice."""
UNKEEPABLE: Json = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}


engine, server = serving(QWEN, engine={"budget": 16}, max_tokens=64, drafter="trie")


def schema(told: Json) -> Json:
    return {"response_format": json_schema(told)}


def doubled() -> Json:
    """30 definitions of two fields each would spell out a gigabyte without a choice."""
    schemas: Json = {"d0": {"const": "abcd"}}
    for i in range(1, 31):
        inner = {"$ref": f"#/$defs/d{i - 1}"}
        schemas[f"d{i}"] = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    return {"$defs": schemas, "type": "object", "properties": {"x": {"$ref": "#/$defs/d30"}}}


def function(**told: Any) -> Json:
    return {"tools": [{"type": "function", "function": told}]}


def grammar(kind: str, text: str) -> Json:
    return {"response_format": {"type": kind, kind: text}}


ROWS: list[tuple[str, Json, str | None, str]] = [
    *((TEXTS, change, param, "") for change, param in (
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"), ({"prompt": "\ud800"}, "prompt"), ({"prompt": ""}, None),
        ({"prompt": [2**31 - 1]}, None), ({"\ud800": 1}, None), ({"temperature": 2.5}, "temperature"),
        ({"temperature": 1e-300}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"n": 100, "prompt": ["a", "b"]}, "n"), ({"seed": 2**64}, "seed"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 65}, "max_tokens"), ({"stop": ["a"] * 65}, "stop"),
        ({"stop": ""}, "stop"), ({"stop": 3}, "stop"), ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 200}}, "logit_bias"), ({"logit_bias": {"9999": 1}}, "logit_bias"), ({"echo": 3}, "echo"),
        ({"prediction": "x"}, "prediction"), ({"logprobs": 21}, "logprobs"), ({"min_tokens": 17}, "min_tokens"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"), ({"forerun": {"namespace": "a/b"}}, "forerun.namespace"),
    )),
    *((TEXTS, {name: value}, name, "") for name, value in (
        ("best_of", 3), ("suffix", "x"), ("top_q", 3), ("messages", [USER]),
    )),
    (CHATS, {"modalities": ["audio"]}, "modalities", ""), (CHATS, {"functions": [{}]}, "functions", ""),
    *((TEXTS, {"forerun": change}, param, said) for change, param, said in (
        ({"drafter": "auto"}, "forerun.drafter", "this server has trie, none"), ({"budget": -1}, "forerun.budget", "0"),
        ({"budget": 17}, "forerun.budget", "16"), ({"budget": 1.5}, "forerun.budget", "integer"),
        ({"trace": True}, "trace", "for streams"), ({"trac": True}, "forerun.trac", "no such field"),
    )),
    *((TEXTS, change, "response_format", said) for change, said in (
        (grammar("regex", "("), "regex cannot be used"), (grammar("regex", "a{60000}"), "2,000 are the most"),
        (grammar("grammar", "start: x"), "grammar cannot be used"), (schema(doubled()), "32,768 are the most"),
        (grammar("grammar", "start: %regex {}"), "allowed are %json and %ignore"),
        (grammar("grammar", DOUBLING), "32,768 are the most"),
        (grammar("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000), "nested too deeply"),
    )),
    (TEXTS, grammar("regex", ""), "response_format.regex.regex", "at least 1"),
    *((CHATS, change, param, said) for change, param, said in (
        (schema(UNKEEPABLE), "response_format", "cannot be enforced"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ""),
        ({"max_tokens": 65}, "max_tokens", ""), ({"max_completion_tokens": 65}, "max_completion_tokens", ""),
        ({"continue_final_message": True}, "continue_final_message", "turn at the end"),
        ({"messages": [USER] * (MAX_TURNS + 1)}, "messages", f"{MAX_TURNS:,} are the most"),
        ({"tools": TOOLS * MAX_TOOLS}, "tools", f"{MAX_TOOLS} are the most"),
        # as large as a schema may be without tools
        ({"tools": TOOLS, **schema({"properties": {f"p{i}": {"type": "integer"} for i in range(5000)}})},
         "response_format", "65,536 are the most"),
        ({"tools": [None]}, "tools.0", "tools.0"), ({"tools": [{"type": "custom"}]}, "tools", "tool 0 must be"),
        (function(name="a b"), "tools", "the name of tool 0"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "two tools have the same name"),
        (function(name="f", parameters=3), "tools", "parameters of tool 0"),
        (function(name="f", description="\ud800"), "tools.0.function.description", "surrogate"),
        ({**function(name="f", parameters={"properties": {"x": {"type": "strin"}}}), "tool_choice": "required"},
         "tools", "cannot be used"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice",
         "get_weather, add"),
        ({"tool_choice": "required"}, "tool_choice", "the available tools: none"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": 3}}, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 3}}, "tool_choice", "auto, none, required"),
        ({"tools": 3, "tool_choice": {"type": "allowed_tools"}}, "tools", "list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages.0", "call 0 needs"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages.0.tool_calls", "list"),
        ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages.0.content.0", "must be text"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "variables of the chat template"),
        ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs", "variables of the chat template"),
    )),
    *((RESPONSES, change, param, said) for change, param, said in (
        ({"input": [{"type": "thing", "id": "x"}]}, "input.0", "the type must be one that is known, such as message"),
        ({"input": [{"role": "user", "content": [{"type": "input_smell"}]}]}, "input.0.content.0", "must be text"),
        ({"input": [USER] * (MAX_TURNS + 1)}, "input", f"{MAX_TURNS:,} are the most"), ({"input": []}, "input", ""),
        ({"inputs": "x"}, "inputs", "did you mean input?"), ({"max_output_tokens": 0}, "max_output_tokens", ""),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": UNKEEPABLE}}}, "text.format", "enforced"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", ""),
        ({"tools": [{}]}, "tools.0", "tools.0: a tool needs a type"),
        ({"tools": [None]}, "tools.0", "tools.0: input should be a valid dictionary"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice", "auto, none, required"),
    )),
    *((MESSAGES, change, None, said) for change, said in (  # Anthropic's errors have no field
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.content.0: must be text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role user, assistant or system"),
        ({"messages": [USER] * (MAX_TURNS + 1)}, f"messages: there are {MAX_TURNS + 1:,}; {MAX_TURNS:,} are the most"),
        ({"max_tokens": None}, "max_tokens"), ({"temperature": 3}, "temperature"),
        ({"output_config": {"format": {"type": "x"}}}, "output_config.format"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(
    ("address", "change", "param", "said"),
    ROWS,
    ids=lambda told: told if isinstance(told, str) and told in BASES else "",
)
def test_what_is_wrong_is_named(server, address, change, param, said):
    body = json.dumps({"model": "bundled", **BASES[address], **change})
    answer = server.http.post(f"/v1/{address}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    if address != MESSAGES:
        error = error_of(answer)
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), message
        names = ("best_of", "suffix", "top_q", "modalities", "functions", "inputs", "previous_response_id")
        assert (error["code"] == "unsupported") == (param in names or "no such field" in message), error
    assert said in message if said or param is None else re.search(rf"\b{param.split('.')[-1]}\b", message), message
    assert "TextEncodeInput" not in message


@pytest.mark.parametrize("depth", [200, 400, 900, 3000, 20_000])
@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_a_schema_that_is_nested_too_deeply_is_refused(server: LiveServer, place: str, depth: int) -> None:
    nested = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
    change = json.dumps(schema({}) if place == "response_format" else function(name="f", parameters={}))
    wanted = '"tool_choice": "required", ' if place == "tools" else ""
    body = json.dumps({"model": "bundled", **BASES[CHATS]})[:-1] + ", " + wanted + change[1:].replace("{}", nested)
    error_of(server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}))


BODY = '{"model": "bundled", "max_tokens": 1, "prompt": "a"}'


@pytest.mark.parametrize(
    "body",
    [BODY.encode().replace(b'"a"', b'"\xed\xa0\x80"'), BODY.encode().replace(b'"a', b'"\\n\xed\xa0\x80'),
     BODY.encode().replace(b'"a"', b'"\xff"'), BODY.encode("utf-16"), BODY.encode("utf-32")],
    ids=["half of a surrogate pair", "and an escape", "no UTF-8", "UTF-16", "UTF-32"],
)  # fmt: skip
def test_a_body_that_is_not_utf_8_is_refused(server: LiveServer, body: bytes) -> None:
    """Python's parser guesses the encoding, and accepts encoded halves of surrogate pairs."""
    answer = server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert error_of(answer)["code"] == "invalid_json"
