"""Output of ``forerun demo``: two panels, side by side if they fit, else one below the other, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun.cli.terminal import DRAFTED, printable
from forerun.models.text.detokenize import Piece
from forerun.reference import DemoPrompt

WIDE = 96
"""Columns from which two texts fit side by side."""


@dataclass(frozen=True)
class Timed:
    """One way to decode a prompt: its text and its median time.

    Attributes:
        pieces: the text.
        seconds: for the whole generation, including the prompt.
    """

    token_ids: list[int]
    pieces: list[Piece]
    seconds: float
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens divided by the whole time."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class Pair:
    """A prompt decoded both ways; ``equal`` if all repeats of both gave the same tokens."""

    prompt: DemoPrompt
    plain: Timed
    trie: Timed
    equal: bool

    @property
    def speed_up(self) -> float:
        """How many times faster the trie was."""
        return self.plain.seconds / self.trie.seconds


def show_prompt(console: Console, pair: Pair) -> None:
    """Print a prompt's title, the end of the prompt, both texts, and their comparison."""
    console.print()
    console.rule(f"[bold]{pair.prompt['title']}[/] [dim]· {pair.prompt['kind']}[/]", align="left", style="dim")
    console.print(Text(_end_of(pair.prompt["prompt"]), style="dim italic"))
    if console.is_terminal and console.width >= WIDE:
        _side_by_side(console, pair)
    elif pair.equal and not console.is_terminal:
        _plainly(console, pair)
    else:
        for panel in _panels(pair):
            console.print(panel)
    console.print(_verdict(pair))


def show_summary(console: Console, pairs: Sequence[Pair], repeats: int, warm: bool) -> None:
    """Print one row per prompt, and one for all."""
    console.print()
    table = Table(box=box.SIMPLE_HEAD, title="plain decoding and the trie", title_style="bold", pad_edge=False)
    for name in ("", "tokens", "plain tok/s", "trie tok/s", "tok/step", "speed-up", "same text"):
        table.add_column(name, justify="left" if name in ("", "same text") else "right")
    for pair in pairs:
        table.add_row(pair.prompt["kind"], *_numbers([pair]))
    if len(pairs) > 1:
        table.add_section()
        table.add_row("all", *_numbers(pairs), style="bold")
    console.print(table)
    runs = f"medians of {repeats} runs" if repeats > 1 else "one run"
    memory = "a trie that remembers earlier runs" if warm else "an empty trie each time"
    console.print(f"[dim]{runs}, greedy, {memory}; the time includes reading the prompt[/]")


def _numbers(pairs: Sequence[Pair]) -> list[str]:
    tokens = sum(len(pair.trie.token_ids) for pair in pairs)
    plain, trie = sum(pair.plain.seconds for pair in pairs), sum(pair.trie.seconds for pair in pairs)
    steps = sum(len(pair.trie.token_ids) / pair.trie.tokens_per_step for pair in pairs)
    equal = all(pair.equal for pair in pairs)
    return [
        str(tokens),
        f"{tokens / plain:.1f}",
        f"{tokens / trie:.1f}",
        f"{tokens / steps:.2f}",
        f"{plain / trie:.2f}×",
        "[green]✓[/]" if equal else "[bold red]✗ different[/]",
    ]


def _side_by_side(console: Console, pair: Pair) -> None:
    grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(*_panels(pair))
    console.print(grid)


def _panels(pair: Pair) -> tuple[Panel, Panel]:
    plain = _panel(pair.plain, "plain", "dim", False)
    return plain, _panel(pair.trie, "trie", "green", True)


def _panel(timed: Timed, name: str, border: str, coloured: bool) -> Panel:
    return Panel(
        _text(timed, coloured),
        title=f"[bold]{name}[/]",
        subtitle=_speed(timed),
        title_align="left",
        subtitle_align="left",
        border_style=border,
        padding=(0, 1),
    )


def _plainly(console: Console, pair: Pair) -> None:
    """For a pipe: the text once, unchanged, and both speeds."""
    console.print(Text("".join(piece.text for piece in pair.trie.pieces)), soft_wrap=True)
    console.print(f"plain: {_speed(pair.plain)}")
    console.print(f"trie:  {_speed(pair.trie)}")


def _text(timed: Timed, coloured: bool) -> Text:
    text = Text()
    for piece in timed.pieces:
        text.append(printable(piece.text), DRAFTED if coloured and piece.drafted else None)
    return text


def _speed(timed: Timed) -> str:
    return f"{timed.tokens_per_second:.1f} tok/s · {timed.tokens_per_step:.2f} tok/step · {timed.seconds:.2f} s"


def _verdict(pair: Pair) -> str:
    if not pair.equal:
        return "[bold red]✗ the texts differ[/]"
    return f"[green]✓ same text, token for token[/] · [bold]{pair.speed_up:.2f}× as fast[/]"


def _end_of(prompt: str, lines: int = 3) -> str:
    """The last lines of a prompt."""
    kept = prompt.rstrip("\n").split("\n")
    return "\n".join((["…"] if len(kept) > lines else []) + kept[-lines:])
