"""The command that trains heads: it writes one that loads, resumes, and the head learns."""

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.tiny import HYBRIDS, build, tiny
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.training import training_loop
from benchmarks.training.train_head import HeadOptions, frequent, run
from benchmarks.training.trainable_heads import Earlier, TrainableEagle3, TrainableHead, TrainableMtp
from forerun.core.long_context import MTP
from forerun.decoding.sources.head_source import HeadSource
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.loading import load_head


def test_a_head_is_trained_and_goes_on(tmp_path, monkeypatch):
    """By a clock on which every step takes 0.14 s, so that 0.05 minutes are 22 steps on any machine."""
    clock = SimpleNamespace(process_time=itertools.count(step=0.14).__next__, monotonic=time.monotonic)
    monkeypatch.setattr(training_loop, "time", clock)
    rows = [{"prompt": f"What is {i} and {i}? ", "answer": f"{i} and {i} is {2 * i}. " * 4} for i in range(24)]
    texts, out = tmp_path / "texts.jsonl", tmp_path / "head"
    texts.write_text("\n".join(map(json.dumps, rows)))
    for minutes in (0.05, 0.1):
        run(
            HeadOptions(
                model="bundled-draft", texts=texts, out=out, minutes=minutes, threads=1, draft_vocab=256, length=64
            )
        )
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20, 40]
    assert lines[-1]["means"]["loss"] < lines[0]["means"]["loss"]
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 256


def eagle3_of(target: PreTrainedModel, folder: Path) -> TrainableHead:
    return TrainableEagle3(target, frequent([], 20, 48))


def eagle31_of(target: PreTrainedModel, folder: Path) -> TrainableHead:
    return TrainableEagle3(target, frequent([], 20, 48), eagle31=True)


def mtp_of(target: PreTrainedModel, folder: Path) -> TrainableHead:
    target.save_pretrained(folder / "target")
    target.name_or_path = str(folder / "target")
    return TrainableMtp(target, frequent([], 48, 48))


@pytest.mark.parametrize(("made", "hybrid"), [(eagle3_of, False), (eagle31_of, False), (mtp_of, False), (mtp_of, True)])
def test_the_head_that_is_written_computes_what_was_trained(made, hybrid, tmp_path):
    """One step after the target's states, and one after its own."""
    target = build(*HYBRIDS["lfm2"], seed=3).float() if hybrid else tiny("llama", torch.float32)
    tokens = np.random.default_rng(0).integers(0, 48, 14)
    model = made(target, tmp_path)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel()))
    out = tmp_path / "head"
    out.mkdir()
    model.export(target, out)
    if isinstance(model, TrainableMtp):
        target = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        folder = MTP
    else:
        assert load_file(out / "model.safetensors")["d2t"].tolist() == [0] * 20
        folder = str(out)
    head = load_head(folder)
    head.bind(Scorer(target))
    with torch.inference_mode():
        found = target(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
        states = torch.cat([found[layer] for layer in model.layers], -1)
        sequence = head.open(FullCache())
        head.record(sequence, tokens[:12], 0, states[0, :11])
        growths, first = head.start([sequence])
        second = head.extend(growths, [[0]], [[int(tokens[12])]])
        hidden, earlier, logits = model.features(states[:, :11]), Earlier(), []
        embeddings = target.get_input_embeddings()(torch.from_numpy(tokens[None]))
        for step in range(2):
            hidden, normed = model.step(embeddings[:, step + 1 : step + 12], hidden, step, earlier)
            logits.append(model.lm_head(normed)[0, -1])
    assert torch.allclose(first[0], logits[0], atol=1e-4)
    assert torch.allclose(second[0], logits[1], atol=1e-4)
    engine = Engine(target, lambda setup: HeadSource(load_head(folder), setup.target), prune_drafts=False)
    request = engine.generate(tokens.tolist(), max_new_tokens=12, eos_token_id=None).requests[0]
    assert request.tokens.tolist() == Engine(target, "none").generate(
        tokens.tolist(), max_new_tokens=12, eos_token_id=None).requests[0].tokens.tolist()  # fmt: skip


def test_a_head_with_the_targets_matrix_learns_on_some_tokens_and_knows_all(tmp_path):
    """The matrix itself does not learn, and is not written."""
    target = tiny("llama", torch.float32)
    model = TrainableEagle3(target, frequent([], 20, 48), frozen=True)
    states, embeddings, last = (torch.randn(2, 12, 32 * count) for count in (3, 1, 1))
    rows = target.get_output_embeddings().weight[model.known].detach()
    loss, _ = model.losses(states, embeddings, last, torch.ones(2, 12), rows, ahead=2)
    loss.backward()
    assert model.lm_head.weight.grad is None and model.norm.weight.grad is not None
    assert torch.equal(model.lm_head.weight, rows)
    model.export(target, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert not {"lm_head.weight", "d2t"} & set(written)
    head = load_head(tmp_path)
    head.bind(Scorer(target))
    assert head.tokens is None and head.output is not None and len(head.output) == 48
