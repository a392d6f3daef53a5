"""Replay of recorded answers: what is counted, which rows are read, and what it costs is reported."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.papers.lookahead_trie import LookaheadTrieSource
from benchmarks.studies.replay import EagerTrie, Recorded, Selection, replay
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.sources.lookup import Lookup
from forerun.decoding.sources.trie_source import TrieSource


class Scripted(Source):
    """Drafts the chain that it was given for the answer's position, and records what it observes."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self.drafts = drafts
        self.observed: list[list[int]] = []

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [self._draft(row.request, limit.nodes) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, request: Request, budget: int) -> DraftTree:
        return DraftTree.chain(self.drafts.get(len(request.generated), [])[:budget])

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        [(request, outcome)] = [(row.request, outcome) for row, outcome in zip(rows, outcomes, strict=True)]
        assert request.generated.tolist()[-len(outcome.verdict.tokens) :] == outcome.verdict.tokens
        self.observed.append(outcome.verdict.tokens)


class Ready(EagerTrie):
    """Has learned all of a text when it is asked for drafts, and when the text ends."""

    asked = ended = 0

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        self.asked += 1
        if not all(self.trie.length(row.request.id) == len(row.request) for row in rows):
            pytest.fail("not all is learned")
        return super().propose(rows, limits)

    def close(self, text: Any) -> None:
        self.ended += 1
        assert self.trie.length(text.request.id) == len(text.request)
        super().close(text)


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_step_commits_the_accepted_path_and_one_token_more() -> None:
    drafter = Scripted({1: [2, 3, 9], 4: [5, 6]})
    report = replay(drafter, [Recorded([0], [1, 2, 3, 4, 5, 6, 7])], 8)
    assert drafter.observed == [[1], [2, 3, 4], [5, 6, 7]]
    assert report.accepted == [2, 2]
    assert report.drafted == [3, 2]
    assert report.summary()["tokens_per_step"] == 3.0


def test_nothing_is_accepted_behind_the_answers_end() -> None:
    drafter = Scripted({1: [2, 3, 4, 5]})
    report = replay(drafter, [Recorded([0], [1, 2, 3])], 8)
    assert drafter.observed == [[1], [2, 3]]
    assert report.accepted == [2]
    assert report.tokens == 2


def test_without_drafts_every_step_commits_one_token() -> None:
    summary = replay(None, [Recorded([0], [1, 2, 3]), Recorded([0], [4]), Recorded([0], [5, 6])], 8).summary()
    assert (summary["tokens_per_step"], summary["steps"], summary["tokens"], summary["hit_rate"]) == (1.0, 3, 3, 0.0)


@pytest.mark.parametrize("make", [TrieSource, EagerTrie, LookaheadTrieSource])
def test_what_was_answered_before_is_drafted_again(make: Callable[[], Source]) -> None:
    answer = [7 * i % 101 for i in range(60)]
    cold = replay(make(), [Recorded([200], answer)], 16).summary()
    warm = replay(make(), [Recorded([200], answer)], 16, [Recorded([201], answer)]).summary()
    assert float(str(warm["tokens_per_step"])) > 3 > float(str(cold["tokens_per_step"]))


def test_the_state_carries_over_from_row_to_row_and_prompts_do_not() -> None:
    answer = list(range(1, 41))
    rows = [Recorded([200], answer), Recorded([201], answer)]
    assert replay(TrieSource(), rows, 16).tokens == 78
    again = replay(TrieSource(), rows, 16)
    assert len(again.drafted) < 60
    prompts = replay(TrieSource(), [Recorded(answer, [50, 51, 52]), Recorded([0], answer)], 16)
    assert len(prompts.drafted) > 35


def test_the_summary_reports_percentiles_of_times_and_bytes_per_token() -> None:
    summary = replay(TrieSource(), [Recorded([1, 2], list(range(50)))] * 3, 8, [Recorded([0], [1, 2])]).summary()
    for key in ("retrieve_us", "update_us", "prompt_us"):
        times = summary[key]
        assert isinstance(times, dict)
        assert 0 < times["p50"] <= times["p99"] <= times["max"]
    assert float(str(summary["bytes_per_token"])) > 4
    assert float(str(summary["drafted_per_step"])) <= 8


def test_a_trie_learns_in_the_time_of_its_updates() -> None:
    source = Ready()
    assert replay(source, [Recorded([1, 2], list(range(50)))] * 2, 8).tokens == 98
    assert source.asked > 2 == source.ended


def test_replay_of_an_answer_that_stands_in_the_prompt_takes_few_steps() -> None:
    text = list(range(100, 160))
    report = replay(Lookup(), [Recorded([*text, 5000], text)], budget=10)
    assert report.tokens == 59
    assert len(report.drafted) == 6  # from the second token on ten drafted and one more, the last step four
    summary = report.summary()
    assert summary["tokens_per_step"] == round(59 / 6, 4)
    assert summary["hit_rate"] == 1


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


def write(path: Path) -> Path:
    rows = [{"prompt": "p", "answer": f"{i}", "author": "a:b" if i % 2 else "c"} for i in range(10)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("suffix", "answers"),
    [
        ("", "0123456789"),
        (":author=a:b", "13579"),
        (":author=a:b:from=1:to=3", "35"),
        (":from=8", "89"),
        (":to=2", "01"),
        (":author=c:from=3:to=99", "68"),
    ],
)
def test_a_selection_reads_the_rows_that_it_names(tmp_path: Path, suffix: str, answers: str) -> None:
    rows = Selection.parse(f"{write(tmp_path / 'rows.jsonl')}{suffix}").read(encode)
    assert [row.answer for row in rows] == [encode(letter) for letter in answers]
    assert all(row.prompt == encode("p") for row in rows)


@pytest.mark.parametrize("suffix", [":author=nobody", ":from=10", ":from=3:to=3"])
def test_a_selection_without_rows_is_refused(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ValueError, match="has no row with"):
        Selection.parse(f"{write(tmp_path / 'rows.jsonl')}{suffix}").read(encode)


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"prompt": "p"}', '{"prompt": 1, "answer": "a"}'])
def test_a_line_that_is_no_row_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n' + line, encoding="utf-8")
    with pytest.raises(ValueError, match=r"rows.jsonl:2 is no JSON object"):
        Selection.parse(str(path)).read(encode)


def test_rows_without_a_prompt_are_left_out() -> None:
    assert replay(TrieSource(), [Recorded([], [1, 2, 3])], 8).tokens == 0


def test_a_drafter_that_keeps_nothing_is_not_warmed() -> None:
    with pytest.raises(ValueError, match="cannot be warmed"):
        replay(None, [Recorded([0], [1, 2])], 8, [Recorded([0], [1, 2])])


def test_the_replay_command_prints_one_json_object(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["unk", "a", "b", "c", "d", "e"])}, "unk"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "a b c", "answer": "a b c d e", "author": author} for author in ("x", "y", "x")]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["replay", f"{file}:author=x:from=1", "--tokenizer", str(tmp_path / "tokenizer.json"), "--json"]
    done = CliRunner().invoke(app, [*arguments, "--warm", f"{file}:author=y", "--budget", "8"])
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert {"tokens_per_step", "drafted_per_step", "hit_rate", "retrieve_us", "update_us", "bytes_per_token"} <= set(
        summary
    )
    assert set(summary["retrieve_us"]) == {"p50", "p99", "max"}
    assert summary["tokens_per_step"] == 4
    missing = CliRunner().invoke(app, ["replay", f"{file}:author=z", *arguments[2:]])
    assert missing.exit_code == 2
    assert "no row with author=z" in missing.stderr
    file.write_text('{"prompt": 1')
    broken = CliRunner().invoke(app, ["replay", str(file), *arguments[2:]])
    assert broken.exit_code == 2
    assert "rows.jsonl:1 is no JSON object" in broken.stderr
