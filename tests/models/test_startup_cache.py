"""What an engine finds out at its start is kept for engines and processes after it, and never where it may be wrong."""

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import tiny
from transformers.models.llama import modeling_llama

import forerun
from forerun.audit.audit import Plan, audit
from forerun.core.block import RowScores
from forerun.models.forward.exactness import Exactness
from forerun.models.forward.gate import admit
from forerun.models.forward.runtime import (
    COSTS_LAST_SECONDS,
    Runtime,
    StartupCache,
    default_runtime,
    runtime_as_default,
    user_folder,
    without_folder,
)
from forerun.models.forward.scorer import Scorer


class Counted(Scorer):
    """A scorer that counts its passes."""

    passes = 0

    def score_rows(self, *arguments: Any) -> list[RowScores]:
        self.passes += 1
        return super().score_rows(*arguments)


class SelfTest:
    """A self-test that counts how often it runs."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason, self.runs = reason, 0

    def __call__(self) -> str | None:
        self.runs += 1
        return self.reason


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
    cache, test = process(None), SelfTest()
    first, second = Counted(model), Counted(model)
    exactness, costs = cache.exactness(first, 64, False), cache.costs(first)
    assert cache.self_test(first, test) is cache.self_test(second, test) is None
    assert cache.exactness(second, 64, False) == exactness == Exactness(exactness.level, exactness.reason)
    assert cache.costs(second) == costs
    assert test.runs == 1
    assert first.passes
    assert not second.passes


@pytest.fixture
def no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes never take less than when they were measured, however busy the machine was then."""
    monkeypatch.setattr(
        "forerun.models.forward.runtime.seconds_of_passes", lambda scorer, sizes: [math.inf] * len(sizes)
    )


@pytest.mark.usefixtures("no_faster")
def test_a_later_process_takes_them_from_the_folder_and_says_so(model, tmp_path):
    test, scorer = SelfTest(), Counted(model)
    found, costs = process(tmp_path).exactness(scorer, 64, False), process(tmp_path).costs(scorer)
    process(tmp_path).self_test(scorer, test)
    later, counted = process(tmp_path), Counted(model)
    kept = later.exactness(counted, 64, False)
    assert kept.level == found.level
    assert kept.reason is not None
    assert "measured earlier on this machine" in kept.reason
    assert not counted.passes
    assert later.self_test(scorer, test) is None
    assert test.runs == 1
    assert process(tmp_path).costs(scorer) == costs


@pytest.mark.parametrize("change", [
    lambda model: model.lm_head.weight.data.mul_(2), lambda model: model.double(),
    lambda model: setattr(model.config, "rms_norm_eps", 0.1), lambda model: model.set_attn_implementation("eager"),
    lambda model: torch.set_num_threads(2),
    lambda model: model.lm_head.register_forward_hook(lambda *given: None),
], ids=["weights", "dtype", "configuration", "attention", "threads", "hook"])  # fmt: skip
def test_a_changed_model_or_machine_is_tested_anew(change, model, tmp_path):
    cache, test = process(tmp_path), SelfTest()
    cache.self_test(Scorer(model), test)
    try:
        change(model)
        cache.self_test(Scorer(model), test)
    finally:
        torch.set_num_threads(1)
    assert test.runs == 2


def test_a_failed_self_test_is_not_kept(model, tmp_path):
    cache, test = process(tmp_path), SelfTest("it differs")
    assert cache.self_test(Scorer(model), test) == cache.self_test(Scorer(model), test) == "it differs"
    assert test.runs == 2
    assert not list(tmp_path.iterdir())


def test_a_model_that_runs_other_code_is_kept_in_the_process_only(model, tmp_path, monkeypatch):
    def rotate(*given: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    cache, test = process(tmp_path), SelfTest()
    cache.self_test(Scorer(model), test)
    cache.self_test(Scorer(model), test)
    assert test.runs == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", '{"self-test, Scorer": 1}', "[" * 100_000])
def test_a_damaged_file_counts_as_missing(text, model, tmp_path):
    test = SelfTest()
    process(tmp_path).self_test(Scorer(model), test)
    file, _ = content(tmp_path)
    file.write_text(text)
    process(tmp_path).self_test(Scorer(model), test)
    assert test.runs == 2
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
    test = SelfTest()
    for _ in range(2):
        process(tmp_path / "file" / "folder").self_test(Scorer(model), test)
    assert test.runs == 2


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
    assert found.doubtful
    assert not list(tmp_path.iterdir())
    assert cache.costs(scorer) == found
    share[0] = 1.0
    believed = cache.costs(scorer)
    assert not believed.doubtful
    share[0], scorer.passes = 0.5, 0
    assert cache.costs(scorer) == believed
    assert not scorer.passes
    assert process(tmp_path).costs(scorer) == believed


def test_a_second_engine_makes_no_passes(model, monkeypatch):
    runtime = without_folder(Runtime())
    forerun.Engine(model, "auto", _runtime=replace(runtime, costs=default_runtime().costs))

    def fail(*given: Any) -> None:
        raise AssertionError("a pass")

    monkeypatch.setattr(type(admit(model)), "score_rows", fail)
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


def test_a_default_runtime_ends_alone():
    before = default_runtime()
    with runtime_as_default(Runtime()), runtime_as_default(first := Runtime()):
        assert default_runtime() is first
    assert default_runtime() is before


def test_the_folder_is_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "forerun" / "startup"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_folder() is None
