"""Heads by themselves: what they compute, beside their formulas; and what a folder and its configuration must hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.head_reference import attend, check_long, check_tree, gated_mlp, norm, read_folder, states_of, turn
from support.heads import dflash, dflash2, dspark, eagle3, eagle31, mtp_target, peagle
from support.saved_models import change, weights
from support.tiny import tiny
from transformers import PreTrainedModel, Qwen3Config
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.eagle3 import _aux_layers
from forerun.models.heads.loading import is_head, load_head
from forerun.models.heads.mtp import MtpHead

Make = Callable[[Path, PreTrainedModel], Path]


def test_the_default_layers_are_known_however_they_are_numbered():
    def layers(*numbers: int) -> dict[str, Any]:
        return {"eagle_aux_hidden_state_layer_ids": [*numbers]}

    default = [{}, {"eagle_config": layers(1, 15, 28)}, {"eagle_config": layers(2, 16, 29)}]  # the first is SpecForge's
    assert [_aux_layers(config, 32) for config in default] == [(2, 16, 29)] * 3
    assert _aux_layers(layers(1, 5, 9), 32) == (1, 5, 9)


def fused(config: dict[str, Any], w: dict[str, torch.Tensor], states: list[torch.Tensor]) -> torch.Tensor:
    """The target's states of three layers, joined, ``[n, hidden]``."""
    if config.get("fc_norm"):
        states = [norm(each, w[f"fc_norm.{number}.weight"]) for number, each in enumerate(states)]
    joined = torch.cat(states, -1)
    return (norm(joined, w["input_norm.weight"]) if config.get("norm_before_fc") else joined) @ w["fc.weight"].T


def added(
    x: torch.Tensor, onto: torch.Tensor, w: dict[str, torch.Tensor], at: str, window: int | None = None
) -> torch.Tensor:
    """What a layer's attention over ``x`` and its MLP add to ``onto``, and that."""
    q, k, v = ((x @ w[f"{at}self_attn.{part}_proj.weight"].T).view(len(x), -1, 8) for part in "qkv")
    places = torch.arange(len(x))
    seen = places[:, None] - places[None] < (window or len(x))
    onto = onto + attend(turn(q, places), turn(k, places), v, seen.tril()) @ w[at + "self_attn.o_proj.weight"].T
    return onto + gated_mlp(norm(onto, w[at + "post_attention_layernorm.weight"]), w, at + "mlp.")


def eagle3_outputs(folder: Path, model: PreTrainedModel, sequence: list[int], read: int) -> tuple[torch.Tensor, ...]:
    """What an EAGLE-3 head feeds back after a sequence, ``read`` tokens of which the target has read; its logits."""
    config, w = read_folder(folder)
    eagle, layer = config.get("eagle_config", config), config.get("transformer_layer_config", config)
    found = model(torch.tensor([sequence[:read]]), output_hidden_states=True).hidden_states
    hidden = fused(config, w, [found[number][0] for number in eagle["eagle_aux_hidden_state_layer_ids"]])
    embeddings, at = model.get_input_embeddings()(torch.tensor(sequence[1:])), "layers.0."
    while True:
        normed = norm(hidden, w[at + "hidden_norm.weight"])
        x = torch.cat([norm(embeddings[: len(hidden)], w[at + "input_layernorm.weight"]), normed], -1)
        left = added(x, normed if config.get("norm_before_residual") else hidden, w, at, layer.get("sliding_window"))
        final = norm(left[-1:], w["norm.weight"])
        fed = final if config.get("norm_output") else left[-1:]
        if len(hidden) == len(sequence) - 1:
            return fed[0], final[0] @ w["lm_head.weight"].T
        hidden = torch.cat([hidden, fed])


def peagle_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    """Logits of a P-EAGLE head after a sequence of which the target has read ``read`` tokens: all entries and masks."""
    config, w = read_folder(folder)
    found = model(torch.tensor([text[:read]]), output_hidden_states=True).hidden_states
    masks = w["mask_hidden"][0].expand(3, -1).chunk(3, -1)
    layers = zip(config["eagle_aux_hidden_state_layer_ids"], masks, strict=True)
    hidden = fused(config, w, [torch.cat([found[layer][0], mask]) for layer, mask in layers])
    embeddings = w["embed_tokens.weight"][[*text[1 : read + 1], 2, 2, 2]]
    normed = norm(hidden, w["layers.0.hidden_norm.weight"])
    x = torch.cat([norm(embeddings, w["layers.0.input_layernorm.weight"]), normed], -1)
    hidden = added(x, normed if config.get("norm_before_residual") else hidden, w, "layers.0.")
    hidden = added(norm(hidden, w["layers.1.input_layernorm.weight"]), hidden, w, "layers.1.")
    logits: torch.Tensor = norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T
    return logits[len(text) - 2]


def convolved(x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A block ``[n, hidden]`` by a kernel ``[taps, hidden]`` and one of each row, ``[n, taps, groups]``."""
    out, group = torch.zeros_like(x), x.shape[1] // delta.shape[2]
    for row in range(len(x)):
        for tap in range(min(len(base), row + 1)):
            out[row] += (base[tap] + delta[row, tap].repeat_interleave(group)) * x[row - tap]
    return out


def block_rows(folder: Path, model: PreTrainedModel, text: list[int], read: int, first: int) -> torch.Tensor:
    """What leaves the block of a head like DFlash after the final norm; its row 0 is the token at ``read``."""
    config, w = read_folder(folder)
    inner = config.get("dflash_config", config)
    layer_config = config.get("transformer_layer_config", config)
    states = model(torch.tensor([text[:read]]), output_hidden_states=True).hidden_states
    layers = inner.get("aux_hidden_state_layer_ids") or [layer + 1 for layer in inner["target_layer_ids"]]
    context = torch.cat([states[layer][0] for layer in layers], -1)
    context = norm(context @ w["fc.weight"].T, w["hidden_norm.weight"])
    size = inner.get("block_size") or config["block_size"]
    embeddings = w.get("embed_tokens.weight", model.get_input_embeddings().weight)
    x, places = embeddings[[text[read], *[2] * (size - 1)]], torch.arange(read + size)
    for layer, kind in enumerate(layer_config.get("layer_types", ["full_attention"] * 2)):
        at, sliding = f"layers.{layer}.", kind == "sliding_attention"
        behind = places[read:, None] - places[None]
        seen = behind.abs() < (6 if sliding else len(places))
        if first_only_back(config, sliding):
            seen &= behind >= 0
        y = norm(x, w[at + "input_layernorm.weight"])
        y, leave = entered(y, w, at + "attention_conv.")
        both = torch.cat([context, y])
        q = norm((y @ w[at + "self_attn.q_proj.weight"].T).view(size, 4, 8), w[at + "self_attn.q_norm.weight"])
        k = norm((both @ w[at + "self_attn.k_proj.weight"].T).view(-1, 2, 8), w[at + "self_attn.k_norm.weight"])
        v = (both @ w[at + "self_attn.v_proj.weight"].T).view(-1, 2, 8)
        out = attend(turn(q, places[read:]), turn(k, places), v, seen) @ w[at + "self_attn.o_proj.weight"].T
        x = x + leave(out)
        y, leave = entered(norm(x, w[at + "post_attention_layernorm.weight"]), w, at + "mlp_conv.")
        x = x + leave(gated_mlp(y, w, at + "mlp."))
    return norm(x, w["norm.weight"])[first:]


def first_only_back(config: dict[str, Any], sliding: bool) -> bool:
    """Whether a row sees earlier ones alone: in layers with a window, unless a configuration says otherwise."""
    if "speculators_model_type" in config:
        return sliding and not config.get("sliding_window_non_causal", config["speculators_model_type"] == "dflash2")
    stated = config.get("is_causal", config.get("dflash_config", {}).get("causal"))
    return sliding if stated is None else bool(stated)


def entered(x: torch.Tensor, w: dict[str, torch.Tensor], at: str) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """A block as a sublayer reads it, and what its output goes through; both as they are without convolutions."""
    if f"{at}base_kernel" not in w:
        return x, lambda out: out
    base = w[f"{at}base_kernel"]
    delta = (x @ w[f"{at}kernel_projection.weight"].T).view(len(x), 2, base.shape[1], -1)
    return convolved(x, base[0], delta[:, 0]), lambda out: convolved(out, base[1], delta[:, 1])


def dflash_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    config, w = read_folder(folder)
    anchored = config.get("sample_from_anchor", False)
    row = block_rows(folder, model, text, read, 0 if anchored else 1)[len(text) - 1 - read]
    logits = row @ w.get("lm_head.weight", model.get_output_embeddings().weight).T
    scaled: torch.Tensor = logits * config.get("dflash_config", {}).get("output_multiplier", 1.0)
    cap = config.get("dflash_config", {}).get("final_logit_softcapping")
    return torch.tanh(scaled / cap) * cap if cap else scaled


def dflash2_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    _, w = read_folder(folder)
    row = block_rows(folder, model, text, read, 1)[len(text) - 1 - read]
    logits = model.get_output_embeddings()(row)
    before, after = (w.get(f"candidate_selector.{side}_codebook", w.get(f"candidate_selector.{side}_codebook.weight"))
                     for side in ("predecessor", "successor"))  # fmt: skip
    assert before is not None and after is not None
    scores = torch.full_like(logits, -torch.inf)
    projected = row @ w["candidate_selector.hidden_projection.weight"].T
    for token in logits.topk(6).indices.tolist():
        scores[token] = logits[token] + (before[text[-1]] * projected * after[token]).sum()
    return scores


def dspark_logits(folder: Path, model: PreTrainedModel, text: list[int], read: int) -> torch.Tensor:
    config, w = read_folder(folder)
    rows = block_rows(folder, model, text, read, 0)
    memory, bias = torch.zeros(4), torch.zeros(0)
    for row, token in zip(rows, text[read:], strict=False):  # along the path, from the text's last token
        bias = w["markov_head.markov_w1.weight"][token]
        if config["markov_head_type"] == "gated":
            x = torch.cat([row, bias])
            bias = (w["markov_head.gate_proj.weight"] @ x + w["markov_head.gate_proj.bias"]).sigmoid() * bias
        if config["markov_head_type"] == "rnn":
            x = torch.cat([memory, bias, row])
            z = w["markov_head.joint_proj.weight"] @ x + w["markov_head.joint_proj.bias"]
            memory = z[:4].sigmoid() * memory + (1 - z[:4].sigmoid()) * z[4:8].tanh()
            bias = z[8:].tanh()
    logits: torch.Tensor = w["lm_head.weight"] @ rows[len(text) - 1 - read]
    return logits + w["markov_head.markov_w2.weight"] @ bias


def eagle3_logits(*given: Any) -> torch.Tensor:
    return eagle3_outputs(*given)[1]


KINDS: dict[str, tuple[Make, Callable[..., torch.Tensor]]] = {
    "eagle3": (eagle3, eagle3_logits),
    "eagle3, speculators": (lambda f, m: eagle3(f, m, "speculators"), eagle3_logits),
    "eagle3.1": (eagle31, eagle3_logits),
    "eagle3.1, speculators": (
        lambda f, m: eagle3(f, m, "speculators", fc_norm=True, norm_output=True, norm_before_residual=False),
        eagle3_logits),
    "eagle3, one norm before": (
        lambda f, m: eagle3(f, m, norm_before_fc=True, norm_output=True), eagle3_logits),
    "eagle3, a window": (
        lambda f, m: eagle3(f, m, layer_types=["sliding_attention"], sliding_window=5), eagle3_logits),
    "peagle": (peagle, peagle_logits),
    "peagle, speculators": (lambda f, m: peagle(f, m, "speculators", fc_norm=True), peagle_logits),
    "dflash": (dflash, dflash_logits),
    "dflash, windows": (lambda f, m: dflash(f, m, sliding=True), dflash_logits),
    "dflash, scaled": (
        lambda f, m: dflash(f, m, inner={"output_multiplier": 0.5, "final_logit_softcapping": 3.0}), dflash_logits),
    "dflash, causal": (lambda f, m: dflash(f, m, is_causal=True), dflash_logits),
    "dflash, speculators": (lambda f, m: dflash(f, m, form="speculators", sliding=True), dflash_logits),
    "dflash, from the anchor": (
        lambda f, m: dflash(f, m, form="speculators", sliding=True, sample_from_anchor=True,
                            sliding_window_non_causal=True), dflash_logits),
    "dflash2": (dflash2, dflash2_logits),
    "dflash2, windows": (lambda f, m: dflash2(f, m, sliding=True, is_causal=False), dflash2_logits),
    "dflash2, speculators": (lambda f, m: dflash2(f, m, sliding=True, form="speculators"), dflash2_logits),
    "dspark": (dspark, dspark_logits),
    "dspark, gated": (lambda f, m: dspark(f, m, "gated"), dspark_logits),
    "dspark, rnn": (lambda f, m: dspark(f, m, "rnn"), dspark_logits),
    "dspark, speculators": (lambda f, m: dspark(f, m, "rnn", sliding=True, form="speculators"), dspark_logits),
}  # fmt: skip


LONG = ("eagle3.1", "eagle3", "peagle", "dflash2", "dspark, rnn")


@pytest.mark.parametrize(("kind", "check"), [
    *((kind, check_tree) for kind in KINDS),
    *(pytest.param(kind, check_long, marks=[pytest.mark.matrix] * (kind not in LONG[::3])) for kind in LONG),
])  # fmt: skip
def test_a_head_computes_what_its_paper_says(kind, check, tmp_path):
    model, (make, exact) = tiny("llama"), KINDS[kind]
    folder = make(tmp_path, model)
    check(load_head(folder), model, lambda text, read: exact(folder, model, text, read))


@pytest.mark.parametrize("make", [eagle3, eagle31])
@torch.inference_mode()
def test_eagle3_feeds_back_what_its_papers_say(make, tmp_path):
    model, tokens = tiny("llama"), np.arange(3, 15)
    head = load_head(make(tmp_path, model))
    head.bind(Scorer(model))
    sequence = head.open(FullCache())
    head.record(sequence, tokens, 0, states_of(head, model, tokens))
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
    states, logits = states_of(head, model, tokens), []
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


def test_a_copy_of_the_targets_matrices_is_not_kept(tmp_path):
    model, folder = tiny("llama"), dspark(tmp_path, tiny("llama"))
    theirs = model.get_input_embeddings().weight.detach().clone()
    weights(folder, lambda w: w.update({"embed_tokens.weight": theirs}))
    head = load_head(folder)
    head.bind(Scorer(model))
    assert "embed_tokens.weight" not in head._weights
    own = head.matrix.take(np.arange(len(head.matrix))).rows
    assert not torch.equal(own, model.get_output_embeddings().weight)


HEADS: dict[str, Make] = {"eagle3": eagle3, "peagle": peagle, "dflash": dflash, "dflash2": dflash2, "dspark": dspark}
PUBLIC: dict[str, Any] = {  # of heads that were published, beside what their layers say
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": [1, 2], "initializer_range": 0.02, "max_window_layers": 5,
    "mlp_bias": False, "num_target_layers": 2, "pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_a_published_head_is_known_by_its_configuration(kind, tmp_path):
    folder = HEADS[kind](tmp_path, tiny("llama"))
    change(folder, **PUBLIC)
    head = load_head(folder)
    assert is_head(folder) and type(head).__name__.lower() == f"{kind}head"
    head.bind(Scorer(tiny("llama")))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_layers_whole_configuration_is_known(kind, tmp_path):
    """``speculators`` writes every entry of the layers' class."""
    folder = HEADS[kind](tmp_path, tiny("llama"), form="speculators")
    every = Qwen3Config().to_dict() | {"layer_types": None}
    change(folder, lambda c: c.update(transformer_layer_config=every | c["transformer_layer_config"]))
    load_head(folder).bind(Scorer(tiny("llama")))


UNKNOWN: list[tuple[dict[str, Any], str]] = [
    ({"gate_hidden_states": False}, "gate_hidden_states is False .* not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    ({"mlp_bias": True}, "mlp_bias is True .* only False"), ({"logit_scale": 0.5}, "logit_scale is 0.5 .* only 1.0"),
    ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"), ({"kv_lora_rank": 8}, "kv_lora_rank is 8"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
     "partial_rotary_factor is 0.5 in rope_parameters"),
    ({"rope_parameters": {"sliding_attention": {"factor": 2}}}, "sliding_attention is"),
]  # fmt: skip
INSIDE: list[tuple[str, str, dict[str, Any], str]] = [
    ("eagle3", "eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
    ("eagle3", "eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step is 4"),
    ("eagle3", "eagle_config", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
    ("dflash", "dflash_config", {"attention_sink_bias": True}, "attention_sink_bias is True"),
    ("dflash", "dflash_config", {"projector_type": "domino"}, "projector_type is 'domino'"),
    ("dflash2", "dflash_config", {"attention_mode": "mla"}, "attention_mode is 'mla'"),
    ("dflash2", "dflash_config", {"sample_from_anchor": True}, "sample_from_anchor is True"),
]


@pytest.mark.parametrize(
    ("kind", "part", "entries", "message"), [*((kind, None, *each) for kind in HEADS for each in UNKNOWN), *INSIDE]
)
def test_an_entry_that_is_not_known_is_refused_by_its_name(kind, part, entries, message, tmp_path):
    folder = HEADS[kind](tmp_path, tiny("llama"))
    change(folder, lambda config: (config[part] if part else config).update(entries))
    with pytest.raises(ValueError, match=message):
        load_head(folder)


def without(name: str) -> Callable[[Path], Any]:
    return lambda folder: weights(folder, lambda w: w.pop(name))


def saying(**entries: Any) -> Callable[[Path], Any]:
    return lambda folder: change(folder, **entries)


def nested(**entries: Any) -> Callable[[Path], Any]:
    return lambda folder: change(folder, lambda config: config["dflash_config"].update(entries))


WRONG: dict[str, tuple[Make, Callable[[Path], Any], str]] = {
    "eagle3, no configuration": (eagle3, lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "eagle3, another model": (
        eagle3, lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "no supported head"),
    "eagle3, no weights": (eagle3, lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
    "eagle3, damaged weights": (eagle3, lambda f: (f / "model.safetensors").write_bytes(b"nothing"), "cannot be read"),
    "eagle3, a tensor less": (eagle3, without("fc.weight"), "lacks the tensor fc.weight"),
    "eagle3, no map": (eagle3, without("d2t"), "lacks the tensor d2t"),
    "eagle3, a wrong map": (
        eagle3, lambda f: weights(f, lambda w: w["d2t"].add_(99)), "d2t.* outside of the vocabulary"),
    "eagle3, another shape": (eagle3, saying(intermediate_size=44), r"gate_proj.*40.*44"),
    "eagle3, another vocabulary": (eagle3, saying(vocab_size=49), "49 tokens, and the target has 48"),
    "eagle3, another width": (eagle3, saying(target_hidden_size=64), "hidden size 64, and .* 32"),
    "eagle3, no size": (eagle3, lambda f: change(f, lambda c: c.pop("hidden_size")), "hidden_size is None"),
    "eagle3, more layers": (eagle3, saying(num_hidden_layers=2), "num_hidden_layers is 2"),
    "eagle3, a layer that there is not": (
        eagle3, saying(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), "the target has 2 layers"),
    "eagle3, default layers of a larger model": (
        eagle3, lambda f: change(f, lambda c: c.pop("eagle_config")), r"\[2, 1, -1\]"),
    "dflash, a tensor less": (dflash, without("layers.1.mlp.up_proj.weight"), "lacks the tensor layers.1.mlp.up"),
    "dflash, another shape": (dflash, saying(intermediate_size=44), "mlp.gate_proj.*40.*44"),
    "dflash, another width": (dflash, saying(hidden_size=64), "hidden size 64, and the target's is 32"),
    "dflash, no mask": (dflash, nested(mask_token_id=None), "mask_token_id is None"),
    "dflash, no block": (dflash, saying(block_size=1), "block_size is 1"),
    "dflash, a layer that there is not": (dflash, nested(target_layer_ids=[0, 2]), "the target has 2 layers"),
    "dflash, another design": (dflash, saying(architectures=["DFlashLagunaForCausalLM"]), "DFlashLaguna.* is one of"),
    "dflash, a window of no size": (dflash, saying(layer_types=["sliding_attention"] * 2), "sliding_window is None"),
    "dflash, another kind of layer": (dflash, saying(layer_types=["chunked_attention"] * 2), "layer_types is"),
    "dflash2, no kernels": (dflash2, without("layers.1.mlp_conv.base_kernel"), "lacks the tensor layers.1.mlp_conv"),
    "dflash2, no codebook": (dflash2, without("candidate_selector.successor_codebook"), "lacks .*successor_codebook"),
    "dflash2, another rank": (dflash2, nested(selector_rank=5), r"hidden_projection.*\[4, 32\].*\[5, 32\]"),
    "dflash2, no candidates": (dflash2, nested(selector_top_k=None), "selector_top_k is None"),
    "dflash2, more candidates": (dflash2, nested(selector_top_k=49), "selects among 49"),
    "dflash2, groups that do not divide": (dflash2, nested(conv_group_size=5), "conv_group_size is 5"),
    "dspark, no rank": (dspark, saying(markov_rank=0), "markov_rank is 0"),
    "dspark, another head": (dspark, saying(markov_head_type="ngram"), "markov_head_type is 'ngram'"),
    "dspark, no head": (dspark, without("markov_head.markov_w2.weight"), "lacks the tensor markov_head.markov_w2"),
    "dspark, no gate": (dspark, saying(markov_head_type="gated"), "lacks the tensor markov_head.gate_proj.weight"),
    "peagle, no mask": (peagle, without("mask_hidden"), "lacks the tensor mask_hidden"),
    "peagle, no second layer": (peagle, without("layers.1.mlp.up_proj.weight"), "lacks the tensor layers.1.mlp.up"),
    "peagle, a mask that is no token": (peagle, saying(ptd_token_id=48), "'ptd_token_id': 48"),
    "peagle, norms that are not there": (peagle, saying(fc_norm=True), "lacks the tensor fc_norm.0.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_does_not_fit_is_refused_before_any_work(name, tmp_path):
    make, spoil, message = WRONG[name]
    folder = make(tmp_path, tiny("llama"))
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        load_head(folder).bind(Scorer(tiny("llama")))
