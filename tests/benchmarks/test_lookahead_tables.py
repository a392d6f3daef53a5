"""``python -m benchmarks papers lookahead``: every method yields the text of plain decoding; no time is asserted."""

import json
from pathlib import Path

import pytest
from support.saved_models import save_model
from support.tiny import PROMPTS, tiny
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.papers.lookahead import FORMS, Lengths, MethodBench, default, methods, plain, published

LONG = PROMPTS[1]
"""Its text does not end at once."""
LENGTHS = Lengths(decoding=6, branch=5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def bench() -> MethodBench:
    return MethodBench(tiny("llama"), ())


def measured(saved: str, out: Path, *more: str) -> Result:
    few = ["--prompts", "1", "--warm-prompts", "2", "--rounds", "1", "-n", "24"]
    common = ["-m", saved, "--tasks", "json", "--dtype", "float64", "--out", str(out), *few]
    return CliRunner().invoke(app, ["papers", "lookahead", *common, *more])


def test_all_methods_are_measured_and_written_in_three_forms_and_no_text_changes(saved, tmp_path):
    done = measured(saved, tmp_path, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "lookahead.json").read_text())
    rows = found["parts"]["methods"]
    assert {*methods(LENGTHS, ())} <= {row["contestant"] for row in rows}
    assert {row["same_output"] for row in rows} == {1}
    assert {row["same_as_plain"] for row in rows if row["contestant"].startswith("forerun")} == {1}
    assert "## Table 2:" in (tmp_path / "lookahead.md").read_text()
    assert [path.name for path in tmp_path.glob("*.png")] == ["lookahead-methods.png"]


def test_every_method_yields_the_text_of_plain_decoding_within_its_decoding_length(bench):
    (text,) = bench.answers(plain(), [LONG], 24)
    answers = bench.answers(default(()), [*PROMPTS[:1], *PROMPTS[2:]], 24)
    for name, method in methods(LENGTHS, answers).items():
        bench.contestant(method).prepare()
        found = bench.engine.generate([LONG], max_new_tokens=24, do_sample=False)
        assert found.generated == [text], name
        drafted = found.stats[0].drafted
        assert bench.engine.prune_drafts is method.pruned
        if name.removeprefix("forerun ") in FORMS:
            assert max(drafted) <= LENGTHS.decoding, name
    assert not method.pruned and max(drafted) == LENGTHS.decoding  # wrong drafts are scored all the same


def test_no_turn_sees_what_another_generated(bench):
    one = bench.contestant(published("hierarchical", LENGTHS, ()))
    passes = []
    for _ in range(2):
        one.prepare()
        passes.append(one.run([LONG], 24).passes)
    assert passes[0] == passes[1]
    known = bench.answers(plain(), [LONG], 24)
    warm = bench.contestant(published("hierarchical", LENGTHS, known))
    warm.prepare()
    fewer = warm.run([LONG], 24).passes
    assert fewer is not None and passes[0] is not None and fewer < passes[0]
