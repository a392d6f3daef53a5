"""Verification: from a tree and the target's logits to committed tokens. Drafts never change them.

Greedy and coupled sampling share one walk: choose a token at the node, move to the child that equals it, stop if there
is none. SpecInfer calls this naive sampling; with shared noise it accepts nearly as much as the rejection test. Under
``rejection``, chains with ``q`` use the test of Leviathan et al. (2023) and Chen et al. (2023), with the residual
distribution norm(max(p - q, 0)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from forerun.core.block import RowScores
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.sampling import Salt, best_of, draw, uniform
from forerun.core.transfers import BestTokens, FloatArray, Trial, choose_rows, tested
from forerun.core.tree import ROOT, DraftTree, IntArray


@dataclass(frozen=True)
class Verdict:
    """The accepted nodes of a step, from the root down, and its tokens: these drafts and at most one more."""

    path: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Outcome:
    """A verified tree, as passed to ``Source.learn``; or a prompt chunk, which commits no tokens.

    Attributes:
        logits: the target's at the root (row 0) and at node i (row i + 1), ``[n + 1, V]``.
        best: top tokens of each row of logits, if a source wants them and the step's transfer included them.
        states: hidden states of pending tokens and accepted nodes, ``[m, layers * hidden]``, if a source wants them.
        chances: probability of the token chosen at each node, if the step's transfer included them.
    """

    tree: DraftTree
    verdict: Verdict
    logits: torch.Tensor
    best: BestTokens | None = None
    states: torch.Tensor | None = None
    start: int = 0
    chances: FloatArray | None = None

    @property
    def origins(self) -> list[int]:
        """The ``Origin`` of each committed token."""
        drafted: list[int] = self.tree.sources[self.verdict.path].tolist()
        return drafted + [int(Origin.TARGET)] * (len(self.verdict.tokens) - len(drafted))


def verify(tree: DraftTree, logits: torch.Tensor, request: Request, choices: IntArray | None = None) -> Verdict:
    """Commit the accepted path of ``tree``, and the next token, to ``request``.

    Args:
        logits: the target's at the root (row 0) and at node i (row i + 1), ``[n + 1, V]``.
        choices: made on the device for these logits; computed here by default.

    Raises ValueError if a tree with ``q`` is not a chain under rejection sampling.
    """
    q = None if tree.q is None else tested(tree, request)
    if choices is None and not logits.is_cpu:
        choices = choose_rows([tree], [RowScores(logits)], [request])[0].choices
        if choices is None and request.sampler.anywhere:
            logits, q = logits.cpu(), q if q is None else q.cpu()
    if q is not None:
        return _rejection(tree, _OneByOne(q, logits, request) if choices is None else Trial.of(choices), request)
    if choices is None and request.sampler.takes_best:
        return _walk(tree, lambda node: best_of(logits[node + 1]), request)
    if choices is None:
        return _walk(tree, lambda node: request.choose(logits[node + 1]), request)
    tokens: list[int] = choices.tolist()
    return _walk(tree, lambda node: tokens[node + 1], request)


def _walk(tree: DraftTree, choose: Callable[[int], int], request: Request) -> Verdict:
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        token = choose(node)
        tokens.append(token)
        node = tree.children.get((node, token))
        if node is not None:
            path.append(node)
        if request.append(token):
            break
    return Verdict(path, tokens)


def _rejection(tree: DraftTree, test: Trial | _OneByOne, request: Request) -> Verdict:
    tokens: list[int] = []
    for node, token in enumerate(tree.tokens.tolist()):
        p, q = test.chances(node, token)
        never = q <= 0  # then it was not sampled from q
        if never or uniform(request.sampler.seed, len(request), Salt.ACCEPT) * q >= p:
            tokens.append(test.residual(node))
            request.append(tokens[-1])
            return Verdict(list(range(node)), tokens)
        tokens.append(token)
        if request.append(token):
            return Verdict(list(range(node + 1)), tokens)
    tokens.append(test.after())
    request.append(tokens[-1])
    return Verdict(list(range(len(tree))), tokens)


class _OneByOne:
    """A ``Trial`` computed node by node, as the request advances."""

    def __init__(self, q: torch.Tensor, logits: torch.Tensor, request: Request) -> None:
        self._q = pad(q, (0, logits.shape[-1] - q.shape[-1]))  # a draft model may have a smaller vocabulary
        self._logits, self._request = logits, request

    def chances(self, node: int, token: int) -> tuple[float, float]:
        self._p = self._request.scores(self._logits[node]).double().softmax(-1)
        p, q = self._p[token], self._q[node, token]
        if p.is_cpu:
            return float(p), float(q)
        both: tuple[float, float] = tuple(torch.stack([p, q.double()]).tolist())
        return both

    def residual(self, node: int) -> int:
        return _draw_residual(self._p, self._q[node], self._request)

    def after(self) -> int:
        return self._request.choose(self._logits[-1])


def _draw_residual(p: torch.Tensor, q: torch.Tensor, request: Request) -> int:
    residual = (p - q).clamp_min(0)
    if not residual.any():  # p equals q up to rounding, so the rejection was rounding too
        residual = p
    return draw(residual, request.sampler.seed, len(request), Salt.RESIDUAL)
