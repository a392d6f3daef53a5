"""The rules by which a step is decided, compiled.

One rule decides: an action is taken if the tokens that it is expected to gain are worth more than it costs, and if the
ledger affords the cost even if every draft is rejected. A tree is proposed if its predicted gain pays, then pruned to
the nodes that pay. A chain is drafted if its net worth exceeds the tree's. What might pay within one standard error is
tried from a part of the slack reserved for trials.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import IntArray
from forerun.policy.calibration import MEMORY
from forerun.policy.cost_curve import FloatArray
from forerun.policy.gains import ROW_WEIGHT, SUFFIXES, class_of, gain_of, paying_nodes, record_gain
from forerun.policy.ledger import (
    RESERVE,
    SHARE,
    available,
    book,
    book_plain,
    cost_to_go,
    decoding_cost,
    lacks,
    lacks_costly,
    open_batch,
    value_later,
    value_tokens,
)
from forerun.policy.policy_tables import CHEAP, COSTLY, DECIDING, EXTENSIONS, PREPARING, PROPOSALS, Policy, policy_at
from forerun.policy.step_costs import (
    asking_cost,
    each_cost,
    pass_cost,
    plain_step_due,
    price_nodes,
    record_asking,
    record_chains,
    record_pass,
    record_plain,
    scored_cost,
    unit_of,
)
from forerun.policy.time_model import record_time
from forerun.policy.tree_pruning import judge, prune

DOUBT = 1.0
"""Standard errors added to the expected gain in trials."""
CHEAP_SHARE = 0.25
"""Share of a plain pass that may be spent on a chain however short earlier ones were, and on any row's proposal."""
PRICE_MARGIN = 0.5
"""Share of a node's price below which sources need not draft; below 1, as calibration may raise a stated probability.
With SmolLM2 and 64 nodes, 0.35, 0.5, 0.7 and 1 lose 0.0, 0.1, 0.2 and 1.5 % of the accepted nodes, and draft 24, 20, 16
and 13 % of all."""
RECENT = 0.1
"""Weight of the last step in recent averages."""
PLAIN_STEPS = 16
"""Maximum steps for which a decision to draft nothing holds; with 0, 8 and 64, simulations agree to 0.0001."""


@compiled
def _under_way(address: int) -> tuple[Policy, RecordArray]:
    """Return a policy, and the rows of its step under way."""
    policy = policy_at(address)
    return policy, policy.rows[: policy.step[0].waiting]


@compiled
def decide(
    address: int,
    given: IntArray,
    gains: FloatArray,
    drafts: int,
    beside: int,
    closed: bool,
    fresh: bool,
    asks: bool,
    extends: bool,
) -> tuple[bool, bool, bool]:
    """Value tokens and price nodes, and choose the rows that propose trees; return ``due``, ``costly`` and ``trusted``
    of the step.

    Args:
        address: of a ``Policy``.
        given: ``left``, ``cached``, ``pending``, ``budget`` and ``known`` of all rows; ``gains``: ``gain``.
        drafts, beside, closed: of the step.
        fresh: whether it is the first step of a batch.
        asks, extends: whether there are a cheap and a costly source.
    """
    policy = policy_at(address)
    account, step, count = policy.account[0], policy.step[0], len(gains)
    rows = policy.rows[:count]
    if fresh:
        account.stretch = 1.0
    step.waiting, step.drafts, step.tokens, step.closed = count, drafts, beside, closed
    for number in range(count):
        row = rows[number]
        row.left, row.cached, row.pending = given[number], given[count + number], given[2 * count + number]
        row.budget, row.known, row.gain = given[3 * count + number], given[4 * count + number], gains[number]
        step.tokens += row.pending
        step.cached += row.cached
    step.decodes = step.tokens == len(rows)
    step.alone = decoding_cost(address, len(rows), step.cached)
    step.plain = step.alone if step.decodes else pass_cost(address, step, rows)
    value_tokens(address, step, rows)
    value_later(step, rows)
    step.cost_to_go = cost_to_go(address, step, rows)
    if fresh:
        open_batch(account, step.cost_to_go)
    price_nodes(address, step, rows)
    for row in rows:
        row.value = row.later
        row.kind = class_of(CHEAP, float(row.known if row.known >= 0 else SUFFIXES[0]))
    step.lacks = math.inf
    if extends:
        _consider_costly(address, step, rows)
    step.due = step.decodes and plain_step_due(address)
    if asks and not step.due:
        step.proposing, step.trial, missing = _choose_proposers(address, step, rows, 0)
        step.trial &= step.proposing > 0
        step.lacks = min(step.lacks, missing)
    _limit(address, step, rows)
    return step.due != 0, step.costly != 0, step.trusted != 0


@compiled
def _limit(address: int, step: np.record, rows: RecordArray) -> None:
    """Limit each row's ``budget`` to what the slack affords, and state the probability under which nodes cannot pay."""
    policy = policy_at(address)
    cheapest = math.inf
    for number in range(step.drafts):
        cheapest = min(cheapest, rows[number].slope)
    affordable = available(policy.account[0], step.trial != 0) - asking_cost(address, PROPOSALS, step.proposing)
    most = max(1, int(affordable / max(cheapest, 1e-9)))
    for number in range(step.drafts):
        row = rows[number]
        row.least, row.limit = PRICE_MARGIN * min(row.slope / row.value, 1.0), min(row.budget, most)


@compiled
def _consider_costly(address: int, step: np.record, rows: RecordArray) -> None:
    """Decide whether the costly source may propose now or soon; if not, it needs no hidden states. It is kept ready if
    it would surely pay at the pace of plain steps."""
    policy = policy_at(address)
    account, cost, most, total = policy.account[0], asking_cost(address, EXTENSIONS, 1), 0.0, 0.0
    for number in range(step.drafts):
        most = max(most, rows[number].value)
        total += rows[number].value
    pays = gain_of(address, COSTLY, 0, 0.0, 0.0) * most > cost
    missing = lacks_costly(account, 0.0, cost, not pays)
    sure = gain_of(address, COSTLY, 0, 0.0, -DOUBT) * max(total, step.plain)
    step.trusted = sure > asking_cost(address, EXTENSIONS, step.drafts)
    step.costly = step.trusted or missing <= 0.0
    step.reserved = cost + RESERVE if pays and cost <= account.costly else 0.0
    if not step.costly:
        step.lacks = missing


@compiled
def _choose_proposers(address: int, step: np.record, rows: RecordArray, least_kind: int) -> tuple[int, bool, float]:
    """Choose the rows that propose trees: those whose trees pay together, as expected, or else with doubt, as a trial.
    Their classes are at least ``least_kind``.

    Returns the number of rows, 0 if none pay or the slack does not cover them; whether it is a trial; and the slack
    missing for others. Nodes that pay are included in what is to be covered, one of each row: otherwise the proposal
    would be lost, again and again.
    """
    policy = policy_at(address)
    account, lacking = policy.account[0], math.inf
    each, start = each_cost(address, PROPOSALS), asking_cost(address, PROPOSALS, 1) - each_cost(address, PROPOSALS)
    for row in rows:
        row.ahead, row.proposes = 0.0, 0
        if row.budget > 0:
            row.ahead = gain_of(address, CHEAP, max(row.kind, least_kind), row.slope / row.value, 0.0) / 2
    value_later(step, rows)
    for doubt in (0.0, DOUBT):
        count, worth, nodes = 0, 0.0, 0.0
        for row in rows:
            price, kind = row.slope / row.later, max(row.kind, least_kind)
            net = row.later * gain_of(address, CHEAP, kind, price, doubt) - each if row.budget > 0 else 0.0
            row.proposes = net > 0.0
            if row.proposes:
                count, worth = count + 1, worth + net
                nodes += row.slope if paying_nodes(address, CHEAP, kind, price, doubt) else 0.0
        if count and worth > start + step.fixed:
            cost = start + each * count + max(step.fixed, 0.0) + nodes + step.reserved
            missing = lacks(account, cost, doubt > 0.0)
            if missing <= 0.0:
                return count, doubt > 0.0, 0.0
            lacking = min(lacking, missing)
    return _try_hopeless(address, step, rows, least_kind, lacking)


@compiled
def _try_hopeless(
    address: int, step: np.record, rows: RecordArray, least_kind: int, lacking: float
) -> tuple[int, bool, float]:
    """Choose rows whose trees are not expected to pay, as a trial, if the slack leaves ``RESERVE``."""
    policy = policy_at(address)
    count = 0
    for row in rows:
        known = max(row.kind, least_kind) > 0 or asking_cost(address, PROPOSALS, 1) < CHEAP_SHARE
        row.proposes = row.budget > 0 and known
        count += row.proposes
    if count:
        cost = asking_cost(address, PROPOSALS, count) + step.reserved + RESERVE
        missing = lacks(policy.account[0], cost, True)
        if missing <= 0.0:
            return count, True, min(lacking, missing)
        lacking = min(lacking, missing)
    for row in rows:
        row.proposes = 0
    return 0, True, lacking


@compiled
def choose_extensions(address: int) -> int:
    """Choose the rows, among those that may be extended (``extends``), that a costly source drafts for, by the expected
    nodes of their trees (``promise``); return their number."""
    policy, rows = _under_way(address)
    step = policy.step[0]
    each, start = each_cost(address, EXTENSIONS), asking_cost(address, EXTENSIONS, 1) - each_cost(address, EXTENSIONS)
    spent, able = asking_cost(address, PROPOSALS, step.proposing), 0
    for row in rows:
        row.kind_extended, row.ahead = class_of(COSTLY, row.promise), 0.0
        if row.extends:
            able += 1
            row.ahead = row.promise + gain_of(address, COSTLY, row.kind_extended, 0.0, 0.0) / 2
    value_later(step, rows)
    count = 0
    for doubt in (0.0, DOUBT):
        count, worth = 0, 0.0
        for row in rows:
            net = row.later * gain_of(address, COSTLY, row.kind_extended, 0.0, doubt) - each
            row.pays = row.extends and net > 0.0
            count, worth = count + row.pays, worth + (net if row.pays else 0.0)
        step.costly_trial = doubt > 0.0
        cost = start + each * count
        if count and worth > start and lacks_costly(policy.account[0], spent, cost, doubt > 0.0) <= 0.0:
            break
        count = 0
    if not count and able:
        missing = lacks_costly(policy.account[0], spent, start + each * able, True)
        step.lacks = min(step.lacks, missing)
        count = able if missing <= 0.0 else 0
        for row in rows:
            row.pays = row.extends and missing <= 0.0
    for row in rows:
        row.extends = row.pays and count > 0
    step.extending = count
    step.trial |= count > 0 and not step.proposing and step.costly_trial
    return count


@compiled
def prune_trees(
    address: int, given: IntArray, vocabulary: int, limited: bool
) -> tuple[int, float, float, float, float]:
    """Prune trees; see ``tree_pruning.prune``. Return ``nodes``, ``worth``, ``expected`` and ``added`` of the step, and
    the cost.

    Args:
        given: ``begin`` of each row with a tree, the end of the last tree, and ``stated`` of each.
        limited: whether the slack limits what nodes cost.
    """
    policy, rows = _under_way(address)
    step = policy.step[0]
    trees, slack = len(given) // 2, math.inf
    for number in range(trees):
        row = rows[number]
        row.begin, row.proposed = given[number], given[number + 1] - given[number]
        row.stated = given[trees + 1 + number]
    if limited:
        slack = max(available(policy.account[0], step.trial != 0) - _asked(address, step), 0.0)
    prune(address, step, rows, vocabulary, slack)
    cost = scored_cost(address, step, step.added) if step.nodes else 0.0
    return int(step.nodes), float(step.worth), float(step.expected), float(step.added), cost


@compiled
def _asked(address: int, step: np.record) -> float:
    """Return the cost of the step's proposals."""
    return asking_cost(address, PROPOSALS, step.proposing) + asking_cost(address, EXTENSIONS, step.extending)


@compiled
def _uniform_cost(address: int, step: np.record, rows: RecordArray, nodes: int) -> float:
    """Return the cost of scoring so many nodes of each row."""
    for number in range(step.drafts):
        rows[number].nodes = nodes
    return scored_cost(address, step, pass_cost(address, step, rows) - step.plain)


@compiled
def chain_length(address: int, start: float, each: float, most: int, stops_early: bool) -> int:
    """Choose the draft length of chains, up to ``most``, after the step's tree was pruned; 0 if the tree or nothing is
    better. Set by row the probability of full acceptance at which another token does not pay (``least``).

    Args:
        start, each: cost of drafting a chain, and of each of its tokens.
    """
    policy, rows = _under_way(address)
    step = policy.step[0]
    account, spent, longest = policy.account[0], _asked(address, step), 0.0
    tree = step.worth - scored_cost(address, step, step.added) if step.nodes else 0.0
    first = _uniform_cost(address, step, rows, 1)
    further = each + (_uniform_cost(address, step, rows, most) - first) / max(most - 1, 1)
    for row in rows:
        row.ahead = 0.0
        longest = max(longest, row.longest)
        row.least = further / step.drafts / row.value
    longest = max(longest, CHEAP_SHARE * step.alone / max(each, 1e-9))
    for trial in (False, True):
        best, furthest, net = 0, 0, max(tree, 0.0)
        for row in rows:
            row.promise = 0.0
        for length in range(1, most + 1):
            saved, cost = _saved(step, rows, length, trial), start + each * length
            cost += _uniform_cost(address, step, rows, length)
            if length <= longest and cost <= available(account, trial) - spent:
                furthest = length
                if saved - cost > net:
                    best, net = length, saved - cost
        if best:
            step.trial = trial
            return furthest if stops_early and not trial else best
    if tree != 0.0 or lacks(account, start + each + first + spent + RESERVE, True) > 0.0:
        return 0
    step.trial = True
    for row in rows:
        row.least = 0.0
    return 1


@compiled
def _saved(step: np.record, rows: RecordArray, length: int, trial: bool) -> float:
    """Return what the accepted tokens of chains of this length save, called with lengths 1, 2, ..."""
    for number in range(step.drafts):
        row = rows[number]
        row.promise += (row.surer if trial else row.sure) ** length
        row.ahead = row.promise / 2
    value_later(step, rows)
    total = 0.0
    for number in range(step.drafts):
        total += rows[number].later * rows[number].promise
    return total


@compiled
def hold(address: int, most: float, can_tell: bool) -> tuple[int, int]:
    """Return for how many steps, at most ``most``, a decision to draft nothing holds: until the slack has grown by what
    it lacked, or a row promises enough; and the known suffix at which a row of a lower class would propose, 0 if none
    would. ``can_tell``: whether all known suffixes are known."""
    policy, rows = _under_way(address)
    step = policy.step[0]
    income, least = SHARE * step.plain, len(SUFFIXES)
    count = int(min(step.lacks / income, PLAIN_STEPS, most))
    if count <= 0 or not can_tell:
        return count, 0
    for number in range(step.drafts):
        least = min(least, rows[number].kind)
    for kind in range(least + 1, len(SUFFIXES) + 1):
        proposing, _, missing = _choose_proposers(address, step, rows, kind)
        if proposing or missing < count * income:
            return count, SUFFIXES[kind - 1]
    return count, 0


@compiled
def learn(address: int, given: IntArray, seconds: FloatArray, part: int, plain: bool) -> None:
    """Update from a step, and book it.

    Args:
        given: ``got``, ``nodes`` and ``judged`` of the rows that may have a draft; then the judged rows' tokens.
        seconds: of deciding, of proposing, of the costly source, of drafting chains, and of the pass with verifying.
        part: whose time the chains are.
        plain: whether nothing was drafted.
    """
    policy, rows = _under_way(address)
    step = policy.step[0]
    account, drafts, nodes, got = policy.account[0], step.drafts, 0, 0
    for number in range(len(rows)):
        row = rows[number]
        row.got = 1
        if number < drafts:
            row.got, row.nodes, row.judged = given[number], given[drafts + number], given[2 * drafts + number]
        nodes, got = nodes + row.nodes, got + row.got
        row.gain += ROW_WEIGHT * (row.got - row.gain)
    judge(address, rows, given[3 * drafts :])
    _record_gains(address, rows)
    added = pass_cost(address, step, rows) - step.plain if nodes else 0.0
    credible = record_pass(address, step, added, seconds[4], nodes == 0) if step.decodes else 0.0
    cost = 0.0 if plain else step.alone + (scored_cost(address, step, added) if nodes else 0.0)
    unit, costly = unit_of(address), 0.0
    if unit > 0.0:  # without a measurement, the curve is believed
        cost = credible / unit if credible > 0.0 and nodes else cost
        cost += record_asking(address, DECIDING, seconds[0], 0)
        if step.proposing:
            cost += record_asking(address, PROPOSALS, seconds[1], step.proposing)
        if step.extending:
            cost += record_asking(address, EXTENSIONS, seconds[2], step.extending)
            costly = seconds[2] / unit
        if step.passes > 0.0:
            cost += record_chains(address, step, part, seconds[3], nodes / step.drafts)
    for row in rows:
        costly -= row.added * row.value if row.extends else 0.0
    progress = step.cost_to_go - cost_to_go(address, step, rows)
    stretch = 1.0 + cost if plain else cost / step.alone
    if plain:
        book_plain(account, cost, progress)
    else:
        book(account, cost, progress, step.trial, max(costly, 0.0), not step.costly_trial)
    account.stretch += RECENT * (stretch - account.stretch)
    account.tokens = MEMORY * account.tokens + got / len(rows)
    account.spent = MEMORY * account.spent + (1.0 if plain else stretch)


@compiled
def _record_gains(address: int, rows: RecordArray) -> None:
    """Record what trees and the costly source gained, in the rows that were judged."""
    for row in rows:
        if row.judged and row.extends:
            record_gain(address, COSTLY, row.kind_extended, row.added)
        if row.judged and row.proposes:
            record_gain(address, CHEAP, row.kind, float(row.before if row.extends else row.right))


@compiled
def learn_preparation(address: int, cost: float, guess: float, free: float) -> None:
    """Update from a request that was prepared for chains, and book the cost beyond ``free``."""
    policy = policy_at(address)
    record_time(policy.times[PREPARING], cost / guess, 0.0, False)
    book(policy.account[0], max(cost - free, 0.0), 0.0, False, 0.0, True)


@compiled
def learn_plain(address: int, count: int, deciding: float, passed: float) -> None:
    """Update from ``count`` steps for which a decision to draft nothing held, and book them; seconds of checking
    (``deciding``) and of the passes."""
    policy, rows = _under_way(address)
    step = policy.step[0]
    account, unit = policy.account[0], unit_of(address)
    cost = deciding / unit if unit > 0.0 else 0.0
    record_plain(address, step.plain, passed / count)
    book_plain(account, cost, count * step.plain)
    for row in rows:
        row.gain = 1.0 + (1.0 - ROW_WEIGHT) ** count * (row.gain - 1.0)
    stretch, fade = 1.0 + cost / count, MEMORY**count
    account.stretch = stretch + (1.0 - RECENT) ** count * (account.stretch - stretch)
    share = (1.0 - fade) / (1.0 - MEMORY)
    account.tokens, account.spent = fade * account.tokens + share, fade * account.spent + share
