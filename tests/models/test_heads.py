"""Heads by themselves: what they compute, beside the same written out; and what a folder must hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.head_reference import attend, change, check_long, check_tree, gated_mlp, norm, read_folder, turn, weights
from support.heads import eagle3, eagle31, mtp_target
from support.tiny import tiny
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.eagle3 import _aux_layers
from forerun.models.heads.loading import load_head
from forerun.models.heads.mtp import MtpHead


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),  # SpecForge's default
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
    ],
)
def test_the_default_layers_are_known_however_they_are_numbered(config, layers):
    assert _aux_layers(config, 32) == layers


def eagle3_outputs(folder: Path, model: PreTrainedModel, sequence: list[int], read: int) -> tuple[torch.Tensor, ...]:
    """What an EAGLE-3 head feeds back after a sequence, ``read`` tokens of which the target has read; its logits."""
    config, w = read_folder(folder)
    eagle, layer = config.get("eagle_config", config), config.get("transformer_layer_config", config)
    layers = eagle["eagle_aux_hidden_state_layer_ids"]
    found = model(torch.tensor([sequence[:read]]), output_hidden_states=True).hidden_states
    states = [found[number][0] for number in layers]
    if config.get("fc_norm"):
        states = [norm(each, w[f"fc_norm.{number}.weight"]) for number, each in enumerate(states)]
    side_by_side = torch.cat(states, -1)
    if config.get("norm_before_fc"):
        side_by_side = norm(side_by_side, w["input_norm.weight"])
    hidden = side_by_side @ w["fc.weight"].T
    embeddings = model.get_input_embeddings()(torch.tensor(sequence[1:]))
    while True:
        count, at = len(hidden), "layers.0."
        normed = norm(hidden, w[at + "hidden_norm.weight"])
        x = torch.cat([norm(embeddings[:count], w[at + "input_layernorm.weight"]), normed], -1)
        q, k, v = ((x @ w[f"{at}self_attn.{part}_proj.weight"].T).view(count, -1, 8) for part in "qkv")
        places = torch.arange(count)
        seen = places[:, None] - places[None] < layer.get("sliding_window", count)
        out = attend(turn(q, places), turn(k, places), v, seen.tril()) @ w[at + "self_attn.o_proj.weight"].T
        residual = (normed if config.get("norm_before_residual") else hidden) + out
        left = residual + gated_mlp(norm(residual, w[at + "post_attention_layernorm.weight"]), w, at + "mlp.")
        final = norm(left[-1:], w["norm.weight"])
        fed = final if config.get("norm_output") else left[-1:]
        if count == len(sequence) - 1:
            return fed[0], final[0] @ w["lm_head.weight"].T
        hidden = torch.cat([hidden, fed])


EAGLES: dict[str, Callable[[Path, PreTrainedModel], Path]] = {
    "authors": eagle3,
    "speculators": lambda folder, model: eagle3(folder, model, "speculators"),
    "3.1": eagle31,
    "3.1, speculators": lambda folder, model: eagle3(
        folder, model, "speculators", fc_norm=True, norm_output=True, norm_before_residual=False
    ),
    "one norm before": lambda folder, model: eagle3(folder, model, norm_before_fc=True, norm_output=True),
    "a window": lambda folder, model: eagle3(folder, model, layer_types=["sliding_attention"], sliding_window=5),
}


@pytest.mark.parametrize("form", EAGLES)
def test_eagle3_computes_what_its_papers_say(form, tmp_path):
    model = tiny("llama")
    folder = EAGLES[form](tmp_path, model)
    check_tree(load_head(folder), model, lambda sequence, read: eagle3_outputs(folder, model, sequence, read)[1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["3.1", "authors"])
def test_eagle3_computes_it_along_200_tokens(form, tmp_path):
    model = tiny("llama")
    folder = EAGLES[form](tmp_path, model)
    check_long(load_head(folder), model, lambda sequence, read: eagle3_outputs(folder, model, sequence, read)[1])


@pytest.mark.parametrize("form", ["authors", "3.1"])
@torch.inference_mode()
def test_eagle3_feeds_back_what_its_papers_say(form, tmp_path):
    model, tokens = tiny("llama"), np.arange(3, 15)
    head = load_head(EAGLES[form](tmp_path, model))
    head.bind(Scorer(model))
    found = model(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
    sequence = head.open(FullCache())
    head.record(sequence, tokens, 0, torch.cat([found[layer][0] for layer in head.layers], -1))
    (growth,), _ = head.start([sequence])
    head.extend([growth], [[0]], [[7]])
    head.extend([growth], [[1]], [[9]])
    for row, after in enumerate(([], [7], [7, 9])):
        fed, _ = eagle3_outputs(tmp_path, model, [*tokens.tolist(), *after], len(tokens) - 1)
        assert torch.allclose(growth.hidden[row], fed, atol=1e-4)


@torch.inference_mode()
def test_a_head_that_missed_states_restarts_where_they_continue(tmp_path):
    model, tokens = tiny("llama"), np.arange(3, 43)
    head = load_head(eagle3(tmp_path, model))
    head.bind(Scorer(model))
    found = model(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
    states, logits = torch.cat([found[layer][0] for layer in head.layers], -1), []
    for first in (0, None):
        sequence = head.open(FullCache())
        if first is not None:
            head.record(sequence, tokens[:12], first, states[first:11])
            head.start([sequence])
        head.record(sequence, tokens, 20, states[20:39])
        assert (sequence.first, sequence.next) == (20, 39)
        logits.append(head.start([sequence])[1])
    assert torch.equal(*logits)


def mtp_logits(heads: MtpModel, model: PreTrainedModel, sequence: list[int], read: int) -> torch.Tensor:
    """transformers' logits of heads in a checkpoint after a sequence, of which the target has read ``read`` tokens."""
    hidden = model(torch.tensor([sequence[:read]]), output_hidden_states=True).hidden_states[-1]
    cache, count, ids, turn = MtpCache(config=heads.config), len(heads.layers), torch.tensor([sequence]), 0
    ids = torch.cat([ids, torch.zeros_like(ids)], 1)
    outs: list[torch.Tensor] = []
    while True:
        layer = turn % count
        if turn < count:  # all of the sequence, as transformers hands it to each layer
            new, places = hidden, torch.arange(turn + 1, turn + 1 + read)[None]
        else:
            new, places = outs[-1][:, -1:], torch.tensor([[read + turn]])
        out = heads.forward_layer(layer, new, places, cache, input_ids=ids[:, places[0]])
        outs.append(out)
        hidden, turn = out, turn + 1
        if read + turn == len(sequence):
            return heads._project_to_logits(out)[0, -1]


@pytest.mark.parametrize(("kind", "count"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 1)])
def test_heads_of_a_checkpoint_compute_what_transformers_says(kind, count, tmp_path):
    model = mtp_target(tmp_path, count, kind=kind)
    heads = MtpModel.from_pretrained(model).double().eval()
    with torch.inference_mode():
        check_tree(MtpHead(), model, lambda sequence, read: mtp_logits(heads, model, sequence, read))


def test_a_target_without_heads_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no num_mtp_layers"):
        MtpHead().bind(Scorer(tiny("llama")))
    model = mtp_target(tmp_path, 1)
    weights(tmp_path, lambda w: w.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(ValueError, match=r"cannot be read.*eh_proj"):
        MtpHead().bind(Scorer(model))


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "another model": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "no supported head"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"nothing"), "cannot be read"),
    "a tensor less": (lambda f: weights(f, lambda w: w.pop("fc.weight")), "lacks the tensor fc.weight"),
    "no map": (lambda f: weights(f, lambda w: w.pop("d2t")), "lacks the tensor d2t"),
    "a wrong map": (lambda f: weights(f, lambda w: w["d2t"].add_(99)), "d2t.* outside of the vocabulary"),
    "another shape": (lambda f: change(f, lambda c: c.update(intermediate_size=44)), r"gate_proj.*40.*44"),
    "another vocabulary": (lambda f: change(f, lambda c: c.update(vocab_size=49)), "49 tokens, and the target has 48"),
    "another width": (lambda f: change(f, lambda c: c.update(target_hidden_size=64)), "hidden size 64, and .* 32"),
    "no size": (lambda f: change(f, lambda c: c.pop("hidden_size")), "hidden_size is None"),
    "more layers": (lambda f: change(f, lambda c: c.update(num_hidden_layers=2)), "num_hidden_layers is 2"),
    "a layer that there is not": (
        lambda f: change(f, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3])), "the target has 2 layers"),
    "default layers of a larger model": (lambda f: change(f, lambda c: c.pop("eagle_config")), r"\[2, 1, -1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_before_any_work(name, tmp_path):
    folder, model = eagle3(tmp_path, tiny("llama")), tiny("llama")
    spoil, message = WRONG[name]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_head(folder).bind(Scorer(model))
