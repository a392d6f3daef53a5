"""The retrieval cache against its definition: which chunks it holds, that it holds them whole, and for how long."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.view import View

SPEC = AttentionSpec(scaling=0.35)
HEADS, KV_HEADS, DIM, LAYERS = 4, 2, 8, 2


@dataclass
class Row:
    """A full cache that reads random tokens, and a view over it."""

    full: FullCache
    generator: torch.Generator

    @classmethod
    def of(cls, length: int, seed: int = 0) -> "Row":
        row = cls(FullCache(), torch.Generator().manual_seed(seed))
        row.read(length)
        return row

    def draw(self, heads: int, count: int) -> torch.Tensor:
        return torch.randn(1, heads, count, DIM, generator=self.generator, dtype=torch.float64)

    def qkv(self, count: int) -> list[torch.Tensor]:
        return [self.draw(heads, count) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def read(self, count: int, tree: DraftTree | None = None, path: Sequence[int] = ()) -> None:
        block = Block(np.zeros(count, np.int64), tree or DraftTree.empty(), self.full.length)
        for layer in range(LAYERS):
            self.full.attend(layer, *self.qkv(len(block)), block, SPEC)
        self.full.commit(block, path)


def expected_chunks(row: Row, layer: int, config: RetrievalConfig, rows: Sequence[int] = (-1,)) -> list[set[int]]:
    """By the definition, in one go: the chunks of each KV head."""
    tail = max(0, row.full.length - config.recent) // config.chunk * config.chunk
    keys = row.full.read(layer, 0, tail)[0][0]
    means = keys.view(KV_HEADS, -1, config.chunk, DIM).mean(2).bfloat16().double()  # as precise as they are kept
    query = row.full.queries[layer][0, :, list(rows)].view(KV_HEADS, HEADS // KV_HEADS, -1, DIM).sum((1, 2))
    scores = (means @ query.unsqueeze(-1)).squeeze(-1)
    chosen = []
    for head in range(KV_HEADS):
        order = [0, *(int(chunk) for chunk in scores[head].argsort(descending=True) if chunk)]
        chosen.append(set(order[: config.slots]))
    return chosen


def held_keys(row: Row, chunks: set[int], head: int, layer: int, config: RetrievalConfig) -> set[bytes]:
    tail = max(0, row.full.length - config.recent) // config.chunk * config.chunk
    positions = [chunk * config.chunk + i for chunk in chunks for i in range(config.chunk)]
    keys = row.full.read(layer, 0, row.full.length)[0][0, head]
    return {keys[p].numpy().tobytes() for p in [*positions, *range(tail, row.full.length)] if p < row.full.length}


def view_of(row: Row, kind: str, budget: int = 1000) -> View:
    """With a budget for all of the text, if none is given."""
    if kind == "low-rank":
        return LowRankCache(row.full, LowRankConfig(budget, window=8))
    return RetrievalCache(row.full, RetrievalConfig(budget, 4))


@given(
    length=st.integers(1, 90), chunk=st.integers(1, 6), budget=st.integers(6, 60), window=st.integers(1, 12),
    growth=st.lists(st.integers(1, 7), max_size=8), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_holds_the_chunks_of_its_definition_whole(length, chunk, budget, window, growth, seed):
    """After every refresh, however the text grew, of every head; compared by the keys themselves."""
    config = RetrievalConfig(budget, chunk, window, stride=3)
    row = Row.of(length, seed)
    cache = RetrievalCache(row.full, config)
    for count in [0, *growth]:
        if count:
            row.read(count)
        cache.sync()
        cache.refresh()
        for layer in range(LAYERS):
            for head, chunks in enumerate(expected_chunks(row, layer, config)):
                place = cache._place(cache.length)
                keys = cache._rows[layer][0][0, head, :place]
                assert {key.numpy().tobytes() for key in keys} == held_keys(row, chunks, head, layer, config)


@given(length=st.integers(1, 60), extra=st.integers(0, 5), seed=st.integers(0, 99))
def test_a_budget_for_the_whole_text_attends_as_the_full_cache_does(length, extra, seed):
    row = Row.of(length, seed)
    for kind in ("retrieval", "low-rank"):
        view = view_of(row, kind)
        view.sync()
        tree = DraftTree.from_branches([[1, 2, 3], [1, 4], [5]][: extra // 2 + 1], extra)
        block = Block(np.zeros(1, np.int64), tree, row.full.length)
        qkv = row.qkv(len(block))
        assert torch.allclose(view.attend(0, *qkv, block, SPEC), row.full.attend(0, *qkv, block, SPEC), atol=1e-12)


@pytest.mark.parametrize("kind", ["retrieval", "low-rank"])
@pytest.mark.parametrize("window", [None, 5, 17])
def test_tokens_on_trial_are_seen_and_forgotten(kind, window):
    """Accepting a branch on trial and reading on equals the full cache's doing so; ``sync`` takes it back."""
    spec = AttentionSpec(0.35, window)
    row = Row.of(23)
    view = view_of(row, kind)
    view.sync()
    twin = Row.of(23)
    tree = DraftTree.from_branches([[1, 2], [3, 4, 5]], 8)
    for path in ([0, 1], [2, 3, 4], []):
        block = Block(np.zeros(1, np.int64), tree, view.length)
        for layer in range(LAYERS):
            qkv = twin.qkv(len(block))
            expected = twin.full.attend(layer, *qkv, block, spec)
            assert torch.allclose(view.attend(layer, *qkv, block, spec), expected, atol=1e-12)
        view.commit(block, path)
        twin.full.commit(block, path)
    assert view.length == 23 + 3 + 4 + 1
    view.truncate(25)
    assert view.length == 25
    with pytest.raises(ValueError, match=r"^length is 22; it must be between 23 and 25$"):
        view.truncate(22)
    view.sync()
    assert view.length == 23


@pytest.mark.parametrize("kind", ["retrieval", "low-rank"])
def test_a_layer_with_a_sliding_window_sees_its_window_whatever_the_budget(kind):
    """And nothing is made to choose by."""
    spec = AttentionSpec(0.35, window=6)
    row = Row.of(80)
    choosing, cache = view_of(row, kind, 4), view_of(row, kind, 4)
    choosing.sync()
    row.full.specs = dict.fromkeys(row.full.specs, spec)
    cache.sync()
    assert cache.nbytes < choosing.nbytes
    block = Block(np.zeros(1, np.int64), DraftTree.chain([1, 2]), 80)
    qkv = row.qkv(3)
    assert torch.allclose(cache.attend(0, *qkv, block, spec), row.full.attend(0, *qkv, block, spec), atol=1e-12)


def read_on(row: Row, cache: RetrievalCache, drafted: int, accepted: int) -> None:
    """A step: the target reads a token and a chain, accepts a part, and the view hears of it."""
    row.read(1, DraftTree.chain([1] * drafted), list(range(accepted)))
    cache.verified([-1 - drafted, *range(-drafted, accepted - drafted)], drafted, accepted)
    cache.sync()


def test_policies_refresh_when_they_should():
    counts = {}
    cases = {"stride": (4, 3), "verify": (4,), "acceptance": (4, 3, 1)}
    for policy, accepted in ((policy, each) for policy, own in cases.items() for each in own):
        row = Row.of(200)
        cache = RetrievalCache(row.full, RetrievalConfig(96, 4, window=8, stride=10, refresh=policy, threshold=0.7))
        cache.sync()
        for _ in range(12):
            read_on(row, cache, 4 if accepted != 3 else 8, accepted)
        counts[policy, accepted] = cache.refreshes
    assert counts["verify", 4] == 13
    assert counts["stride", 4] == counts["acceptance", 4] < 8
    assert counts["acceptance", 3] == counts["stride", 3]  # three of eight were right, and three of the four tested
    assert counts["acceptance", 1] > 8


@pytest.mark.parametrize("on_gpu", [False, True])
def test_verifying_queries_decide_what_is_chosen_next(on_gpu, monkeypatch):
    """On a GPU all chunks are copied again, in the order of their scores."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", not on_gpu)
    config = RetrievalConfig(64, 4, window=8, stride=8, refresh="verify")
    row = Row.of(300)
    cache = RetrievalCache(row.full, config)
    cache.sync()
    read_on(row, cache, 4, 2)
    for layer in range(LAYERS):
        expected = expected_chunks(row, layer, config, [-5, -4, -3])
        assert [set(head.tolist()) for head in cache._layers[layer]._chosen] == expected
        for head, chunks in enumerate(expected):
            keys = cache._rows[layer][0][0, head, : cache.held]
            assert {key.numpy().tobytes() for key in keys} == held_keys(row, chunks, head, layer, config)


@pytest.mark.matrix
def test_memory_stays_at_the_budget_however_long_the_text():
    config = RetrievalConfig(128, 8, window=16, stride=16)
    row = Row.of(400)
    cache = RetrievalCache(row.full, config)
    cache.sync()

    def key_bytes() -> int:
        return sum(t.nbytes for rows in cache._rows.values() for t in rows)

    keys = [key_bytes()]
    for _ in range(1500):
        read_on(row, cache, 3, 2)
        keys.append(key_bytes())
    assert row.full.length == 400 + 1500 * 3
    token = 2 * KV_HEADS * DIM * 8 * LAYERS
    assert max(keys) <= (128 + 64 + 8) * token
    means = cache.nbytes - keys[-1]
    assert means <= 1.3 * row.full.length / 8 * KV_HEADS * DIM * 2 * LAYERS  # half precision, a mean a chunk


@pytest.mark.parametrize(("values", "message"), [
    ({"budget": 7, "chunk": 8}, "budget is 7; it must be at least one chunk of 8 tokens"),
    ({"chunk": 0}, "chunk is 0; it must be at least 1"), ({"window": 0}, "window is 0; it must be at least 1"),
    ({"stride": 0}, "stride is 0; it must be at least 1"),
    ({"refresh": "never"}, "refresh is 'never'; allowed are 'stride', 'acceptance' and 'verify'"),
    ({"threshold": 1.5}, "threshold is 1.5; it must be between 0 and 1"),
])  # fmt: skip
def test_settings_are_checked(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        RetrievalConfig(**values)


def test_a_budget_of_a_token_at_a_time_works():
    row = Row.of(30)
    cache = RetrievalCache(row.full, RetrievalConfig(budget=1, chunk=1))
    cache.sync()
    assert cache._chunks == 1 and cache._place(cache.length) <= 3
