"""Small models that run as compiled programs, one text, and its logits however it is cut into passes."""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer

SHAPE: dict[str, Any] = {
    "vocab_size": 75, "hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 37}),
    "qwen2": ("Qwen2ForCausalLM", {"num_attention_heads": 4, "use_sliding_window": True, "sliding_window": 9,
                                   "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3ForCausalLM", {"sliding_window": 19, "query_pre_attn_scalar": 20,
                                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 37, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                                           "partial_rotary_factor": 0.5}}),
    "phi3, longrope": ("Phi3ForCausalLM", {
        "initializer_range": 0.1, "original_max_position_embeddings": 512, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 19, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0,
                                     "final_logit_softcapping": 3.0}),
    "gemma3, with images": ("Gemma3ForConditionalGeneration", {
        "text_config": {**SHAPE, "sliding_window": 19, "query_pre_attn_scalar": 20},
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                          "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "use_sliding_window": False}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 19,
                                   "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "granite": ("GraniteForCausalLM", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0,
                                       "attention_multiplier": 0.3}),
}  # fmt: skip
"""Families whose layers differ in parts: fused matrices, norms after a part alone, multipliers, soft caps."""
EVERY = {**MODELS, **OTHERS}
_MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4}
FOR_FILES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, wide": ("LlamaForCausalLM", {"hidden_size": 768, "intermediate_size": 256, "head_dim": 128}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_MIXTURE, "shared_expert_intermediate_size": 32}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_MIXTURE, "norm_topk_prob": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
}
"""Rows of whole blocks of any format of GGUF, and mixtures of experts, which are no programs."""
DTYPES = (torch.float32, torch.bfloat16)
TEXT = np.random.default_rng(5).integers(0, 75, 700)


@functools.cache
def kept(name: str, dtype: torch.dtype) -> PreTrainedModel:
    class_name, extra = {**EVERY, **FOR_FILES}[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(3)
    shape = {} if "text_config" in extra else SHAPE
    model = model_class(model_class.config_class(**{**shape, **extra})).to(dtype).eval()
    for weight in model.parameters():
        if weight.dim() == 1:  # norms and biases that would show if they were left out
            weight.data += torch.randn_like(weight) * 0.2
    return model


def build(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return copy.deepcopy(kept(name, dtype))


def scored(scorer: Scorer, sizes: Sequence[int], cache: FullCache | None = None) -> torch.Tensor:
    """Logits at every token of the text, read in passes of these sizes."""
    cache, found = cache or FullCache(), []
    with torch.inference_mode():
        for size in sizes:
            here = TEXT[cache.length : cache.length + size]
            block = Block(here[:1], DraftTree.chain(here[1:]), cache.length)
            found.append(scorer.score([block], [cache])[0])
            cache.commit(block, range(size - 1))
    return torch.cat(found)
