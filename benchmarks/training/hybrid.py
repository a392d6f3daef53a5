"""A hybrid out of the bundled target: short convolutions replace its inner layers' attention.

Embeddings, feed-forward layers, norms, and the attention of the first and last layer are taken over. LFM2 normalises
queries and keys, so its norms begin with the target's mean sizes. The rest is learned from the target's distributions
(as in Wang et al., 2024, arXiv 2408.15237).
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedModel

RENAMED = {
    "self_attn.o_proj": "self_attn.out_proj", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm",
    "model.norm": "model.embedding_norm",
}  # fmt: skip
"""Llama's names, and LFM2's where they are others."""


def hybrid_of(target: PreTrainedModel, tokens: torch.Tensor) -> PreTrainedModel:
    """Return a hybrid of the target's size, a Llama's with as many KV heads as heads. Queries and keys are measured on
    ``tokens``, ``[rows, n]``."""
    own = target.config
    config = Lfm2Config(
        vocab_size=own.vocab_size, hidden_size=own.hidden_size, intermediate_size=own.intermediate_size,
        num_hidden_layers=own.num_hidden_layers, num_attention_heads=own.num_attention_heads,
        num_key_value_heads=own.num_key_value_heads, max_position_embeddings=own.max_position_embeddings,
        rope_parameters=own.rope_parameters, norm_eps=own.rms_norm_eps, full_attn_idxs=[0, own.num_hidden_layers - 1],
        block_auto_adjust_ff_dim=False, bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    wanted, sizes = made.state_dict(), _sizes(target, tokens)
    taken = {renamed(name): weight for name, weight in target.state_dict().items()}
    for name in wanted:
        if name in taken:
            wanted[name] = taken[name]
        elif name.removesuffix("_layernorm.weight") in sizes:
            wanted[name] = torch.full_like(wanted[name], sizes[name.removesuffix("_layernorm.weight")])
    made.load_state_dict(wanted)
    return made


def renamed(name: str) -> str:
    for llama, lfm2 in RENAMED.items():
        name = name.replace(f"{llama}.", f"{lfm2}.")
    return name


def _sizes(target: PreTrainedModel, tokens: torch.Tensor) -> dict[str, float]:
    """Return the mean root mean square of a head's queries, and of its keys, by their matrices' names."""
    found: dict[str, float] = {}

    def measure(name: str, module: object, inputs: object, output: torch.Tensor) -> None:
        heads = output.unflatten(-1, (target.config.num_attention_heads, -1))
        found[name] = float(heads.square().mean(-1).sqrt().mean())

    named = [each for each in target.named_modules() if each[0].endswith(("q_proj", "k_proj"))]
    hooks = [each.register_forward_hook(partial(measure, name.removesuffix("_proj"))) for name, each in named]
    with torch.inference_mode():
        target(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return found
