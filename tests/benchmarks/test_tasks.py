"""``python -m benchmarks tasks`` and ``exact-texts``: what is asked and refused; no time is asserted."""

import json
from random import Random

import pytest
from support.tiny import PROMPTS, tiny
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.reporting.update_pages import into_page, slowness_table
from benchmarks.tasks.continuations import continuations
from benchmarks.tasks.task_bench import TaskBench
from benchmarks.tasks.task_prompts import Counts, build_jobs
from benchmarks.training.tasks import Material, make
from forerun.bench.prompts_file import Prompt
from forerun.bench.rounds import PromptSet, Rows
from forerun.engine.engine import Engine


def test_what_is_skipped_is_of_any_job_and_answers_nothing(monkeypatch):
    cold, warm = PromptSet("copy", PROMPTS[:1], [], 2), PromptSet("json", PROMPTS[:1], PROMPTS[1:2], 2)
    bench = TaskBench(tiny("llama"), ["trie"], skip=["forerun trie, warm"])
    bench.check_skip([cold, warm])
    with pytest.raises(ValueError, match="--skip has 'forerun trie, warm'"):
        bench.check_skip([cold])
    asked: list[Rows] = []
    generate = Engine.generate
    monkeypatch.setattr(Engine, "generate", lambda self, ids, **how: (asked.append(ids), generate(self, ids, **how))[1])
    (series,) = bench.run(warm, 1)
    assert "forerun trie, warm" not in [each.contestant for each in series]
    assert "forerun, wrong drafts" in [each.contestant for each in series]
    assert asked and all(rows == [PROMPTS[0]] for rows in asked)


def test_a_wrong_name_leaves_a_journal_as_it_is(tmp_path):
    (tmp_path / "speed-turns.jsonl").write_text("hours of work")
    few = ("-k", "json", "--prompts", "1", "--warm-prompts", "0", "-n", "2", "--out", str(tmp_path))
    for wrong, said in (
        (("-d", "magic"), "drafter is 'magic'"),
        (("-d", "none", "--skip", "forerun magic"), "--skip has 'forerun magic'"),
    ):
        done = CliRunner().invoke(app, ["tasks", "--device", "cpu", *few, *wrong])
        assert done.exit_code == 2 and said in done.stderr
    assert (tmp_path / "speed-turns.jsonl").read_text() == "hours of work"


def test_the_table_goes_between_the_readme_s_markers(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- bench:begin -->\nold\n<!-- bench:end -->\nb\n")
    into_page(readme, "| new |\n", "bench")
    into_page(readme, "| newer |\n", "bench")
    assert readme.read_text() == "a\n<!-- bench:begin -->\n\n| newer |\n\n<!-- bench:end -->\nb\n"
    with pytest.raises(ValueError, match="has no"):
        into_page(readme, "", "other")


def test_the_table_of_what_is_never_slower_marks_what_breaks_the_promise(tmp_path):
    row = {"context": 2000, "batch": 4, "temperature": 0.0, "median": 1.5, "worst": 0.94, "of_best": 0.96}
    row["plain_against_itself"] = [1.0] * 5
    rows = [row | {"kind": "tasks"}, row | {"kind": "novel", "temperature": 0.8, "median": 0.969, "worst": 0.925}]
    slower = tmp_path / "a.json"
    slower.write_text(json.dumps({"settings": {"model": "some/Small", "dtype": "bfloat16"}, "rows": rows}))
    less = tmp_path / "b.json"
    rows = [row | {"kind": "tasks", "batch": 1, "of_best": 0.94, "plain_against_itself": [1.0, 1.01]}]
    less.write_text(json.dumps({"settings": {"model": "bundled", "dtype": "auto"}, "rows": rows}))
    lines = slowness_table([slower, less]).splitlines()
    assert lines[0] == "|  | tasks | novel, T 0.8 |"
    assert lines[2] == "| Small, bfloat16: 2,000 x 4 | 1.50 (0.94) | **0.97** (**0.93**) |"
    assert lines[3] == "| bundled: 2,000 x 1 | 1.50† (0.94)² | - |"


def test_jobs_are_seeded_and_say_what_they_cannot_do():
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


def test_prompts_of_a_task_are_different_and_as_they_were_where_they_are():
    draw = continuations(Material(maths=(("a", "1"), ("b", "2"), ("c", "3"))))
    assert sorted(draw["maths"](3)) == ["a", "b", "c"]
    assert list(draw["maths"](3))[:2] == draw["maths"](2)
    with pytest.raises(ValueError, match="maths has 3 different prompts and 4 are needed; lower --prompts"):
        draw["maths"](4)
    assert draw["json"](9) == [make("table", Random(f"bench/json/{i}")).prompt for i in range(9)]


def test_the_command_measures_tasks_on_any_model(tmp_path):
    arguments = ["--model", "bundled-draft", "--dtype", "float64", "-k", "json", "-k", "copy", "--prompts", "1"]
    more = ["--warm-prompts", "0", "--rounds", "1", "-n", "12", "-d", "trie", "--json"]
    done = CliRunner().invoke(app, ["tasks", *arguments, *more, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["task"] for row in found["rows"]} == {"json", "copy"}
    assert {row["same_output"] for row in found["rows"]} == {1.0}
    assert found["settings"]["dtype"] == "float64"
    markdown = (tmp_path / "out" / "speed.md").read_text()
    assert "geometric mean" in markdown and "processor" in markdown and "max new tokens 12" in markdown
