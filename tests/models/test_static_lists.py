"""Static lists: what the model says behind the beginning of a text and one token, kept for later processes."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.tiny import PROMPTS, VOCABULARY, tiny
from transformers import PreTrainedModel

from forerun.core.origin import Origin
from forerun.engine.engine import Engine
from forerun.models.forward import static_lists
from forerun.models.forward.gate import admit
from forerun.models.forward.runtime import LISTS_SUFFIX, StartupCache, default_runtime
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.static_lists import PASS_TOKENS, content, read
from forerun.trie.recycled import NO_ROWS, RecycledRows
from forerun.trie.tables import LISTED

BOS = 3


def begun(name: str) -> PreTrainedModel:
    """A model whose texts begin with a token."""
    model = copy.deepcopy(tiny(name))
    model.generation_config.bos_token_id = BOS
    return model


def scorer_of(name: str = "llama") -> Scorer:
    return admit(begun(name))


def extended(scorer: Scorer, *known: RecycledRows, clock: Callable[[], float] = lambda: 0.0) -> RecycledRows:
    """All lists, or those that a clock leaves time for."""
    return static_lists.extended(scorer, *known, clock=clock)


def equal(left: RecycledRows, right: RecycledRows) -> bool:
    return all(np.array_equal(*pair) for pair in zip(left, right, strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_each_list_has_the_models_best_tokens_behind_the_beginning_of_a_text_and_the_token(name):
    scorer = scorer_of(name)
    lists = extended(scorer)
    assert lists.last.tolist() == list(range(VOCABULARY))
    assert (lists.before == -1).all()
    with torch.inference_mode():
        texts = torch.tensor([[BOS, token] for token in range(VOCABULARY)])
        best = scorer.model(texts).logits[:, -1].topk(LISTED)
    assert lists.tokens.tolist() == best.indices.tolist()
    assert np.allclose(lists.scores, best.values.numpy(), rtol=1e-5, atol=1e-6)


def test_a_model_without_a_first_token_takes_one_that_ends_texts_and_without_both_there_are_no_lists():
    scorer = scorer_of()
    config, expected = scorer.model.generation_config, extended(scorer)
    config.bos_token_id, config.eos_token_id = None, [BOS, 4]
    assert equal(extended(scorer), expected)
    config.eos_token_id = None
    assert not len(extended(scorer).last)


def test_a_start_makes_what_fits_its_time_and_the_next_one_goes_on(tmp_path):
    scorer, ticks = scorer_of(), itertools.count(0.0, 0.6)
    first = extended(scorer, clock=lambda: next(ticks))  # one pass: the second would start too late
    assert len(first.last) == PASS_TOKENS
    (tmp_path / "lists.npy").write_bytes(content(first))
    kept = read(tmp_path / "lists.npy", VOCABULARY)
    assert equal(kept, first)
    assert equal(extended(scorer, kept), extended(scorer))


@pytest.mark.parametrize("damage", [
    lambda table: table[:, :-1], lambda table: table.astype(np.int64),
    lambda table: np.where(np.arange(2 * LISTED) == 2, VOCABULARY, table).astype(np.int32),
    lambda table: np.where(np.arange(2 * LISTED) == LISTED + 2, np.float32("nan").view(np.int32), table),
    lambda table: table[:, ::-1].copy(),
], ids=["narrow", "type", "token", "nan", "order"])  # fmt: skip
def test_a_damaged_file_is_no_file(damage, tmp_path):
    file = tmp_path / "lists.npy"
    file.write_bytes(content(extended(scorer_of())))
    assert len(read(file, VOCABULARY).last) == VOCABULARY
    np.save(file, damage(np.load(file)))
    assert equal(read(file, VOCABULARY), NO_ROWS)
    file.write_bytes(b"not an array")
    assert equal(read(file, VOCABULARY), NO_ROWS)


def test_they_are_made_once_a_process_and_kept_beside_the_costs_for_later_ones(tmp_path, monkeypatch):
    scorer, cache = scorer_of(), StartupCache(lambda: tmp_path)
    made = cache.static_lists(scorer)
    assert len(made.last) == VOCABULARY
    (file,) = tmp_path.glob(f"*{LISTS_SUFFIX}")
    cache.self_test(scorer, lambda: None)
    assert file.name.removesuffix(LISTS_SUFFIX) in {each.stem for each in tmp_path.glob("*.json")}
    monkeypatch.setattr(static_lists, "_lists", lambda *_: pytest.fail("a pass"))
    assert cache.static_lists(scorer) is made
    assert equal(StartupCache(lambda: tmp_path).static_lists(scorer), made)


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_texts_are_the_same_and_the_first_step_has_drafts_from_them(sampling):
    model = begun("llama")
    lists = extended(admit(model))
    runtime = replace(default_runtime(), static_lists=lambda scorer: lists)
    plain = Engine(model, "none").generate(list(PROMPTS), max_new_tokens=20, **sampling)
    engine = Engine(model, "trie", prune_drafts=False, _runtime=runtime)
    assert engine.generate(list(PROMPTS), max_new_tokens=20, **sampling).generated == plain.generated
    without = Engine(model, "trie", prune_drafts=False)
    drafted = []
    for each in (engine, without):
        first = next(iter(each.stream([PROMPTS[2]], max_new_tokens=4, namespace="new", **sampling)))
        drafted.append((first.proposed, Origin.RECYCLED in first.origins))
    assert drafted[0][0] > drafted[1][0]
