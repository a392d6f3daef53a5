"""Rounds of all contestants: each starts its server, answers every level, and ends it, before the next one does."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from benchmarks.server import client, held_up
from benchmarks.server.client import ServerEndpoint
from benchmarks.server.figures import figures, reasons
from benchmarks.server.levels import Level
from benchmarks.server.load_answers import Answer, understand
from benchmarks.server.load_requests import LoadRequest
from benchmarks.server.servers import ServerContestant, ServerError
from forerun.bench.journal import Journal, Turn, TurnKey
from forerun.bench.machine import Row
from forerun.cli.terminal import say

Start = Callable[[ServerContestant], AbstractContextManager[ServerEndpoint]]
"""Starts a contestant's server for as long as the context lasts."""
Texts = Mapping[str, str | None]
"""What names each text (``Answer.digest``), by its request's seed."""
ALONE = {"namespace": "alone", "drafter": "none"}
"""How a text is asked for that load may not have changed."""


@dataclass(frozen=True)
class Round:
    """What every contestant answers in a round.

    Attributes:
        warm: asked first, at once, and not measured: kernels are compiled and memory is taken.
        levels: the loads.
        long: a long prompt to read beside streams, or None.
        checks: greedy texts that are asked for again alone.
    """

    warm: Sequence[LoadRequest]
    levels: Sequence[Level]
    long: LoadRequest | None
    checks: int

    @property
    def requests(self) -> list[LoadRequest]:
        """Of all levels."""
        return [request for level in self.levels for request in level.requests]

    def key(self, number: int) -> TurnKey:
        """Names the turn in a journal."""
        words = repr(dataclasses.astuple(self)).encode()
        return TurnKey("serve", number, hashlib.sha256(words).hexdigest()[:16])


def sample(requests: Sequence[LoadRequest], count: int) -> list[LoadRequest]:
    """``count`` greedy requests, from all over the load."""
    greedy = [request for request in requests if request.temperature == 0]
    return greedy[:: max(1, len(greedy) // max(count, 1))][:count]


def compare(texts: Texts, others: Texts) -> Row:
    """How many texts are in both, and how many of them are the same; texts that are not whole are in neither."""
    both = [seed for seed, digest in texts.items() if digest is not None and others.get(seed) is not None]
    return {"compared": len(both), "same": sum(texts[seed] == others[seed] for seed in both)}


@dataclass
class ServeBench:
    """Measures contestants round by round.

    Args:
        contestants: by turns; one that is not Forerun's may be absent.
        rounds: what is asked.
        start: starts a server.
        journal: keeps whole rounds.
        save: told all turns so far whenever one has new figures, and whether the last one is whole.
    """

    contestants: Sequence[ServerContestant]
    rounds: Sequence[Round]
    start: Start
    journal: Journal
    save: Callable[[Sequence[Turn], bool], None]
    turns: list[Turn] = field(default_factory=list)

    def run(self) -> list[Turn]:
        """All rounds; those in the journal are not measured again.

        Raises:
            ServerError: if a server of Forerun's does not start, or answers nothing.
        """
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
        """A round; another contestant begins each time."""
        first = number % len(self.contestants)
        for contestant in (*self.contestants[first:], *self.contestants[:first]):
            results: Row = {"levels": {}}
            self.turns[-1][contestant.name] = results
            if reason := contestant.lacking or self._absent(contestant.name):
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
        """All that one server answers, written down as it comes."""
        self._answers(endpoint, Level("clients", len(one.warm), one.warm, 0), {"namespace": "warm"})
        texts: dict[str, str | None] = {}
        results |= {"texts": texts, "reasons": {}}
        for level in one.levels:
            before = endpoint.step_seconds()
            run, answers = self._answers(endpoint, level, {"namespace": level.name.replace(" ", "-")})
            parts = {part: seconds - before[part] for part, seconds in endpoint.step_seconds().items()}
            results["levels"][level.name] = figures(answers, run.seconds, run.own_seconds, parts)
            texts |= {str(answer.request.seed): answer.digest for answer in answers}
            results["reasons"] = dict(Counter(results["reasons"]) + Counter(reasons(answers)))
            self.save(self.turns, False)
        if one.long is not None:
            results["long"] = held_up.measure(endpoint, one.requests, one.long, "streams")
            self.save(self.turns, False)
        if endpoint.ours:
            alone = Level("clients", 1, sample(one.requests, one.checks), 0)
            again = {str(answer.request.seed): answer.digest for answer in self._answers(endpoint, alone, ALONE)[1]}
            results["alone"] = compare(texts, again) | {"exact": endpoint.exact}
            self.save(self.turns, False)

    def _absent(self, name: str) -> str | None:
        """Why a contestant took no part in an earlier round, if so: it is not tried again."""
        return next((why for turn in self.turns[:-1] if (why := absent(turn, name))), None)

    def _answers(
        self, endpoint: ServerEndpoint, level: Level, extension: client.Extension
    ) -> tuple[client.LoadRun, list[Answer]]:
        """A level's answers.

        Raises:
            ServerError: if there is none.
        """
        run = client.run(endpoint, level, extension)
        answers = [understand(reply) for reply in run.replies]
        if answers and all(answer.error for answer in answers):
            raise ServerError(f"no request was answered at {endpoint.url}: {answers[0].error}")
        return run, answers


def absent(turn: Turn, name: str) -> str | None:
    """Why a contestant took no part in a turn; None if it did."""
    return turn.get(name, {}).get("absent")
