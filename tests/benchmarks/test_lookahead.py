"""The Lookahead paper's forms of a draft and the methods of its tables change no output; no time is asserted."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.mocks import opened
from support.saved_models import save_model
from support.tiny import PROMPTS, tiny
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.papers.lookahead import FORMS, Lengths, MethodBench, default, methods, plain, published
from benchmarks.papers.lookahead_trie import RECIPES, Form, LookaheadTrieConfig, LookaheadTrieSource
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.decoding.recipes import build
from forerun.engine.engine import Engine

LONG = PROMPTS[1]
"""Its text does not end at once."""
LENGTHS = Lengths(decoding=6, branch=5)


def paths(tree: DraftTree) -> list[tuple[int, ...]]:
    nodes: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        nodes.append((*(() if parent == ROOT else nodes[parent]), token))
    return nodes


def draft(form: Form, budget: int) -> DraftTree:
    drafter = LookaheadTrieSource(LookaheadTrieConfig(form=form))
    drafter.warm("default", [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6]])
    return drafter.draft(opened(drafter, Request([9, 1], 20)), budget)


@pytest.mark.parametrize(("form", "budget", "expected"), [
    pytest.param("hierarchical", 10, [(2,), (2, 3), (2, 3, 4), (2, 5), (6,)], id="hierarchical: prefixes are merged"),
    pytest.param("parallel", 6, [(2,), (2,), (2, 3), (2, 3, 4), (2, 5), (6,)], id="parallel: prefixes are repeated"),
    pytest.param("single", 10, [(2,), (2, 3), (2, 3, 4)], id="single: one chain of the most frequent"),
])  # fmt: skip
def test_each_form_drafts_the_heaviest_first_within_the_budget(form, budget, expected):
    tree = draft(form, budget)
    assert sorted(paths(tree)) == expected and paths(tree)[0] == (2,)
    assert len(draft(form, 2)) == 2


def test_the_own_text_weighs_more_and_longer_contexts_come_first():
    drafter = LookaheadTrieSource(LookaheadTrieConfig(prompt_weight=3.0))
    drafter.warm("default", [[6, 1, 7], [6, 1, 7]])
    row = opened(drafter, Request([1, 8, 5, 1], 2))
    assert drafter.draft(row, 2).tokens.tolist() == [8, 7]
    longer = opened(drafter, Request([2, 1, 4, 1, 3, 1, 3, 2, 1], 20))
    assert drafter.draft(longer, 1).tokens.tolist() == [4]


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.3, "seed": 11}])
def test_outputs_are_those_without_drafts_and_some_drafts_are_accepted(sampling: dict[str, Any]):
    engine = Engine(tiny("llama"), "none", prune_drafts=False)
    options = {"max_new_tokens": 60, "eos_token_id": None, **sampling}
    wanted = engine.generate([*PROMPTS], **options).generated
    engine.set_drafter(lambda setup: build("lookahead-trie", setup, RECIPES))
    result = engine.generate([*PROMPTS], **options)
    assert result.generated == wanted
    assert sum(sum(stats.accepted) for stats in result.stats) > 0


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
