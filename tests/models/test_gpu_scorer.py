"""The scorer for GPUs, on a CPU: its kernels in Triton's interpreter, its graphs by running a pass again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("triton", reason="Triton is not installed")

from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import ROOT, DraftTree
from forerun.drafting.recipes import build_drafter
from forerun.engine.engine import Engine
from forerun.kernels import gpu
from forerun.kv.full_cache import FullCache
from forerun.models.forward import cuda_graphs
from forerun.models.forward.gate import admit
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.forward.scorer import Scorer

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow

SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 61, "max_position_embeddings": 24,
}  # fmt: skip
TREE = DraftTree(np.arange(6), np.array([ROOT, ROOT, 0, 1, 3, 3]))
TEXT = np.random.default_rng(0).integers(0, 61, 24)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take the way of GPUs on a CPU; the passes that were recorded."""
    recorded: list[int] = []

    class Again:
        def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            recorded.append(1)
            result = work()

            def replay() -> None:
                result[0].logits.copy_(work()[0].logits)

            return replay, result

    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    monkeypatch.setattr(cuda_graphs, "Recorder", Again)
    return recorded


def model(kind: str = "llama") -> Any:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SMALL)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**SMALL))
    return made.eval()


def read(scorer: Scorer, count: int) -> FullCache:
    cache = FullCache()
    block = Block(TEXT[:count], DraftTree.empty(), 0)
    scorer.score([block], [cache])
    cache.commit(block, [])
    return cache


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@torch.inference_mode()
def test_logits_are_the_models(on_gpu: list[int], kind: str) -> None:
    own = model(kind)
    scorer = admit(own)
    assert type(scorer) is GpuScorer
    trees = [TREE, DraftTree.chain(np.arange(3)), DraftTree.empty()]
    counts = [15, 7, 10]
    caches = [read(scorer, count) for count in counts]
    blocks = [Block(TEXT[count : count + 1], tree, count) for count, tree in zip(counts, trees, strict=True)]
    found = scorer.score(blocks, caches)
    plain = Scorer(own)
    for block, count, logits in zip(blocks, counts, found, strict=True):
        cache = FullCache()
        whole = Block(TEXT[: count + 1], block.tree, 0)
        (right,) = plain.score([whole], [cache])
        torch.testing.assert_close(logits, right, atol=2e-5, rtol=0)


@torch.inference_mode()
def test_recorded_passes_have_the_same_bits(on_gpu: list[int]) -> None:
    """Sizes are rounded up: what fills them up changes nothing. A size is recorded when it comes again."""
    scorer = GpuScorer(model())
    caches = [read(scorer, 14), read(scorer, 9)]
    blocks = [Block(TEXT[14:15], TREE, 14), Block(TEXT[9:10], DraftTree.chain(np.arange(4)), 9)]
    on_gpu.clear()
    first = scorer.score(blocks, caches)
    assert not on_gpu
    again = scorer.score(blocks, caches)
    assert len(on_gpu) == 1
    other = [Block(TEXT[14:15], DraftTree.chain(TEXT[15:20]), 14), Block(TEXT[9:10], TREE, 9)]
    scorer.score(other, caches)
    last = scorer.score(blocks, caches)
    assert len(on_gpu) == 1
    for one, two, three in zip(first, again, last, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)


def test_a_model_whose_passes_cannot_be_recorded(on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def record(self, work: Callable[[], Any]) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "Recorder", Refusing)
    engine = Engine(model(), "none")
    alone = engine.generate(torch.tensor(TEXT[None, :6]), max_new_tokens=4).generated
    monkeypatch.undo()
    assert alone == Engine(model(), "none").generate(torch.tensor(TEXT[None, :6]), max_new_tokens=4).generated


def test_drafts_change_no_bit(on_gpu: list[int]) -> None:
    """The probe finds it, and so do texts: greedy and sampled, alone and with other rows."""
    prompts = [torch.tensor(TEXT[None, :12]), torch.tensor(TEXT[None, [3, 4, 5] * 3])]
    engine = Engine(model(), "none")
    assert engine.exactness.level == "bitwise"
    texts: dict[str, list[Any]] = {}
    for drafter in ("none", "trie", "retrieval"):
        engine.set_drafter(build_drafter(drafter, LongContextConfig(cache_budget=6, chunk=2, gamma2=3, paced=False)))
        results = [engine.generate(prompt, max_new_tokens=8) for prompt in prompts]
        results += [engine.generate(prompts[0], max_new_tokens=6, do_sample=True, temperature=0.8, seed=3)]
        texts[drafter] = [result.generated for result in results]
        assert any(sum(result.stats[0].accepted) for result in results) == (drafter != "none")
    assert texts["trie"] == texts["retrieval"] == texts["none"]
