"""Shortlists: the logits of their tokens are those of the whole matrix, and they hold what was named last."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.head_reference import states_of
from support.heads import dflash, eagle3, mtp_target
from support.saved_models import save, small_tokenizer
from support.tiny import build, tiny
from torch import nn

from forerun.kernels.linear import ordered_modules
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads import shortlist
from forerun.models.heads.head import Head
from forerun.models.heads.loading import load_head
from forerun.models.heads.mtp import MtpHead
from forerun.models.heads.shortlist import OutputMatrix, Shortlist, drafting, frequent_tokens
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import StoredLinear
from forerun.trie.recycled import NO_ROWS

TEXT = np.random.default_rng(3).integers(0, 48, 20)
COMMON = np.array([0, 3, 7, 8, 20])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortlists that are short beside a vocabulary of 48."""
    monkeypatch.setattr(shortlist, "OWN_TOKENS", 12)
    monkeypatch.setattr(shortlist, "FIRST_TOKENS", 4)


def matrix_of(dtype: str, bias: bool = False) -> OutputMatrix:
    """A matrix of 48 tokens and 64 columns in one of the types."""
    torch.manual_seed(1)
    if dtype == "Q8_0":
        blocks = pytest.importorskip("support.gguf_blocks").blocks
        rows = nn.Parameter(blocks("Q8_0", 48, 64)[0], requires_grad=False)
        module: Any = StoredLinear(rows, "Q8_0", 64, quantised=True)
    else:
        module = nn.Linear(64, 48, bias=bias).to(getattr(torch, dtype))
    target: Any = SimpleNamespace(model=SimpleNamespace(get_output_embeddings=lambda: module))
    return OutputMatrix.of_target(target)


@pytest.mark.parametrize(
    ("dtype", "bias"), [("float32", True), ("bfloat16", False), ("float64", False), ("Q8_0", False)]
)
def test_logits_over_shortlists_are_those_of_the_whole_matrix(dtype, bias):
    """Bit for bit, of two sequences of which one has more tokens of its own."""
    matrix = matrix_of(dtype, bias)
    matrix.shorten(COMMON)
    lists = [Shortlist(matrix), Shortlist(matrix)]
    lists[0].add(np.array([40, 3, 41]))
    lists[1].add(np.arange(30, 37))
    hidden = torch.randn(5, 64, dtype=torch.float32 if dtype == "Q8_0" else getattr(torch, dtype))
    with torch.inference_mode(), Ordered():
        whole = matrix(hidden)
        with drafting(lists, [2, 3]):
            short = matrix(hidden)
        assert torch.equal(matrix(hidden), whole)
    assert short.shape[-1] < 48 and whole.shape == (5, 48)
    for own, rows in zip(lists, (slice(0, 2), slice(2, 5)), strict=True):
        assert torch.equal(short[rows, : len(own.tokens)], whole[rows][:, torch.from_numpy(own.tokens)])


@pytest.mark.parametrize("seed", range(4))
def test_a_shortlist_holds_the_tokens_that_were_named_last(seed):
    """Beside a list that drops the oldest."""
    rng, matrix = np.random.default_rng(seed), matrix_of("float32")
    matrix.shorten(COMMON)
    own, expected = Shortlist(matrix), list[int]()
    weight = matrix.take(np.arange(48)).rows
    for _ in range(30):
        named = rng.integers(-1, 60, rng.integers(0, 20))
        own.add(named)
        new = [t for t in named.tolist() if 0 <= t < 48 and t not in COMMON and t not in expected]
        new = [t for place, t in enumerate(new) if t not in new[place + 1 :]]
        expected = [*expected, *new[-12:]][-12:]
        assert own.tokens[: len(COMMON)].tolist() == COMMON.tolist()
        assert sorted(own.tokens[len(COMMON) :].tolist()) == sorted(expected)
        assert torch.equal(own.weights.rows[: len(expected)], weight[own.tokens[len(COMMON) :]])
    nbytes = own.weights.rows.nbytes + own._tokens.nbytes + own._named.nbytes
    assert nbytes - 4 * weight[0].nbytes - 4 * 8 <= matrix.needs()  # room doubles, here from 8 to 16


def test_a_shortlist_that_saves_little_is_none():
    matrix = matrix_of("float32")
    matrix.shorten(np.arange(12))
    assert matrix.frequent is None and matrix.needs() == 0


def test_frequent_tokens_are_the_first_ones_and_those_of_the_static_lists():
    named = NO_ROWS._replace(tokens=np.array([[9000, 5, -1, -1, -1, -1, -1, -1]], np.int32))
    found = frequent_tokens(named, 10_000)
    assert found.tolist() == [*range(2048), 9000]
    assert frequent_tokens(NO_ROWS, 100).tolist() == list(range(100))


HEADS: dict[str, Callable[[Path], tuple[Head, Any]]] = {
    "eagle3": lambda folder: (load_head(eagle3(folder, tiny("llama"), known=48)), tiny("llama")),
    "eagle3, speculators": lambda folder: (load_head(eagle3(folder, tiny("llama"), "speculators")), tiny("llama")),
    "dflash": lambda folder: (load_head(dflash(folder, tiny("llama"))), tiny("llama")),
    "mtp": lambda folder: (MtpHead(), mtp_target(folder, 2)),
}


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_every_head_drafts_over_shortlists(name, tmp_path):
    """Trees of two sequences, with a shortlist and without: its columns have the same bits."""
    head, model = HEADS[name](tmp_path)
    head.bind(Scorer(model))
    head.output.shorten(COMMON)
    found = []
    for own in (None, [Shortlist(head.output), Shortlist(head.output)]):
        sequences = [head.open(FullCache()), head.open(FullCache())]
        for number, (sequence, end) in enumerate(zip(sequences, (18, 13), strict=True)):
            tokens = TEXT[: end + 1]
            head.record(sequence, tokens, 0, states_of(head, model, tokens)[:-1])
            if own is not None:
                own[number].add(tokens)
                sequence.shortlist = own[number]
        growths, first = head.start(sequences)
        second = head.extend(growths, [[0, 0], [0]], [[3, 4], [5]])
        found.append((first, second))
    (whole, further), (short, shorter) = found
    for row, sequence in enumerate(sequences):
        columns = torch.from_numpy(sequence.shortlist.tokens)
        assert len(columns) < 48
        assert torch.equal(short[row, : len(columns)], whole[row, columns])
        for node in ((0, 1), (2,))[row]:
            assert torch.equal(shorter[node, : len(columns)], further[node, columns])


def test_a_head_with_a_vocabulary_of_its_own_keeps_it(tmp_path):
    head = load_head(eagle3(tmp_path, tiny("llama")))
    head.bind(Scorer(tiny("llama")))
    assert head.tokens is not None and head.output is None and head.needs(10) == head.token_bytes * 266


@pytest.mark.parametrize("name", HEADS)
@torch.inference_mode()
def test_all_products_of_heads_are_those_of_our_kernels(name, tmp_path, monkeypatch):
    """As the target's are: torch multiplies none."""
    head, model = HEADS[name](tmp_path)
    head.bind(Scorer(copy.deepcopy(model).float()))
    taken, own = list[Any](), ordered_modules._product
    monkeypatch.setattr(ordered_modules, "_product", lambda *given: (taken.append(own(*given)), taken[-1])[1])
    sequence = head.open(FullCache())
    layers = [torch.randn(18, model.config.hidden_size) for _ in head.layers]
    head.record(sequence, TEXT[:19], 0, torch.cat(layers, -1))
    growths, _ = head.start([sequence])
    head.extend(growths, [[0, 0]], [[3, 4]])
    assert len(taken) > 5 and all(product is not None for product in taken)


@torch.inference_mode()
def test_beside_a_stored_target_a_heads_matrices_are_stored_too(tmp_path, monkeypatch):
    """Its logits are those of float32 within eight bits' rounding."""
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = build("LlamaForCausalLM", {"vocab_size": len(small_tokenizer()), "intermediate_size": 64}, seed=3).float()
    stored, _ = load(str(save(model, tmp_path / "target")), quantize="q8_0")
    folder, found = eagle3(tmp_path / "head", model), []
    for target in (model, stored):
        head = load_head(folder)
        head.bind(Scorer(target))
        sequence, states = head.open(FullCache()), torch.randn(19, 96, generator=torch.Generator().manual_seed(0))
        head.record(sequence, TEXT[:20], 0, states)
        found.append(head.start([sequence])[1][0])
    parts = (head._weights, *head._layer_weights)
    kinds = {name: weight.dtype for part in parts for name, weight in part.items()}
    assert kinds["fc"] == kinds["q"] == torch.uint8 and kinds["down"] == kinds["norm"] == torch.float32  # 40 columns
    assert torch.corrcoef(torch.stack(found))[0, 1] > 0.999
