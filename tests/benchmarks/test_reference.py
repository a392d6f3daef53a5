"""The bundled models' package: tokenizer, tasks, positions, recipe and exports. No bundled weights are needed."""

import itertools
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.training import corpus, crowding, material, recipe, tasks, tokenizer, train
from benchmarks.training.hybrid import hybrid_of
from benchmarks.training.optim import Muon
from benchmarks.training.recipe import Recipe, Stage
from benchmarks.training.tasks import Material
from forerun import reference

PROSE = Material(prose=tuple(f"Paragraph {i} tells of a {i * 7} year old elm. It stood still." for i in range(60)))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def small_tokenizer() -> PreTrainedTokenizerFast:
    return tokenizer.train(tokenizer.sample(PROSE, synthetic=60), vocabulary=512)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    train.train_quick(folder / "out", folder / "weights")
    return folder


@given(text=st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_the_tokenizer(small_tokenizer, text):
    assert small_tokenizer.decode(small_tokenizer(text).input_ids) == text


@pytest.mark.parametrize("kind", ["rag", "needle", "table", "quote"])
def test_tasks_repeat_for_a_seed_and_answers_say_their_sources_again(kind):
    for texts in (Material(), PROSE):
        drawn = [tasks.make(kind, Random(seed), texts) for seed in range(30)]
        assert drawn == [tasks.make(kind, Random(seed), texts) for seed in range(30)]
        assert len({task.prompt for task in drawn}) > 20
    for task in drawn:
        assert task.sources and all(source in task.prompt for source in task.sources)
        assert kind == "table" or all(source in task.answer for source in task.sources)


@pytest.mark.parametrize("seed", range(20))
def test_answers_quote_one_document_or_are_json_equal_to_the_table(seed):
    task = tasks.make("rag", Random(seed), PROSE)
    quoted = task.answer.removeprefix(" According to the documents: ").rstrip(".").split(". ")
    assert any(all(sentence in line for sentence in quoted) for line in task.prompt.splitlines() if line[0:1] == "[")
    task = tasks.make("table", Random(seed))
    lines = task.prompt.removeprefix("Table:\n").split("\n\n")[0].splitlines()
    cells = [line.split(" | " if "|" in line else ",") for line in lines if "---" not in line]
    expected = [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]
    assert [{key: str(value) for key, value in record.items()} for record in json.loads(task.answer)] == expected


def test_crowding_spares_neighbours_and_sources_only():
    added = crowding.bias(12, [crowding.Source(9, 11, 1, 3)], times=8.0, window=4)
    for query, key in itertools.product(range(12), repeat=2):
        source = 9 <= query < 11 and 1 <= key < 3
        expected = -math.inf if key > query else 0.0 if query - key < 4 or source else math.log(8)
        assert float(added[query, key]) == pytest.approx(expected)


def test_rows_name_their_sources_by_token(small_tokenizer):
    data = corpus.build(PROSE, small_tokenizer)
    for kind in ("spans", "needle", "quote"):
        row = corpus.row(data, kind, 512, Random(4))
        assert row.sources
        for source in row.sources:
            asked = row.tokens[source.first_query : source.last_query]
            found = row.tokens[source.first_key : source.last_key]
            assert source.last_key <= source.last_query <= len(row)
            assert sum(token in found for token in asked) >= 0.6 * min(len(asked), len(found))


def test_word_problems_are_split_keep_odd_line_ends_and_a_line_without_a_pair_is_named(tmp_path):
    rows = [{"prompt": f"Question: {i}\u2028?\nAnswer: ", "answer": str(i)} for i in range(40)]
    file = tmp_path / "maths.jsonl"
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    kept, held_out = material.read_maths(file)
    assert (len(kept), len(held_out)) == (38, 2)
    assert held_out[0] == ("Question: 0\u2028?\nAnswer:", " 0")
    for line, what in (
        ('{"prompt": "p"}', "has no answer"), ('{"answer": "a"}', "has no prompt"), ("{", "is no JSON"),
        ('{"prompt": "p", "answer": 3}', "has no answer"), ("[]", "has no prompt"),
    ):  # fmt: skip
        file.write_text('{"prompt": "p", "answer": "a"}\n\n' + line, encoding="utf-8")
        with pytest.raises(ValueError, match=rf"maths.jsonl, line 3 {what}"):
            material.read_held_out(None, file)


def test_batches_are_a_function_of_seed_and_step(small_tokenizer):
    data = corpus.build(PROSE, small_tokenizer)
    stage = Stage("all", 1.0, length=128, rows=6, mix={"prose": 1, "rag": 1, "table": 1, "quote": 1, "spans": 1})
    one, same, other = (corpus.batch(data, stage, seed=3, step=step) for step in (5, 5, 6))
    assert torch.equal(one.tokens, same.tokens) and torch.equal(one.positions, same.positions)
    assert not torch.equal(one.tokens, other.tokens)
    assert one.tokens.shape == one.weights.shape == one.positions.shape == (6, 128)


def test_spans_put_the_loss_on_what_was_seen_before_only(small_tokenizer):
    data = corpus.build(PROSE, small_tokenizer)
    row = corpus.spans(data, 256, Random(0))
    tokens, weights = row.tokens, row.weights
    first = weights.index(corpus.SPAN_WEIGHT)
    assert 64 <= first < 200 and len(tokens) == len(weights) == 256
    pairs = set(itertools.pairwise(tokens))
    weighted = [i for i, weight in enumerate(weights) if weight]
    assert all((tokens[i - 1], tokens[i]) in pairs for i in weighted)


@given(seed=st.integers(0, 2**32), length=st.integers(2, 4096))
def test_positions_increase_within_the_limit(seed, length):
    drawn = corpus.gapped_positions(np.random.default_rng(seed), length, share=0.8)
    assert len(drawn) == length and drawn[0] >= 0 and drawn[-1] < corpus.POSITIONS
    assert (np.diff(drawn) >= 1).all()


def test_gaps_need_a_mask_of_ones_or_transformers_masks_across_them():
    torch.manual_seed(0)
    model = LlamaForCausalLM(recipe.TINY.config()).double().eval()
    tokens = torch.randint(512, (1, 32))
    plain, gaps = torch.arange(32)[None], torch.arange(32)[None] + (torch.arange(32) >= 20) * 1000
    ones = torch.ones_like(tokens)

    def scores(place: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            return log_softmax(model(tokens, attention_mask=mask, position_ids=place, use_cache=False).logits, -1)

    assert torch.allclose(scores(plain, ones), scores(plain + 500, ones))  # RoPE is relative
    assert torch.allclose(scores(plain, ones), scores(plain, None))
    cut = model(tokens[:, 20:], position_ids=torch.arange(12)[None]).logits
    assert torch.allclose(scores(gaps, None)[:, 20:], log_softmax(cut, -1))  # taken for a second, packed sequence
    assert not torch.allclose(scores(gaps, ones)[:, 20:], log_softmax(cut, -1))


@pytest.mark.parametrize("shape", [(32, 48), (48, 32)])
def test_muon_takes_the_steps_of_torchs_own(shape):
    torch.manual_seed(0)
    begin, gradients = torch.randn(shape), torch.randn(5, *shape)
    ends = []
    for kind in (Muon, torch.optim.Muon):
        weight = torch.nn.Parameter(begin.clone())
        optimizer = kind([weight], lr=0.02, weight_decay=0.01)
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        ends.append(weight.detach())
    torch.testing.assert_close(*ends, atol=1e-3, rtol=0)  # torch's own rounds to bfloat16
    assert (ends[0] - begin).abs().max() > 0.02


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(quick, tmp_path):
    for stop_after in (3, 2, None):
        train.train_quick(tmp_path / "out", tmp_path / "weights", stop_after)
    name = "target/checkpoint/model.safetensors"
    whole, pieces = load_file(quick / "out" / name), load_file(tmp_path / "out" / name)
    assert whole.keys() == pieces.keys() and all(torch.equal(whole[key], pieces[key]) for key in whole)
    logs = [(folder / "out/target/log.jsonl").read_text().splitlines() for folder in (quick, tmp_path)]
    last = [json.loads(log[-1]) for log in logs]
    assert last[0]["step"] == last[1]["step"] == 8 and last[0]["means"] == last[1]["means"]


def test_exports_load_with_transformers(quick):
    folder = quick / "weights" / "target"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = AutoTokenizer.from_pretrained(folder)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == loaded.eos_token_id == 0
    text = "Naïve 73914 \n\t— ok"
    assert loaded.decode(loaded(text).input_ids) == text
    made = model.generate(torch.tensor([loaded(text).input_ids]), max_new_tokens=4, do_sample=False)
    assert made.shape[1] > len(loaded(text).input_ids)


def test_a_hybrid_takes_over_what_it_can_and_learns_the_rest(tmp_path):
    rng = Random(0)
    texts = Material(tuple(tasks.paragraph(rng, Material()) for _ in range(200)))
    plan = Recipe(recipe.TARGET, stages=recipe.QUICK, steps=4, log_every=2)
    train.train_hybrid(texts, plan, tmp_path / "out", tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights" / "hybrid", dtype=torch.float32)
    assert model.config.layer_types == ["full_attention", "conv", "conv", "full_attention"]
    target = AutoModelForCausalLM.from_pretrained(reference.bundled("target"), dtype=torch.float32)
    tokens = torch.tensor([[7, 300, 12, 900, 44, 7, 300]])
    begun = hybrid_of(target, tokens)
    layer, ours = begun.model.layers[0], target.model.layers[0]
    assert torch.equal(layer.feed_forward.w2.weight, ours.mlp.down_proj.weight)
    assert torch.equal(layer.self_attn.out_proj.weight, ours.self_attn.o_proj.weight)
    q = ours.self_attn.q_proj(ours.input_layernorm(target.model.embed_tokens(tokens))).unflatten(-1, (4, 64))
    size = q.square().mean(-1).sqrt().mean()
    torch.testing.assert_close(layer.self_attn.q_layernorm.weight, size.expand(64))
    pairs = [*zip(model.parameters(), begun.parameters(), strict=True)]
    assert sum(not torch.equal(a, b.bfloat16().float()) for a, b in pairs) > 0.9 * len(pairs)


@pytest.mark.parametrize(("given", "out", "weights"), [
    ((), "runs/reference/quick", "runs/reference/quick/weights"), (("--out", "a"), "a", "a/weights"),
    (("--hybrid",), "runs/reference/quick", "runs/reference/quick/weights"),
    (("--out", "a", "--weights", "b"), "a", "b"),
])  # fmt: skip
def test_a_quick_run_replaces_neither_the_bundled_models_nor_a_real_run(monkeypatch, given, out, weights):
    called: list[tuple[Path, Path]] = []
    monkeypatch.setattr(train, "train_quick", lambda out, weights: called.append((out, weights)))
    arguments = ["train-bundled", "--quick", "--threads", str(torch.get_num_threads()), *given]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert called == [(Path(out), Path(weights))]


def test_importing_the_package_imports_no_torch():
    code = "import sys, forerun.reference as r; r.demo_prompts(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_missing_weights_name_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(reference, "_HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match="make reference"):
        reference.bundled("target")
    with pytest.raises(ValueError, match=r"not 'teacher'"):
        reference.bundled("teacher")  # type: ignore[arg-type]


def test_bundled_models_are_small_and_share_a_tokenizer():
    try:
        folders = [reference.bundled("target"), reference.bundled("draft")]
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    assert sum(path.stat().st_size for folder in folders for path in folder.iterdir()) < 32 * 2**20
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()
