"""Texts with trained heads: random ones, which are nearly always wrong, and one that knows what comes.

In float64 a text is token for token that of ``transformers``; in other types it is, bit for bit, that of plain
decoding. The heads' states are watched by the one that knows.
"""

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import heads
from support.distributions import chi_square_p
from support.heads import OracleHead
from support.qwen_mtp import FAMILIES, qwen_target
from support.tiny import ARCHITECTURES, HYBRIDS, PROMPTS, build, by_transformers, tiny
from transformers import PreTrainedModel

from forerun import Engine
from forerun.core.long_context import LongContextConfig
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.tree import DraftTree
from forerun.decoding.proposals import merged_estimates
from forerun.decoding.recipes import Setup
from forerun.decoding.sources.head_source import HeadSource
from forerun.kv.kv_tiers import min_device_bytes
from forerun.models.heads import shortlist
from forerun.models.heads.loading import load_head

SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.3, "top_k": 12, "seed": 11},
    "penalty": {"do_sample": True, "temperature": 0.7, "repetition_penalty": 1.3, "seed": 2},
}
ON: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
SHORT = ON | {"max_new_tokens": 12}
HEADS: dict[str, Callable[[Path, PreTrainedModel], Path]] = {
    "eagle3": heads.eagle3,
    "eagle3, speculators": lambda folder, model: heads.eagle3(folder, model, "speculators"),
    **{name: getattr(heads, name) for name in ("eagle31", "peagle", "dflash", "dflash2", "dspark")},
}


@functools.cache
def plain(architecture: str, dtype: str, sampling: str) -> list[list[int]]:
    model, options = tiny(architecture, getattr(torch, dtype)), SAMPLING[sampling] | ON
    if sampling == "greedy" and dtype == "float64":
        return [[*prompt, *by_transformers(model, prompt, **options)] for prompt in PROMPTS]
    engine = Engine(model, "none", prune_drafts=False)
    return [engine.generate(prompt, **options).requests[0].tokens.tolist() for prompt in PROMPTS]


def check_texts(engine: Engine, expected: list[list[int]], above: float = 0.0, **options: Any) -> None:
    """A batch of the prompts has these texts and drafts, and each row more than so many tokens per step."""
    found = engine.generate(list(PROMPTS), **options).requests
    assert [request.tokens.tolist() for request in found] == expected
    assert all(sum(request.stats.drafted) > 0 for request in found)
    assert all(request.stats.tokens_per_step > above for request in found)


def with_head(head: Any) -> Callable[[Setup], HeadSource]:
    return lambda setup: HeadSource(head, setup.target)


def drafter_of(head: str, architecture: str, dtype: str, sampling: str, folder: Path) -> Any:
    if head == "oracle":
        return with_head(OracleHead(plain(architecture, dtype, sampling), tiny(architecture, getattr(torch, dtype))))
    HEADS[head](folder, tiny(architecture))
    return "head"


def check_cell(head: str, architecture: str, dtype: str, sampling: str, folder: Path) -> None:
    expected, model = plain(architecture, dtype, sampling), tiny(architecture, getattr(torch, dtype))
    drafter = drafter_of(head, architecture, dtype, sampling, folder)
    settings = LongContextConfig(draft_model=folder)
    engine = Engine(model, drafter, settings=settings, prune_drafts=False, prefill_block=4)
    assert engine.exactness.level == "bitwise"
    check_texts(engine, expected, 4 * (head == "oracle"), **SAMPLING[sampling] | ON)


EVERY = [
    (head, architecture, dtype, tuple(SAMPLING)[(h + a + d) % 3])
    for h, head in enumerate((*HEADS, "oracle"))
    for a, architecture in enumerate(ARCHITECTURES)
    for d, dtype in enumerate(("float64", ("float32", "bfloat16")[(a + h) % 2]))
]
FEW = EVERY[::19]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cell", FEW, ids="-".join)
def test_output_equals_plain_generation(cell, tmp_path):
    check_cell(*cell, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("cell", [cell for cell in EVERY if cell not in FEW], ids="-".join)
def test_output_equals_plain_generation_in_every_cell(cell, tmp_path):
    check_cell(*cell, tmp_path)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortlists of up to 20 of the 48 tokens."""
    monkeypatch.setattr(shortlist, "OWN_TOKENS", 12)
    monkeypatch.setattr(shortlist, "FIRST_TOKENS", 4)


def over_shortlists(head: Any) -> Callable[[Setup], HeadSource]:
    return lambda setup: HeadSource(head, setup.target, frequent=lambda: np.arange(8))


SHORTLISTED: dict[str, Callable[[Path, PreTrainedModel], Path]] = {
    "eagle3": lambda folder, model: heads.eagle3(folder, model, known=48),
    "eagle31": lambda folder, model: heads.eagle3(folder, model, known=48, fc_norm=True, norm_output=True),
    "peagle": heads.peagle,
    "dflash": heads.dflash,
}
"""Heads that know all tokens; the logits of DFlash2 and DSpark depend on tokens of a whole vocabulary."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("head", [pytest.param(h, marks=[pytest.mark.matrix] * (h != "eagle3")) for h in SHORTLISTED])
def test_drafting_over_shortlists_changes_nothing(head, sampling, tmp_path, short):
    """Rows of a batch have shortlists of their own; only their tokens are drafted."""
    expected, model = plain("llama", "float64", sampling), tiny("llama")
    own = load_head(SHORTLISTED[head](tmp_path, model))
    engine = Engine(model, over_shortlists(own), prune_drafts=False, prefill_block=4)
    assert own.output.frequent is not None
    check_texts(engine, expected, **SAMPLING[sampling] | ON)


@torch.inference_mode()
def test_under_rejection_sampling_q_is_what_a_shortlist_was_drawn_from(tmp_path, short):
    """It is 0 for all other tokens, and the texts have the target's distribution: of 600 texts the tokens of the first
    step with drafts, by a chi-square test."""
    model, prompt, trees = tiny("llama", torch.float32), PROMPTS[1][:6], list[DraftTree]()
    own = load_head(heads.eagle3(tmp_path, model, known=48))

    class Watched(HeadSource):
        def propose(self, rows: Any, limits: Any) -> list[DraftTree]:
            found = super().propose(rows, limits)
            for row, tree in zip(rows, found, strict=True):
                if tree.q is not None:
                    listed = row.states[self].shortlist.tokens
                    rest = np.setdiff1d(np.arange(48), listed)
                    assert len(rest) >= 28 and float(tree.q[:, rest].abs().max()) == 0.0
                    assert tree.q.sum(-1).tolist() == pytest.approx([1.0] * len(tree))
                    assert set(tree.tokens.tolist()) <= set(listed.tolist())
            trees.extend(found)
            return found

    engine = Engine(model, lambda setup: Watched(own, setup.target, frequent=lambda: np.arange(8)), prune_drafts=False)
    logits = [model(torch.tensor([[*prompt, token]])).logits[0, -2:].double() for token in range(48)]
    first = logits[0][0].div(1.5).softmax(-1)
    second = sum(p * own[1].div(1.5).softmax(-1) for p, own in zip(first, logits, strict=True)).numpy()
    counts = np.zeros(48)
    for seed in range(0, 600, 50):
        requests = [
            engine.requests(prompt, max_new_tokens=3, do_sample=True, temperature=1.5, top_k=0, top_p=1.0,
                            seed=seed + row, verification="rejection", eos_token_id=None)[0]
            for row in range(50)
        ]  # fmt: skip
        list(engine.run(requests))
        counts += np.bincount([int(request.generated[1]) for request in requests], minlength=48)
    assert sum(len(tree) for tree in trees) > 500
    seldom = second * 600 < 5  # the test is for cells of some five texts; others count as one
    cells = [np.append(each[~seldom], each[seldom].sum()) for each in (counts, second)]
    assert chi_square_p(*cells) > 0.001


@pytest.mark.parametrize(
    ("kind", "count", "dtype"),
    [("deepseek_v3", 1, "float64"),  # and Qwen's in a GGUF file, in test_as_stored
     *(pytest.param(*each, marks=pytest.mark.matrix) for each in [
         ("deepseek_v3", 1, "bfloat16"), ("qwen3_5_moe", 1, "bfloat16"),
         ("deepseek_v3", 2, "bfloat16"), ("deepseek_v3", 2, "float64"), ("glm4_moe", 2, "float32"),
         ("glm4_moe", 1, "float64"), ("glm4_moe", 1, "bfloat16"), ("qwen3_5_moe", 1, "float64"),
         *((family, 1, dtype) for family in FAMILIES[:2] for dtype in ("float64", "float32", "bfloat16"))])],
)  # fmt: skip
def test_heads_of_a_checkpoint_change_nothing(kind, count, dtype, tmp_path):
    made = getattr(torch, dtype)
    model = qwen_target(tmp_path, kind, made) if kind in FAMILIES else heads.mtp_target(tmp_path, count, made, kind)
    none, tensors = Engine(model, "none", prune_drafts=False, prefill_block=4), [*model.parameters(), *model.buffers()]
    ways, before = [SAMPLING[sampling] | SHORT for sampling in ("greedy", "coupled")], [t.clone() for t in tensors]
    texts = [[none.generate(prompt, **way).requests[0].tokens.tolist() for prompt in PROMPTS] for way in ways]
    engine = Engine(model, "mtp", prune_drafts=False, prefill_block=4)
    after = [*model.parameters(), *model.buffers()]
    assert all(own.dtype == t.dtype and torch.equal(own, t) for own, t in zip(after, before, strict=True))
    for way, expected in zip(ways, texts, strict=True):
        check_texts(engine, expected, **way)
    if dtype == "float64":
        own = by_transformers(model, PROMPTS[1], do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert engine.generate(PROMPTS[1], do_sample=False, **SHORT).generated == [own]


GEMMA4: dict[str, Callable[[Path, torch.dtype], PreTrainedModel]] = {
    "its last layers": heads.gemma4_and_its_last_layers,
    "random": lambda folder, dtype: with_assistant(folder, heads.gemma4(dtype, shared=0)),
    "centroids": lambda folder, dtype: with_assistant(folder, heads.gemma4(dtype), centroids=8),
}


def with_assistant(folder: Path, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    heads.gemma4_assistant(folder, model, **options)
    return model


def check_assistant(kind: str, dtype: str, sampling: str, folder: Path, on: dict[str, Any]) -> None:
    """Alone in float64 against transformers; in a batch, and after prefixes that were kept, against plain decoding."""
    model = GEMMA4[kind](folder, getattr(torch, dtype))
    plain = Engine(model, "none", prune_drafts=False, prefill_block=4)
    expected = [plain.generate(prompt, **SAMPLING[sampling] | on).requests[0].tokens.tolist() for prompt in PROMPTS]
    settings = LongContextConfig(draft_model=folder)
    engine = Engine(model, "head", settings=settings, prune_drafts=False, prefill_block=4, prefix_cache=1 << 24)
    assert engine.exactness.level == "bitwise"
    for _ in range(2):
        check_texts(engine, expected, 2 * (kind == "its last layers"), **SAMPLING[sampling] | on)
    if dtype == "float64" and sampling == "greedy":
        own = by_transformers(model, PROMPTS[1], do_sample=False, **on)
        assert [*PROMPTS[1], *own] == expected[1]


ASSISTED = list(itertools.product(GEMMA4, ("float64", "float32", "bfloat16"), SAMPLING))
FEW_ASSISTED = ASSISTED[::13]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("cell", [
    pytest.param(cell, marks=[pytest.mark.matrix] * (cell not in FEW_ASSISTED)) for cell in ASSISTED
], ids="-".join)  # fmt: skip
def test_an_assistant_that_reads_the_targets_keys_changes_nothing(cell, tmp_path):
    check_assistant(*cell, tmp_path, SHORT if cell in FEW_ASSISTED else ON)


def test_an_assistant_reads_keys_off_the_device_and_those_of_a_conversation(tmp_path):
    model = heads.gemma4_and_its_last_layers(tmp_path, torch.float32)
    settings, text = LongContextConfig(draft_model=tmp_path), list(PROMPTS[1]) * 30
    plain = Engine(model, "none", prune_drafts=False)
    expected = plain.generate(text, **ON).requests[0].tokens.tolist()
    memory = min_device_bytes(plain.target.kv, len(expected) + plain.budget)
    away = Engine(model, "head", settings=settings, prune_drafts=False, kv_memory=memory)
    found = away.generate(text, **ON).requests[0]
    assert found.tokens.tolist() == expected and found.stats.tokens_per_step > 2
    assert away.tiers.copy_engine.fetched > 0
    near = Engine(model, "head", settings=settings, prune_drafts=False)
    cache = near.prefill(text[:300], len(expected))
    (request,) = near.requests(text, **ON)
    list(near.run([request], caches=[cache]))
    assert request.tokens.tolist() == expected and request.stats.tokens_per_step > 2


@pytest.mark.matrix
def test_auto_with_the_layers_of_a_checkpoint_changes_nothing(tmp_path):
    """Of a target with recurrent layers, with prompts that share a prefix, and chunks that end anywhere."""
    model = qwen_target(tmp_path, "qwen3_5", torch.float32)
    prompts = [*PROMPTS, [*PROMPTS[1], 3, 4]]
    plain_engine = Engine(model, "none", prefill_block=4)
    expected = [plain_engine.generate(prompt, do_sample=False, **ON).requests[0].tokens.tolist() for prompt in prompts]
    settings = LongContextConfig(draft_model="mtp")
    engine = Engine(model, "auto", settings=settings, prefill_block=4, prefix_cache=1 << 24)
    for _ in range(2):
        found = engine.generate(prompts, do_sample=False, **ON).requests
        assert [request.tokens.tolist() for request in found] == expected


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "head"), [
    (("lfm2", "qwen3_5", "bamba")[(number + turn) % 3], head)
    for number, head in enumerate(HEADS)
    for turn in range(2)
])  # fmt: skip
def test_heads_of_a_target_with_recurrent_layers_change_nothing(name, head, tmp_path):
    model = build(*HYBRIDS[name], seed=3).to(torch.bfloat16 if name == "bamba" else torch.float32)
    none = Engine(model, "none").generate(list(PROMPTS), do_sample=False, **ON).requests
    expected = [request.tokens.tolist() for request in none]
    settings = LongContextConfig(draft_model=HEADS[head](tmp_path, model))
    for drafter, above in (("head", 0), (with_head(OracleHead(expected, model)), 4)):
        engine = Engine(model, drafter, settings=settings, prefill_block=4, prune_drafts=False)
        check_texts(engine, expected, above, do_sample=False, **ON)


def oracle_engine(**more: Any) -> tuple[Engine, list[list[int]]]:
    expected = plain("llama", "float64", "greedy")
    return Engine(tiny("llama"), with_head(OracleHead(expected, tiny("llama"))), prune_drafts=False, **more), expected


def test_a_head_begins_where_the_target_begins_to_read():
    """The beginning of the second prompt is not read again: the head knows less of it, and the text is the same."""
    engine, expected = oracle_engine(prefill_block=4, prefix_cache=1 << 24)
    for _ in range(2):
        found = engine.generate(PROMPTS[1], **ON).requests[0]
        assert found.tokens.tolist() == expected[1]
        assert found.stats.tokens_per_step > 4


def test_a_conversation_goes_on_with_a_head():
    engine, (_, text, _) = oracle_engine()
    cache = engine.prefill(text[:20], 40)
    (request,) = engine.requests(text[:20], **SHORT)
    list(engine.run([request], caches=[cache]))
    assert request.tokens.tolist() == text[:32]


class Sevens:
    """A grammar: tokens 5, 6 and 7 of every eight are sevens."""

    def _seven(self, length: int) -> bool:
        return length % 8 > 4

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._seven(len(ids)):
            return scores
        return torch.full_like(scores, -torch.inf).index_copy_(0, torch.tensor([7]), scores[7:8])

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        ends = range(len(ids), len(ids) + most)
        return [7] * next((n for n, length in enumerate(ends) if not self._seven(length)), most)

    def certain(self, ids: torch.Tensor) -> int | None:
        return 7 if self._seven(len(ids)) else None

    def complete(self, ids: torch.Tensor) -> bool:
        return False

    def on_trial(self) -> "Sevens":
        return self


@pytest.mark.parametrize(
    "head", [next(iter(HEADS)), *(pytest.param(h, marks=pytest.mark.matrix) for h in [*HEADS][1:])]
)
def test_a_head_walks_the_tokens_that_a_grammar_forces(head, tmp_path):
    model = tiny("llama")
    settings = LongContextConfig(draft_model=HEADS[head](tmp_path, model))
    texts = []
    for drafter in ("none", "head"):
        engine = Engine(model, drafter, settings=settings, prune_drafts=False, prefill_block=4)
        requests = [Request(prompt, 24, sampler=Sampler(constraint=Sevens())) for prompt in PROMPTS]
        list(engine.run(requests))
        texts.append([request.tokens.tolist() for request in requests])
        drafted = sum(sum(request.stats.drafted) for request in requests)
    assert texts[0] == texts[1]
    assert drafted > 200


def test_rejection_sampling_tests_a_chain_with_its_distribution(tmp_path):
    settings = LongContextConfig(draft_model=heads.eagle3(tmp_path, tiny("llama")))
    engine = Engine(tiny("llama"), "head", settings=settings, prune_drafts=False)
    found = engine.generate(list(PROMPTS), do_sample=True, seed=1, verification="rejection", **ON).requests
    assert all(max(request.stats.drafted) == 6 for request in found)
    assert sum(sum(request.stats.accepted) for request in found) > 0


def test_what_takes_no_head_says_so(tmp_path):
    settings = LongContextConfig(draft_model=heads.eagle3(tmp_path, tiny("llama")))
    with pytest.raises(ValueError, match="a head; this drafter needs a small model"):
        Engine(tiny("llama"), "triforce", settings=settings)
    with pytest.raises(ValueError, match="needs a trained head"):
        Engine(tiny("llama"), "head")


@pytest.mark.parametrize("head", [*(pytest.param(h, marks=pytest.mark.matrix) for h in ("eagle3", "dflash")), "oracle"])
def test_auto_with_a_head_changes_nothing_and_keeps_its_trie(head, tmp_path):
    expected, model = plain("llama", "float64", "greedy"), tiny("llama")
    given = OracleHead(expected, model) if head == "oracle" else HEADS[head](tmp_path, model)
    engine = Engine(model, "auto", settings=LongContextConfig(draft_model=given), prefill_block=4)
    origins: set[int] = set()
    for turn in range(4):  # a head is tried once the trie has saved something
        requests = [request for prompt in PROMPTS for request in engine.requests(prompt, do_sample=False, **ON)]
        origins |= {origin for commit in engine.run(requests) for origin in commit.origins}
        assert [request.tokens.tolist() for request in requests] == expected
        assert turn == 0 or sum(sum(request.stats.accepted) for request in requests) > 0
    assert head != "oracle" or Origin.HEAD in origins


def test_trees_of_two_drafters_have_the_better_estimate_of_each_node():
    first = DraftTree(np.array([1, 2, 3]), np.array([-1, 0, -1]), probability=np.array([0.5, 0.4, 0.3])).by(Origin.HEAD)
    second = DraftTree(np.array([3, 4, 1, 5]), np.array([-1, 0, -1, 2]), probability=np.array([0.6, 0.54, 0.1, 0.09]))
    tree = merged_estimates(first, second.by(Origin.TEXT), 5)
    found = {tuple(tree.tokens[tree.ancestors[node]]): (round(float(p), 6), int(origin))
             for node, (p, origin) in enumerate(zip(tree.probability, tree.sources, strict=True))}  # fmt: skip
    assert found == {
        (1,): (0.5, Origin.HEAD), (1, 2): (0.4, Origin.HEAD), (3,): (0.6, Origin.TEXT), (3, 4): (0.54, Origin.TEXT),
        (1, 5): (0.45, Origin.TEXT),
    }  # fmt: skip
    assert len(merged_estimates(first, second, 3)) == 3
    assert merged_estimates(first, DraftTree.empty(), 3) is first
