"""Rounds of all contestants: each starts its server, answers every level and ends it, before the next one starts."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.server import client
from benchmarks.server.client import Answer, Level, LoadRequest, Reply, ServerEndpoint, answer, connected, parsed
from benchmarks.server.load_figures import figures, percentile, reasons
from benchmarks.server.servers import ServerContestant, ServerError
from forerun.bench.journal import Journal, Turn, TurnKey
from forerun.bench.machine import Row
from forerun.bench.rounds import rotated
from forerun.cli.terminal import say

Digests = Mapping[str, str | None]  # Answer.digest of each answer, by its request's seed
ALONE = {"namespace": "alone", "drafter": "none"}  # how an answer is requested again that load may not have changed
STREAMS = 4  # streams beside a long prompt
BEFORE = 16  # answers that end before the long prompt is sent, to compare with
LOOK = 0.005  # seconds between looks at whether something has come


@dataclass(frozen=True)
class Round:
    """What every contestant answers in a round: ``warm`` requests that are not measured, levels, perhaps a ``long``
    prompt to prefill beside streams, and ``checks`` greedy requests again, alone."""

    warm: Sequence[LoadRequest]
    levels: Sequence[Level]
    long: LoadRequest | None
    checks: int

    @property
    def requests(self) -> list[LoadRequest]:
        return [request for level in self.levels for request in level.requests]

    def key(self, number: int) -> TurnKey:
        words = repr(dataclasses.astuple(self)).encode()
        return TurnKey("serve", number, hashlib.sha256(words).hexdigest()[:16])


def sample(requests: Sequence[LoadRequest], count: int) -> list[LoadRequest]:
    """Return ``count`` greedy requests, spread over the load."""
    greedy = [request for request in requests if request.temperature == 0]
    return greedy[:: max(1, len(greedy) // max(count, 1))][:count]


def compare(mine: Digests, others: Digests) -> Row:
    """Count the answers that are complete in both, and the equal ones among them."""
    both = [seed for seed, digest in mine.items() if digest is not None and others.get(seed) is not None]
    return {"compared": len(both), "same": sum(mine[seed] == others[seed] for seed in both)}


def absent(turn: Turn, name: str) -> str | None:
    """Return why a contestant took no part in a turn, if so."""
    return turn.get(name, {}).get("absent")


@dataclass
class ServeBench:
    """Measures contestants round by round; complete rounds go into the journal.

    Args:
        contestants: one that is not Forerun's may be absent.
        start: starts a contestant's server for as long as the context lasts.
        save: gets all turns so far whenever one has new figures, and whether the last one is complete.
    """

    contestants: Sequence[ServerContestant]
    rounds: Sequence[Round]
    start: Callable[[ServerContestant], AbstractContextManager[ServerEndpoint]]
    journal: Journal
    save: Callable[[Sequence[Turn], bool], None]
    turns: list[Turn] = field(default_factory=list)

    def run(self) -> list[Turn]:
        """Measure all rounds that the journal lacks; raise ServerError if a server of Forerun's fails."""
        names = [contestant.name for contestant in self.contestants]
        for number, one in enumerate(self.rounds):
            known = self.journal.find(one.key(number), names)
            self.turns.append(known or {})
            if known is None:
                self._turn(number, one)
                self.journal.add(one.key(number), self.turns[-1])
            self.save(self.turns, True)
        return self.turns

    def _turn(self, number: int, one: Round) -> None:
        for contestant in rotated(list(self.contestants), number):
            results: Row = {"levels": {}}
            self.turns[-1][contestant.name] = results
            earlier = (absent(turn, contestant.name) for turn in self.turns[:-1])
            if reason := contestant.lacking or next(filter(None, earlier), None):
                results["absent"] = reason
                continue
            say(f"round {number + 1} of {len(self.rounds)}: {contestant.name}")
            try:
                with self.start(contestant) as endpoint:
                    self._measure(endpoint, one, results)
            except ServerError as error:
                if contestant.ours:
                    raise
                self.turns[-1][contestant.name] = {"levels": {}, "absent": str(error)}
                say(f"  {contestant.name} is left out: {error}")

    def _measure(self, endpoint: ServerEndpoint, one: Round, results: Row) -> None:
        answers_to(endpoint, Level("clients", len(one.warm), one.warm), {"namespace": "warm"})
        digests: dict[str, str | None] = {}
        results |= {"texts": digests, "reasons": {}}
        for level in one.levels:
            before = endpoint.step_seconds()
            run, answers = answers_to(endpoint, level, {"namespace": level.name.replace(" ", "-")})
            parts = {part: seconds - before[part] for part, seconds in endpoint.step_seconds().items()}
            results["levels"][level.name] = figures(answers, run.seconds, run.own_seconds, parts)
            digests |= {str(each.request.seed): each.digest for each in answers}
            results["reasons"] = dict(Counter(results["reasons"]) + Counter(reasons(answers)))
            self.save(self.turns, False)
        if one.long is not None:
            results["long"] = asyncio.run(held_up(endpoint, one.requests, one.long))
            self.save(self.turns, False)
        if endpoint.ours:
            _, again = answers_to(endpoint, Level("clients", 1, sample(one.requests, one.checks)), ALONE)
            alone = {str(each.request.seed): each.digest for each in again}
            results["alone"] = compare(digests, alone) | {"exact": endpoint.exact}
            self.save(self.turns, False)


def answers_to(
    endpoint: ServerEndpoint, level: Level, extension: client.Extension
) -> tuple[client.LoadRun, list[Answer]]:
    """Return a level's answers; raise ServerError if there is none."""
    run = client.run(endpoint, level, extension)
    answers = [parsed(reply) for reply in run.replies]
    if answers and all(each.error for each in answers):
        raise ServerError(f"no request was answered at {endpoint.url}: {answers[0].error}")
    return run, answers


async def held_up(endpoint: ServerEndpoint, requests: Sequence[LoadRequest], long: LoadRequest) -> Row:
    """Return the gaps between chunks of streams that answer ``requests`` over and over, before and during the prefill
    of ``long``."""
    replies, ended, over = list[Reply](), 0, False

    async def stream(turn: int) -> None:
        nonlocal ended
        while not over:
            cycle, at = divmod(turn, len(requests))  # a repeated request drafts from another namespace
            replies.append(reply := Reply(requests[at]))
            await answer(http, endpoint, reply, {"namespace": f"streams-{cycle}"})
            ended, turn = ended + 1, turn + STREAMS

    async with connected(endpoint) as http:
        streams = [asyncio.create_task(stream(number)) for number in range(STREAMS)]
        while ended < BEFORE:
            await asyncio.sleep(LOOK)
        reply = Reply(long)
        prefill = asyncio.create_task(answer(http, endpoint, reply, {"namespace": "streams-long"}))
        while not (reply.reads and parsed(reply).grew) and not prefill.done():
            await asyncio.sleep(LOOK)
        over = True
        await asyncio.gather(prefill, *streams)
    return long_row(parsed(reply), list(map(parsed, replies)))


def long_row(long: Answer, others: Sequence[Answer]) -> Row:
    """Return the figures of a long prompt and of the streams beside it; only its error, if that was not answered."""
    if long.error is not None:
        return {"error": long.error}
    without, during = gaps(others, 0.0, long.sent, True), gaps(others, long.sent, long.sent + long.first, False)
    row: Row = {
        "prompt": long.usage.get("prompt_tokens"), "first": long.first,
        "errors": sum(reasons([long, *others]).values()), "chunks": len(during),
        **{f"without_p{part}": percentile(without, part) for part in (50, 99)},
        **{f"with_p{part}": percentile(during, part) for part in (50, 99)},
    }  # fmt: skip
    known = row["with_p99"] is not None and row["without_p99"]
    return row | {"ratio": row["with_p99"] / row["without_p99"] if known else None}


def gaps(answers: Sequence[Answer], begin: float, end: float, whole: bool) -> list[float]:
    """Return the times between chunks within a window: wholly, or in part."""
    pairs = [pair for each in answers for pair in pairwise(each.grew)]
    inside = (pair for pair in pairs if (pair[1] <= end if whole else pair[1] > begin and pair[0] < end))
    return [after - before for before, after in inside]
