"""Contestants in interleaved rounds: medians, spread, equal texts, the journal and the report; no time is asserted."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from support.tiny import HYBRIDS, PROMPTS, build, tiny
from transformers import LlamaConfig, LlamaForCausalLM

from forerun.bench import report
from forerun.bench.contestants import Bench
from forerun.bench.journal import Journal, TurnKey, about
from forerun.bench.rounds import BASELINE, PLAIN, Contestant, PromptSet, Rows, Run, Series, measure
from forerun.core.long_context import LongContextConfig
from forerun.decoding.recipes import trie_of


def last(rounds: Iterable[list[Series]]) -> list[Series]:
    *_, found = rounds
    return found


@pytest.fixture(scope="module")
def series() -> list[Series]:
    prompts = PromptSet("copy", PROMPTS[:2], PROMPTS[:2], 30)
    settings = LongContextConfig(draft_model=tiny("llama"))
    return last(Bench(tiny("llama"), ["none", "lookup", "trie"], settings).run(prompts, rounds=2))


def test_every_contestant_gives_the_baseline_s_text(series):
    rows = report.summarise(series)
    by_name = {row["contestant"]: row for row in rows}
    assert by_name.keys() == {
        BASELINE, "transformers prompt lookup", "transformers assisted", PLAIN, "forerun lookup", "forerun trie",
        "forerun trie, warm",
    }  # fmt: skip
    assert all(row["same_output"] == 1 and row["first_token_ms"] > 0 for row in rows)
    assert {row["same_as_plain"] for row in rows} == {1, None}
    assert all(0 < run.first <= run.seconds for one in series for rounds in one.runs for run in rounds)
    assert by_name[PLAIN]["tokens_per_step"] == by_name[BASELINE]["tokens_per_step"] == 1
    assert by_name["forerun trie, warm"]["tokens_per_step"] > 1  # it has seen these very answers


def test_a_text_that_differs_from_plain_forerun_is_counted_apart_from_transformers():
    texts = {BASELINE: [1, 2], PLAIN: [1, 3], "forerun x": [1, 2]}
    rows = report.summarise([Series(name, "t", [[Run([text], 1.0, 1)]]) for name, text in texts.items()])
    by_name = {row["contestant"]: (row["same_as_plain"], row["same_output"]) for row in rows}
    assert by_name == {BASELINE: (None, 1), PLAIN: (1, 0), "forerun x": (0, 1)}
    assert report.changed(rows) == ["forerun x"]
    assert "| forerun x | - | 2.00 | 0 % | 100 % |" in report.equality_table(rows)


def test_few_rounds_are_said_to_rank_nothing_and_the_spread_is_shown(series, monkeypatch):
    monkeypatch.setattr(report, "BUSY", 2.0)  # the tests' machine may be busy
    text = report.BenchResult(report.summarise(series), {}).markdown
    assert "Fewer than 5 rounds: ranks may be noise." in text
    assert " to " in text.splitlines()[2] and text.splitlines()[3].count("x (") == 1
    five = [Series(name, "t", [[Run([[1]], 1.0, 1)] * 5]) for name in (BASELINE, PLAIN)]
    assert "noise" not in report.BenchResult(report.summarise(five), {}).markdown


def test_contestants_are_left_out_by_name():
    prompts = PromptSet("copy", PROMPTS[:1], [], 2)
    some = last(Bench(tiny("llama"), ["none"], skip=["transformers prompt lookup"]).run(prompts, 1))
    assert [each.contestant for each in some] == [BASELINE, PLAIN]
    for name in ("forerun auto", BASELINE, PLAIN):
        with pytest.raises(ValueError, match=f"--skip has '{name}'; known are 'transformers prompt lookup'"):
            Bench(tiny("llama"), ["none"], skip=[name]).check_skip([prompts])


def test_what_transformers_refuses_with_these_models_is_left_out_with_the_reason():
    prompts = PromptSet("copy", PROMPTS[:1], [], 2)
    hybrid = Bench(build(*HYBRIDS["qwen3_5"], seed=1), ["none"])
    assert [each.contestant for each in last(hybrid.run(prompts, 1))] == [BASELINE, PLAIN]
    assert "recurrent layers" in hybrid.refused["transformers prompt lookup"]
    model = tiny("llama")
    smaller = LlamaForCausalLM(LlamaConfig(**model.config.to_dict() | {"vocab_size": 40})).eval()
    pair = Bench(model, ["none"], LongContextConfig(draft_model=smaller))
    assert [each.contestant for each in last(pair.run(prompts, 1))] == [BASELINE, "transformers prompt lookup", PLAIN]
    assert pair.refused == {"transformers assisted": "transformers wants equal vocabularies, and these have 48 and 40"}


def test_a_contestant_that_cannot_be_built_or_run_is_named():
    with pytest.raises(ValueError, match="contestant triforce: this drafter needs a small model"):
        Bench(tiny("llama"), ["none", "triforce"])

    def fails(rows: Rows, max_new_tokens: int) -> Run:
        raise ValueError("no room")

    with pytest.raises(ValueError, match="contestant bad: no room"):
        last(measure({"bad": Contestant(fails)}, "t", [[[1]]], 4, 1))


def one(*runs: tuple[list[int], float], name: str = "x", task: str = "t") -> Series:
    """Of one prompt: each round's text and seconds, in five steps."""
    return Series(name, task, [[Run([text], seconds, 5) for text, seconds in runs]])


def test_speed_is_the_median_and_spread_the_extremes_and_texts_of_every_round_are_compared():
    found = one(*(([1] * 10, seconds) for seconds in (1.0, 2.0, 4.0)))
    assert (found.tokens_per_second, found.spread, found.tokens_per_step) == (5, (2.5, 10), 2)
    assert one(([1, 2], 2), ([1, 3], 2), ([1, 2], 2)).same_texts(one(*[([1, 2], 2)] * 3)) == 2 / 3
    assert one(([1], 2), ([1, 2, 3, 4], 2), ([1, 2, 3, 4], 2)).tokens_per_second == 2


def test_a_token_a_minute_is_a_figure_too():
    """As after a long prompt on a CPU, whose prefill counts."""
    slow = ([1] * 16, 400.0), ([1] * 16, 900.0)
    rows = report.summarise([one(*slow, name=name, task=task) for task in ("a", "b") for name in (BASELINE, PLAIN)])
    table = report.speed_table(rows)
    assert "| 0.025 tokens/s (0.018 to 0.04) |" in table and "1.00x (0.72 to 1.62)" in table and "geometric" in table


@torch.inference_mode()
def test_a_warm_drafter_is_copied_without_the_model(monkeypatch):
    """In float32 that is a program, which cannot be copied."""
    model = tiny("llama", torch.float32)
    bench = Bench(model, ["trie"])
    bench.engine.set_drafter("trie")
    bench.generate([PROMPTS[0]], 20)
    monkeypatch.setattr(type(bench.engine.target), "__deepcopy__", lambda *given: pytest.fail("copied"), raising=False)
    warm = copy.deepcopy(trie_of(bench.engine.level))
    found = last(bench.run(PromptSet("copy", PROMPTS[:1], PROMPTS[:1], 20), 1))
    assert report.summarise(found) and warm is not trie_of(bench.engine.level)


def test_a_bench_that_was_ended_goes_on_where_it_was(tmp_path):
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

    def measured(contestants: dict[str, Contestant], length: int, rounds: int, resume: bool = True) -> list[Series]:
        journal = Journal(path, {"dtype": "x"}, resume=resume)
        return last(measure(contestants, "t", [[[1, 2]], [[3]]], length, rounds, journal))

    with pytest.raises(KeyboardInterrupt):  # two runs to warm up, three turns, and half a turn
        measured(two, 9, 2, resume=False)
    with path.open("a") as file:
        file.write('{"key": ["t", 1')  # what a process leaves that is killed as it writes
    again = measured(two, 9, 2)
    assert len(runs) == 9 + 2 + 2
    assert [[run.seconds for run in rounds] for rounds in again[0].runs] == [[3.0, 8.0], [6.0, 12.0]]
    measured(two, 9, 2)
    assert len(runs) == 13
    measured(two | {"c": contestant("c")}, 9, 1)
    assert len(runs) == 13 + 3 + 6
    measured(two, 8, 1)
    assert len(runs) == 22 + 2 + 4  # other texts


def test_a_journal_of_something_else_is_not_gone_on_with(tmp_path):
    path = tmp_path / "turns.jsonl"
    journal = Journal(path, {"dtype": "float32"})
    journal.add(TurnKey.of("t", 0, [[1]], 4), {"a": {"seconds": 1.0}})
    with pytest.raises(ValueError, match="measured with dtype 'float32' and this is 'bfloat16'; give another --out"):
        Journal(path, {"dtype": "bfloat16"}, resume=True)
    assert Journal(path, {"dtype": "float32"}).find(TurnKey.of("t", 0, [[1]], 4), ["a"]) is None  # begun anew
    path.write_text("# a page\n")
    with pytest.raises(ValueError, match="is not a bench's journal"):
        Journal(path, {}, resume=True)


def test_a_journal_tells_warm_prompts_devices_and_sources_apart(tmp_path):
    path = tmp_path / "turns.jsonl"
    bench = Bench(tiny("llama"), ["trie"])
    for seen, lines in ((PROMPTS[1:2], 2), (PROMPTS[1:2], 2), (PROMPTS[2:3], 3)):
        list(bench.run(PromptSet("copy", PROMPTS[:1], seen, 2), 1, Journal(path, {}, resume=True)))
        assert len(path.read_text().splitlines()) == lines


def test_a_bench_is_about_a_device_sources_and_the_model_s_files(tmp_path):
    this = about("bundled", "float32", "cpu")
    assert about("bundled", "float32", "cpu") == this and len(this["sources"]) == 16
    (tmp_path / "more.py").write_text("")
    model = tmp_path / "model"
    tiny("llama").save_pretrained(model)
    before = about(str(model), "float32", "cpu")
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    others = about("bundled", "float32", "cuda:0"), about("bundled", "float32", "cpu", tmp_path)
    for old, new in ((this, others[0]), (this, others[1]), (before, about(str(model), "float32", "cpu"))):
        assert sum(old[name] != value for name, value in new.items()) == 1


def test_a_report_that_is_not_written_to_its_end_leaves_the_old_one(series, tmp_path, monkeypatch):
    (path, *_) = report.write(report.BenchResult(report.summarise(series), {"rounds": 2}), tmp_path, "speed")
    old, write = path.read_text(), Path.write_text

    def cut(self: Path, text: str) -> int:
        write(self, text[:9])
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "write_text", cut)
    with pytest.raises(OSError, match="the disk is full"):
        report.write(report.BenchResult(report.summarise(series), {"rounds": 3}), tmp_path, "speed")
    assert path.read_text() == old


def test_a_report_is_written_in_three_forms(series, tmp_path):
    paths = report.write(report.BenchResult(report.summarise(series), {"rounds": 2}), tmp_path / "new", "speed")
    assert json.loads(paths[0].read_text())["rows"][0]["contestant"] == BASELINE
    assert "| forerun trie, warm |" in paths[1].read_text()
    assert paths[2].read_bytes()[:4] == b"\x89PNG"


def test_the_mean_over_tasks_is_geometric_and_of_those_who_were_in_all_of_them():
    told = ("a", "x", 2.0, 1.0), ("b", "x", 8.0, 4.0), ("a", "y", 1.0, None), ("b", "z", 3.0, 1.0)
    names = ("task", "contestant", "speed_up", "tokens_per_step")
    rows = [{**dict(zip(names, row, strict=True)), "tokens_per_second": row[2] * 10} for row in told]
    (mean,) = report.means(rows)
    assert (mean["contestant"], mean["speed_up"], mean["tokens_per_step"]) == ("x", 4.0, 2.0)
    assert report.means(rows[:1]) == []
    assert "| x | 2.00x | 8.00x | 4.00x |" in report.speed_table(rows)
    assert "| y | 1.00x | - | - |" in report.speed_table(rows)
