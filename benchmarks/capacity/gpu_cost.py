"""Predicted milliseconds of a pass of Forerun's GPU program, kernel by kernel, beside what an H200 measured.

A pass over one token reads its weights, keys and values at the bandwidth of a sum. Between two products run kernels
that read no weights; each costs some microseconds, and so does the start of a product. The host describes the pass
before it is launched. ``BEFORE`` is by the H200's measurements (``docs/decisions.md``, 'The first GPU'); ``AFTER`` is
what the changes since then should leave, and was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from benchmarks.capacity.devices import DEVICES, Machine, fit
from benchmarks.capacity.shapes import ModelShape
from benchmarks.reporting.plots import Frame, Line
from benchmarks.reporting.study_report import Report, listing
from forerun.bench.machine import Row
from forerun.kernels.gpu.pass_tables import splits_of

CARDS = ("h100", "h200", "a100-80gb", "rtx-4090")  # of capacity.DEVICES
BANDWIDTH_SHARE = 4.06 / 4.8
"""What a sum reads of a data sheet's bandwidth (H200). The other cards are assumed to do as well."""
HOST_LINK_SHARE = 55 / 63  # what a pinned copy gets of a host link, assumed: 55 GB/s over PCIe 5.0 with 16 lanes
LAUNCH_MICROSECONDS = 1.5
"""Of a kernel's cost, what passes before any of its programs runs; nothing can be prefetched then. Assumed."""
PREFETCHING_CARDS = ("h100", "h200")  # cards that have cp.async.bulk.prefetch.L2


class Code(NamedTuple):
    """Costs of a version of the code, in microseconds unless said otherwise.

    Attributes:
        norm, rotate, gate: a kernel between products.
        combine: merging splits, without its rounds of loads; ``round`` is one of these, for ``splits_ahead`` splits.
        product: a product's start and end.
        scan_share, grouped_scan_share: share of the bandwidth that reading keys and values gets, with one query head a
            KV head, and with several.
        host: before a pass is launched.
        level: per pass of a speculation step, for its proposals and reading what levels chose.
        step: of a speculation step, besides its passes.
        prefetched: bytes of weights that a norm, gate or combine prefetches.
    """

    norm: float = 5.8
    rotate: float = 3.4
    gate: float = 3.4
    combine: float = 3.35
    round: float = 0.65
    splits_ahead: int = 8
    product: float = 3.1
    scan_share: float = 0.96
    grouped_scan_share: float = 0.69
    host: float = 450.0
    level: float = 1600.0
    step: float = 19000.0
    prefetched: int = 0


BEFORE = Code()
AFTER = Code(splits_ahead=32, scan_share=0.97, grouped_scan_share=0.84, host=150.0, level=0.0, step=1500.0,
             prefetched=16 << 20)  # fmt: skip
CODES = {"before": BEFORE, "after": AFTER}


def pass_milliseconds(shape: ModelShape, card: str, context: int, code: Code) -> float:
    """Return the milliseconds of a pass over one token of one row after ``context`` tokens."""
    bandwidth = DEVICES[card].bandwidth * BANDWIDTH_SHARE / 1e6  # bytes a microsecond
    share = code.grouped_scan_share if shape.heads > shape.kv_heads else code.scan_share
    reading = (shape.pass_bytes + shape.token_kv_bytes * context / share) / bandwidth
    attention = shape.head_dim * shape.hidden * (shape.heads + shape.kv_heads) * shape.weight_bytes
    network = shape.hidden * shape.intermediate * shape.weight_bytes

    def seen(cost: float, weights: float) -> float:
        """Return what remains of a kernel's cost while the next product's weights are prefetched."""
        hidden = min(max(0.0, cost - LAUNCH_MICROSECONDS), min(code.prefetched, weights) / bandwidth)
        return cost - (hidden if card in PREFETCHING_CARDS else 0.0)

    rounds = ceil(splits_of(context) / code.splits_ahead)
    output = shape.head_dim * shape.hidden * shape.heads * shape.weight_bytes
    layer = (
        seen(code.norm, attention + output) + code.rotate + seen(code.combine + rounds * code.round, output)
        + seen(code.norm, 2 * network) + seen(code.gate, network) + 4 * code.product
    )  # fmt: skip
    last = seen(code.norm, shape.table * shape.weight_bytes)
    return (reading + shape.layers * layer + last + code.host) / 1000


MODELS = {name: ModelShape.parse(name) for name in ("llama-2-7b", "llama-3-8b", "smollm2-135m")}
CONTEXTS = (2048, 122_000)
MEASURED = {
    ("llama-2-7b", 2048): 5.25, ("llama-2-7b", 122_000): 21.6, ("llama-3-8b", 2048): 5.57,
    ("llama-3-8b", 122_000): 11.3, ("smollm2-135m", 2048): 2.8,
}  # fmt: skip
"""Milliseconds on an H200 before the changes, by shape and context. SmolLM2's is of short requests (350 tokens a
second)."""
BUDGET = 4096  # tokens of the retrieval cache
SMALL_ACCEPTANCE, SMALL_DRAFTS, SMALL_TOKENS = 0.45, 2, 260
"""The small level: its acceptance rate, drafts a middle pass, and the tokens that it sees."""
MOST_DRAFTS = 32
MEASURED_TRIFORCE = {"chain": 1.40, "small level": 1.39}
"""Speed-ups at an acceptance of 0.9 that the H200 measured before the changes, over 256 tokens."""
ACCEPTANCES = (0.9, 0.923)  # the second is that of the paper at temperature 0 (table 2)


Seconds = Callable[[int], float]  # seconds of a pass by its tokens


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return the expected tokens of a step that verifies a chain, if each draft is accepted with this probability
    (Leviathan et al., 2023, equation 1)."""
    return sum(acceptance**i for i in range(drafts + 1))


def chain_seconds(most: int, gamma1: int, acceptance: float, middle: Seconds, small: float | None) -> list[float]:
    """Return the expected seconds in which a middle level makes chains of 0, 1, ..., ``most`` tokens.

    Args:
        gamma1: tokens that the small model drafts at a time; the middle level accepts them at the rate ``acceptance``.
        small: seconds of the small model's pass over one token; None without one.
    """
    if small is None:
        return [drafts * middle(1) for drafts in range(most + 1)]
    found = [0.0]
    for missing in range(1, most + 1):
        tested = min(gamma1, missing - 1)
        accepted = [acceptance**n * (1 - acceptance) for n in range(tested)] + [acceptance**tested]
        rest = sum(chance * found[missing - 1 - n] for n, chance in enumerate(accepted))
        found.append(gamma1 * small + middle(tested + 1) + rest)
    return found


class StepCosts(NamedTuple):
    """Milliseconds of a plain pass, the verification, a draft of the middle level, one of the small level, and all
    else."""

    plain: float
    verify: float
    draft: float
    small: float
    other: float


def step_costs(card: str, code: Code, offloaded: bool = False) -> StepCosts:
    """Return costs for Llama-2-7B at 122,000 tokens, with keys and values on the card or in the host's memory."""
    shape, context, level = MODELS["llama-2-7b"], CONTEXTS[-1], code.level / 1000
    plain = pass_milliseconds(shape, card, context, code) + level
    if offloaded:
        plain = 1000 * shape.token_kv_bytes * context / (DEVICES[card].host_link * HOST_LINK_SHARE)
    draft = pass_milliseconds(shape, card, BUDGET, code) + level
    small = pass_milliseconds(ModelShape.parse("llama-68m"), card, SMALL_TOKENS, code._replace(host=0.0))
    return StepCosts(plain, plain, draft, small, code.step / 1000)


def speed_up(costs: StepCosts, acceptance: float, hierarchy: bool) -> float:
    """Return the speed-up over plain decoding at the best draft length."""
    drafting = chain_seconds(
        MOST_DRAFTS, SMALL_DRAFTS, SMALL_ACCEPTANCE, lambda tokens: costs.draft, costs.small if hierarchy else None
    )
    return max(
        expected_tokens(acceptance, drafts) * costs.plain / (drafting[drafts] + costs.verify + costs.other)
        for drafts in range(1, MOST_DRAFTS + 1)
    )


def fits(shape: ModelShape, card: str, context: int) -> bool:
    found = fit(shape, Machine(DEVICES[card]), context)
    return found.possible and not found.streamed


MEASURED_ON = "h200"
COLUMNS = {"case": "before → after", **{card: card for card in CARDS}, "measured": "measured on an H200, before",
           "off": "predicted is off by"}  # fmt: skip
DRAFTS = {"a chain": ("chain", False, False), "a small level": ("small level", True, False),
          "a chain, keys and values in the host's memory": ("offloaded", False, True)}  # fmt: skip
"""Drafts over a retrieval cache: their name in ``MEASURED_TRIFORCE``, whether a small level drafts for them, and
whether keys and values are in the host's memory."""


def plain_rows() -> Iterator[Row]:
    """Yield plain decoding's milliseconds a token, on each card that holds the model and the request."""
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
                    costs = (step_costs(card, code, offloaded) for code in CODES.values())
                    before, after = (speed_up(each, acceptance, hierarchy) for each in costs)
                    known = (card, acceptance) == (MEASURED_ON, ACCEPTANCES[0])
                    yield {
                        "case": f"{drafts}, acceptance {acceptance:g}", "card": card, "before": before, "after": after,
                        "measured": MEASURED_TRIFORCE.get(kind) if known else None,
                    }  # fmt: skip


def add_predicted(report: Report) -> None:
    plain, drafted = list(plain_rows()), list(triforce_rows())
    report.add("predicted", "Milliseconds a token of plain decoding, predicted", plain, predicted_table(plain))
    report.add("drafted", "Speed-up of TriForce, predicted", drafted, predicted_table(drafted))
    report.bars("shares", *share_plot(plain))


def predicted_table(rows: Sequence[Row]) -> str:
    """Return a line for each case, a column for each card, and the error where it was measured."""
    cases: dict[str, Row] = {}
    for row in rows:
        line = cases.setdefault(row["case"], {"case": row["case"]})
        line[row["card"]] = f"{row['before']:.2f} → {row['after']:.2f}"
        if row["measured"] is not None:
            line |= {"measured": row["measured"], "off": f"{100 * (row['before'] / row['measured'] - 1):+.0f} %"}
    return listing(list(cases.values()), COLUMNS)


def share_plot(plain: Sequence[Row]) -> tuple[Frame, list[str], list[Line]]:
    groups = list(dict.fromkeys(row["case"].replace(", ", "\n") for row in plain))
    lines = []
    for card in CARDS:
        mine = {row["case"].replace(", ", "\n"): row for row in plain if row["card"] == card}
        for which in CODES:
            ys = [mine[group]["bytes"] / mine[group][which] if group in mine else 0.0 for group in groups]
            lines.append(Line(f"{card}, {which}", range(len(groups)), ys))
    return Frame("Plain decoding, predicted", "", "share of the bandwidth that a sum gets", share=True), groups, lines
