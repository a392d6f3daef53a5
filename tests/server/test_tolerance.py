"""What agents and load tools send beyond OpenAI's first API: each row is a request that gets an answer."""

import gzip
import json
import socket
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.chat_models import QWEN, TOOLS
from support.live_server import Json, LiveServer, bundled_engine, error_of, events_of, serving, streamed

from forerun.server.chat_schema import ChatRequest
from forerun.server.schema import CompletionRequest
from forerun.server.tolerance import HINTS, NEUTRAL, Notes, is_neutral

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


engine, server = serving(QWEN, max_tokens=64)


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
    ended = server.post({**asked, "stop_token_ids": [stop]}, TEXTS).json()
    assert ended["choices"][0]["finish_reason"] == "stop"
    shown = server.http.post("/detokenize", json={"tokens": ids[: ids.index(stop)]}).json()["prompt"]
    assert ended["choices"][0]["text"] == shown
    later = server.post({**asked, "stop_token_ids": [stop], "min_tokens": 12}, TEXTS).json()
    assert later["usage"]["completion_tokens"] == 12


def test_a_prompt_is_cut_to_its_end(server):
    ids = server.http.post("/tokenize", json={"prompt": "one two three four"}).json()["tokens"]
    cut = server.post({**BASES[TEXTS], "prompt": "one two three four", "truncate_prompt_tokens": 2}, TEXTS).json()
    whole = server.post({**BASES[TEXTS], "prompt": ids[-2:]}, TEXTS).json()
    assert cut["usage"]["prompt_tokens"] == 2 and cut["choices"] == whole["choices"]


def test_a_long_answer_is_as_long_as_fits_where_an_agent_asks(server):
    answer = server.post({**BASES[MESSAGES], "max_tokens": 32_000}, MESSAGES).json()
    assert answer["stop_reason"] in ("max_tokens", "end_turn") and answer["usage"]["output_tokens"] <= 64


def test_a_message_follows_a_schema(server):
    form = {"type": "json_schema", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    for change in ({"output_config": {"format": form}}, {"output_format": form}):
        answer = server.post({**BASES[MESSAGES], **change, "max_tokens": 20}, MESSAGES).json()
        assert int(answer["content"][0]["text"]) in range(10)


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
