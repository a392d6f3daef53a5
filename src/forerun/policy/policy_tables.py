"""Every table of the policy, and its columns; see ``core.records``. Costs are in plain passes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from forerun.core.array_handles import reader
from forerun.core.records import RecordArray, records
from forerun.core.tree import IntArray
from forerun.policy.calibration import CalibrationTable
from forerun.policy.cost_curve import CostCurve, CostTable, FloatArray

PASSES, DECIDING, PROPOSALS, EXTENSIONS, CHAINS, SMALL_CHAINS, PREPARING = range(7)
"""What is timed: plain passes, deciding, trees of the cheap source, drafts of the costly one, passes that draft chains,
by the target's weights or by a small model, and preparing a request for chains."""
CHEAP, COSTLY = range(2)
"""Sources."""

ACCOUNT = records(
    "plain_measured after_plain since loaded",
    floats="slack trials costly lost progress stretch tokens spent per_row",
)
"""``Policy.account``: one row.

- ``slack``, ``trials``, ``costly``, ``lost``, ``progress``: see ``ledger``.
- ``stretch``: recent cost of a step over a plain one.
- ``tokens``, ``spent``: recent tokens per row, and their cost; both fade.
- ``per_row``: of the cost curve.
- ``loaded``: whether a plain pass was measured at load; ``plain_measured``, ``after_plain``: whether one was since, and
  whether the last pass was one; ``since``: steps since the last.
"""

TIME = records(
    "count guessed", floats="scale start each log_scale prior_start prior_each noise p00 p01 p02 p11 p12 p22"
)
"""``Policy.times``: a time by size, ``scale * (start + each * size)``; see ``time_model``.

- ``count``: measurements; ``guessed``: whether ``scale`` is in plain passes yet.
- ``p00`` to ``p22``: covariance of the scale's logarithm, ``start`` and ``each``.
"""

STEP_RECORD = records(
    "waiting drafts tokens closed decodes fades due proposing extending trial costly_trial costly trusted nodes",
    floats="cached plain alone cost_to_go fixed lacks reserved worth expected added passes",
)
"""``Policy.step``: the step under way, one row.

- ``waiting``, ``drafts``: rows, and those that may have a draft, which come first; ``cached``: cached tokens of all.
- ``tokens``, ``closed``, ``decodes``: see ``PassShape``.
- ``plain``, ``alone``: cost of the pass without drafts, and without prompts either; ``cost_to_go``: of all rows;
  ``fades``: whether further tokens of one row alone are worth less; ``fixed``: cost of having nodes at all.
- ``due``: whether a plain step is due to be measured.
- ``proposing``, ``extending``: rows for which the cheap and the costly source draft; ``trial``, ``costly_trial``:
  whether drafts, or those of the costly source, are not expected to pay. ``lacks``: slack missing for the cheapest
  action that was rejected for lack of it.
- ``costly``: whether the costly source may propose now or soon; ``trusted``: whether its drafts surely pay;
  ``reserved``: slack that cheap sources leave to it.
- ``nodes``, ``worth``, ``expected``, ``added``: of the pruned trees: their nodes, what their tokens save, how many are
  expected to be accepted, and what they add to the pass by the curve.
- ``passes``: guessed cost of a pass that drafts a token of a chain; 0 without chains.
"""

ROW = records(
    "left cached pending budget limit known kind kind_extended proposes extends pays place",
    "begin proposed stated scored kept nodes got judged right before",
    floats="gain each last weight spread fading value later ahead slope least sure surer longest promise added",
)
"""``Policy.rows``: the rows that wait for the step.

- ``left``, ``cached``: tokens to generate, and cached ones; ``pending``: committed tokens that the pass scores;
  ``budget``: maximum nodes, and ``limit``: that the slack affords. ``place``: order by ``left``.
- ``known``, ``kind``: length of the known suffix, -1 if unknown, and its class; ``promise``, ``kind_extended``:
  expected accepted tokens of the tree or chain, and the tree's class for the costly source. ``proposes``, ``extends``:
  whether the cheap and the costly source draft. ``pays``: scratch memory.
- ``gain``: recent tokens per step. ``each``, ``last``, ``weight``, ``spread``: what tokens save; see ``ledger``.
  ``value``: what the first one saves; ``later``: one after ``ahead`` more.
- ``slope``: cost of a node; ``least``: probability under which a node cannot pay.
- ``sure``, ``surer``: acceptance rate of chains, and that plus a standard error; ``longest``: of the next chain.
- ``begin``, ``proposed``, ``stated``: the tree's first node in ``NodeTable``, its nodes, and whether it states
  probabilities. ``scored``, ``kept``, ``fading``: counts and weight while pruning.
- ``nodes``, ``got``: nodes scored, and tokens committed. ``judged``: whether no, all or only scored nodes show whether
  they were correct; ``right``, ``before``: how many were, and before the costly source extended the tree. ``added``:
  tokens that it added, less the cost of its nodes.
"""


class NodeTable(NamedTuple):
    """The nodes of all trees, concatenated; each column ``[n]``.

    Attributes:
        parents: index of each node's parent in its tree, or ``ROOT``; then in the table.
        stated: probability of acceptance, if stated; ``odds``: its log-odds after an accepted parent.
        depths: 1 for a child of the root; ``groups``: index into a ``CalibrationTable``.
        chances: probability of acceptance; 0 if impossible.
        kept: index in the scored tree, or -1; ``kept_tokens``, ``kept_parents``: of that tree, from ``begin`` on.
        order, picks: each row's nodes by chance, and all rows' by worth, best first.
    """

    tokens: IntArray
    parents: IntArray
    stated: FloatArray
    odds: FloatArray
    depths: IntArray
    groups: IntArray
    chances: FloatArray
    kept: IntArray
    kept_tokens: IntArray
    kept_parents: IntArray
    order: IntArray
    picks: IntArray

    @classmethod
    def allocate(cls, nodes: int) -> NodeTable:
        columns: dict[str, Any] = {name: np.zeros(nodes, np.int64) for name in cls._fields}
        return cls(**columns | {name: np.zeros(nodes) for name in ("stated", "odds", "chances")})


class Policy(NamedTuple):
    """What a ``Choice`` knows.

    Attributes:
        account: ``ACCOUNT`` ``[1]``; ``times``: ``TIME``, by part.
        seconds: first guess of each part, 0 if unknown.
        gains, counts: mean accepted tokens of drafts, and their number, by source and class, ``[2, classes]``.
        passes, looks: see ``CostTable.curves``.
        step, rows, nodes: of the step under way.
    """

    account: RecordArray
    times: RecordArray
    seconds: FloatArray
    gains: FloatArray
    counts: FloatArray
    passes: FloatArray
    looks: FloatArray
    calibration: CalibrationTable
    step: RecordArray
    rows: RecordArray
    nodes: NodeTable

    @classmethod
    def allocate(cls, table: CostTable, gains: FloatArray, counts: FloatArray) -> Policy:
        learned = np.zeros(1, ACCOUNT), np.zeros(PREPARING + 1, TIME), np.zeros(PREPARING + 1), gains, counts
        step, rows = np.zeros(1, STEP_RECORD), np.zeros(16, ROW)
        return cls(*learned, *table.curves(1), CalibrationTable.empty(), step, rows, NodeTable.allocate(64))

    def clear(self) -> None:
        """Forget the step under way."""
        self.step.view(np.int64).fill(0)
        self.rows.view(np.int64).fill(0)


policy_at = reader(Policy.allocate(CostTable(CostCurve.linear(1.0)), np.zeros((2, 1)), np.zeros((2, 1))))
"""Returns the ``Policy`` at an ``address``, by which compiled functions get it."""
