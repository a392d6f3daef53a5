"""Elsewhere than on a CPU a drafting pass, and a step, wait for one transfer for all rows; clocks wait for passes."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.generation.logits_process as theirs
from support.away import PLACE, AwayScorer, Device, there, tokens_of
from support.mocks import PROMPT, MockScorer, MockTarget, TokenCache, ban_repeats
from support.tiny import PROMPTS, tiny

import forerun
from forerun.core.long_context import LongContextConfig
from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.sampling import InTurn, Sampler
from forerun.core.transfers import RowChoices, carried, foresee, settle
from forerun.core.tree import DraftTree
from forerun.drafting.drafter import NoDrafter
from forerun.drafting.hierarchy import HierarchyDrafter
from forerun.drafting.model_drafter import ModelDrafter
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.engine.step import DecodingStep, Row
from forerun.kv.full_cache import FullCache
from forerun.models.forward.runtime import Runtime, default_runtime
from forerun.models.text.processors import of_row

MODEL = tiny("llama")
WARPED = [of_row(each, MODEL) for each in ([], [theirs.TemperatureLogitsWarper(0.7)], [theirs.TopKLogitsWarper(3)])]


def mixed(method: str) -> list[Sampler]:
    return [*(Sampler(method, seed, each) for seed, each in enumerate(WARPED)), Sampler(method, 7, ban_repeats)]  # type: ignore[arg-type]


def drafting(
    scorer: type[MockScorer], samplers: list[Sampler], enough: Any, eos: frozenset[int]
) -> tuple[list[DraftTree], int]:
    """Drafts for one row of each sampler, and passes made for them."""
    small = scorer(MockTarget(6, peak=2.0, seed=3))
    drafter = ModelDrafter(lambda *_: TokenCache(), 4, small)  # type: ignore[arg-type]
    drafter.bind(MockScorer(MockTarget(6)), default_runtime())  # type: ignore[arg-type]
    requests = [
        Request((*PROMPT, row % 6), 3 + row, sampler=sampler, eos_token_ids=eos) for row, sampler in enumerate(samplers)
    ]
    for request in requests:
        drafter.prefilled(request, FullCache())
        assert drafter.catch_up(request, 100)
    small.passes = 0
    return drafter.propose(replace(PassContext.decoding(requests, 30), stop=enough)), small.passes


@pytest.mark.parametrize("method", ["greedy", "coupled", "rejection"])
@pytest.mark.parametrize("enough", [None, lambda request, chance: chance < 0.4])
@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({0, 4})])
def test_a_drafting_pass_takes_one_transfer_for_all_rows(method: str, enough: Any, eos: frozenset[int]) -> None:
    here, passes = drafting(MockScorer, mixed(method), enough, eos)
    with Device() as device:
        away, _ = drafting(AwayScorer, mixed(method), enough, eos)
    assert device.reads == ["cpu"] * passes and passes > 1
    for mine, own in zip(here, away, strict=True):
        assert tokens_of(mine) == tokens_of(own) and len(mine)
        assert (own.q is None) == (mine.q is None) == (method != "rejection")
        if mine.q is not None and own.q is not None:
            assert torch.equal(own.q.as_subclass(torch.Tensor), mine.q)


def test_a_chance_is_asked_for_with_the_token_it_belongs_to() -> None:
    seen: dict[type[MockScorer], list[tuple[int, float]]] = {MockScorer: [], AwayScorer: []}
    for kind, found in seen.items():

        def enough(request: Request, chance: float, found: list[tuple[int, float]] = found) -> bool:
            found.append((int(request.tokens[-1]), chance))
            return False

        with Device():
            drafting(kind, mixed("coupled"), enough, frozenset())
    assert seen[MockScorer] == seen[AwayScorer] and len({chance for _, chance in seen[MockScorer]}) > 5


# Steps


def rows_of(samplers: list[Sampler], **options: Any) -> list[Row]:
    return [Row(Request(PROMPT, 12, sampler=each, **options), TokenCache(), 64) for each in samplers]  # type: ignore[arg-type]


class Guess(NoDrafter):
    def propose(self, context: PassContext) -> list[DraftTree]:
        branches = [[a, b] for a in range(6) for b in range(6)]
        return [DraftTree.from_branches(branches, 42).trim(r.max_draft_depth, 6) for r in context.rows]


@pytest.mark.parametrize("method", ["greedy", "coupled"])
def test_a_step_takes_one_transfer_for_all_rows(method: str) -> None:
    target, texts = MockTarget(6, peak=2.0, seed=3), []
    for kind in (MockScorer, AwayScorer):
        rows = rows_of(mixed(method)[:-1])
        step = DecodingStep(kind(target), Guess(), 42)  # type: ignore[arg-type]
        with Device() as device:
            for number in range(4):
                step(rows, {})
                assert len(device.reads) == (number + 1) * (kind is AwayScorer)
        texts.append([row.request.tokens.tolist() for row in rows])
    assert texts[0] == texts[1] and len(texts[0][0]) == len(PROMPT) + 12


def test_a_row_that_fails_leaves_the_others_their_transfer() -> None:
    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise LookupError("in the test")

    samplers = [Sampler("coupled", 1), Sampler("coupled", 2, InTurn((fail,), rowwise=True)), Sampler("coupled", 3)]
    rows = rows_of(samplers)
    with Device() as device:
        DecodingStep(AwayScorer(MockTarget(6)), NoDrafter(), 4)(rows, {})  # type: ignore[arg-type]
    assert device.reads == ["cpu"]
    assert [len(row.request.generated) for row in rows] == [1, 0, 1] and isinstance(rows[1].request.error, LookupError)
    told = foresee([DraftTree.empty()] * 2, [LookupError(), torch.eye(3)], [Request([1], 2), Request([1], 2)])
    assert told == [RowChoices(), RowChoices()] and carried([]) == []


def test_recycled_logits_and_chances_come_with_the_choices() -> None:
    """All that a step's drafter and verification read of two rows is one transfer."""
    trees = [DraftTree.chain([1, 2]), DraftTree.empty()]
    logits = [torch.randn(3, 9, generator=torch.Generator().manual_seed(3)), torch.arange(9.0)[None]]
    requests = [Request([1], 5), Request([1], 5)]
    with Device() as device:
        found = foresee(trees, [there(each) for each in logits], requests, best=4, chances=True)
    assert device.reads == ["cpu"]
    for own, mine in zip(logits, found, strict=True):
        best = own.topk(4)
        assert mine.choices is not None and mine.best is not None and mine.chances is not None
        assert mine.choices.tolist() == own.argmax(-1).tolist()
        assert mine.best.tokens.tolist() == best.indices.tolist() and mine.best.scores.tolist() == best.values.tolist()
        assert torch.allclose(torch.tensor(mine.chances), own.softmax(-1).amax(-1).double(), atol=1e-7)


def test_a_trie_learns_from_the_step_s_own_transfer() -> None:
    """Recycled logits of all rows ride along."""
    drafter, rows = TrieDrafter(), rows_of([Sampler()] * 3)
    drafter.bind(AwayScorer(MockTarget(6)), default_runtime())  # type: ignore[arg-type]
    for row in rows:
        drafter.begin(row.request)
    step = DecodingStep(AwayScorer(MockTarget(6, peak=2.0, seed=3)), drafter, 8)  # type: ignore[arg-type]
    with Device() as device:
        for number in range(3):
            step(rows, {})
            assert device.reads == ["cpu"] * (number + 1)
    for row in rows:
        drafter.finish(row.request)


def test_log_probabilities_of_a_step_take_one_transfer() -> None:
    target, kept = MockTarget(6, peak=2.0, seed=3), []
    for kind in (MockScorer, AwayScorer):
        rows = rows_of([Sampler()], top_logprobs=2)
        with Device() as device:
            DecodingStep(kind(target), Guess(), 42)(rows, {})  # type: ignore[arg-type]
        kept.append(rows[0].request.logprobs)
    assert kept[0] == kept[1] and len(kept[0]) == 3 and device.reads == ["cpu", "cpu"]


@pytest.mark.parametrize("module", ["forerun.engine.step", "forerun.drafting.hierarchy"])
def test_a_pass_is_timed_until_it_is_done(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """A pass takes five seconds, which go by where someone waits for it: with the transfer of its choices."""
    now, waited, own = [0.0], [], importlib.import_module(module)
    if module.endswith("step"):
        monkeypatch.setattr(own, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def wait(trees: Any, logits: Any, *rest: Any, **options: Any) -> Any:
        waited.append(logits[-1].device.type)
        now[0] += 5.0
        return foresee(trees, logits, *rest, **options)

    monkeypatch.setattr(own, "foresee", wait)
    target = MockTarget(6, peak=2.0, seed=3)
    [row] = rows_of([Sampler()])
    with Device():
        if module.endswith("step"):
            step = DecodingStep(AwayScorer(target), NoDrafter(), 4)  # type: ignore[arg-type]
            step([row], {})
            step([row], {})
            stats = row.request.stats
        else:
            drafter = HierarchyDrafter(NoDrafter(), lambda *_: TokenCache(), 1, 2, AwayScorer(target))  # type: ignore[arg-type]
            drafter.bind(MockScorer(target), Runtime(clock=lambda: now[0]))  # type: ignore[arg-type]
            drafter.prefilled(row.request, FullCache())
            assert drafter.catch_up(row.request, 100)
            drafter.propose(PassContext.decoding([row.request], 4))
            stats = row.request.stats.inner()
    expected = 5.0 if module.endswith("step") else 10.0
    assert set(waited) == {PLACE.type}
    assert (stats.propose_seconds, stats.score_seconds, stats.verify_seconds) == (0.0, expected, 0.0)


def test_only_the_present_stream_is_waited_for_and_nothing_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("done"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: waited.append(device) or stream)
    settle(torch.device("cpu"))
    assert waited == []
    settle(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1"), "done"]


# Engines, whose tensors lie on the CPU, and which are told that they do not


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafter", ["lookup", "triforce", "triforce-trie", "low-rank"])
@pytest.mark.parametrize("verification", ["greedy", "coupled", "rejection"])
def test_an_engine_gives_the_same_text_either_way(
    monkeypatch: pytest.MonkeyPatch, drafter: str, verification: str
) -> None:
    settings = LongContextConfig(
        tiny("llama"), gamma1=2, gamma2=5, cache_budget=10, chunk=2, sinks=1, window=4, paced=False
    )
    options: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": verification != "greedy"}
    if verification != "greedy":
        options |= {"seed": 3, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "verification": verification}

    def texts() -> Any:
        engine = forerun.Engine(MODEL, drafter, settings=settings, prune_drafts=False)
        return engine.generate([*PROMPTS], **options).generated

    expected, asked = texts(), []
    for name in ("core.transfers", "core.verify", "drafting.model_drafter"):
        monkeypatch.setattr(f"forerun.{name}.elsewhere", lambda tensor: asked.append(1) or True)
    assert texts() == expected and asked
