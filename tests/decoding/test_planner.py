"""The planner on a simulated clock: it takes what pays, from where it pays, and loses no more than its ledger says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from benchmarks.studies.decisions import SHORT, cases, speeds
from benchmarks.studies.simulated_steps import RIGHT, Branches, Chains, Outline, World, _Model, plain_seconds, simulate
from forerun.core.array_handles import ArrayHandles
from forerun.core.request import Request
from forerun.core.sampling import Salt, uniform
from forerun.decoding.planner import AdaptivePlanner
from forerun.decoding.recipes import reading
from forerun.decoding.row import Row
from forerun.kv.cache import READ_BLOCK
from forerun.models.forward.runtime import Runtime
from forerun.policy.calibration import LOWEST_ODDS, ChainConfidence, odds_of
from forerun.policy.choice import Choice
from forerun.policy.cost_curve import CostCurve, CostTable
from forerun.policy.decision import PassShape
from forerun.policy.gains import RECENT_TREES, AcceptanceRate, RowGains, class_of, first_gains, gain_of, record_gain
from forerun.policy.ledger import (
    CREDIT,
    SAVED,
    SHARE,
    START_SLACK,
    TRIAL_SLACK,
    book,
    book_plain,
    lacks,
    lacks_costly,
    open_batch,
    value_later,
)
from forerun.policy.policy_tables import ACCOUNT, CHEAP, Policy
from forerun.policy.step_costs import DraftPasses

LOADED = CostCurve((1, 2), (1.0, 1.02), unit=1.0)


def by_chance(rate: float, seed: int = 0) -> Callable[[int, int], bool]:
    return lambda row, place: uniform(seed + row, place, Salt.ACCEPT) < rate


def lost(world: World, outline: Outline, seconds: float) -> float:
    """Plain passes that were lost against plain decoding."""
    rows = outline.rows + outline.undrafted
    alone = (world.true_curve or world.curve).of([1] * rows, [0] * rows)
    return (seconds - plain_seconds(world, outline)) / world.plain / alone


# the bound


@pytest.mark.one_in(7)
@pytest.mark.parametrize("tokens", [64, 1000])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("asking", [0.001, 0.05, 0.4])
@pytest.mark.parametrize("sources", ["t", "c", "tc", "td"])
def test_what_never_comes_true_costs_no_more_than_the_bound(tokens, rows, asking, sources):
    """Drafts that are always wrong, and state that they are nearly always right. One step may overrun: what asking and
    drafting take is a guess at first."""
    world = World(
        LOADED, asking=asking, stated=lambda row, place: 0.95, known=lambda row, place: 40,
        deep=lambda row, place: (False, 0.9),
    )  # fmt: skip
    outline = Outline(rows, tokens, sources=sources)
    seconds, planner = simulate(world, outline)
    overrun = 2 * asking + world.drafting + world.deepening * ("d" in sources) + 8 * rows * 0.02
    assert lost(world, outline, seconds) <= START_SLACK + SHARE * tokens + overrun
    assert planner.choice.ledger.lost <= START_SLACK + SHARE * tokens * LOADED.of([1] * rows, [0] * rows) + overrun


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("asking", [0.001, 0.05])
def test_under_load_what_is_lost_beside_prompts_counts_as_well(rows, asking):
    """One step in thirty only decodes."""
    world = World(LOADED, asking=asking, beside=lambda step: 20 if step % 30 else 0, known=lambda row, place: 40)
    outline = Outline(rows, 1000, sources="t", closed=False)
    seconds, _ = simulate(world, outline)
    reading = sum(20 * 0.02 for step in range(world.steps) if step % 30)
    assert lost(world, outline, seconds - reading) <= 0.02 * 1000 + START_SLACK


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sources", ["t", "c", "td"])
@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.7])
def test_rows_without_drafts_do_not_lose_what_one_row_gains(sources, accepted):
    """Alone, half of its drafts right, the row gains a third or more. The others go on after it."""
    foresees = by_chance(accepted)
    world = World(CostCurve((1, 2), (1.0, 1.05), unit=1.0), drafting=0.1, hits=foresees, accepted=foresees)
    world.deep = lambda row, place: (foresees(row, place), max(accepted, 0.1))
    outline = Outline(1, 400, undrafted=15, weight=0.1, sources=sources, closed=False)
    seconds, _ = simulate(world, outline)
    step = world.curve.of([1] * 16, [0] * 16)
    assert (15 * world.steps + 400) * step / 16 / seconds >= 0.98


def test_savings_of_earlier_batches_are_lost_as_a_share_of_a_later_one_only():
    world = World(LOADED, known=lambda row, place: 40, stated=lambda row, place: 0.95, hits=lambda row, place: True)
    _, planner = simulate(world, Outline(1, 400, sources="t", batches=1))
    ledger = planner.choice.ledger
    assert ledger.slack == SAVED
    open_batch(ledger, 200.0)
    assert ledger.slack == pytest.approx(CREDIT * 200)
    open_batch(ledger, 10.0)
    assert ledger.slack == TRIAL_SLACK


@pytest.mark.one_in(2)
@pytest.mark.parametrize("period", [5, 9, 20, 33, 70, 150])
def test_an_adversary_that_knows_the_planner_keeps_the_bound(period):
    """It lets drafts come true until they are trusted, and then not; again and again."""
    world = World(LOADED, asking=0.02, known=lambda row, place: 40, stated=lambda row, place: 0.95)
    world.hits = lambda row, place: place // period % 2 == 0
    outline = Outline(1, 1500, sources="t")
    seconds, planner = simulate(world, outline)
    assert lost(world, outline, seconds) <= START_SLACK + SHARE * 1500 + 1.0
    assert planner.choice.ledger.lost == pytest.approx(lost(world, outline, seconds), abs=2.0)


@pytest.mark.parametrize("tokens", [48, 400])
@pytest.mark.parametrize("rows", [1, 4])
def test_where_the_curve_says_too_little_the_ledger_books_what_passes_took(tokens, rows):
    said, true = CostCurve((1, 2), (1.0, 1.2), unit=1.0, per_row=0.0), CostCurve((1, 2), (1.0, 1.5), unit=1.0)
    world = World(said, true_curve=true, hits=by_chance(0.1))
    world.plain = said.of([1] * rows, [0] * rows) / true.of([1] * rows, [0] * rows)
    outline = Outline(rows, tokens, sources="t")
    seconds, _ = simulate(world, outline)
    assert lost(world, outline, seconds) <= 2.5 * (START_SLACK + SHARE * tokens) + 1.0


# what pays


@pytest.mark.one_in(2)
@pytest.mark.parametrize("asking", [0.02, 0.3, 0.7])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_passage_is_found_by_its_first_tokens_however_expensive_asking_is(asking, rows):
    """Every other passage of forty tokens repeats what was seen; elsewhere asking gives nothing."""
    unit = 2e-4 / asking  # a fast model
    world = World(CostCurve((1, 2), (1.0, 1 + 0.02 / rows), unit=unit), plain=unit, asking=2e-4)
    world.known = lambda row, place: place % 40 if place // 40 % 2 else 0
    world.hits = lambda row, place: place // 40 % 2 == 1
    seconds, _ = simulate(world, Outline(rows, 800, sources="t"))
    assert seconds / unit < 800 * 0.75
    in_vain = [place for row, place in world.asked if not world.known(row, place)]
    assert asking < 0.25 or len(in_vain) * asking / rows <= 2 * START_SLACK + SHARE * 800


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decision_to_draft_nothing_ends_where_a_row_promises_more(rows, monkeypatch):
    """It stands for most steps before, and all of these are booked as progress."""
    world = World(LOADED, asking=0.2, known=lambda row, place: 40 if place >= 300 else 0)
    world.hits = lambda row, place: place >= 300
    decided, decide = list[int](), Choice.decide
    monkeypatch.setattr(Choice, "decide", lambda *given: decided.append(world.steps) or decide(*given))
    seconds, planner = simulate(world, Outline(rows, 400, sources="t"))
    assert sum(step < 300 for step in decided) < 60
    assert min(place for _, place in world.asked if place > 100) <= 301
    assert planner.choice.ledger.progress == pytest.approx(400 * LOADED.of([1] * rows, [0] * rows), rel=0.01)
    assert seconds < 0.9 * plain_seconds(world, Outline(rows, 400, sources="t"))


def test_suffixes_are_not_looked_up_where_they_cannot_be_long_enough_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal costs more than a copy of three tokens gains, and less than one of eight does."""
    looked_up, promise, unit = list[int](), Branches.promise, 2e-4 / 2.5
    monkeypatch.setattr(
        Branches, "promise", lambda source, rows: looked_up.append(len(rows[0].request)) or promise(source, rows)
    )
    world = World(CostCurve((1, 2), (1.0, 1.02), unit=unit), plain=unit, asking=2e-4)
    world.known, world.hits = lambda row, place: max(place - 150, 0), lambda row, place: place >= 150
    simulate(world, Outline(1, 200, sources="t"))
    assert 0 < sum(place < 150 for place in looked_up) < 50
    assert min(place for _, place in world.asked if place > 100) == 158


def test_a_source_that_fails_is_not_consulted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state of the row is gone."""
    monkeypatch.setattr(Branches, "propose", Mock(side_effect=RuntimeError("broken")))
    world = World(LOADED, known=lambda row, place: 40 + row)
    simulate(world, Outline(2, 50, sources="t"))
    assert world.steps == 50


@pytest.mark.parametrize("asking", [0.3, 0.7])
def test_a_proposal_leaves_slack_for_its_nodes(asking: float) -> None:
    """Of a fast model. Drafts that are always wrong use the slack up; then proposals that leave nothing to score their
    nodes with would use up what comes in, and nothing would be drafted any more."""
    unit = 2e-4 / asking
    world = World(CostCurve((1, 2), (1.0, 1.06), unit=unit), plain=unit, asking=2e-4, known=lambda row, place: 40)
    world.hits, world.stated = lambda row, place: place >= 60, lambda row, place: 0.95
    seconds, _ = simulate(world, Outline(1, 600, sources="t"))
    assert seconds / unit < 360


def test_a_batch_starts_with_tokens_worth_a_plain_step() -> None:
    """However long the steps of the batch before were."""
    world = World(LOADED, known=lambda row, place: 40, hits=lambda row, place: True)
    _, planner = simulate(world, Outline(1, 200, sources="t"))
    choice, shape = planner.choice, PassShape([100], [0], [1], [64])
    values = choice._policy.rows["value"]
    later, first = (
        choice.decide(shape, [RowGains(AcceptanceRate())], [0], fresh) and values[0] for fresh in (False, True)
    )
    assert later > 1.1 and first == pytest.approx(1.0)


def test_a_source_that_cannot_tell_is_tried_however_expensive_it_is() -> None:
    unit = 2e-4 / 0.9
    world = World(replace(LOADED, unit=unit), plain=unit, asking=2e-4, hits=lambda row, place: True)
    assert simulate(world, Outline(1, 900, sources="t"))[0] / unit < 450


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("deepening", "deep"), [(0.3, 0.9), (0.3, 0.6), (0.6, 0.9), (0.9, 0.95)])
def test_a_costly_source_is_asked_where_it_pays(deepening, deep, rows):
    """Every other passage of a hundred tokens is in the trees; there it is left alone."""
    curve, right = CostCurve((1, 2), (1.0, 1 + 0.02 / rows), unit=1.0), by_chance(deep)
    quoted: Callable[[int, int], bool] = lambda row, place: place // 100 % 2 == 1  # noqa: E731
    world = World(curve, hits=quoted, deepening=deepening, deep=lambda row, place: (right(row, place), deep))
    seconds, _ = simulate(world, Outline(rows, 1200, sources="td"))
    alone, _ = simulate(World(curve, hits=quoted), Outline(rows, 1200, sources="t"))
    tokens, late = sum(deep**i for i in range(5)), 65
    best = alone - 600 + 600 * min((1 + deepening + 4 * 0.02) / tokens, 1.0)
    assert seconds < 1.15 * best + late
    in_vain = sum(place // 100 % 2 for _, place in world.deepened)
    assert in_vain < 0.15 * len(world.deepened) or not world.deepened


def with_head(seed: int, curve: CostCurve, deepening: float, deep: float, quoted: float) -> World:
    """Small costs of a small model, a text of which passages are quoted, and a head that takes half a percent of a
    plain pass even where it is not asked."""

    def hits(row: int, place: int) -> bool:
        passage = uniform(1000 * seed + row, place // 16, Salt.DRAFT) < quoted
        return passage and uniform(1000 * seed + row, place, Salt.RESIDUAL) < 0.9

    unit = curve.unit or 1.0
    return World(
        curve, plain=unit, asking=0.023 * unit, looking=0.0005 * unit, verifying=0.001 * unit, hits=hits,
        stated=lambda row, place: 0.85 if hits(row, place) else 0.15,
        known=lambda row, place: 8 if hits(row, place) else 0,
        deepening=deepening * unit, carrying=0.005 * unit,
        deep=lambda row, place: (uniform(7 * seed + row, place, Salt.ACCEPT) < deep, max(deep, 0.6)),
    )  # fmt: skip


BEHIND_A_BOOK = replace(SHORT, cached_costs=(4e-5, 4.1e-5))
"""SmolLM2's costs, where 32,000 cached tokens cost as much as one and a third of its passes."""


@pytest.mark.one_in(5)
@pytest.mark.parametrize("cached", [0, 32_000])
@pytest.mark.parametrize("deepening", [0.15, 0.5, 0.9])
def test_a_head_that_is_never_right_is_left(deepening, cached):
    """It states 0.6. Median of five seeds: beside the trie alone no more is lost than 3 %."""
    ratios, curve = [], BEHIND_A_BOOK if cached else SHORT
    outline = Outline(1, 96, cached=cached, batches=6)
    for seed in range(5):
        without, beside = (
            simulate(with_head(seed, curve, deepening, 0.0, 0.5), replace(outline, sources=sources))[0]
            for sources in ("t", "td")
        )
        ratios.append(without / beside)
    assert np.median(ratios) >= 0.97, ratios


def test_a_head_that_is_left_gets_no_states_and_lets_steps_be_skipped(monkeypatch):
    """It is tried again after as many steps as the ledger says."""
    kept, decided, learn, decide = list[bool](), list[int](), AdaptivePlanner.learn, Choice.decide
    world = with_head(0, SHORT, 0.3, 0.0, 0.0)
    monkeypatch.setattr(
        AdaptivePlanner, "learn", lambda planner, *given: kept.append(bool(planner.states)) or learn(planner, *given)
    )
    monkeypatch.setattr(Choice, "decide", lambda *given: decided.append(world.steps) or decide(*given))
    simulate(world, Outline(1, 96, sources="td", batches=16))
    late = kept[400:]
    assert sum(late) < 0.1 * len(late) and len(decided) < 0.75 * len(kept)
    assert world.deepened[-1][1] > 0 and 4 < len(world.deepened) < 0.05 * len(kept)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("quoted", [0.0, 0.5])
@pytest.mark.parametrize("cached", [0, 32_000])
def test_a_head_that_is_right_is_asked_also_where_the_trie_is_not(cached, quoted):
    """Of a text that the trie does not foresee, too, for which it is not worth asking."""
    outline, curve = Outline(1, 96, cached=cached, sources="td", batches=6), BEHIND_A_BOOK if cached else SHORT
    for seed in range(3):
        world = with_head(seed, curve, 0.15, 0.6, quoted)
        seconds, _ = simulate(world, outline)
        without, _ = simulate(with_head(seed, curve, 0.15, 0.6, quoted), replace(outline, sources="t"))
        assert without / seconds > 1.15
        assert len(world.deepened) > 0.4 * world.steps


def test_what_a_head_added_counts_less_what_its_nodes_cost():
    """Where a node costs half a pass, drafts that are right half of the time are not worth a pass of the head."""
    steep = CostCurve((1, 2), (1.0, 1.5), unit=1.0)
    world = World(steep, deepening=0.1, deep=lambda row, place: (uniform(0, place, Salt.ACCEPT) < 0.5, 0.5))
    seconds, _ = simulate(world, Outline(1, 600, sources="td"))
    assert seconds < 1.03 * 600 + START_SLACK


def test_a_text_that_is_foreseen_goes_by_the_tree():
    world = World(hits=lambda row, place: True)
    seconds, _ = simulate(world, Outline(1, 900))
    assert 900 / seconds > 0.95 * 9 / 1.161 and len(world.chains) <= 2


@pytest.mark.parametrize(("accepted", "away"), [(0.7, 0), (0.9, 0), (0.98, 0), (0.5, 1), (0.7, 1), (0.9, 1)])
def test_a_model_that_agrees_drafts_chains_of_about_the_best_length(accepted, away):
    """Also where a pass takes far longer than drafts, as with keys and values off the device: a wrong chain does not
    shorten the next one."""
    right, tokens, most = by_chance(accepted), 500 if away else 2000, 32 if away else 12
    if away:
        world = World(CostCurve((1, 2), (1.0, 1.0001), unit=1.0), drafting=0.005, accepted=right)
        outline, token = Outline(1, tokens, most=most, weight=0.005, sources="c"), 0.0051
    else:
        world, outline, token = World(LOADED, accepted=right), Outline(1, tokens, sources="c"), 0.22
    best = max(sum(accepted**i for i in range(n + 1)) / (1 + n * token) for n in range(1, most + 1))
    assert tokens / simulate(world, outline)[0] > 0.93 * best


def test_each_passage_goes_by_the_source_that_foresees_it():
    quoted: Callable[[int, int], bool] = lambda row, place: place // 60 % 2 == 0  # noqa: E731
    both, _ = simulate(World(LOADED, hits=quoted, accepted=by_chance(0.9)), Outline(1, 2400))
    by_tree, _ = simulate(World(LOADED, hits=quoted), Outline(1, 2400, sources="t"))
    by_chain, _ = simulate(World(LOADED, accepted=by_chance(0.9)), Outline(1, 2400, sources="c"))
    assert both < 0.85 * min(by_tree, by_chain)


@pytest.mark.parametrize("sources", ["t", "c"])
def test_it_notices_when_drafts_begin_to_be_right_and_when_they_cease(sources):
    right = by_chance(0.95)

    def seconds(since: int, until: int, tokens: int) -> float:
        foresees: Callable[[int, int], bool] = lambda row, place: since <= place < until and right(row, place)  # noqa: E731
        return simulate(World(LOADED, hits=foresees, accepted=foresees), Outline(1, tokens, sources=sources))[0]

    always = seconds(0, 10_000, 1000)
    assert seconds(1000, 10_000, 2000) < 1.03 * 1000 + 1.4 * always
    assert seconds(0, 1000, 2000) < 1.04 * 1000 + 1.1 * always


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", [each for each in cases() if each.outline.rows in (1, 16)], ids=lambda case: case.name)
def test_the_table_of_simulated_decisions_is_reached(case):
    """Three seeds of ``python -m benchmarks decisions``: hardly slower than plain decoding, and with both sources about
    as fast as with the better one."""
    both, _ = speeds(case, case.outline.sources, 3)
    assert np.median(both) >= 0.97
    if "c" in case.outline.sources:
        best = max(np.median(speeds(case, sources, 3)[0]) for sources in "tc")
        assert np.median(both) >= 0.95 * best and min(both) > 1.1


# disturbances


@pytest.mark.one_in(4)
@pytest.mark.parametrize("at", range(12))
@pytest.mark.parametrize("accepted", [0.95, 0.0])
def test_a_step_that_something_else_held_up_decides_nothing(at, accepted):
    def steps(held: int | None) -> tuple[int, int]:
        slow: Callable[[int], float] = lambda step: 21.0 if step == held else 1.0  # noqa: E731
        world = World(LOADED, accepted=by_chance(accepted), slowness=slow)
        simulate(world, Outline(1, 600, sources="c"))
        return world.steps, sum(world.chains)

    (held, drafted), (calm, usual) = steps(at), steps(None)
    assert held <= 1.1 * calm + 2 and drafted <= 1.1 * usual + 12


@pytest.mark.one_in(2)
@pytest.mark.parametrize("period", [3, 8, 20])
@pytest.mark.parametrize("foreseen", [0.3, 0.0])
def test_a_machine_that_is_twice_as_slow_now_and_then_changes_few_decisions(foreseen, period):
    def steps(slow: bool) -> int:
        curve = CostCurve((1, 2), (1.0, 1.03), unit=1.0)
        world = World(curve, asking=0.02, hits=lambda row, place: uniform(1, place // 4, Salt.ACCEPT) < foreseen)
        if slow:
            world.slowness = lambda step: 2.0 if step // period % 2 else 1.0
        simulate(world, Outline(1, 200, sources="t"))
        return world.steps

    assert steps(True) <= 1.1 * steps(False) + 2


def test_chains_that_could_not_pay_are_hardly_tried():
    """Their cost is a guess until one was measured."""
    world = World(LOADED, drafting=0.95, accepted=by_chance(0.0))
    simulate(world, Outline(1, 300, weight=0.95, sources="c"))
    assert sum(world.chains) * 0.95 <= START_SLACK + SHARE * 300


@pytest.mark.parametrize("loaded", [None, 1.0])
def test_while_others_read_prompts_drafts_do_not_wait_for_a_plain_step(loaded):
    """One step in thirty only decodes. The others cannot be measured as plain ones."""
    world = World(
        replace(LOADED, unit=loaded), hits=lambda row, place: True, beside=lambda step: 20 if step % 30 else 0
    )
    simulate(world, Outline(1, 200, sources="t", closed=False))
    assert world.steps < 40


# preparing


class Preparing(Chains):
    """Chains whose cache of the prompt takes a while."""

    __hash__ = object.__hash__

    def __init__(self, world: World, seconds: float = 10.0) -> None:
        super().__init__(world)
        self.prepared, self.seconds = 0, seconds

    def read(self, row: Row, tokens: int) -> bool:
        self.prepared += 1
        self.world.now += self.seconds
        return True


def preparing(drafting: float, cached: float, reads: Callable[[int], int]) -> tuple[AdaptivePlanner, Preparing]:
    """``cached``: what a cached token adds to a pass; ``reads``: which cached tokens a drafting pass reads."""
    world, model = World(), _Model()
    trees, chains = Branches(world), Preparing(world)
    curve = CostCurve((1, 2, 512), (1.0, 1.02, 11.2), (1, 2), (cached, cached), unit=1.0)
    planner = AdaptivePlanner(
        Runtime(world.clock, lambda scorer: curve), model, trees, None, chains, longest=12,
        draft=DraftPasses(reads, drafting),
    )  # fmt: skip
    return planner, chains


def admitted(planner: AdaptivePlanner, prompt: Sequence[int], tokens: int) -> Row:
    """A row whose prompt was read, for chains if that was worth it."""
    cache: Any = None
    row = Row(Request(prompt, tokens), cache)
    row.open(planner.sources)
    row.states[planner] = planner.open(row)
    while not planner.read(row, READ_BLOCK):
        pass
    return row


@pytest.mark.parametrize(("tokens", "drafting", "prepared"), [(500, 0.2, True), (500, 3.0, False), (4, 0.2, False)])
def test_a_long_prompt_is_read_for_chains_if_they_are_expected_to_save_more_than_that_takes(tokens, drafting, prepared):
    """What that costs beyond its share is booked."""
    planner, chains = preparing(drafting, 5e-5, reading(100))
    admitted(planner, range(10_000), tokens)
    free = 0.05 * planner.choice.costs.prefill(10_000)
    assert bool(chains.prepared) == prepared
    assert planner.choice.ledger.lost == pytest.approx(max(10.0 - free, 0.0) if prepared else 0.0)


def test_a_prompt_is_not_prepared_where_that_costs_more_than_a_share_of_reading_it():
    """A first request has saved nothing yet."""
    planner, chains = preparing(0.2, 0.02, reading(10))
    admitted(planner, range(600), 10_000)
    assert not chains.prepared
    book(planner.choice.ledger, 0.0, 1000.0, False, 0.0, True)
    admitted(planner, range(100), 10_000)
    assert planner.choice.ledger.slack == SAVED


@pytest.mark.parametrize(("small", "prompt", "read"), [(0.1, 100, 1), (0.9, 100, 0)])
def test_a_short_prompt_is_read_by_a_small_model_that_is_measured_to_pay(small, prompt, read):
    world, own, model = World(), _Model(), _Model()
    chains, curve = Preparing(world, 0.1), CostCurve((1, 2, 512), (1.0, 1.02, 11.2), unit=1.0)
    runtime = Runtime(world.clock, lambda scorer: replace(curve, unit=small) if scorer is own else curve)
    planner = AdaptivePlanner(
        runtime, model, Branches(world), None, chains, longest=12,
        draft=DraftPasses(weight=3.0, window=200, alone=504), small=own,
    )  # fmt: skip
    row = admitted(planner, range(prompt), 200)
    for _ in range(3):
        shape = PassShape([row.wants], [len(row.request) - 1], [1], [64])
        planner.plan([row], [64], lambda shape=shape: shape)
        row.request.append(RIGHT)
    assert bool(chains.prepared) == bool(read)


# costs


def test_costs_that_others_disturbed_are_measured_again_when_a_request_begins_alone():
    """The first time they are as doubtful as before, and so they are later while another request runs."""
    doubtful = CostCurve((1, 2), (1.0, 1.0), unit=8.0, doubtful=True)
    found = [doubtful, doubtful, CostCurve((1, 2), (1.0, 1.5), unit=1.0)]
    runtime, model = Runtime(lambda: 0.0, lambda scorer: found.pop(0)), _Model()
    planner = AdaptivePlanner(runtime, model, Branches(World()))
    planner.warm_up()
    first, second = admitted(planner, [1, 2, 3], 8), admitted(planner, [1, 2, 3], 8)
    first.close()
    third = admitted(planner, [1, 2, 3], 8)
    assert len(found) == 1
    second.close()
    third.close()
    admitted(planner, [1, 2, 3], 8)
    assert not found and planner.choice.unit == 1.0 and not planner.choice.costs.costs.doubtful


def test_a_batch_of_another_size_begins_with_what_was_learned():
    """No plain steps are seen anew, and chains are drafted from the first step on."""
    world = World(LOADED, accepted=by_chance(0.9))
    _, planner = simulate(world, Outline(1, 600, sources="c"))
    rows = [admitted(planner, [1, 2, 3], 100) for _ in range(4)]
    for row in rows:
        row.states[planner].ready = True
    trees = planner.plan(rows, [64] * 4, lambda: PassShape([100] * 4, [3] * 4, [1] * 4, [64] * 4))
    assert all(len(tree) >= 1 for tree in trees)


# parts


def valued(left: list[int], curve: CostCurve, closed: bool = True, gain: float = 1.0, stretch: float = 1.0) -> Policy:
    """Return what is known when a step of rows with these tokens left is decided."""
    choice, count = Choice(curve, 48), len(left)
    choice.ledger.stretch = stretch
    shape = PassShape(left, [0] * count, [1] * count, [64] * count, closed=closed)
    choice.decide(shape, [RowGains(AcceptanceRate(), gain)] * count, None)
    return choice._policy


def test_a_batch_costs_what_its_rows_cost_one_after_the_other():
    """Three rows of 5, 2 and 9 tokens: two steps of three, three of two, four of one."""
    curve = CostCurve((1, 2), (1.0, 1.5), per_row=0.25)
    closed, opened = (valued([5, 2, 9], curve, each).step["cost_to_go"][0] for each in (True, False))
    each = [curve.of([1] * rows, [0] * rows) for rows in (1, 2, 3)]
    assert closed == pytest.approx(2 * each[2] + 3 * each[1] + 4 * each[0])
    assert opened == pytest.approx(16 * each[2] / 3)


def test_a_token_of_the_row_that_ends_last_is_worth_most_and_in_a_server_all_are_alike():
    curve, left = CostCurve((1, 2), (1.0, 1.01)), [400, 20, 20, 20]
    worth = valued(left, curve).rows["value"][:4]
    assert worth[0] > 0.95 and max(worth[1:]) < 0.03
    assert valued(left, curve, closed=False).rows["value"][:4] == pytest.approx([1.03 / 4] * 4)
    assert valued([400], curve, gain=2.0, stretch=1.1).rows["value"][0] == pytest.approx(0.55)


def test_tokens_of_one_row_are_worth_less_and_less_and_those_of_all_rows_are_not():
    """Sixteen steps of four rows: one row's tokens end the batch sooner only while it may be the last."""
    policy, found = valued([16] * 4, CostCurve((1, 2), (1.0, 1.01))), []
    rows = policy.rows[:4]
    for ahead in ([0] * 4, [12, 0, 0, 0], [12] * 4):
        rows["ahead"] = ahead
        value_later(policy.step[0], rows)
        found.append(float(rows["later"][0]))
    first, later, together = found
    assert first == pytest.approx(together) and later < first / 8


@pytest.fixture
def account() -> np.record:
    (account,) = np.zeros(1, ACCOUNT)
    account.slack, account.trials = START_SLACK, TRIAL_SLACK
    return account


def test_a_ledger_keeps_savings_up_to_a_limit_and_trials_apart(account):
    book(account, 1.0, 101.0, False, 0.0, True)
    assert account.slack == SAVED and account.trials == pytest.approx(TRIAL_SLACK + SHARE)
    book(account, 3.0, 1.0, True, 0.0, True)
    assert account.trials == pytest.approx(TRIAL_SLACK + SHARE - 2 + SHARE) and lacks(account, 10.0, False) <= 0
    assert lacks(account, 10.0, True) > 0


def test_a_costly_source_spends_its_own_part_while_the_slack_is_small(account):
    """Its trials in a step that pays are trials, too."""
    assert lacks_costly(account, 0.0, 0.3, False) == pytest.approx(0.6)
    for _ in range(60):
        book_plain(account, 0.0, 1.0)
    assert account.costly == pytest.approx(0.3) and account.slack == pytest.approx(START_SLACK + 0.6)
    account.slack = START_SLACK
    assert lacks_costly(account, 0.1, 0.29, False) <= 0 < lacks_costly(account, 0.1, 0.31, False)
    trials = account.trials
    book(account, 1.5, 2.0, False, 0.2, False)
    assert account.costly == pytest.approx(0.3 - 0.2 + 0.0075)
    assert account.trials == pytest.approx(trials - 0.2 + 0.015)
    assert account.slack > START_SLACK and lacks_costly(account, 0.0, 0.9, False) <= 0


def test_what_trees_gave_is_followed_for_each_class_of_suffixes():
    policy = ArrayHandles[Policy]()
    address = policy.at(Policy.allocate(CostTable(LOADED), *first_gains()))

    def expected(kind: int, price: float = 0.0) -> float:
        return gain_of(address, CHEAP, kind, price, 0.0)

    before = list(map(expected, range(4)))
    assert before == sorted(before) and [class_of(CHEAP, known) for known in (0, 3, 8, 32)] == [0, 1, 2, 3]
    for _ in range(3 * RECENT_TREES):
        record_gain(address, CHEAP, 2, 2.0)
    assert [expected(kind) for kind in (0, 1, 3)] == [before[0], before[1], before[3]]
    assert expected(2) == pytest.approx(2.0, abs=0.2)
    assert expected(2) > expected(2, 0.1) > expected(2, 0.4) > expected(2, 0.7) == 0.0


def test_a_model_whose_chances_are_no_numbers_counts_as_unsure():
    assert odds_of(float("nan")) == LOWEST_ODDS
    confidence = ChainConfidence()
    assert confidence.chance(float("nan")) < 0.5 < confidence.chance(0.9)
    confidence.learn([float("nan"), 0.9, 0.9, 0.9], 0)
    assert confidence._table.seen.sum() == 1 and all(np.isfinite(column).all() for column in confidence._table)


def test_a_chain_ends_where_a_further_token_is_not_worth_its_cost():
    confidence = ChainConfidence()
    for _ in range(40):
        confidence.learn([0.999] * 4 + [0.3], 4)
    assert confidence.chance(0.999) > 0.9 and confidence.chance(0.3) < 0.3
