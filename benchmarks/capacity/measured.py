"""What ``forerun bench triforce --simulate-acceptance`` measured, beside what ``benchmarks.capacity.forecast`` says of it.

Compared are single passes of each level, and the speed of decoding at the acceptance rates that were counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.capacity.capacity import Machine
from benchmarks.capacity.forecast import Drafting, Passes, forecast
from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting.tables import Report, listing

BYTES = {"float32": 4.0, "bfloat16": 2.0}
Row = dict[str, Any]


class Measured:
    """A report of that command.

    Args:
        path: its JSON.

    Raises:
        ValueError: if it is no such report, or has no part ``contexts``.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            self.settings: Row = found["settings"]
            self.speeds: list[Row] = found["parts"]["contexts"]
            self.costs: list[Row] = found["parts"]["costs"]
            simulated = self.settings["simulate_acceptance"] is not None
        except (ValueError, KeyError, TypeError):
            simulated = False
        if not simulated or self.settings["dtype"] not in BYTES:
            raise ValueError(
                f"{path} is no JSON of forerun bench triforce --simulate-acceptance --parts contexts in "
                f"{' or '.join(BYTES)}"
            )

    @property
    def dtype(self) -> str:
        """Of the weights, keys and values."""
        return str(self.settings["dtype"])

    def shape(self, name: str) -> ModelShape:
        """The shape of that setting."""
        size = BYTES[self.dtype]
        return replace(ModelShape.parse(self.settings[name]), weight_bytes=size, kv_bytes=size)

    def drafting(self, acceptance: float, small_acceptance: float, hierarchy: bool) -> Drafting:
        """What was measured, at these rates."""
        at = self.settings
        fixed = {} if at["paced"] else {"gamma1": at["gamma1"], "gamma2": at["gamma2"]}
        return Drafting(
            acceptance,
            small_acceptance,
            self.shape("draft_shape") if hierarchy else None,
            at["cache_budget"],
            at["sinks"] + at["window"],
            at["sparse"] if hierarchy else "retrieval",
            **fixed,
        )


def add_measured(report: Report, measured: Measured, machine: Machine, number: int) -> None:
    """All passes and speeds of the report of this number, as one table."""
    rows = [_compared(*claim) for claim in (*_passes(measured, machine), *_speeds(measured, machine))]
    columns = {
        "context": "context",
        "what": "figure",
        "measured": "measured",
        "predicted": "predicted",
        "off": "off by",
    }
    device = machine.device
    said = (
        f"This machine reads {device.bandwidth / 1e9:.1f} GB a second and makes {device.operations / 1e9:,.0f} billion "
        f"operations a second in {measured.dtype}.\n"
    )
    report.add(
        f"measured-{number}", f"{measured.settings['shape']} in {measured.dtype}", rows, said, listing(rows, columns)
    )


def _compared(context: int, what: str, measured: float, predicted: float) -> Row:
    return {
        "context": context,
        "what": what,
        "measured": float(f"{measured:.3g}"),
        "predicted": float(f"{predicted:.3g}"),
        "off": f"{100 * (predicted / measured - 1):+.0f} %",
    }


Compared = tuple[int, str, float, float]


def _passes(measured: Measured, machine: Machine) -> list[Compared]:
    found: list[Compared] = []
    for row in sorted(measured.costs, key=lambda row: int(row["context"])):
        passes = Passes(measured.shape("shape"), machine, row["context"], 1, measured.drafting(0.0, 0.0, True))
        levels: list[tuple[str, Mapping[str, float], Any]] = [
            ("full cache", row["full"], passes.full),
            ("sparse cache", row["middle"], passes.middle),
        ]
        for level, by_tokens, predict in levels:
            for tokens, seconds in by_tokens.items():
                what = f"{level}, {tokens} token{'s' * (int(tokens) > 1)}, ms"
                found.append((row["context"], what, 1000 * seconds, 1000 * predict(int(tokens))))
        small = passes.small()
        if row["small"] is not None and small is not None:
            found.append((row["context"], "small model, ms", 1000 * row["small"], 1000 * small))
    return found


def _speeds(measured: Measured, machine: Machine) -> list[Compared]:
    found: list[Compared] = []
    for row in measured.speeds:
        name = row["contestant"]
        if name not in ("none", "triforce", "retrieval"):
            continue
        rates = row["acceptance"] or 0.0, row["middle_acceptance"] or 0.0
        drafting = measured.drafting(*rates, hierarchy=name == "triforce")
        said = forecast(measured.shape("shape"), machine, row["context"], 1, drafting)
        if name == "none":
            found.append((row["context"], "plain, tokens/s", row["tokens_per_second"], said.plain_rate))
        else:
            found.append((row["context"], f"{name}, tokens/s", row["tokens_per_second"], said.rate))
            found.append((row["context"], f"{name}, speed-up", row["speed_up"], said.speed_up))
    return found
