"""A step beside rows that decode reads no more of prompts than its time allows, and the text is the same."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from support.batches import finish
from support.tiny import build, tiny

from forerun.core.block import Block, RowScores
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.engine.batch import Batch
from forerun.engine.engine import Engine
from forerun.engine.prefill_pacing import MIN_CHUNK_TOKENS, RECENT_STEPS, STEPS_BESIDE, PrefillPacing
from forerun.kv.cache import Cache


def after(most: int, steps: int, seconds_a_token: float, plain: float = 1.0) -> list[int]:
    """What so many steps read, if a token of a prompt takes so long and a step without them ``plain``."""
    pace, tokens, read = PrefillPacing(), most, []
    for _ in range(steps):
        read.append(tokens if pace.works(True) else 0)
        seconds = plain + seconds_a_token * read[-1]
        pace.learn(seconds, read[-1] > 0)
        if read[-1]:
            tokens = pace.adjusted(tokens, seconds - plain, most)
    return read


def test_the_first_step_beside_others_only_decodes_and_so_does_one_now_and_then():
    assert PrefillPacing().works(False)  # alone it works
    read = after(512, 3 * (RECENT_STEPS + 1), 0.001)
    assert [i for i, tokens in enumerate(read) if not tokens] == [0, RECENT_STEPS + 1, 2 * (RECENT_STEPS + 1)]


@pytest.mark.parametrize(("most", "seconds"), [(512, 1e-5), (512, 0.004), (512, 0.03), (512, 10.0), (8, 10.0)])
def test_what_is_read_settles_where_its_time_is_allowed(most, seconds):
    read = [tokens for tokens in after(most, 60, seconds) if tokens][20:]
    allowed, least = (STEPS_BESIDE - 1) / seconds, min(most, MIN_CHUNK_TOKENS)
    assert all(least <= tokens <= most for tokens in read)
    assert max(read) <= max(least, allowed + 1)
    assert min(read) >= min(most, allowed - 1)


def test_a_short_chunk_says_nothing_of_longer_ones():
    pace = PrefillPacing()
    pace.learn(1.0, False)
    assert pace.adjusted(64, 0.5, 512, used=0.1) == 64
    assert pace.adjusted(64, 5.0, 512, used=0.1) == 32


def prompt_tokens(blocks: Sequence[Block]) -> int:
    return sum(len(block.pending) - 1 for block in blocks)


class Clock:
    """Goes on in an engine's passes alone, by what ``seconds`` says of their blocks and caches."""

    def __init__(self, engine: Engine, seconds: Callable[[Sequence[Block], Sequence[Cache]], float]) -> None:
        self.now, self.seconds, self.score_rows = 0.0, seconds, engine.target.score_rows
        engine.target.score_rows = self.timed

    def __call__(self) -> float:
        return self.now

    def timed(self, blocks: Sequence[Block], caches: Sequence[Cache], states_of: Sequence[int] = ()) -> list[RowScores]:
        self.now += self.seconds(blocks, caches)
        return self.score_rows(blocks, caches, states_of)

    def of(self, batch: Batch) -> float:
        """What a step of a batch takes."""
        before = self.now
        batch.step()
        return self.now - before


def long_engine() -> Engine:
    return Engine(build("LlamaForCausalLM", {"max_position_embeddings": 4096}, 0), "none", prefill_block=64)


def decoding(batch: Batch) -> None:
    """Let a row decode for as long as the test runs."""
    batch.admit(Request([5] * 9, max_new_tokens=3000, eos_token_ids=()))
    batch.step()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["trie", "none", "retrieval"])
def test_a_prompt_cut_by_its_time_gives_the_same_text(drafter):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 48, count).tolist() for count in (5, 90, 70)]

    def texts(pacing: Callable[[Clock], PrefillPacing | None]) -> tuple[list[list[int]], list[int]]:
        """The texts, and the longest chunk of each pass."""
        settings = LongContextConfig(cache_budget=16, chunk=4, gamma2=4, paced=False)
        engine = Engine(tiny("llama"), drafter, settings=settings, prefill_block=32, prune_drafts=False)
        assert engine.exactness.level == "bitwise"
        cuts: list[int] = []

        def seconds(blocks: Sequence[Block], caches: Sequence[Cache]) -> float:
            cuts.append(max(len(block.pending) for block in blocks))
            return 1.0 + prompt_tokens(blocks)

        requests = [Request(prompt, max_new_tokens=30) for prompt in prompts]
        with engine.batch(pacing=pacing(Clock(engine, seconds))) as batch:
            for request in requests:
                batch.admit(request)
                batch.step()
            finish(batch)
        assert (sum(sum(request.stats.drafted) for request in requests) > 0) == (drafter != "none")
        return [request.generated.tolist() for request in requests], cuts

    (whole, chunks), (cut, smaller) = texts(lambda clock: None), texts(PrefillPacing)
    assert cut == whole and max(chunks) == 32 and MIN_CHUNK_TOKENS in smaller


def test_a_short_prompt_beside_a_long_one_does_not_let_it_read_more():
    """Each has an amount of its own: short chunks are soon read, and a long prompt's would hold all others up."""

    def seconds(blocks: Sequence[Block], caches: Sequence[Cache]) -> float:
        read = zip(blocks, caches, strict=True)
        return 1.0 + sum(0.001 * (len(block.pending) - 1) * cache.length for block, cache in read)

    engine = long_engine()
    clock, long, took = Clock(engine, seconds), Request([7] * 1000, max_new_tokens=2), []
    with engine.batch(pacing=PrefillPacing(clock)) as batch:
        decoding(batch)
        batch.admit(long)
        while not len(long.generated):
            if len(batch) < 3:
                batch.admit(Request([6] * 100, max_new_tokens=1))
            took.append(clock.of(batch))
    far = took[len(took) // 2 :]
    assert max(far) <= 1.5 * (1 + 0.001 * MIN_CHUNK_TOKENS * 1000)


def test_short_prompts_one_after_the_other_are_paced_like_a_long_one():
    """A new one begins with what a step read of the last one, not with a whole chunk."""
    engine = long_engine()
    clock, took = Clock(engine, lambda blocks, caches: 1.0 + 0.1 * prompt_tokens(blocks)), []
    with engine.batch(pacing=PrefillPacing(clock)) as batch:
        decoding(batch)
        for _ in range(60):
            if len(batch) < 2:
                batch.admit(Request([6] * 60, max_new_tokens=1))
            took.append(clock.of(batch))
    assert max(took[6:]) <= STEPS_BESIDE + 1e-9


def test_prompts_that_share_a_step_are_read_faster_if_they_took_less_time_than_allowed():
    """Neither used its own limit; together they used it all."""
    engine, read = long_engine(), list[int]()

    def seconds(blocks: Sequence[Block], caches: Sequence[Cache]) -> float:
        read.append(prompt_tokens(blocks))
        return 1.0 + 0.05 * read[-1]

    pacing = PrefillPacing(Clock(engine, seconds))
    with engine.batch(pacing=pacing) as batch:
        decoding(batch)
        pacing.first = 16
        for _ in range(60):
            while len(batch) < 4:
                batch.admit(Request([6] * 12, max_new_tokens=1))
            batch.step()
    assert max(read[40:]) > 22
