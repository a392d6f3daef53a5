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


@functools.cache
def tiny(name: str) -> PreTrainedModel:
    """A random model, the same at every call; nothing may change it."""
    class_name, extra = ARCHITECTURES[name]
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
