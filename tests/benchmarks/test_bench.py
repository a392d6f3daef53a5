"""The bench measures the same texts for every contestant, and reports what it measured; no time is asserted."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from random import Random

import pytest
from support.tiny import PROMPTS, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from benchmarks import report
from benchmarks.__main__ import app
from benchmarks.chat import Prompt
from benchmarks.contestants import PADDED, Bench
from benchmarks.continuations import continuations
from benchmarks.journal import Journal, Key, about
from benchmarks.prompts import Counts, build_jobs
from benchmarks.reference.tasks import Material, make
from benchmarks.replay import Recorded, Selection, replay
from benchmarks.speed import BASELINE, Contestant, Job, Rows, Run, Series, measure
from forerun.drafting.recipes import build_drafter
from forerun.engine.engine import Engine

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def series() -> list[Series]:
    job = Job("copy", PROMPTS[:2], PROMPTS[:2], 60)
    return Bench(tiny("llama"), ["none", "lookup", "trie"], tiny("llama")).run(job, rounds=2)


def test_every_contestant_gives_the_baseline_s_text(series: list[Series]) -> None:
    rows = report.summarise(series)
    assert {row["contestant"] for row in rows} == {
        BASELINE,
        "transformers prompt lookup",
        "transformers assisted",
        "forerun none",
        "forerun lookup",
        "forerun trie",
        "forerun trie, warm",
        "forerun, wrong drafts",
    }
    assert all(row["same_output"] == 1 for row in rows)
    by_name = {row["contestant"]: row for row in rows}
    assert by_name["forerun none"]["tokens_per_pass"] == by_name[BASELINE]["tokens_per_pass"] == 1
    assert by_name["forerun trie, warm"]["tokens_per_pass"] > 1  # it has seen these very answers


def test_contestants_are_left_out_by_name() -> None:
    job = Job("copy", PROMPTS[:1], [], 2)
    some = Bench(tiny("llama"), ["none"], skip=["transformers prompt lookup", "forerun, wrong drafts"]).run(job, 1)
    assert [each.contestant for each in some] == [BASELINE, "forerun none"]
    for name in ("forerun auto", BASELINE, PADDED):
        with pytest.raises(
            ValueError, match=f"--skip has '{name}'; known are 'transformers prompt lookup', 'forerun none'"
        ):
            Bench(tiny("llama"), ["none"], skip=[name]).check_skip([job], batches=True)


def test_what_is_skipped_is_of_any_job_or_batch_and_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cold, warm = Job("copy", PROMPTS[:1], [], 2), Job("json", PROMPTS[:1], PROMPTS[1:2], 2)
    bench = Bench(tiny("llama"), ["trie"], skip=["forerun trie, warm"])
    bench.check_skip([cold, warm])
    with pytest.raises(ValueError, match="--skip has 'forerun trie, warm'"):
        bench.check_skip([cold])
    asked: list[Rows] = []
    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, ids, **how: (asked.append(ids), generate(self, ids, **how))[1])
    assert "forerun trie, warm" not in [each.contestant for each in bench.run(warm, 1)]
    assert asked and all(rows == [PROMPTS[0]] for rows in asked)
    fewer = Bench(tiny("llama"), ["none"], skip=["forerun trie"])
    fewer.check_skip([cold], batches=True)
    assert [each.contestant for each in fewer.run_batches(PROMPTS, 2, 2, 1)] == [PADDED, "forerun none"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("-d", "magic"), "drafter is 'magic'"),
        (("-d", "none", "--skip", "forerun magic"), "--skip has 'forerun magic'"),
    ],
)
def test_a_wrong_name_leaves_a_journal_as_it_is(tmp_path: Path, wrong: tuple[str, ...], said: str) -> None:
    (tmp_path / "speed-turns.jsonl").write_text("hours of work")
    few = ("-k", "json", "--prompts", "1", "--warm-prompts", "0", "-n", "2", "--out", str(tmp_path))
    done = CliRunner().invoke(app, ["tasks", "--device", "cpu", *few, *wrong])
    assert done.exit_code == 2 and said in done.stderr
    assert (tmp_path / "speed-turns.jsonl").read_text() == "hours of work"


def test_speed_is_the_median_and_spread_the_extremes() -> None:
    runs = [[Run([[1] * 10], seconds, 5) for seconds in (1.0, 2.0, 4.0)]]
    one = Series("x", "t", runs)
    assert one.tokens_per_second == 5
    assert one.spread == (2.5, 10)
    assert one.tokens_per_pass == 2


def test_texts_of_every_round_are_compared_and_counted() -> None:
    def series(*texts: list[int]) -> Series:
        return Series("x", "t", [[Run([text], 2.0, 1) for text in texts]])

    assert series([1, 2], [1, 3], [1, 2]).same_texts(series([1, 2], [1, 2], [1, 2])) == 2 / 3
    assert series([1], [1, 2, 3, 4], [1, 2, 3, 4]).tokens_per_second == 2


def test_a_bench_that_was_ended_goes_on_where_it_was(tmp_path: Path) -> None:
    """Turns that were measured are not run again, and a turn that lacks a contestant is run anew, whole."""
    runs: list[str] = []

    def contestant(name: str) -> Contestant:
        def run(rows: Rows, max_new_tokens: int) -> Run:
            runs.append(name)
            if len(runs) == 9:
                raise KeyboardInterrupt
            return Run([[1] * max_new_tokens for _ in rows], float(len(runs)), 3)

        return Contestant(run)

    two, path = {name: contestant(name) for name in "ab"}, tmp_path / "new" / "turns.jsonl"
    groups = [[[1, 2]], [[3]]]
    with pytest.raises(KeyboardInterrupt):  # two runs to warm up, three turns, and half a turn
        measure(two, "t", groups, 9, 2, Journal(path, {"dtype": "x"}))
    with path.open("a") as file:
        file.write('{"key": ["t", 1')  # what a process leaves that is killed as it writes
    again = measure(two, "t", groups, 9, 2, Journal(path, {"dtype": "x"}, resume=True))
    assert len(runs) == 9 + 2 + 2
    assert [[run.seconds for run in rounds] for rounds in again[0].runs] == [[3.0, 8.0], [6.0, 12.0]]
    measure(two, "t", groups, 9, 2, Journal(path, {"dtype": "x"}, resume=True))
    assert len(runs) == 13
    measure(two | {"c": contestant("c")}, "t", groups, 9, 1, Journal(path, {"dtype": "x"}, resume=True))
    assert len(runs) == 13 + 3 + 6
    measure(two, "t", groups, 8, 1, Journal(path, {"dtype": "x"}, resume=True))
    assert len(runs) == 22 + 2 + 4  # other texts


def test_a_journal_of_something_else_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    journal = Journal(path, {"dtype": "float32"})
    journal.add(Key.of("t", 0, [[1]], 4), {"a": {"seconds": 1.0}})
    with pytest.raises(ValueError, match="measured with dtype 'float32' and this is 'bfloat16'; give another --out"):
        Journal(path, {"dtype": "bfloat16"}, resume=True)
    assert Journal(path, {"dtype": "float32"}).find(Key.of("t", 0, [[1]], 4), ["a"]) is None  # begun anew
    path.write_text("# a page\n")
    with pytest.raises(ValueError, match="is not a bench's journal"):
        Journal(path, {}, resume=True)


def test_a_journal_tells_warm_prompts_devices_and_sources_apart(tmp_path: Path) -> None:
    path = tmp_path / "turns.jsonl"
    bench = Bench(tiny("llama"), ["trie"])
    for seen, lines in ((PROMPTS[1:2], 2), (PROMPTS[1:2], 2), (PROMPTS[2:3], 3)):
        bench.run(Job("copy", PROMPTS[:1], seen, 2), 1, Journal(path, {}, resume=True))
        assert len(path.read_text().splitlines()) == lines
    (there, here), this = (about("a", "float32", device) for device in ("cpu", "cuda:0")), about("a", "float32", "cpu")
    assert there != here and there == this and len(this["sources"]) == 16


def test_a_report_that_is_not_written_to_its_end_leaves_the_old_one(
    series: list[Series], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path, *_) = report.write(report.Result(report.summarise(series), {"rounds": 2}), tmp_path, "speed")
    old, write = path.read_text(), Path.write_text

    def cut(self: Path, text: str) -> int:
        write(self, text[:9])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="the disk is full"):
        report.write(report.Result(report.summarise(series), {"rounds": 3}), tmp_path, "speed")
    assert path.read_text() == old


def test_exact_texts_counts_no_text_of_another_run(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "exact_texts", Path(__file__).parents[2] / "benchmarks/exact_texts.py"
    )
    assert spec is not None and spec.loader is not None
    exact = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(exact)
    told = {"model": "bundled", "dtype": "float32", "out": tmp_path / "out.jsonl", "max_new_tokens": 4}
    options = argparse.Namespace(**told, cache_budget=64)
    journal, key = exact._journal(options, "a text", "cpu"), Key("trie", 0, "[0.0, 5]")
    journal.add(key, {"trie": {"texts": []}})
    with options.out.open("a") as file:
        file.write('{"key": ["tr')
    assert exact._journal(options, "a text", "cpu").find(key, ["trie"]) is not None
    for other, text in (({"dtype": "bfloat16"}, "a text"), ({"max_new_tokens": 5}, "a text"), ({}, "another")):
        with pytest.raises(SystemExit, match=r"error: .* was measured with"):
            exact._journal(argparse.Namespace(**(vars(options) | other)), text, "cpu")


def test_a_report_is_written_in_three_forms(series: list[Series], tmp_path: Path) -> None:
    paths = report.write(report.Result(report.summarise(series), {"rounds": 2}), tmp_path / "new", "speed")
    assert json.loads(paths[0].read_text())["rows"][0]["contestant"] == BASELINE
    assert "| forerun trie, warm |" in paths[1].read_text()
    assert paths[2].read_bytes()[:4] == b"\x89PNG"


def test_the_table_goes_between_the_readme_s_markers(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nb\n")
    report.into_readme(readme, "| new |\n", "bench")
    report.into_readme(readme, "| newer |\n", "bench")
    assert readme.read_text() == "a\n<!-- bench:begin -->\n\n| newer |\n\n<!-- bench:end -->\nb\n"
    with pytest.raises(ValueError, match="has no"):
        report.into_readme(readme, "", "other")


def test_jobs_are_seeded_and_say_what_they_cannot_do() -> None:
    tasks = continuations(Material())

    def encode(prompt: Prompt) -> list[int]:
        return list(str(prompt).encode())

    jobs, skipped = build_jobs(["json", "prose"], tasks, encode, Counts(2, 1, 8))
    again, _ = build_jobs(["json"], tasks, encode, Counts(2, 1, 8))
    assert [job.task for job in jobs] == ["json"]
    assert jobs == again
    assert len(jobs[0].prompts) == 2 and len(jobs[0].warm_prompts) == 1
    assert skipped == {"prose": "needs a text for prose (--books)"}
    with pytest.raises(ValueError, match="known are copy, json"):
        build_jobs(["verse"], tasks, encode, Counts(1, 0, 8))
    with pytest.raises(ValueError, match=r"task json, prompt 1: .* more than the model's 9 positions"):
        build_jobs(["json"], tasks, encode, Counts(1, 0, 8), positions=9)


def test_prompts_of_a_task_are_different_and_as_they_were_where_they_are() -> None:
    draw = continuations(Material(maths=(("a", "1"), ("b", "2"), ("c", "3"))))
    assert sorted(draw["maths"](3)) == ["a", "b", "c"]
    assert list(draw["maths"](3))[:2] == draw["maths"](2)
    with pytest.raises(ValueError, match="maths has 3 different prompts and 4 are needed; lower --prompts"):
        draw["maths"](4)
    assert draw["json"](9) == [make("table", Random(f"bench/json/{i}")).prompt for i in range(9)]


def test_the_mean_over_tasks_is_geometric_and_of_those_who_were_in_all_of_them() -> None:
    def row(task: str, contestant: str, speed_up: float, passes: float | None) -> report.Row:
        return {"task": task, "contestant": contestant, "speed_up": speed_up, "tokens_per_second": speed_up * 10,
                "tokens_per_pass": passes}  # fmt: skip

    rows = [row("a", "x", 2.0, 1.0), row("b", "x", 8.0, 4.0), row("a", "y", 1.0, None), row("b", "z", 3.0, 1.0)]
    assert [(mean["contestant"], mean["speed_up"], mean["tokens_per_pass"]) for mean in report.means(rows)] == [
        ("x", 4.0, 2.0)
    ]
    assert report.means(rows[:1]) == []
    assert "| x | 2.00x (1.00) | 8.00x (4.00) | 4.00x (2.00) |" in report.markdown(rows)
    assert "| y | 1.00x | - | - |" in report.markdown(rows)


def test_batches_give_the_texts_of_padded_ones_whatever_their_size() -> None:
    bench = Bench(tiny("llama"), ["none"])
    for size in (2, 4):
        series = bench.run_batches([*PROMPTS, PROMPTS[0]], size, 12, rounds=1)
        rows = report.summarise(series, PADDED)
        assert [row["contestant"] for row in rows] == [PADDED, "forerun none", "forerun trie"]
        assert all(row["same_output"] == 1 and row["texts"] == 4 for row in rows)
        assert len(series[0].runs) == 4 // size


@pytest.mark.parametrize(
    ("text", "selection"),
    [
        ("a.jsonl", Selection(Path("a.jsonl"))),
        ("a.jsonl:author=llm:gpt3:from=3:to=7", Selection(Path("a.jsonl"), "llm:gpt3", 3, 7)),
        ("dir/a:b.jsonl:to=2", Selection(Path("dir/a:b.jsonl"), None, 0, 2)),
        ("a.jsonl:author=human", Selection(Path("a.jsonl"), "human")),
    ],
)
def test_selections_are_parsed(text: str, selection: Selection) -> None:
    assert Selection.parse(text) == selection


def test_replay_of_an_answer_that_stands_in_the_prompt_takes_few_steps() -> None:
    text = list(range(100, 160))
    report = replay(build_drafter("lookup"), [Recorded([*text, 5000], text)], budget=10)
    assert report.tokens == 59
    assert len(report.drafted) == 6  # from the second token on ten drafted and one more, the last step four
    summary = report.summary()
    assert summary["edl"] == round(59 / 6, 4)
    assert summary["hit_rate"] == 1


def test_replay_without_drafts_has_one_token_a_step() -> None:
    summary = replay(build_drafter("none"), [Recorded([1, 2], [3, 4, 5])], budget=8).summary()
    assert summary["edl"] == 1
    assert summary["hit_rate"] == summary["drafted_per_step"] == 0


def test_a_warm_trie_replays_what_it_has_seen_in_fewer_steps() -> None:
    rows = [Recorded([1], list(range(10, 40)))]
    cold, warm = (replay(build_drafter("trie"), rows, 16, seen) for seen in ([], rows))
    assert len(cold.drafted) == 29
    assert len(warm.drafted) < 5


def test_the_replay_command_prints_one_json_object(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["unk", "a", "b", "c", "d", "e"])}, "unk"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "a b c", "answer": "a b c d e", "author": author} for author in ("x", "y", "x")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["replay", f"{file}:author=x:from=1", "--tokenizer", str(tmp_path / "tokenizer.json"), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--warm", f"{file}:author=y", "--budget", "8"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert {"edl", "drafted_per_step", "hit_rate", "retrieve_us", "update_us", "bytes_per_token"} <= set(summary)
    assert set(summary["retrieve_us"]) == {"p50", "p99", "max"}
    assert summary["edl"] == 4
    missing = CliRunner().invoke(app, ["replay", f"{file}:author=z", *arguments[2:]])
    assert missing.exit_code == 2
    assert "no row with author=z" in missing.stderr
    file.write_text('{"prompt": 1')
    broken = CliRunner().invoke(app, ["replay", str(file), *arguments[2:]])
    assert broken.exit_code == 2
    assert "rows.jsonl:1 is no JSON object" in broken.stderr
