"""How keys turn is found for every architecture as the model does it, and nothing is found where nothing turns."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import _SHAPE, ARCHITECTURES, tiny

from forerun.block import Block
from forerun.caches.full import FullCache
from forerun.caches.rotation import Rotation, Turn
from forerun.model import gate
from forerun.model.rotation import find_rotation
from forerun.model.scorer import Scorer
from forerun.tree import DraftTree

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
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
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
LEARNED = ("gpt2", "opt")
ROTARY = [name for name in (*ARCHITECTURES, *OTHERS) if name not in LEARNED]


@functools.cache
def model(name: str) -> transformers.PreTrainedModel:
    if name in ARCHITECTURES:
        return tiny(name)
    class_name, extra = OTHERS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(len(name))
    return model_class(model_class.config_class(**{**_SHAPE, **extra})).double().eval()


def keys_at(scorer: Scorer, token: int, position: int) -> dict[int, torch.Tensor]:
    """The keys of a token alone at a position, as the model computes them."""

    class Placed(FullCache):
        def positions(self, block: Block) -> np.ndarray:
            return block.positions + position

    cache = Placed()
    block = Block(np.array([token]), DraftTree.empty(), 0)
    with torch.inference_mode():
        scorer.score([block], [cache])
    cache.commit(block, [])
    return {layer: cache.read(layer, 0, 1)[0] for layer in cache.layers}


@pytest.mark.parametrize("name", ROTARY)
def test_turned_keys_are_the_models_own_keys_at_the_other_position(name: str) -> None:
    gate.check(model(name))
    rotation, scorer = find_rotation(model(name)), Scorer(model(name))
    assert rotation is not None
    for token, p, by in ((3, 0, 1), (4, 5, 37), (7, 60, -60), (9, 33, -8), (11, 12, 0), (20, 0, 127), (21, 127, -100)):
        before, after = keys_at(scorer, token, p), keys_at(scorer, token, p + by)
        assert before.keys() == rotation.turns.keys()
        # the model rounds angles (position x frequency), then their cosines and sines, to float32: 2**-24, relative
        limit = (p + abs(by) + 4) * 2.0**-23
        for layer, keys in before.items():
            error = (rotation(layer, keys, by) - after[layer]).norm() / keys.norm()
            assert error <= limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROTARY)
def test_the_same_is_found_in_lower_precision(name: str, dtype: torch.dtype) -> None:
    exact, rounded = find_rotation(model(name)), find_rotation(copy.deepcopy(model(name)).to(dtype))
    assert exact is not None and rounded is not None
    for layer, turn in exact.turns.items():
        other = rounded.turns[layer]
        if turn is None or other is None:
            assert turn is other
        else:
            assert (turn.first, turn.second) == (other.first, other.second)
            assert (turn.frequencies - other.frequencies).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_are_no_rotation(name: str, dtype: torch.dtype) -> None:
    assert find_rotation(copy.deepcopy(tiny(name)).to(dtype)) is None


def test_frequencies_that_the_model_does_not_use_are_no_rotation() -> None:
    other = copy.deepcopy(tiny("llama"))
    forward = other.model.rotary_emb.forward
    other.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids * position_ids)
    assert find_rotation(other) is None


def test_layers_without_positions_stay_as_they_are() -> None:
    rotation = find_rotation(model("smollm3, without positions"))
    assert rotation is not None
    assert [rotation.turns[layer] is None for layer in range(4)] == [False, True, False, True]
    keys = torch.randn(1, 2, 3, 8)
    assert rotation(1, keys, 9) is keys


def test_two_frequencies_are_told_apart() -> None:
    rotation = find_rotation(model("gemma3, two frequencies"))
    assert rotation is not None
    local, distant = (rotation.turns[layer] for layer in range(2))
    assert local is not None and distant is not None
    assert not torch.equal(local.frequencies, distant.frequencies)


def test_turning_keeps_the_dtype_and_there_and_back_again_is_nothing() -> None:
    rotation = Rotation({0: Turn(slice(2, 4), slice(4, 6), torch.tensor([1.0, 0.01], dtype=torch.float64))})
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        keys = torch.randn(1, 2, 5, 8, dtype=dtype)
        turned = rotation(0, keys, -70)
        assert turned.dtype == dtype
        assert torch.equal(turned[..., :2], keys[..., :2]) and torch.equal(turned[..., 6:], keys[..., 6:])
        assert (rotation(0, turned, 70) - keys).abs().max() < limit
