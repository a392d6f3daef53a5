"""The flat forward pass gives the model's own logits, for every model that it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.tiny import ARCHITECTURES, tiny

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.full_cache import FullCache
from forerun.models.forward import flat
from forerun.models.forward.flat import FAMILIES, FlatScorer, flatten
from forerun.models.forward.scorer import Scorer


@pytest.mark.parametrize("many", [0, flat.MANY], ids=["by our kernel", "by torch"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.inference_mode()
def test_logits_equal_those_of_the_model_or_it_is_left_alone(
    architecture: str, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flat, "MANY", many)
    own = Scorer(tiny(architecture))
    short = flatten(own)
    if own.model.config.model_type not in FAMILIES:
        assert short is own
        return
    assert isinstance(short, FlatScorer)
    caches = [[FullCache(), FullCache()] for _ in range(2)]
    rng = np.random.default_rng(0)
    trees = [DraftTree.from_branches([[1, 2, 3], [1, 4], [9]], 8), DraftTree.empty()]
    for length in (9, 1, 3):  # prefill, then pending tokens with trees, over ragged rows and past the sliding window
        blocks = [
            Block(rng.integers(0, 40, length + row), tree, caches[0][row].length) for row, tree in enumerate(trees)
        ]
        found = [scorer.score(blocks, mine) for scorer, mine in zip((own, short), caches, strict=True)]
        for expected, logits in zip(*found, strict=True):
            assert torch.allclose(expected, logits, atol=1e-5)
        for mine in caches:
            for cache, block, path in zip(mine, blocks, ([0, 1], []), strict=True):
                cache.commit(block, path)


def test_a_model_whose_logits_differ_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlatScorer, "_turns", lambda self, like, positions: (like.new_ones(1), like.new_zeros(1)))
    own = Scorer(tiny("llama"))
    assert flatten(own) is own
