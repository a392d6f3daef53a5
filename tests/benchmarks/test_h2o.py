"""H2O's cache against an oracle that keeps all tokens and weights: blocks, trees, drafts taken back, every model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support import toy
from support.tiny import ARCHITECTURES, VOCABULARY, tiny

from benchmarks.papers.h2o import HeavyHitterCache
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer

SPEC = AttentionSpec(0.4)
GROUP = toy.HEADS // toy.KV_HEADS


class Oracle:
    """The rule by itself: which tokens each KV head still has, and all weights that committed queries ever gave."""

    def __init__(self, heavy: int, recent: int, slack: int) -> None:
        self.heavy, self.recent, self.slack = heavy, recent, slack
        self.text: list[int] = []
        self.kept: list[list[int]] = [[] for _ in range(toy.KV_HEADS)]
        self.given: list[dict[int, float]] = [{} for _ in range(toy.KV_HEADS)]

    def attend(self, block: Block, spec: AttentionSpec) -> torch.Tensor:
        """Output ``[1, H, n, d]``; keeps each head's weights over its keys and the block."""
        self.weights, outs = [], []
        places, tokens = block.positions, block.tokens.tolist()
        for head in range(toy.HEADS):
            kept = self.kept[head // GROUP]
            at = np.concatenate((np.array(kept, np.int64), places))
            ids = [*(self.text[i] for i in kept), *tokens]
            seen = np.concatenate((np.ones((len(block), len(kept)), bool), block.visible), 1)
            if spec.window is not None:
                seen &= at > places[:, None] - spec.window
            q = toy.turned(toy.QUERIES, tokens, places.tolist())[:, [head]]
            k = toy.turned(toy.KEYS, ids, at.tolist())[:, [head // GROUP]]
            weights = toy.softmax_weights(q, k, seen, spec)
            self.weights.append(weights[0, 0])
            outs.append(weights @ toy.VALUES[:, [head // GROUP]][:, :, ids])
        return torch.cat(outs, 1)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        m, start = len(block.pending), len(self.text)
        rows = [*range(m), *(m + node for node in path)]
        self.text += block.tokens[rows].tolist()
        new = list(range(start, len(self.text)))
        for head, weights in enumerate(self.weights):
            kept, given = self.kept[head // GROUP], self.given[head // GROUP]
            columns = [*range(len(kept)), *(len(kept) + row for row in rows)]
            for place, weight in zip((*kept, *new), weights[rows][:, columns].sum(0).tolist(), strict=True):
                given[place] = given.get(place, 0.0) + weight
        for kv_head, kept in enumerate(self.kept):
            kept += new
            if len(kept) > self.heavy + self.recent + self.slack:
                self.kept[kv_head] = self.evict(kept, self.given[kv_head])

    def evict(self, kept: list[int], given: dict[int, float]) -> list[int]:
        older, recent = kept[: -self.recent], kept[-self.recent :]
        ranked = sorted((given[place] for place in older), reverse=True)
        if 0 < self.heavy < len(older):  # which of two sums is larger must not be up to rounding
            assume(ranked[self.heavy - 1] - ranked[self.heavy] > 1e-9)
        return [*sorted(sorted(older, key=lambda place: -given[place])[: self.heavy]), *recent]


def drawn(cache: HeavyHitterCache) -> torch.Tensor:
    """All that each held token drew so far, ``[Hkv, held]``."""
    total = cache.state.attention[0][0].clone()
    for each in cache.state.log[0]:
        width = min(each.shape[2], cache.held)
        total[:, :width] += each[0, :, :width]
    return total


def same(a: HeavyHitterCache, b: HeavyHitterCache) -> bool:
    if (a.length, a.held) != (b.length, b.held):
        return False
    rows = (zip(x, y, strict=True) for x, y in zip(a.state.rows.values(), b.state.rows.values(), strict=True))
    same_rows = all(torch.equal(x[:, :, : a.held], y[:, :, : b.held]) for pair in rows for x, y in pair)
    return same_rows and (not a.length or torch.equal(drawn(a), drawn(b)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[Any]]:
    slack = draw(st.sampled_from([0, 1, 4]))
    return (draw(st.integers(0, 5)), draw(st.integers(1, 6)), slack), draw(st.lists(toy.steps(slack), max_size=10))


@given(cases(), st.sampled_from([SPEC, AttentionSpec(0.4, 2), AttentionSpec(0.4, 6), AttentionSpec(0.9, None, 2.0)]))
def test_what_is_kept_seen_and_summed_is_what_the_rule_says(case: Any, spec: AttentionSpec) -> None:
    sizes, script = case
    cache, undrafted, oracle = HeavyHitterCache(*sizes), HeavyHitterCache(*sizes), Oracle(*sizes)

    def step(block: Block, node: int) -> None:
        expected = oracle.attend(block, spec)
        outs = [toy.feed(each, block, spec) for each in (cache, undrafted)]
        assert torch.equal(*outs)
        assert (outs[0] - expected).abs().max() < 1e-11
        for each in (cache, undrafted, oracle):
            each.commit(block, toy.path_to(block.tree, node))
        assert cache.length == len(oracle.text)
        assert cache.state.rows[0][2][0, :, : cache.held].tolist() == oracle.kept
        sums = [[oracle.given[head][place] for place in kept] for head, kept in enumerate(oracle.kept)]
        assert (drawn(cache) - torch.tensor(sums, dtype=torch.float64)).abs().max() < 1e-10
        assert same(cache, undrafted)

    for pending, tree, node, drafts, right in script:
        step(Block(np.array(pending), tree, cache.length), node)
        before = cache.length
        for token in drafts:
            read(cache, [token], spec)
        cache.truncate(before)
        assert same(cache, undrafted)
        for token in drafts[:right]:
            step(toy.chain([token], cache.length), -1)


def read(cache: HeavyHitterCache, tokens: Sequence[int], spec: AttentionSpec = SPEC) -> torch.Tensor:
    block = toy.chain(tokens, cache.length)
    out = toy.feed(cache, block, spec)
    cache.commit(block, [])
    return out


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_budget_longer_than_the_text_gives_what_the_full_cache_gives(architecture: str) -> None:
    scorer, rng = Scorer(tiny(architecture)), np.random.default_rng(1)
    full, heavy = FullCache(), HeavyHitterCache(60, 20, 4)
    tree = DraftTree(np.array([3, 4, 5, 6]), np.array([-1, 0, 0, 2]))
    with torch.inference_mode():
        while full.length < 60:
            block = Block(rng.integers(0, VOCABULARY, rng.choice([1, 1, 12])), tree, full.length)
            expected, found = (scorer.score([block], [cache])[0] for cache in (full, heavy))
            assert ((expected - found).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5  # norms are in float32
            path = [0, 2, 3] if rng.random() < 0.5 else []
            for cache in (full, heavy):
                cache.commit(block, path)


def test_a_token_that_draws_attention_stays_and_one_that_does_not_goes() -> None:
    cache = HeavyHitterCache(1, 2, 0)
    spec = AttentionSpec(1.0)
    sought = torch.ones(1, 1, 1, 2, dtype=torch.float64)
    for place in range(12):
        block = toy.chain([0], cache.length)
        cache.attend(0, sought, sought * (5 if place == 4 else 0), sought, block, spec)
        cache.commit(block, [])
        if place > 6:
            assert cache.state.rows[0][2][0, 0, :3].tolist() == [4, place - 1, place]


def test_rejected_siblings_count_for_nothing() -> None:
    alone, beside = HeavyHitterCache(3, 2, 1), HeavyHitterCache(3, 2, 1)
    branch = DraftTree(np.array([7, 8]), np.array([-1, 0]))
    bush = DraftTree(np.array([9, 7, 9, 8, 9]), np.array([-1, -1, 0, 1, 3]))
    for _ in range(5):
        for cache, tree, path in ((alone, branch, [0, 1]), (beside, bush, [1, 3])):
            block = Block(np.array([5, 6]), tree, cache.length)
            toy.feed(cache, block, SPEC)
            cache.commit(block, path)
        assert (
            alone.state.rows[0][2][:, :, : alone.held].tolist() == beside.state.rows[0][2][:, :, : beside.held].tolist()
        )
        assert (drawn(alone) - drawn(beside)).abs().max() < 1e-12


def test_truncating_into_a_block_leaves_its_first_part() -> None:
    whole, part = HeavyHitterCache(4, 3, 5), HeavyHitterCache(4, 3, 5)
    for cache in (whole, part):
        read(cache, list(range(10)))
    read(whole, [1, 2, 3, 4])
    whole.truncate(12)
    read(part, [1, 2])
    assert whole.length == part.length == 12
    assert torch.equal(whole.state.rows[0][2][:, :, : whole.held], part.state.rows[0][2][:, :, : part.held])
    assert (drawn(whole) - drawn(part)).abs().max() < 1e-12
    assert (read(whole, [9, 9]) - read(part, [9, 9])).abs().max() < 1e-12


@pytest.mark.parametrize("length", [3000])
def test_memory_is_bounded_however_long_the_text(length: int) -> None:
    scorer, cache = Scorer(tiny("llama")), HeavyHitterCache(16, 8, 8)
    sizes, token = [], np.array([3])
    with torch.inference_mode():
        for _ in range(length):  # positions are true and beyond the model's 128, which rotary embedding takes
            block = Block(token, DraftTree.empty(), cache.length)
            token = scorer.score([block], [cache])[0].argmax(-1).numpy()
            cache.commit(block, [])
            sizes.append(cache.nbytes)
    assert cache.length == length and cache.held <= 32
    assert max(sizes) == max(sizes[:100])
    rows = 2 * 2 * 2 * 33 * (2 * 8 + 2) * 8  # two buffers, layers, KV heads; key, value, position and sum
    assert max(sizes) <= rows + 2 * 2 * 2 * 8 * 33 * 8  # and two logs


def test_only_as_much_as_the_slack_can_be_taken_back() -> None:
    cache = HeavyHitterCache(4, 3, 2)
    read(cache, list(range(30)))
    cache.truncate(28)
    with pytest.raises(ValueError, match=r"length is 27, .*it must be 0, or between 28 and 28 "):
        cache.truncate(27)
    with pytest.raises(ValueError, match="length is 29; it must be between 0 and 28"):
        cache.truncate(29)
    cache.truncate(0)
    fresh = HeavyHitterCache(4, 3, 2)
    for tokens in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11]):
        assert torch.equal(read(cache, tokens), read(fresh, tokens))
    assert same(cache, fresh)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((-1, 1, 0), "heavy is -1; it must be at least 0"),
        ((1, 0, 0), "recent is 0; it must be at least 1"),
        ((1, 1, -1), "slack is -1; it must be at least 0"),
    ],
)
def test_wrong_values_are_refused(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeavyHitterCache(*sizes)
