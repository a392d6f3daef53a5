"""Runs an engine on all ranks of a model in several processes: rank 0 decides, the others report the same output."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, replace
from typing import Any

from forerun.core.request import Logprob, Request
from forerun.core.stats import Stats
from forerun.engine.result import Commit
from forerun.models.forward.scorer import Scorer
from forerun.tensor_parallel.channel import ParallelError
from forerun.tensor_parallel.rank_mirror import Entry
from forerun.tensor_parallel.ranks import Follower, Leader


def on_all_ranks(
    target: Scorer, requests: Sequence[Request], commits: Generator[Commit, None, None]
) -> Generator[Commit, None, None]:
    """Run alike on all ranks, with equal ``requests``: rank 0 decides tokens, ends, statistics and seeds. Other ranks
    do not start ``commits``; they yield one when rank 0 makes its next pass, and fail or are interrupted with it."""
    if isinstance(target, Follower):
        yield from _follow(target, requests)
    else:
        assert isinstance(target, Leader)
        with closing(commits):
            yield from _lead(target, requests, commits)


def _lead(target: Leader, requests: Sequence[Request], commits: Iterator[Commit]) -> Iterator[Commit]:
    places = {request.id: place for place, request in enumerate(requests)}
    with target.leading() as end:
        target.tell("requests", _digest(requests), [request.sampler.seed for request in requests])
        try:
            for commit in commits:
                target.tell("commit", places[commit.request.id], *_of_commit(commit))
                yield commit
        finally:
            end += [_of_request(request) for request in requests]


def _follow(target: Follower, requests: Sequence[Request]) -> Iterator[Commit]:
    end: Entry = []
    entries = target.follow(end)
    try:
        for name, *parts in entries:
            if name == "requests":
                _begin(requests, *parts)
            else:
                place, tokens, reason, *rest = parts
                requests[place].take(tokens, reason)
                yield Commit(requests[place], tokens, *rest)
    finally:  # a caller that stops early still runs rank 0's passes
        for _ in entries:
            pass
        for request, state in zip(requests, end, strict=False):
            _finish(request, *state)


def _digest(requests: Sequence[Request]) -> str:
    digest = hashlib.blake2b()
    for request in requests:
        digest.update(repr((request.prompt.tolist(), request.max_new_tokens, request.sampler.method)).encode())
    return digest.hexdigest()


def _begin(requests: Sequence[Request], digest: str, seeds: list[int]) -> None:
    if digest != _digest(requests):
        raise ParallelError("this rank's requests differ from rank 0's; all ranks must run the same")
    for request, seed in zip(requests, seeds, strict=True):
        request.sampler = replace(request.sampler, seed=seed)


def _of_commit(commit: Commit) -> Entry:
    reason = commit.request.finish_reason
    return [commit.tokens, reason, commit.drafted, commit.proposed, list(map(int, commit.origins)), commit.seconds]


def _of_request(request: Request) -> Entry:
    logprobs = [astuple(each) for each in request.logprobs]
    return [request.generated.tolist(), request.finish_reason, asdict(request.stats), logprobs]


def _finish(request: Request, tokens: list[int], reason: Any, stats: dict[str, Any], logprobs: list[Any]) -> None:
    request.take(tokens[len(request.generated) :], reason)
    request.stats = _stats(stats)
    request.logprobs = [
        Logprob(token, logprob, tuple((each, value) for each, value in top)) for token, logprob, top in logprobs
    ]


def _stats(values: dict[str, Any]) -> Stats:
    middle = values["middle"]
    return Stats(**{**values, "middle": None if middle is None else _stats(middle)})
