"""A step beside rows that decode reads no more of prompts than its time allows, and the text is the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tiny import tiny

from forerun.caches.base import Cache
from forerun.core.block import Block
from forerun.core.request import Request
from forerun.decoding.engine import Engine
from forerun.decoding.pace import BESIDE, LEAST, RECENT, Pace


def after(pace: Pace, steps: int, seconds_a_token: float, plain: float = 1.0) -> list[int]:
    """What so many steps read, if a token of a prompt takes so long and a step without them ``plain``."""
    read = []
    for _ in range(steps):
        read.append(pace.tokens("reading", True))
        pace.learn(plain + seconds_a_token * read[-1], True, ["reading"] if read[-1] else [])
    return read


def test_alone_a_prompt_is_read_at_full_speed() -> None:
    pace = Pace(512)
    assert pace.tokens("reading", False) == pace.tokens("preparing", False) == 512
    pace.learn(100.0, False, ["reading", "preparing"])
    assert pace.tokens("reading", False) == pace.tokens("preparing", False) == 512


def test_each_work_has_an_amount_of_its_own() -> None:
    pace = Pace(512)
    pace.learn(1.0, True, [])
    pace.learn(100.0, True, ["preparing"])
    assert (pace.tokens("reading", True), pace.tokens("preparing", True)) == (512, 256)
    pace.learn(100.0, True, ["reading", "preparing"])
    assert (pace.tokens("reading", True), pace.tokens("preparing", True)) == (256, 128)


def test_the_first_step_beside_others_only_decodes_and_so_does_one_now_and_then() -> None:
    read = after(Pace(512), 3 * (RECENT + 1), 0.001)
    assert [i for i, tokens in enumerate(read) if not tokens] == [0, RECENT + 1, 2 * (RECENT + 1)]


@pytest.mark.parametrize("seconds", [1e-5, 0.004, 0.03, 10.0])
def test_what_is_read_settles_where_its_time_is_allowed(seconds: float) -> None:
    read = [tokens for tokens in after(Pace(512), 60, seconds) if tokens][20:]
    allowed = (BESIDE - 1) / seconds
    assert all(LEAST <= tokens <= 512 for tokens in read)
    assert max(read) <= max(LEAST, 2 * allowed)
    assert min(read) >= min(512, allowed / 4)


def test_a_small_limit_is_kept() -> None:
    assert set(after(Pace(8), 40, 10.0)) == {0, 8}


class Clock:
    """Goes on as the test tells it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("drafter", ["none", "trie", "retrieval"])
def test_a_prompt_cut_by_its_time_gives_the_same_text(drafter: str) -> None:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 48, count).tolist() for count in (5, 90, 70)]
    clock, cuts = Clock(), []

    def texts(pace: Pace | None) -> list[list[int]]:
        engine = Engine(tiny("llama"), drafter, prefill_block=64)
        assert engine.exactness == "bitwise"
        score = engine.target.score

        def timed(blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
            clock.now += 1.0 + sum(len(block.pending) - 1 for block in blocks)
            cuts.append(max(len(block.pending) for block in blocks))
            return score(blocks, caches)

        engine.target.score = timed  # type: ignore[method-assign]
        requests = [Request(prompt, max_new_tokens=30) for prompt in prompts]
        with engine.batch() as batch:
            batch.pace = pace
            for request in requests:
                batch.admit(request)
                batch.step()
            while len(batch):
                batch.step()
        return [request.generated.tolist() for request in requests]

    whole = texts(None)
    assert max(cuts) == 64
    cuts.clear()
    assert texts(Pace(64, clock)) == whole
    assert LEAST in cuts
