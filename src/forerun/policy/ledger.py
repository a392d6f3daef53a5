"""What drafting may lose: the cost to go, what a token is worth, and an account of losses.

Costs are in plain passes, by the cost curve: c(B) is the cost of a pass over one token of each of B rows.

**Cost to go.** If the rows of a closed batch (``Engine.generate``) lack R_1 <= ... <= R_B tokens, plain decoding costs
Phi = sum over k of (R_k - R_{k-1}) c(B - k + 1). In a server, where new rows replace finished ones, each token costs
its share of a pass: Phi = sum(R) c(B) / B.

**Value of a token.** Rows end at T = R / g, where g is the recent tokens per step, and the batch with the last one:
after about d log(sum exp(T / d)) steps, their maximum, smoothed by its uncertainty d = sqrt(max T). So a token saves
its row's share of that sum of the batch's steps, each worth c(1); the other steps of the row are worth (c(B) - c(1)) /
(B - 1). If a step costs s plain ones, so does what it saves. Tokens of one row alone are worth less and less, as it is
no longer the last; of all rows, they are not. In a server, a token saves its share of a pass, c(B) / B.

**Ledger.** A step loses its time minus its progress, the reduction of the cost to go. The ``slack`` is what may still
be lost: a small start, a share of the progress, and earlier savings up to ``SAVED``. An action is taken only if the
slack covers its cost with all drafts rejected; one that is not expected to pay, only if ``trials`` does too, for which
savings do not count. ``costly`` is what a costly source may lose while the slack is small, so that it leaves enough for
a cheap one. So a batch costs at most

    (1 + SHARE) Phi_0 + min(START_SLACK, max(TRIAL_SLACK, START_SHARE Phi_0))

plain passes, plus the overrun of one step over its estimate, deciding in steps without drafts, the error of the unit
(seconds of a plain pass), single disturbances of the machine (``time_model``), and what earlier batches saved, up
to ``CREDIT`` of this batch's cost to go.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.policy.policy_tables import policy_at

START_SLACK = 3.0
"""What the first batch may lose at its start, in plain passes. With one pass, a first proposal that cost twice its
guess ended drafting for a whole request."""
START_SHARE = 0.02
"""Share of the first batch's cost to go that may be lost at its start. With ``SHARE``, the sum is 3 %, as much as
``forerun bench never-slower`` allows a median."""
TRIAL_SLACK = 1.0
"""What trials may lose at the start, in plain passes: one rejected draft of typical size."""
SHARE = 0.01
"""Share of the progress that drafting may lose in the long run."""
RESERVE = TRIAL_SLACK / 2
"""Slack that costly sources and hopeless trials leave for actions that promise more, in plain passes."""
COSTLY_SHARE = 0.5
"""Share of a small slack's income that is for costly sources: as much as for cheap ones."""
SAVED = 16.0
"""Maximum savings that count, in plain passes: how long drafts are trusted after they stop paying."""
CREDIT = 0.06
"""Share of the cost to go that earlier savings may cover; with ``SHARE``, 7 %, as ``never-slower`` allows."""


@compiled
def open_batch(account: np.record, cost_to_go: float) -> None:
    """Start a batch: earlier savings count only up to a share of its cost."""
    allowed = max(TRIAL_SLACK, (CREDIT if account.progress > 0.0 else START_SHARE) * cost_to_go)
    account.slack, account.trials = min(account.slack, allowed), min(account.trials, allowed)


@compiled
def available(account: np.record, trial: bool) -> float:
    """Return what an action may cost."""
    return float(min(account.trials, account.slack) if trial else account.slack)


@compiled
def lacks(account: np.record, cost: float, trial: bool) -> float:
    """Return the slack missing for an action of this cost; at most 0 if it suffices."""
    return cost - available(account, trial)


@compiled
def lacks_costly(account: np.record, spent: float, cost: float, trial: bool) -> float:
    """Return the slack missing for a costly source of this cost, after ``spent`` in this step, that leaves ``RESERVE``
    to score its draft; at most 0 if it suffices."""
    own = 0.0 if account.slack > START_SLACK else (cost - account.costly) / COSTLY_SHARE
    return max(own, lacks(account, spent + cost + RESERVE, trial))


@compiled
def book_plain(account: np.record, overhead: float, progress: float) -> None:
    """Book steps without drafts. Deciding counts as lost but leaves the slack, which could not recover from 0."""
    _book(account, overhead, progress, 0.0, SHARE * progress)


@compiled
def book(account: np.record, cost: float, progress: float, trial: bool, costly: float, hopeful: bool) -> None:
    """Book a step; ``costly``: what a costly source lost, ``hopeful``: whether that was expected to pay."""
    loss = cost - progress
    account.costly -= costly
    if trial:
        account.trials -= max(loss, 0.0)
    elif not hopeful:
        account.trials -= costly
    _book(account, loss, progress, loss, SHARE * min(cost, progress))  # what is already fast has less to lose


@compiled
def _book(account: np.record, lost: float, progress: float, paid: float, income: float) -> None:
    made = account.progress + progress
    account.lost, account.progress = account.lost + lost, made
    account.slack = min(account.slack + SHARE * progress - paid, SAVED)
    account.trials = min(account.trials + income, TRIAL_SLACK + SHARE * made)
    account.costly = min(account.costly + COSTLY_SHARE * income, TRIAL_SLACK)


@compiled
def decoding_cost(address: int, rows: int, cached: float) -> float:
    """Return the cost of a pass over one token of each row; ``cached``: their cached tokens in all."""
    policy = policy_at(address)
    return float(policy.passes[rows] + policy.account[0].per_row * (rows - 1) + policy.looks[1] * cached)


@compiled
def cost_to_go(address: int, step: np.record, rows: RecordArray) -> float:
    """Return the cost of plain decoding until all rows have their tokens, less ``got`` ones, as the module says."""
    count, cached, total, before = len(rows), step.cached, 0.0, 0
    for number in range(count):
        left, at = max(rows[number].left - rows[number].got, 0), number
        total += left
        while at > 0 and _ends_before(left, rows[number].cached, rows[rows[at - 1].place]):
            rows[at].place = rows[at - 1].place
            at -= 1
        rows[at].place = number
    if not step.closed:
        return total * decoding_cost(address, count, cached) / count
    total = 0.0
    for number in range(count):
        row = rows[rows[number].place]
        left = max(row.left - row.got, 0)
        total += (left - before) * decoding_cost(address, count - number, cached)
        before, cached = left, cached - row.cached
    return total


@compiled
def _ends_before(left: int, cached: int, row: np.record) -> bool:
    other = max(row.left - row.got, 0)
    return bool(left < other or (left == other and cached < row.cached))


@compiled
def value_tokens(address: int, step: np.record, rows: RecordArray) -> None:
    """Set what tokens of each row save, in plain passes: ``each`` in any row, and ``last`` beyond that in the one that
    ends last. A ``weight`` in the sum over rows fades by a factor e with ``spread`` tokens."""
    policy = policy_at(address)
    count, stretch, together, longest = len(rows), policy.account[0].stretch, step.alone, 0.0
    for row in rows:
        longest = max(longest, row.left / row.gain)
    wide, step.fades = math.sqrt(longest) + 1e-9, 0
    for row in rows:
        row.each, row.last, row.weight, row.spread = together / count * stretch / row.gain, 0.0, 1.0, 1.0
        if step.closed and count > 1:
            alone = decoding_cost(address, 1, float(row.cached))
            share = max(together - alone, 0.0) / (count - 1)
            row.each, row.last = share * stretch / row.gain, (alone - share) * stretch / row.gain
            row.weight, row.spread = math.exp((row.left / row.gain - longest) / wide), wide * row.gain
            step.fades |= row.last != 0.0


@compiled
def value_later(step: np.record, rows: RecordArray) -> None:
    """Set what a further token of each row saves ``later``, after ``ahead`` ones."""
    total = 0.0
    for row in rows:
        row.fading = row.weight * math.exp(-row.ahead / row.spread)
        total += row.fading
    for row in rows:
        row.later = row.each + row.last * row.fading / total if step.fades else row.each
