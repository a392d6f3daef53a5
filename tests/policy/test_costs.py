"""The cost curve, and its measurement on a clock that only passes move."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import tiny

import forerun
from forerun.decoding.sources.trie_source import TrieSource
from forerun.models.forward import pass_timing as timing
from forerun.models.forward.pass_timing import FAR_TOKENS, PASS_SIZES, measure
from forerun.models.forward.runtime import default_runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve
from forerun.policy.policy_tables import TIME
from forerun.policy.time_model import AS_THE_CURVE_SAYS, LOADED_DOUBT, STEP_NOISE, LinearCost, begin_time, record_time

CURVE = CostCurve((1, 2, 10), (1.0, 1.2, 2.0), cached_sizes=(1, 2, 10), cached_costs=(0.001, 0.001, 0.003))


def test_costs_lie_on_lines_between_the_sizes_and_beyond_the_last():
    assert CURVE.passes([1, 2, 6, 10, 20]) == pytest.approx([1, 1.2, 1.6, 2, 3])
    assert CostCurve.linear(24).passes([1, 25, 49]) == pytest.approx([1, 2, 3])


@pytest.mark.parametrize(("tokens", "cached", "cost"), [
    ([1], [0], 1), ([2, 4], [1000, 0], 1.6 + 1), ([1, 5], [1000, 0], 1.6 + 1), ([6], [1000], 1.6 + 2),
    ([4, 2], [1000, 1000], 1.6 + 1.5 + 1), ([18], [1000], 2.8 + 5),
])  # fmt: skip
def test_a_pass_pays_for_its_tokens_for_reading_its_caches_and_for_scoring_against_them(tokens, cached, cost):
    assert CURVE.of(tokens, cached) == pytest.approx(cost)


@pytest.mark.parametrize(("arguments", "message"), [
    (((1,), (1.0,)), "sizes are"), (((2, 3), (1.0, 1.0)), "sizes are"), (((1, 1), (1.0, 1.0)), "sizes are"),
    (((1, 2), (1.0, 0.9)), "costs are"), (((1, 2), (0.9, 1.0)), "costs are"), (((1, 2), (1.0, math.nan)), "costs are"),
    (((1, 2), (1.0,)), "costs are"), (((1, 2), (1.0, 1.0), (2, 3)), "cached_sizes are"),
    (((1, 2), (1.0, 1.0), (1, 2), (-1.0, 0.0)), "cached_costs are"),
    (((1, 2), (1.0, 1.0), (1, 2), (1.0, math.inf)), "cached_costs are"),
    (((1, 2), (1.0, 1.0), (1, 2), (1.0, 0.0)), "cached_costs are"),
    (((1, 2), (1.0, 1.0), (1, 2), (0.0, 0.0), -0.1), "per_row is -0.1"),
])  # fmt: skip
def test_impossible_costs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        CostCurve(*arguments)


def test_rounding_hides_noise_and_is_done_once():
    rng = np.random.default_rng(0)
    true = np.array([1, 1.225, 1.45, 1.74, 2.1, 2.9])
    rounded = []
    for _ in range(100):
        noisy = np.maximum.accumulate(1 + (true - 1) * rng.normal(1, 0.01, 6)).tolist()
        curve = CostCurve((1, 2, 9, 17, 33, 65), (1.0, *noisy[1:])).rounded()
        assert curve.rounded() == curve
        assert curve.costs == pytest.approx(true.tolist(), rel=0.1)
        rounded.append(curve)
    assert len(set(rounded)) <= 8  # of a hundred


class Machine:
    """A model whose passes take what a formula says, and the clock that they move."""

    vocabulary = 10

    def __init__(self, unit: float, positions: int = 1 << 17) -> None:
        self.unit, self.positions, self.now, self.passes = unit, positions, 0.0, 0
        config = SimpleNamespace(max_position_embeddings=positions, get_text_config=lambda decoder: config)
        self.model = SimpleNamespace(config=config)

    def clock(self) -> float:
        return self.now

    def score(self, blocks: Any, caches: Any) -> list[torch.Tensor]:
        assert all(block.positions.max() < self.positions for block in blocks)
        tokens, length = sum(map(len, blocks)), caches[0].length
        cost = 1 + (0.2 if tokens > 1 else 0) + 0.025 * (tokens - 1) + length * max(1e-4, 3e-5 * tokens)
        cost += 0.1 * (len(blocks) - 1)
        self.now += self.unit * cost * (3 if self.passes % 7 == 2 else 1)  # now and then something disturbs it
        self.passes += 1
        return [torch.zeros(len(block), 2) for block in blocks]


def test_the_measured_curve_is_the_machine_s():
    machine = Machine(0.001)
    curve = measure(machine, machine.clock, machine.clock)
    assert curve.passes([1, 2, 16, 64]) == pytest.approx([1, 1.225, 1.575, 2.775], rel=0.15)
    assert curve.cached([1, 2, 8, 16, 32]) == pytest.approx([1e-4, 1e-4, 2.4e-4, 4.8e-4, 9.6e-4], rel=0.3)
    assert curve.per_row == pytest.approx(0.1, rel=0.3)
    assert machine.now < 2 * timing.MEASURING_SECONDS


def test_the_measurement_ends_for_a_fast_model():
    machine = Machine(1e-9)
    measure(machine, machine.clock, machine.clock)
    kinds = len(PASS_SIZES) + len(timing.FAR_SIZES) + 2
    assert machine.passes <= kinds * timing.MAX_ROUNDS + timing.BATCH_ROWS + 1


def test_a_large_model_is_measured_with_few_passes():
    machine = Machine(1.0)
    curve = measure(machine, machine.clock, machine.clock)
    laying_out = timing.BATCH_ROWS + 1
    assert machine.passes <= timing.MIN_ROUNDS * timing.MIN_KINDS + 1 + laying_out
    assert curve.sizes == tuple(sorted(PASS_SIZES[: timing.MIN_KINDS]))


@pytest.mark.parametrize("slow", [1, 2])
def test_passes_that_meet_cold_memory_or_a_busy_machine_do_not_count(slow):
    """Where a pass of 8 tokens seemed as dear as one of 16, all further ones were free, and `auto` drafted too many."""

    class Cold(Machine):
        seen = 0

        def score(self, blocks: Any, caches: Any) -> list[torch.Tensor]:
            began, held = self.now, sum(map(len, blocks)) == 8 and caches[0].length < FAR_TOKENS
            self.seen += held
            scored = super().score(blocks, caches)
            self.now = began + 1.0 * (1 + 0.2 * (sum(map(len, blocks)) - 1)) * (4 if held and self.seen <= slow else 1)
            return scored

    machine = Cold(1.0)
    curve = measure(machine, machine.clock, machine.clock)
    assert curve.passes([1, 8, 16, 32]) == pytest.approx([1, 2.4, 4, 7.2], rel=0.05)


@pytest.mark.parametrize(("share", "doubtful"), [(0.5, True), (0.97, False)])
def test_a_curve_is_doubtful_where_the_thread_had_its_core_for_a_part_of_the_time(share, doubtful):
    machine = Machine(0.01)
    assert measure(machine, machine.clock, lambda: share * machine.now).doubtful == doubtful


@pytest.mark.parametrize("longrope", [False, True])
def test_a_model_with_few_positions_is_measured_within_them(longrope):
    """Also if it has more, which would change all keys."""
    machine = Machine(0.001, positions=40)
    if longrope:
        machine.model.config.rope_parameters = {"rope_type": "longrope", "original_max_position_embeddings": 40}
        machine.model.config.max_position_embeddings = 1 << 17
    curve = measure(machine, machine.clock, machine.clock)
    assert curve.sizes == (1, 2, 8, 16, 32) and curve.cached_costs == (0, 0) and FAR_TOKENS > 40


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
def test_real_models_can_be_measured(architecture):
    curve = measure(Scorer(tiny(architecture)))
    assert curve.rounded() == curve
    assert curve.costs[-1] <= curve.sizes[-1]


def test_passes_are_measured_where_drafts_are_cut():
    measured: list[Scorer] = []
    runtime = replace(default_runtime(), costs=lambda scorer: measured.append(scorer) or CURVE)
    forerun.Engine(tiny("llama"), "none", _runtime=runtime)
    forerun.Engine(tiny("llama"), TrieSource(), prune_drafts=False, _runtime=runtime)
    assert not measured
    engine = forerun.Engine(tiny("llama"), _runtime=runtime)
    engine.generate([7, 9], max_new_tokens=4, do_sample=False)
    assert set(measured) == {engine.target}
    measured.clear()
    engine.set_drafter(TrieSource())
    assert measured == [engine.target]


class TimeModel:
    """A time of its own."""

    def __init__(self, scale: float, doubt: float = LOADED_DOUBT, noise: float = STEP_NOISE) -> None:
        (self._time,) = np.zeros(1, TIME)
        begin_time(self._time, scale, doubt, noise=noise)

    def record(self, taken: float, size: float = 0.0, sized: bool = False) -> float:
        return record_time(self._time, taken, size, sized)

    @property
    def scale(self) -> float:
        return float(self._time.scale)

    @property
    def shape(self) -> LinearCost:
        return LinearCost(float(self._time.start), float(self._time.each))


def passes(*taken: tuple[float, float, float], unit: float = 1.0) -> TimeModel:
    """What is known after passes of this plain cost, to which drafts add this, and that took so many units."""
    model = TimeModel(unit)
    for _ in range(4):
        model.record(unit)
    for plain, added, seconds in taken:
        model.record(unit * seconds / plain, added / plain, sized=True)
    return model


def test_drafts_that_add_nothing_to_passes_are_noticed():
    assert passes().shape == AS_THE_CURVE_SAYS
    found = passes(*[(1.0, added, 1.0) for added in (0.3, 0.9, 0.6, 0.9) * 8], unit=0.5)  # keys over a slow link
    assert found.shape.at(0.9) == pytest.approx(1.0, abs=0.08)
    assert found.scale == pytest.approx(0.5, rel=0.1)


def test_a_few_short_drafts_do_not_make_long_ones_cheap():
    found = passes((1.0, 0.02, 1.1), (1.0, 0.04, 1.0), (1.0, 0.05, 0.95))  # noise, by which drafts shorten passes
    assert found.shape.at(4.0) > 4.5


def test_passes_that_drafts_lengthen_as_a_whole_are_noticed():
    model = TimeModel(0.01)
    for _ in range(20):
        model.record(0.01)
        model.record(0.01 * (1.2 + 0.2), 0.2, sized=True)
    start, each = model.shape
    assert start + 0.2 * each == pytest.approx(1.4, abs=0.05)


def test_noise_leaves_the_curves_slope():
    noise = np.random.default_rng(0)
    added = noise.choice([0.02, 0.03, 0.05], 15)
    found = passes(*[(1.0, float(each), 1.0 + each + abs(noise.normal(0, 0.05))) for each in added])
    start, each = found.shape
    assert each == pytest.approx(1.0, abs=0.05) and 0.97 <= start < 1.1


@pytest.mark.parametrize("slow", [2.0, 5.0])
def test_a_machine_that_is_slower_for_a_while_does_not_make_drafts_dear(slow):
    model, noise = TimeModel(0.01), np.random.default_rng(1)
    for step in range(120):
        speed = 0.01 * (slow if step // 10 % 2 else 1.0) * (1 + abs(noise.normal(0, 0.03)))
        drafted = step % 7 < 5
        model.record(speed * (1.3 if drafted else 1.0), 0.3 * drafted, drafted)
        if step > 10:
            assert model.shape.at(0.3) == pytest.approx(1.3, abs=0.15)
        if step % 10 > 3:
            assert model.scale == pytest.approx(speed, rel=0.2)


def test_one_slow_step_is_no_slow_machine():
    model = passes(*[(1.0, 0.5, 1.5)] * 6)
    before = model.shape.at(0.5)
    model.record(15.0, 0.5, sized=True)
    assert model.shape.at(0.5) == pytest.approx(before, rel=0.1)
    model.record(1.5, 0.5, sized=True)
    assert model.scale == pytest.approx(1.0, rel=0.1)


def test_a_disturbance_is_credible_in_part_only_and_a_second_one_in_full():
    model = TimeModel(1.0, 0.05, 0.05)
    first = model.record(10.0)
    assert first < 1.5
    for _ in range(6):
        again = model.record(10.0)
    assert again > 8.0
