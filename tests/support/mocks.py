"""A mock target, the slow oracle, and the engine's loop over them: what tests of verification and drafters share."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from forerun.core.block import Block, RowScores
from forerun.core.request import Request
from forerun.core.sampling import Salt, Sampler, gumbel
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict, verify
from forerun.decoding.proposals import propose
from forerun.decoding.row import Row, RowState
from forerun.decoding.source import Limit, Source
from forerun.kv.cache import Cache

PROMPT = (1, 4, 2)


class MockTarget:
    """A random table from the last ``order`` tokens to the next one's logits.

    Args:
        peak: the logits' standard deviation; a large one makes the target predictable.
    """

    def __init__(self, vocabulary: int = 5, order: int = 2, peak: float = 1.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.order = order
        self.table = torch.randn([vocabulary] * (order + 1), generator=generator, dtype=torch.float64) * peak

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """After a context of at least ``order`` tokens."""
        return self.table[tuple(context[-self.order :])]

    def score(self, context: Sequence[int], tree: DraftTree) -> torch.Tensor:
        """What a model's forward pass gives: logits after the context and after each node, found by its parents."""
        return torch.stack([self.logits([*context, *branch]) for branch in paths(tree)])


class TokenCache(Cache):
    """Holds token ids in the place of keys and values; what a ``MockScorer`` reads."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def attend(self, *_: object) -> torch.Tensor:
        raise NotImplementedError

    def commit(self, block: Block, path: Sequence[int]) -> None:
        assert block.start == len(self.tokens)
        pending = block.pending if block.ids is None else block.ids.as_subclass(torch.Tensor).numpy()
        self.tokens += [*pending.tolist(), *block.tree.tokens[list(path)].tolist()]

    def truncate(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    @property
    def nbytes(self) -> int:
        return 8 * len(self.tokens)


class MockScorer:
    """A ``MockTarget`` as a level's model: it sees what its cache holds, and the block."""

    limit = None
    prompt_chunk = None
    by_tables = False
    device = torch.device("cpu")
    clock = staticmethod(time.perf_counter)

    def __init__(self, target: MockTarget) -> None:
        self.target = target
        self.vocabulary = target.table.shape[-1]
        self.passes = 0

    def adopt(self, cache: Any) -> Any:
        return cache

    def led(self, work: Any) -> Any:
        return work()

    def keep_queries(self, beyond: int) -> None:
        pass

    def warm_up(self, states_of: Sequence[int] = ()) -> None:
        pass

    def reads_whole(self, cache: Any) -> bool:
        return False

    def score(self, blocks: Sequence[Block], caches: Sequence[TokenCache]) -> list[torch.Tensor]:
        return [row.logits for row in self.score_rows(blocks, caches)]

    def score_rows(
        self, blocks: Sequence[Block], caches: Sequence[TokenCache], states_of: Sequence[int] = ()
    ) -> list[RowScores]:
        self.passes += 1
        return [
            RowScores(self.target.score([*cache.tokens, *block.pending.tolist()], block.tree))
            for block, cache in zip(blocks, caches, strict=True)
        ]


def paths(tree: DraftTree) -> Iterator[list[int]]:
    """The tokens from the root to the root itself (none) and to every node."""
    yield []
    for i in range(len(tree)):
        yield tree.tokens[np.flatnonzero(tree.ancestors[i])].tolist()


def oracle(
    target: MockTarget, prompt: Sequence[int], limit: int, sampler: Sampler, eos: frozenset[int] = frozenset()
) -> list[int]:
    """The slow and obvious generator."""
    text = list(prompt)
    while len(text) < len(prompt) + limit and not (len(text) > len(prompt) and text[-1] in eos):
        scores = target.logits(text).float()
        if sampler.processor is not None:
            scores = sampler.processor(torch.tensor([text]), scores[None].clone())[0]
        noise = 0 if sampler.method == "greedy" else gumbel(sampler.seed, len(text), len(scores), Salt.TARGET)
        text.append(int((scores.double() + noise).argmax()))
    return text[len(prompt) :]


class Silent(Source):
    """Proposes nothing."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [DraftTree.empty()] * len(rows)


class RowByRow(Source):
    """Drafts for each row by itself."""

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [self.draft(row.request, limit.nodes) for row, limit in zip(rows, limits, strict=True)]

    def draft(self, request: Request, budget: int) -> DraftTree:
        raise NotImplementedError


class Told(Silent):
    """Tells when a row begins here and when it ends; it proposes nothing."""

    def __init__(self, begins: Callable[[Row], Any] | None, ends: Callable[[Row], Any]) -> None:
        self.begins, self.ends = begins or (lambda row: None), ends

    def open(self, row: Row) -> RowState:
        self.begins(row)
        state = RowState()
        state.close = lambda: self.ends(row)
        return state


def gullible(tree: DraftTree, logits: torch.Tensor, request: Request, told: object = None) -> Verdict:
    """In the place of ``verify``: accepts wrong drafts from the fifth token on."""
    if not len(tree) or len(request.generated) < 4:
        return verify(tree, logits, request)
    request.append(int(tree.tokens[0]))
    return Verdict([0], [int(tree.tokens[0])])


def opened(source: Source, request: Request, cache: Cache | None = None) -> Row:
    """A row of the request with which a source has begun, and the sources below it."""
    row = Row(request, cache or TokenCache())
    row.open(source.walk())
    return row


def generate(target: MockTarget, source: Source, request: Request, budget: int = 8) -> list[int]:
    """The engine's loop, with the contract between the parts asserted at every step."""
    row = opened(source, request)
    while request.finish_reason is None:
        step(target, source, row, budget)
    row.close()
    return request.generated.tolist()


def draft(source: Source, row: Row, budget: int) -> DraftTree:
    """A source's tree for one row that decodes."""
    [tree] = propose(source, [row], [Limit(budget)])
    return tree


def step(target: MockTarget, source: Source, row: Row, budget: int = 8) -> Outcome:
    """Propose, score, verify, learn."""
    request = row.request
    before = request.tokens.tolist()
    tree = draft(source, row, budget)
    assert len(tree) <= budget and (tree.depths <= request.max_draft_depth).all()
    logits = target.score(before, tree)
    outcome = Outcome(tree, verify(tree, logits, request), logits)
    assert request.tokens.tolist() == before + outcome.verdict.tokens
    assert_consistent(outcome, request)
    request.stats.record(len(tree), len(outcome.verdict.path), len(outcome.verdict.tokens))
    for each in source.walk():
        each.learn([row], [outcome])
    return outcome


def assert_consistent(outcome: Outcome, request: Request) -> None:
    """The accepted path leads down from the root; one token follows unless the text ended."""
    tree, path, tokens = outcome.tree, outcome.verdict.path, outcome.verdict.tokens
    assert tree.parents[path].tolist() == [ROOT, *path][: len(path)]
    assert tree.tokens[path].tolist() == tokens[: len(path)]
    assert len(tokens) == len(path) + 1 or (request.finish_reason is not None and len(tokens) == len(path) > 0)


def ban_repeats(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the prefix: no token twice in a row, and a temperature."""
    scores[:, ids[0, -1]] = -math.inf
    return scores / 0.7


SAMPLERS = {
    "greedy": Sampler(),
    "greedy with a processor": Sampler(processor=ban_repeats),
    "coupled": Sampler("coupled", seed=3),
    "coupled with a processor": Sampler("coupled", seed=4, processor=ban_repeats),
    "rejection without q": Sampler("rejection", seed=5),
}
