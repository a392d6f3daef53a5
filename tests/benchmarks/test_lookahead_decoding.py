"""JacobiSource against the paper's algorithm written out, and in the loop against the slow generator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mocks import PROMPT, SAMPLERS, MockScorer, MockTarget, draft, generate, opened, oracle, paths, step

from benchmarks.papers.lookahead_decoding import JacobiConfig, JacobiSource, best_config, expected_tokens, fitted_jacobi
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, verify
from forerun.decoding.recipes import Setup
from forerun.decoding.row import Row
from forerun.models.forward.runtime import default_runtime
from forerun.policy.cost_curve import CostCurve


class WholeContextTarget(MockTarget):
    """Its logits depend on every token before, so a node that hangs anywhere else has other logits."""

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(tuple(context)) % (1 << 31))
        return torch.randn(self.table.shape[-1], generator=generator)

    def best(self, context: Sequence[int]) -> int:
        return int(self.logits(context).argmax())


class Paper:
    """Fu et al.'s lookahead branch, written out: guesses as lists, contexts as lists, the pool as lists.

    ``levels[0]`` leaves out column 0, the last token of the text, as the authors' code does.
    """

    def __init__(self, config: JacobiConfig, first_guesses: list[int]) -> None:
        self.config = config
        self.levels = [first_guesses]
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def column(self, text: list[int], i: int) -> list[int]:
        """The tokens of column i, from the top."""
        top = [text[-1], *self.levels[0]][i]
        return [top, *(level[i] for level in self.levels[1:])]

    def context(self, text: list[int], i: int) -> list[int]:
        """What the last guess of column i follows, itself included: the text, level 0 up to column i, the column."""
        return [*text, *self.levels[0][:i], *self.column(text, i)[1:]]

    def step(self, target: WholeContextTarget, text: list[int]) -> None:
        """One Jacobi iteration after ``text``, before it grows."""
        columns = len(self.levels[0]) + 1
        new = [target.best(self.context(text, i)) for i in range(columns)]
        if len(self.levels) < self.config.ngram - 1:
            self.levels = [self.levels[0][1:], *(level[1:] for level in self.levels[1:]), new[1:]]
            return
        for i in range(columns):
            first, *rest = [*self.column(text, i), new[i]]
            known = self.pool.setdefault(first, [])
            if tuple(rest) in known:
                known.remove(tuple(rest))
            known.append(tuple(rest))
            del known[: -self.config.guesses]
        below = [*self.levels[1:], new]
        self.levels = [below[0][1:], *below[1:]]


CONFIGS = [
    JacobiConfig(4, 3, 2),
    JacobiConfig(5, 4, 3),
    JacobiConfig(2, 6, 1),
    JacobiConfig(6, 2, 4),
    JacobiConfig(1, 3, 2),
    JacobiConfig(1, 2, 1),
]


ROOM = 100
"""A budget for the window and all n-grams."""


def window_of(drafter: JacobiSource, row: Row, tree: DraftTree) -> list[int]:
    state = row.states[drafter]
    return tree.tokens[len(tree) - state.levels.size + 1 :].tolist() if state.sent else []


def initial_guesses(drafter: JacobiSource, request: Request) -> tuple[Row, list[int]]:
    row = opened(drafter, request)
    return row, window_of(drafter, row, draft(drafter, row, ROOM))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_window_and_pool_are_the_papers_at_every_step(config: JacobiConfig) -> None:
    target, drafter = WholeContextTarget(vocabulary=3), JacobiSource(config)
    request = Request([1, 2, 0, 1, 1, 2], 40)
    row, guesses = initial_guesses(drafter, request)
    paper = Paper(config, guesses)
    assert len(paper.levels[0]) == config.window + config.ngram - 3
    drafted = 0
    while request.remaining > config.window + config.ngram + 1:
        text = request.tokens.tolist()
        tree = draft(drafter, row, 100)
        window = [token for level in paper.levels for token in level]
        assert window_of(drafter, row, tree) == window
        branches = [branch[: request.max_draft_depth] for branch in reversed(paper.pool.get(text[-1], []))]
        expected = DraftTree.from_branches(branches, 100)
        assert tree.tokens[: -len(window) or None].tolist() == expected.tokens.tolist()
        assert tree.parents[: -len(window) or None].tolist() == expected.parents.tolist()
        paper.step(target, text)
        step(target, drafter, row, 100)
        drafted += len(branches)
    assert drafted


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_column_hangs_under_the_column_above_and_level_0_is_a_chain(config: JacobiConfig) -> None:
    target, drafter, request = WholeContextTarget(vocabulary=3), JacobiSource(config), Request(PROMPT[:1], 60)
    row = opened(drafter, request)
    for steps in range(12):
        levels = min(steps + 1, config.ngram - 1)
        columns = config.window + config.ngram - 1 - levels
        size = levels * columns - 1
        tree = step(target, drafter, row, ROOM).tree
        first = len(tree) - size
        node = {(0, 0): ROOT}
        node |= {(i // columns, i % columns): first + i - 1 for i in range(1, levels * columns)}
        assert len(node) - 1 == size
        for (level, column), index in node.items():
            if index == ROOT:
                continue
            above = node[level - 1, column] if level else node[0, column - 1]
            assert tree.parents[index] == above
            assert tree.depths[index] == level + column


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_text_is_the_oracles(name: str, config: JacobiConfig) -> None:
    for seed, budget, eos in ((0, 8, frozenset[int]()), (1, 3, frozenset({3})), (2, 0, frozenset[int]())):
        target = MockTarget(peak=2, seed=seed)
        request = Request(PROMPT, 30, sampler=SAMPLERS[name], eos_token_ids=eos)
        text = generate(target, JacobiSource(config), request, 8 * budget)
        assert text == oracle(target, PROMPT, 30, SAMPLERS[name], eos)


@given(
    st.integers(1, 6),
    st.integers(2, 5),
    st.integers(1, 4),
    st.lists(st.integers(0, 4), min_size=2, max_size=9),
    st.integers(1, 25),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_any_configuration_gives_the_oracles_text(
    window: int, ngram: int, guesses: int, prompt: list[int], limit: int, budget: int, seed: int
) -> None:
    target, sampler = MockTarget(peak=2, seed=seed), Sampler("coupled", seed)
    drafter = JacobiSource(JacobiConfig(window, ngram, guesses))
    assert generate(target, drafter, Request(prompt, limit, sampler=sampler), budget) == oracle(
        target, prompt, limit, sampler
    )


def test_a_predictable_text_takes_few_steps() -> None:
    target = MockTarget(vocabulary=50, order=1, peak=3, seed=1)
    request = Request([1, 2, 3], 100)
    generate(target, JacobiSource(JacobiConfig(window=5, ngram=4, guesses=3)), request, 24)
    assert request.stats.tokens_per_step > 2
    assert max(request.stats.emitted) == 4


def test_the_window_starts_with_tokens_of_the_prompt_as_a_function_of_prompt_and_seed() -> None:
    drafter, prompt = JacobiSource(JacobiConfig(40, 3, 1)), [7, 8, 9, 9]
    first, again, other = (
        initial_guesses(drafter, Request(prompt, 99, sampler=Sampler(seed=seed)))[1] for seed in (1, 1, 2)
    )
    assert set(first) == {7, 8, 9}
    assert first == again != other


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_window_is_left_out_exactly_when_the_text_ends_before_it(config: JacobiConfig) -> None:
    deepest = config.window + config.ngram - 3
    for limit in range(1, deepest + 4):
        drafter, request = JacobiSource(config), Request(PROMPT, limit)
        row = opened(drafter, request)
        draft(drafter, row, ROOM)
        assert row.states[drafter].sent == (request.max_draft_depth >= deepest)


def test_nothing_is_sent_without_budget_and_the_window_waits() -> None:
    target, drafter, request = MockTarget(seed=1), JacobiSource(JacobiConfig(4, 3, 2)), Request(PROMPT, 60)
    row, before = initial_guesses(drafter, request)
    assert not len(step(target, drafter, row, 0).tree)
    assert window_of(drafter, row, draft(drafter, row, ROOM)) == before


def test_a_window_that_did_not_come_back_whole_is_not_used() -> None:
    target, drafter, request = MockTarget(seed=1), JacobiSource(JacobiConfig(4, 3, 2)), Request(PROMPT, 60)
    row = opened(drafter, request)
    for _ in range(5):
        step(target, drafter, row)
    tree = draft(drafter, row, ROOM)
    window = window_of(drafter, row, tree)
    for cut in (tree.trim(3, 1 << 31), DraftTree.empty()):
        logits = target.score(request.tokens.tolist(), cut)
        drafter.learn([row], [Outcome(cut, verify(cut, logits, request), logits)])
        tree = draft(drafter, row, ROOM)
        assert window_of(drafter, row, tree) == window


def test_branches_cut_from_the_tree_do_not_shift_the_windows_logits() -> None:
    target, drafter = WholeContextTarget(vocabulary=2), JacobiSource(JacobiConfig(4, 3, 2))
    request = Request([0, 1], 90)
    row = opened(drafter, request)
    while len(draft(drafter, row, ROOM)) < row.states[drafter].levels.size:
        step(target, drafter, row, ROOM)
    tree = draft(drafter, row, ROOM)
    text, assumed = request.tokens.tolist(), list(paths(tree))
    kept = tree.select(np.arange(len(tree)) >= len(tree) - row.states[drafter].levels.size + 1)
    logits = target.score(text, kept)
    drafter.learn([row], [Outcome(kept, verify(kept, logits, request), logits)])
    last_level = [target.best([*text, *path]) for path in assumed[-4:]]
    assert window_of(drafter, row, draft(drafter, row, ROOM))[-4:] == last_level


def test_the_first_step_of_an_engine_observes_what_was_not_proposed() -> None:
    target, drafter, request = MockTarget(seed=1), JacobiSource(JacobiConfig(1, 2, 1)), Request(PROMPT, 9)
    row = opened(drafter, request)
    tree = DraftTree.empty()
    logits = target.score(PROMPT, tree)
    drafter.learn([row], [Outcome(tree, verify(tree, logits, request), logits)])
    assert not row.states[drafter].pool._rests


@pytest.mark.parametrize("guesses", [1, 2, 5])
def test_the_pool_keeps_the_most_recent_ngrams_of_each_first_token(guesses: int) -> None:
    target, drafter = WholeContextTarget(vocabulary=3), JacobiSource(JacobiConfig(6, 4, guesses))
    request = Request(PROMPT[:1], 80)
    row = opened(drafter, request)
    while request.remaining > 9:
        step(target, drafter, row, ROOM)
    pool = row.states[drafter].pool._rests
    assert max(map(len, pool.values())) == guesses
    assert all(len(rest) == 3 for rests in pool.values() for rest in rests)


def test_requests_do_not_see_each_other_and_are_forgotten() -> None:
    target, drafter = WholeContextTarget(vocabulary=3), JacobiSource(JacobiConfig(4, 3, 2))
    alone, one, other = Request([1, 2], 60), Request([1, 2], 60), Request([2, 0], 60)
    rows = [opened(drafter, request) for request in (alone, one, other)]
    trees = [step(target, drafter, rows[0], ROOM).tree for _ in range(10)]
    for tree in trees:
        assert step(target, drafter, rows[1], ROOM).tree.tokens.tolist() == tree.tokens.tolist()
        step(target, drafter, rows[2], ROOM)
    for row in rows:
        row.close()
        assert not row.states


@pytest.mark.parametrize(("name", "least"), [("window", 1), ("ngram", 2), ("guesses", 1)])
def test_a_configuration_out_of_range_is_refused(name: str, least: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {least - 1}; it must be at least {least}$"):
        JacobiConfig(**{name: least - 1})
    assert getattr(JacobiConfig(**{name: least}), name) == least


def test_a_cheap_pass_looks_further_ahead() -> None:
    guesses = [(c.ngram - 1) * c.window for c in map(best_config, map(CostCurve.linear, (8, 32, 128, 512, 4096)))]
    assert guesses == sorted(guesses)
    assert (guesses[0], guesses[-1]) == (2, 60)


def test_the_expected_tokens_rise_with_every_size() -> None:
    assert expected_tokens(JacobiConfig(15, 5, 15)) == pytest.approx(1.98, abs=0.05)
    assert expected_tokens(JacobiConfig(2, 3, 2)) > expected_tokens(JacobiConfig(2, 2, 2)) > 1
    assert expected_tokens(JacobiConfig(3, 2, 3)) > expected_tokens(JacobiConfig(2, 2, 2))


def test_sizes_that_were_given_are_kept() -> None:
    runtime = replace(default_runtime(), costs=lambda scorer: CostCurve.linear(8))
    setup = Setup(LongContextConfig(), MockScorer(MockTarget()), runtime)  # type: ignore[arg-type]
    assert JacobiSource(JacobiConfig(9, 4, 2)).config == JacobiConfig(9, 4, 2)
    assert fitted_jacobi(setup).config == best_config(CostCurve.linear(8)) != JacobiConfig()
