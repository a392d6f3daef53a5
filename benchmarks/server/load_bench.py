"""Rounds of all contestants: each starts its server, answers every level, and ends it, before the next one does."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from benchmarks.reporting.progress import Say
from benchmarks.server import client, held_up
from benchmarks.server.answers import Answer, understand
from benchmarks.server.client import Door
from benchmarks.server.equality import compare, sample
from benchmarks.server.figures import figures, reasons
from benchmarks.server.levels import Level
from benchmarks.server.load_requests import Ask
from benchmarks.server.servers import ServerContestant, ServerError
from forerun.bench.journal import Journal, Turn, TurnKey

Row = dict[str, Any]
Start = Callable[[ServerContestant], AbstractContextManager[Door]]
"""Starts a contestant's server for as long as the context lasts."""
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

    warm: Sequence[Ask]
    levels: Sequence[Level]
    long: Ask | None
    checks: int

    @property
    def asks(self) -> list[Ask]:
        """Of all levels."""
        return [ask for level in self.levels for ask in level.asks]

    def key(self, number: int) -> TurnKey:
        """Names the turn in a journal."""
        words = repr(dataclasses.astuple(self)).encode()
        return TurnKey("serve", number, hashlib.sha256(words).hexdigest()[:16])


@dataclass
class ServeBench:
    """Measures contestants round by round.

    Args:
        contestants: by turns; one that is not Forerun's may be absent.
        rounds: what is asked.
        start: starts a server.
        journal: keeps whole rounds.
        say: told the progress.
        save: told all turns so far whenever one has new figures, and whether the last one is whole.
    """

    contestants: Sequence[ServerContestant]
    rounds: Sequence[Round]
    start: Start
    journal: Journal
    say: Say
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
            stint: Row = {"levels": {}}
            self.turns[-1][contestant.name] = stint
            if reason := contestant.lacking or self._absent(contestant.name):
                stint["absent"] = reason
                continue
            self.say(f"round {number + 1} of {len(self.rounds)}: {contestant.name}")
            try:
                with self.start(contestant) as door:
                    self._stint(door, one, stint)
            except ServerError as error:
                if contestant.ours:
                    raise
                self.turns[-1][contestant.name] = {"levels": {}, "absent": str(error)}
                self.say(f"  {contestant.name} is left out: {error}")

    def _stint(self, door: Door, one: Round, stint: Row) -> None:
        """All that one server answers, written down as it comes."""
        self._answers(door, Level("clients", len(one.warm), one.warm, 0), {"namespace": "warm"})
        texts: dict[str, str | None] = {}
        stint |= {"texts": texts, "reasons": {}}
        for level in one.levels:
            before = door.step_seconds()
            run, answers = self._answers(door, level, {"namespace": level.name.replace(" ", "-")})
            parts = {part: seconds - before[part] for part, seconds in door.step_seconds().items()}
            stint["levels"][level.name] = figures(answers, run.seconds, run.own_seconds, parts)
            texts |= {str(answer.ask.seed): answer.digest for answer in answers}
            stint["reasons"] |= reasons(answers)
            self.save(self.turns, False)
        if one.long is not None:
            stint["long"] = held_up.measure(door, one.asks, one.long, "streams")
            self.save(self.turns, False)
        if door.ours:
            alone = Level("clients", 1, sample(one.asks, one.checks), 0)
            again = {str(answer.ask.seed): answer.digest for answer in self._answers(door, alone, ALONE)[1]}
            stint["alone"] = compare(texts, again) | {"exact": door.exact}
            self.save(self.turns, False)

    def _absent(self, name: str) -> str | None:
        """Why a contestant took no part in an earlier round, if so: it is not tried again."""
        return next((why for turn in self.turns[:-1] if (why := absent(turn, name))), None)

    def _answers(self, door: Door, level: Level, extension: client.Extension) -> tuple[client.LoadRun, list[Answer]]:
        """A level's answers.

        Raises:
            ServerError: if there is none.
        """
        run = client.run(door, level, extension)
        answers = [understand(reply) for reply in run.replies]
        if answers and all(answer.error for answer in answers):
            raise ServerError(f"no request was answered at {door.url}: {answers[0].error}")
        return run, answers


def absent(turn: Turn, name: str) -> str | None:
    """Why a contestant took no part in a turn; None if it did."""
    return turn.get(name, {}).get("absent")
