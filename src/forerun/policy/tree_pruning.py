"""Prune trees to the nodes worth scoring: those whose tokens are worth more than they cost.

A node's probability is the drafter's, calibrated by how often similar nodes were correct (``calibration.py``), scored
or not: the committed tokens show it. Under rejection sampling, the decision must not depend on the drawn token's own
probability, and only scoring shows whether it is accepted. So nodes with ``q`` are judged by depth, and count only if
scored.
"""

from __future__ import annotations

import math

import numpy as np

from forerun.core.compiling import compiled
from forerun.core.records import RecordArray
from forerun.core.tree import ROOT, IntArray
from forerun.policy.calibration import (
    DEPTH_GROUPS,
    ODDS_GROUPS,
    CalibrationTable,
    calibrated,
    chance_at_depth,
    count,
    fit_odds,
    forget,
    group_of,
    odds_of,
)
from forerun.policy.policy_tables import NodeTable, policy_at
from forerun.policy.step_costs import node_share, scored_cost

NOT_JUDGED, ALL_JUDGED, SCORED_JUDGED = range(3)
"""``judged`` of a row."""


@compiled
def _add_tree(table: NodeTable, calibration: CalibrationTable, row: np.record, vocabulary: int) -> None:
    begin = row.begin
    for at in range(begin, begin + row.proposed):
        above, depth, chance, before = ROOT, 1, 1.0, 1.0
        if table.parents[at] != ROOT:
            above = begin + table.parents[at]
            depth, chance, before = table.depths[above] + 1, table.chances[above], max(table.stated[above], 1e-12)
        table.parents[at], table.depths[at], table.kept[at] = above, depth, -1
        if row.stated:
            table.odds[at] = odds_of(table.stated[at] / before)
            table.groups[at] = group_of(table.odds[at])
            chance *= calibrated(calibration, table.odds[at])
        else:
            table.odds[at], table.groups[at] = 0.0, ODDS_GROUPS + min(depth, DEPTH_GROUPS) - 1
            chance *= chance_at_depth(calibration, depth)
        possible = depth < row.left and 0 <= table.tokens[at] < vocabulary
        table.chances[at] = chance if possible else 0.0


@compiled
def _sort(table: NodeTable, row: np.record) -> None:
    """Sort a row's nodes by chance, parents before children."""
    order, chances = table.order, table.chances
    for node in range(row.begin, row.begin + row.proposed):
        at = node
        while at > row.begin and chances[order[at - 1]] < chances[node]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = node


@compiled
def _best_row(table: NodeTable, rows: RecordArray, look: float) -> int:
    """Return the row whose next node is worth most, or -1 if none can be accepted; ``look``: cost of a node per cached
    token."""
    best, most, total = -1, 0.0, 0.0
    for row in rows:
        total += row.fading
    for number in range(len(rows)):
        row = rows[number]
        if row.kept < row.proposed:
            chance = table.chances[table.order[row.begin + row.kept]]
            own = chance * (row.each + row.last * row.fading / total) - look * row.cached
            if chance > 0.0 and (best < 0 or own > most):
                best, most = number, own
    return best


@compiled
def _gain(rows: RecordArray, number: int, tokens: float) -> float:
    """Return what a row's expected ``tokens`` save, and let its weight fade."""
    row, total = rows[number], 0.0
    for each in rows:
        total += each.fading
    share, left = row.fading / total, math.exp(-tokens / row.spread)
    row.fading *= left
    return float(row.each * tokens - row.last * row.spread * math.log(1.0 - share * (1.0 - left)))


@compiled
def _extract(table: NodeTable, rows: RecordArray, picked: int) -> None:
    """Write the trees of the first ``picked`` nodes."""
    for number in range(picked):
        table.kept[table.picks[number]] = 0
    for row in rows:
        begin, size = row.begin, 0
        for node in range(begin, begin + row.proposed):
            if table.kept[node] >= 0:
                above, table.kept[node] = table.parents[node], size
                table.kept_tokens[begin + size] = table.tokens[node]
                table.kept_parents[begin + size] = ROOT if above == ROOT else table.kept[above]
                size += 1
        row.kept = size


@compiled
def prune(address: int, step: np.record, rows: RecordArray, vocabulary: int, slack: float) -> None:
    """Keep the nodes whose tokens are worth more than they cost, at most ``slack``; other than the ``vocabulary``'s
    tokens and their descendants cannot be accepted. The first columns of ``NodeTable`` hold the rows' trees."""
    policy = policy_at(address)
    table, passes, looks = policy.nodes, policy.passes, policy.looks
    for row in rows:
        row.scored, row.kept, row.fading = row.pending, 0, row.weight
        _add_tree(table, policy.calibration, row, vocabulary)
        _sort(table, row)
    look = node_share(address) * (looks[-1] - looks[1]) / max(len(looks) - 2, 1)
    saved, expected, looking, most, number = 0.0, 0.0, 0.0, 0.0, 0
    step.nodes, step.worth, step.expected, step.added = 0, 0.0, 0.0, 0.0
    while True:
        best = _best_row(table, rows, look)
        if best < 0:
            break
        row = rows[best]
        table.picks[number] = table.order[row.begin + row.kept]
        chance = table.chances[table.picks[number]]
        expected += chance
        saved += _gain(rows, best, chance)
        looking += row.cached * (looks[row.scored + 1] - looks[row.scored])
        row.scored += 1
        row.kept += 1
        number += 1
        added = passes[step.tokens + number] - passes[step.tokens] + looking
        cost = scored_cost(address, step, added)
        if cost > slack:
            break
        if saved - cost > most:
            most = saved - cost
            step.nodes, step.worth, step.expected, step.added = number, saved, expected, added
    _extract(table, rows, step.nodes)


@compiled
def _judge_row(table: NodeTable, calibration: CalibrationTable, row: np.record, tokens: IntArray) -> int:
    """Count a row's nodes that its committed tokens decide; return how many are correct."""
    depths, right = table.order, 0  # depth of each correct node, else 0
    for node in range(row.begin, row.begin + row.proposed):
        above = table.parents[node]
        depth = 0 if above == ROOT else depths[above]
        depths[node] = 0
        if (above != ROOT and depth == 0) or depth >= len(tokens):
            continue
        if row.judged == SCORED_JUDGED and table.kept[node] < 0:
            continue
        if right == depth and table.tokens[node] == tokens[depth]:
            depths[node] = depth + 1
            right += 1
        count(calibration, table.groups[node], table.odds[node], depths[node] > 0)
    return right


@compiled
def judge(address: int, rows: RecordArray, tokens: IntArray) -> None:
    """Calibrate by what the pruned trees' rows committed: ``tokens``, ``got`` ones of each judged row."""
    policy = policy_at(address)
    at, judged = 0, 0
    for row in rows:
        if row.judged != NOT_JUDGED:
            row.right = _judge_row(policy.nodes, policy.calibration, row, tokens[at : at + row.got])
            at, judged = at + row.got, judged + row.proposed
    if judged:
        fit_odds(policy.calibration)
        forget(policy.calibration)
