"""``python -m benchmarks lookahead``: each part measures what it says, and is written when it is done; no time is
asserted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.mocks import draft, opened
from support.saved_models import save_model
from support.tiny import PROMPTS, tiny
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app
from benchmarks.papers import graded_questions, lookahead, sweeps
from benchmarks.papers.lookahead import QUICK, LookaheadSizes
from benchmarks.papers.lookahead_command import PARTS, LookaheadOptions
from benchmarks.papers.lookahead_methods import (
    FORMS,
    NAMESPACE,
    Known,
    Lengths,
    default,
    methods,
    plain,
    published,
    warmed,
)
from benchmarks.papers.pass_grid import pass_rows
from benchmarks.papers.peak_memory import peak_bytes, peaks, why_not
from benchmarks.papers.timed_trie import TimedTrie, Times
from benchmarks.papers.variants import VariantBench
from benchmarks.training.tasks import Material
from forerun.bench.rounds import BASELINE, PromptSet
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.decoding.sources.trie_source import TrieSource
from forerun.trie.trie import TrieConfig

CPU = torch.device("cpu")
LONG = PROMPTS[1]
"""Its text does not end at once."""
NO_SETUP: Any = None
"""What a trie is built with."""
LENGTHS = Lengths(decoding=6, branch=5)
MATHS = Material(maths=tuple((f"What is {i} and 1?", f"{i} and 1 is {i + 1}.") for i in range(9)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def bench() -> VariantBench:
    return VariantBench(tiny("llama"), ())


def measured(saved: str, out: Path, *more: str) -> Result:
    common = ["--quick", "--tasks", "json", "--focus", "json", "--dtype", "float64", "--out", str(out)]
    return CliRunner().invoke(app, ["papers", "lookahead", "-m", saved, *common, *more])


def test_every_part_is_measured_and_written_in_three_forms_and_no_text_changes(saved: str, tmp_path: Path) -> None:
    done = measured(saved, tmp_path, "-n", "64", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert tuple(found["parts"]) == PARTS == tuple(lookahead.PARTS)
    assert found == json.loads((tmp_path / "lookahead.json").read_text())
    rows = [row for part in found["parts"].values() for row in part]
    assert all(row["same_output"] == 1 for row in rows if "same_output" in row)
    for part in ("methods", "accuracy"):
        drafted = [row["same_as_plain"] for row in found["parts"][part] if row["contestant"].startswith("forerun")]
        assert drafted and set(drafted) == {1}
    text = (tmp_path / "lookahead.md").read_text()
    assert all(
        f"## {name}" in text for name in ("Table 2:", "Table 3:", "Table 4:", "Table 5:", "Table 6:", "Table 12:")
    )
    plots = {path.stem.removeprefix("lookahead-") for path in tmp_path.glob("*.png")}
    assert plots == {
        "methods", "updating-default", "updating-hierarchical", "capacity", "memory", "lengths-speed", "lengths-steps",
        "passes", "passes-ratio", "warmup", "batches",
    }  # fmt: skip


def test_what_was_measured_is_written_when_a_later_part_fails(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(bench: lookahead.LookaheadBench) -> None:
        raise ValueError("the power failed")

    monkeypatch.setitem(lookahead.PARTS, "warmup", fails)
    done = measured(saved, tmp_path, "--parts", "warmup,passes")
    assert done.exit_code == 2 and "the power failed" in done.stderr
    assert "## Figures 1 and 6" in done.stdout
    assert list(json.loads((tmp_path / "lookahead.json").read_text())["parts"]) == ["passes"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--parts", "methods,table"), "--parts has 'table'; known are methods, updating"),
        (("--tasks", "json,rhymes"), "task is 'rhymes'; known are copy, json"),
        (("--focus", "maths"), "--focus is 'maths', which needs a text for maths (--maths)"),
        (("--contexts", "99999", "--parts", "passes"), "a context of 99,999 tokens"),
        (("--capacities", "3"), "--capacities is '3'; no number may be below 64"),
        (("--branch-lengths", "8,999"), "none may exceed 256"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    saved: str, tmp_path: Path, given: tuple[str, ...], said: str
) -> None:
    done = measured(saved, tmp_path, *given)
    assert done.exit_code == 2 and said in " ".join(done.stderr.split())
    assert not list(tmp_path.iterdir())


def test_quick_takes_the_least_of_what_is_not_given() -> None:
    found = LookaheadOptions(quick=True, prompts=3, batches="5,1").sizes()
    assert (found.prompts, found.batches) == (3, (1, 5))
    assert (found.rounds, found.max_new_tokens) == (QUICK.rounds, QUICK.max_new_tokens)
    assert LookaheadOptions().sizes() == LookaheadSizes()
    usual = {"rounds": LookaheadSizes.rounds, "max_new_tokens": LookaheadSizes.max_new_tokens}
    assert LookaheadOptions(quick=True, contexts="128", **usual).sizes() == dataclasses.replace(
        QUICK, contexts=(128,), **usual
    )


def test_every_method_gives_the_text_of_plain_decoding_within_its_decoding_length(bench: VariantBench) -> None:
    prompt = LONG
    (text,) = bench.answers(plain(), [prompt], 24)
    known = Known([*PROMPTS[:1], *PROMPTS[2:]], bench.answers(default(()), [*PROMPTS[:1], *PROMPTS[2:]], 24))
    for name, variant in methods(LENGTHS, known).items():
        bench.variant(variant).prepare()
        found = bench.engine.generate([prompt], max_new_tokens=24, do_sample=False)
        assert found.generated == [text], name
        drafted = found.stats[0].drafted
        assert bench.engine.prune_drafts is variant.planned
        if name.removeprefix("forerun ") in FORMS:
            assert max(drafted) <= LENGTHS.decoding, name
    assert not variant.planned and max(drafted) == LENGTHS.decoding  # wrong drafts are scored all the same


def test_no_turn_sees_what_another_generated(bench: VariantBench) -> None:
    one = bench.variant(published("hierarchical", LENGTHS, ()))
    passes = []
    for _ in range(2):
        one.prepare()
        passes.append(one.run([LONG], 24).passes)
    assert passes[0] == passes[1]
    known = bench.answers(plain(), [LONG], 24)
    warm = bench.variant(published("hierarchical", LENGTHS, known))
    warm.prepare()
    fewer = warm.run([LONG], 24).passes
    assert fewer is not None and passes[0] is not None and fewer < passes[0]


def proposed(drafter: TrieSource, prompt: list[int], generated: list[int]) -> list[int]:
    """The tokens that follow a request's text, by its drafter."""
    row = opened(drafter, Request(prompt, 20))
    for token in generated:
        row.request.append(token)
    return [int(token) for token in draft(drafter, row, 8).tokens]


def kept_tokens(drafter: Any) -> int:
    return drafter.trie.tokens(NAMESPACE) if isinstance(drafter, TrieSource) else drafter.tokens(NAMESPACE)


def test_ablations_leave_out_what_they_say() -> None:
    prompt, text = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [21, 22, 23, 24]
    found = sweeps.by_updating(LENGTHS, Known([prompt], [text]))
    assert {row["update"] for row, _ in found.values()} == {
        "all", "without prompt", "without output", "pruned", "without eliminating"
    }  # fmt: skip
    for form in ("default", "hierarchical"):
        tries = {row["update"]: variant.make for row, variant in found.values() if row["form"] == form}
        fresh = {update: make(NO_SETUP) for update, make in tries.items()}
        held = {update: kept_tokens(drafter) for update, drafter in fresh.items()}
        assert held["all"] == held["without prompt"] == held["pruned"] == len(text)
        assert held["without output"] == 0 and held["without eliminating"] == len(prompt) + len(text)

        def after(update: str, request: list[int], generated: list[int]) -> list[int]:
            return proposed(tries[update](NO_SETUP), request, generated)  # type: ignore[arg-type]  # noqa: B023

        assert 10 in after("all", prompt, [8, 9]) and 10 not in after("without prompt", prompt, [8, 9])
        assert 23 in after("all", prompt, [21, 22]) and 23 not in after("without output", prompt, [21, 22])
        assert 10 not in after("all", [1, 2], [8, 9]) and 10 in after("without eliminating", [1, 2], [8, 9])


def test_without_output_nothing_generated_is_drafted_or_kept(bench: VariantBench) -> None:
    drafter = sweeps.WithoutOutputs(TrieConfig())
    bench.engine.prune_drafts, bench.engine.budget = False, 8
    bench.engine.set_drafter(drafter)
    bench.engine.generate([LONG], max_new_tokens=24, do_sample=False)
    assert drafter.trie.tokens(NAMESPACE) == 0


def test_a_capacity_bounds_what_a_trie_holds_and_its_steps_are_timed(bench: VariantBench) -> None:
    texts = np.random.default_rng(0).integers(0, 48, (40, 100)).tolist()
    times: dict[int, Times] = {}
    found = sweeps.by_capacity([1 << 16, 1 << 22], texts, times)
    (small, variant), (large, _) = found.values()
    assert large["held"] == 4000 and 0 < small["held"] < 4000 and small["bytes"] <= 1 << 16
    one = bench.variant(variant)
    one.prepare()
    run = one.run([LONG], 24)
    assert run.texts == bench.answers(plain(), [LONG], 24)
    assert run.passes is not None
    assert 0 < len(times[1 << 16].retrieve) <= len(times[1 << 16].update) <= run.passes


def test_a_timed_trie_drafts_what_it_would() -> None:
    request = Request([9, 1, 2], 8)
    clocked = warmed(TimedTrie(Times()), [[1, 2, 3, 4, 5]])
    row = opened(clocked, request)
    assert 3 in draft(clocked, row, 4).tokens
    assert len(clocked.times.retrieve) == 1 and not clocked.times.update
    request.append(3)
    clocked.learn([row], [Outcome(DraftTree.empty(), Verdict([], [3]), torch.empty(0, 0))])
    assert clocked.trie.length(request.id) == len(request) and len(clocked.times.update) == 1  # learned, and timed


def test_sweeps_have_every_setting() -> None:
    lengths = sweeps.by_lengths([2, 4], [4, 8], ())
    assert {(row["line"], row["decoding"]) for row, _ in lengths.values()} == {
        (line, decoding)
        for line in ("LLMA", "parallel, branch 4", "parallel, branch 8", "hierarchical, branch 4",
                     "hierarchical, branch 8", "merged", "default (planned)")
        for decoding in (2, 4)
    }  # fmt: skip
    assert all(variant.budget == row["decoding"] for row, variant in lengths.values())
    warmth = sweeps.by_warmth([0, 2], LENGTHS, [[1, 2], [3, 4], [5, 6]])
    held = {(row["line"], row["warm"]): variant.make(NO_SETUP) for row, variant in warmth.values()}
    assert kept_tokens(held["default", 0]) == 0
    assert kept_tokens(held["hierarchical", 2]) == 4


def test_padded_batches_are_those_of_the_bench() -> None:
    model = tiny("llama")
    rows = PROMPTS[:2]
    bench = VariantBench(model, ["none"])
    run = bench.transformers().run(rows, 12)
    (alone,) = bench.run(PromptSet("copy", rows, (), 12), 1)
    theirs = next(one for one in alone if one.contestant == BASELINE)
    assert run.texts == [rounds[0].texts[0] for rounds in theirs.runs]
    assert run.passes == max(len(text) for text in run.texts)


def test_passes_are_measured_for_every_batch_draft_and_context(bench: VariantBench) -> None:
    rows = pass_rows(bench.engine, [1, 3], [2, 5], [0, 9], rounds=2)
    assert {(row["context"], row["rows"], row["drafts"]) for row in rows} == {
        (context, size, drafts) for context in (0, 9) for size in (1, 3) for drafts in (0, 2, 5)
    }
    assert all(row["ratio_to_no_drafts"] == 1 for row in rows if not row["drafts"])


@pytest.mark.skipif(bool(why_not(CPU)), reason=why_not(CPU))
def test_a_peak_is_what_was_held_at_once() -> None:
    def hold() -> None:
        for _ in range(3):  # one after another
            np.ones(20_000_000, np.uint8)

    assert 19e6 < peak_bytes(hold, CPU) < 30e6
    assert peak_bytes(lambda: None, CPU) < 5e6


@pytest.mark.skipif(bool(why_not(CPU)), reason=why_not(CPU))
def test_peaks_have_a_figure_for_each_round(bench: VariantBench) -> None:
    found = peaks({0: bench.variant(plain()), 4: bench.variant(default(()))}, LONG, 8, 3, CPU)
    assert {name: len(each) for name, each in found.items()} == {0: 3, 4: 3}


@pytest.mark.parametrize("kind", graded_questions.KINDS)
def test_answers_are_graded(kind: str) -> None:
    answers: list[str] = []

    def fits(answer: str) -> bool:
        answers.append(answer)
        return len(answer) < 400

    found = graded_questions.questions(kind, 5, MATHS, fits)
    fitting = [answer for answer in dict.fromkeys(answers) if len(answer) < 400]
    assert len({question.prompt for question in found}) == 5
    for question in found:
        right = [question.right(answer) for answer in fitting]
        assert any(right) and not all(right)
        assert not question.right("")
    assert graded_questions.share_right(found, [""] * 5) == 0


def test_numbers_and_json_are_found_in_texts() -> None:
    assert graded_questions.last_number("so 3 of 1,250.50 are left.") == 1250.5
    assert graded_questions.last_number("It is -4, he said") == -4
    assert graded_questions.last_number("none") is None
    assert graded_questions.first_json('Here [it] is:\n[{"a": 1}]\nand more [2]') == [{"a": 1}]
    assert graded_questions.first_json("[1, 2") is None


def test_word_problems_need_a_file() -> None:
    with pytest.raises(graded_questions.LackingError, match="--maths"):
        graded_questions.questions("maths", 2, Material(), lambda answer: True)
