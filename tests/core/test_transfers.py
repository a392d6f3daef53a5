"""Elsewhere than on a CPU a step waits for one transfer, and chooses what it chooses node by node."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as theirs
from support.away import PLACE, Device, there
from support.mocks import ban_repeats
from support.tiny import tiny

from forerun.core.request import Request
from forerun.core.sampling import InTurn, Salt, Sampler, gumbel
from forerun.core.transfers import choose_nodes
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Verdict, verify
from forerun.models.text.processors import ANYWHERE, ROWWISE, of_row

MODEL = tiny("llama")
SIZE = 40
WARPERS: dict[str, list[Any]] = {
    "plain": [], "temperature": [theirs.TemperatureLogitsWarper(0.7)], "top-k": [theirs.TopKLogitsWarper(3)],
    "all": [theirs.TemperatureLogitsWarper(1.3), theirs.TopKLogitsWarper(20), theirs.TopPLogitsWarper(0.8)],
    "few": [theirs.MinPLogitsWarper(0.2), theirs.EpsilonLogitsWarper(0.01)],
}  # fmt: skip
PENALTY = [theirs.RepetitionPenaltyLogitsProcessor(1.4), *WARPERS["all"]]


def processor(warpers: list[Any]) -> Any:
    return of_row(warpers, MODEL)


class Odd:
    """A constraint: after an even token an odd one comes."""

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.device.type == scores.device.type == "cpu"
        even = torch.arange(len(scores)) % 2 == 0
        return scores.masked_fill(even, -math.inf) if int(ids[-1]) % 2 == 0 else scores.clone()

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        return []

    def certain(self, ids: torch.Tensor) -> int | None:
        return None

    def complete(self, ids: torch.Tensor) -> bool:
        return False

    def on_trial(self) -> "Odd":
        return self


def some_logits(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Without ties in any type: of equally likely tokens at the edge of top-p any may go."""
    return 0.25 * torch.stack([torch.randperm(SIZE, generator=generator) for _ in range(rows)]).double() - 4


def some_tree(rng: np.random.Generator, logits: torch.Tensor, sampler: Sampler, place: int) -> DraftTree:
    """A random tree; every other node is what will be chosen above it, so that walks go down."""
    parents, depths, tokens = [], [0], []
    for node in range(len(logits) - 1):
        parent = int(rng.integers(max(ROOT, node - 4), node)) if node else ROOT
        parents.append(parent)
        depths.append(depths[parent + 1] + 1)
        best = Request([1] * (place + depths[parent + 1]), 1, sampler=sampler).choose(logits[parent + 1])
        tokens.append(best if rng.random() < 0.7 else int(rng.integers(logits.shape[-1])))
    return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))


def both(
    tree: DraftTree, logits: torch.Tensor, request: Callable[[], Request], q: torch.Tensor | None = None
) -> tuple[Verdict, list[str]]:
    """A verdict that is the same here and there, and what was read from there."""
    here, away = request(), request()
    expected = verify(DraftTree(tree.tokens, tree.parents, q=q), logits.clone(), here)
    with Device() as device:
        own = None if q is None else there(q.clone())
        found = verify(DraftTree(tree.tokens, tree.parents, q=own), there(logits.clone()), away)
    assert found == expected
    assert away.tokens.tolist() == here.tokens.tolist() and away.finish_reason == here.finish_reason
    return found, device.reads


@pytest.mark.one_in(3)
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("method", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_tree_of_any_size_takes_one_transfer_and_gives_the_same_tokens(method, warpers, dtype):
    rng, generator, depths = np.random.default_rng(1), torch.Generator().manual_seed(2), []
    for seed in range(25):
        size, length = int(rng.integers(0, 40)), int(rng.integers(1, 9))
        sampler = Sampler(method, seed, processor(WARPERS[warpers]))
        logits = some_logits(size + 1, generator).to(dtype)
        tree = some_tree(rng, logits, sampler, length)
        eos = frozenset(rng.integers(0, SIZE, 4).tolist())

        limit = 1 + seed % 7 * 2
        verdict, reads = both(tree, logits, partial(Request, [1] * length, limit, sampler=sampler, eos_token_ids=eos))
        assert reads == ["cpu"]
        depths.append(len(verdict.path))
    assert max(depths) >= 3 and min(depths) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("warpers", WARPERS)
@pytest.mark.parametrize("known", [SIZE, SIZE - 7])
def test_so_does_the_test_by_rejection(warpers, known):
    generator, lengths = torch.Generator().manual_seed(3), set()
    for seed in range(60):
        size = seed % 6
        sampler = Sampler("rejection", seed, processor(WARPERS[warpers]))
        logits = torch.randn(size + 1, SIZE, generator=generator)
        q = (2 * logits[:size, :known] + seed % 3 * torch.randn(size, known, generator=generator)).double().softmax(-1)
        tokens = [int(row.multinomial(1, generator=generator)) for row in q]
        eos = frozenset({seed % SIZE, 2 * seed % SIZE})
        verdict, reads = both(
            DraftTree.chain(tokens),
            logits,
            partial(Request, [4, 2], 5, sampler=sampler, eos_token_ids=eos),
            q if seed % 2 else q.float(),
        )
        assert reads == ["cpu"]
        lengths.add(len(verdict.path))
    assert len(lengths) >= 4


def test_a_rejection_by_rounding_alone_draws_from_p():
    logits = torch.tensor([[0.5, 1.0, 0.2]] * 2, dtype=torch.float64)
    p = logits[0].float().double().softmax(-1)
    for seed in range(20):
        request = Request([0], 3, sampler=Sampler("rejection", seed))
        tree = DraftTree.chain([1], p[None])
        token = choose_nodes(tree, logits, request).tolist()[2]
        assert token == int((p.log() + gumbel(seed, 1, 3, Salt.RESIDUAL)).argmax())


@pytest.mark.parametrize("method", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("kind", ["penalty", "constraint", "both"])
def test_what_needs_ids_brings_the_logits_in_one_piece(method, kind):
    rng, generator = np.random.default_rng(4), torch.Generator().manual_seed(5)
    for seed in range(12):
        own = Sampler(
            method, seed, processor(PENALTY) if kind != "constraint" else None, Odd() if kind != "penalty" else None
        )
        logits = some_logits(20, generator).bfloat16()
        tree = some_tree(rng, logits, own, 3)
        assert both(tree, logits, partial(Request, [1, 2, 1], 9, sampler=own))[1] == ["cpu"]
    chain, q = DraftTree.chain([3, 5, 7]), torch.full((3, SIZE), 1 / SIZE)
    reads = both(chain, logits[:4], partial(Request, [1, 2, 1], 9, sampler=own), q)[1]
    assert reads == (["cpu", "cpu"] if method == "rejection" else ["cpu"])  # the logits, and q


def test_a_processor_nobody_knows_stays_on_the_models_device():
    calls: list[tuple[str, str]] = []

    def own(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append((ids.device.type, scores.device.type))
        return scores.roll(1, -1)

    rng, most = np.random.default_rng(6), 0
    for seed in range(10):
        sampler = Sampler("coupled" if seed % 2 else "greedy", seed, processor([own, *WARPERS["all"]]))
        logits = some_logits(12, torch.Generator().manual_seed(seed))
        tree = some_tree(rng, logits, sampler, 1)
        calls.clear()
        verdict, reads = both(tree, logits, partial(Request, [1], 20, sampler=sampler))
        assert len(reads) == len(verdict.tokens)  # of the visited nodes only
        most = max(most, len(reads))
        assert calls == [("cpu", "cpu")] * len(reads) + [(PLACE.type, PLACE.type)] * len(reads)
    sampler = Sampler("rejection", 3, processor([own]))
    assert most > 2
    verdict, reads = both(DraftTree.chain([2]), logits, partial(Request, [1], 20, sampler=sampler), torch.ones(1, SIZE))
    assert verdict.path == [] and len(reads) == 3  # chances, whether anything is left, the token


def test_nothing_is_worked_out_ahead_on_a_cpu(monkeypatch):
    monkeypatch.setattr("forerun.core.verify.choose_rows", lambda *_: pytest.fail("asked"))
    for sampler in (Sampler("greedy", 0, processor(PENALTY)), Sampler("coupled"), Sampler("greedy")):
        verify(DraftTree.chain([1]), torch.eye(SIZE)[:2], Request([0], 4, sampler=sampler))


def test_a_greedy_walk_reads_the_logits_of_the_nodes_that_it_visits_only(monkeypatch):
    """The best of all nodes would take longer than the walk, and was not on the clock."""
    seen = list[int]()
    monkeypatch.setattr("forerun.core.verify.best_of", lambda row: seen.append(int(row.argmax())) or seen[-1])
    tree = DraftTree(np.array([3, 4, 5, 6]), np.array([-1, -1, 0, 2]))
    request = Request([0], 8)
    verdict = verify(tree, torch.eye(SIZE)[[3, 7, 1, 2, 2]], request)
    assert seen == [3, 7] == verdict.tokens and verdict.path == [0]


# Samplers


@pytest.mark.parametrize("method", ["greedy", "coupled"])
def test_rows_are_chosen_from_as_each_by_itself(method):
    scores = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    scores[scores < 0.5] = -math.inf
    scores[3], scores[4, 7:9] = -math.inf, math.inf
    for seed in range(20):
        sampler, positions = Sampler(method, seed), [7, 3, 3, 9, 1, 1 << 40, 2, 7, 0]
        for salt in (Salt.TARGET, Salt.DRAFT):
            expected = [sampler.choose(row, place, salt) for row, place in zip(scores, positions, strict=True)]
            assert sampler.choices(scores, positions, salt).tolist() == expected


@pytest.mark.parametrize("name", sorted(ROWWISE))
def test_what_is_called_rowwise_takes_rows_together_and_reads_nothing(name):
    arguments = {
        "EpsilonLogitsWarper": [0.02], "MinPLogitsWarper": [0.1], "TemperatureLogitsWarper": [0.6],
        "TopKLogitsWarper": [5], "TopPLogitsWarper": [0.7], "SuppressTokensLogitsProcessor": [[3, 4]],
    }.get(name, [])  # fmt: skip
    whole = processor([getattr(theirs, name)(*arguments)])
    assert isinstance(whole, InTurn) and whole.rowwise and whole.anywhere == (name in ANYWHERE)
    scores = 2 * torch.randn(7, SIZE, generator=torch.Generator().manual_seed(9))
    scores[2, 5], scores[3, 6] = -math.inf, math.inf if name.startswith("Inf") else 4.0
    apart = torch.cat([whole(torch.tensor([[1, 2]]), row[None].clone()) for row in scores])
    assert not torch.equal(apart, scores)
    sampler = Sampler(processor=whole)
    with Device() as device:
        for part in whole.parts:  # what it may hold there
            if hasattr(part, "suppress_tokens"):
                part.suppress_tokens = there(part.suppress_tokens)
        together = sampler.scores_of_rows(there(scores.clone()))
    assert not device.reads
    torch.testing.assert_close(together.as_subclass(torch.Tensor), apart, rtol=1e-6, atol=1e-6)


def test_one_part_decides_for_all():
    cases: list[tuple[list[Any], bool, bool]] = [
        (WARPERS["all"], True, True),
        (PENALTY, False, True),
        ([theirs.TypicalLogitsWarper(0.6)], False, True),
        ([*PENALTY, theirs.MinLengthLogitsProcessor(4, 1)], False, False),
        ([theirs.SuppressTokensLogitsProcessor([1]), *WARPERS["all"]], True, False),
        ([theirs.SequenceBiasLogitsProcessor({(1,): 1.0})], False, False),
    ]
    for parts, rowwise, anywhere in cases:
        sampler = Sampler(processor=processor(parts))
        assert (sampler.rowwise, sampler.anywhere) == (rowwise, anywhere)
    for own in (ban_repeats, processor([ban_repeats, *WARPERS["all"]])):
        assert not Sampler(processor=own).rowwise and not Sampler(processor=own).anywhere
    assert Sampler(processor=processor([ban_repeats, *WARPERS["all"]])).inner().rowwise
    assert not Sampler(constraint=Odd()).rowwise and Sampler(constraint=Odd()).anywhere
