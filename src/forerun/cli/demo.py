"""``forerun demo``: compare plain decoding and ``auto``, prompt by prompt, by output and time."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from forerun import __version__
from forerun.cli.bench_options import DemoOptions
from forerun.cli.commands import FAILED
from forerun.cli.terminal import DRAFTED, preparing, printable, progress_bar, say, stderr, stdout
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, load, quiet
from forerun.models.text.detokenize import Detokenizer, Piece
from forerun.reference import DemoPrompt, demo_prompts

AUTO = "auto"
WARM_UP_TOKENS = 8
SHOWN_LINES = 3  # of the end of a prompt
WIDE = 96
"""Columns needed to show two outputs side by side."""
Run = tuple[Request, float]
"""A finished request, and its seconds, including preparation."""


@dataclass(frozen=True)
class Timed:
    """A prompt's median run: ``seconds`` includes prefill."""

    token_ids: list[int]
    pieces: list[Piece]
    seconds: float
    tokens_per_step: float

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds

    @property
    def speed(self) -> str:
        """Describe the run's figures."""
        return f"{self.tokens_per_second:.1f} tok/s · {self.tokens_per_step:.2f} tokens per step · {self.seconds:.2f} s"


@dataclass(frozen=True)
class Pair:
    """A prompt decoded both ways; ``equal`` if all repeats of both gave the same tokens."""

    prompt: DemoPrompt
    plain: Timed
    auto: Timed
    equal: bool

    @property
    def speed_up(self) -> float:
        """Return the speed of ``auto`` relative to plain decoding."""
        return self.plain.seconds / self.auto.seconds


class Stage:
    """The bundled model with two engines."""

    def __init__(self, warm: bool, repeats: int) -> None:
        model, tokenizer = load(BUNDLED)
        self.plain = Engine(model, "none", tokenizer=tokenizer)
        self.auto = Engine(model, AUTO, tokenizer=tokenizer)
        self.warm, self.repeats = warm, repeats

    def warm_up(self, prompt: str) -> None:
        """Compile and allocate before anything is timed."""
        for engine in (self.plain, self.auto):
            engine.generate(prompt, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
        self._forget()

    def _forget(self) -> None:
        self.auto.set_drafter(AUTO)

    def decode(self, prompt: DemoPrompt) -> Pair:
        """Decode a prompt both ways, alternating."""
        plain: list[Run] = []
        auto: list[Run] = []
        with progress_bar(stderr(), f"{prompt['kind']}, plain and {AUTO}") as progress:
            for done in range(self.repeats):
                progress(done, self.repeats)
                plain.append(self._once(self.plain, prompt))
                if not self.warm:
                    self._forget()
                auto.append(self._once(self.auto, prompt))
        texts = {tuple(request.generated.tolist()) for request, _ in plain + auto}
        return Pair(prompt, self._timed(plain), self._timed(auto), len(texts) == 1)

    def _once(self, engine: Engine, prompt: DemoPrompt) -> Run:
        begin = time.perf_counter()
        limit = prompt["max_new_tokens"]
        result = engine.generate(prompt["prompt"], max_new_tokens=limit, do_sample=False)
        return result.requests[0], time.perf_counter() - begin

    def _timed(self, runs: Sequence[Run]) -> Timed:
        """Select the run of median time; drafts, and so steps, differ between runs."""
        (request, seconds), tokenizer = sorted(runs, key=itemgetter(1))[len(runs) // 2], self.plain.tokenizer
        assert tokenizer is not None
        detokenizer = Detokenizer(tokenizer, request.prompt.tolist())
        marked = zip(request.generated.tolist(), request.stats.drafted_mask(), strict=True)
        pieces = [piece for token, drafted in marked for piece in detokenizer.add(token, drafted)]
        ids, steps = request.generated.tolist(), request.stats.tokens_per_step
        return Timed(ids, [*pieces, *detokenizer.flush()], seconds, steps)


def run(options: DemoOptions) -> None:
    """Run the demo; exit with status 1 if an output differs."""
    prompts = chosen(options)
    out = None if options.json else stdout(options.color)
    pairs = []
    say(f"{len(prompts)} prompts, each {options.repeats} times without drafts and with {AUTO}")
    with quiet():
        with preparing("loading and testing the bundled model"):
            stage = Stage(options.warm, options.repeats)
            stage.warm_up(prompts[0]["prompt"])
        for prompt in prompts:
            pairs.append(stage.decode(prompt))
            if out is not None:
                show_prompt(out, pairs[-1])
    if out is None:
        typer.echo(json.dumps(_as_json(options, pairs), ensure_ascii=False))
    else:
        show_summary(out, pairs, options.repeats, options.warm)
    if not all(pair.equal for pair in pairs):
        raise typer.Exit(FAILED)


def chosen(options: DemoOptions) -> list[DemoPrompt]:
    """Select prompts by kind, and cap their number of tokens."""
    selection = [prompt for prompt in demo_prompts() if not options.kind or prompt["kind"] in options.kind]
    for prompt in selection:
        prompt["max_new_tokens"] = min(prompt["max_new_tokens"], options.max_new_tokens or prompt["max_new_tokens"])
    return selection


def show_prompt(console: Console, pair: Pair) -> None:
    """Print a prompt's title and end, both outputs, and their comparison."""
    console.print()
    console.rule(f"[bold]{pair.prompt['title']}[/] [dim]· {pair.prompt['kind']}[/]", align="left", style="dim")
    console.print(Text(_end_of(pair.prompt["prompt"]), style="dim italic"))
    panels = _panel(pair.plain, "plain", "dim", False), _panel(pair.auto, AUTO, "green", True)
    if console.is_terminal and console.width >= WIDE:
        grid = Table.grid(expand=True, padding=(0, 1, 0, 0))
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(*panels)
        console.print(grid)
    elif pair.equal and not console.is_terminal:  # in a pipe: the output once, unchanged, and both speeds
        console.print(Text(pair.auto.text), soft_wrap=True)
        console.print(f"plain: {pair.plain.speed}")
        console.print(f"{AUTO}:  {pair.auto.speed}")
    else:
        for panel in panels:
            console.print(panel)
    if pair.equal:
        console.print(f"[green]✓ same text, token for token[/] · [bold]{pair.speed_up:.2f}× as fast[/]")
    else:
        console.print("[bold red]✗ the texts differ[/]")


def show_summary(console: Console, pairs: Sequence[Pair], repeats: int, warm: bool) -> None:
    """Print one row per prompt, and one for all."""
    console.print()
    table = Table(box=box.SIMPLE_HEAD, title=f"plain decoding and {AUTO}", title_style="bold", pad_edge=False)
    for name in ("", "tokens", "plain tok/s", f"{AUTO} tok/s", "tokens per step", "speed-up", "same text"):
        table.add_column(name, justify="left" if name in ("", "same text") else "right")
    for pair in pairs:
        table.add_row(pair.prompt["kind"], *_numbers([pair]))
    if len(pairs) > 1:
        table.add_section()
        table.add_row("all", *_numbers(pairs), style="bold")
    console.print(table)
    runs = f"medians of {repeats} runs" if repeats > 1 else "one run"
    memory = "drafts from earlier runs, too" if warm else "an empty index before each run"
    console.print(f"[dim]{runs}, greedy, {memory}; the time includes prefill[/]")


def _numbers(pairs: Sequence[Pair]) -> list[str]:
    tokens = sum(len(pair.auto.token_ids) for pair in pairs)
    plain, auto = sum(pair.plain.seconds for pair in pairs), sum(pair.auto.seconds for pair in pairs)
    steps = sum(len(pair.auto.token_ids) / pair.auto.tokens_per_step for pair in pairs)
    equal = all(pair.equal for pair in pairs)
    return [
        str(tokens),
        f"{tokens / plain:.1f}",
        f"{tokens / auto:.1f}",
        f"{tokens / steps:.2f}",
        f"{plain / auto:.2f}×",
        "[green]✓[/]" if equal else "[bold red]✗ different[/]",
    ]


def _panel(timed: Timed, name: str, border: str, coloured: bool) -> Panel:
    text = Text()
    for piece in timed.pieces:
        text.append(printable(piece.text), DRAFTED if coloured and piece.drafted else None)
    return Panel(
        text,
        title=f"[bold]{name}[/]",
        subtitle=timed.speed,
        title_align="left",
        subtitle_align="left",
        border_style=border,
        padding=(0, 1),
    )


def _end_of(prompt: str) -> str:
    lines = prompt.rstrip("\n").split("\n")
    return "\n".join((["…"] if len(lines) > SHOWN_LINES else []) + lines[-SHOWN_LINES:])


def _as_json(options: DemoOptions, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "forerun": __version__,
        "model": BUNDLED,
        "repeats": options.repeats,
        "warm": options.warm,
        "equal": all(pair.equal for pair in pairs),
        "speed_up": round(sum(p.plain.seconds for p in pairs) / sum(p.auto.seconds for p in pairs), 3),
        "prompts": [_pair_as_json(pair) for pair in pairs],
    }


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    def way(timed: Timed) -> dict[str, float]:
        return {
            "seconds": round(timed.seconds, 6),
            "tokens_per_second": round(timed.tokens_per_second, 2),
            "tokens_per_step": round(timed.tokens_per_step, 4),
        }

    return {
        "kind": pair.prompt["kind"],
        "title": pair.prompt["title"],
        "text": pair.auto.text,
        "tokens": len(pair.auto.token_ids),
        "equal": pair.equal,
        "speed_up": round(pair.speed_up, 3),
        "plain": way(pair.plain),
        AUTO: way(pair.auto),
    }
