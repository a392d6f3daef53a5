"""The host's part of a step on a GPU, counted on a CPU: replays and kernels do nothing."""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support.wait_counter import WaitCounter

from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.gpu.counting import LaunchCounter
from benchmarks.gpu.host_time import HOST_DRAFTERS, HostTimeOptions, host_rows, host_runtime
from benchmarks.gpu.interpreter import host_code
from forerun.core.long_context import LongContextConfig
from forerun.decoding import device_chain
from forerun.decoding.planner import AdaptivePlanner
from forerun.engine.engine import Engine
from forerun.models.forward.cuda_graphs import RECORDED_TOKENS, GraphCache
from forerun.models.forward.gpu_scorer import GpuScorer

TEXTS = np.random.default_rng(0).integers(0, 61, (8, 20)).tolist()


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    with host_code():
        yield


def model(layers: int = 4) -> Any:
    return random_model(ModelShape(layers, 32, 32, 4, 2, 61), torch.bfloat16)


def triforce() -> Engine:
    """An engine whose small model has two layers."""
    how = {"cache_budget": 8, "chunk": 2, "gamma1": 3, "gamma2": 4, "paced": False, "sparse": "retrieval"}
    return engine_of(model(), "triforce", LongContextConfig(model(2), **how))


def engine_of(own: Any, drafter: str, settings: LongContextConfig | None = None, budget: int = 63) -> Engine:
    """Its drafts have no more tokens than recorded passes."""
    return Engine(
        own, drafter, settings=settings, budget=budget, prune_drafts=drafter == "auto", _runtime=host_runtime()
    )


def steps_of(engine: Engine, rows: int = 1, **options: Any) -> tuple[Counter[str], int, dict[str, int]]:
    """What a step launches, copies to the device, and waits for. Only drafts that were accepted out of their order are
    moved, in some steps."""
    requests = engine.requests(TEXTS[:rows], max_new_tokens=9, eos_token_id=None, **options)
    steps = engine.run(requests)
    next(steps)
    with WaitCounter(torch.device("cpu")) as waits, LaunchCounter() as launches:
        before = [request.stats.steps for request in requests]
        for _ in steps:
            pass
    count = max(request.stats.steps - first for request, first in zip(requests, before, strict=True))
    kernels = {name: number for name, number in launches.kernels.items() if name not in ("index_select", "copy_")}
    moves = launches.kernels["index_select"]
    found = [*kernels.values(), launches.copies - moves, *waits.counts.values()]
    assert count > 0 and not any(number % count for number in found), (launches.kernels, count)
    each = Counter({name: number // count for name, number in kernels.items()})
    waited = {name: number // count for name, number in waits.counts.items()}
    return each, (launches.copies - moves) // count, waited


PLAIN = {"clone": 2}, 1, {"transfers": 1}
"""A step's kernels, copies and waits."""
SAMPLED = [{}, {"do_sample": True, "top_k": 0, "temperature": 0.7, "seed": 3}]


@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_plain_step_keeps_its_results_and_brings_the_tokens(rows, options):
    """Also of sampled rows, whose tokens the pass chooses."""
    assert steps_of(engine_of(model(), "none"), rows, **options) == PLAIN


@pytest.mark.parametrize("options", SAMPLED)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_with_drafts_finds_the_best_tokens_of_all_rows_at_once(rows, options):
    kernels, *rest = steps_of(engine_of(model(), "trie", budget=64 // rows - 1), rows, **options)
    assert kernels == {"clone": 2, "topk": 1, "to": 1, "cat": 1} and rest == [*PLAIN[1:]]


def test_a_step_that_skips_drafting_is_a_plain_one(monkeypatch):
    """Also if a draft was made, and none of it was worth its cost."""
    engine, own = engine_of(model(), "auto"), AdaptivePlanner.plan
    monkeypatch.setattr(AdaptivePlanner, "plan", lambda *given: (own(*given), None)[1])
    assert steps_of(engine) == PLAIN


def test_every_size_of_one_row_is_recorded_when_an_engine_is_made(monkeypatch):
    """By the first engine of a model, for all of them. Texts of one row find all their sizes there."""
    asked, recording = [], GraphCache._recording
    own = model()
    plain = engine_of(own, "none")
    assert isinstance(plain.target, GpuScorer)
    recorded = [graphs.keys for graphs in plain.target._program.graphs.values()]
    assert [len(keys) for keys in recorded] == [7]

    def noted(self: Any, batch: Any) -> Any:
        if batch.sizes.tokens <= RECORDED_TOKENS:  # not a prompt's end with a draft
            asked.append((batch.sizes.rounded(batch.group), batch.aligned))
        return recording(self, batch)

    monkeypatch.setattr(GraphCache, "_recording", noted)
    for drafter in ("none", "trie", "auto"):
        engine = engine_of(own, drafter)
        asked.clear()
        for text in TEXTS[:3]:
            engine.generate(text, max_new_tokens=12, eos_token_id=None)
        assert asked and set(asked) <= recorded[0] and engine.target._program is plain.target._program
    assert plain.target.recordings == 7


def test_a_copy_of_a_model_has_recordings_of_its_own():
    own = model()
    first = GpuScorer(own)
    other = GpuScorer(copy.deepcopy(own))
    assert other._program is not first._program
    assert GpuScorer(own)._program is first._program


def test_an_inner_chain_is_one_transfer(monkeypatch):
    """TriForce: the small model's tokens stay on the device until the last of them."""
    engine = triforce()
    passes, pieces, own_pass, own_draft = Counter[int](), list[int](), GpuScorer._pass, device_chain.draft

    def one_pass(self: GpuScorer, *given: Any) -> Any:
        passes[len(self._program.layers.places)] += 1
        return own_pass(self, *given)

    steps = engine.run(engine.requests(TEXTS[:1], max_new_tokens=12, eos_token_id=None))
    next(steps)
    monkeypatch.setattr(GpuScorer, "_pass", one_pass)
    monkeypatch.setattr(device_chain, "draft", lambda *given: pieces.append(given[2]) or own_draft(*given))
    with WaitCounter(torch.device("cpu")) as waits:
        for _ in steps:
            pass
    assert pieces and max(pieces) == 3 and passes[2] == sum(pieces)
    assert waits.counts["transfers"] == passes[4] + len(pieces)


def test_a_sampled_chain_launches_what_a_greedy_one_does(monkeypatch):
    """Its noise is part of the recorded pass, whatever the temperature."""
    engine, own_draft, found = triforce(), device_chain.draft, list[Any]()

    def drafted(scorer: Any, rows: Any, count: int, chances: bool) -> Any:
        with LaunchCounter() as launches:
            pieces = own_draft(scorer, rows, count, chances)
        found.append((count, launches.copies, dict(launches.kernels)))
        return pieces

    monkeypatch.setattr(device_chain, "draft", drafted)
    sampled = {"do_sample": True, "top_k": 0, "seed": 3}
    per_kind = []
    for options in ({}, sampled, sampled | {"temperature": 0.7}):
        found.clear()
        for _ in engine.run(engine.requests(TEXTS[:2], max_new_tokens=12, eos_token_id=None, **options)):
            pass
        per_kind.append({count: (copies, kernels) for count, copies, kernels in found if count == 3})
    assert per_kind[0] and per_kind[0] == per_kind[1] == per_kind[2]
    assert per_kind[0][3][0] == 3


def test_queries_of_all_layers_are_copied_at_once(monkeypatch):
    """One operation for each row of a pass that keeps them."""
    settings = LongContextConfig(cache_budget=8, chunk=2, gamma2=4, paced=False)
    hand_over, found = GpuScorer._hand_over_queries, list[Counter[str]]()

    def counted(self: GpuScorer, *given: Any) -> None:
        with LaunchCounter() as launches:
            hand_over(self, *given)
        found.append(launches.kernels)

    monkeypatch.setattr(GpuScorer, "_hand_over_queries", counted)
    for layers in (2, 4):
        engine = engine_of(model(layers), "retrieval", settings)
        found.clear()
        for _ in engine.run(engine.requests(TEXTS[:2], max_new_tokens=9, eos_token_id=None)):
            pass
        assert Counter(cat=2) in found and all(each <= Counter(cat=2) for each in found)


def test_the_measurement_runs():
    """Of each drafter; a plain step is as counted above."""
    rows = list(host_rows(HostTimeOptions(layers=2, tokens=3, rounds=1)))
    assert [row["drafter"] for row in rows[::2]] == list(HOST_DRAFTERS)
    assert (rows[0]["kernels"], rows[0]["copies"]) == (2, 1) and rows[0]["microseconds"] > 0
