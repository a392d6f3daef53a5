"""What is said about sparse caches is so on tiny models, where it can be computed in other ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.saved_models import save_model
from support.tiny import tiny
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.long_context import needles
from benchmarks.long_context.analysis import Follower, Makers, on_prose, overlap
from benchmarks.long_context.bytes_read import at_end
from benchmarks.long_context.long_bench import LongBench, Prefilled, prefill, sampled
from benchmarks.long_context.needles import Haystack, NeedleQuestion, UnverifiedDecoder
from benchmarks.long_context.texts import Texts
from benchmarks.papers.baselines import SPARSE
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.kv.retrieval import RetrievalConfig

PROMPT = [7 + i * i % 40 for i in range(90)]
SMALL = LongContextConfig(cache_budget=16, chunk=2, sinks=1)
LARGE = LongContextConfig(cache_budget=1000, chunk=2, sinks=1)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny("llama"), "none", prefill_block=32)


@pytest.fixture
def prompt(engine: Engine) -> Prefilled:
    return prefill(engine, PROMPT, 60)


def makers(settings: LongContextConfig) -> Makers:
    return {name: make(settings) for name, make in SPARSE.items()}


def plain(engine: Engine, tokens: list[int], new_tokens: int) -> list[int]:
    request = sampled(0.0, new_tokens)(engine, tokens, "none")
    for _ in engine.run([request]):
        pass
    return request.generated.tolist()


# --- acceptance


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_cache_that_holds_everything_foresees_everything(
    engine: Engine, prompt: Prefilled, temperature: float
) -> None:
    found = Follower(engine.target, prompt, makers(LARGE)).acceptance(10, temperature)
    assert set(found) == set(SPARSE)
    assert all(share == pytest.approx(1, abs=1e-6) for share in found.values())


def test_a_small_cache_foresees_less_and_the_text_is_plain_s(engine: Engine, prompt: Prefilled) -> None:
    follower = Follower(engine.target, prompt, makers(SMALL))
    found = follower.acceptance(12, 1.0)
    assert all(0 < share < 0.999 for share in found.values())
    assert follower.acceptance(12, 1.0) == found  # it starts from the prompt again
    expected = engine.generate(PROMPT, max_new_tokens=12, do_sample=True, temperature=1.0, top_k=0, seed=0)
    cache = prompt.cache
    assert cache.length == len(PROMPT) + 11
    again = engine.prefill([*PROMPT, *expected.generated[0][:-1], 0])
    for mine, theirs in zip(cache.read(1, 0, cache.length), again.read(1, 0, cache.length), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_suffix_is_read_by_all_before_the_continuation(engine: Engine) -> None:
    whole, part = (prefill(engine, PROMPT[:length], 60) for length in (90, 70))
    by_whole = Follower(engine.target, whole, makers(SMALL)).acceptance(8, 1.0)
    text = Prefilled(part.tokens, part.cache)
    by_suffix = Follower(engine.target, text, makers(SMALL)).acceptance(8, 1.0, suffix=PROMPT[70:])
    for name in ("topk", "retrieval"):  # the others' states depend on how the text was cut into passes
        assert by_suffix[name] == pytest.approx(by_whole[name])


def test_overlap_is_the_chance_that_rejection_sampling_accepts() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    assert overlap(p.log(), q.log(), 1.0) == pytest.approx(0.7)
    assert overlap(p.log(), q.log(), 0.0) == 0
    assert overlap(p.log(), torch.tensor([0.4, 0.6]).log(), 1.0) == pytest.approx(0.4 + 0.3)  # knows fewer tokens
    assert overlap(p.log(), p.log(), 0.0) == 1


def test_rows_name_what_they_measure(engine: Engine, prompt: Prefilled) -> None:
    first, rows = on_prose(engine.target, [prompt] * 2, makers(SMALL), [0.0, 1.0], 2)  # after each prompt
    assert [row["positions"] for row in first] == [2] * len(rows)
    assert len(rows) == 2 * len(SPARSE)
    assert {row["context"] for row in rows} == {90} and {row["positions"] for row in rows} == {4}


# --- what a token reads

ROW = 2 * 8 * 8
"""Bytes of a key and its value of one of the tiny model's KV heads, float64."""


def test_a_token_reads_of_each_layer_what_its_cache_shows_it(engine: Engine, prompt: Prefilled) -> None:
    """Against a simple model: two KV heads; 89 tokens before the one that reads, which reads itself, too."""
    config = engine.target.model.config
    heads = config.num_key_value_heads
    assert config.hidden_size // config.num_attention_heads * 2 * 8 == ROW
    keys = {
        "none": 90,
        "topk": 90,  # the oracle goes over all
        "streaming": 1 + 15 + 1,  # a sink, the window, itself
        "retrieval": 2 * RetrievalConfig(16, 2).slots + 3 + 1,  # chunks, recent tokens up to the chunk's edge, itself
    }
    for name, count in keys.items():
        found = at_end(engine.target, prompt, None if name == "none" else SPARSE[name](SMALL))
        assert found.rows == dict.fromkeys(range(2), heads * count * ROW), name
        assert sum(found.index.values()) == 0
        assert found.choice == (2 * heads * 43 * 8 * 2 if name == "retrieval" else 0)  # 43 means of 8 halves, 2 layers


@torch.inference_mode()
def test_queries_of_a_group_read_a_chunk_once_and_the_index_beside(engine: Engine, prompt: Prefilled) -> None:
    settings = replace(SMALL, cache_budget=64)
    found = at_end(engine.target, prompt, SPARSE["low-rank"](settings))
    view = SPARSE["low-rank"](settings)(engine.target, prompt.cache)
    view.sync()
    seen: dict[int, set[int]] = {}
    prompt.rewind()
    engine.target.score([Block(np.array(PROMPT[-1:]), DraftTree.empty(), 89)], [prompt.cache])
    queries = prompt.cache.queries[0]  # only the first layer's: later ones have seen what the sparse cache shows
    worth = view.worth(0, queries)
    for head, row in enumerate(worth[:, 0].tolist()):
        best = sorted(range(1, 5), key=lambda chunk: -row[chunk])[: view.slots(0)]
        near = [chunk for chunk in best if (row[best[0]] - row[chunk]) * 8**-0.5 <= 7]
        seen.setdefault(head // 2, {0}).update(near)
    chunks = sum(map(len, seen.values()))
    assert found.rows[0] == ROW * (16 * chunks + 2 * (89 - 80 + 1))
    assert found.index[0] == 2 * 80 * 8  # eight dimensions of a byte


def test_a_layer_with_a_window_reads_its_window() -> None:
    engine = Engine(tiny("mistral"), "none", prefill_block=32)
    window = engine.target.model.config.sliding_window
    prompt = prefill(engine, PROMPT, 20)
    heads = engine.target.model.config.num_key_value_heads
    for name in ("none", "retrieval", "low-rank"):
        found = at_end(engine.target, prompt, None if name == "none" else SPARSE[name](SMALL))
        assert set(found.rows.values()) == {heads * window * ROW} and not sum(found.index.values())


# --- needles


def test_a_haystack_holds_what_it_asks_for() -> None:
    texts = Texts(lambda text: list(text.encode()))
    found = needles.build(texts, 0, 4000, 5)
    text = bytes(found.text).decode()
    assert 3000 < len(found.text) < 5000
    assert len({bytes(question.prompt) for question in found.questions}) == 5
    for question in found.questions:
        answer = bytes(question.answer).decode().strip()
        assert text.index(answer) == pytest.approx(question.depth * len(text), abs=1)
    assert needles.build(texts, 0, 4000, 5) == found
    with pytest.raises(ValueError, match="41 needles do not fit into a context of 4000 tokens; at most 40 do"):
        needles.build(texts, 0, 4000, 41)


@pytest.mark.parametrize("name", SPARSE)
def test_alone_over_a_cache_that_holds_everything_is_plain(engine: Engine, name: str) -> None:
    text, question = PROMPT[:70], PROMPT[70:]
    read = needles.read_text(engine, Haystack(text, [NeedleQuestion(question, [1], 0.5)]), 60)
    assert read.cache.length == 70
    expected = plain(engine, PROMPT, 8)
    alone = UnverifiedDecoder(engine.target, name, LARGE, read.cache, text)
    for _ in range(2):
        assert alone.generate(question, 8)[0] == expected
    assert alone.generate(question[:5], 8)[0] == plain(engine, PROMPT[:75], 8)


def test_accuracy_counts_right_answers_of_all_contestants(engine: Engine) -> None:
    text, asked = PROMPT[:70], [PROMPT[70:80], PROMPT[80:]]
    answers = [plain(engine, [*text, *question], 4) for question in asked]
    right, wrong = NeedleQuestion(asked[0], answers[0], 0.2), NeedleQuestion(asked[1], [answers[1][0] + 1], 0.8)
    haystack = Haystack(text, [right, wrong])
    read = needles.read_text(engine, haystack, 60)
    rows = needles.run(LongBench(engine, 1), haystack, read, ["retrieval"], SMALL, 8)
    assert [row["contestant"] for row in rows] == ["plain", "retrieval", *(f"{name} alone" for name in SPARSE)]
    assert [row["lossless"] for row in rows] == [True] * 2 + [False] * len(SPARSE)
    assert [row["accuracy"] for row in rows[:2]] == [0.5, 0.5]
    assert rows[0]["right_at_depths"] == [0.2]


# --- the command


def test_the_command_writes_acceptance_on_prose_and_needles(tmp_path: Path) -> None:
    model = str(save_model(tmp_path / "model"))
    book = tmp_path / "book.txt"
    book.write_text("\n\n".join("again and again and so on and on" for _ in range(200)))
    sizes = ["--context", "400", "--temperatures", "0,1", "--chunk", "2"]
    common = ["--cache-budget", "32", "--window", "16", "-n", "4", "--needles", "2", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(
        app, ["long-context", "analyse", "-m", model, "--text", str(book), *sizes, *common, "--json"]
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found["parts"]) == {"acceptance"}
    plots = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert plots == {"analyse-acceptance"}
    assert "## Acceptance of sparse caches of 32 tokens" in (tmp_path / "out" / "analyse.md").read_text()
