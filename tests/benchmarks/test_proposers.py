"""``python -m benchmarks proposers``: recorded answers are replayed as vLLM would decode them."""

import json

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.studies.proposers import Recorded, lookup, replay


def test_a_step_commits_the_accepted_prefix_and_one_token():
    drafts = {2: [2, 3, 9], 5: [5, 6, 7, 8]}
    calls: list[list[int]] = []

    def propose(sampled: list[list[int]], lengths: np.ndarray, rows: np.ndarray) -> list[list[int]]:
        calls.append(sampled[0])
        return [drafts.get(int(lengths[0]), [])]

    found = replay([Recorded([0], [1, 2, 3, 4, 5, 6, 7])], propose)
    assert calls == [[1], [2, 3, 4]]
    assert (found["tokens_per_step"], found["drafted"], found["accepted"]) == (3.0, 3.5, "71%")


def test_lookup_returns_what_followed_the_first_occurrence_of_the_longest_suffix():
    text = np.array([[1, 2, 3, 9, 2, 3, 5, 1, 2, 3]])
    assert lookup(3, 1, 2)([], np.array([10]), text) == [[9, 2]]
    assert lookup(5, 5, 2)([], np.array([10]), text) == [[]]


def test_the_command_prints_a_line_for_each_proposer(tmp_path):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["unk", "a", "b", "c", "d", "e"])}, "unk"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    rows = [{"prompt": "a b c", "answer": "a b c d e", "author": author} for author in ("x", "y", "x")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["proposers", "--replay", str(tmp_path / "rows.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    done = CliRunner().invoke(app, [*arguments, "--author", "x", "--least", "0"])
    assert done.exit_code == 0, done.output
    table = done.stdout.splitlines()
    assert [line.split(" | ")[1] for line in table[2:]] == ["ngram 5-5", "ngram 3-1", "forerun 0"]
    assert all(line.startswith("| rows.jsonl, 2 rows |") for line in table[2:])
    none = CliRunner().invoke(app, [*arguments, "--author", "z"])
    assert none.exit_code == 2 and "no row has an answer of two tokens" in none.stderr
