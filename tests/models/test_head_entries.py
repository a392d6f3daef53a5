"""What a head's configuration says: an entry that is not known is refused by its name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.heads import dflash, dflash2, dspark, eagle3, peagle
from support.saved_models import change
from support.tiny import tiny
from transformers import PreTrainedModel, Qwen3Config

from forerun.models.forward.scorer import Scorer
from forerun.models.heads.loading import is_head, load_head

HEADS: dict[str, Callable[[Path, PreTrainedModel], Path]] = {
    "eagle3": eagle3, "peagle": peagle, "dflash": dflash, "dflash2": dflash2, "dspark": dspark
}  # fmt: skip
PUBLIC: dict[str, Any] = {  # of heads that were published, beside what their layers say
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "bos_token_id": 1, "dtype": "bfloat16", "eos_token_id": [1, 2], "initializer_range": 0.02, "max_window_layers": 5,
    "mlp_bias": False, "num_target_layers": 2, "pad_token_id": 0, "pretraining_tp": 1, "rope_scaling": None,
    "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
def test_entries_of_published_heads_are_known(kind, tmp_path):
    folder = HEADS[kind](tmp_path, tiny("llama"))
    change(folder, lambda config: config.update(PUBLIC))
    load_head(folder).bind(Scorer(tiny("llama")))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_layers_whole_configuration_is_known(kind, tmp_path):
    """``speculators`` writes every entry of the layers' class."""
    folder = HEADS[kind](tmp_path, tiny("llama"), form="speculators")
    every = Qwen3Config().to_dict()
    change(folder, lambda c: c.update(transformer_layer_config=every | {"layer_types": None}
                                      | c["transformer_layer_config"]))  # fmt: skip
    load_head(folder).bind(Scorer(tiny("llama")))


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "a new entry": ({"gate_hidden_states": False}, "gate_hidden_states is False .* not supported"),
    "quantised weights": ({"quantization_config": {"bits": 4}}, "quantization_config is"),
    "biases of the MLP": ({"mlp_bias": True}, "mlp_bias is True .* only False"),
    "a scale of logits": ({"logit_scale": 0.5}, "logit_scale is 0.5 .* only 1.0"),
    "a part of the rotary dimensions": ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
    "that part inside": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
                         "partial_rotary_factor is 0.5 in rope_parameters"),
    "angles by kind of layer": ({"rope_parameters": {"sliding_attention": {"factor": 2}}}, "sliding_attention is"),
    "latent attention": ({"kv_lora_rank": 8}, "kv_lora_rank is 8"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_entry_that_is_not_known_is_refused_by_its_name(kind, name, tmp_path):
    folder, (entries, message) = HEADS[kind](tmp_path, tiny("llama")), UNKNOWN[name]
    change(folder, lambda config: config.update(entries))
    with pytest.raises(ValueError, match=message):
        load_head(folder)


INSIDE: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "no states of inner layers": ("eagle3", "eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
    "several heads a pass": ("eagle3", "eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step is 4"),
    "both norms": ("eagle3", "eagle_config", {"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm"),
    "sinks": ("dflash", "dflash_config", {"attention_sink_bias": True}, "attention_sink_bias is True"),
    "Domino": ("dflash", "dflash_config", {"projector_type": "domino"}, "projector_type is 'domino'"),
    "another attention": ("dflash2", "dflash_config", {"attention_mode": "mla"}, "attention_mode is 'mla'"),
    "tokens from the anchor": ("dflash2", "dflash_config", {"sample_from_anchor": True}, "sample_from_anchor is True"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_entries_inside_are_known_too(name, tmp_path):
    kind, part, entries, message = INSIDE[name]
    folder = HEADS[kind](tmp_path, tiny("llama"))
    change(folder, lambda config: config[part].update(entries))
    with pytest.raises(ValueError, match=message):
        load_head(folder)


@pytest.mark.parametrize("kind", HEADS)
def test_each_kind_is_known_by_its_configuration(kind, tmp_path):
    folder = HEADS[kind](tmp_path, tiny("llama"))
    assert is_head(folder)
    assert type(load_head(folder)).__name__.lower() == f"{kind}head"
