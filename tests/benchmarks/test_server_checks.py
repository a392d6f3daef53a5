"""Each check of the server's trials fails when what it guards is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import forerun
from benchmarks.server import agents, attack, fuzz, kill, soak, step_times
from benchmarks.server.malformed_requests import RawRequest
from benchmarks.server.response_checks import RawAnswer, wrong
from benchmarks.server.server_process import TEMPLATE, ServerProcess

SHOT = RawRequest("posted", (b"",))
GOOD = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'


def answer(status: int, body: bytes = b"", kind: bytes = b"application/json", complete: bool = True) -> RawAnswer:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
    return RawAnswer(head + body, 1.0, complete)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (answer(200, b"{}"), None),
        (answer(400, GOOD), None),
        (answer(500, GOOD), "status 500"),
        (answer(503, GOOD), "status 503"),
        (answer(200, b"{}", complete=False), "it hangs"),
        (RawAnswer(b"", 1.0, True), "no answer"),
        (answer(400, b"Bad Request"), "OpenAI's shape"),
        (answer(400, b'{"error": {"message": ""}}'), "OpenAI's shape"),
        (answer(200, b"data: {}\n\ndata: [DONE]\n\n", b"text/event-stream"), None),
        (answer(200, b"data: {}\n\n", b"text/event-stream"), "a stream ends with"),
        (answer(200, b'data: {"error": {"type": "server_error"}}\n\n', b"text/event-stream"), "a stream ends with"),
        (
            answer(200, b'data: {"type": "response.completed", "code": "failed"}\n\n', b"text/event-stream"),
            "a stream ends",
        ),
    ],
)
def test_a_wrong_answer_is_found(given: RawAnswer, fault: str | None) -> None:
    found = wrong(SHOT, given)
    assert found is None if fault is None else fault in str(found)


@pytest.mark.parametrize("more", [*(("tasks", "threads", "files", "kv_cache_usage_perc")), "index_bytes"])
def test_what_is_left_behind_is_found(more: str) -> None:
    before = {"tasks": 3, "threads": 9, "files": 20, "kv_cache_usage_perc": 0.0, "index_bytes": 0}
    assert fuzz.leaks(before, before) == []
    assert len(fuzz.leaks(before, {**before, more: before[more] + fuzz.INDEX + 1})) == 1


@pytest.mark.parametrize("name", [*soak.BOUNDS, *soak.AT_REST])
def test_what_grows_is_found(name: str) -> None:
    growth, more = dict.fromkeys(soak.BOUNDS, 0.0), dict.fromkeys(soak.AT_REST, 0.0)
    assert soak.faults(growth, more, 1) == [] and soak.faults(growth, more, 0) == ["nothing was answered"]
    for figures in (growth, more):
        if name in figures:
            for value in (1e12, float("nan")):
                assert soak.faults(*({**each, name: value} if each is figures else each for each in (growth, more)), 1)


@pytest.mark.parametrize(
    "change", [{"wrong": 1}, {"warnings": ["x"]}, {"started_empty": 1}, {"unfinished_files": [0, 3]}]
)
def test_what_a_kill_breaks_is_found(change: dict[str, Any]) -> None:
    right = {"wrong": 0, "warnings": [], "started_empty": 0, "unfinished_files": [9, 1, 2]}
    assert kill.faults(right) == [] and kill.faults({**right, **change}) == list(change)


def chunks(gap: float) -> list[list[float]]:
    return [[gap * place for place in range(51)]]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        ({}, 0),
        ({"chunks": chunks(0.021)}, 1),
        ({"chunks": []}, 1),
        ({"statuses": {"200": 5, "429": 1}}, 1),
        ({"statuses": {"200": 5, "503": 1, "error event": 1}}, 2),
    ],
)
def test_what_an_attack_breaks_is_found(change: dict[str, Any], faults: int) -> None:
    steps, processors = [(0.0, 0.001, 0.001, 0, 0)], {"server": 1.0, "all": 1.5}
    alone = {"chunks": chunks(0.01), "steps": steps, "processors": processors, "first": [0.1], "statuses": {"200": 5}}
    beside = {**alone, "chunks": chunks(0.019), **change}
    result = attack.summary({"alone": alone, "floor": alone, "beside": beside}, {"many texts": {"429": 3}})
    assert len(result["faults"]) == faults and "| beside |" in attack.markdown(result | {"kinds": {}})


def test_gaps_are_told_by_what_was_open_meanwhile() -> None:
    sent = [("ids", 1.5, 2.5), ("tools", 4.2, 4.4)]
    kinds = attack.gaps_beside([[0.0, 1.0, 2.0, 4.0, 5.0]], sent)
    assert kinds["ids"] == {"p50": 1.5, "p99": pytest.approx(1.99), "sent": 1, "gaps": 2, "longest": 2.0}
    assert (kinds["tools"]["gaps"], kinds["tools"]["longest"]) == (1, 1.0)


def test_the_parts_of_a_gap_between_chunks_add_up_to_it() -> None:
    steps = [(0.0, 1.0, 0.9, 0, 0), (1.5, 3.5, 0.5, 3, 1), (3.5, 5.0, 1.0, 0, 2)]
    (gap,) = step_times.gap_parts([1.25, 5.5], steps)
    assert [gap[part] for part in step_times.PARTS] == [1.5, 2.0, 0.5, 0.25] and gap["seconds"] == 4.25
    assert (gap["steps"], gap["waits"], gap["preemptions"]) == (2, 3, 3)
    assert step_times.slowest([[1.25, 5.5], [5.5, 5.75]], steps) == gap
    assert step_times.slowest([], steps) == {} and step_times.gap_parts([0.5, 2.0], steps) == []


def test_sessions_of_a_trace_repeat_each_other_with_small_differences() -> None:
    tokenizer = AutoTokenizer.from_pretrained(Path(forerun.__file__).parent / "reference" / "weights" / "target")
    tokenizer.chat_template = TEMPLATE
    options = agents.AgentOptions(model=Path(), system=300, tools=4, trace=2, result=60)

    def recorded(session: int) -> list[str]:
        conversation = agents.AgentConversation(tokenizer, options, session)
        for _ in range(3):
            conversation.go_on("an answer that is not used")
        assert len(conversation.prompt()) > 3 * options.result
        return [line for message in conversation.messages for line in message["content"].splitlines()]

    first, again, second = recorded(0), recorded(0), recorded(1)
    same = sum(a == b for a, b in zip(first, second, strict=False))
    assert first == again and "an answer" not in str(first) and len(first) / 3 < same < len(first)
    rows = [{"session": "1", "turn": turn, "text": text} for turn, text in ((1, "a"), (1, "a"), (2, "a"), (2, "b"))]
    assert agents.differences(rows) == 1


@pytest.mark.matrix
def test_the_server_of_the_trials_starts_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with ServerProcess() as served:
        assert served.look()["threads"] > 0
