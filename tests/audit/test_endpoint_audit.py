"""An audit of a server from outside: small HTTP servers that answer rightly, or are wrong in one way each."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner, Result

from forerun.audit.endpoint.cases import CasePlan, read_requests
from forerun.audit.endpoint.client import Endpoint, EndpointAnswer, TokenScore, fold
from forerun.audit.endpoint.difference import Difference, first_difference, margin
from forerun.audit.endpoint.endpoint_audit import Variant, audit_endpoint
from forerun.audit.endpoint.endpoint_report import as_json, as_markdown
from forerun.cli import app

Json = dict[str, Any]
Reply = Callable[[Json], tuple[Sequence[str], Json]]
"""From a request's body to the tokens of its answer, and fields of its message."""
TOP = {"red": -0.5, "green": -0.55, "blue": -4.0}
"""What the small servers say of every token: two are near each other."""


def right(body: Json) -> tuple[list[str], Json]:
    """What the request determines: its seed, its last words, a call where there are tools."""
    asked = str(body.get("prompt") or body["messages"][-1]["content"])
    calls = [{"id": "call_9", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}]
    words = ["red", *(word for word in asked.split()[-4:]), str(body.get("seed", "none"))]
    return words, {"tool_calls": calls} if body.get("tools") else {}


@contextmanager
def server(reply: Reply, told: Json | None = None, usage: Json | None = None) -> Iterator[str]:
    """A server with one model; its address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *given: object) -> None: ...

        def send(self, status: int, data: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            listed = {"data": [{"id": "small", **(told or {})}]} if self.path == "/v1/models" else {}
            self.send(200 if listed else 404, json.dumps(listed).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                tokens, message = reply(body)
            except LookupError as error:
                self.send(400, json.dumps({"error": {"message": str(error)}}).encode())
                return
            chat = "messages" in body
            if body.get("stream"):
                chunks = [choice(chat, "delta", [token], {}, None) for token in tokens]
                chunks.append(choice(chat, "delta", [], message, "stop"))
                lines = [*map(json.dumps, [*chunks, {"choices": [], "usage": usage or {}}]), "[DONE]"]
                self.send(200, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")
            else:
                whole = choice(chat, "message", tokens, message, "stop", bool(body.get("logprobs")))
                self.send(200, json.dumps({**whole, "usage": usage or {}}).encode())

    many = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 64})  # an audit opens so many at once
    listening = many(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def choice(
    chat: bool, name: str, tokens: Sequence[str], message: Json, finish: str | None, scored: bool = False
) -> Json:
    text = "".join(tokens)
    told: Json = {"finish_reason": finish, **({name: {"content": text, **message}} if chat else {"text": text})}
    if scored and chat:
        top = [{"token": token, "logprob": logprob} for token, logprob in TOP.items()]
        told["logprobs"] = {"content": [{"token": each, "logprob": -0.5, "top_logprobs": top} for each in tokens]}
    elif scored:
        scores = {"token_logprobs": [-0.5] * len(tokens), "top_logprobs": [TOP] * len(tokens)}
        told["logprobs"] = {"tokens": list(tokens), **scores}
    return {"choices": [told]}


def audited(reply: Reply, *kinds: str, reference: Reply = right, **told: Any) -> Any:
    """The report of a server beside a right one."""
    with ExitStack() as stack:
        urls = [stack.enter_context(server(each, **told)) for each in (reply, reference)]
        variants = [Variant(Endpoint(url), "small") for url in urls]
        plan = CasePlan(**({"kinds": kinds} if kinds else {}), long_characters=400)
        return audit_endpoint(variants[0], variants[1], plan.cases())


def wrong(condition: Callable[[Json], Any], change: Callable[[list[str], Json], tuple[list[str], Json]]) -> Reply:
    """The right answer, changed where a condition holds."""
    return lambda body: change(*right(body)) if condition(body) else right(body)


def test_equal_servers_pass_in_every_kind_and_form():
    report = audited(right)
    assert not report.failed(strict=True) and report.count("equal") == len(report.comparisons)
    assert {each.form for each in report.comparisons} == {"whole", "streamed", "together"}
    assert {each.case.kind for each in report.comparisons} == set(CasePlan().kinds) - {"own"}
    assert "none differs" in as_markdown(report)


@pytest.mark.parametrize(("condition", "change", "part", "kinds"), [
    (lambda body: True, lambda tokens, more: ([*tokens[:-1], "blue"], more), "text", {"greedy", "long"}),
    (lambda body: body.get("stream"), lambda tokens, more: (tokens[1:], more), "text", {"greedy"}),
    (lambda body: body.get("tools"), lambda tokens, more: (tokens, {}), "call 0 name", {"tools"}),
    (lambda body: body.get("tools"),
        lambda tokens, more: (tokens, {"tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}),
        "call 0 arguments", {"tools"}),
    (lambda body: "messages" in body, lambda tokens, more: (tokens, {**more, "reasoning_content": "hm"}),
        "reasoning", {"greedy", "schema"}),
    (lambda body: body.get("seed") == 0, lambda tokens, more: (["blue"], more), "text", {"seeded"}),
])  # fmt: skip
def test_a_wrong_answer_fails_and_its_part_and_kind_are_named(condition, change, part, kinds):
    report = audited(wrong(condition, change), *{"greedy", *kinds})
    different = [each for each in report.comparisons if each.verdict == "different"]
    assert report.failed() and kinds <= {each.case.kind for each in different}
    assert {each.difference.part for each in different} == {part}
    assert as_json(report)["passed"] is False and "differ" in as_markdown(report).splitlines()[2]


def test_a_near_tie_is_rounding_only_in_greedy_text_and_a_wide_gap_is_not():
    for word, verdict in (("green", "rounding"), ("blue", "different")):
        report = audited(wrong(lambda body: True, lambda tokens, more: ([word, *tokens[1:]], more)), "greedy", "seeded")  # noqa: B023
        found = {(each.case.kind, each.verdict) for each in report.comparisons}
        assert found == {("greedy", verdict), ("seeded", "different")}
        greedy = next(each for each in report.comparisons if each.case.kind == "greedy")
        assert greedy.difference.margin == pytest.approx(-0.5 - TOP[word])


def test_log_probabilities_are_compared_too():
    a = EndpointAnswer("x", finish="stop", scores=[TokenScore(b"x", -1.0, {b"x": -1.0, b"y": -2.0})])
    b = EndpointAnswer("x", finish="stop", scores=[TokenScore(b"x", -1.25, {b"x": -1.25, b"y": -2.0})])
    found = first_difference(a, b)
    assert (found.part, found.margin) == ("log-probabilities", 0.25)
    assert first_difference(a, a) is None


def test_a_reference_that_does_not_repeat_itself_cannot_judge():
    count = iter(range(10**6))
    restless = Mock(side_effect=lambda body: ([f"red{next(count)}"], {}))
    report = audited(right, "greedy", reference=restless)
    assert report.count("unstable") == len(report.comparisons)
    assert report.failed() and "Nothing could be judged" in as_markdown(report)
    with server(restless) as url:  # asked twice, this is what there is to find
        same = Variant(Endpoint(url), "small")
        report = audit_endpoint(same, same, CasePlan(kinds=("greedy",)).cases())
        assert report.failed() and report.count("different") == len(report.comparisons)


def test_what_both_refuse_is_no_difference_and_what_one_refuses_is():
    def no_tools(body: Json) -> tuple[list[str], Json]:
        if body.get("tools"):
            raise LookupError("no tools here")
        return right(body)

    report = audited(no_tools, "tools", "greedy", reference=no_tools)
    assert not report.failed() and report.count("refused") == 3 * 4
    assert "400: no tools here" in as_markdown(report)
    report = audited(no_tools, "tools")
    assert report.failed() and {each.difference.got for each in report.comparisons} == {"400: no tools here"}
    assert audited(no_tools, "tools", reference=no_tools).failed()  # nothing was compared


def test_a_stream_that_breaks_off_is_no_answer():
    chunks: list[Json] = [{"choices": [{"delta": {"content": "a"}}]}]
    with pytest.raises(ValueError, match="broke off"):
        fold(chunks)
    assert fold([*chunks, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]).text == "a"
    with pytest.raises(ValueError, match="broken"):
        fold([{"choices": []}, {"error": {"message": "broken"}}])


@pytest.mark.parametrize(("usage", "drafts"), [
    ({"completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 4}}, (7, 3)),
    ({"forerun": {"drafted": 9, "accepted": 2}}, (9, 2)), ({"prompt_tokens": 3}, (None, None)),
])  # fmt: skip
def test_drafts_are_counted_as_each_server_tells_them(usage, drafts):
    report = audited(right, "greedy", usage=usage)
    assert {(each.drafted, each.accepted) for each in report.comparisons} == {drafts}
    timings = {"draft_n": 5, "draft_n_accepted": 1}
    told = fold([{"choices": [{"text": "", "finish_reason": "stop"}], "timings": timings}])
    assert (told.drafted, told.accepted) == (5, 1)


def test_the_margin_is_found_in_the_text_where_the_difference_does_not_come_again():
    scores = [TokenScore("né".encode(), -0.1, {}), TokenScore(b" is", -0.2, {b" is": -0.2, b" i": -0.25, b" in": -0.3})]
    reference = EndpointAnswer("né is", scores=scores)
    found, longest = Difference("text", 4, "s", "n a box"), pytest.approx(0.1)  # of the longest that fits
    assert margin(found, EndpointAnswer("né in a box"), reference, reference) == longest
    assert margin(found, EndpointAnswer("no in a box"), reference, reference) is None
    assert margin(Difference("call 0 name", 0, "a", "b"), EndpointAnswer(), reference, reference) is None


def call(*arguments: object, **more: Any) -> Result:
    return CliRunner().invoke(app, ["audit", *map(str, arguments)], **more)


def test_the_command_writes_both_reports_and_its_status_is_the_verdict(tmp_path):
    broken = wrong(lambda body: body.get("tools"), lambda tokens, more: (tokens, {}))
    with server(right) as plain, server(broken) as fast:
        good = call("--url", plain, "--against", plain, "-k", "greedy", "--out", tmp_path)
        assert good.exit_code == 0, good.output
        assert json.loads((tmp_path / "audit.json").read_text())["counts"]["equal"] == 3 * 8
        assert (tmp_path / "audit.md").read_text().startswith("# Audit of a server\n\n✓ 24 of 24 answers are equal")
        bad = call("--url", f"{fast}/v1/", "--against", plain, "-k", "tools", "--json")
        assert bad.exit_code == 1 and json.loads(bad.stdout)["counts"]["different"] == 3 * 4


def test_fields_and_forerun_s_own_drafter_make_a_reference_of_one_server():
    drafting = Mock(side_effect=lambda body: (["slow" if body.get("forerun") or body.get("plain") else "fast"], {}))
    with server(drafting) as url:
        assert call("--url", url, "-k", "greedy").exit_code == 0
        assert call("--url", url, "-k", "greedy", "--against-fields", '{"plain": true}').exit_code == 1
    with server(drafting, {"forerun": {"drafters": ["auto", "none"]}}) as url:
        assert call("--url", url, "-k", "greedy").exit_code == 1


def test_a_name_is_enough_where_no_model_is_listed(monkeypatch):
    opened = Endpoint._open
    monkeypatch.setattr(
        Endpoint, "_open", lambda self, at, body=None: opened(self, "none/such" if body is None else at, body)
    )
    with server(right) as url:
        listed = call("--url", url, "-k", "greedy")
        assert listed.exit_code == 2 and "name the model with --name" in listed.output
        assert call("--url", url, "-k", "greedy", "--name", "small").exit_code == 0


def test_own_requests_are_sent_as_they_are(tmp_path):
    noting = Mock(wraps=right)
    file, chat = tmp_path / "own.jsonl", {"messages": [{"role": "user", "content": "c"}]}
    file.write_text(f'{{"model": "gone", "prompt": "a b", "top_k": 3}}\n\n{json.dumps(chat)}\n')
    with server(noting) as url:
        assert call("--url", url, "-k", "own", "--requests", file).exit_code == 0
    noting.assert_any_call({"model": "small", "prompt": "a b", "top_k": 3})
    for line, said in (("[]", "must be an object"), ("{", "not JSON"), ('{"prompt": "a", "n": 2}', "has n 2")):
        file.write_text(line)
        with pytest.raises(ValueError, match=said):
            read_requests(file)


@pytest.mark.parametrize(("arguments", "said"), [
    (("--url", "127.0.0.1:1"), "must begin with http"), (("--url", "http://127.0.0.1:1"), "cannot be reached"),
    (("--url", "http://a", "--drafter", "trie"), "--drafter: only without --url"),
    (("--against", "http://a"), "--against: only with --url"),
    (("--url", "http://a", "--requests", "/none"), "No such file"),
])  # fmt: skip
def test_wrong_options_are_refused_in_words(arguments, said):
    result = call(*arguments)
    assert result.exit_code == 2 and said in result.output
    with server(right) as url:
        assert "not JSON" in call("--url", url, "--fields", "{").output
