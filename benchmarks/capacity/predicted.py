"""Tables and plot of what Forerun's GPU program should cost on four cards, by ``benchmarks.capacity.gpu_cost``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.capacity.devices import DEVICES
from benchmarks.capacity.gpu_cost import (
    ACCEPTANCES,
    BANDWIDTH_SHARE,
    CARDS,
    CODES,
    CONTEXTS,
    MEASURED,
    MEASURED_TRIFORCE,
    MODELS,
    fits,
    pass_milliseconds,
    speed_up,
    step_costs,
)
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row

MEASURED_ON = "h200"
COLUMNS = {"case": "before → after", **{card: card for card in CARDS}, "measured": "measured on an H200, before",
           "off": "predicted is off by"}  # fmt: skip
DRAFTS = {"a chain": ("chain", False, False), "a small level": ("small level", True, False),
          "a chain, keys and values in the host's memory": ("offloaded", False, True)}  # fmt: skip
"""Drafts by the target over a retrieval cache: how they are named here and in ``MEASURED_TRIFORCE``, whether a small
level is under them, and where keys and values are."""


def plain_rows() -> Iterator[Row]:
    """Yield milliseconds a token of plain decoding, on each card that holds the model and the text."""
    for name, shape in MODELS.items():
        for context in (each for each in CONTEXTS if (name, each) in MEASURED):
            for card in (each for each in CARDS if fits(shape, each, context)):
                nbytes = shape.pass_bytes + shape.token_kv_bytes * context
                before, after = (pass_milliseconds(shape, card, context, code) for code in CODES.values())
                yield {
                    "case": f"{name}, {context:,} tokens", "card": card, "before": before, "after": after,
                    "bytes": 1000 * nbytes / (DEVICES[card].bandwidth * BANDWIDTH_SHARE),
                    "measured": MEASURED[name, context] if card == MEASURED_ON else None,
                }  # fmt: skip


def triforce_rows() -> Iterator[Row]:
    """Yield speed-ups of Llama-2-7B's shape after 122,000 tokens."""
    for drafts, (kind, hierarchy, offloaded) in DRAFTS.items():
        for acceptance in ACCEPTANCES:
            for card in CARDS:
                if offloaded or fits(MODELS["llama-2-7b"], card, CONTEXTS[-1]):
                    before, after = (
                        speed_up(step_costs(card, code, offloaded), acceptance, hierarchy) for code in CODES.values()
                    )
                    known = (card, acceptance) == (MEASURED_ON, ACCEPTANCES[0])
                    yield {
                        "case": f"{drafts}, acceptance {acceptance:g}", "card": card, "before": before, "after": after,
                        "measured": MEASURED_TRIFORCE.get(kind) if known else None,
                    }  # fmt: skip


def add_predicted(report: Report) -> None:
    """Add both tables, and a plot of plain decoding's share of each card's bandwidth."""
    plain, drafted = list(plain_rows()), list(triforce_rows())
    report.add("predicted", "Milliseconds a token of plain decoding, predicted", plain, predicted_table(plain))
    report.add("drafted", "Speed-up of TriForce, predicted", drafted, predicted_table(drafted))
    report.bars("shares", *share_plot(plain))


def predicted_table(rows: Sequence[Row]) -> str:
    """Return a line for each case, a column for each card, and the error where a card was measured."""
    cases: dict[str, Row] = {}
    for row in rows:
        line = cases.setdefault(row["case"], {"case": row["case"]})
        line[row["card"]] = f"{row['before']:.2f} → {row['after']:.2f}"
        if row["measured"] is not None:
            line |= {"measured": row["measured"], "off": f"{100 * (row['before'] / row['measured'] - 1):+.0f} %"}
    return listing(list(cases.values()), COLUMNS)


def share_plot(plain: Sequence[Row]) -> tuple[Frame, list[str], list[Line]]:
    """Return frame, groups and bars of the plot."""
    groups = list(dict.fromkeys(row["case"].replace(", ", "\n") for row in plain))
    lines = []
    for card in CARDS:
        mine = {row["case"].replace(", ", "\n"): row for row in plain if row["card"] == card}
        for which in CODES:
            ys = [mine[group]["bytes"] / mine[group][which] if group in mine else 0.0 for group in groups]
            lines.append(Line(f"{card}, {which}", range(len(groups)), ys))
    return Frame("Plain decoding, predicted", "", "share of the bandwidth that a sum gets", share=True), groups, lines
