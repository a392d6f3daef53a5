"""Lookup against a scan of the whole text, and in the loop against the slow generator."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mocks import SAMPLERS, MockTarget, draft, generate, opened, oracle, step

from forerun.core.request import Request
from forerun.decoding.sources.lookup import Lookup, LookupConfig


def committed(request: Request, tokens: Sequence[int]) -> None:
    for token in tokens:
        request.append(token)


def scan(text: list[int], config: LookupConfig, length: int) -> list[int]:
    """What to draft, found by scanning the text backwards for its longest suffix."""
    for n in range(min(config.max_ngram, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                extended = list(text)
                for i in range(length):
                    extended.append(extended[start + n + i])  # may read what it has just written
                return extended[len(text) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), max_size=8),
    st.integers(1, 4), st.integers(1, 6), st.integers(0, 8),
)  # fmt: skip
def test_the_longest_suffix_is_continued_as_it_was_most_recently(prompt, steps, max_ngram, branch_length, budget):
    config = LookupConfig(max_ngram, branch_length)
    drafter, request = Lookup(config), Request(prompt, 44)
    row = opened(drafter, request)
    for tokens in [[], *steps]:
        committed(request, tokens)  # which nobody observes
        tree = draft(drafter, row, budget)
        length = min(branch_length, budget, request.max_draft_depth)
        assert tree.is_chain and tree.q is None
        assert tree.tokens.tolist() == scan(request.tokens.tolist(), config, length)


@pytest.mark.parametrize(("text", "expected"), [
    pytest.param([1, 2, 3], [], id="nothing when the last token is new"),
    pytest.param([5], [], id="nothing after a prompt of one token"),
    pytest.param([1, 2, 3, 4, 9, 2, 3], [4, 9, 2, 3], id="what followed"),
    pytest.param([2, 3, 7, 8, 2, 3, 4, 2, 3], [4, 2, 3, 4], id="the most recent of two occurrences"),
    pytest.param([1, 2, 3, 7, 8, 2, 3, 4, 1, 2, 3], [7, 8, 2, 3], id="a longer match before a more recent one"),
    pytest.param([1, 6, 6], [6, 6, 6, 6], id="a token repeated for ever"),
    pytest.param([0, 1, 2, 1, 2], [1, 2, 1, 2], id="a cycle of two"),
])  # fmt: skip
def test_it_drafts(text, expected):
    drafter, request = Lookup(LookupConfig(branch_length=4)), Request(text, 9)
    row = opened(drafter, request)
    assert draft(drafter, row, 8).tokens.tolist() == expected


def test_a_draft_is_a_copy_of_the_text_not_a_view_of_it():
    drafter, request = Lookup(), Request([1, 2, 3, 1, 2], 5)
    row = opened(drafter, request)
    draft(drafter, row, 3).tokens[:] = 9
    assert request.tokens.tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("budget", [0, 1, 3, 20])
@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({3})])
def test_the_text_is_the_oracles(name, budget, eos):
    for seed in range(4):
        target = MockTarget(peak=3, seed=seed)
        prompt = [1, 4, 2, 0, 2, 1, 4]
        request = Request(prompt, 25, sampler=SAMPLERS[name], eos_token_ids=eos)
        text = generate(target, Lookup(), request, budget)
        assert text == oracle(target, prompt, 25, SAMPLERS[name], eos)


def test_a_repetitive_text_takes_few_steps():
    request = Request([1, 4, 2], 100)
    generate(MockTarget(seed=1), Lookup(LookupConfig(branch_length=9)), request, budget=9)
    assert request.stats.tokens_per_step > 5
    assert max(request.stats.emitted) == 10


def test_requests_do_not_see_each_other_and_are_forgotten():
    target, drafter = MockTarget(seed=1), Lookup()
    one, other = Request([1, 2, 3, 1], 20), Request([4, 0, 0, 3], 20)
    first, second = opened(drafter, one), opened(drafter, other)
    assert draft(drafter, second, 4).tokens.tolist() == []
    while one.finish_reason is None and other.finish_reason is None:
        step(target, drafter, first, 1)
        step(target, drafter, second, 1)
    assert one.generated.tolist() == oracle(target, [1, 2, 3, 1], 20, one.sampler)[: len(one.generated)]
    first.close()
    assert not first.states and second.states


class Read(np.ndarray):
    """Counts what is read of it, whether by Python or by numpy."""

    count = 0

    def tolist(self) -> list[int]:
        Read.count += self.size
        return super().tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Read.count += self.size
        plain = [np.asarray(value) if isinstance(value, Read) else value for value in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Read.count += self.size
        return super().__array_function__(function, types, args, kwargs)


def test_a_step_does_not_scan_a_long_text(monkeypatch):
    prompt = np.random.default_rng(0).integers(0, 32_000, 120_000)
    drafter, request = Lookup(), Request(prompt.tolist(), 300)
    tokens = Request.tokens.fget
    monkeypatch.setattr(Request, "tokens", property(lambda self: tokens(self).view(Read)))
    row = opened(drafter, request)
    assert Read.count > 120_000
    for i in range(200):
        before = Read.count
        draft(drafter, row, 10)
        committed(request, [i])
        assert 0 < Read.count - before < 50
    assert max(map(len, row.states[drafter]._continuation)) == 3


def test_a_configuration_out_of_range_is_refused():
    for name, value in itertools.product(("max_ngram", "branch_length"), (0, -1)):
        with pytest.raises(ValueError, match=rf"^{name} is {value}; it must be at least 1$"):
            LookupConfig(**{name: value})
