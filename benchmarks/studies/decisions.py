"""``python -m benchmarks decisions``: what the planner decides on a simulated clock, beside each source alone.

Batches of short requests, in which SmolLM2's costs leave little to gain, and of long ones, in which chains over a
sparse cache pay. Speed over plain decoding, median and worst seed, and the losses by the ledger's own account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, NamedTuple

import numpy as np
import typer

from benchmarks.reporting.study_report import listing
from benchmarks.studies.simulated_steps import Outline, World, plain_seconds, simulate
from forerun.bench.machine import Row
from forerun.cli.options import DebugOptions
from forerun.core.sampling import Salt, uniform
from forerun.policy.cost_curve import CostCurve

SHORT = CostCurve(
    (1, 2, 8, 16, 32, 64), (1.0, 1.0, 1.078, 1.582, 2.846, 5.374), (1, 2), (0.0, 0.0), 0.0063, unit=0.01087
)
"""SmolLM2 in bfloat16 on two cores, short requests."""
LONG = CostCurve((1, 2), (1.0, 1.002), unit=1 / 1.03)
"""A model whose passes cost the reading of its weights, however many tokens they have."""

short_world = partial(World, SHORT, plain=0.01087, asking=25e-5, asking_row=4e-5, looking=5e-6, verifying=1e-5)

Drafts = tuple[Callable[[int, int], bool], Callable[[int, int], float], Callable[[int, int], int]]
"""Whether trees have a token, how sure they are of their first one, and the known suffix; by row and place."""


class Case(NamedTuple):
    """A batch in a world; the world is made for each seed."""

    name: str
    world: Callable[[int], World]
    outline: Outline


@dataclass(frozen=True)
class DecisionOptions(DebugOptions):
    """What the planner decides on a simulated clock, beside each source alone."""

    seeds: Annotated[int, typer.Option(help="Worlds of each case.", min=1)] = 10


def at_random(seed: int, low: float, high: float) -> Drafts:
    """Return drafts that are accepted at a rate drawn for each row, and state it."""
    rates: dict[int, float] = {}

    def rate(row: int, place: int) -> float:
        return rates.setdefault(row, float(np.random.default_rng(seed * 100 + row).uniform(low, high)))

    return lambda row, place: uniform(seed * 1000 + row, place, Salt.ACCEPT) < rate(row, place), rate, lambda *place: 0


def quotes(seed: int, rows: int, share: float) -> Drafts:
    """Return drafts where the first ``rows`` rows quote a share of their passages of 16 tokens."""

    def hits(row: int, place: int) -> bool:
        passage = uniform(seed * 1000 + row, place // 16, Salt.DRAFT) < share
        return row < rows and passage and uniform(seed * 1000 + row, place, Salt.RESIDUAL) < 0.95

    return hits, lambda *place: 0.9 if hits(*place) else 0.1, lambda *place: 8 * hits(*place)


def loops(seed: int, rows: int) -> Drafts:
    """Return drafts where the first ``rows`` rows repeat themselves from a random place on."""
    begins = np.random.default_rng(seed).integers(10, 50, rows).tolist() + [1000] * 16
    return (
        lambda row, place: place >= begins[row] + 3 or uniform(seed * 1000 + row, place, Salt.ACCEPT) < 0.06,
        lambda row, place: 0.97 if place >= begins[row] + 3 else 0.1,
        lambda row, place: min(32, max(0, place - begins[row])),
    )


def short_case(rows: int, name: str, drafts: Callable[[int], Drafts], most: int = 8) -> Case:
    """Return a case of rows of 64 tokens that trees of up to ``most`` nodes draft for."""

    def world(seed: int) -> World:
        return short_world(most=most, **dict(zip(("hits", "stated", "known"), drafts(seed), strict=True)))

    return Case(f"{rows} short, {name}", world, Outline(rows, 64, sources="t"))


def long_case(rows: int, quoting: int, accepted: float, drafting: float) -> Case:
    """Return a case of rows of 96 tokens: some quote, and chains draft for all."""

    def world(seed: int) -> World:
        (hits, stated, known), unit = quotes(seed, quoting, 0.7), LONG.unit or 1.0
        return World(
            LONG, plain=unit, asking=0.002, asking_row=0.001, drafting=drafting * unit, hits=hits, stated=stated,
            known=known,
            accepted=lambda row, place: uniform(seed * 77 + row, place, Salt.ACCEPT) < accepted,
        )  # fmt: skip

    return Case(f"{rows} long, {quoting} quote, chains {accepted:g}", world, Outline(rows, 96, weight=drafting))


def cases() -> Iterator[Case]:
    for rows in (1, 4, 16):
        yield short_case(rows, "drafts right at 5 to 20 %", partial(at_random, low=0.05, high=0.2))
        yield short_case(rows, "drafts right at 10 to 50 %", partial(at_random, low=0.1, high=0.5))
        yield short_case(rows, "nothing foreseen", partial(at_random, low=0.0, high=1e-9))
        half = max(rows // 2, 1)
        yield short_case(rows, f"{half} quote", partial(quotes, rows=half, share=0.6))
    for looping in (1, 2, 4):
        yield short_case(4, f"{looping} repeat themselves", partial(loops, rows=looping), most=40)
    for case in ((1, 1, 0.9, 0.2), (4, 2, 0.9, 0.2), (16, 8, 0.93, 0.1), (16, 12, 0.8, 0.1), (16, 4, 0.9, 0.25)):
        yield long_case(*case)


def speeds(case: Case, sources: str, seeds: int) -> tuple[list[float], float]:
    """Return the speed over plain decoding for each seed, and the ledger's largest loss, in plain passes."""
    found, lost = [], 0.0
    for seed in range(seeds):
        world, outline = case.world(seed), replace(case.outline, sources=sources)
        seconds, planner = simulate(world, outline)
        found.append(plain_seconds(world, outline) / seconds)
        lost = max(lost, planner.choice.ledger.lost)
    return found, lost


def run(options: DecisionOptions) -> None:
    rows = []
    for case in cases():
        row: Row = {"case": case.name}
        for sources in ("t", "c", case.outline.sources) if "c" in case.outline.sources else (case.outline.sources,):
            found, lost = speeds(case, sources, options.seeds)
            row |= {sources: f"{np.median(found):.2f} ({min(found):.2f})", "lost": round(lost, 1)}
        rows.append(row)
    columns = {"case": "case", "t": "trees", "c": "chains", "tc": "both", "lost": "lost at most, plain passes"}
    print(listing(rows, columns), end="")
