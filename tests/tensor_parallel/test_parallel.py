"""A model in two processes gives the texts, and the drafts, of one process; and no process outlives another."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import rank as ranks
from support.tiny import PROMPTS, tiny

from forerun import Engine
from forerun.drafting.recipes import RECIPES

pytestmark = pytest.mark.alone  # two processes, each of which has to answer in time

QUICK = ["auto", "triforce", "retrieval", "low-rank:coupled", "retrieval:rejection", "streaming"]
"""Drafters of every cache, and of a small model that rank 0 has alone."""
EVENTS = ["rank 0 dies", "rank 1 dies"]
LATER = ["rank 1 hangs", "rank 1 fails", "rank 0 fails"]
MODELS = ["triforce", "retrieval", "low-rank", "streaming"]
"""Drafters whose drafts depend on nothing but logits, of a small model or over the target's own cache."""
METHODS = ["", ":coupled", ":rejection"]
Found = dict[str, list[dict[str, Any]]]
"""What both ranks got, by case."""


def run(folder: Path, *groups: list[str]) -> Found:
    """Run groups of cases, each with two processes and the model it begins with."""
    for name in {group[0] for group in groups}:
        copy.deepcopy(tiny(name)).save_pretrained(folder / name)  # saving changes its configuration
    command = [sys.executable, ranks.__file__, str(folder), *(",".join(group) for group in groups)]
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    found: Found = {}
    for number in range(len(groups)):
        for rank in range(2):
            file = folder / f"{number}-{rank}.jsonl"
            for line in file.read_text().splitlines() if file.exists() else []:
                case, got = json.loads(line)
                found.setdefault(case, [{}, {}])[rank] = got
    found["log"] = [{"stderr": done.stderr[-4000:]}]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("two")
    cases = [*QUICK, "decided", "beginnings", "sharded logits", "measured", "unsayable"]
    cases += ["interrupted", "heads", "refused"]
    return run(folder, ["llama", *cases], *(["llama", event] for event in EVENTS))


def both(found: Found, case: str) -> list[dict[str, Any]]:
    assert case in found and all(found[case]), found["log"][0]["stderr"]
    return found[case]


def assert_as_one(found: Found, case: str, name: str = "llama") -> None:
    """Both ranks have what one process has: the texts, and of drafts by a model which were made and accepted."""
    first, second = both(found, case)
    assert first == second
    one = ranks.run(case, tiny(name))
    same = ["generated", "reasons", "seeds"]
    if case.partition(":")[0] in MODELS:  # others may draft otherwise in a process that had other requests before
        same += ["drafted", "accepted"]
    assert {each: first[each] for each in same} == {each: one[each] for each in same}


@pytest.mark.parametrize("case", QUICK)
def test_each_cache_and_drafter_gives_the_text_and_the_drafts_of_one_process(two: Found, case: str) -> None:
    assert_as_one(two, case)


def test_logits_that_a_plan_leaves_on_their_ranks_are_gathered(two: Found) -> None:
    first, second = both(two, "sharded logits")
    assert first == second
    assert first["generated"] == ranks.recipe(tiny("llama"), "retrieval")["generated"]


def test_rank_0_alone_drafts_samples_and_decides(two: Found) -> None:
    first, second = both(two, "decided")
    assert first == second
    one = ranks.decided(tiny("llama"))
    for name in ("seeds", "generated", "reasons", "drafted", "accepted"):
        assert first[name] == one[name]
    for kept, expected in zip(first["logprobs"], one["logprobs"], strict=True):
        assert kept == pytest.approx(expected)


def test_beginnings_are_shared_on_every_rank(two: Found) -> None:
    first, second = both(two, "beginnings")
    assert first["generated"] == second["generated"] == ranks.beginnings(tiny("llama"))["generated"]
    assert first["hits"] > 0


def test_rank_0_measures_what_passes_cost(two: Found) -> None:
    first, second = both(two, "measured")
    assert first["generated"] == second["generated"] == [ranks.recipe(tiny("llama"), "none")["generated"]] * 2


def test_what_rank_0_cannot_tell_leaves_nobody_waiting(two: Found) -> None:
    first, second = both(two, "unsayable")
    assert (first["error"], second["error"]) == ("TypeError", "LeaderError")
    assert first["generated"] == second["generated"]


def test_each_rank_keeps_its_own_heads_and_knows_the_whole_vocabulary(two: Found) -> None:
    model = tiny("llama")
    assert model.config.num_key_value_heads == 2
    assert both(two, "heads") == [{"heads": [1], "vocabulary": model.config.vocab_size}] * 2


def test_an_interruption_ends_all_ranks_with_the_text_so_far(two: Found) -> None:
    first, second = both(two, "interrupted")
    whole = Engine(tiny("llama"), "none").generate(PROMPTS, max_new_tokens=80).generated
    for got, text in zip(first["generated"], whole, strict=True):
        assert got == text[: len(got)] != []
    assert first == second


def test_what_needs_one_process_is_refused_with_the_reason(two: Found) -> None:
    first, second = both(two, "refused")
    assert first["errors"] == second["errors"][:3]
    for error, part in zip(first["errors"], ("kv_store", "kv_memory", "draft_model"), strict=True):
        assert part in error
    assert "other requests than rank 0" in second["errors"][3]


def assert_ends(found: Found, event: str) -> None:
    """Whoever is left says within ten seconds what happened."""
    left = 1 - int(event.split()[1])
    got = found[event][left]
    assert got.get("error") == "ParallelError", found["log"][0]["stderr"]
    assert got["seconds"] < 10
    assert "rank" in got["says"]


@pytest.mark.parametrize("event", EVENTS)
def test_a_rank_that_dies_ends_the_other(two: Found, event: str) -> None:
    assert_ends(two, event)


@pytest.mark.parametrize("event", LATER)
def test_a_rank_that_hangs_or_fails_ends_the_other(tmp_path: Path, event: str) -> None:
    assert_ends(run(tmp_path, ["llama", event]), event)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_every_recipe_gives_the_text_and_the_drafts_of_one_process(tmp_path: Path, name: str) -> None:
    cases = [recipe + method for recipe in RECIPES for method in METHODS]
    found = run(tmp_path, [name, *cases])
    for case in cases:
        assert_as_one(found, case, name)


def test_generate_under_torchrun_prints_the_text_of_one_process_once() -> None:
    ask = ["-m", "forerun.cli", "generate", "--prompt", "The old man said to the boy", "-n", "20"]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one, two = (
        subprocess.run([sys.executable, *start, *ask], env=own, capture_output=True, text=True, check=True).stdout
        for start in ([], torchrun)
    )
    assert one == two != ""


def test_other_commands_under_torchrun_are_refused() -> None:
    own = os.environ | {"RANK": "0", "WORLD_SIZE": "2"}
    own["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if each)
    ask = [sys.executable, "-m", "forerun.cli", "audit"]
    done = subprocess.run(ask, env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "audit runs in one process, and there are 2" in done.stderr
