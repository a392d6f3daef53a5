"""Gemma 4's assistants by themselves: what they compute, beside transformers; and what a folder must hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import saved_models
from support.head_reference import BRANCHES, grow
from support.heads import gemma4, gemma4_assistant
from support.saved_models import weights
from support.tiny import tiny
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kv.full_cache import FullCache
from forerun.kv.kv_tiers import KVMemory, Tiers, min_device_bytes
from forerun.kv.streaming import StreamingCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.gemma4_assistant import Gemma4AssistantHead
from forerun.models.heads.head import Growth, HeadSequence
from forerun.models.heads.loading import is_head, load_head

TEXT = np.random.default_rng(3).integers(6, 48, 200)
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared layers": ({}, {}), "no shared layers": ({"shared": 0}, {}), "centroids": ({}, {"centroids": 8}),
    "unified": ({"unified": True}, {"unified": True}),
}  # fmt: skip
"""Of the target, and of the assistant."""


@pytest.fixture(autouse=True)
def _assistants_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.23 refuses models all of whose layers share keys, and so every assistant. Later ones do not."""
    for config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
        plain = config.kv_sharing_modes.fget

        def modes(self: Any, plain: Any = plain) -> list[str | None]:
            every: int = self.num_hidden_layers
            return ["reuse"] * every if self.num_kv_shared_layers == every else plain(self)

        monkeypatch.setattr(config, "kv_sharing_modes", property(modes))


class Oracle:
    """transformers' target, its pass over a sequence, and its assistant."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        self.assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).eval()
        config = model.config.get_text_config()
        own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        for kind in set(own):  # without shared layers transformers 5.23 stores none
            model.model.layers[len(own) - 1 - own[::-1].index(kind)].self_attn.store_full_length_kv = True
        self.ids = torch.from_numpy(TEXT[None])
        self._states: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self.out = model(self.ids, use_cache=False, output_hidden_states=True, return_shared_kv_states=True)

    def keys(self, read: int) -> dict[str, tuple[torch.Tensor, ...]]:
        return {kind: tuple(t[:, :, :read] for t in rows) for kind, rows in self.out.shared_kv_states.items()}

    def __call__(self, read: int, path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """State and logits after drafted tokens, where the target has read ``read`` tokens and one more is known."""
        if (read, *path) not in self._states:
            known = self(read, path[:-1])[0] if path else self.out.hidden_states[-1][0, read - 1]
            token = torch.tensor([[path[-1] if path else int(TEXT[read])]])
            inputs = torch.cat([self.model.get_input_embeddings()(token), known[None, None]], -1)
            found = self.assistant(
                inputs_embeds=inputs, position_ids=torch.tensor([[read]]), shared_kv_states=self.keys(read)
            )
            self._states[read, *path] = found.last_hidden_state[0, 0], found.logits[0, 0]
        return self._states[read, *path]

    def candidates(self, read: int, count: int) -> list[int]:
        """The tokens that transformers' assisted generation drafts after its first pass, over ``read`` tokens."""
        self.assistant.generation_config.num_assistant_tokens = count
        drafts = SinglePositionMultiTokenCandidateGenerator(
            self.assistant, self.model.get_input_embeddings(), GenerationConfig(max_length=999)
        )
        out = self.model(self.ids[:, :read], use_cache=False, output_hidden_states=True, return_shared_kv_states=True)
        ids, _ = drafts.get_candidates(self.ids[:, : read + 1], {}, out, False, 0)
        return ids[0, read + 1 :].tolist()


def reading(
    scorer: Scorer, head: Gemma4AssistantHead, cache: FullCache, tokens: np.ndarray = TEXT
) -> tuple[FullCache, torch.Tensor]:
    """Read the tokens that a cache lacks, in pieces; returns it, and the states of these tokens."""
    states = []
    while cache.length < len(tokens):
        block = Block(tokens[cache.length : cache.length + 64], DraftTree.empty(), cache.length)
        states.append(scorer.score_rows([block], [cache], head.layers)[0].states)
        cache.commit(block, [])
    return cache, torch.cat(states)


def at(head: Gemma4AssistantHead, cache: FullCache, states: torch.Tensor, read: int) -> HeadSequence:
    """The sequence whose first ``read`` tokens the target has read, and one more is known."""
    sequence = head.open(cache)
    head.record(sequence, TEXT[: read + 1], 0, states[:read])
    return sequence


def check(growth: Growth, node: int, logits: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """transformers' norms are in float32 whatever the type, and chains of random layers make their errors larger."""
    state, exact = expected
    assert torch.allclose(growth.hidden[node], state, atol=1e-3)
    known = ~logits.isinf()
    assert torch.allclose(logits[known], exact[known], atol=1e-3)
    assert known.all() or (exact[~known] == exact.min()).all()  # transformers leaves these the least logit less 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "every"), [*((kind, 39) for kind in KINDS), pytest.param("shared layers", 1, marks=pytest.mark.matrix)]
)
@torch.inference_mode()
def test_states_and_logits_are_those_of_transformers(kind, every, tmp_path):
    """In chains of its best tokens, as assisted generation drafts them, and in trees of two sequences side by side."""
    ours, theirs = KINDS[kind]
    model = gemma4(**ours)
    oracle = Oracle(model, gemma4_assistant(tmp_path, model, **theirs))
    head = Gemma4AssistantHead(tmp_path)
    head.bind(Scorer(model))
    cache, states = reading(Scorer(model), head, FullCache())
    assert torch.allclose(states, oracle.out.hidden_states[-1][0], atol=1e-4)
    for read in range(1, len(TEXT), every):
        (growth,), logits = head.start([at(head, cache, states, read)])
        path: tuple[int, ...] = ()
        for depth in range(3):
            check(growth, depth, logits[0], oracle(read, path))
            path = (*path, int(logits[0].argmax()))
            logits = head.extend([growth], [[depth]], [[path[-1]]])
        if read % 39 == 1:
            assert oracle.candidates(read, 3) == list(path)
            check_trees(head, cache, states, (read, len(TEXT) - read), oracle)


def check_trees(
    head: Gemma4AssistantHead, cache: FullCache, states: torch.Tensor, reads: tuple[int, int], oracle: Oracle
) -> None:
    growths, logits = head.start([at(head, cache, states, read) for read in reads])

    def check_node(row: int, node: int, path: tuple[int, ...], found: torch.Tensor) -> None:
        check(growths[row], node, found, oracle(reads[row], path))

    for row, found in enumerate(logits):
        check_node(row, 0, (), found)
    grow(head, growths, BRANCHES, check_node)


@torch.inference_mode()
def test_every_full_cache_gives_the_same_bits(tmp_path):
    """One that begins with a shared prefix, one with layers off the device, and one that released what windows left."""
    scorer = Scorer(gemma4(torch.float32))
    head = Gemma4AssistantHead(gemma4_assistant(tmp_path, scorer.model))
    head.bind(scorer)
    sequence = np.resize(TEXT, 1400)
    plain, states = reading(scorer, head, FullCache(), sequence)
    prefixed = FullCache()
    prefixed.begin_with(plain.share(900), 900)
    tiers = Tiers(KVMemory(min_device_bytes(scorer.kv, 1400)), torch.device("cpu"), scorer.kv, torch.float32)
    others = [prefixed, tiers.cache(1400), FullCache(releases=True)]
    expected = bits(head, plain, states, sequence)
    for cache in others:
        _, own = reading(scorer, head, cache, sequence)
        assert torch.equal(own, states[-len(own) :])
        assert all(torch.equal(*each) for each in zip(bits(head, cache, own, sequence), expected, strict=True))
    assert others[1].offloaded and others[2].least > 0
    tiers.close()


def bits(head: Gemma4AssistantHead, cache: FullCache, states: torch.Tensor, tokens: np.ndarray) -> list[torch.Tensor]:
    """Logits and states of a tree after all but the last token."""
    sequence = head.open(cache)
    head.record(sequence, tokens, len(tokens) - len(states), states)
    growths, first = head.start([sequence])
    return [first, head.extend(growths, [[0, 0]], [[3, 4]]), growths[0].hidden]


def change(folder: Path, **entries: Any) -> None:
    """Change a configuration, or the one inside it."""

    def edit(config: dict[str, Any]) -> None:
        for name, value in entries.items():
            (config if name in config else config["text_config"])[name] = value

    saved_models.change(folder, edit)


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor less": (
        lambda f: weights(f, lambda w: w.pop("model.layers.1.layer_scalar")), "lacks the tensor layers.1.layer_scalar"),
    "another shape": (lambda f: change(f, intermediate_size=44), r"gate_proj.*\[40, 24\].*\[44, 24\]"),
    "another width": (lambda f: change(f, backbone_hidden_size=64), "hidden size is 64; this one's is 32"),
    "another vocabulary": (lambda f: change(f, vocab_size=56), "vocabulary is 56; this one's is 48"),
    "other heads": (lambda f: change(f, head_dim=16), r"sliding_attention layers is \(2, 16, 16\); .* \(2, 8, 8\)"),
    "other global heads": (
        lambda f: change(f, global_head_dim=32), r"full_attention layers is \(2, 32, 32\); .* \(2, 16, 16\)"),
    "other KV heads": (lambda f: change(f, num_key_value_heads=4), r"is \(4, 8, 8\); .* \(2, 8, 8\)"),
    "another window": (lambda f: change(f, sliding_window=9), "sliding window is 9; this one's is 7"),
    "no centroids": (lambda f: weights(f, lambda w: w.pop("masked_embedding.centroids.weight")), "lacks .*centroids"),
    "too many centroids": (lambda f: change(f, num_centroids=7), "num_centroids is 7 .* vocabulary of 48 tokens"),
    "more clusters than there are": (
        lambda f: change(f, centroid_intermediate_top_k=9), "centroid_intermediate_top_k 9"),
    "a token twice": (
        lambda f: weights(f, lambda w: w["masked_embedding.token_ordering"].fill_(3)), "each of 48 tokens once"),
    "no configuration": (lambda f: (f / "config.json").unlink(), "config.json cannot be read"),
    "another kind": (lambda f: change(f, model_type="gemma4_text"), "model_type is 'gemma4_text'"),
    "another form": (lambda f: change(f, text_config=3), "not a Gemma 4 assistant's"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors file"),
}  # fmt: skip


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WRONG)
def test_an_assistant_that_does_not_fit_is_refused_before_any_work(name, tmp_path):
    folder = gemma4_assistant(tmp_path, gemma4(), centroids=8)
    assert is_head(folder)
    load_head(folder).bind(Scorer(gemma4()))
    spoil, message = WRONG[name]
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        Gemma4AssistantHead(folder).bind(Scorer(gemma4()))


def test_a_target_without_such_layers_and_a_cache_without_its_own_keys_are_refused(tmp_path):
    head = load_head(gemma4_assistant(tmp_path, gemma4()))
    with pytest.raises(ValueError, match="the target's layers are of no named kind"):
        head.bind(Scorer(tiny("llama")))
    with pytest.raises(ValueError, match="a StreamingCache lacks some"):
        head.open(StreamingCache(8, 1, 8, None))
