"""Multi-stage retrieval and the multi-branch draft (Lookahead, sections 4.2 and 4.3.2), compiled.

A stage matches a context of one length in two indexes, the request's private one and the shared one, and takes nodes
of the two subtries, merged, by weighted frequency. A node never outweighs its parent, so a frontier that yields the
heaviest node next finds them parents first and visits nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.ngrams import CHILD, COUNT, NEXT, TOKEN, Int32Array, Ngrams, compiled, find, locate
from forerun.tree import ROOT, IntArray

WIDTH = 96
"""Children looked at per node and index, most recently seen first; wider nodes are slow to read whole, and reading 256
made no draft better."""
DISCOUNT, DOUBT, FADE = 0.75, 0.5, 0.8
"""Taken off a weight, added to the context's, and the factor per level: the estimate that ``_chance`` makes."""
P, S, ABOVE, DEPTH = range(4)
"""Columns of ``Frontier.entries``: private node, shared node (0: none), parent in the draft, depth there."""
HEAD, TAIL = range(2)
"""Entries of ``Frontier.ends``."""


class Draft(NamedTuple):
    """The draft so far: int64, int64 and float64, ``[budget]``; ``ROOT`` marks what follows the context directly."""

    tokens: IntArray
    parents: IntArray
    probability: npt.NDArray[np.float64]


def cut(draft: Draft, size: int) -> Draft:
    """The first ``size`` nodes."""
    return Draft(draft.tokens[:size], draft.parents[:size], draft.probability[:size])


class Frontier(NamedTuple):
    """Candidates by weight, heaviest first, earlier ones before equal ones; at most ``bound`` of them are kept.

    Attributes:
        weights: float64 ``[4 * budget]``.
        entries: int32 ``[4 * budget, 4]``.
        ends: first candidate and the end, int64 ``[2]``.
        bound: what has this many candidates before it is never reached.
    """

    weights: npt.NDArray[np.float64]
    entries: Int32Array
    ends: IntArray
    bound: int


@compiled
def _offer(frontier: Frontier, weight: float, p: int, s: int, parent: int, depth: int) -> None:
    """Sort a candidate in."""
    weights, entries, ends = frontier.weights, frontier.entries, frontier.ends
    at = ends[TAIL]
    if weight <= 0:
        return
    if at - ends[HEAD] == frontier.bound:
        at -= 1
        if weight <= weights[at]:
            return
    else:
        ends[TAIL] += 1
    while at > ends[HEAD] and weights[at - 1] < weight:
        weights[at] = weights[at - 1]
        entries[at] = entries[at - 1]
        at -= 1
    weights[at] = weight
    entries[at, P], entries[at, S], entries[at, ABOVE], entries[at, DEPTH] = p, s, parent, depth


@compiled
def _expand(
    private: Ngrams, shared: Ngrams, prompt_weight: float, frontier: Frontier, p: int, s: int, parent: int, depth: int
) -> None:
    """Offer the children of private node ``p`` and shared node ``s``, equal tokens as one."""
    own, common = private.nodes, shared.nodes
    child = own[p, CHILD] if p != 0 else 0
    for _ in range(WIDTH):
        if child == 0:
            break
        twin = find(shared, s, own[child, TOKEN]) if s != 0 else 0
        weight = prompt_weight * own[child, COUNT] + (common[twin, COUNT] if twin != 0 else 0)
        _offer(frontier, weight, child, twin, parent, depth)
        child = own[child, NEXT]
    child = common[s, CHILD] if s != 0 else 0
    for _ in range(WIDTH):
        if child == 0:
            break
        if p == 0 or find(private, p, common[child, TOKEN]) == 0:
            _offer(frontier, common[child, COUNT], 0, child, parent, depth)
        child = common[child, NEXT]


@compiled
def _known(draft: Draft, size: int, parent: int, token: int) -> int:
    """The child of ``parent`` with ``token`` in the draft, or ``ROOT``."""
    for node in range(parent + 1, size):
        if draft.parents[node] == parent and draft.tokens[node] == token:
            return node
    return ROOT


@compiled
def _chance(weight: float, total: float, depth: int) -> float:
    """Estimate that a node of ``weight`` under a context of weight ``total`` is accepted.

    A relative frequency, absolutely discounted and fading with depth. On replayed answers (GSM8K by GPT-3 6B, MT-bench
    by Vicuna-7B; budgets 64 and 8) it met the rate of acceptance within a third in every class above 0.05; the plain
    relative frequency was three to six times too high.
    """
    share = max(weight - DISCOUNT, weight * (1 - DISCOUNT))
    return share / (max(total, weight) + DOUBT) * FADE ** (depth - 1)


@compiled
def _stage(
    private: Ngrams,
    shared: Ngrams,
    prompt_weight: float,
    frontier: Frontier,
    draft: Draft,
    size: int,
    max_depth: int,
    p: int,
    s: int,
) -> int:
    """Add the subtries of private node ``p`` and shared node ``s`` to the draft; its new size."""
    weights, entries, ends = frontier.weights, frontier.entries, frontier.ends
    total = prompt_weight * private.nodes[p, COUNT] + shared.nodes[s, COUNT]
    ends[:] = 0
    first = size
    _expand(private, shared, prompt_weight, frontier, p, s, ROOT, 1)
    while ends[HEAD] < ends[TAIL] and size < len(draft.tokens):
        at = ends[HEAD]
        ends[HEAD] += 1
        p, s, parent, depth = entries[at]
        token = private.nodes[p, TOKEN] if p != 0 else shared.nodes[s, TOKEN]
        node = _known(draft, first, parent, token) if parent < first else ROOT
        if node == ROOT:
            node = size
            size += 1
            above = 1.0 if parent == ROOT else draft.probability[parent]
            draft.tokens[node], draft.parents[node] = token, parent
            draft.probability[node] = min(_chance(weights[at], total, depth), above)
        if depth < max_depth:
            _expand(private, shared, prompt_weight, frontier, p, s, node, depth + 1)
    return size


@compiled
def retrieve(
    private: Ngrams,
    shared: Ngrams,
    prompt_weight: float,
    context: IntArray,
    draft: Draft,
    bound: int,
    enough: int,
    max_depth: int,
    branch_length: int,
) -> int:
    """Fill a draft, from the longest context that matches to shorter ones until it has ``enough`` nodes.

    Args:
        private: index of the request's prompt, its counts weighted by ``prompt_weight``.
        shared: index of the namespace.
        prompt_weight: see ``private``.
        context: the last tokens before the draft, int64 ``[longest context to match]``.
        draft: receives the nodes; its length is the budget, at least one.
        bound: candidates to keep: the budget for a tree, 1 for the likeliest chain.
        enough: the paper's N_m.
        max_depth: of the draft, in tokens, at least one.
        branch_length: depth of the indexes.

    Returns:
        The number of nodes in the draft.
    """
    room = 4 * len(draft.tokens)
    frontier = Frontier(np.empty(room), np.empty((room, 4), np.int32), np.zeros(2, np.int64), bound)
    size = 0
    for length in range(len(context), 0, -1):
        tail = context[len(context) - length :]
        p, s = locate(private, tail), locate(shared, tail)
        if p != 0 or s != 0:
            deepest = min(max_depth, branch_length - length)
            size = _stage(private, shared, prompt_weight, frontier, draft, size, deepest, p, s)
        if size >= enough:
            break
    return size


@compiled
def unmerge(draft: Draft, size: int) -> Draft:
    """The draft's branches side by side, likeliest leaf first, as far as the budget goes (section 4.2.1)."""
    tokens, parents, probability = draft
    inner = np.zeros(size, np.bool_)
    for node in range(size):
        if parents[node] != ROOT:
            inner[parents[node]] = True
    leaves = np.flatnonzero(~inner)
    leaves = leaves[np.argsort(-probability[leaves], kind="mergesort")]
    out = Draft(np.empty_like(tokens), np.empty_like(parents), np.empty_like(probability))
    path = np.empty(size, np.int64)
    end = 0
    for leaf in leaves:
        length = 0
        node = int(leaf)
        while node != ROOT:
            path[length] = node
            length += 1
            node = int(parents[node])
        for step in range(min(length, len(tokens) - end)):
            node = int(path[length - 1 - step])
            out.tokens[end], out.probability[end] = tokens[node], probability[node]
            out.parents[end] = ROOT if step == 0 else end - 1
            end += 1
    return Draft(out.tokens[:end], out.parents[:end], out.probability[:end])
