"""Elsewhere than on a CPU a drafting pass, and a step, wait for one transfer for all rows; clocks wait for passes."""

import itertools
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as theirs
from support.away import PLACE, Device, here, there
from support.mocks import PROMPT, MockScorer, MockTarget, Silent, TokenCache, ban_repeats, opened
from support.tiny import PROMPTS, small_caches, tiny

import forerun
from forerun.core import transfers
from forerun.core.block import Block, RowScores
from forerun.core.request import Request
from forerun.core.sampling import InTurn, Sampler
from forerun.core.transfers import RowChoices, choose_rows, synchronize, to_cpu
from forerun.core.tree import DraftTree
from forerun.decoding import level as level_module
from forerun.decoding.level import Level
from forerun.decoding.planner import Planner
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine import step as engine_step
from forerun.engine.step import BatchRow, DecodingStep
from forerun.kv.full_cache import FullCache
from forerun.models.text.processors import of_row
from forerun.policy.calibration import ChainConfidence

MODEL = tiny("llama")
WARPED = [of_row(each, MODEL) for each in ([], [theirs.TemperatureLogitsWarper(0.7)], [theirs.TopKLogitsWarper(3)])]


def mixed(method: str) -> list[Sampler]:
    return [*(Sampler(method, seed, each) for seed, each in enumerate(WARPED)), Sampler(method, 7, ban_repeats)]


class AwayScorer(MockScorer):
    def score_rows(self, blocks: Sequence[Block], *rest: Any) -> list[RowScores]:
        return [RowScores(there(row.logits)) for row in super().score_rows(blocks, *rest)]


class ChainScorer(AwayScorer):
    """Takes token ids that lie there, as a scorer does that goes by tables."""

    by_tables = True

    def score_rows(self, blocks: Sequence[Block], *rest: Any) -> list[RowScores]:
        known = [
            block if block.ids is None else Block(here(block.ids).numpy(), block.tree, block.start) for block in blocks
        ]
        return super().score_rows(known, *rest)


class ChoosingScorer(ChainScorer):
    """Chooses inside the pass, by the blocks' noise. ``chosen``: how many tokens."""

    chosen = 0

    def score_rows(self, blocks: Sequence[Block], *rest: Any) -> list[RowScores]:
        choose = pytest.importorskip("forerun.kernels.gpu.token_choice", reason="Triton is not installed").choose
        found = super().score_rows(blocks, *rest)
        counts = [len(row.logits) for row in found]
        noise = [
            torch.zeros(count, 2, dtype=torch.int64) if block.noise is None else torch.from_numpy(block.noise)
            for count, block in zip(counts, blocks, strict=True)
        ]
        self.chosen += sum(counts)
        best = there(choose(torch.cat([here(row.logits) for row in found]), torch.cat(noise)))
        return [row._replace(best=own) for row, own in zip(found, best.split(counts), strict=True)]


def tokens_of(tree: Any) -> tuple[list[int], list[int]]:
    return np.asarray(tree.tokens).tolist(), np.asarray(tree.parents).tolist()


class Unsure(ChainConfidence):
    """Ends a chain at a token that is less likely than ``enough``, and notes what it was told."""

    def __init__(self, enough: float) -> None:
        super().__init__()
        self.enough, self.told = enough, list[float]()

    def chance(self, probability: float) -> float:
        self.told.append(probability)
        return float(probability >= self.enough)


def drafting(
    scorer: type[MockScorer], samplers: list[Sampler], enough: float | None, eos: frozenset[int]
) -> tuple[list[DraftTree], int, Unsure]:
    """Drafts for one row of each sampler, passes made for them, and what ended chains."""
    small = scorer(MockTarget(6, peak=2.0, seed=3))
    level = Level(small, Planner(), cache=lambda *_: TokenCache(), chain=4, helper=True)
    level._confidence = unsure = Unsure(enough or 0.0)
    requests = [
        Request((*PROMPT, row % 6), 3 + row, sampler=sampler, eos_token_ids=eos) for row, sampler in enumerate(samplers)
    ]
    rows = [opened(level, request, FullCache()) for request in requests]
    assert all(level.read(row, 100) for row in rows)
    small.passes = 0
    limit = Limit(30) if enough is None else Limit(30, 0.5)
    return level.propose(rows, [limit] * len(rows)), small.passes, unsure


def assert_same_drafts(here: Sequence[DraftTree], away: Sequence[DraftTree], method: str) -> None:
    for mine, own in zip(here, away, strict=True):
        assert tokens_of(mine) == tokens_of(own)
        assert (own.q is None) == (mine.q is None) == (method != "rejection" or not len(mine))
        if mine.q is not None and own.q is not None:
            assert torch.equal(own.q.as_subclass(torch.Tensor), mine.q)


every_chain = list(itertools.product(["greedy", "coupled", "rejection"], [None, 0.4], [frozenset(), frozenset({0, 4})]))


@pytest.mark.parametrize(("method", "enough", "eos"), every_chain)
def test_a_drafting_pass_takes_one_transfer_for_all_rows(method, enough, eos):
    here, passes, _ = drafting(MockScorer, mixed(method), enough, eos)
    with Device() as device:
        away, *_ = drafting(AwayScorer, mixed(method)[:-1], enough, eos)
    assert passes > 1 and 1 < len(device.reads) <= passes and set(device.reads) == {"cpu"}
    assert_same_drafts(here[:-1], away, method)
    assert all(map(len, away))


@pytest.mark.parametrize(("method", "enough", "eos"), every_chain)
@pytest.mark.parametrize("scorer", [ChainScorer, ChoosingScorer])
def test_a_chain_stays_on_the_device_where_token_ids_may(method, enough, eos, scorer):
    """The drafts and their ``q`` are those of single steps, whether passes choose or not. There is one transfer for the
    tokens that all rows still want; for three at most, if chains may end early."""
    here, passes, asked = drafting(MockScorer, mixed(method)[:-1], enough, eos)
    with Device() as device:
        away, more, told = drafting(scorer, mixed(method)[:-1], enough, eos)
    lengths = {len(tree) for tree in here}
    assert set(device.reads) == {"cpu"} and len(device.reads) < passes
    if enough is None and not eos:
        assert len(device.reads) == len(lengths) and more == passes
    assert more <= passes + 2 * len(here)
    assert sorted(told.told) == pytest.approx(sorted(asked.told))
    assert_same_drafts(here, away, method)


def test_a_chance_is_asked_for_with_the_token_it_belongs_to():
    seen = []
    for kind in (MockScorer, AwayScorer):
        with Device():
            seen.append(drafting(kind, mixed("coupled")[:-1], 1e-9, frozenset())[2].told)
    assert seen[0] == pytest.approx(seen[1]) and len(set(seen[0])) > 5


# Steps


def rows_of(samplers: list[Sampler], **options: Any) -> list[BatchRow]:
    return [BatchRow(Request(PROMPT, 12, sampler=each, **options), TokenCache(), chunk=64) for each in samplers]


class Guess(Source):
    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        branches = [[a, b] for a in range(6) for b in range(6)]
        return [DraftTree.from_branches(branches, 42).cut(42, row.request.max_draft_depth, 6) for row in rows]


def step_of(scorer: MockScorer, source: Source | None, budget: int, clock: Any = time.perf_counter) -> DecodingStep:
    return DecodingStep(Level(scorer, Planner(source), clock=clock), budget)


@pytest.mark.parametrize("method", ["greedy", "coupled"])
def test_a_step_takes_one_transfer_for_all_rows(method):
    """Whether the pass chooses or not, over trees."""
    target, texts = MockTarget(6, peak=2.0, seed=3), []
    for kind in (MockScorer, AwayScorer, ChoosingScorer):
        rows = rows_of(mixed(method)[:-1])
        step = step_of(kind(target), Guess(), 42)
        with Device() as device:
            for number in range(4):
                step(rows, {})
                assert len(device.reads) == (number + 1) * (kind is not MockScorer)
        texts.append([row.request.tokens.tolist() for row in rows])
    assert texts[0] == texts[1] == texts[2] and len(texts[0][0]) == len(PROMPT) + 12


@pytest.mark.parametrize("nodes", [0, 1, 15, 16])
def test_a_row_is_never_processed_alone(nodes):
    """A plain step and a tree have the same bits, as torch's kernels of several rows do not depend on how many."""
    seen: list[int] = []

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(len(scores))
        return scores

    request = Request(PROMPT, 40, sampler=Sampler("coupled", 3, InTurn((noted,), rowwise=True)))
    logits = torch.randn(nodes + 1, 9, generator=torch.Generator().manual_seed(nodes))
    found = transfers.choose_nodes(DraftTree.chain(range(nodes)), logits, request)
    assert seen == {0: [2], 1: [2], 15: [16], 16: [16, 2]}[nodes]
    right = request.sampler.choices(logits.float(), range(len(request), len(request) + nodes + 1))
    assert torch.equal(found, right)


def test_a_pass_that_chooses_leaves_nothing_to_choose(monkeypatch):
    """For greedy rows and those that divide logits, but not where a processor does more, or a chain has ``q``."""
    own = [*mixed("coupled")[:-1], Sampler(), *mixed("rejection")[:1]]
    chosen, choose = list[Sampler](), transfers.choose_nodes

    def noted(tree: DraftTree, logits: torch.Tensor, request: Request) -> torch.Tensor:
        chosen.append(request.sampler)
        return choose(tree, logits, request)

    monkeypatch.setattr(transfers, "choose_nodes", noted)
    scorer, rows = ChoosingScorer(MockTarget(6)), rows_of(own)
    with Device():
        step_of(scorer, Guess(), 42)(rows, {})
    assert chosen == [own[2]] and scorer.chosen > len(own)
    chain = DraftTree.chain([1], torch.full((1, 6), 1 / 6))
    for sampler, left in zip(own, (False, False, True, False, True), strict=True):
        assert transfers._ready(chain, Request(PROMPT, 2, sampler=sampler), True) is not left
        assert transfers._ready(chain, Request(PROMPT, 2, sampler=sampler), False) is sampler.takes_best


def test_a_row_that_fails_leaves_the_others_their_transfer():
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise LookupError("in the test")

    samplers = [Sampler("coupled", 1), Sampler("coupled", 2, InTurn((fail,), rowwise=True)), Sampler("coupled", 3)]
    rows = rows_of(samplers)
    with Device() as device:
        step_of(AwayScorer(MockTarget(6)), None, 4)(rows, {})
    assert device.reads == ["cpu"]
    assert [len(row.request.generated) for row in rows] == [1, 0, 1] and isinstance(rows[1].request.error, LookupError)
    told = choose_rows(
        [DraftTree.empty()] * 2, [LookupError(), RowScores(torch.eye(3))], [Request([1], 2), Request([1], 2)]
    )
    assert told == [RowChoices(), RowChoices()] and to_cpu([]) == []


def test_recycled_logits_and_chances_come_with_the_choices():
    """All that a step's drafter and verification read of two rows is one transfer."""
    trees = [DraftTree.chain([1, 2]), DraftTree.empty()]
    logits = [torch.randn(3, 9, generator=torch.Generator().manual_seed(3)), torch.arange(9.0)[None]]
    requests = [Request([1], 5), Request([1], 5)]
    with Device() as device:
        found = choose_rows(trees, [RowScores(there(each)) for each in logits], requests, best=4, chances=True)
    assert device.reads == ["cpu"]
    for own, mine in zip(logits, found, strict=True):
        best = own.topk(4)
        assert mine.choices is not None and mine.best is not None and mine.chances is not None
        assert mine.choices.tolist() == own.argmax(-1).tolist()
        assert mine.best.tokens.tolist() == best.indices.tolist() and mine.best.scores.tolist() == best.values.tolist()
        assert torch.allclose(torch.tensor(mine.chances), own.softmax(-1).amax(-1).double(), atol=1e-7)


def test_a_trie_learns_from_the_step_s_own_transfer():
    drafter, rows = TrieSource(), rows_of([Sampler()] * 3)
    step = step_of(AwayScorer(MockTarget(6, peak=2.0, seed=3)), drafter, 8)
    for row in rows:
        step.level.begin(row)
    with Device() as device:
        for number in range(3):
            step(rows, {})
            assert device.reads == ["cpu"] * (number + 1)
    for row in rows:
        row.close()


def test_log_probabilities_of_a_step_take_one_transfer():
    target, kept = MockTarget(6, peak=2.0, seed=3), []
    for kind in (MockScorer, AwayScorer):
        rows = rows_of([Sampler()], top_logprobs=2)
        with Device() as device:
            step_of(kind(target), Guess(), 42)(rows, {})
        kept.append(rows[0].request.logprobs)
    assert kept[0] == kept[1] and len(kept[0]) == 3 and device.reads == ["cpu", "cpu"]


@pytest.mark.parametrize("lower", [False, True])
def test_a_pass_is_timed_until_it_is_done(monkeypatch, lower):
    """A pass takes five seconds, which go by where someone waits for it: with the transfer of its choices."""
    now, waited = [0.0], []
    for module in (engine_step, level_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(trees: Any, scored: Any, *rest: Any, **options: Any) -> Any:
        waited.append(scored[-1].logits.device.type)
        now[0] += 5.0
        return choose_rows(trees, scored, *rest, **options)

    monkeypatch.setattr(level_module, "choose_rows", wait)
    target = MockTarget(6, peak=2.0, seed=3)
    [row] = rows_of([Sampler()])
    with Device():
        if lower:
            level = Level(
                AwayScorer(target), Planner(Silent()), cache=lambda *_: TokenCache(), nodes=1, chain=2, helper=True,
                clock=lambda: now[0],
            )  # fmt: skip
            row.open(level.walk())
            assert level.read(row, 100)
            level.propose([row], [Limit(4)])
            stats = row.request.stats.inner()
        else:
            step = step_of(AwayScorer(target), None, 4, lambda: now[0])
            step([row], {})
            step([row], {})
            stats = row.request.stats
    assert set(waited) == {PLACE.type}
    expected = 10.0 if lower else 5.0
    assert (stats.propose_seconds, stats.score_seconds, stats.verify_seconds) == (0.0, expected, 0.0)


def test_only_the_present_stream_is_waited_for_and_nothing_on_a_cpu(monkeypatch):
    waited: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waited.append(device) or stream)
    synchronize(torch.device("cpu"))
    assert waited == []
    synchronize(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1"), "done"]


# Engines, whose tensors lie on the CPU, and which are told that they do not


@pytest.mark.one_in(4)
@pytest.mark.parametrize("drafter", ["lookup", "triforce", "triforce-trie", "low-rank"])
@pytest.mark.parametrize("verification", ["greedy", "coupled", "rejection"])
def test_an_engine_gives_the_same_text_either_way(monkeypatch, drafter, verification):
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": verification != "greedy"}
    if verification != "greedy":
        options |= {"seed": 3, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "verification": verification}

    def texts() -> Any:
        engine = forerun.Engine(MODEL, drafter, settings=small_caches(MODEL), prune_drafts=False)
        return engine.generate([*PROMPTS], **options).generated

    expected, asked = texts(), []
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: bool(asked.append(1))))
    assert texts() == expected and asked
