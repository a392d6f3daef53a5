"""How keys turn is found for every architecture as the model does it, and nothing is found where nothing turns."""

import copy

import numpy as np
import pytest
import torch
from support.tiny import ARCHITECTURES, LAYOUTS, tiny

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.full_cache import FullCache
from forerun.kv.streaming import LayerRotation, Rotation
from forerun.models.forward import gate
from forerun.models.forward.scorer import Scorer

LEARNED = ("gpt2", "opt")
ROTARY = [name for name in (*ARCHITECTURES, *LAYOUTS) if name not in LEARNED]


def keys_at(scorer: Scorer, token: int, position: int) -> dict[int, torch.Tensor]:
    """The keys of a token alone at a position, as the model computes them."""

    class Placed(FullCache):
        @property
        def position(self) -> int:
            return self.length + position

    cache = Placed()
    block = Block(np.array([token]), DraftTree.empty(), 0)
    with torch.inference_mode():
        scorer.score([block], [cache])
    cache.commit(block, [])
    return {layer: cache.read(layer, 0, 1)[0] for layer in cache.layers}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ROTARY)
def test_turned_keys_are_the_models_own_keys_at_the_other_position(name):
    gate.admit(tiny(name))
    rotation, scorer = Scorer(tiny(name)).rotation(), Scorer(tiny(name))
    for token, p, by in ((3, 0, 1), (4, 5, 37), (7, 60, -60), (9, 33, -8), (11, 12, 0), (20, 0, 127), (21, 127, -100)):
        before, after = keys_at(scorer, token, p), keys_at(scorer, token, p + by)
        assert before.keys() == rotation.layers.keys()
        # the model rounds angles (position x frequency), then their cosines and sines, to float32: 2**-24, relative
        limit = (p + abs(by) + 4) * 2.0**-23
        for layer, keys in before.items():
            error = (rotation(layer, keys, by) - after[layer]).norm() / keys.norm()
            assert error <= limit


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROTARY)
def test_the_same_is_found_in_lower_precision(name, dtype):
    exact, rounded = Scorer(tiny(name)).rotation(), Scorer(copy.deepcopy(tiny(name)).to(dtype)).rotation()
    assert exact is not None and rounded is not None
    for layer, turn in exact.layers.items():
        other = rounded.layers[layer]
        if turn is None or other is None:
            assert turn is other
        else:
            assert (turn.first, turn.second) == (other.first, other.second)
            assert (turn.frequencies - other.frequencies).abs().max() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_are_no_rotation(name, dtype):
    assert Scorer(copy.deepcopy(tiny(name)).to(dtype)).rotation() is None


def test_frequencies_that_the_model_does_not_use_are_no_rotation():
    other = copy.deepcopy(tiny("llama"))
    forward = other.model.rotary_emb.forward
    other.model.rotary_emb.forward = lambda x, position_ids: forward(x, position_ids * position_ids)
    assert Scorer(other).rotation() is None


def test_turning_keeps_the_dtype_and_there_and_back_again_is_nothing():
    rotation = Rotation({0: LayerRotation(slice(2, 4), slice(4, 6), torch.tensor([1.0, 0.01], dtype=torch.float64))})
    for dtype, limit in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 5e-2)):
        keys = torch.randn(1, 2, 5, 8, dtype=dtype)
        turned = rotation(0, keys, -70)
        assert turned.dtype == dtype
        assert torch.equal(turned[..., :2], keys[..., :2]) and torch.equal(turned[..., 6:], keys[..., 6:])
        assert (rotation(0, turned, 70) - keys).abs().max() < limit
