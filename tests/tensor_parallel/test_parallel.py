"""A model in two processes gives the texts, and the drafts, of one process; and no process outlives another."""

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import rank as ranks
from support.tiny import PROMPTS, tiny
from typer.testing import CliRunner

from forerun import Engine
from forerun.cli import app
from forerun.decoding.recipes import RECIPES

pytestmark = pytest.mark.alone  # two processes, each of which has to answer in time

EVENTS = ["rank 0 dies", "rank 1 dies", "rank 1 hangs", "rank 1 fails", "rank 0 fails"]
MODELS = ["triforce", "retrieval", "low-rank", "streaming"]
"""Drafters whose drafts depend on nothing but logits, of a small model or over the target's own cache."""
METHODS = ["", ":coupled", ":rejection"]
COMMON = ["decided", "beginnings", "sharded logits", "measured", "unsayable", "interrupted", "heads", "refused"]
RECIPE_CASES = {
    "llama": [recipe + method for recipe in RECIPES for method in METHODS],
    "qwen2": [recipe + METHODS[i % 3] for i, recipe in enumerate(RECIPES)],
    "gemma2": [recipe + METHODS[(i + 1) % 3] for i, recipe in enumerate(RECIPES)],
}
"""Every drafter with every model, and with every way of sampling."""
GROUPS = [
    ["llama", *COMMON],
    *(["llama", event] for event in EVENTS),
    *([name, *RECIPE_CASES[name]] for name in RECIPE_CASES),
]
Results = dict[tuple[str, str], list[dict[str, Any]]]
"""What both ranks got, by model and case."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Every group of cases, each with two processes of its own and the model that it begins with."""
    folder = tmp_path_factory.mktemp("two")
    for name in RECIPE_CASES:
        copy.deepcopy(tiny(name)).save_pretrained(folder / name)  # saving changes its configuration
    command = [sys.executable, ranks.__file__, str(folder), *(",".join(group) for group in GROUPS)]
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    results: Results = {("log", ""): [{"stderr": done.stderr[-4000:]}]}
    for number, (name, *_) in enumerate(GROUPS):
        for rank in range(2):
            file = folder / f"{number}-{rank}.jsonl"
            for line in file.read_text().splitlines() if file.exists() else []:
                case, got = json.loads(line)
                results.setdefault((name, case), [{}, {}])[rank] = got
    return results


def both(results: Results, case: str, name: str = "llama") -> list[dict[str, Any]]:
    assert (name, case) in results and all(results[name, case]), results["log", ""][0]["stderr"]
    return results[name, case]


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in RECIPE_CASES.items() for case in cases])
def test_every_recipe_gives_the_text_and_the_drafts_of_one_process(two, name, case):
    """Both ranks have what one process has: the texts, and of drafts by a model which were made and accepted."""
    first, second = both(two, case, name)
    assert first == second
    one = ranks.run(case, tiny(name))
    same = ["generated", "reasons", "seeds"]
    if case.partition(":")[0] in MODELS:  # others may draft otherwise in a process that had other requests before
        same += ["drafted", "accepted"]
    assert {each: first[each] for each in same} == {each: one[each] for each in same}


def test_logits_that_a_plan_leaves_on_their_ranks_are_gathered(two):
    first, second = both(two, "sharded logits")
    assert first == second
    assert first["generated"] == ranks.recipe(tiny("llama"), "retrieval")["generated"]


def test_rank_0_alone_drafts_samples_and_decides(two):
    first, second = both(two, "decided")
    assert first == second
    one = ranks.decided(tiny("llama"))
    for name in ("seeds", "generated", "reasons", "drafted", "accepted"):
        assert first[name] == one[name]
    for kept, expected in zip(first["logprobs"], one["logprobs"], strict=True):
        assert kept == pytest.approx(expected)


def test_beginnings_are_shared_on_every_rank(two):
    first, second = both(two, "beginnings")
    assert first["generated"] == second["generated"] == ranks.beginnings(tiny("llama"))["generated"]
    assert first["hits"] > 0


def test_rank_0_measures_what_passes_cost(two):
    first, second = both(two, "measured")
    assert first["generated"] == second["generated"] == [ranks.recipe(tiny("llama"), "none")["generated"]] * 2
    assert first["measured"] > 0 == second["measured"]


def test_what_rank_0_cannot_tell_leaves_nobody_waiting(two):
    first, second = both(two, "unsayable")
    assert (first["error"], second["error"]) == ("TypeError", "LeaderError")
    assert first["generated"] == second["generated"]


def test_each_rank_keeps_its_own_heads_and_knows_the_whole_vocabulary(two):
    model = tiny("llama")
    assert model.config.num_key_value_heads == 2
    assert both(two, "heads") == [{"heads": [1], "vocabulary": model.config.vocab_size}] * 2


def test_an_interruption_ends_all_ranks_with_the_text_so_far(two):
    first, second = both(two, "interrupted")
    whole = Engine(tiny("llama"), "none").generate(PROMPTS, max_new_tokens=80).generated
    for got, text in zip(first["generated"], whole, strict=True):
        assert got == text[: len(got)] != []
    assert first == second


def test_what_needs_one_process_is_refused_with_the_reason(two):
    first, second = both(two, "refused")
    assert first["errors"] == second["errors"][:3]
    for error, part in zip(first["errors"], ("kv_store", "kv_memory", "draft_model"), strict=True):
        assert part in error
    assert "requests differ from rank 0's" in second["errors"][3]


@pytest.mark.parametrize("event", EVENTS)
def test_a_rank_that_dies_hangs_or_fails_ends_the_other(two, event):
    """Whoever is left says within ten seconds what happened."""
    left = 1 - int(event.split()[1])
    got = two.get(("llama", event), [{}, {}])[left]
    assert got.get("error") == "ParallelError", two["log", ""][0]["stderr"]
    assert got["seconds"] < 10
    assert "rank" in got["says"]


def test_generate_under_torchrun_prints_the_text_of_one_process_once():
    ask = ["-m", "forerun.cli", "generate", "--prompt", "The old man said to the boy", "-n", "20"]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    one, two = (
        subprocess.run([sys.executable, *start, *ask], env=own, capture_output=True, text=True)
        for start in ([], torchrun)
    )
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert one.stdout == two.stdout != ""


def test_other_commands_under_torchrun_are_refused():
    done = CliRunner().invoke(app, ["audit"], env={"RANK": "0", "WORLD_SIZE": "2"})
    assert done.exit_code == 2
    assert "audit runs in one process, and there are 2" in done.stderr
