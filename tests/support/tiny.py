"""Tiny random models of every supported architecture, in float64, and a drafter that knows what comes."""

import copy
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from string import ascii_letters
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from forerun import DraftTree
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.decoding.recipes import RECIPES
from forerun.models.forward.scorer import use_implementations
from support.mocks import RowByRow

VOCABULARY = 48
EOS = 5

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": EOS, "initializer_range": 0.3,
}  # fmt: skip
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "eos_token_id": EOS}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}), "mistral": ("MistralForCausalLM", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}), "phi3": ("Phi3ForCausalLM", {"sliding_window": 9}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 8, "sliding_window": 7}),
    "gpt_neox": ("GPTNeoXForCausalLM", {}), "gpt2": ("GPT2LMHeadModel", {}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "mixtral": ("MixtralForCausalLM", {"experts_implementation": "eager", "num_local_experts": 4}),
    "granite": ("GraniteForCausalLM", {}), "olmo2": ("Olmo2ForCausalLM", {}),
}  # fmt: skip
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
    "cohere": ("CohereForCausalLM", {}), "phi, partial": ("PhiForCausalLM", {}),
    "glm, partial and interleaved": ("GlmForCausalLM", {"head_dim": 8}),
    "smollm3, without positions": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_LATENT, "n_group": 1}),
    "gemma3, two frequencies": ("Gemma3ForCausalLM",
        {"head_dim": 8, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
    "llama, yarn": ("LlamaForCausalLM", {"rope_parameters": _YARN}),
}  # fmt: skip
"""Further ways to lay out what turns with position, for what depends on it."""


_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_EXPERTS, "head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_LATENT_ROUTED = {name: value for name, value in _LATENT.items() if name != "experts_implementation"}
_LIKE_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_SLIDING: dict[str, Any] = {"head_dim": 8, "sliding_window": 7}
_MIXED: dict[str, Any] = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
_SHARED: dict[str, Any] = {
    **_SLIDING, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("GptOssForCausalLM", {**_EXPERTS, **_SLIDING}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _LATENT_ROUTED),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_LATENT_ROUTED, "n_group": 1}),
    "afmoe": ("AfmoeForCausalLM", {**_EXPERTS, **_SLIDING}), "apertus": ("ApertusForCausalLM", {}),
    "arcee": ("ArceeForCausalLM", {}), "biogpt": ("BioGptForCausalLM", {}), "bitnet": ("BitNetForCausalLM", {}),
    "cohere, head norms": ("CohereForCausalLM", {"use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", _SLIDING), "cwm": ("CwmForCausalLM", _SLIDING),
    "dbrx": ("DbrxForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}}),
    "dots1": ("Dots1ForCausalLM", {**_GROUPED, "n_shared_experts": 1, "first_k_dense_replace": 1, "sliding_window": 7}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 8}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "exaone4": ("Exaone4ForCausalLM", _SLIDING), "flex_olmo": ("FlexOlmoForCausalLM", _EXPERTS),
    "gemma": ("GemmaForCausalLM", {"head_dim": 8}), "gemma3": ("Gemma3ForCausalLM", _MIXED),
    "gemma3n": ("Gemma3nForCausalLM",
        {**_SHARED, "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]}),
    "gemma4": ("Gemma4ForCausalLM", {**_SHARED, "global_head_dim": 16}),
    "glm": ("GlmForCausalLM", {"head_dim": 8}), "glm4": ("Glm4ForCausalLM", {"head_dim": 8}),
    "glm4_moe": ("Glm4MoeForCausalLM", _GROUPED), "gpt_bigcode": ("GPTBigCodeForCausalLM", _LIKE_GPT2),
    "granitemoe": ("GraniteMoeForCausalLM", _EXPERTS),
    "granitemoehybrid, attention only": ("GraniteMoeHybridForCausalLM",
        {**_EXPERTS, "layer_types": ["attention", "attention"], "shared_intermediate_size": 16, "mamba_n_heads": 2,
            "mamba_expand": 1, "mamba_d_head": 16}),
    "helium": ("HeliumForCausalLM", {"head_dim": 8}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM",
        {"head_dim": 8,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 1000.0, "rope_theta": 1e4, "factor": 1.0}}),
    "jetmoe": ("JetMoeForCausalLM", {**_EXPERTS, "kv_channels": 8}),
    "llama, dynamic": (
        "LlamaForCausalLM", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, llama3": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **_LLAMA3}}),
    "longcat": ("LongcatFlashForCausalLM",
        {**_LATENT_ROUTED, "head_dim": 4, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
            "moe_topk": 2, "zero_expert_num": 2}),
    "minicpm3": ("MiniCPM3ForCausalLM", _LATENT_ROUTED),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {**_GROUPED, "v_head_dim": 8, "sliding_window": 7}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "ministral": ("MinistralForCausalLM", _SLIDING), "mistral4": ("Mistral4ForCausalLM", _LATENT_ROUTED),
    "mixtral": ("MixtralForCausalLM", _EXPERTS), "nanochat": ("NanoChatForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}), "olmo": ("OlmoForCausalLM", {"clip_qkv": 8.0}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 7}), "olmoe": ("OlmoeForCausalLM", _EXPERTS),
    "persimmon": ("PersimmonForCausalLM", {}),
    "phi, head norms": ("PhiForCausalLM", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "phi3, longrope": ("Phi3ForCausalLM",
        {"original_max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_LONG}}),
    "phimoe": ("PhimoeForCausalLM", _EXPERTS),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "head_dim": 8}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "solar_open": ("SolarOpenForCausalLM", _GROUPED), "stablelm": ("StableLmForCausalLM", {}),
    "stablelm, head norms": ("StableLmForCausalLM", {"qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 7}),
    "vaultgemma": ("VaultGemmaForCausalLM", _MIXED), "youtu": ("YoutuForCausalLM", _LATENT_ROUTED),
}  # fmt: skip
"""What else people run: each with a few drafters, in ``test_families``. Experts are as transformers sets them."""


_RECURRENT: dict[str, Any] = {"num_hidden_layers": 4, "max_position_embeddings": 256, "head_dim": 8}
_LINEAR: dict[str, Any] = {
    **_RECURRENT,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LFM2: dict[str, Any] = {**_RECURRENT, "layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
_MAMBA2: dict[str, Any] = {
    **_RECURRENT, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
_SHARED_EXPERT: dict[str, Any] = {**_EXPERTS, "shared_expert_intermediate_size": 16}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextForCausalLM", {**_LINEAR, **_SHARED_EXPERT}),
    "qwen3_5": ("Qwen3_5ForCausalLM", _LINEAR),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {**_LINEAR, **_SHARED_EXPERT}),
    "kimi_linear": ("KimiLinearForCausalLM",
        {**_LINEAR, **_LATENT_ROUTED, "num_hidden_layers": 4, "num_local_experts": 4, "linear_num_heads": 4,
            "linear_head_dim": 8, "q_lora_rank": None, "n_shared_experts": 1, "n_group": 1}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", {**_LINEAR, "linear_num_key_heads": 4}),
    "lfm2": (
        "Lfm2ForCausalLM", {**_LFM2, "hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "conv_bias": True}),
    "lfm2, odd sizes": ("Lfm2ForCausalLM", _LFM2),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {**_LFM2, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3ForCausalLM", _LFM2),
    "bamba": ("BambaForCausalLM", {**_MAMBA2, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_MAMBA2, "mamba_d_ssm": 64}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM",
        {**_MAMBA2, **_EXPERTS, "layer_types": ["mamba", "attention", "mamba", "attention"],
            "shared_intermediate_size": 16}),
    "nemotron_h": ("NemotronHForCausalLM",
        {**_GROUPED, "max_position_embeddings": 256,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
            "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "conv_kernel": 4,
            "chunk_size": 8, "moe_shared_expert_intermediate_size": 16}),
    "zamba2": ("Zamba2ForCausalLM",
        {**_MAMBA2, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 2,
            "n_mamba_heads": 4, "chunk_size": 8, "num_mem_blocks": 1, "num_key_value_heads": 4,
            "attention_head_dim": 16, "attention_hidden_size": 64, "use_mem_rope": True, "adapter_rank": 4}),
    "mamba2": ("Mamba2ForCausalLM",
        {**_RECURRENT, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "conv_kernel": 4, "expand": 2,
            "chunk_size": 8}),
}  # fmt: skip
"""Models with recurrent layers, in ``test_families`` too."""

_LIKE_GPTJ: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 128}
_INDEXED: dict[str, Any] = {**_LATENT_ROUTED, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 16}
_MAMBA1: dict[str, Any] = {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
_ALIBI = "its positions are encoded by ALiBi, a bias on every score"
_NO_KERNEL = "its layers are recurrent, and there is no kernel for "
_OWN = "its attention does not go through transformers' attention interface"
_SCAN = _NO_KERNEL + "Mamba-1's selective scan"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert": ("BertLMHeadModel", {"is_decoder": False}, "its logits over a draft tree differ from its own"),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}, _ALIBI),
    "codegen": ("CodeGenForCausalLM", _LIKE_GPTJ, _OWN),
    "deepseek_v32": ("DeepseekV32ForCausalLM", _INDEXED, "type ['indexed_attention']"),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {}, "type ['heavily_compressed_attention']"),
    "diffllama": ("DiffLlamaForCausalLM", {}, "its logits over a draft tree differ from its own"),
    "doge": ("DogeForCausalLM", {}, "this model's attention builds its mask itself"),
    "falcon": ("FalconForCausalLM", {}, _OWN), "falcon, ALiBi": ("FalconForCausalLM", {"alibi": True}, _ALIBI),
    "falcon_mamba": ("FalconMambaForCausalLM", {}, _SCAN),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", _INDEXED, "type ['indexed_attention']"),
    "gpt_neo": ("GPTNeoForCausalLM",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, _OWN),
    "gptj": ("GPTJForCausalLM", _LIKE_GPTJ, _OWN),
    "jamba": ("JambaForCausalLM", {**_MAMBA1, "num_experts": 4, "expert_layer_period": 2}, _SCAN),
    "llama4": ("Llama4ForCausalLM",
        {**_EXPERTS, "head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
        "type ['chunked_attention']"),
    "mamba": ("MambaForCausalLM", {}, _SCAN),
    "minimax": ("MiniMaxForCausalLM",
        {**_EXPERTS, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
        "type ['linear_attention']"),
    "mpt": ("MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}, _ALIBI),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM", {"num_hidden_layers": 3, "lru_width": 32}, "type ['linear_attention']"),
    "rwkv": ("RwkvForCausalLM", {"attention_hidden_size": 32, "context_length": 128}, _NO_KERNEL),
    "t5": ("T5ForConditionalGeneration", {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 48},
        "it is an encoder-decoder"),
    "xglm": ("XGLMForCausalLM", {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}, _OWN),
    "xlstm": ("xLSTMForCausalLM", {"num_blocks": 2}, _NO_KERNEL),
}  # fmt: skip
"""Models that the gate refuses, each with a part of the reason."""


@functools.cache
def tiny(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model, the same at every call; nothing may change it. Engines of it test it once."""
    if dtype != torch.float64:
        return copy.deepcopy(tiny(name)).to(dtype)
    return build(*{**ARCHITECTURES, **LAYOUTS}[name], seed=len(name))


def build(class_name: str, extra: dict[str, Any], seed: int) -> PreTrainedModel:
    """A random model in float64."""
    model_class = getattr(transformers, class_name)
    like_gpt2 = class_name == "GPT2LMHeadModel"
    shape = {**_GPT2, "pad_token_id": 0, "bos_token_id": 1} if like_gpt2 else {**_SHAPE, **extra}
    torch.manual_seed(seed)
    with torch.inference_mode(False):  # a test in that mode may be the first to want a model that others share
        return model_class(model_class.config_class(**shape)).double().eval()


RECURRENCES = re.compile("torch_(chunk|recurrent)_gated_delta_rule|mamba2_(chunk|selective).*|.*_kimi_delta_attention")


@contextmanager
def in_float64(model: PreTrainedModel) -> Iterator[None]:
    """A context in which transformers computes all of a float64 model in float64 on a CPU.

    Its recurrences compute in float32: here without these casts. Its grouped products of experts take no float64.
    """
    module = sys.modules[type(model).__module__]
    with pytest.MonkeyPatch.context() as patch, use_implementations(model, experts="eager"):
        for name in filter(RECURRENCES.fullmatch, list(vars(module))):
            patch.setattr(module, name, _without_casts(module, name))
        yield


def _without_casts(module: Any, name: str) -> Any:
    function = inspect.unwrap(getattr(module, name))
    source = inspect.getsource(function).partition("def ")[2]
    source = source.replace(".float()", "").replace("torch.float32", "torch.float64")
    limited = ("zamba2", "nemotron_h")  # transformers limits dt in its form for whole texts only
    if name == "mamba2_selective_state_update" and module.__name__.endswith(limited):
        source = source.replace("dt = F.softplus(dt)", "dt = F.softplus(dt).clamp(min=0.001)")
    names = dict(vars(module))
    exec("def " + source, names)
    return names[name]


def texts_in_float64(model: PreTrainedModel, **options: Any) -> list[list[int]]:
    """Each of ``PROMPTS`` with what transformers generates after it."""
    with in_float64(model):
        return [[*prompt, *by_transformers(model, prompt, **options)] for prompt in PROMPTS]


def by_transformers(model: PreTrainedModel, prompt: Sequence[int], **options: Any) -> list[int]:
    """The tokens that transformers generates after a prompt."""
    ids = torch.tensor([prompt])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)[0]
    return text[len(prompt) :].tolist()


def small_caches(draft_model: PreTrainedModel | None = None, **more: Any) -> LongContextConfig:
    """Settings with which caches evict, choose anew and grow within a short text, and all that is drafted is scored."""
    how = {"gamma1": 2, "gamma2": 5, "cache_budget": 10, "chunk": 2, "sinks": 1, "window": 4, "paced": False}
    return LongContextConfig(draft_model, **how | more)


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a letter for each token."""
    ids = {letter: i for i, letter in enumerate(ascii_letters[:VOCABULARY])}
    backend = Tokenizer(models.BPE(ids, [], unk_token="a"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a", pad_token="a")


PROMPTS = ([7, 9, 11, 7, 9], [20, 21, 22, 23, 20, 21, 22, 8, 8, 30, 31, 20], [12])
"""Three ragged prompts."""


class OracleDrafter(RowByRow):
    """Drafts the right continuation to a random depth, among wrong siblings: some steps accept all, some nothing."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = [np.array(text) for text in texts]

    def draft(self, request: Request, budget: int) -> DraftTree:
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


LEARNING = tuple(name for name in RECIPES if name.split("-")[0] == "trie" or name.endswith(("-trie", "auto")))
"""Drafters that draft what they know from earlier texts."""


def some_were_accepted(requests: Sequence[Request]) -> None:
    """Drafts were scored and some accepted, and all is accounted for."""
    assert sum(sum(request.stats.drafted) for request in requests) > 0
    assert sum(sum(request.stats.accepted) for request in requests) > 0
    for request in requests:
        assert request.stats.tokens == len(request.generated)
        assert len(request.stats.drafted_mask()) == len(request.generated)
