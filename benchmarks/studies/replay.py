"""Replay: how many tokens of a recorded answer each step would have accepted, without a model.

The prompt is indexed, and the answer's first token is given, as from a prefill. Then every step drafts a tree, accepts
the longest path that follows the recorded answer, and adds one token. The source keeps its memory from row to row;
prompts stay private to their row. Effective decoding length (EDL, Lookahead paper, definition 1) is tokens per step,
without the prefill. What a trie indexes is timed as an update only if it does so at once (``EagerTrie``).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from benchmarks.papers.lookahead_trie import LookaheadTrieSource
from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome, Verdict
from forerun.decoding.planner import Planner, StepTimes
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.decoding.sources.trie_source import TrieSource
from forerun.kv.full_cache import FullCache

Encode = Callable[[str], list[int]]
_NO_LOGITS = torch.empty(0, 0)
_NO_TIMES = StepTimes(0.0, 0.0, 0.0)
_SELECTION = re.compile(r"^(?P<path>.+?)(?::author=(?P<author>.+?))?(?::from=(?P<start>\d+))?(?::to=(?P<stop>\d+))?$")


class EagerTrie(TrieSource):
    """Indexes what each step commits at once, not before the next draft, so that an update's time is its own."""

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        super().learn(rows, outcomes)
        self.trie.step([self._update(row.states[self], row.request) for row in rows])


@dataclass(frozen=True)
class Recorded:
    """One row: token ids of a prompt and of its recorded answer."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Selection:
    """Rows of a JSON Lines file of ``{prompt, answer, author}``.

    Attributes:
        path: the file.
        author: only rows of this author, or all.
        start, stop: a slice of the rows that ``author`` leaves.
    """

    path: Path
    author: str | None = None
    start: int = 0
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> Selection:
        """From ``FILE[:author=A][:from=I][:to=J]``; an author may contain colons."""
        match = _SELECTION.match(text)
        if match is None:
            raise ValueError(f"{text!r} is not FILE[:author=A][:from=I][:to=J]")
        stop = match["stop"]
        return cls(Path(match["path"]), match["author"], int(match["start"] or 0), None if stop is None else int(stop))

    def read(self, encode: Encode) -> list[Recorded]:
        """The rows, as tokens.

        Raises:
            OSError: if the file cannot be read.
            ValueError: for a line that is not a row, or if no row is left.
        """
        rows = [row for row in _rows(self.path) if self.author in (None, row.get("author"))][self.start : self.stop]
        if not rows:
            raise ValueError(f"{self.path} has no row with author={self.author} from={self.start} to={self.stop}")
        return [Recorded(encode(row["prompt"]), encode(row["answer"])) for row in rows]


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if not isinstance(row["prompt"], str) or not isinstance(row["answer"], str):
                    raise TypeError
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no JSON object with 'prompt' and 'answer'") from error
            yield row


@dataclass
class ReplayReport:
    """Counts and times of a replay.

    Attributes:
        tokens: committed tokens, without each answer's first.
        drafted, accepted: per step.
        retrieve_us: time of each draft, in microseconds.
        update_us: time of each index update per new token, in microseconds.
        prompt_us: time of each prompt's indexing per token, in microseconds.
        indexed: tokens that the source keeps.
        nbytes: bytes that the source keeps, or None if it does not say.
    """

    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    retrieve_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)
    prompt_us: list[float] = field(default_factory=list)
    indexed: int = 0
    nbytes: int | None = None

    def summary(self) -> dict[str, object]:
        """The figures, for JSON."""
        steps = max(len(self.drafted), 1)
        return {
            "tokens_per_step": round(self.tokens / steps, 4),
            "steps": len(self.drafted),
            "tokens": self.tokens,
            "drafted_per_step": round(sum(self.drafted) / steps, 2),
            "hit_rate": round(sum(count > 0 for count in self.accepted) / steps, 4),
            "retrieve_us": _percentiles(self.retrieve_us),
            "update_us": _percentiles(self.update_us),
            "prompt_us": _percentiles(self.prompt_us),
            "bytes_per_token": None if self.nbytes is None else round(self.nbytes / max(self.indexed, 1), 2),
        }


def replay(source: Source | None, rows: Sequence[Recorded], budget: int, warm: Iterable[Recorded] = ()) -> ReplayReport:
    """Replay recorded answers through a source of drafts.

    Args:
        source: any that needs no logits; None for no drafts.
        rows: what to replay, in order; rows without a prompt, or with an answer of one token, are skipped.
        budget: the most nodes of a tree.
        warm: rows whose answers the source learns first.

    Raises:
        ValueError: if a source is to be warmed that keeps nothing from earlier texts.
    """
    if source is not None:
        source.warm_up()
    report = ReplayReport()
    seen = [row.answer for row in warm]
    if seen:
        if not isinstance(source, TrieSource | LookaheadTrieSource):
            raise ValueError(f"a {type(source).__name__} keeps nothing from earlier texts: it cannot be warmed")
        source.warm("default", seen)
    report.indexed = sum(map(len, seen))
    for row in rows:
        if row.prompt and len(row.answer) > 1:
            _replay_row(Planner(source), row, budget, report)
    report.nbytes = source.trie.nbytes if isinstance(source, TrieSource) else None
    return report


def _replay_row(planner: Planner, recorded: Recorded, budget: int, report: ReplayReport) -> None:
    request = Request(recorded.prompt, len(recorded.answer))
    row, answer = Row(request, FullCache()), recorded.answer
    begin = time.perf_counter_ns()
    row.open(planner.sources)
    while not planner.read(row, len(request)):
        pass
    report.prompt_us.append((time.perf_counter_ns() - begin) / 1e3 / len(request))
    _commit(planner, row, DraftTree.empty(), Verdict([], answer[:1]), report)
    while request.remaining:
        begin = time.perf_counter_ns()
        [tree] = planner.draft([row], [Limit(budget)])
        tree = tree.first(budget)
        report.retrieve_us.append((time.perf_counter_ns() - begin) / 1e3)
        verdict = follow(tree, answer[len(request.generated) :])
        report.drafted.append(len(tree))
        report.accepted.append(len(verdict.path))
        report.tokens += len(verdict.tokens)
        _commit(planner, row, tree, verdict, report)
    row.close()
    report.indexed += len(answer)


def follow(tree: DraftTree, rest: list[int]) -> Verdict:
    """The path along the recorded answer, and the token after it if there is one."""
    path: list[int] = []
    node: int | None = ROOT
    for token in rest:
        node = tree.children.get((ROOT if node is None else node, token))
        if node is None:
            break
        path.append(node)
    return Verdict(path, rest[: len(path) + 1])


def _commit(planner: Planner, row: Row, tree: DraftTree, verdict: Verdict, report: ReplayReport) -> None:
    for token in verdict.tokens:
        row.request.append(token)
    begin = time.perf_counter_ns()
    planner.learn([row], [Outcome(tree, verdict, _NO_LOGITS)], _NO_TIMES)
    report.update_us.append((time.perf_counter_ns() - begin) / 1e3 / len(verdict.tokens))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    p50, p99, most = np.percentile(values, (50, 99, 100))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(float(most), 2)}
