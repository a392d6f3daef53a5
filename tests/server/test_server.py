"""The server, by OpenAI's own client over HTTP: each text is the engine's, and what cannot be had is refused."""

import importlib.util
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from support.commands import start
from support.live_server import (
    ASKED,
    PATIENCE,
    PROMPTS,
    Json,
    LiveServer,
    PausableEngine,
    error_of,
    free_socket,
    ready,
    sampled,
    serving,
    streamed,
    text_of,
    until,
)
from typer.testing import CliRunner

import forerun
from forerun import cli
from forerun.cli import serve
from forerun.cli.log import server_log, shown_log
from forerun.cli.serve_options import REPEATED, ServeOptions
from forerun.engine.engine import Engine
from forerun.server.admission import SchedulerLimits
from forerun.server.answers import StopStrings
from forerun.server.app import PAGE_FILES, create_app
from forerun.server.http_server import DrainingServer, bound_sockets
from forerun.server.replies import CompletionFormat
from forerun.server.settings import ServerSettings, read_settings
from forerun.server.tenants import ApiKeys
from forerun.trie import trie_file

NEW = 16
PAGE = (Path(forerun.__file__).parents[2] / "docs/serving.md").read_text()


engine, server = serving(engine={"prefix_cache": 1 << 26}, request_bytes=100_000, max_tokens=64, namespaces=3)


def alone(engine: Engine, prompt: Any, **options: Any) -> str:
    """The text of the engine by itself, which learns nothing of it."""
    return engine.generate(prompt, namespace="alone", **{"max_new_tokens": NEW, **options}).texts[0]


def test_a_completion_is_the_engines_text(engine, server):
    answer = server.client().completions.create(model="bundled", prompt=PROMPTS[0], max_tokens=NEW, temperature=0)
    (request,) = engine.requests([PROMPTS[0]], max_new_tokens=NEW)
    assert answer.choices[0].text == alone(engine, PROMPTS[0])
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (request.prompt_length, NEW)
    told = answer.usage.model_dump()["forerun"]
    assert told["steps"] * told["mean_acceptance_length"] == pytest.approx(NEW, rel=1e-3)
    assert told["accepted"] <= told["drafted"]
    assert sum(int(tokens) * steps for tokens, steps in told["histogram"].items()) == NEW


def test_a_completion_takes_token_ids_and_several_prompts(engine, server):
    ids = [[int(token) for token in engine.tokenizer(prompt)["input_ids"]] for prompt in PROMPTS[:2]]
    wanted = [alone(engine, each) for each in ids]
    create = server.client().completions.create
    for prompt, texts in ((ids, wanted), (PROMPTS[:2], wanted), (ids[1], wanted[1:])):
        answer = create(model="bundled", prompt=prompt, max_tokens=NEW, temperature=0)
        assert [choice.text for choice in answer.choices] == texts
        assert answer.usage.prompt_tokens == sum(map(len, ids[-len(texts) :]))
    assert len(create(model="bundled", prompt=PROMPTS[0], seed=0).choices[0].text) > 0  # 16 tokens, at temperature 1


@pytest.mark.parametrize("stop", [None, ["e"]])
def test_a_stream_is_the_whole_answer_in_pieces(server, stop):
    asked: Json = {"model": "bundled", "prompt": PROMPTS[:2], "max_tokens": NEW, "seed": 3, "n": 2, "stop": stop}
    create = server.client().completions.create
    whole, texts, reasons = create(**asked), [""] * 4, [""] * 4
    *chunks, last = create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        assert not reasons[choice.index]  # nothing comes after the end
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or ""
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert not last.choices and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert (last.usage.prompt_tokens, last.usage.total_tokens) == (whole.usage.prompt_tokens, whole.usage.total_tokens)
    assert all(chunk.usage is None and "usage" not in chunk.model_fields_set for chunk in create(**asked, stream=True))


def test_a_chat_goes_through_the_template(engine, server):
    parts = [{"type": "text", "text": letter} for letter in "Hi"]
    create = server.client().chat.completions.create
    wanted = alone(engine, "system: Be short.\nuser: Hi\nassistant:")
    for content in (parts, "Hi"):
        messages: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": content}]
        answer = create(model="bundled", messages=messages, max_completion_tokens=NEW, temperature=0)
        assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", wanted)
    chunks = list(create(model="bundled", messages=messages, max_tokens=NEW, temperature=0, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"


def test_tools_reach_the_template_unless_none_may_be_called(engine, server):
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    asked = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": NEW, "temperature": 0}
    for choice, before in (("auto", json.dumps(tools) + "\n"), ("none", "")):
        answer = server.post({**asked, "tool_choice": choice}, "chat/completions").json()
        (request,) = engine.requests([before + "user: Hi\nassistant:"], max_new_tokens=NEW)
        assert answer["usage"]["prompt_tokens"] == request.prompt_length


def test_a_seed_names_a_text_and_choices_have_seeds_in_a_row(engine, server):
    asked: Json = {"model": "bundled", "prompt": PROMPTS[1], "max_tokens": NEW, "temperature": 0.8, "top_p": 0.9}
    answer = server.client().completions.create(**asked, n=3, seed=7)
    wanted = [alone(engine, PROMPTS[1], **sampled(seed, 0.8, 0.9)) for seed in (7, 8, 9)]
    assert [choice.text for choice in answer.choices] == wanted
    assert len(set(wanted)) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(engine, server):
    text = alone(engine, PROMPTS[1], max_new_tokens=40)
    tokens = [engine.tokenizer.decode([token]) for token in engine.tokenizer(text)["input_ids"]]
    across = tokens[4][-1] + tokens[5] + tokens[6][:1]  # begins inside a token and ends inside another
    assert len(across) > 2
    create = server.client().completions.create
    asked: Json = {"model": "bundled", "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0}
    for stops in (across, ["never said", across], [across, "xyzzy" * 9]):
        answer = create(**asked, stop=stops)
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (text[: text.index(across)], "stop")
        assert answer.usage.completion_tokens < 40  # it ended there in the engine, too
        assert "".join(chunk.choices[0].text for chunk in create(**asked, stop=stops, stream=True)) == choice.text
    unmet = create(**asked, stop=text[-1] + "\0")
    assert unmet.choices[0].text == text  # what could have been its beginning comes at the end


@pytest.mark.parametrize("pieces", [["aab|b", "c"], list("aab|bc"), ["aab|bc"]])
def test_stop_strings_are_found_however_the_text_is_cut(pieces):
    for stops, wanted in (
        (["b|"], "aa"), (["ab|bc"], "a"), (["bx", "|b"], "aab"), (["ab|b", "b|b"], "a"), (["bcd"], "aab|bc"),
        ([], "aab|bc"),
    ):  # fmt: skip
        cut = StopStrings(stops)
        assert "".join(map(cut.add, pieces)) + cut.flush() == wanted
        assert (cut.found is not None) == (wanted != "aab|bc")


def test_eight_clients_at_once_each_get_the_text_they_get_alone(engine, server):
    wanted = [alone(engine, prompt, **(sampled(i) if i % 2 else {})) for i, prompt in enumerate(PROMPTS)]

    def ask(i: int) -> str:
        asked = {"prompt": PROMPTS[i], "max_tokens": NEW, "temperature": i % 2, "seed": i}
        return "".join(chunk["choices"][0]["text"] for chunk in streamed(server, asked))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == wanted
    server.wait_idle()


def test_errors_reach_the_client_as_its_own(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'") as unknown:
        client.completions.create(model="gpt", prompt="Hi")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="this server allows 64"):
        client.completions.create(model="bundled", prompt="Hi", max_tokens=65)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    assert client.models.retrieve("bundled").id == client.models.list().data[0].id == "bundled"
    assert error_of(server.http.get("/v1/nothing"), 404)["message"] == "there is no GET /v1/nothing here"
    assert error_of(server.http.get("/v1/completions"), 405)


def test_what_is_too_long_is_refused_with_the_numbers(server, engine, serve):
    for body in (json.dumps({"prompt": "x" * 100_000}), iter([b"x" * 60_000] * 2)):  # whole, and in chunks
        error = error_of(server.http.post("/v1/completions", content=body), 413)
        assert "100,000" in error["message"] and error["code"] == "request_too_large"
    small = serve(engine, SchedulerLimits(1000), max_tokens=200_000)
    assert "bytes for keys and values" in error_of(small.post(ASKED))["message"]
    error = error_of(small.post({**ASKED, "max_tokens": 131_072}))
    assert error["code"] == "context_length_exceeded" and "131072" in error["message"]


def pausable_server(engine: Engine, serve: Any, **told: Any) -> tuple[PausableEngine, LiveServer]:
    held = PausableEngine(engine)
    return held, serve(held, SchedulerLimits(1 << 30, rows=1, waiting=told.pop("waiting", 128)), **told)


def test_a_full_queue_says_when_to_come_again(engine, serve):
    """And before the prompt is encoded."""
    held, one = pausable_server(engine, serve, waiting=1)
    service, encoded = one.app.state.service, list[Any]()
    encode = service.encode
    service.encode = lambda body: encoded.append(body) or encode(body)
    held.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.post, ASKED)
        until(lambda: one.scheduler.running == 1)
        second = pool.submit(one.post, ASKED)
        until(lambda: one.scheduler.waiting == 1)
        assert (one.metric("forerun:num_requests_running"), one.metric("forerun:num_requests_waiting")) == (1, 1)
        assert one.metric("forerun:kv_cache_usage_perc") > 0
        with pytest.raises(openai.RateLimitError) as full:
            one.client().completions.create(**ASKED)
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert error_of(one.post({**ASKED, "n": 2}), 429)["code"] == "queue_full"
        assert len(encoded) == 2
        assert error_of(one.post({**ASKED, "max_tokens": 10_000}))["code"] == "max_tokens_exceeded"
        held.gate.set()
        assert text_of(first.result(PATIENCE)) == text_of(second.result(PATIENCE))
    one.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_place(engine, serve, stream):
    held, one = pausable_server(engine, serve)
    held.gate.clear()
    body = json.dumps({**ASKED, "max_tokens": 4000, "n": 2, "stream": stream})
    with socket.create_connection(("127.0.0.1", one.port)) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: (one.scheduler.running, one.scheduler.waiting) == (1, 1))
    time.sleep(0.05)  # the server may hear of it before or after the gate opens
    held.gate.set()
    one.wait_idle()
    assert one.metric("forerun:generation_tokens_total") < 4000
    until(lambda: one.metric("forerun:request_ended_total") == 2)
    assert one.post(ASKED).status_code == 200


def test_a_request_ends_when_its_time_is_over(engine, serve):
    one, asked = serve(engine, timeout=0.05), {**ASKED, "max_tokens": 4000}
    assert error_of(one.post(asked), 504)["code"] == "timeout"
    with pytest.raises(openai.APIError, match="the request timed out"):
        list(one.client().completions.create(**asked, stream=True))


def test_a_whole_answer_is_built_beside_the_event_loop(server, monkeypatch):
    """It may have megabytes, and all others would wait."""
    threads, whole = list[threading.Thread](), CompletionFormat.whole
    monkeypatch.setattr(
        CompletionFormat, "whole", lambda *given: threads.append(threading.current_thread()) or whole(*given)
    )
    told = server.post({"prompt": ["Hi", "Ho"], "n": 2, "max_tokens": 4, "logprobs": 2}).json()
    assert [choice["index"] for choice in told["choices"]] == [0, 1, 2, 3]
    assert all(len(choice["logprobs"]["tokens"]) == 4 for choice in told["choices"])
    assert told["usage"]["completion_tokens"] == 16 and told["object"] == "text_completion"
    assert threads and server.thread not in threads


def test_a_scheduler_that_cannot_go_on_ends_the_server(engine):
    app = create_app(engine, ServerSettings(), SchedulerLimits(1 << 30))
    one = DrainingServer(app, 1.0, 8)
    scheduler = app.state.service.scheduler
    scheduler._admit = Mock(side_effect=KeyError("a mistake of ours"))
    scheduler.submit(engine.requests(["Hi"], max_new_tokens=1)[0], lambda commit: None, lambda how: None)
    with ExitStack() as stack:
        one.serve_on([stack.enter_context(each) for each in bound_sockets("127.0.0.1", 0)])  # it ends by itself
    assert scheduler.failed and not scheduler.ready


def test_tenants_have_keys_and_namespaces_of_their_own(engine, serve):
    one = serve(engine, api_keys=("key-of-a", "key-of-b"), namespaces=2)
    one.scheduler.submit = Mock(wraps=one.scheduler.submit)
    for key in ("key-of-a", "key-of-b"):
        create = one.client(key).completions.create
        create(**ASKED)
        create(**ASKED, extra_body={"forerun": {"namespace": "mine"}})
        create(**ASKED, extra_body={"forerun": {"namespace": "third"}})  # the first is forgotten
    seen = [f"{asked.args[3]} {asked.args[0].namespace}" for asked in one.scheduler.submit.call_args_list]
    tenants = sorted({line.split()[0] for line in seen})
    assert sorted(seen) == [f"{each} {each}/{name}" for each in tenants for name in ("default", "mine", "third")]
    assert len(tenants) == 2 and "key-of" not in "".join(seen)
    for wrong in ("key-of-c", "key-of-", "é"):
        header = {"authorization": f"Bearer {wrong}".encode()}
        for address in ("/v1/models", "/openapi.json", "/v1/completions"):
            assert error_of(one.http.get(address, headers=header), 401)["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        one.client("key-of-c").completions.create(**ASKED)
    assert error_of(one.http.get("/v1/models"), 401)
    assert one.http.get("/health").status_code == one.http.get("/ready").status_code == 200


def test_metrics_are_for_the_admin_where_there_are_keys(engine, serve):
    one = serve(engine, api_keys=("key-of-a",), admin_key="key-of-admin")
    without = serve(engine, api_keys=("key-of-a",))

    def status(server: LiveServer, key: str, address: str = "/metrics") -> int:
        return server.http.get(address, headers={"authorization": f"Bearer {key}"}).status_code

    assert [status(one, key) for key in ("key-of-a", "other", "key-of-admin")] == [403, 403, 200]
    assert status(one, "key-of-admin", "/v1/models") == 401  # it is no tenant's
    assert status(without, "key-of-a") == 403 and error_of(without.http.get("/metrics"), 403)["code"] == "admin_only"


def test_keys_must_be_fit_for_a_header():
    assert ApiKeys().tenant(None) == "default"
    assert ApiKeys(["a"]).tenant(b"bearer a") is not None and ApiKeys(["a"]).tenant(b"Basic a") is None
    for wrong in ([""], ["with space"], ["é"], ["a", "a"]):
        with pytest.raises(ValueError, match="API key"):
            ApiKeys(wrong)


def test_metrics_count(server):
    names = [
        "forerun:spec_decode_num_drafts_total", "forerun:spec_decode_num_draft_tokens_total",
        "forerun:spec_decode_num_accepted_tokens_total", "forerun:spec_decode_num_accepted_tokens_per_pos_total",
        "forerun:request_steps_total", "forerun:generation_tokens_total", "forerun:prompt_tokens_total",
        "forerun:time_to_first_token_seconds_count", "forerun:time_per_output_token_seconds_count",
        "forerun:e2e_request_latency_seconds_count", "forerun:prefix_cache_queries_total",
        "forerun:prefix_cache_hits_total",
    ]  # fmt: skip
    before = server.metrics(names)
    prompt = "one two three four five six seven\n" * 60  # longer than a chunk, and with something to draft
    usages = [server.post({"prompt": prompt, "max_tokens": NEW, "temperature": 0}).json()["usage"] for _ in range(2)]
    grown = {name.removeprefix("forerun:"): after - before[name] for name, after in server.metrics(names).items()}
    spent = [usage["forerun"] for usage in usages]
    assert grown["spec_decode_num_draft_tokens_total"] == sum(each["drafted"] for each in spent) > 0
    accepted = sum(each["accepted"] for each in spent)
    assert grown["spec_decode_num_accepted_tokens_total"] == accepted > 0
    assert grown["spec_decode_num_accepted_tokens_per_pos_total"] == accepted
    assert 0 < grown["spec_decode_num_drafts_total"] <= grown["request_steps_total"] == sum(s["steps"] for s in spent)
    assert grown["generation_tokens_total"] == 2 * NEW
    assert grown["prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["time_to_first_token_seconds_count"] == grown["e2e_request_latency_seconds_count"] == 2
    assert 0 < grown["time_per_output_token_seconds_count"] < 2 * NEW
    assert 0 < grown["prefix_cache_hits_total"] < grown["prefix_cache_queries_total"]
    assert server.metric("forerun:index_bytes") > 0
    assert server.metric("forerun:num_requests_running") == 0


def test_a_variable_with_the_name_of_a_flag_is_no_silent_nothing(monkeypatch):
    """A server without keys would start."""
    monkeypatch.setenv("FORERUN_API_KEY", "secret")
    with pytest.raises(ValueError, match="FORERUN_API_KEY is ignored; use FORERUN_API_KEYS") as raised:
        read_settings({})
    assert "secret" not in str(raised.value)


def test_flags_come_before_the_environment_and_that_before_the_file(tmp_path, monkeypatch):
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 1\nrows = 1\nwaiting = 1\nkv_memory = "4GiB"\napi_keys = ["x"]\nmodel = "some/where/small"\n'
    )
    monkeypatch.setenv("FORERUN_PORT", "2")
    monkeypatch.setenv("FORERUN_ROWS", "2")
    monkeypatch.setenv("FORERUN_KV_STORE", "kept")
    told = read_settings({"port": 3}, file)
    assert (told.port, told.rows, told.waiting, told.kv_memory) == (3, 2, 1, 4 << 30)
    assert (told.kv_store, told.kv_store_limit) == (Path("kept"), None)
    assert told.served_name == "small" and "x" not in str(told.api_keys)
    monkeypatch.setenv("FORERUN_API_KEYS", "a, b")
    monkeypatch.setenv("FORERUN_WARM", "a.txt, b.jsonl")
    told = read_settings({}, file)
    assert [key.get_secret_value() for key in told.api_keys] == ["a", "b"]
    assert told.warm == (Path("a.txt"), Path("b.jsonl"))
    file.write_text("prot = 1\n")
    with pytest.raises(ValueError, match="prot"):
        read_settings({}, file)
    with pytest.raises(ValueError, match="settings: port: ") as wrong:
        read_settings({"port": "secret"})
    assert "secret" not in str(wrong.value)
    with pytest.raises(FileNotFoundError):
        read_settings({}, tmp_path / "none.toml")


def test_the_page_names_every_setting_and_each_is_a_flag():
    flags = {field.name for field in fields(ServeOptions)}
    for name in ServerSettings.model_fields:
        assert f"`{name}`" in PAGE, name
        assert {name: flag for flag, name in REPEATED.items()}.get(name, name) in flags
    assert ServeOptions(port=3, api_key=["a"]).flags() == {"port": 3, "api_keys": ["a"]}


def test_the_pages_example_runs(server, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(example.replace(":8000/", f":{server.port}/"), "docs/serving.md", "exec"), {})
    assert "mean_acceptance_length" in capsys.readouterr().out


@pytest.mark.matrix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_told_to_end(number, tmp_path):
    with free_socket() as one:
        port = one.getsockname()[1]
    command = ("serve", "--port", port, "--kv-memory", "1GiB", "--drain", 1, "--index", tmp_path)
    with start(*command, "--index-interval", 3600, text=True) as served:
        until(lambda: served.poll() is not None or ready(port))
        asked: Json = {"model": "bundled", "prompt": "Hi", "max_tokens": 4000, "n": 4, "stream": True}
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")  # it runs, for longer than it may
            served.send_signal(number)
            *_, last, empty = lines
            assert not empty and json.loads(last.removeprefix("data: "))["error"]["code"] == "closing"
        out, told = served.communicate(timeout=PATIENCE)
    assert served.returncode == 0, told
    assert out == "" and "Traceback" not in told
    assert f"the page is at http://127.0.0.1:{port}/" in told and "1.0 GiB for keys and values" in told
    assert "leaked" not in told  # objects of native libraries, of which nanobind tells at the end
    (file,) = tmp_path.glob("*.trie")  # saved at the end
    assert len(trie_file.read(file).namespaces["default/default"]) > 0


def test_without_the_extra_the_command_says_how_to_install_it(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name))
    with pytest.raises(ValueError, match=r"needs uvicorn; .* pip install .*\[serve\]'"):
        serve.run(ServeOptions())


def test_a_busy_port_is_found_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(serve, "build_engine", lambda told: pytest.fail("the model was loaded"))
    with free_socket() as busy:
        busy.listen()
        port = busy.getsockname()[1]
        ended = CliRunner().invoke(cli.app, ["serve", "--port", str(port)])
    assert ended.exit_code == 2
    assert ended.stderr.splitlines()[-1] == f"error: cannot listen on 127.0.0.1, port {port}: Address already in use"
    assert "Traceback" not in ended.stderr


def test_a_request_with_two_faults_hears_of_both(server):
    error = error_of(server.post({"prompt": "Hi", "temperature": 9, "top_q": 3}))
    assert error["param"] == "temperature" and "temperature: " in error["message"]
    assert "top_q: there is no such field; did you mean top_" in error["message"]
    many = error_of(server.post({"prompt": "Hi", **{f"x{n}": 1 for n in range(12)}}))
    assert many["message"].count("no such field") == 8 and "4 more fields are wrong" in many["message"]


def test_every_answer_has_a_request_id_and_the_log_has_it_too(engine, serve, capsys):
    held, one = pausable_server(engine, serve)
    answers = [one.post(ASKED), one.post({**ASKED, "n": 0}), one.http.get("/health"), one.http.get("/none")]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 4 and answers[0].json()["id"] == f"cmpl-{ids[0]}"
    assert one.post(ASKED, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert one.post(ASKED, headers={"x-request-id": "not one"}).headers["x-request-id"] != "not one"
    held.broken = True
    for as_json in (False, True):
        with shown_log(), server_log(as_json):
            failed = one.post(ASKED, headers={"x-request-id": "of-the-failure"})
        assert failed.status_code == 500 and failed.headers["x-request-id"] == "of-the-failure"
        lines = capsys.readouterr().err.splitlines()
        if as_json:
            line = next(told for told in map(json.loads, lines) if told["request"] == "of-the-failure")
            assert line["level"] == "ERROR" and "LookupError" in line["exception"] and "T" in line["time"]
        else:
            assert any(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+\S* ERROR of-the-failure call ", line) for line in lines)


@pytest.mark.parametrize(("headers", "status"), [
    ({}, 200), ({"host": "127.0.0.1:1"}, 200), ({"host": "[::1]:80"}, 200), ({"host": "localhost"}, 200),
    ({"host": "evil.example"}, 403), ({"host": "127.0.0.1.evil.example:8000"}, 403), ({"host": "["}, 403),
    ({"origin": "http://evil.example"}, 403), ({"origin": "null"}, 403), ({"origin": "http://["}, 403),
    ({"host": "localhost:9", "origin": "http://localhost:9"}, 200),
    ({"host": "localhost:9", "origin": "http://localhost:10"}, 403),
])  # fmt: skip
def test_a_web_page_from_elsewhere_cannot_ask_a_server_without_keys(server, headers, status):
    answer = server.post(ASKED, headers=headers)
    assert answer.status_code == status
    if status == 403:
        assert error_of(answer, 403)["code"] in ("host_not_allowed", "origin_not_allowed")
        assert server.http.get("/health", headers=headers).status_code == 200


def test_hosts_and_origins_that_are_allowed_may_ask(engine, serve):
    one = serve(engine, allowed_hosts=("gpu-box",), cors_origins=("https://app.example",))
    page = {"origin": "https://app.example"}
    assert one.post(ASKED, headers={"host": "GPU-box:8000"}).status_code == 200
    answer = one.post(ASKED, headers=page)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
    wanted = {**page, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert one.http.options("/v1/completions", headers=wanted).status_code == 200
    assert one.post(ASKED, headers={"origin": "https://other.example"}).status_code == 403
    foreign = {"authorization": "Bearer a", "host": "api.example"}
    assert serve(engine, api_keys=("a",)).post(ASKED, headers=foreign).status_code == 200  # no page has the key


def test_the_page_needs_no_key_and_lets_nothing_in(engine, serve):
    closed, without = serve(engine, api_keys=("key-of-a",)), serve(engine, page=False)
    for address in PAGE_FILES:
        answer = closed.http.get(address)
        assert answer.status_code == 200 and closed.http.head(address).status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert without.http.get(address).status_code == 404
    assert closed.http.get("/page/../v1/models").status_code == closed.http.get("/v1/models").status_code == 401
    assert closed.http.get("/page/none.js").status_code == 401


def test_the_page_has_no_script_or_style_of_its_own_and_asks_nobody_else():
    folder = Path(forerun.__file__).parent / "server" / "static"
    assert {each.name for each in folder.iterdir()} <= {each.name for each in PAGE_FILES.values()}
    html = (folder / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\son\w+=|\sstyle=", html) == []
    for file in folder.iterdir():
        assert set(re.findall(r"https?://[\w./]+", file.read_text())) <= {"http://www.w3.org/2000/svg"}
        assert len(file.read_text().splitlines()) <= 300
