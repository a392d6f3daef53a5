"""Tiny random models of every supported architecture, in float64, and a drafter that knows what comes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from forerun import Drafter, DraftTree
from forerun.request import Request

VOCABULARY = 48
EOS = 5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": EOS}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 7}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralForCausalLM", {"experts_implementation": "eager", "num_local_experts": 4}),
    "granite": ("GraniteForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
}
_LATENT: dict[str, Any] = {  # DeepSeek's attention: the rotary dimensions are the last ones of a key
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "experts_implementation": "eager",
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("CohereForCausalLM", {}),
    "phi, partial": ("PhiForCausalLM", {}),
    "glm, partial and interleaved": ("GlmForCausalLM", {"head_dim": 8}),
    "smollm3, without positions": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_LATENT, "n_group": 1}),
    "gemma3, two frequencies": (
        "Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "llama, yarn": ("LlamaForCausalLM", {"rope_parameters": _YARN}),
}
"""Further ways to lay out what turns with position, for what depends on it."""


@functools.cache
def tiny(name: str) -> PreTrainedModel:
    """A random model, the same at every call; nothing may change it."""
    class_name, extra = {**ARCHITECTURES, **LAYOUTS}[name]
    model_class = getattr(transformers, class_name)
    shape = {**_GPT2, "pad_token_id": 0, "bos_token_id": 1} if name == "gpt2" else {**_SHAPE, **extra}
    torch.manual_seed(len(name))
    return model_class(model_class.config_class(**shape)).double().eval()


PROMPTS = ([7, 9, 11, 7, 9], [20, 21, 22, 23, 20, 21, 22, 8, 8, 30, 31, 20], [12])
"""Three ragged prompts."""


class OracleDrafter(Drafter):
    """Drafts the right continuation to a random depth, among wrong siblings: some steps accept all, some nothing."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [np.array(text) for text in texts]

    def propose(self, request: Request, budget: int) -> DraftTree:
        rng = np.random.default_rng([len(request), request.prompt_length])
        start, right = len(request), self._text(request)
        branches = []
        for _ in range(4):
            branch = right[start : start + rng.integers(0, 6)].copy()
            if len(branch) and rng.random() < 0.8:
                branch[rng.integers(len(branch)) :] += 1
            branches.append((branch % VOCABULARY).tolist())
        return DraftTree.from_branches(branches, budget)

    def _text(self, request: Request) -> np.ndarray:
        prompt = request.prompt.tolist()
        return next(text for text in self.texts if text[: len(prompt)].tolist() == prompt)
