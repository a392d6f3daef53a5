"""What ``exactness.probe`` finds out, and that it names what it found."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.compiled_models import kept
from support.tiny import tiny

from forerun.core.block import Block
from forerun.kernels.linear import ordered_modules
from forerun.kernels.runtime import vector_ir
from forerun.kv.cache import Cache
from forerun.models.forward import exactness
from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.scorer import Scorer

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")


class Wrapped(Scorer):
    """A model's scorer whose logits are off by a bit in some passes: over trees, over batches, over more than ``above``
    tokens, or over one token after ``beyond``."""

    def __init__(
        self, model: Any = None, *, trees: bool = False, batches: bool = False, above: int = 9999, beyond: int = 9999
    ) -> None:
        super().__init__(model or tiny("llama"))
        self._trees, self._batches, self._above, self._beyond = trees, batches, above, beyond

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        found = super().score(blocks, caches)
        tree, large = any(not block.tree.is_chain for block in blocks), sum(map(len, blocks)) > self._above
        far = len(blocks[0]) == 1 and caches[0].length > self._beyond
        if (self._trees and tree) or (self._batches and len(blocks) > 1) or large or far:
            return [torch.nextafter(logits, torch.full_like(logits, torch.inf)) for logits in found]
        return found


@pytest.mark.parametrize(("what", "reason"), [
    ({"above": 20}, "a pass over 1 tokens rounds differently from one over 72"),
    ({"trees": True}, "a branch of a tree rounds differently from the sequence alone"),
    ({"batches": True}, "a sequence beside another row rounds differently from the sequence alone"),
])  # fmt: skip
def test_what_differs_is_named(what, reason):
    assert probe(Wrapped(**what), 128) == Exactness("rounding", reason)


def test_one_layer_that_goes_through_torch_is_noticed(monkeypatch):
    model, takes = kept("llama", torch.float32), ordered_modules.takes
    odd = model.model.layers[1].mlp.down_proj.weight.data_ptr()

    monkeypatch.setattr(
        ordered_modules, "takes", lambda x, w: takes(x, w) and not (w.data_ptr() == odd and x.numel() > 4 * x.shape[-1])
    )
    found = probe(Scorer(model))
    assert found.level == "rounding" and "tokens rounds differently from one over" in str(found.reason)


def test_a_sum_in_another_order_is_noticed(monkeypatch):
    model, product = kept("llama", torch.float32), ordered_modules.product
    odd = model.model.layers[0].self_attn.o_proj.weight

    def sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.data_ptr() == odd.data_ptr() and x.numel() == x.shape[-1]:  # a token alone
            return product(x.flip(-1).contiguous(), odd.flip(-1).contiguous())
        return product(x, weight, bias)

    monkeypatch.setattr(ordered_modules, "product", sums)
    found = probe(Scorer(model))
    assert found.level == "rounding" and "a pass over 1 tokens" in str(found.reason)


def test_without_fused_multiply_and_add_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(exactness, "unusable", lambda: "the processor has no fused multiply-add")
    assert probe(Scorer(tiny("llama")), 128) == Exactness("rounding", "the processor has no fused multiply-add")


def test_what_rounds_only_after_a_long_sequence_is_noticed():
    model = copy.deepcopy(tiny("mistral"))
    model.config.max_position_embeddings = 4096
    assert probe(Wrapped(model, beyond=600), 600) == Exactness("bitwise")
    reason = "a pass over 1 tokens rounds differently from one over 24, after 1100 tokens"
    assert probe(Wrapped(model, beyond=600), 4096) == Exactness("rounding", reason)
