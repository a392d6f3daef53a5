"""Who drafted a token is known from the drafter to what a step commits; and a request's budget holds."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import finish_all
from support.mocks import RowByRow
from support.tiny import tiny

from forerun.core.long_context import LongContextConfig
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import RECIPES, trie_of
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Source
from forerun.engine.engine import Engine
from forerun.models.forward.runtime import default_runtime, runtime_as_default
from forerun.policy.cost_curve import CostCurve
from forerun.trie.trie import Trie

PROMPT = [1, *[7, 8, 9, 10] * 6]
NEW = 40
ON = {"max_new_tokens": NEW, "eos_token_id": 47}
"""A text that goes on."""
SETTINGS = LongContextConfig(
    copy.deepcopy(tiny("llama")), cache_budget=16, chunk=4, gamma1=2, gamma2=4, paced=False, window=12
)
TEXT, EARLIER, RECYCLED = Origin.TEXT, Origin.EARLIER, Origin.RECYCLED
MODEL, SELF = Origin.MODEL, Origin.SELF
SOURCES: dict[str, set[Origin]] = {
    "none": set(), "lookup": {TEXT}, "trie": {TEXT, RECYCLED}, "triforce": {MODEL, SELF},
    "triforce-trie": {TEXT, RECYCLED, SELF}, "triforce-auto": {TEXT, RECYCLED, MODEL, SELF},
    "auto": {TEXT, RECYCLED, MODEL, SELF}, "retrieval": {SELF}, "low-rank": {SELF}, "streaming": {MODEL},
}  # fmt: skip
MAY_BE_MISSING = {
    "trie": {RECYCLED}, "triforce-trie": {RECYCLED}, "triforce-auto": {TEXT, RECYCLED, SELF},
    "auto": {RECYCLED, MODEL, SELF},
}  # fmt: skip
"""Where the drafter chooses between its sources."""


def engine(drafter: Source | str, **options: Any) -> Engine:
    return Engine(tiny("llama", torch.float32), drafter, settings=SETTINGS, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", list(RECIPES))
def test_each_accepted_draft_has_the_origin_that_its_drafter_can_have(drafter):
    assert set(SOURCES) == set(RECIPES)
    found = set()
    for commit in engine(drafter).stream([PROMPT], **ON):
        assert len(commit.origins) == len(commit.tokens) and commit.drafted <= commit.proposed
        drafted, own = commit.origins[: commit.drafted], commit.origins[commit.drafted :]
        assert set(own) <= {Origin.TARGET} and Origin.TARGET not in drafted
        assert commit.seconds > 0
        found |= {Origin(origin) for origin in drafted}
    assert found <= SOURCES[drafter]
    assert found >= SOURCES[drafter] - MAY_BE_MISSING.get(drafter, set())


def test_a_drafter_that_does_not_say_is_called_the_drafter():
    commits = list(engine(Spy(), prune_drafts=False).stream([PROMPT], **ON))
    assert {origin for commit in commits for origin in commit.origins} == {Origin.DRAFTER, Origin.TARGET}


def test_auto_asks_a_small_model_behind_a_short_prompt_if_its_passes_are_cheap():
    target, small = tiny("llama", torch.float32), copy.deepcopy(tiny("llama"))
    found = []
    for seconds in (0.01, 0.9):
        runtime = replace(
            default_runtime(),
            costs=lambda scorer, own=seconds: replace(CostCurve.linear(24), unit=own if scorer.model is small else 1.0),
        )
        with runtime_as_default(runtime):
            one = Engine(target, "auto", settings=LongContextConfig(small))
        origins = [origin for commit in one.stream([list(range(3, 40))], **ON) for origin in commit.origins]
        found.append(Origin.MODEL in origins)
    assert found == [True, False]


def origins_of(trie: Trie, request: int, pending: Sequence[int] = ()) -> dict[int, Origin]:
    draft = trie.retrieve(request, 8, 1, pending)
    return {token: Origin(origin) for token, origin in zip(draft.tokens.tolist(), draft.origins.tolist(), strict=True)}


def test_a_trie_says_in_which_text_it_found_a_token():
    trie = Trie()
    trie.warm("a", [[9, 20, 21, 22, 23], [9, 30, 31, 32]])
    trie.begin(0, "a", [5, 30, 31, 32, 40, 41, 42, 5])
    assert origins_of(trie, 0, [40, 41])[42] == TEXT
    assert origins_of(trie, 0, [20, 21])[22] == EARLIER
    assert origins_of(trie, 0, [30, 31])[32] == TEXT  # in both: the text at hand comes first
    trie.extend(0, [50, 51, 52, 50, 51])
    assert origins_of(trie, 0)[52] == TEXT  # the namespace knows its output, too


def test_what_an_engine_wrote_before_is_an_earlier_text():
    one, found = engine("trie", prune_drafts=False), []
    for _ in range(2):
        commits = list(one.stream([[1, 3, 2]], **ON, namespace="mine"))
        found.append([Origin(origin) for commit in commits for origin in commit.origins])
    assert EARLIER not in found[0] and found[1].count(EARLIER) > 3


# --- budgets


class Spy(RowByRow):
    """Guesses as many tokens as it may, and keeps who asked."""

    def __init__(self) -> None:
        self.heard: set[int] = set()
        self.closed: set[int] = set()
        self.budgets: list[int] = []

    def open(self, row: Row) -> RowState:
        self.heard.add(row.request.id)
        state = RowState()
        state.close = lambda: self.closed.add(row.request.id)
        return state

    def draft(self, request: Request, budget: int) -> DraftTree:
        assert request.id in self.heard
        self.budgets.append(budget)
        return DraftTree.from_branches([[token] for token in range(budget)], budget)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Any]) -> None:
        assert all(row.request.id in self.heard for row in rows)

    def needs(self, tokens: int) -> int:
        return 1000


def test_requests_keep_their_budgets_beside_each_other_and_0_is_not_heard_of():
    spy = Spy()
    one = engine(spy, prune_drafts=False, budget=8)
    budgets = [None, 0, 3, 20]
    requests = [one.requests([PROMPT], max_new_tokens=6, budget=budget)[0] for budget in budgets]
    with one.batch() as batch:
        needs = [batch.needs(request) for request in requests]
    finish_all(one, requests)
    assert needs[0] - needs[1] == 1000 and needs[0] == needs[2]
    assert [max(request.stats.drafted) for request in requests] == [8, 0, 3, 8]
    assert spy.closed == spy.heard == {request.id for request in requests} - {requests[1].id}
    assert set(spy.budgets) == {3, 8}
    assert len({tuple(request.generated) for request in requests}) == 1
    one.generate([PROMPT], max_new_tokens=4, budget=5)
    assert spy.budgets[-1] == 5
    with pytest.raises(ValueError, match="budget is -1"):
        one.requests([PROMPT], max_new_tokens=1, budget=-1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("drafter", "sampled"), [
    pytest.param(drafter, sampled, marks=[pytest.mark.matrix] * ((i + sampled) % 2))
    for i, drafter in enumerate(("trie", "lookup", "triforce-trie", "triforce-auto", "low-rank", "auto"))
    for sampled in (False, True)
])  # fmt: skip
def test_no_budget_changes_a_text(drafter, sampled):
    options: dict[str, Any] = {"do_sample": True, "seed": 3, "temperature": 1.5} if sampled else {}
    wanted = engine("none").generate([PROMPT], **ON, **options).generated
    one = engine(drafter)
    for budget in (0, 1, 5, None):
        result = one.generate([PROMPT], **ON, budget=budget, **options)
        assert result.generated == wanted
        assert max(result.stats[0].drafted) <= (64 if budget is None else budget)
    together = [one.requests([PROMPT], **ON, budget=budget, **options)[0] for budget in (0, 2, None)]
    finish_all(one, together)
    assert [request.generated.tolist() for request in together] == wanted * 3


def test_nothing_is_learned_from_a_text_without_drafts():
    one = engine("trie")
    one.generate([PROMPT], **ON, budget=0)
    trie = trie_of(one.level)
    assert trie.tokens("default") == 0
    one.generate([PROMPT], **ON)
    assert trie.tokens("default") == NEW


def test_what_another_namespace_was_answered_changes_no_draft():
    """Neither lists of recycled logits nor what evidence was worth pass from one tenant to another."""
    used, fresh = (Engine(tiny("llama"), "trie", prune_drafts=False) for _ in range(2))
    for _ in range(3):
        used.generate([PROMPT], namespace="one", **ON)
    another, alone, own = (
        [(commit.tokens, commit.origins, commit.proposed) for commit in one.stream([PROMPT], namespace=name, **ON)]
        for one, name in ((used, "two"), (fresh, "two"), (used, "one"))
    )
    assert another == alone != own
