"""What an engine finds out at its start is kept for engines and processes after it, and never where it may be wrong."""

import copy
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny import PROMPTS, VOCABULARY, tiny
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import forerun
from forerun.audit.audit import Plan, audit
from forerun.core.block import RowScores
from forerun.core.origin import Origin
from forerun.models.forward import pass_timing, static_lists
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.gate import admit
from forerun.models.forward.runtime import (
    COSTS_LAST_SECONDS,
    LISTS_SUFFIX,
    Runtime,
    StartupCache,
    default_runtime,
    runtime_as_default,
    user_folder,
    without_folder,
)
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.static_lists import PASS_TOKENS, read
from forerun.trie.recycled import NO_ROWS, RecycledRows
from forerun.trie.tables import LISTED


class Counted(Scorer):
    """A scorer that counts its passes."""

    passes = 0

    def score_rows(self, *arguments: Any) -> list[RowScores]:
        self.passes += 1
        return super().score_rows(*arguments)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are measured quickly."""
    monkeypatch.setattr(pass_timing, "MAX_ROUNDS", 2)


@pytest.fixture
def model() -> Any:
    return copy.deepcopy(tiny("llama")).float()


def process(folder: Path | None, own: Callable[[], float] = lambda: 1.0) -> StartupCache:
    """A cache as another process would make it; ``own``: for what share of the time its thread has a core."""
    began = time.perf_counter()
    return StartupCache(lambda: folder, lambda: (time.perf_counter() - began) * own())


def content(folder: Path) -> tuple[Path, dict[str, Any]]:
    (file,) = folder.glob("*.json")
    return file, json.loads(file.read_text())


def test_results_are_kept_for_other_scorers_of_a_model_in_the_process(model):
    cache, test = process(None), Mock(return_value=None)
    first, second = Counted(model), Counted(model)
    exactness, costs = cache.exactness(first, 64, False), cache.costs(first)
    assert cache.self_test(first, test) is cache.self_test(second, test) is None
    assert cache.exactness(second, 64, False) == exactness == Exactness(exactness.level, exactness.reason)
    assert cache.costs(second) == costs
    assert test.call_count == 1 and first.passes and not second.passes


@pytest.fixture
def no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes never take less than when they were measured, however busy the machine was then."""
    monkeypatch.setattr(
        "forerun.models.forward.runtime.seconds_of_passes", lambda scorer, sizes: [math.inf] * len(sizes)
    )


@pytest.mark.usefixtures("no_faster")
def test_a_later_process_takes_them_from_the_folder_and_says_so(model, tmp_path):
    test, scorer = Mock(return_value=None), Counted(model)
    found, costs = process(tmp_path).exactness(scorer, 64, False), process(tmp_path).costs(scorer)
    process(tmp_path).self_test(scorer, test)
    later, counted = process(tmp_path), Counted(model)
    kept = later.exactness(counted, 64, False)
    assert kept.level == found.level and "measured earlier on this machine" in str(kept.reason)
    assert later.self_test(scorer, test) is None
    assert not counted.passes and test.call_count == 1
    assert process(tmp_path).costs(scorer) == costs


@pytest.mark.parametrize("change", [
    lambda model: model.lm_head.weight.data.mul_(2), lambda model: model.double(),
    lambda model: setattr(model.config, "rms_norm_eps", 0.1), lambda model: model.set_attn_implementation("eager"),
    lambda model: torch.set_num_threads(2),
    lambda model: model.lm_head.register_forward_hook(lambda *given: None),
], ids=["weights", "dtype", "configuration", "attention", "threads", "hook"])  # fmt: skip
def test_a_changed_model_or_machine_is_tested_anew(change, model, tmp_path):
    cache, test = process(tmp_path), Mock(return_value=None)
    cache.self_test(Scorer(model), test)
    try:
        change(model)
        cache.self_test(Scorer(model), test)
    finally:
        torch.set_num_threads(1)
    assert test.call_count == 2


def test_a_failed_self_test_is_not_kept_and_other_code_s_in_the_process_only(model, tmp_path, monkeypatch):
    cache, test = process(tmp_path), Mock(return_value="it differs")
    assert cache.self_test(Scorer(model), test) == cache.self_test(Scorer(model), test) == "it differs"
    assert test.call_count == 2
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda *_: pytest.fail("a pass"))
    cache, test = process(tmp_path), Mock(return_value=None)
    assert cache.self_test(Scorer(model), test) is cache.self_test(Scorer(model), test) is None
    assert test.call_count == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"self-test, Scorer": 1}', "[" * 100_000])
def test_a_damaged_file_counts_as_missing(text, model, tmp_path):
    test = Mock(return_value=None)
    process(tmp_path).self_test(Scorer(model), test)
    file, _ = content(tmp_path)
    file.write_text(text)
    process(tmp_path).self_test(Scorer(model), test)
    assert test.call_count == 2
    assert content(tmp_path)[1] == {"self-test, Scorer": True}


def test_wrong_values_in_a_file_are_measured_anew(model, tmp_path):
    scorer = Scorer(model)
    found, costs = process(tmp_path).exactness(scorer, 64, False), process(tmp_path).costs(scorer)
    file, results = content(tmp_path)
    wrong: dict[str, Any] = {"level": "perfect", "reason": None, "sizes": [0], "costs": [], "measured": time.time()}
    file.write_text(json.dumps(dict.fromkeys(results, wrong)))
    assert process(tmp_path).exactness(scorer, 64, False) == found
    assert process(tmp_path).costs(scorer).sizes == costs.sizes


def test_without_a_writable_folder_everything_is_measured(model, tmp_path):
    (tmp_path / "file").write_text("")
    test = Mock(return_value=None)
    for _ in range(2):
        process(tmp_path / "file" / "folder").self_test(Scorer(model), test)
    assert test.call_count == 2


@pytest.mark.parametrize(
    ("name", "value"), [("measured", time.time() - COSTS_LAST_SECONDS - 1), ("unit", 1e6)], ids=["old", "disturbed"]
)
def test_costs_are_measured_anew_when_they_are_old_or_passes_are_faster_now(name, value, model, tmp_path):
    process(tmp_path).costs(Scorer(model))
    file, results = content(tmp_path)
    results["costs, Scorer"][name] = value
    file.write_text(json.dumps(results))
    process(tmp_path).costs(Scorer(model))
    assert content(tmp_path)[1]["costs, Scorer"][name] != value


@pytest.mark.usefixtures("no_faster")
def test_costs_that_others_disturbed_are_measured_again_when_nothing_disturbs_passes(model, tmp_path):
    share = [0.5]
    cache, scorer = process(tmp_path, lambda: share[0]), Counted(model)
    found = cache.costs(scorer)
    assert found.doubtful and not list(tmp_path.iterdir())
    assert cache.costs(scorer) == found
    share[0] = 1.0
    believed = cache.costs(scorer)
    assert not believed.doubtful
    share[0], scorer.passes = 0.5, 0
    assert cache.costs(scorer) == believed and not scorer.passes
    assert process(tmp_path).costs(scorer) == believed


def test_a_second_engine_makes_no_passes(model, monkeypatch):
    runtime = without_folder(Runtime())
    forerun.Engine(model, "auto", _runtime=replace(runtime, costs=default_runtime().costs))
    monkeypatch.setattr(type(admit(model)), "score_rows", lambda *_: pytest.fail("a pass"))
    forerun.Engine(model, "auto", _runtime=replace(runtime, costs=default_runtime().costs))


def test_an_audit_takes_nothing_from_the_folder(model, tmp_path):
    cache = process(tmp_path)
    runtime = replace(default_runtime(), exactness=cache.exactness, self_test=cache.self_test)
    forerun.Engine(model, "none", _runtime=runtime)
    file, results = content(tmp_path)
    (name,) = (name for name in results if name.startswith("exactness"))
    file.write_text(json.dumps(results | {name: {"level": "rounding", "reason": "it was planted"}}))
    later = process(tmp_path)
    with runtime_as_default(replace(runtime, exactness=later.exactness, self_test=later.self_test)):
        engine = forerun.Engine(model, "none")
        assert engine.exactness.level == "rounding"
        assert str(engine.exactness.reason).startswith("it was planted; measured earlier")
        report = audit(model, [[5, 6, 7]], Plan(drafters=["lookup"], max_new_tokens=4, seeds=0))
    assert report.exactness == Exactness("bitwise")


def test_a_default_runtime_ends_alone_and_the_folder_is_the_users_cache_folder(monkeypatch, tmp_path):
    before = default_runtime()
    with runtime_as_default(Runtime()), runtime_as_default(first := Runtime()):
        assert default_runtime() is first
    assert default_runtime() is before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "forerun" / "startup"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder() is None


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
    (tmp_path / "lists.npy").write_bytes(static_lists.content(first))
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
    file.write_bytes(static_lists.content(extended(scorer_of())))
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
    plain = forerun.Engine(model, "none").generate(list(PROMPTS), max_new_tokens=20, **sampling)
    engine = forerun.Engine(model, "trie", prune_drafts=False, _runtime=runtime)
    assert engine.generate(list(PROMPTS), max_new_tokens=20, **sampling).generated == plain.generated
    without = forerun.Engine(model, "trie", prune_drafts=False)
    drafted = []
    for each in (engine, without):
        first = next(iter(each.stream([PROMPTS[2]], max_new_tokens=4, namespace="new", **sampling)))
        drafted.append((first.proposed, Origin.RECYCLED in first.origins))
    assert drafted[0][0] > drafted[1][0]
