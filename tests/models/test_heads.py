"""Heads by themselves: what they compute, beside the same written out; and what a folder must hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.heads import dflash, eagle3, mtp_target
from support.tiny import tiny
from transformers import PreTrainedModel
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.eagle3 import _aux_layers
from forerun.models.heads.head import Growth, Head
from forerun.models.heads.loading import load_head
from forerun.models.heads.mtp import MtpHead

TEXT = np.random.default_rng(3).integers(0, 48, 20)
BRANCHES = ([3, 4, 5], [3, 4, 6], [3, 9], [11])


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions on ``[n, H, d]``."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 1e4 ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, (2, 16, 29)),  # SpecForge's default
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}}, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}, (1, 5, 9)),
    ],
)
def test_the_default_layers_are_known_however_they_are_numbered(config: Any, layers: tuple[int, ...]) -> None:
    assert _aux_layers(config, 32) == layers


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention over ``[n, H, d]``."""
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)


def eagle3_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    """Logits of an EAGLE-3 head behind a text, of which the target has read the first ``read`` tokens: written out."""
    config = json.loads((folder / "config.json").read_text())
    w = {
        name.replace("midlayer.", "layers.0."): t.double()
        for name, t in load_file(folder / "model.safetensors").items()
    }
    authors = "transformer_layer_config" not in config
    layers = (config["eagle_config"] if authors else config)["eagle_aux_hidden_state_layer_ids"]
    states = model(torch.tensor([text[:read]]), output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer][0] for layer in layers], -1) @ w["fc.weight"].T
    embeddings = model.get_input_embeddings()(torch.tensor(text[1:]))
    while True:
        count, at = len(hidden), "layers.0."
        normed = norm(hidden, w[at + "hidden_norm.weight"])
        x = torch.cat([norm(embeddings[:count], w[at + "input_layernorm.weight"]), normed], -1)
        q, k, v = ((x @ w[f"{at}self_attn.{part}_proj.weight"].T).view(count, -1, 8) for part in "qkv")
        places = torch.arange(count)
        out = attend(turn(q, places), turn(k, places), v) @ w[at + "self_attn.o_proj.weight"].T
        residual = (hidden if authors else normed) + out
        x = norm(residual, w[at + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ w[at + "mlp.gate_proj.weight"].T) * (x @ w[at + "mlp.up_proj.weight"].T)
        left = residual + gate @ w[at + "mlp.down_proj.weight"].T
        if count == len(text) - 1:
            return norm(left[-1], w["norm.weight"]) @ w["lm_head.weight"].T
        hidden = torch.cat([hidden, left[-1:]])


@torch.inference_mode()
def check_tree(head: Head, model: PreTrainedModel, exact: Callable[[list[int], int], torch.Tensor]) -> None:
    """Logits at the nodes of a tree, for a text that is read in pieces and one beside it."""
    head.bind(Scorer(model))
    texts, ends = [head.text(FullCache()), head.text(FullCache())], (18, 13)
    for text, end in zip(texts, ends, strict=True):
        tokens = TEXT[: end + 1]
        found = model(torch.from_numpy(tokens[None]), output_hidden_states=True).hidden_states
        states = torch.cat([found[layer][0] for layer in head.layers], -1)[:-1]
        for first, last in ((0, 5), (5, 6), (6, end)):
            head.record(text, tokens[: last + 1], first, states[first:last])
            if last == 6:
                head.read([text])
    growths, logits = head.start(texts)
    for own, end in zip(logits, ends, strict=True):
        assert torch.allclose(own, exact(TEXT[: end + 1].tolist(), end), atol=1e-4)
    check_branches(head, growths, ends, exact)


def check_branches(
    head: Head, growths: list[Growth], ends: Any, exact: Callable[[list[int], int], torch.Tensor]
) -> None:
    numbers: list[dict[tuple[int, ...], int]] = [{(): 0}, {(): 0}]
    for depth in range(3):
        level = list(dict.fromkeys(tuple(branch[: depth + 1]) for branch in BRANCHES if len(branch) > depth))
        parents = [[own[path[:-1]] for path in level] for own in numbers]
        logits = head.extend(growths, parents, [[path[-1] for path in level]] * 2)
        rows = iter(logits)
        for own, end in zip(numbers, ends, strict=True):
            for path in level:
                own[path] = len(own)
                assert torch.allclose(next(rows), exact([*TEXT[: end + 1].tolist(), *path], end), atol=1e-4), path


@pytest.mark.parametrize("form", ["authors", "speculators"])
def test_eagle3_computes_what_its_paper_says(form: str, tmp_path: Path) -> None:
    model = tiny("llama")
    folder = eagle3(tmp_path, model, form)
    check_tree(load_head(folder), model, lambda text, read: eagle3_logits(folder, model, text, read))


def dflash_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    """Logits of a DFlash head behind a text, of which the target has read ``read`` tokens: written out."""
    config = json.loads((folder / "config.json").read_text())
    w = {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}
    states = model(torch.tensor([text[:read]]), output_hidden_states=True).hidden_states
    context = torch.cat([states[layer + 1][0] for layer in config["dflash_config"]["target_layer_ids"]], -1)
    context = norm(context @ w["fc.weight"].T, w["hidden_norm.weight"])
    size = config["block_size"]
    x = model.get_input_embeddings().weight[[text[read], *[2] * (size - 1)]]
    places = torch.arange(read + size)
    for layer, kind in enumerate(config.get("layer_types", ["full_attention"] * 2)):
        at = f"layers.{layer}."
        y = norm(x, w[at + "input_layernorm.weight"])
        both = torch.cat([context, y])
        q = norm((y @ w[at + "self_attn.q_proj.weight"].T).view(size, 4, 8), w[at + "self_attn.q_norm.weight"])
        k = norm((both @ w[at + "self_attn.k_proj.weight"].T).view(-1, 2, 8), w[at + "self_attn.k_norm.weight"])
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, 2, 8)
        q, k = turn(q, places[read:]), turn(k, places).repeat_interleave(2, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(8)
        if kind == "sliding_attention":
            behind = places[read:, None] - places[None]
            scores = scores.masked_fill((behind < 0) | (behind >= 6), -torch.inf)
        out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v.repeat_interleave(2, 1)).flatten(1)
        x = x + out @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, w[at + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ w[at + "mlp.gate_proj.weight"].T) * (y @ w[at + "mlp.up_proj.weight"].T)
        x = x + gate @ w[at + "mlp.down_proj.weight"].T
    return model.lm_head(norm(x, w["norm.weight"]))[len(text) - read]  # type: ignore[no-any-return]


@pytest.mark.parametrize("sliding", [False, True])
def test_dflash_computes_what_its_authors_say(sliding: bool, tmp_path: Path) -> None:
    model = tiny("llama")
    folder = dflash(tmp_path, model, sliding=sliding)
    check_tree(load_head(folder), model, lambda text, read: dflash_logits(folder, model, text, read))


DFLASH_WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor less": (lambda f: weights(f, lambda w: w.pop("layers.1.mlp.up_proj.weight")), "lacks the tensor"),
    "another shape": (lambda f: change(f, lambda c: c.update(intermediate_size=44)), "mlp.gate_proj.*40.*44"),
    "another width": (lambda f: change(f, lambda c: c.update(hidden_size=64)), "64 numbers, and the target has 32"),
    "no mask": (lambda f: change(f, lambda c: c["dflash_config"].pop("mask_token_id")), "mask_token_id is None"),
    "no block": (lambda f: change(f, lambda c: c.update(block_size=1)), "block_size is 1"),
    "a layer that there is not": (
        lambda f: change(f, lambda c: c["dflash_config"].update(target_layer_ids=[0, 2])), "the target has 2 layers"),
    "its next version": (lambda f: change(f, lambda c: c.update(architectures=["DFlash2DraftModel"])), "further form"),
}  # fmt: skip


@pytest.mark.parametrize("name", DFLASH_WRONG)
def test_a_dflash_head_that_does_not_fit_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    folder = dflash(tmp_path, tiny("llama"))
    spoil, message = DFLASH_WRONG[name]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_head(folder).bind(Scorer(tiny("llama")))


def mtp_logits(heads: MtpModel, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    """Logits of heads in a checkpoint behind a text, of which the target has read ``read`` tokens, by transformers."""
    hidden = model(torch.tensor([text[:read]]), output_hidden_states=True).hidden_states[-1]
    cache, count, ids, turn = MtpCache(config=heads.config), len(heads.layers), torch.tensor([text]), 0
    ids = torch.cat([ids, torch.zeros_like(ids)], 1)
    outs: list[torch.Tensor] = []
    while True:
        layer = turn % count
        if turn < count:  # all of the text, as transformers hands it to each layer
            new, places = hidden, torch.arange(turn + 1, turn + 1 + read)[None]
        else:
            new, places = outs[-1][:, -1:], torch.tensor([[read + turn]])
        out = heads.forward_layer(layer, new, places, cache, input_ids=ids[:, places[0]])
        outs.append(out)
        hidden, turn = out, turn + 1
        if read + turn == len(text):
            return heads._project_to_logits(out)[0, -1]


@pytest.mark.parametrize(("kind", "count"), [("deepseek_v3", 1), ("deepseek_v3", 2), ("glm4_moe", 1)])
def test_heads_of_a_checkpoint_compute_what_transformers_says(kind: str, count: int, tmp_path: Path) -> None:
    model = mtp_target(tmp_path, count, kind=kind)
    heads = MtpModel.from_pretrained(model).double().eval()
    with torch.inference_mode():
        check_tree(MtpHead(), model, lambda text, read: mtp_logits(heads, model, text, read))


def test_a_target_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no num_mtp_layers"):
        MtpHead().bind(Scorer(tiny("llama")))
    model = mtp_target(tmp_path, 1)
    weights(tmp_path, lambda w: w.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(ValueError, match=r"cannot be read.*eh_proj"):
        MtpHead().bind(Scorer(model))


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def weights(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "another model": (lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "no head that is known"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "damaged weights": (lambda f: (f / "model.safetensors").write_bytes(b"nothing"), "cannot be read"),
    "a tensor less": (lambda f: weights(f, lambda w: w.pop("fc.weight")), "lacks the tensor fc.weight"),
    "no map": (lambda f: weights(f, lambda w: w.pop("d2t")), "lacks the tensor d2t"),
    "a wrong map": (lambda f: weights(f, lambda w: w["d2t"].add_(99)), "d2t.* outside of the vocabulary"),
    "another shape": (lambda f: change(f, lambda c: c.update(intermediate_size=44)), r"gate_proj.*40.*44"),
    "another vocabulary": (lambda f: change(f, lambda c: c.update(vocab_size=49)), "49 tokens, and the target has 48"),
    "another width": (lambda f: change(f, lambda c: c.update(target_hidden_size=64)), "64 numbers, and .* 32"),
    "no size": (lambda f: change(f, lambda c: c.pop("hidden_size")), "hidden_size is None"),
    "more layers": (lambda f: change(f, lambda c: c.update(num_hidden_layers=2)), "num_hidden_layers is 2"),
    "a layer that there is not": (
        lambda f: change(f, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3])), "the target has 2 layers"),
    "default layers of a larger model": (lambda f: change(f, lambda c: c.pop("eagle_config")), r"\[2, 1, -1\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    folder, model = eagle3(tmp_path, tiny("llama")), tiny("llama")
    spoil, message = WRONG[name]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_head(folder).bind(Scorer(model))
