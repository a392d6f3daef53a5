"""What several threads may do at once: use a model and its engines, and one engine together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tiny import PROMPTS, tiny
from transformers import PreTrainedModel

from forerun.block import Block
from forerun.caches.full import FullCache
from forerun.model.scorer import Scorer
from forerun.tree import DraftTree

PATIENCE = 60.0
"""Seconds after which a test that hangs fails."""


class Stage:
    """Holds threads up in a model's forward pass, after its first layer, until they are let go."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._inside: dict[int, threading.Event] = {}
        self._gates: dict[int, threading.Event] = {}
        self._pool = ThreadPoolExecutor(4)
        model.model.layers[0].register_forward_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        me = threading.get_ident()
        if me in self._gates:
            self._inside[me].set()
            assert self._gates[me].wait(PATIENCE)

    def enter(self, work: Callable[[], Any]) -> tuple[Future[Any], threading.Event]:
        """Start ``work`` in a thread of its own, up to the middle of its first pass; and what lets it go on."""
        inside, gate = threading.Event(), threading.Event()

        def run() -> Any:
            me = threading.get_ident()
            self._inside[me], self._gates[me] = inside, gate
            try:
                return work()
            finally:
                del self._gates[me]

        future = self._pool.submit(run)
        assert inside.wait(PATIENCE)
        return future, gate


def score(scorer: Scorer, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return scorer.score([Block(np.array(prompt), DraftTree.empty(), 0)], [FullCache()])[0]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("first", ["ours", "own"])
def test_a_pass_and_the_model_s_own_forward_pass_do_not_meet(attention: str, first: str) -> None:
    model = copy.deepcopy(tiny("mistral"))  # its windows make masks, and "eager" takes one
    model.set_attn_implementation(attention)
    ours, own = Scorer(model), torch.tensor([PROMPTS[1]])

    def ask() -> torch.Tensor:
        with torch.inference_mode():
            return model(own, use_cache=False).logits[0]

    works = {"ours": lambda: score(ours, PROMPTS[0]), "own": ask}
    alone = {name: work() for name, work in works.items()}
    stage = Stage(model)
    second = "own" if first == "ours" else "ours"
    begun, gate = stage.enter(works[first])
    assert torch.equal(works[second](), alone[second])
    gate.set()
    assert torch.equal(begun.result(PATIENCE), alone[first])
    assert model.config._attn_implementation == attention


def test_the_first_of_two_passes_to_end_leaves_the_other_its_attention() -> None:
    model = copy.deepcopy(tiny("llama"))
    before, scorers = model.config._attn_implementation, (Scorer(model), Scorer(model))
    alone = [score(scorer, prompt) for scorer, prompt in zip(scorers, PROMPTS, strict=False)]
    stage = Stage(model)
    begun = [stage.enter(lambda i=i: score(scorers[i], PROMPTS[i])) for i in range(2)]
    for (future, gate), expected in zip(begun, alone, strict=True):
        gate.set()
        assert torch.equal(future.result(PATIENCE), expected)
    assert model.config._attn_implementation == before
