"""Choices from logits on a GPU, in one transfer. On a CPU none of this happens.

Reading a value from a device waits until all its work is done. So the device makes the choices at all nodes of a tree,
and one transfer fetches those of all rows. If a sampler needs ids before a choice (penalties, grammars), the logits are
copied to the CPU in one piece; one with processors that may hold tensors on the device chooses there, node by node.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from forerun.core.block import RowScores
from forerun.core.pinned import to_device
from forerun.core.request import Request
from forerun.core.sampling import Salt, highest_of_rows
from forerun.core.tree import DraftTree, IntArray

log = logging.getLogger(__name__)

NOISE_ROWS = 16
"""Rows of logits that get noise at a time; each needs 8 bytes per token for noise and for scores."""


def present(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current device, for kernels that are not torch's."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait for a device's current stream, before reading a clock. Copies on other streams go on."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def adjoined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along their first dimension, without a copy if they are adjacent."""
    first, end = tensors[0], tensors[0].data_ptr()
    if len(tensors) == 1:
        return first
    for tensor in tensors:
        if tensor.data_ptr() != end or not tensor.is_contiguous():
            return torch.cat(list(tensors))
        end += tensor.nbytes
    return first.as_strided((sum(t.shape[0] for t in tensors), *first.shape[1:]), first.stride())


def to_cpu(vectors: Sequence[torch.Tensor]) -> list[IntArray]:
    """Copy int64 vectors of one device to the CPU in one transfer."""
    return _parted(adjoined(vectors).cpu().numpy(), [vector.shape[0] for vector in vectors]) if vectors else []


def _parted(array: IntArray, counts: Sequence[int]) -> list[IntArray]:
    return [array[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


FloatArray = npt.NDArray[np.float64]


def best_of_rows(logits: torch.Tensor) -> torch.Tensor:
    """Return the best tokens of logits ``[..., V]``, compared in float32 at most, as transformers does."""
    return (logits.float() if logits.dtype == torch.float64 else logits).argmax(-1)


class BestTokens(NamedTuple):
    """The best tokens of rows of logits, best first, int32 ``[n, count]``, and their logits, float32."""

    tokens: npt.NDArray[np.int32]
    scores: npt.NDArray[np.float32]


class RowChoices(NamedTuple):
    """A row's part of a transfer.

    Attributes:
        choices: the result of ``choose_nodes``; None on a CPU, for a sampler that needs more than logits, and after an
            error, which verification raises again for this row alone.
        best: the best tokens at the root and each node, if requested; None on a CPU.
        chances: the model's probability of each of ``choices``, before processors, if requested; None for rejection
            tests.
    """

    choices: IntArray | None = None
    best: BestTokens | None = None
    chances: FloatArray | None = None


def choose_rows(
    trees: Sequence[DraftTree],
    scored: Sequence[RowScores | Exception],
    requests: Sequence[Request],
    best: int = 0,
    chances: bool = False,
) -> list[RowChoices]:
    """Fetch what a step needs of each row's logits in one transfer, after the pass ends.

    Args:
        scored: a pass's results. A row with an error has no choices; rows without a tree, at the end, are only waited
            for.
        best, chances: number of best tokens per row of logits; whether to fetch the choices' probabilities.
    """
    there = {n: own for n, own in enumerate(scored) if isinstance(own, RowScores) and not own.logits.is_cpu}
    found = [RowChoices()] * len(trees)
    if not there:
        return found
    away = {n: own.logits for n, own in there.items() if n < len(trees)}
    if not away:
        synchronize(next(iter(there.values())).logits.device)
        return found
    counts = [own.shape[0] for own in away.values()]
    shared: dict[str, torch.Tensor] = {}
    if best:
        scores, shared["tokens"] = adjoined(list(away.values())).float().topk(min(best, away[min(away)].shape[-1]))
        shared["scores"] = scores.double().view(torch.int64)
    known = [top for n in away if (top := there[n].best) is not None]
    ready = {n for n in away if _ready(trees[n], requests[n], len(known) == len(away))}
    if ready:
        shared["choices"] = adjoined(known) if len(known) == len(away) else best_of_rows(adjoined(list(away.values())))
    tops = torch.split(shared["choices"], counts) if ready else [None] * len(counts)
    own = [
        list(_vectors(trees[n], each, requests[n], top if n in ready else None, chances))
        for (n, each), top in zip(away.items(), tops, strict=True)
    ]
    vectors = [*(each.flatten() for each in shared.values()), *(vector for row in own for _, vector in row)]
    if not vectors:
        synchronize(away[min(away)].device)
    to_device = iter(to_cpu(vectors))
    tables = {name: _parted(next(to_device).reshape(each.shape), counts) for name, each in shared.items()}
    for place, (n, row) in enumerate(zip(away, own, strict=True)):
        parts = {name: table[place] for name, table in tables.items()}
        if n not in ready:
            parts.pop("choices", None)
        found[n] = _choices(parts | {name: next(to_device) for name, _ in row})
    return found


def _ready(tree: DraftTree, request: Request, chosen: bool) -> bool:
    """Return whether a row's choices are the best logits, or those that the pass has ``chosen`` with the row's
    noise."""
    sampler = request.sampler
    by_noise = sampler.divisor is not None and (sampler.method != "rejection" or tree.q is None)
    return sampler.takes_best or (chosen and by_noise)


def _vectors(
    tree: DraftTree, logits: torch.Tensor, request: Request, best: torch.Tensor | None, chances: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a row's private parts of the transfer by name, as int64 vectors; floats as the bits of float64."""
    if not request.sampler.rowwise:
        return
    if best is None:
        try:
            best = choose_nodes(tree, logits, request)
        except Exception as error:  # a processor may raise anything
            log.debug("a row cannot be verified: %s", error)
            return
        yield "choices", best
    if chances and len(best) == len(logits):
        yield "chances", request.sampler.chances(logits, best).view(torch.int64)


def _choices(parts: Mapping[str, IntArray]) -> RowChoices:
    best = None
    if "tokens" in parts:
        best = BestTokens(parts["tokens"].astype(np.int32), parts["scores"].view(np.float64).astype(np.float32))
    chances = parts["chances"].view(np.float64) if "chances" in parts else None
    return RowChoices(parts.get("choices"), best, chances)


def choose_nodes(tree: DraftTree, logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Choose at the root and each node, on the logits' device without waiting; int64. For rejection, see ``Trial``."""
    q = tested(tree, request)
    if q is not None:
        return _trial(tree, q, logits, request)
    if request.sampler.takes_best:
        return best_of_rows(logits)
    positions = len(request) + np.append(0, tree.depths)
    ends = range(NOISE_ROWS, len(positions), NOISE_ROWS)
    parts = zip(torch.split(logits, NOISE_ROWS), np.split(positions, ends), strict=True)
    sampler = request.sampler
    return torch.cat([sampler.choices(_scores(part, request), own.tolist()) for part, own in parts])


def _scores(logits: torch.Tensor, request: Request) -> torch.Tensor:
    """Process rows of logits, a single one together with a copy: torch's ``cumsum`` on CUDA, which top-p uses, sums one
    row alone in another order than several, and in one that differs between runs."""
    count = len(logits)
    return request.sampler.scores_of_rows(logits.expand(2, -1) if count == 1 else logits)[:count]


def tested(tree: DraftTree, request: Request) -> torch.Tensor | None:
    """Return ``q`` of a chain to test by rejection, 0 for NaN: a processor may forbid all of a draft model's tokens."""
    if request.sampler.method != "rejection" or tree.q is None:
        return None
    if not tree.is_chain:
        raise ValueError("rejection sampling with q needs a chain, and this tree branches")
    return tree.q.nan_to_num(0.0)


@dataclass(frozen=True)
class Trial:
    """A chain's test by rejection. A vector from ``choose_nodes`` has its parts in this order.

    Attributes:
        p, q: probabilities of each token by the target and the draft, float64 ``[n]``; in a vector their bits.
        last: the token after a fully accepted chain; in a vector ``[1]``.
    """

    p: list[float]
    q: list[float]
    residuals: list[int]
    last: int

    @classmethod
    def of(cls, vector: IntArray) -> Trial:
        p, q, residuals, last = np.split(vector, np.arange(1, 4) * (len(vector) // 3))
        return cls(p.view(np.float64).tolist(), q.view(np.float64).tolist(), residuals.tolist(), int(last[0]))

    def chances(self, node: int, token: int) -> tuple[float, float]:
        return self.p[node], self.q[node]

    def residual(self, node: int) -> int:
        """Return the token that replaces a node's."""
        return self.residuals[node]

    def after(self) -> int:
        return self.last


def _trial(tree: DraftTree, q: torch.Tensor, logits: torch.Tensor, request: Request) -> torch.Tensor:
    sampler, positions = request.sampler, range(len(request), len(request) + len(tree))
    scores = sampler.scores_of_rows(logits)
    last = sampler.choices(scores[-1:], [positions.stop])
    if not len(tree):
        return last
    tokens = to_device(torch.from_numpy(tree.tokens), logits.device)[:, None]
    p = scores[:-1].double().softmax(-1)
    q = pad(q, (0, p.shape[-1] - q.shape[-1])).double()
    residual = (p - q).clamp_min(0)
    residual = residual.where(residual.any(-1, keepdim=True), p)  # see verify._draw_residual
    drawn = highest_of_rows(residual.log(), sampler.seed, positions, Salt.RESIDUAL)
    bits = [each.gather(1, tokens)[:, 0].view(torch.int64) for each in (p, q)]
    return torch.cat([*bits, drawn, last])
