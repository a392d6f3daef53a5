"""Read and check a head's ``config.json``: an entry that could change the computation must be supported.

With an ignored entry, a head would load and draft badly, and only the speed would tell. So each kind of head names the
entries that it reads, or supports with one value only; all others must be in ``IDLE_ENTRIES``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

IDLE_ENTRIES = frozenset(
    """
    _attn_implementation _name_or_path attn_implementation auto_map chunk_size_feed_forward dtype is_encoder_decoder
    ignore_keys_at_rope_validation max_window_layers model_type name_or_path num_aux_hidden_states num_target_layers
    pretraining_tp speculators_version target_layer_count torch_dtype transformers_version use_bfloat16 use_cache

    bos_token_id decoder_start_token_id eos_token_id mask_token pad_token_id sep_token_id tokenizer_class

    attention_dropout confidence_head_alpha down_sample_ratio down_sample_ratio_min embed_requires_grad
    enable_sp_ulysses initializer_range loss_decay_gamma max_seq_len num_anchors prediction_loss_weight

    add_cross_attention bad_words_ids begin_suppress_tokens cross_attention_hidden_size diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id id2label is_decoder label2id length_penalty max_length min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states output_scores prefix
    problem_type pruned_heads remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p torchscript
    typical_p
    """.split()  # noqa: SIM905  # as a list they would fill a page
)
"""Entries that do not affect a head's computation: versions, special tokens, training, and generation."""
LAYER_ENTRIES = frozenset(
    """
    architectures attention_bias draft_vocab_size head_dim hidden_act hidden_size intermediate_size layer_types
    max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads rms_norm_eps rope_parameters
    rope_scaling rope_theta sliding_window speculators_config speculators_model_type target_hidden_size
    tie_word_embeddings transformer_layer_config use_sliding_window vocab_size
    """.split()  # noqa: SIM905  # as a list they would fill a page
)
SINGLE_VALUED: Mapping[str, Any] = {
    "bias": False, "is_neox_style": True, "logit_scale": 1.0, "mlp_bias": False, "partial_rotary_factor": 1.0,
    "qkv_bias": False, "rope_interleave": False, "rope_is_neox_style": True, "use_aux_hidden_state": True,
    "use_gemma_norm": False,
}  # fmt: skip
"""Entries that every head supports with one value only."""
ROTARY_FIELDS = (
    "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
ROTARY_ENTRIES = frozenset(
    """
    attention_factor beta_fast beta_slow factor high_freq_factor long_factor low_freq_factor mrope_interleaved
    mrope_section mscale mscale_all_dim original_max_position_embeddings rope_theta rope_type short_factor truncate type
    """.split()  # noqa: SIM905  # as a list they would fill a page
)
"""Entries of ``rope_parameters`` and ``rope_scaling``; for text, the sections of image positions are equal."""


def config_of(folder: Path) -> dict[str, Any]:
    """Read a folder's ``config.json``; raise ValueError if that fails."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} has no head: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder} has no head: its config.json is not an object")
    return config


def count_in(config: Mapping[str, Any], name: str, folder: Path) -> int:
    """Return a positive integer of a configuration; raise ValueError if it is missing or something else."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r} in {folder / 'config.json'}; it must be an integer of at least 1")
    return value


def check_entries(
    config: Mapping[str, Any], read: Collection[str], single_valued: Mapping[str, Any], kind: str, folder: Path
) -> None:
    """Raise ValueError for an unsupported entry; ``read`` and ``single_valued`` are those of this kind of head."""
    only, file = {**SINGLE_VALUED, **single_valued}, folder / "config.json"
    for name, value in config.items():
        if value is None or name in read:
            continue
        if name in only:
            if value != only[name]:
                raise ValueError(f"{name} is {value!r} in {file}; for {kind}, only {only[name]!r} is supported")
        elif name not in LAYER_ENTRIES | IDLE_ENTRIES:
            raise ValueError(f"{name} is {value!r} in {file}, which is not supported for {kind}")
    for name in ("rope_parameters", "rope_scaling"):
        for inner, value in (config.get(name) or {}).items():
            if inner not in ROTARY_ENTRIES and not (inner == "partial_rotary_factor" and value == 1):
                raise ValueError(f"{inner} is {value!r} in {name} of {file}, which is not supported")


def windows(config: Mapping[str, Any], count: int, folder: Path) -> list[int | None]:
    """Return each layer's window, with the query's token; None for full attention. Raise ValueError if unclear."""
    kinds, file = config.get("layer_types"), folder / "config.json"
    if kinds is None and config.get("use_sliding_window"):
        raise ValueError(f"use_sliding_window is True in {file}, which has no layer_types to say where")
    kinds = ["full_attention"] * count if kinds is None else list(kinds)[:count]
    sliding = [kind == "sliding_attention" for kind in kinds]
    if len(kinds) < count or set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types is {kinds} in {file}; it must be full_attention or sliding_attention for each of {count}"
        )
    window, used = config.get("sliding_window"), config.get("use_sliding_window", True)
    if any(sliding) and (not used or not isinstance(window, int) or window < 1):
        raise ValueError(f"sliding_window is {window!r} in {file}, and use_sliding_window {used!r}; layers need one")
    return [window if each else None for each in sliding]


def check_layers(layers: Sequence[Any], count: int, name: str, folder: Path) -> tuple[int, ...]:
    """Return the target's layers that a head reads; raise ValueError for one that ``count`` layers lack."""
    if not layers or not all(isinstance(layer, int) and 0 <= layer <= count for layer in layers):
        raise ValueError(f"{name} is {list(layers)!r} in {folder / 'config.json'}, and the target has {count} layers")
    return tuple(layers)
