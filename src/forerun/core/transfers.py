"""Choices from logits that do not lie on a CPU, in one transfer.

Reading a value from another device waits until the device has done all its work. So the choices at all nodes of a tree
are made there, whether a walk will come by or not, and read together, for all rows at once. Where a sampler
needs the ids before a choice (penalties, grammars), the logits are brought to the CPU in one piece, and walked there.
A sampler with processors that may hold something on the model's device chooses there, node by node.

On a CPU nothing of this happens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from forerun.core.pinned import brought
from forerun.core.request import Request
from forerun.core.sampling import Salt, highest_of_rows
from forerun.core.tree import DraftTree, IntArray

log = logging.getLogger(__name__)

NOISE_ROWS = 16
"""Rows of logits that have noise and scores in float64 at the same time: 8 bytes a token each."""


def elsewhere(tensor: torch.Tensor) -> bool:
    """Whether reading a value of it is a transfer."""
    return tensor.device.type != "cpu"


def present(device: torch.device) -> AbstractContextManager[object]:
    """A context in which a GPU is this thread's present one, where kernels that are not torch's own run."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def settle(device: torch.device) -> None:
    """Wait until a device has done its work, so that a clock can be read. Streams that copy beside the present
    one go on. Nothing to do on a CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def carried(vectors: Sequence[torch.Tensor]) -> list[IntArray]:
    """Int64 vectors of one device, brought to the CPU in one transfer."""
    ends = np.cumsum([len(vector) for vector in vectors])
    return np.split(torch.cat(list(vectors)).cpu().numpy(), ends[:-1]) if vectors else []


FloatArray = npt.NDArray[np.float64]


def best_of(logits: torch.Tensor) -> int:
    """The best token of logits ``[V]``; as transformers has it, in float32 at most."""
    return int((logits.float() if logits.dtype == torch.float64 else logits).argmax())


class BestTokens(NamedTuple):
    """The best tokens of rows of logits, best first, int32 ``[n, count]``, and their logits, float32."""

    tokens: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


class RowChoices(NamedTuple):
    """What one transfer brings of a row.

    Attributes:
        choices: the result of ``foretell``; None for a row on a CPU, one whose sampler needs more than logits, and one
            that failed here. It will fail again when it is verified, alone.
        best: the best tokens at the root and at each node; None if none were wanted, or the row is on a CPU.
        chances: the model's probability of each token in ``choices``, before any processor; None unless wanted, or if
            a chain is tested by rejection.
    """

    choices: IntArray | None = None
    best: BestTokens | None = None
    chances: FloatArray | None = None


def foresee(
    trees: Sequence[DraftTree],
    logits: Sequence[object],
    requests: Sequence[Request],
    best: int = 0,
    chances: bool = False,
) -> list[RowChoices]:
    """Everything that a step needs of each row's logits, in one transfer for all of them.

    Args:
        trees, requests: of the rows.
        logits: of each row, ``[n + 1, V]``; anything else for a row without logits.
        best: number of best tokens that are wanted of each row of logits.
        chances: whether the choices' probabilities are wanted.
    """
    vectors: dict[tuple[int, str], torch.Tensor] = {}
    for row, (tree, own, request) in enumerate(zip(trees, logits, requests, strict=True)):
        if isinstance(own, torch.Tensor) and elsewhere(own):
            vectors |= {(row, name): each for name, each in _vectors(tree, own, request, best, chances)}
    found: list[dict[str, IntArray]] = [{} for _ in trees]
    for (row, name), values in zip(vectors, carried(list(vectors.values())), strict=True):
        found[row][name] = values
    return [_choices(len(tree) + 1, parts) for tree, parts in zip(trees, found, strict=True)]


def _vectors(
    tree: DraftTree, logits: torch.Tensor, request: Request, best: int, chances: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a row's transfer by their names, as int64 vectors; numbers as the bits of float64."""
    if best:
        values, indices = logits.float().topk(min(best, logits.shape[-1]))
        yield "tokens", indices.flatten()
        yield "scores", values.double().flatten().view(torch.int64)
    if not request.sampler.rowwise:
        return
    try:
        choices = foretell(tree, logits, request)
    except Exception as error:  # a processor may raise anything
        log.debug("a row cannot be verified: %s", error)
        return
    yield "choices", choices
    if chances and len(choices) == len(logits):
        yield "chances", request.sampler.chances(logits, choices).view(torch.int64)


def _choices(rows: int, parts: Mapping[str, IntArray]) -> RowChoices:
    best = None
    if "tokens" in parts:
        tokens, scores = parts["tokens"].astype(np.int32), parts["scores"].view(np.float64).astype(np.float32)
        best = BestTokens(tokens.reshape(rows, -1), scores.reshape(rows, -1))
    chances = parts["chances"].view(np.float64) if "chances" in parts else None
    return RowChoices(parts.get("choices"), best, chances)


def foretell(tree: DraftTree, logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Every choice that a walk may need, made on the logits' device: an int64 vector. Nothing waits for the device.

    For a chain that is tested by rejection see ``Trial``. Otherwise the tokens chosen at the root and at each node.
    """
    q = tested(tree, request)
    if q is not None:
        return _trial(tree, q, logits, request)
    if request.sampler.takes_best:
        return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)
    positions = len(request) + np.append(0, tree.depths)
    ends = range(NOISE_ROWS, len(positions), NOISE_ROWS)
    parts = zip(torch.split(logits, NOISE_ROWS), np.split(positions, ends), strict=True)
    sampler = request.sampler
    return torch.cat([sampler.choices(sampler.scores_of_rows(part), own.tolist()) for part, own in parts])


def tested(tree: DraftTree, request: Request) -> torch.Tensor | None:
    """The ``q`` of a chain that is tested by rejection.

    A draft model may know none of the tokens that a processor leaves. Then its softmax is not a number, and here 0.

    Raises:
        ValueError: if ``q`` comes with a tree that is not a chain under rejection sampling.
    """
    if request.sampler.method != "rejection" or tree.q is None:
        return None
    if not tree.is_chain:
        raise ValueError("rejection sampling with q needs a chain, and this tree branches")
    return tree.q.nan_to_num(0.0)


@dataclass(frozen=True)
class Trial:
    """A chain's test by rejection. A vector from ``foretell`` has the same parts, in this order.

    Attributes:
        p, q: probabilities of each token by the target and the draft, float64 ``[n]``; in a vector their bits.
        residuals: the token that comes in place of each node's, if that is rejected, ``[n]``.
        last: the token after the chain, if all of it is accepted, ``[1]``.
    """

    p: list[float]
    q: list[float]
    residuals: list[int]
    last: int

    @classmethod
    def of(cls, vector: IntArray) -> Trial:
        """From a vector."""
        p, q, residuals, last = np.split(vector, np.arange(1, 4) * (len(vector) // 3))
        return cls(p.view(np.float64).tolist(), q.view(np.float64).tolist(), residuals.tolist(), int(last[0]))

    def chances(self, node: int, token: int) -> tuple[float, float]:
        """``p`` and ``q`` of a node's token."""
        return self.p[node], self.q[node]

    def residual(self, node: int) -> int:
        """The token that comes in place of a node's."""
        return self.residuals[node]

    def after(self) -> int:
        """The token after the chain."""
        return self.last


def _trial(tree: DraftTree, q: torch.Tensor, logits: torch.Tensor, request: Request) -> torch.Tensor:
    sampler, positions = request.sampler, range(len(request), len(request) + len(tree))
    scores = sampler.scores_of_rows(logits)
    last = sampler.choices(scores[-1:], [positions.stop])
    if not len(tree):
        return last
    tokens = brought(torch.from_numpy(tree.tokens), logits.device)[:, None]
    p = scores[:-1].double().softmax(-1)
    q = pad(q, (0, p.shape[-1] - q.shape[-1])).double()
    residual = (p - q).clamp_min(0)
    residual = residual.where(residual.any(-1, keepdim=True), p)  # see verify._draw_residual
    drawn = highest_of_rows(residual.log(), sampler.seed, positions, Salt.RESIDUAL)
    bits = [each.gather(1, tokens)[:, 0].view(torch.int64) for each in (p, q)]
    return torch.cat([*bits, drawn, last])
