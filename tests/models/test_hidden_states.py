"""Hidden states that a pass hands over: the model's own, of every layer, at every token, however the pass is made."""

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import pytest
import torch
from support.compiled_models import TEXT, kept
from support.tiny import PROMPTS, tiny
from transformers import PreTrainedModel

from forerun import Engine
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source, Wants
from forerun.kernels.runtime import vector_ir
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import Tiers, min_device_bytes
from forerun.models.forward.compiled_scorer import CompiledScorer, fastest_scorer
from forerun.models.forward.scorer import Scorer

TREE = DraftTree(np.array([5, 6, 7, 8]), np.array([-1, 0, 0, 2]))


def own(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1)


@torch.inference_mode()
def check(scorer: Scorer, caches: list[Any], near: float) -> None:
    """Two rows, one with a cached beginning, over a tree."""
    model = scorer.model
    layers = (2, 0, 1, model.config.num_hidden_layers)
    texts = [TEXT[:9] % 40, TEXT[20:33] % 40]
    first = Block(texts[0][:4], DraftTree.empty(), 0)
    scorer.score([first], caches[:1])
    caches[0].commit(first, [])
    blocks = [Block(texts[0][4:], TREE, 4), Block(texts[1], TREE, 0)]
    rows = scorer.score_rows(blocks, caches, layers)
    for row, logits in zip(rows, scorer.score(blocks, caches), strict=True):
        assert torch.equal(row.logits, logits)
    for text, start, row in zip(texts, (4, 0), rows, strict=True):
        for branch in ([0, 1], [0, 2, 3]):
            exact = own(model, [*text.tolist(), *TREE.tokens[branch].tolist()], layers)
            end = len(text) - start
            found = row.states[[*range(end), *(end + node for node in branch)]]
            assert float((found - exact[start:]).norm() / exact[start:].norm()) < near


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_states_of_the_models_own_code(name):
    check(Scorer(tiny(name)), [FullCache(), FullCache()], 1e-9 if name != "gemma2" else 1e-6)


@pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")
@pytest.mark.parametrize(("name", "away"), [
    ("llama", False), ("gemma3_text", False), ("granite", False), ("olmo2", False), ("llama", True)])  # fmt: skip
def test_states_of_the_program(name, away):
    """Of rows on the device, or off it."""
    scorer = fastest_scorer(Scorer(kept(name, torch.float32)))
    assert isinstance(scorer, CompiledScorer)
    with ExitStack() as stack:
        caches = [FullCache(), FullCache()]
        if away:
            given = min_device_bytes(scorer.kv, 4096), scorer.device, scorer.kv, torch.float32
            caches = [stack.enter_context(closing(Tiers(*given))).cache(4096) for _ in range(2)]
            assert all(cache.offloaded for cache in caches)
        check(scorer, caches, 1e-5)


class Recorder(Source):
    """Wants states, and drafts with knowledge of the text."""

    def __init__(self, texts: list[list[int]], layers: tuple[int, ...]) -> None:
        self.texts, self.wants = texts, Wants(states=layers)
        self.read_states: dict[int, list[tuple[int, torch.Tensor]]] = {}

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            parts = self.read_states.setdefault(row.request.prompt_length, [])
            parts.append((outcome.start, outcome.states.clone()))

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        trees = []
        for row in rows:
            prompt = row.request.prompt.tolist()
            text = next(text for text in self.texts if text[: len(prompt)] == prompt)
            after = text[len(row.request) : len(row.request) + 4]
            trees.append(DraftTree.from_branches([[3, 4], after], 9))
        return trees


def test_an_engine_hands_a_drafter_the_states_of_every_token_of_a_text_once():
    model, layers = tiny("llama"), (1, 2)
    texts = Engine(model, "none").generate(list(PROMPTS), max_new_tokens=20, eos_token_id=None)
    expected = [request.tokens.tolist() for request in texts.requests]
    drafter = Recorder(expected, layers)
    engine = Engine(model, drafter, prune_drafts=False, prefill_block=4)
    found = engine.generate(list(PROMPTS), max_new_tokens=20, eos_token_id=None)
    assert [request.tokens.tolist() for request in found.requests] == expected
    assert any(sum(request.stats.accepted) for request in found.requests)
    for text, prompt in zip(expected, PROMPTS, strict=True):
        starts, parts = zip(*drafter.read_states[len(prompt)], strict=True)
        assert starts == tuple(itertools.accumulate(map(len, parts[:-1]), initial=0))
        found = torch.cat(parts)[: len(text) - 1]
        assert torch.allclose(found, own(model, text, layers)[:-1], atol=1e-9)
