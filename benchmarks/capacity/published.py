"""What others published, beside what ``benchmarks.capacity.forecast`` says of it.

TriForce: tables 2 and 3 of its paper. The paper states no draft lengths. Those of its published code are taken
(github.com/Infini-AI-Lab/TriForce, README: ``--gamma``, ``--budget`` and, for the layers whose keys and values stay on
two devices, ``--on_chip``); in that code the small model drafts one token at a time. For offloading the paper states no
acceptance rates either; those of table 2 at the same temperature are taken.

gpt-fast: its README's table of tensor parallelism (github.com/pytorch-labs/gpt-fast; A100 of 80 GB at 330 W, bfloat16,
a short prompt).
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.capacity.capacity import DEVICES, Machine, kv_bytes
from benchmarks.capacity.forecast import Drafting, forecast
from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting.study_report import Report, listing

ON_CHIP, OFFLOADED = 122 * 1024, 127 * 1024
"""Tokens of a prompt (section 5.1, setup)."""
GAMMA, GAMMA_OFFLOADED, GAMMA_ONE = 6, 16, 12
BUDGET, BUDGET_OFFLOADED, BUDGET_ONE = 4096, 12288, 8192
NAIVE_BUDGET = 1024
LAYERS_KEPT = 9 / 32
COLUMNS = {"what": "figure", "unit": "unit", "published": "published", "predicted": "predicted", "off": "off by"}


class PublishedFigure(NamedTuple):
    """A published figure and this model's."""

    what: str
    unit: str
    published: float
    predicted: float


TABLE_2 = {0.0: (2.31, 0.9234, 1.56, 0.4649), 0.6: (2.19, 0.9137, 1.42, 0.4036), 1.2: (2.02, 0.8902, 1.27, 0.2664)}
"""By temperature: TriForce's speed-up and acceptance rate, the naive policy's speed-up and acceptance rate."""
ALONE = (1.80, 0.9126)
"""Retrieval without a hierarchy, temperature 0.6: speed-up, acceptance rate."""
TABLE_3 = (
    ("llama-2-7b", 2, None, BUDGET_OFFLOADED, GAMMA_OFFLOADED, 0.108, 0.840),
    ("llama-2-7b", 2, LAYERS_KEPT, BUDGET_OFFLOADED, GAMMA_OFFLOADED, 0.108, 0.840),
    ("llama-2-13b", 2, None, BUDGET_OFFLOADED, GAMMA_OFFLOADED, 0.226, 1.794),
    ("llama-2-7b", 1, None, BUDGET_ONE, GAMMA_ONE, 0.312, None),
)
"""Model, RTX 4090s, part of KV on them, budget, gamma, seconds a token of TriForce and of plain decoding. A part of
None is all that fits. On one device the paper's baseline is another system, which attends on the CPU."""
GPT_FAST = {"llama-2-7b": {1: 104.9, 2: 168.84, 4: 254.02, 8: 328.43}, "llama-2-70b": {2: 21.32, 4: 38.01, 8: 62.50}}
"""Tokens a second by devices."""
SHORT = 128
"""Tokens of context in gpt-fast's table: a prompt of five and the middle of what follows."""


def add_published(report: Report) -> None:
    """All figures as one table."""
    figures = [*_on_chip(), *_offloaded(), *_parallel()]
    rows = [
        one._asdict()
        | {"predicted": float(f"{one.predicted:.3g}"), "off": f"{100 * (one.predicted / one.published - 1):+.0f} %"}
        for one in figures
    ]
    report.add("published", "Published figures, and what this model says of them", rows, listing(rows, COLUMNS))


def _on_chip() -> list[PublishedFigure]:
    shape, small, machine = ModelShape.parse("llama-2-7b"), ModelShape.parse("llama-68m"), Machine(DEVICES["a100-80gb"])
    figures = []
    for temperature, (speed_up, acceptance, naive, small_acceptance) in TABLE_2.items():
        where = f"llama-2-7b, A100, 122K, T {temperature:g}"
        full = Drafting(acceptance, small_acceptance, small, BUDGET, gamma1=1, gamma2=GAMMA)
        direct = Drafting(acceptance, small_acceptance, small, ON_CHIP, NAIVE_BUDGET)  # every text is short for it
        for name, published, drafting in (("TriForce", speed_up, full), ("naive policy", naive, direct)):
            found = forecast(shape, machine, ON_CHIP, 1, drafting).speed_up
            figures.append(PublishedFigure(f"{name}, {where}", "x", published, found))
    found = forecast(shape, machine, ON_CHIP, 1, Drafting(ALONE[1], budget=BUDGET, gamma2=GAMMA)).speed_up
    return [
        *figures,
        PublishedFigure("Retrieval without hierarchy, llama-2-7b, A100, 122K, T 0.6", "x", ALONE[0], found),
    ]


def _offloaded() -> list[PublishedFigure]:
    acceptance, small_acceptance = TABLE_2[0.6][1], TABLE_2[0.6][3]
    small, figures = ModelShape.parse("llama-68m"), []
    for name, devices, part, budget, gamma, seconds, plain in TABLE_3:
        shape = ModelShape.parse(name)
        kept = None if part is None else part * kv_bytes(shape, OFFLOADED) / devices
        drafting = Drafting(acceptance, small_acceptance, small, budget, gamma1=1, gamma2=gamma)
        found = forecast(shape, Machine(DEVICES["rtx-4090"], devices, kept), OFFLOADED, 1, drafting)
        lying = "" if part is None else f", {100 * part:.0f} % of KV on them"
        where = f"{name}, {devices} x RTX 4090{lying}, 127K, T 0.6"
        figures.append(PublishedFigure(f"TriForce, {where}", "s/token", seconds, 1 / found.rate))
        if plain is not None:
            figures.append(PublishedFigure(f"plain, {where}", "s/token", plain, found.plain_seconds))
            figures.append(PublishedFigure(f"TriForce, {where}", "x", round(plain / seconds, 2), found.speed_up))
    return figures


def _parallel() -> list[PublishedFigure]:
    figures = []
    for name, by_devices in GPT_FAST.items():
        for devices, published in by_devices.items():
            machine = Machine(DEVICES["a100-80gb"], devices)
            found = forecast(ModelShape.parse(name), machine, SHORT, 1, Drafting(0.0)).plain_rate
            figures.append(
                PublishedFigure(f"plain (gpt-fast), {name}, {devices} x A100, short", "tokens/s", published, found)
            )
    return figures
