"""Measuring long contexts on tiny ones: what is compared, computed and reported is right; no time is asserted."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import tiny

from benchmarks.capacity.gpu_cost import chain_seconds, expected_tokens
from benchmarks.capacity.shapes import ModelShape, random_model
from benchmarks.long_context import long_bench as longcontext
from benchmarks.long_context import needles
from benchmarks.long_context.long_bench import LongBench, LongRun, LongSeries, Prefilled, prefill, sampled, shortened
from benchmarks.long_context.needles import Haystack, NeedleQuestion, UnverifiedDecoder
from benchmarks.long_context.texts import Texts
from benchmarks.papers.simulated_acceptance import random_prompt, simulated
from forerun.core.long_context import LongContextConfig
from forerun.core.stats import Stats
from forerun.decoding.recipes import SPARSE
from forerun.engine.engine import Engine

SETTINGS = LongContextConfig(tiny("qwen3"), gamma1=2, gamma2=4, cache_budget=24, chunk=4, sinks=1, window=8)
DRAFTERS = ["triforce", "triforce-trie", "streaming", "retrieval"]
PROMPT = [7 + i * i % 40 for i in range(90)]
SHAPE = ModelShape(1, 32, 48, 4, 2, 48)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama"), "none", prefill_block=32)


def test_contestants_give_plain_s_text_and_rows_say_so(engine):
    bench = LongBench(engine, rounds=2)
    rows = [prefill(engine, PROMPT[:length], 40) for length in (90, 61)]
    series = bench.run([rows], DRAFTERS, SETTINGS, sampled(0.7, 10))
    found = longcontext.summarise(series, context=90)
    assert [row["contestant"] for row in found] == ["none", *DRAFTERS]
    for row in found:
        assert row["same_output"] == 1 and row["context"] == 90 and row["time_to_first_token"] is not None
    assert found[0]["acceptance"] is None and found[0]["tokens_per_step"] == 1
    assert all(len(run.texts) == 2 and len(run.texts[0]) == 10 for run in series[0].runs[0])
    assert len(series[0].runs[0]) == 2


def test_prefill_time_of_a_shorter_context_is_what_had_passed_by_then(engine):
    whole = Prefilled(PROMPT, engine.prefill(PROMPT), [(32, 1.0), (64, 3.0), (89, 5.0)])
    assert whole.seconds == 5
    cut = Prefilled(whole.tokens[:49], whole.cache, whole.read)
    assert cut.seconds == 2
    assert Prefilled(PROMPT, whole.cache).seconds is None
    cut.rewind()
    assert whole.cache.length == 48


@pytest.mark.parametrize("length", [90, 61])
def test_a_rewound_prompt_has_the_queries_that_its_last_pass_left(engine, length):
    """So that a sparse cache chooses before the first token, as behind a prompt that was just read."""
    prompt = shortened(engine, prefill(engine, PROMPT, 40), length)
    expected = engine.prefill(PROMPT[:length]).queries
    for _ in range(2):
        LongBench(engine, 1).run([[prompt]], ["low-rank"], SETTINGS, sampled(0.0, 5))
        prompt.rewind()
        assert prompt.cache.length == length - 1
        assert prompt.cache.queries.keys() == expected.keys() != set()
        for layer, queries in prompt.cache.queries.items():
            assert torch.allclose(queries[:, :, -1], expected[layer][:, :, -1], atol=1e-12)


def run_of(seconds: float, text: list[int], accepted: list[int]) -> LongRun:
    stats = Stats(drafted=[4] * len(accepted), accepted=accepted, emitted=[a + 1 for a in accepted])
    return LongRun([text], 0.5, seconds, len(text) - 1, [stats])


def test_speed_is_by_medians_and_spread_by_rounds():
    plain = LongSeries("none", [[run_of(s, [1] * 9, []) for s in (4.0, 8.0, 4.0)]], [10.0])
    fast = LongSeries("x", [[run_of(s, [1] * 9, [4, 3, 0]) for s in (2.0, 2.0, 1.0)]], [10.0])
    assert longcontext.acceptance([run.stats[0] for run in fast.runs[0]]) == 7 / 9
    assert fast.speed_ups(plain) == [2, 4, 4]
    both = longcontext.combine([[plain, fast], [plain, fast]])
    assert len(both[1].runs) == 2 and both[1].tokens_per_second == 4
    for stats in (run.stats[0] for run in plain.runs[0]):
        stats.record(0, 0, 1)
    row = longcontext.summarise([plain, fast])[1]
    assert (row["speed_up"], row["slowest"], row["fastest"]) == (2, 2, 4)
    assert row["time_to_first_token"] == 10.5


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_speed_up_is_never_beyond_the_slowest_and_fastest_round(prompts, rounds, data):
    def run() -> LongRun:
        return run_of(data.draw(st.floats(0.1, 10)), [1] * 9, [1])

    plain, fast = (
        LongSeries(name, [[run() for _ in range(rounds)] for _ in range(prompts)], [None] * prompts)
        for name in ("none", "x")
    )
    row = longcontext.summarise([plain, fast])[1]
    assert row["slowest"] <= row["speed_up"] <= row["fastest"]


def plain(engine: Engine, tokens: list[int], new_tokens: int) -> list[int]:
    request = sampled(0.0, new_tokens)(engine, tokens, "none")
    list(engine.run([request]))
    return request.generated.tolist()


def test_a_haystack_holds_what_it_asks_for():
    texts = Texts(lambda text: list(text.encode()))
    found = needles.build(texts, 0, 4000, 5)
    text = bytes(found.text).decode()
    assert 3000 < len(found.text) < 5000
    assert len({bytes(question.prompt) for question in found.questions}) == 5
    for question in found.questions:
        assert bytes(question.answer).decode().strip() in text
    assert needles.build(texts, 0, 4000, 5) == found
    with pytest.raises(ValueError, match="41 needles do not fit into a context of 4000 tokens; at most 40 do"):
        needles.build(texts, 0, 4000, 41)


@pytest.mark.parametrize("name", SPARSE)
def test_alone_over_a_cache_that_holds_everything_is_plain(engine, name):
    text, question = PROMPT[:70], PROMPT[70:]
    read = needles.read_text(engine, Haystack(text, [NeedleQuestion(question, [1])]), 60)
    assert read.cache.length == 70
    expected = plain(engine, PROMPT, 8)
    alone = UnverifiedDecoder(engine.target, name, replace(SETTINGS, cache_budget=1000), read.cache, text)
    for _ in range(2):
        assert alone.generate(question, 8)[0] == expected
    assert alone.generate(question[:5], 8)[0] == plain(engine, PROMPT[:75], 8)


def test_accuracy_counts_right_answers_of_all_contestants(engine):
    text, asked = PROMPT[:70], [PROMPT[70:80], PROMPT[80:]]
    answers = [plain(engine, [*text, *question], 4) for question in asked]
    right, wrong = NeedleQuestion(asked[0], answers[0]), NeedleQuestion(asked[1], [answers[1][0] + 1])
    haystack = Haystack(text, [right, wrong])
    read = needles.read_text(engine, haystack, 60)
    rows = needles.run(LongBench(engine, 1), haystack, read, ["retrieval"], SETTINGS, 8)
    assert [row["contestant"] for row in rows] == ["plain", "retrieval", *(f"{name} alone" for name in SPARSE)]
    assert [row["lossless"] for row in rows] == [True] * 2 + [False] * len(SPARSE)
    assert [row["accuracy"] for row in rows[:2]] == [0.5, 0.5]


def test_expected_tokens_of_a_chain_are_those_of_every_outcome():
    for drafts, a in itertools.product((0, 1, 3), (0.0, 0.4, 1.0)):
        total = 0.0
        for hits in itertools.product((True, False), repeat=drafts):
            chance = 1.0
            for hit in hits:
                chance *= a if hit else 1 - a
            total += chance * (1 + len(list(itertools.takewhile(bool, hits))))
        assert expected_tokens(a, drafts) == pytest.approx(total)


def test_drafting_time_is_that_of_played_rounds():
    def middle(tokens: int) -> float:
        return 1.5 + 0.5 * tokens

    rng, inner, drafts, gamma1, seconds, games = random.Random(0), 0.6, 5, 2, 0.0, 20_000
    for _ in range(games):
        missing = drafts
        while missing:
            tested = min(gamma1, missing - 1)
            accepted = next((i for i in range(tested) if rng.random() >= inner), tested)
            seconds += gamma1 * 0.5 + middle(tested + 1)
            missing -= accepted + 1
    assert chain_seconds(drafts, gamma1, inner, middle, 0.5)[-1] == pytest.approx(seconds / games, rel=0.01)
    assert chain_seconds(5, 2, 0.6, middle, None)[-1] == 10


@pytest.fixture(scope="module")
def simulator() -> Engine:
    return Engine(random_model(SHAPE, torch.float32), "none")


@pytest.mark.parametrize(
    ("drafter", "accepted", "inner"), [("triforce", 0.8, 0.5), ("retrieval", 0.8, None), ("streaming", 0.5, None)]
)
def test_simulated_acceptance_is_what_was_stated(simulator, drafter, accepted, inner):
    settings = LongContextConfig(random_model(SHAPE, torch.float32), 2, 4, False, 24, 4, window=8)
    prompt = random_prompt(simulator.target, 100, 180, 48)
    series = LongBench(simulator, 1).run([[prompt]], [drafter], settings, simulated(0.8, 0.5, 160, 48))
    row = longcontext.summarise(series)[1]
    assert row["same_output"] == 1
    assert row["acceptance"] == pytest.approx(accepted, abs=0.1)
    assert row["middle_acceptance"] == (None if inner is None else pytest.approx(inner, abs=0.1))
    assert row["time_to_first_token"] is None  # nothing was read


def test_texts_are_cut_from_files_in_turn_and_what_is_no_text_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    (tmp_path / "picture").write_bytes(b"\x89PNG")
    for wrong, message in {"no": "there is no such file or folder", "picture": "no text in UTF-8"}.items():
        with pytest.raises(ValueError, match=message):
            Texts.read([tmp_path / wrong], lambda text: [])
    texts = Texts.read([tmp_path], lambda text: list(text.encode()))
    assert [texts.tokens(i, 3)[0] for i in range(3)] == [97, 98, 97]
    with pytest.raises(ValueError, match=r"a.txt gives 4 tokens for prompt 3; 12 are needed"):
        texts.tokens(2, 12)
    texts.check(2, 12)
    with pytest.raises(ValueError, match=r"a.txt gives 4 tokens for prompt 3; 12 are needed"):
        texts.check(3, 12)
    assert len(Texts.read([], lambda text: list(text.encode())).tokens(0, 500)) == 500
