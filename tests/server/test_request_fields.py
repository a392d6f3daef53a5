"""Requests of agents and load tools get an answer; what is wrong in one is refused by the name of its field."""

import gzip
import json
import re
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import QWEN, TOOLS, json_schema
from support.live_server import Json, LiveServer, bundled_engine, error_of, events_of, serving, streamed

from forerun.server.chat_schema import ChatRequest
from forerun.server.schema import CompletionRequest
from forerun.server.tolerance import HINTS, MAX_TOOLS, MAX_TURNS, NEUTRAL, Notes, is_neutral

pytest.importorskip("llguidance")
USER: Json = {"role": "user", "content": "Weather in Rome?"}
PLAIN_TOOL: Json = {"name": "add", "input_schema": TOOLS[1]["function"]["parameters"]}
FLAT_TOOL: Json = {"type": "function", **TOOLS[1]["function"]}
CHATS, MESSAGES, RESPONSES, TEXTS = "chat/completions", "messages", "responses", "completions"
BASES: dict[str, Json] = {
    CHATS: {"messages": [USER], "max_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": [USER], "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": [USER], "max_output_tokens": 4, "temperature": 0},
    TEXTS: {"prompt": "Once", "max_tokens": 4, "temperature": 0},
}
ASKED_TO_ADD: Json = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]}
CALL: Json = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
DOCUMENT: Json = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "It rains."}}


def block(**fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": [fields]}]}


def result(*content: Json) -> Json:
    turn = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": [*content]}]}
    return {"messages": [USER, ASKED_TO_ADD, turn]}


def said(**fields: Any) -> Json:
    """A chat whose assistant has said something."""
    return {"messages": [USER, {"role": "assistant", **fields}, USER]}


def items(*given: Json) -> Json:
    return {"input": [USER, *given, USER]}


def function(**told: Any) -> Json:
    return {"tools": [{"type": "function", "function": told}]}


ROWS: list[tuple[str, Json]] = [
    # Claude Code and Anthropic's client
    (MESSAGES, {"max_tokens": 32_000, "stop_sequences": ["e"]}),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}),
    (MESSAGES, {"output_config": {"effort": "high"}}),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "integer"}}}}),
    (MESSAGES, {"system": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}),
    (MESSAGES, {"cache_control": {"type": "ephemeral"}}),
    (MESSAGES, {"tools": [{**PLAIN_TOOL, "cache_control": {"type": "ephemeral"}}]}),
    (MESSAGES, {"speed": "fast", "inference_geo": "us", "thread": {"type": "create"}, "mcp_servers": []}),
    (MESSAGES, {"messages": [USER, {"role": "system", "content": "Be short."}, USER]}),
    (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}, PLAIN_TOOL]}),
    (MESSAGES, {"tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": None}}),
    (MESSAGES, result({"type": "image", "source": {"type": "base64", "data": "x", "media_type": "image/png"}})),
    (MESSAGES, result({"type": "tool_reference", "tool_name": "add"})),
    (MESSAGES, result(DOCUMENT, {"type": "search_result", "source": "s", "title": "t", "content": []})),
    (MESSAGES, block(**DOCUMENT)),
    (MESSAGES, block(type="document", source={"type": "base64", "data": "x", "media_type": "application/pdf"})),
    (MESSAGES, block(type="search_result", source="s", title="t", content=[{"type": "text", "text": "x"}])),
    (MESSAGES, block(type="image", source={"type": "url", "url": "http://x"})),
    *[
        (MESSAGES, {"messages": [USER, {"role": "assistant", "content": [hidden, {"type": "text", "text": "A"}]},
                                 USER]})
        for hidden in (
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        )
    ],
    # Codex and Copilot
    (RESPONSES, {"tools": [{"type": "custom", "name": "apply_patch", "format": {"type": "text"}}]}),
    (RESPONSES, {"tools": [{"type": kind} for kind in ("web_search", "local_shell", "tool_search")]}),
    (RESPONSES, {"tools": [{"type": "namespace", "name": "n", "tools": [FLAT_TOOL]}, FLAT_TOOL]}),
    (RESPONSES, {"client_metadata": {"a": "b"}, "prompt_cache_options": {"mode": "auto"}, "include": ["x"]}),
    (RESPONSES, {"reasoning": {"effort": "max", "context": "all", "summary": "auto"}}),
    (RESPONSES, {"tools": [FLAT_TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}}),
    (CHATS, {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "add"}}]}}}),
    (RESPONSES, items({"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin"})),
    (RESPONSES, items({"type": "custom_tool_call_output", "call_id": "c", "output": "done"})),
    (RESPONSES, items({"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}})),
    (RESPONSES, items({"type": "local_shell_call_output", "call_id": "c", "output": "a b"})),
    (RESPONSES, items({"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}})),
    (RESPONSES, items({"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "outcome": {}}]})),
    (RESPONSES, items({"type": "web_search_call", "id": "w", "status": "completed", "action": {"query": "x"}})),
    (RESPONSES, items({"type": "item_reference", "id": "msg_1"})),
    (RESPONSES, items({"type": "compaction", "encrypted_content": "x"})),
    (RESPONSES, items({"type": "reasoning", "summary": [], "encrypted_content": "x"})),
    (RESPONSES, items({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]})),
    (RESPONSES, items({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]})),
    (RESPONSES, {"max_output_tokens": 100_000, "text": {"format": {"type": "text"}, "verbosity": "low"}}),
    # histories of vLLM, llama.cpp and LiteLLM
    (CHATS, said(content="A", reasoning="Hm.")),
    (CHATS, said(content="A", reasoning=None, reasoning_content=None)),
    (CHATS, said(content="A", reasoning_details=[{"type": "reasoning.text", "text": "Hm."}])),
    (CHATS, said(content=None, reasoning_content="Hm.")),
    (CHATS, said(reasoning_content="Hm.")),
    (CHATS, said(content=[{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}])),
    (CHATS, said(content=None, tool_calls=[{**CALL, "function": {"name": "add"}}])),
    (CHATS, said(content="A", tool_calls=[], function_call=None, audio=None, refusal=None, annotations=[])),
    (CHATS, said(content=None, refusal="No.")),
    (CHATS, block(type="image_url", image_url={"url": "data:x"})),
    (CHATS, {"messages": [USER, {"role": "system", "content": "Be short."}, USER]}),
    (CHATS, {"tools": [{"type": "web_search"}, *TOOLS]}),
    *((CHATS, function(name="f", parameters=parameters)) for parameters in (  # that cannot be read, and are only shown
        {"properties": ["x"]}, {"$defs": 3}, {"properties": {"x": {"anyOf": {"a": 1}, "$ref": 4}}},
    )),
    # lm-eval, GuideLLM and load tools
    (TEXTS, {"logprobs": 20}),
    (TEXTS, {"ignore_eos": True, "min_tokens": 2, "stop_token_ids": [5], "truncate_prompt_tokens": 2}),
    (TEXTS, {"skip_special_tokens": False, "add_special_tokens": False}),
    (TEXTS, {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (TEXTS, {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "guided_json": None}),
    (TEXTS, {"logprobs": None, "echo": False, "suffix": None, "logit_bias": {}, "frequency_penalty": 0, "user": "me"}),
    (CHATS, {"response_format": {"type": "text"}, "logprobs": False}),
    (TEXTS, {"stop": ["\u2603"] * 9, "temperature": None, "top_p": None, "seed": None, "stream": None}),
    (CHATS, {"ignore_eos": True, "min_tokens": 2, "top_k": None, "logit_bias": None, "functions": []}),
    # an assistant's turn at the end
    (CHATS, {"messages": [USER, {"role": "assistant", "content": "It is"}]}),
    (CHATS, {"messages": [USER, {"role": "assistant", "content": "It is"}], "continue_final_message": True,
        "add_generation_prompt": False}),
    (MESSAGES, {"messages": [USER, {"role": "assistant", "content": "It is"}]}),
]  # fmt: skip


engine, server = serving(QWEN, engine={"budget": 16}, max_tokens=64, drafter="trie")


def rendered(server: LiveServer, messages: list[Json], **more: Any) -> str:
    """The text of a conversation, as the model reads it."""
    tokens = server.http.post("/tokenize", json={"messages": messages, **more}).json()["tokens"]
    return str(server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


@pytest.mark.parametrize(("address", "change"), ROWS, ids=lambda each: each if isinstance(each, str) else None)
def test_a_request_of_an_agent_or_a_load_tool_gets_an_answer(server, address, change):
    """None of them names the model: there is one."""
    answer = server.post({**BASES[address], **change}, address)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("address", BASES)
def test_an_unknown_field_is_refused_with_one_of_the_same_address(server, address):
    for wrong, meant in (("temperatur", "temperature"), ("strem", "stream"), ("wholly_unknown", "")):
        error = server.post({**BASES[address], wrong: 1}, address).json()["error"]
        near = f"; did you mean {meant}?" if meant else ""
        assert error["message"] == f"{wrong}: there is no such field{near}"
    message = server.post({**BASES[address], "audio": {"voice": "a"}}, address).json()["error"]["message"]
    assert message == "audio: it is not supported; leave it out"


def test_hints_and_neutral_values_change_nothing(server):
    wanted = server.post(BASES[TEXTS], TEXTS).json()["choices"]
    for value in ("x", {"a": 1}, True, 7, None):
        assert server.post({**BASES[TEXTS], **dict.fromkeys(HINTS, value)}, TEXTS).json()["choices"] == wanted
    free = {name: values for name, values in NEUTRAL.items() if name not in CompletionRequest.model_fields}
    for place in range(2):
        neutral = {name: (*values, None)[min(place, len(values))] for name, values in free.items()}
        answer = server.post({**BASES[TEXTS], **neutral}, TEXTS)
        assert answer.status_code == 200 and answer.json()["choices"] == wanted, answer.text
    assert not is_neutral("best_of", True) and not is_neutral("use_beam_search", 0)


def test_the_docs_name_every_hint_and_every_missing_feature():
    page = (Path(__file__).parents[2] / "docs" / "results" / "serving-details.md").read_text()
    assert not [name for name in (*HINTS, *NEUTRAL) if f"`{name}`" not in page]


def test_what_was_left_out_is_said(server):
    hosted = [{"type": "web_search"}]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    chat = server.post({**BASES[CHATS], "messages": picture, "tools": hosted}, CHATS).json()
    assert [note.split(" ")[0] for note in chat["warnings"]] == ["a", "tools.0"]
    message = server.post({**BASES[MESSAGES], "tools": [{"type": "bash_20250124", "name": "bash"}]}, MESSAGES).json()
    assert "bash" in message["warnings"][0]
    response = server.post({**BASES[RESPONSES], "tools": hosted}, RESPONSES).json()
    assert "web_search" in response["metadata"]["forerun_note_1"]
    assert "warnings" not in server.post(BASES[CHATS], CHATS).json()
    notes = Notes()
    for number in range(99):
        notes.add(str(number // 2))
    assert len(notes) == 16


def test_reasoning_parts_and_calls_reach_the_template(server):
    text = rendered(server, [USER, {"role": "assistant", "content": None, "tool_calls": [{**CALL, "index": 0}]}, USER])
    assert '{"name": "add", "arguments": {}}' in text
    body = ChatRequest.model_validate({"model": "m", **said(content=None, reasoning="Hm.")})
    assert body.messages[1].for_template() == {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    shown = rendered(server, block(**DOCUMENT)["messages"])
    assert "Notes\nIt rains." in shown


def test_the_last_turn_of_the_assistant_goes_on(server):
    turns = [USER, {"role": "assistant", "content": "It is"}]
    prompt = f"<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\nIt is"
    wanted = server.post({**BASES[TEXTS], "prompt": prompt}, TEXTS).json()["choices"][0]["text"]
    chat = server.post({**BASES[CHATS], "messages": turns}, CHATS).json()["choices"][0]["message"]["content"]
    message = server.post({**BASES[MESSAGES], "messages": turns}, MESSAGES).json()["content"][0]["text"]
    assert chat == message == wanted
    new = server.post({**BASES[CHATS], "messages": turns, "add_generation_prompt": True}, CHATS)
    assert "last message is the assistant's" in error_of(new)["message"]


def test_a_system_turn_goes_where_the_template_wants_it(engine):
    first = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}"
    silent = "{% if m.role != 'system' or loop.first %}{{ m.role }}: {{ m.content }}\n{% endif %}"
    none = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    turns = [USER, {"role": "system", "content": "Be short."}, USER]
    user = f"user: {USER['content']}\n"
    line = "{{ m.role }}: {{ m.content }}\n"
    for body, wanted in (
        (first + line, f"system: Be short.\n{user}{user}"),
        (silent, f"system: Be short.\n{user}{user}"),
        (none + line, f"user: Be short.\n\n{USER['content']}\n\n{USER['content']}\n"),
        (line, f"{user}system: Be short.\n{user}"),
    ):
        with LiveServer(bundled_engine("{% for m in messages %}" + body + "{% endfor %}")) as one:
            assert rendered(one, turns) == wanted


def test_usage_comes_with_each_chunk(server):
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = streamed(server, {**BASES[TEXTS], "max_tokens": 8, **options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == last["usage"]["completion_tokens"] == 8


def test_a_text_ends_at_a_stop_token_and_not_before_it_may(server):
    asked = {**BASES[TEXTS], "max_tokens": 12, "return_tokens_as_token_ids": False}
    text = server.post(asked, TEXTS).json()["choices"][0]["text"]
    ids = server.http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    stop = next(token for token in ids[2:] if token not in ids[:2])
    (ended,) = server.post({**asked, "stop_token_ids": [stop]}, TEXTS).json()["choices"]
    shown = server.http.post("/detokenize", json={"tokens": ids[: ids.index(stop)]}).json()["prompt"]
    assert (ended["finish_reason"], ended["text"]) == ("stop", shown)
    later = server.post({**asked, "stop_token_ids": [stop], "min_tokens": 12}, TEXTS).json()
    assert later["usage"]["completion_tokens"] == 12


def test_a_prompt_is_cut_to_its_end(server):
    ids = server.http.post("/tokenize", json={"prompt": "one two three four"}).json()["tokens"]
    cut = server.post({**BASES[TEXTS], "prompt": "one two three four", "truncate_prompt_tokens": 2}, TEXTS).json()
    whole = server.post({**BASES[TEXTS], "prompt": ids[-2:]}, TEXTS).json()
    assert cut["usage"]["prompt_tokens"] == 2 and cut["choices"] == whole["choices"]


def test_a_message_follows_a_schema_and_is_as_long_as_fits(server):
    form = {"type": "json_schema", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    for change in ({"output_config": {"format": form}}, {"output_format": form}):
        answer = server.post({**BASES[MESSAGES], **change, "max_tokens": 20}, MESSAGES).json()
        assert int(answer["content"][0]["text"]) in range(10)
    answer = server.post({**BASES[MESSAGES], "max_tokens": 32_000}, MESSAGES).json()
    assert answer["stop_reason"] in ("max_tokens", "end_turn") and answer["usage"]["output_tokens"] <= 64


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_tool_is_called_with_its_text(server, stream):
    tool = {"type": "custom", "name": "apply_patch"}
    asked = {**BASES[RESPONSES], "tools": [tool], "tool_choice": tool, "max_output_tokens": 64}
    answer = server.post({**asked, "forerun": {"drafter": "none"}, "stream": stream}, RESPONSES)
    assert answer.status_code == 200, answer.text
    if not stream:
        (call,) = answer.json()["output"]
        assert (call["type"], call["name"]) == ("custom_tool_call", "apply_patch") and isinstance(call["input"], str)
        return
    kinds = [each["type"] for each in events_of(answer.text)]
    assert "response.custom_tool_call_input.done" in kinds
    assert "response.function_call_arguments.delta" not in kinds


def test_anthropics_errors_have_its_shape(server):
    answer = server.post({**BASES[MESSAGES], "max_tokens": 0}, MESSAGES)
    assert answer.status_code == 400 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    assert server.post({**BASES[MESSAGES], "model": "x"}, MESSAGES).json()["error"]["type"] == "not_found_error"
    thread = {"type": "continue", "previous_message_id": "msg_1"}
    answer = server.post({**BASES[MESSAGES], "thread": thread}, MESSAGES)
    assert answer.json()["error"]["details"] == {"error_code": "thread_not_found"}
    assert "request-id" not in server.post({**BASES[CHATS], "n": 0}, CHATS).headers


def test_a_prompt_that_is_too_long_is_named_as_its_field() -> None:
    long = {"type": "content", "content": "word " * 100_000}
    with LiveServer(bundled_engine(QWEN)) as few:
        few.app.state.service.encode._positions = 1000
        for address, field in ((CHATS, "messages"), (RESPONSES, "input"), (TEXTS, "prompt")):
            asked = long["content"] if address != CHATS else [{**USER, "content": long["content"]}]
            assert error_of(few.post({**BASES[address], field: asked}, address))["param"] == field
        error = error_of(few.post({**BASES[CHATS], "prediction": long}, CHATS))
    assert error["param"] == "prediction" and "the prediction has more than" in error["message"]


def test_tokens_of_a_response_are_counted_and_models_are_anthropics_too(server: LiveServer) -> None:
    counted = server.post({"model": "bundled", "input": "Hi", "tools": [FLAT_TOOL]}, "responses/input_tokens").json()
    answered = server.post({**BASES[RESPONSES], "input": "Hi", "tools": [FLAT_TOOL]}, RESPONSES).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answered["usage"]["input_tokens"]}
    listed = server.http.get("/v1/models").json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "bundled", "bundled")
    assert listed["data"][0].items() >= {"type": "model", "display_name": "bundled"}.items()
    assert datetime.fromisoformat(listed["data"][0]["created_at"]).timestamp() == listed["data"][0]["created"]


def test_what_is_asked_in_http_is_answered_in_http(server: LiveServer) -> None:
    for address in ("/v1/models", "/health", "/", "/v1/models/bundled"):
        answer = server.http.head(address)
        assert answer.status_code == 200 and not answer.content
    packed = gzip.compress(json.dumps(BASES[TEXTS]).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = server.http.post("/v1/completions", content=packed, headers=headers)
    assert error_of(answer, 415)["code"] == "unsupported_encoding"
    with socket.create_connection(("127.0.0.1", server.port)) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000)
        assert one.recv(100).startswith(b"HTTP/1.1 431")


DOUBLING = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(20)) + 'r20: "abc"'
"""Three megabytes of text without a choice."""
UNKEEPABLE: Json = {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}


def schema(told: Json) -> Json:
    return {"response_format": json_schema(told)}


def doubled() -> Json:
    """30 definitions of two fields each would spell out a gigabyte without a choice."""
    schemas: Json = {"d0": {"const": "abcd"}}
    for i in range(1, 31):
        inner = {"$ref": f"#/$defs/d{i - 1}"}
        schemas[f"d{i}"] = {"type": "object", "properties": {"a": inner, "b": inner}, "required": ["a", "b"]}
    return {"$defs": schemas, "type": "object", "properties": {"x": {"$ref": "#/$defs/d30"}}}


def grammar(kind: str, text: str) -> Json:
    return {"response_format": {"type": kind, kind: text}}


WRONG: list[tuple[str, Json, str | None, str]] = [
    *((TEXTS, change, param, "") for change, param in (
        ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"), ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"), ({"prompt": "\ud800"}, "prompt"), ({"prompt": ""}, None),
        ({"prompt": [2**31 - 1]}, None), ({"\ud800": 1}, None), ({"temperature": 2.5}, "temperature"),
        ({"temperature": 1e-300}, "temperature"), ({"temperature": "1"}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"), ({"n": 10**6}, "n"), ({"n": 100, "prompt": ["a", "b"]}, "n"), ({"n": float("nan")}, "n"),
        ({"seed": 2**64}, "seed"),
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
    *((TEXTS, schema(told), "response_format", said) for told, said in (
        ({"type": "strin"}, "Invalid type"), ({"properties": 3}, "must be an object"), ({"$ref": "#"}, "no text fits"),
        ({"$ref": "https://example.org/x"}, "does not fetch"), ({"not": {}}, "the keyword not cannot be enforced"),
        ({"enum": []}, "Unsatisfiable"), ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"), ({"type": "array", "contains": {}}, "contains can"),
        ({"const": "x" * 70_000}, "65,536 are the most"),
    )),
    *((CHATS, {"response_format": told}, f"response_format{param}", "") for told, param in (
        ({}, ""), ("json_object", ""), ({"type": "text", "x": 1}, ".text"), ({"type": "grammar"}, ".grammar.grammar"),
        *(({"type": "json_schema", **more}, f".json_schema.json_schema{param}") for more, param in (
            ({}, ""), ({"json_schema": {"name": "a b", "schema": {}}}, ".name"),
            ({"json_schema": {"name": "a"}}, ".schema"), ({"json_schema": {"name": "a", "schema": []}}, ".schema"),
        )),
    )),
    (TEXTS, {"logprobs": True}, "logprobs", ""), (CHATS, {"logprobs": 2}, "logprobs", ""),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    *((CHATS, change, param, said) for change, param, said in (
        (schema(UNKEEPABLE), "response_format", "cannot be enforced"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", ""),
        *(({"max_tokens": None, name: 65}, name, "") for name in ("max_tokens", "max_completion_tokens")),
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


UNSUPPORTED = (
    "best_of", "suffix", "top_q", "modalities", "functions", "inputs", "previous_response_id", "response_format.text",
)  # fmt: skip


@pytest.mark.parametrize(
    ("address", "change", "param", "said"), WRONG, ids=lambda told: told if told in [*BASES] else ""
)
def test_what_is_wrong_is_named(server, address, change, param, said):
    body = json.dumps({"model": "bundled", **BASES[address], **change})
    answer = server.http.post(f"/v1/{address}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    if address != MESSAGES:
        error = error_of(answer)
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), message
        unsupported = param in UNSUPPORTED or "no such field" in message
        assert (error["code"] == "unsupported") == unsupported, error
    assert said in message if said or param is None else re.search(rf"\b{param.split('.')[-1]}\b", message), message
    assert "TextEncodeInput" not in message and len(message) < 400
    assert not server.scheduler.busy


@pytest.mark.parametrize("depth", [200, 400, 900, 3000, 20_000])
@pytest.mark.parametrize("place", ["response_format", "tools"])
def test_a_schema_that_is_nested_too_deeply_is_refused(server: LiveServer, place: str, depth: int) -> None:
    nested = '{"type": "array", "items": ' * depth + "{}" + "}" * depth
    change = json.dumps(schema({}) if place == "response_format" else function(name="f", parameters={}))
    wanted = '"tool_choice": "required", ' if place == "tools" else ""
    body = json.dumps({"model": "bundled", **BASES[CHATS]})[:-1] + ", " + wanted + change[1:].replace("{}", nested)
    error_of(server.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"}))


BODY = b'{"model": "bundled", "max_tokens": 1, "prompt": "a"}'


@pytest.mark.parametrize("body", [
    b'{"model": ', b"[" * 9_000, b"\xff\xfe{}", b"[]", b"", b"1" * 9_000,
    *(BODY.replace(b'"a"', each) for each in (b'"\xed\xa0\x80"', b'"\\n\xed\xa0\x80"', b'"\xff"')),  # half a surrogate
    *(BODY.decode().encode(encoding) for encoding in ("utf-16", "utf-32")),
])  # fmt: skip
def test_a_body_that_is_no_json_in_utf_8_is_refused(server: LiveServer, body: bytes) -> None:
    """Python's parser guesses the encoding, and accepts encoded halves of surrogate pairs."""
    error = error_of(server.http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_json")
