"""Statistics as tables."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.core.request import Request
from forerun.core.stats import Stats

BAR_WIDTH = 28


def stats_table(request: Request, drafter: str, exactness: str, loading: float) -> RenderableType:
    """Tabulate a finished or interrupted request's times and its steps' tokens, with the seconds of ``loading``."""
    stats = request.stats
    table = Table(
        box=box.SIMPLE_HEAD, show_header=False, pad_edge=False, title=f"drafter {drafter}", title_style="bold"
    )
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_column(justify="right")
    rows = [("exactness", exactness), ("loading", seconds(loading)), *_rows(stats, request.seed)]
    for left, right in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(*left, *right)
    parts = [table, *([levels(stats)] if stats.middle else []), *([histogram(stats)] if stats.steps else [])]
    return Group(*parts)


def _rows(stats: Stats, seed: int | None) -> list[tuple[str, str]]:
    return [
        ("tokens", str(stats.tokens)),
        ("prefill", seconds(stats.prefill_seconds)),
        ("steps", str(stats.steps)),
        ("propose", seconds(stats.propose_seconds)),
        ("tokens per step", f"{stats.tokens_per_step:.2f}"),
        ("score", seconds(stats.score_seconds)),
        ("accepted drafts", f"{sum(stats.accepted)} of {sum(stats.drafted)} ({stats.acceptance:.0%})"),
        ("verify", seconds(stats.verify_seconds)),
        ("seed", "none (greedy)" if seed is None else str(seed)),
        ("tokens per second", f"{stats.tokens_per_second:.1f}"),
    ]


def levels(stats: Stats) -> Table:
    """Tabulate the verifying levels: the target, then those over cheaper caches inside its drafter."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("level", "passes", "drafted", "accepted", "tokens a pass", "its passes", "its drafts"):
        table.add_column(name, justify="left" if name == "level" else "right")
    level: Stats | None = stats
    name = "target, full cache"
    while level is not None:
        accepted = f"{sum(level.accepted)} ({level.acceptance:.0%})"
        counts = (str(level.steps), str(sum(level.drafted)), accepted, f"{level.tokens_per_step:.2f}")
        table.add_row(name, *counts, seconds(level.score_seconds), seconds(level.propose_seconds))
        level, name = level.middle, "middle level"
    return table


def histogram(stats: Stats) -> Table:
    """Tabulate how many steps added 1, 2, ... tokens."""
    table = Table(box=None, pad_edge=False, show_header=False, title="tokens per step", title_style="dim")
    table.add_column(justify="right")
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", style="dim")
    counts = stats.histogram()
    for tokens, steps in counts.items():
        table.add_row(str(tokens), bar(steps / max(counts.values())), f"{steps} step{'s' * (steps != 1)}")
    return table


def bar(share: float) -> Text:
    """Draw a bar of up to ``BAR_WIDTH`` cells, in eighths."""
    eighths = max(1, round(share * BAR_WIDTH * 8))
    return Text("█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip(), style="green")


def seconds(value: float) -> str:
    """Format seconds; in milliseconds below one second."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"
