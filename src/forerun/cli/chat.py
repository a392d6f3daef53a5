"""``forerun chat``: a conversation in the terminal, or over a pipe with one message per line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import typer

from forerun import __version__
from forerun.cli.commands import one_line
from forerun.cli.generate import following, sampling, show_text
from forerun.cli.generate_options import ChatOptions
from forerun.cli.models import check_drafters, make_engine
from forerun.cli.prompt_input import check_text
from forerun.cli.rank_check import followed, leading
from forerun.cli.stats_tables import stats_table
from forerun.cli.terminal import PrefillBar, stderr
from forerun.engine.conversation import Conversation, ConversationTurn
from forerun.models.loading.load import quiet

PROMPT = "> "
COMMANDS = {
    "/reset": "forget the conversation",
    "/stats": "steps and times of the last answer",
    "/help": "these commands",
    "/exit": "leave (or Ctrl-D)",
}


def run(options: ChatOptions) -> None:
    """Run the conversation."""
    if followed(lambda: make_engine(following(options))):
        return
    check_drafters([options.drafter], options)
    system = None if options.system is None else check_text(options.system, "--system")
    began = time.perf_counter()
    with quiet(), leading(engine := make_engine(options)):
        loading = time.perf_counter() - began
        chat = Chat(options, Conversation(engine, system, **sampling(options)), loading)
        if sys.stdin.isatty():
            stderr().print(f"{options.model}, drafter {options.drafter}; /help lists the commands", style="dim")
        try:
            with suppress(EOFError):
                for line in _typed() if sys.stdin.isatty() else _piped():
                    chat.take(line)
        finally:  # keep earlier answers if a message fails
            if options.json:
                typer.echo(json.dumps(chat.report(), ensure_ascii=False))


@dataclass
class Chat:
    """A conversation's state; ``loading`` is the seconds until its engine was ready."""

    options: ChatOptions
    conversation: Conversation
    loading: float
    last: ConversationTurn | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)

    def take(self, line: str) -> None:
        """Run a command or answer a message. Raise EOFError to leave, ValueError if a message cannot be answered."""
        words = line.split()
        if not words:
            return
        if words[0].startswith("/") and words[0][1:].isalpha():
            self._command(words[0])
            return
        try:
            self._answer(line)
        except ValueError as error:
            if not sys.stdin.isatty():
                raise
            typer.echo(f"error: {one_line(error)}", err=True)

    def report(self) -> dict[str, Any]:
        """Return all turns as plain values."""
        return {
            "forerun": __version__,
            "model": self.options.model,
            "drafter": self.options.drafter,
            "turns": self.turns,
        }

    def _command(self, name: str) -> None:
        if name == "/exit":
            raise EOFError
        if name == "/reset":
            self.conversation.reset()
            self.last = None
        elif name == "/stats" and self.last is not None:
            self._show_stats(self.last)
        elif name == "/stats":
            typer.echo("there is no answer yet", err=True)
        else:
            if name != "/help":
                typer.echo(f"{name} is not a command; commands are:", err=True)
            for known, what in COMMANDS.items():
                typer.echo(f"  {known:8}{what}", err=True)

    def _answer(self, message: str) -> None:
        """Show an answer while it is generated; Ctrl-C ends it."""
        bar = PrefillBar(stderr())
        turn = self.last = self.conversation.send(message, bar)
        output = show_text(self.options, self.conversation.engine, turn.request, turn, bar)
        self.turns.append({"message": turn.message, **output.summary(turn.request), "cached_tokens": turn.cached})
        if self.options.stats:
            self._show_stats(turn)

    def _show_stats(self, turn: ConversationTurn) -> None:
        level = self.conversation.engine.exactness.level
        stderr().print(stats_table(turn.request, self.options.drafter, level, self.loading))
        typer.echo(
            f"conversation: {turn.request.prompt_length} tokens, of which {turn.read} were prefilled "
            f"and {turn.cached} came from the cache",
            err=True,
        )


def _typed() -> Iterator[str]:
    """Yield the lines that the user types, until Ctrl-D; Ctrl-C clears the line."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives ``input`` a history and editing
    while True:
        try:
            yield check_text(input(PROMPT), "the message")
        except KeyboardInterrupt:
            typer.echo("\n(Ctrl-D or /exit leaves)", err=True)
        except EOFError:
            typer.echo(err=True)
            raise


def _piped() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, start=1):
        try:
            yield line.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise ValueError(f"line {number} is not UTF-8 text (byte {error.start})") from None
