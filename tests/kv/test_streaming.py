"""StreamingLLM's cache against a slow one that keeps everything: drafts, trees, blocks of all sizes, all models."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mocks import draft, opened
from support.tiny import ARCHITECTURES, LAYOUTS, VOCABULARY, tiny

from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig as DraftSettings
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import Setup, build
from forerun.kernels.attention import attention
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.streaming import LayerRotation, Rotation, StreamingCache
from forerun.models.forward.runtime import default_runtime
from forerun.models.forward.scorer import Scorer

SLACK = 5
HEADS, KV_HEADS, SIZE = 4, 2, 8
ROTATION = Rotation({0: LayerRotation(slice(0, 3), slice(3, 6), torch.tensor([1.0, 0.3, 0.01], dtype=torch.float64))})
_generator = torch.Generator().manual_seed(5)
QUERIES, KEYS, VALUES = (
    torch.randn(1, h, VOCABULARY, SIZE, generator=_generator, dtype=torch.float64) for h in (HEADS, KV_HEADS, KV_HEADS)
)


def turned(raw: torch.Tensor, tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """Rows of a table, each at its position."""
    rows = [ROTATION(0, raw[:, :, [token]], int(p)) for token, p in zip(tokens, positions, strict=True)]
    return torch.cat(rows, 2) if rows else raw[:, :, :0]


def feed(cache: Cache, block: Block, spec: AttentionSpec) -> torch.Tensor:
    """What a model's layer would do in a pass, ``[1, H, n, d]``."""
    tokens, positions = block.tokens.tolist(), (cache.position + block.offsets).tolist()
    q, k = turned(QUERIES, tokens, positions), turned(KEYS, tokens, positions)
    return cache.attend(0, q, k, VALUES[:, :, tokens], block, spec)


def softmax_weights(q: torch.Tensor, k: torch.Tensor, seen: np.ndarray, spec: AttentionSpec) -> torch.Tensor:
    """By definition, ``[1, H, n, m]``, with the keys marked in ``seen`` ``[n, m]``."""
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    return scores.masked_fill(torch.from_numpy(~seen), -torch.inf).softmax(-1)


def chain(tokens: Sequence[int], start: int) -> Block:
    return Block(np.array(tokens), DraftTree.empty(), start)


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root to ``node`` (none for -1)."""
    return tree.ancestors[node].nonzero()[0].tolist() if node >= 0 else []


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> DraftTree:
    n = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = [draw(st.integers(0, VOCABULARY - 1)) for _ in range(n)]
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))


@st.composite
def steps(draw: st.DrawFn, slack: int) -> tuple[Sequence[int], DraftTree, int, list[int], int]:
    """Pending tokens, a tree, the accepted node (-1 for none), drafts committed one by one, how many are kept."""
    token = st.integers(0, VOCABULARY - 1)
    pending = draw(st.lists(token, min_size=1, max_size=draw(st.sampled_from([1, 4, 20]))))
    tree = draw(trees())
    drafts = draw(st.lists(token, max_size=slack))
    return pending, tree, draw(st.integers(-1, len(tree) - 1)), drafts, draw(st.integers(0, len(drafts)))


class Oracle(Cache):
    """Keeps every key as the model gave it, and what each is seen at follows from the rule; attention by definition."""

    def __init__(self, window: int, sinks: int, slack: int, rotation: Rotation | None) -> None:
        self.window, self.sinks, self.slack, self.rotation = window, sinks, slack, rotation
        self.length = 0
        self.kept: list[int] = []  # the tokens' places in the text
        self.born: list[int] = []  # the position that each committed token's key was computed with
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.tail: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def position(self) -> int:
        return self.length if self.rotation is None else len(self.kept)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        self.tail[layer] = (k, v)
        held = len(self.kept)
        if held:
            keys, values = self.layers[layer]
            moved = [self.move(layer, keys[:, :, [i]], place - self.born[i]) for place, i in enumerate(self.kept)]
            k, v = torch.cat((*moved, k), 2), torch.cat((values[:, :, self.kept], v), 2)
        seen = np.concatenate((np.ones((len(block), held), bool), block.visible), 1)
        if spec.window is not None:
            places = np.concatenate((np.arange(held), held + block.offsets))
            seen &= places > held + block.offsets[:, None] - spec.window
        return softmax_weights(q, k, seen, spec) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def move(self, layer: int, key: torch.Tensor, by: int) -> torch.Tensor:
        return key if self.rotation is None else self.rotation(layer, key, by)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        m = len(block.pending)
        rows = [*range(m), *(m + node for node in path)]
        self.born += (self.position + block.offsets)[rows].tolist()
        for layer, pair in self.tail.items():
            new = tuple(t[:, :, rows] for t in pair)
            old = self.layers.get(layer)
            self.layers[layer] = (
                new if old is None else tuple(torch.cat(both, 2) for both in zip(old, new, strict=True))
            )
        self.kept += range(self.length, self.length + len(rows))
        self.length += len(rows)
        if len(self.kept) > self.sinks + self.window + self.slack:
            self.kept = self.kept[: self.sinks] + self.kept[-self.window :]

    def truncate(self, length: int) -> None:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return 0


def state(cache: StreamingCache) -> list[torch.Tensor]:
    return [t[:, :, : cache.held] for _, rows in sorted(cache._layers.items()) for t in rows]


def equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def same(a: StreamingCache, b: StreamingCache) -> bool:
    return (a.length, a.held) == (b.length, b.held) and equal(state(a), state(b))


@given(
    st.lists(steps(SLACK), max_size=12), st.integers(0, 5), st.integers(1, 9),
    st.sampled_from([AttentionSpec(0.3), AttentionSpec(0.3, 1), AttentionSpec(0.3, 4), AttentionSpec(0.5, 11, 2.0)]),
    st.booleans(),
)  # fmt: skip
def test_attention_and_state_are_as_if_all_was_kept_and_nothing_was_drafted(script, sinks, window, spec, turning):
    rotation = ROTATION if turning else None
    cache, undrafted = (StreamingCache(window, sinks, SLACK, rotation) for _ in range(2))
    oracle = Oracle(window, sinks, SLACK, rotation)

    def step(block: Block, node: int) -> None:
        outs = [feed(each, block, spec) for each in (cache, undrafted, oracle)]
        assert torch.equal(outs[0], outs[1])
        assert (outs[0] - outs[2]).abs().max() < 1e-11
        for each in (cache, undrafted, oracle):
            each.commit(block, path_to(block.tree, node))
        assert cache.length == oracle.length and cache.held == len(oracle.kept)
        assert same(cache, undrafted)

    for pending, tree, node, drafts, right in script:
        feed(cache, chain([*drafts, *pending], cache.length), spec)  # a pass without commit leaves no trace
        step(Block(np.array(pending), tree, cache.length), node)
        before = cache.length
        for token in drafts:
            block = chain([token], cache.length)
            feed(cache, block, spec)
            cache.commit(block, [])
        cache.truncate(before)
        assert same(cache, undrafted)
        for token in drafts[:right]:
            step(chain([token], cache.length), -1)


def blocks(total: int, seed: int) -> list[tuple[list[int], DraftTree, list[int]]]:
    """Blocks of one to twenty pending tokens, some with a tree of which a branch is accepted."""
    rng = np.random.default_rng(seed)
    made, length = [], 0
    while length < total:
        pending = rng.integers(0, VOCABULARY, rng.choice([1, 1, 1, 3, 20])).tolist()
        n = int(rng.integers(0, 6))
        parents = np.array([rng.integers(-1, i) if i else -1 for i in range(n)], np.int64)
        tree = DraftTree(rng.integers(0, VOCABULARY, n), parents)
        path = path_to(tree, int(rng.integers(-1, n)) if n else -1)
        made.append((pending, tree, path))
        length += len(pending) + len(path)
    return made


@torch.inference_mode()
def step_through(model: Any, caches: Sequence[Cache], script: list[Any]) -> list[list[torch.Tensor]]:
    """Logits of every pass, by cache."""
    scorer, found = Scorer(model), [list[torch.Tensor]() for _ in caches]
    for pending, tree, path in script:
        for logits, cache in zip(found, caches, strict=True):
            block = Block(np.array(pending), tree, cache.length)
            logits += scorer.score([block], [cache])
            cache.commit(block, path)
    return found


@pytest.mark.one_in(6)
@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_window_longer_than_the_text_gives_the_bits_of_the_full_cache(architecture, by_kernels, monkeypatch):
    if not by_kernels:
        monkeypatch.setattr(attention, "takes", lambda *_: False)
    model = tiny(architecture)
    caches = (FullCache(), StreamingCache(80, 4, SLACK, Scorer(model).rotation()), StreamingCache(90, 0, SLACK))
    full, *streaming = step_through(model, caches, blocks(60, 1))
    for found in streaming:
        assert equal(full, found)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("architecture", "rotating"), [
    pytest.param(architecture, rotating, marks=[pytest.mark.matrix] * ((i + rotating) % 2))
    for i, architecture in enumerate([*ARCHITECTURES, *LAYOUTS])
    for rotating in (True, False)
])  # fmt: skip
def test_every_model_sees_sinks_and_window_as_if_all_was_kept(architecture, rotating):
    model = tiny(architecture)
    rotation = Scorer(model).rotation() if rotating else None
    if rotating and rotation is None:
        pytest.skip("learned positions cannot be moved")
    caches = (Oracle(8, 3, SLACK, rotation), StreamingCache(8, 3, SLACK, rotation))
    expected, found = step_through(model, caches, blocks(100, 2))
    assert caches[1].length > 90 and caches[1].held <= 16
    for a, b in zip(expected, found, strict=True):  # many models normalise in float32
        assert ((a - b).norm(dim=-1) / a.norm(dim=-1)).max() < 1e-5


def test_ragged_rows_in_one_pass_are_as_each_alone():
    model = tiny("mistral")
    rotation, scorer = Scorer(model).rotation(), Scorer(model)
    lengths = (1, 2, 7, 40)  # shorter than the sinks, than the window, than neither
    alone, together = ([StreamingCache(6, 3, 2, rotation) for _ in lengths] for _ in range(2))
    rng = np.random.default_rng(3)
    with torch.inference_mode():
        for sizes in (lengths, *[(1, 2, 1, 3)] * 8):
            tokens = [rng.integers(0, VOCABULARY, size).tolist() for size in sizes]
            rows = [chain(new, cache.length) for new, cache in zip(tokens, alone, strict=True)]
            expected = [scorer.score([block], [cache])[0] for block, cache in zip(rows, alone, strict=True)]
            for a, b in zip(expected, scorer.score(rows, together), strict=True):
                assert (a - b).norm() / a.norm() < 1e-5
            for block, one, other in zip(rows, alone, together, strict=True):
                one.commit(block, [])
                other.commit(block, [])


@pytest.mark.parametrize("length", [200, pytest.param(3000, marks=pytest.mark.matrix)])
def test_memory_and_positions_are_bounded_however_long_the_text(length):
    model = tiny("llama")
    scorer, cache = Scorer(model), StreamingCache(20, 4, 16, Scorer(model).rotation())
    sizes, highest, token = set(), 0, np.array([3])
    with torch.inference_mode():
        for _ in range(length):
            block = Block(token, DraftTree.empty(), cache.length)
            highest = max(highest, int((cache.position + block.offsets).max()))
            token = scorer.score([block], [cache])[0].argmax(-1).numpy()
            cache.commit(block, [])
            if cache.length > 100:
                sizes.add(cache.nbytes)
    assert cache.length == length
    assert highest == 4 + 20 + 16
    per_token = 2 * 2 * 2 * 8 * 8  # layers, keys and values, KV heads, dimensions, bytes
    assert sizes == {2 * (4 + 20 + 16 + 1) * per_token}


def test_the_room_for_blocks_grows_to_the_largest():
    cache = StreamingCache(4, 1, 2)
    for size in (3, 50, 1, 50, 20, 1):
        read(cache, [1] * size)
    assert cache.held <= 7
    assert cache.nbytes == 2 * 2 * (7 + 50) * KV_HEADS * SIZE * 8


def read(cache: StreamingCache, tokens: Sequence[int]) -> torch.Tensor:
    block = chain(tokens, cache.length)
    out = feed(cache, block, AttentionSpec(0.3))
    cache.commit(block, [])
    return out


@pytest.mark.parametrize("held", [0, 2, 4])
def test_skipping_leaves_sinks_and_what_comes_after(held):
    skipping, plain = StreamingCache(8, 4, 3, ROTATION), StreamingCache(8, held, 3, ROTATION)
    for cache in (skipping, plain):
        if held:
            read(cache, [*range(held)])
    skipping.skip(1000)
    assert skipping.length == held + 1000
    for token in range(30):  # it goes on as if sinks and tail were the text
        assert torch.equal(read(skipping, [token]), read(plain, [token]))
    assert skipping.held == plain.held and skipping.length == plain.length + 1000
    skipping.truncate(skipping.length - 2)
    plain.truncate(plain.length - 2)
    assert torch.equal(read(skipping, [7, 8]), read(plain, [7, 8]))


def test_skipping_in_several_steps_and_back_to_the_start():
    cache = StreamingCache(8, 4, 3, ROTATION)
    read(cache, [1, 2])
    cache.skip(5)
    cache.skip(0)
    cache.skip(6)
    assert cache.length == 13
    read(cache, [3])
    with pytest.raises(ValueError, match="only after the 2 sinks, but 3 are held"):
        cache.skip(1)
    cache.truncate(2)
    read(cache, [1, 2, 3])  # four sinks are allowed again
    read(cache, list(range(20)))
    fresh = StreamingCache(8, 4, 3, ROTATION)
    read(fresh, [1, 2, 1, 2, 3])
    read(fresh, list(range(20)))
    assert same(cache, fresh)


def test_truncating_reaches_whatever_is_held_and_names_what_is_not():
    cache = StreamingCache(10, 3, 2)
    for token in range(16):
        read(cache, [token])
    assert cache.held == 13  # tokens 3, 4 and 5 have just gone, and could come back
    cache.truncate(5)
    assert cache.length == cache.held == 5
    for token in range(5, 30):
        read(cache, [token])
    cache.truncate(25)  # the eviction at 28 is taken back, the one at 25 is not
    with pytest.raises(ValueError, match=r"length is 14, .*it must be between 15 and 25, or at most 3"):
        cache.truncate(14)
    cache.truncate(15)
    assert cache.held == 3
    cache.truncate(2)
    assert torch.equal(state(cache)[1], VALUES[:, :, :2])
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=f"length is {wrong}; it must be between 0 and 2"):
            cache.truncate(wrong)


def test_wrong_values_are_refused():
    for arguments, message in (
        ((0,), "window is 0; it must be at least 1"), ((1, -1), "sinks is -1; it must be 0 or more"),
        ((1, 0, -2), "slack is -2; it must be 0 or more"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            StreamingCache(*arguments)
    with pytest.raises(ValueError, match="count is -1"):
        StreamingCache(4).skip(-1)


@torch.inference_mode()
def test_drafts_longer_than_the_window_can_be_rejected():
    options = DraftSettings(tiny("llama"), gamma2=200, paced=False, cache_budget=8, window=4)
    level = build("streaming", Setup(options, Scorer(tiny("llama")), default_runtime()))
    [drafter], request = level.planner.own, Request(list(range(6, 18)), 300)
    row = opened(drafter, request, FullCache())
    assert drafter.read(row, len(request))
    first = draft(drafter, row, 200).tokens.tolist()
    request.append((first[0] + 1) % VOCABULARY)
    assert len(first) == len(draft(drafter, row, 200)) == 200
