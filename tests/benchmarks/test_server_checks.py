"""The attack's report names what is wrong, gaps between chunks are split, and an agent's sessions repeat."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.reporting.study_report import Report
from benchmarks.server import agents, attack, watched_server
from benchmarks.server.client import LoadRequest, Reply
from benchmarks.server.watched_server import TEMPLATE, watched
from forerun.reference import bundled


def stream(gap: float, chunks: int = 50, status: int | None = 200, error: bool = False) -> Reply:
    """A stream whose chunks come at equal times."""
    data: list[dict[str, Any]] = [{"choices": [{"text": "a"}]}] * chunks + [{"error": "no"}] * error
    reads = [(gap * (1 + at), b"data: " + json.dumps(each).encode() + b"\n\n") for at, each in enumerate(data)]
    return Reply(LoadRequest("beside", "x", 9, 1.0, 0), 0.0, 99.0, reads, status)


@pytest.mark.parametrize(("beside", "faults"), [
    ([stream(0.019)], 0), ([stream(0.021)], 1), ([], 1), ([stream(0.01), stream(0.01, chunks=0, status=429)], 1),
    ([stream(0.01, error=True), stream(0.01, chunks=0, status=503)], 2),
])  # fmt: skip
def test_what_an_attack_breaks_is_found(beside, faults):
    steps = [(0.0, 0.001, 0.001, 0, 0)]
    rows = [
        {"phase": name, "server": 1.0, "all": 1.5} | attack.figures(streams, steps)
        for name, streams in (("alone", [stream(0.01)]), ("floor", [stream(0.01)]), ("beside", beside))
    ]
    report = Report("Attack", {})
    assert len(attack.fill(report, rows, {"many texts": {"429": 3}}, [])) == faults
    assert "| beside |" in report.markdown and "| many texts | {'429': 3} |" in report.markdown


def test_gaps_are_told_by_what_was_open_meanwhile():
    sent = [("ids", 1.5, 2.5), ("tools", 4.2, 4.4)]
    kinds = attack.gaps_beside([[0.0, 1.0, 2.0, 4.0, 5.0]], sent)
    assert kinds["ids"] == {"p50": 1500.0, "p99": 1990.0, "sent": 1, "gaps": 2, "longest": 2000.0}
    assert (kinds["tools"]["gaps"], kinds["tools"]["longest"]) == (1, 1000.0)


def test_the_parts_of_a_gap_between_chunks_add_up_to_it():
    steps = [(0.0, 1.0, 0.9, 0.0, 0, 0), (1.5, 3.5, 0.5, 0.5, 3, 1), (3.5, 5.0, 1.0, 0.0, 0, 2)]
    (gap,) = watched_server.gap_parts([1.25, 5.5], steps)
    assert [gap[part] for part in watched_server.PARTS] == [1.5, 0.5, 1.5, 0.5, 0.25] and gap["seconds"] == 4.25
    assert (gap["steps"], gap["waits"], gap["preemptions"]) == (2, 3, 3)
    assert watched_server.slowest([[1.25, 5.5], [5.5, 5.75]], steps) == gap
    assert watched_server.slowest([], steps) == {} and watched_server.gap_parts([0.5, 2.0], steps) == []


def test_sessions_of_a_trace_repeat_each_other_with_small_differences():
    tokenizer = AutoTokenizer.from_pretrained(bundled("target"))
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


def test_a_watched_server_starts_in_any_folder_and_states_its_steps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with watched((), tmp_path / "log") as server:
        assert server.steps() == [] and server.processor_seconds() > 0
