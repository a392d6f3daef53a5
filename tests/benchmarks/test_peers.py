"""Other engines in processes of their own: orders, answers, failures, and the very weights they are given."""

import copy
import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny import tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.capacity.shapes import ModelShape
from benchmarks.peers import model_files, peers_command, weights
from benchmarks.peers.model_files import UNQUANTISED, ModelFiles
from benchmarks.peers.peer_libraries import LIBRARIES, PeerLibrary, PeerSubject, RunningPeers, check, running_peers
from benchmarks.peers.process import Peer, PeerError
from benchmarks.reporting.study_report import Report
from benchmarks.tasks.task_bench import TaskBench
from forerun.bench import report
from forerun.bench.rounds import BASELINE, PromptSet, Run, Series

VARIANTS = {"fake": {}, "fake in text": {"step": 2}, "fake that is broken": {"broken": True}}
FAKE = PeerLibrary(
    "fake-peer", {"json": "json"}, "support.fake_peer", lambda subject, folder: (folder / "graph").touch(),
    lambda subject: {}, VARIANTS,
)  # fmt: skip


def byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,:;!?()"]
    words = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", "ab", *letters])}
    backend = Tokenizer(models.BPE(words, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    assert len(made) == 48
    return made


def single() -> PreTrainedModel:
    model = copy.deepcopy(tiny("llama")).float()
    model.generation_config.eos_token_id = 2
    return model


def subject(model: PreTrainedModel) -> PeerSubject:
    return PeerSubject(model, byte_tokenizer(), None, 64)


def test_a_peer_answers_from_its_own_process(tmp_path):
    with Peer("support.fake_peer", {"folder": str(tmp_path), "threads": 3}) as peer:
        assert peer.said.startswith("fake with 3 threads")
        first = peer.run([[5]], 3)
        assert (first.texts, first.tokens, first.passes) == ([[6, 7, 8]], 1, None)
        assert first.seconds >= 0 and first.first == 0.5
        assert peer.run([[5]], 3).tokens == 2
        peer.forget()
        assert peer.run([[5]], 3).tokens == 1
        with pytest.raises(ValueError, match="one row at a time, not with 2"):
            peer.run([[5], [6]], 3)
        with pytest.raises(PeerError, match="its process ended with status 7"):
            peer.run([[666]], 3)


def test_peers_that_cannot_be_loaded_are_named_with_the_reason():
    gone = replace(FAKE, package="gone-peer", needs={"no_such_module_here": "gone-peer", "json": "json"})
    with running_peers(subject(single()), [FAKE, gone]) as found:
        assert isinstance(found, RunningPeers)
        assert list(found.contestants) == ["fake", "fake in text"]
        assert found.absent["gone-peer"] == f"not installed ({sys.executable} -m pip install gone-peer)"
        assert found.absent["fake that is broken"] == "cannot be loaded: RuntimeError: no such graph"
        assert "graph" in found.notes[0]


def test_peers_take_turns_with_the_others_and_their_texts_are_compared():
    model = tiny("llama")
    with running_peers(subject(single()), [FAKE]) as found:
        bench = TaskBench(model, ["none"], others=found.contestants)
        *_, series = bench.run(PromptSet("t", [[7, 9, 11]], [], 6), rounds=2)
        rows = [row | {"others": 0.0} for row in report.summarise(series)]  # as on a machine with nothing else to do
    by_name = {row["contestant"]: row for row in rows}
    assert by_name["fake in text"]["tokens"] == 6
    assert by_name["fake"]["same_output"] == 0
    table = report.speed_table(rows)
    assert "| fake in text | " in table and "x (" in table.split("| fake in text |")[1]
    assert "| fake | 500 | - |" in report.equality_table(rows)
    lines = report.equality_table(rows).splitlines()
    shares = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[-1].removesuffix(" |") for line in lines[2:]}
    assert {name: share for name, share in shares.items() if share != "100 %"} == {"fake": "0 %", "fake in text": "0 %"}


def test_texts_are_compared_as_text_where_only_that_is_known():
    baseline = Series(BASELINE, "t", [[Run([[1, 2]], 1.0, 2)], [Run([[3]], 1.0, 1)]])
    other = Series("x", "t", [[Run(["1-2"], 1.0, None, 2)], [Run(["4"], 1.0, None, 1)]])
    rows = report.summarise([baseline, other], decode=lambda ids: "-".join(map(str, ids)))
    assert rows[1]["same_output"] == 0.5
    assert rows[1]["tokens"] == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gguf_file_holds_the_model_s_very_weights(tmp_path, dtype):
    gguf = pytest.importorskip("gguf")
    model = single().to(dtype)
    weights.check(model, byte_tokenizer(), None)
    weights.write(model, byte_tokenizer(), tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    layer = model.model.layers[1]
    assert np.array_equal(stored["blk.1.ffn_up.weight"], layer.mlp.up_proj.weight.float().detach().numpy())
    q = torch.tensor(stored["blk.1.attn_q.weight"]).view(4, 4, 2, 32).transpose(1, 2).reshape(32, 32)
    assert torch.equal(q, layer.self_attn.q_proj.weight.float())
    assert reader.fields["llama.block_count"].contents() == 2
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 48


def test_what_a_source_file_says_is_taken_over_and_must_fit(tmp_path):
    gguf = pytest.importorskip("gguf")
    source = tmp_path / "source.gguf"
    weights.write(single(), byte_tokenizer(), source)
    weights.write(single(), byte_tokenizer(), tmp_path / "again.gguf", source)
    before, after = (gguf.GGUFReader(tmp_path / name).fields for name in ("source.gguf", "again.gguf"))
    assert before["tokenizer.ggml.merges"].contents() == after["tokenizer.ggml.merges"].contents()
    other = single()
    other.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"another model: its llama\.block_count is 2, the model's is 3"):
        weights.write(other, byte_tokenizer(), tmp_path / "other.gguf", source)


def test_models_that_peers_cannot_be_given_are_refused():
    for model, message in (
        (tiny("llama"), r"float32 and bfloat16, and the model is in torch\.float64"),
        (tiny("gpt2", torch.float32), "this is gpt2"),
        (tiny("llama, yarn", torch.float32), "plain rotary positions, and this has 'yarn'"),
    ):
        with pytest.raises(ValueError, match=message):
            check(model, byte_tokenizer(), None)


@pytest.mark.parametrize("kind", LIBRARIES, ids=lambda kind: kind.package)
def test_a_real_peer_gives_transformers_texts(kind):
    if missing := kind.missing():
        pytest.skip(f"{kind.package} is not installed: {missing}")
    model, tokenizer = single(), byte_tokenizer()
    with running_peers(subject(model), [kind]) as found:
        assert not found.absent
        bench = TaskBench(model, ["none"], others=found.contestants)
        (series,) = bench.run(PromptSet("t", [[7, 9, 11, 7, 9], [20, 21, 22]], [], 12), rounds=1)
    rows = report.summarise(series, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    shares = {row["contestant"]: row["same_output"] for row in rows if row["contestant"] in kind.variants}
    assert list(shares) == list(kind.variants)
    assert set(shares.values()) == {1.0}, json.dumps(rows, indent=1)


def test_a_random_model_of_a_shape_is_written_once(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    monkeypatch.setattr(model_files, "SHAPES", {"small": ModelShape(1, 64, 96, 2, 1, 5000, 32, True)})
    said: list[str] = []
    files = ModelFiles("small", tmp_path, sys.executable, said.append)
    file = files.find(UNQUANTISED)
    assert file == files.find(UNQUANTISED) and len(said) == 1
    reader = gguf.GGUFReader(file)
    shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
    assert shapes["token_embd.weight"] == (64, 5000) and shapes["blk.0.attn_k.weight"] == (64, 32)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == 5000


def test_speed_after_the_first_token_and_prefill_are_told_apart():
    def row(name: str, kind: str, length: int, *seconds: float) -> dict[str, object]:
        runs = [Run([[1] * 9], 0.5 + each, 9, others=0.2, first=0.5) for each in seconds]
        return peers_command.row_of(Series(name, "t", [runs]), kind, length)

    ours = row("forerun", "Q4_K", 100, 1.0, 2.0, 4.0)
    speeds = ours["slowest"], ours["tokens_per_second"], ours["fastest"]
    assert speeds == (2.0, 4.0, 8.0)
    assert (ours["first_token_ms"], ours["prompt_tokens_per_second"]) == (500, 200)
    others = [row("llama.cpp", "Q4_K", 100, 4.0), row("forerun", "Q8_0", 100, 8.0), row("forerun", "Q4_K", 200, 1.0)]
    made = Report("t", {})
    peers_command.add_tables(made, [ours, *others], ["a build"])
    assert "| Q4_K | 4.0 (2.0 to 8.0) | 2.0 (2.0 to 2.0) | 2.00 |" in made.text["decoding"]
    assert "| Q8_0 | 1.0 (1.0 to 1.0) | - | - |" in made.text["decoding"]
    assert "a build" in made.text["decoding"] and "up to 20%" in made.text["decoding"]
    assert "| Q4_K, forerun | 200 (500 ms) | 400 (500 ms) |" in made.text["prompts"]
    assert set(made.plots) == {"decoding", "prompts"}
