"""``python -m benchmarks serve``: what is asked, what is made of the answers, and that load may change no text."""

import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from support.live_server import LiveServer
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.reporting.study_report import Report
from benchmarks.server import client, load_report, servers
from benchmarks.server import load_bench as bench
from benchmarks.server.client import Answer, Level, LoadRequest, Reply, ServerEndpoint, arrivals, events, mixed, parsed
from benchmarks.server.load_bench import Round, ServeBench
from benchmarks.server.load_command import CLIENT_TURNS, build_levels, needed
from benchmarks.server.load_figures import figures
from benchmarks.server.servers import ServedModel, ServerContestant, ServerError
from forerun.bench.journal import Journal, Turn
from forerun.bench.rounds import PLAIN as PLAIN_NAME
from forerun.engine.engine import Engine
from forerun.models.loading.load import find, load

PROMPTS = {"json": ["Table:\na,b\n1,2\n", '{"name": "', "[1, 2,", "[{"], "rag": ["Once", "The sun", "She said", "He"]}
OURS, PLAIN = ServerContestant("forerun", (), "bundled", True), ServerContestant(PLAIN_NAME, (), "bundled", True)


def requests_of(count: int, tokens: int = 4) -> list[LoadRequest]:
    return [dataclasses.replace(request, tokens=tokens) for request in mixed(PROMPTS, [tokens], 0.8, 1)][:count]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model, tokenizer = load("bundled", device="cpu")
    engine = Engine(model, "trie", tokenizer=tokenizer)
    engine.level._clock = time.perf_counter  # the tests' clock stands still, and here times are read
    built = LiveServer(engine, model="bundled", namespaces=1 << 20)
    yield built
    built.close()


def test_arrivals_are_those_of_a_poisson_process_and_follow_from_the_seed():
    found = arrivals(5.0, 4001, 3)
    gaps = [after - before for before, after in pairwise(found)]
    assert found[0] == 0 and min(gaps) > 0
    assert mean(gaps) == pytest.approx(1 / 5, rel=0.05)
    assert pstdev(gaps) == pytest.approx(1 / 5, rel=0.1)  # as exponential gaps have it; even ones would have 0
    halves = sum(gap > 0.2 for gap in gaps) / len(gaps)
    assert halves == pytest.approx(2.718**-1, abs=0.03)
    assert found == arrivals(5.0, 4001, 3) != arrivals(5.0, 4001, 4)


def test_requests_are_mixed_and_no_level_knows_the_answers_of_another():
    found = mixed(PROMPTS, [2, 8], 0.5, 7)
    assert [request.task for request in found[:4]] == ["json", "rag", "json", "rag"]
    assert [request.temperature for request in found] == [0, 0, 0.5, 0.5] * 2
    assert {request.tokens for request in found} == {2, 8} and len({request.seed for request in found}) == len(found)
    assert found == mixed(PROMPTS, [2, 8], 0.5, 7) != mixed(PROMPTS, [2, 8], 0.5, 8)
    many = [dataclasses.replace(found[0], seed=seed) for seed in range(needed([1, 4], [2.0], 3))]
    levels = build_levels([1, 4], [2.0], 3, many, 0)
    assert [level.name for level in levels] == ["1 client", "4 clients", "2 per second"]
    assert [len(level.requests) for level in levels] == [CLIENT_TURNS, 4 * CLIENT_TURNS, 3]
    assert [request for level in levels for request in level.requests] == many


def test_a_stream_is_understood_wherever_it_is_cut():
    told = [
        {"choices": [{"text": "a\u20ac", "finish_reason": None}]},
        {"choices": [{"text": "b", "finish_reason": None}]},
        {"choices": [{"text": "", "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 3}},
    ]
    stream = b": ping\n\n"  # comes while a stream is silent
    stream += b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\n\n" for each in told)
    stream += b"data: [DONE]\n\n"
    (request,) = requests_of(1)
    for size in (1, 7, len(stream)):
        reads = [(float(at), stream[at : at + size]) for at in range(0, len(stream), size)]
        assert [event for _, event in events(reads)] == told
        answer = parsed(Reply(request, -1.0, 900.0, reads, 200))
        assert (answer.text, answer.tokens, answer.error) == ("a\u20acb", 3, None)
        assert len(answer.grew) == (1 if size == len(stream) else 2)  # what comes together is one chunk
    assert answer.first == 1.0 and answer.each == 450.0


@pytest.mark.parametrize(("reply", "error"), [
    ({"status": 429, "reads": [(1.0, b'{"error": "full"}')]}, 'status 429: {"error": "full"}'),
    ({"status": 200, "reads": [(1.0, b'data: {"error": {"message": "no"}}\n\n')]}, "no"),
    ({"status": 200, "reads": [(1.0, b'data: {"choices": [{"text": "a"}]}\n\n')]}, "ended before"),
    ({"error": "ReadError: gone"}, "gone"),
])  # fmt: skip
def test_what_is_no_whole_answer_is_an_error_and_counts_as_that_alone(reply, error):
    (request,) = requests_of(1)
    broken = parsed(Reply(request, **reply))
    assert error in str(broken.error) and broken.digest is None
    row = figures([broken, Answer(request, "x", 0.0, 1.0, [0.5, 0.6], {"completion_tokens": 6}, None)], 2.0, 0.1)
    assert (row["requests"], row["errors"], row["requests_per_second"], row["tokens_per_second"]) == (2, 1, 0.5, 3.0)
    assert row["first_p50"] == 0.5 and row["gap_p99"] == pytest.approx(0.1) and row["each_p50"] == pytest.approx(0.1)


def one_round(long: bool = False) -> Round:
    found = requests_of(8)
    long_ask = LoadRequest("long", "and on " * 60, 2, 0.0, 0) if long else None
    return Round(found[:1], [Level("clients", 2, found[:4], 0), Level("rate", 50.0, found[4:], 0)], long_ask, 2)


def bench_of(
    server: LiveServer, tmp_path: Path, contestants: Sequence[ServerContestant], rounds: Sequence[Round],
    resume: bool = False,
) -> tuple[ServeBench, list[str]]:  # fmt: skip
    """A bench whose servers are this one, and which servers were started."""
    started = list[str]()

    @contextmanager
    def start(contestant: ServerContestant) -> Iterator[ServerEndpoint]:
        started.append(contestant.name)
        if not contestant.ours:
            raise ServerError("it broke")
        yield ServerEndpoint(f"http://127.0.0.1:{server.port}", "bundled", exact=True)

    report = Report("Load", {}, tmp_path, "serve")

    def save(turns: Sequence[Turn], whole: bool) -> None:
        load_report.fill(report, turns, rounds, whole and len(turns) == len(rounds) and not resume)
        report.save()

    journal = Journal(tmp_path / "turns.jsonl", {"about": 1}, resume)
    return ServeBench(contestants, rounds, start, journal, save), started


def test_all_is_measured_and_written_and_a_round_that_is_known_is_not_measured_again(server, tmp_path):
    absent = ServerContestant(servers.TRANSFORMERS, (), "x", False)
    rounds = [one_round(long=True), one_round()]
    measured, started = bench_of(server, tmp_path, [PLAIN, OURS, absent], rounds)
    turns = measured.run()
    assert started == [PLAIN.name, OURS.name, absent.name, OURS.name, PLAIN.name]
    found = json.loads((tmp_path / "serve.json").read_text())["parts"]
    for row in found["where"]:
        assert row["read"] > 0 and row["score"] > 0 and row["other"] > 0 and -0.02 < row["idle"] < 0.9
        assert row["decoding_per_second"] > row["tokens_per_second"]
    assert len(found["where"]) == len(found["load"])
    assert {(row["load"], row["contestant"]) for row in found["load"]} == {
        (level.name, each.name) for level in rounds[0].levels for each in (PLAIN, OURS)
    }
    assert all(row["errors"] == 0 and row["tokens"] > 0 and row["first_p99"] > 0 for row in found["load"])
    assert {row["contestant"] for row in found["long"]} == {PLAIN.name, OURS.name}
    assert all(row["same"] == row["compared"] > 0 and row["exact"] for row in found["texts"])
    text = (tmp_path / "serve.md").read_text()
    assert f"Not measured: {absent.name}: it broke." in text and "changed no output" in text
    assert [path.name for path in tmp_path.glob("*.png")] == ["serve-tokens.png"]

    again, started = bench_of(server, tmp_path, [PLAIN, OURS, absent], [*rounds, one_round()], resume=True)
    assert json.loads(json.dumps(again.run()))[:2] == json.loads(json.dumps(turns))
    assert started == [PLAIN.name, OURS.name]


def test_a_text_that_load_has_changed_is_found():
    same = {str(request.seed): "same" for request in one_round().requests}
    changed = same | {str(one_round().requests[0].seed): "another"}
    alone = {"compared": 2, "same": 2, "exact": True}
    turn: Turn = {PLAIN.name: {"texts": same, "alone": alone}, OURS.name: {"texts": changed, "alone": alone}}
    assert load_report.changed(load_report.output_rows([turn], [one_round()])) == [
        "forerun: 1 of 8 outputs under load differ from forerun none"
    ]
    turn[OURS.name] = {"texts": same, "alone": alone | {"same": 1}}
    (wrong,) = load_report.changed(load_report.output_rows([turn], [one_round()]))
    assert "each alone" in wrong
    turn[OURS.name]["alone"]["exact"] = False
    assert load_report.changed(load_report.output_rows([turn], [one_round()])) == []


def test_a_request_of_ours_that_was_not_answered_is_found_and_counted_over_all_loads(server, tmp_path, monkeypatch):
    run = client.run

    def loses_one(endpoint: ServerEndpoint, level: Level, extension: client.Extension) -> client.LoadRun:
        found = run(endpoint, level, extension)
        if len(found.replies) > 2:
            found.replies[0].reads.clear()
            found.replies[0].error = "ReadError: gone"
        return found

    monkeypatch.setattr(bench.client, "run", loses_one)
    turns = bench_of(server, tmp_path, [PLAIN], [one_round()])[0].run()
    assert load_report.errors(turns) == {PLAIN.name: {"ReadError: gone": 2}}  # one in each load
    assert list(load_report.unanswered(turns)) == [f"{PLAIN.name}: 2 requests under load were not answered"]
    turns[0] = {servers.TRANSFORMERS: turns[0][PLAIN.name], PLAIN.name: {"long": {"error": "status 400"}}}
    assert list(load_report.unanswered(turns)) == [f"{PLAIN.name}: a long prompt was not answered: status 400"]


def test_a_server_that_ends_at_once_is_quoted(tmp_path):
    right = servers.forerun(ServedModel("bundled", find("bundled"), "float32", "cpu"), "none")
    broken = dataclasses.replace(right, command=[*right.command[:3], "nonsense"])
    with pytest.raises(ServerError, match=r"forerun none ended with status 2: .*nonsense"):
        servers.started(broken, False, tmp_path / "logs").__enter__()


def test_commands_serve_the_same_files_in_the_same_type():
    subject = ServedModel("bundled", find("bundled"), "float32", "cpu")
    ours, theirs = servers.forerun(subject, None), servers.transformers(subject)
    assert "--drafter" not in ours.command and ours.name == "forerun"
    assert servers.forerun(subject, "none").command[-2:] == ["--drafter", "none"]
    other = servers.llama(subject, Path("model.gguf"), 4, 100, 2, lambda text: [len(text)])
    by_ids = ServerEndpoint("http://127.0.0.1", "m", chats=True, ours=False, encode=other.encode)
    first = requests_of(1)[0]
    assert by_ids.address == "/v1/completions" and by_ids.body(first, {})["prompt"] == [len(first.prompt)]
    assert not other.ours and " ".join(other.command).endswith("--slots 4 --context 400 --threads 2")
    assert " model.gguf --dtype float32 " in " ".join(other.command)
    assert str(find("bundled")) in theirs.command and "--continuous-batching" in theirs.command
    assert all(one.command[one.command.index("--dtype") + 1] == "float32" for one in (ours, theirs, other))
    file = dataclasses.replace(subject, folder=Path(__file__))
    assert "GGUF" in str(servers.why_not(file)) and servers.transformers(file).lacking == servers.why_not(file)
    assert "FORERUN_DRAFTER" not in servers.environment({"FORERUN_DRAFTER": "none", "HOME": "/"})


def test_the_command_fails_if_load_has_changed_a_text(tmp_path, monkeypatch):
    alone = {"compared": 2, "same": 1, "exact": True}

    def run(measured: ServeBench) -> list[Turn]:
        measured.turns.append({PLAIN.name: {"levels": {}, "texts": {}, "alone": alone}})
        measured.save(measured.turns, True)
        return measured.turns

    monkeypatch.setattr(ServeBench, "run", run)
    done = CliRunner().invoke(app, ["server", "load", "--rates", "0", "--requests", "1", "--out", str(tmp_path)])
    assert done.exit_code == 1
    told = "forerun none: 1 of 2 outputs under load differ from each alone, without drafts"
    assert told in done.output and told in (tmp_path / "serve.md").read_text()
