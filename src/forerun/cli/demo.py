"""``forerun demo``: plain decoding and the trie, prompt by prompt: the same text, and the time of each."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from forerun import __version__
from forerun.cli.demo_view import Pair, Timed, show_prompt, show_summary
from forerun.cli.options import DemoOptions
from forerun.cli.terminal import stderr, stdout, working
from forerun.core.request import Request
from forerun.drafting.drafter import NoDrafter
from forerun.drafting.trie_drafter import TrieDrafter
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, load, quiet
from forerun.models.text.detokenize import Detokenizer, Piece
from forerun.reference import DemoPrompt, demo_prompts

DIFFERENT = 1
WARM_UP_TOKENS = 8
Run = tuple[Request, float]


class Stage:
    """The bundled model with two engines."""

    def __init__(self, engines: tuple[Engine, Engine], warm: bool, repeats: int) -> None:
        self.plain, self.trie = engines
        self.warm = warm
        self.repeats = repeats

    def warm_up(self, prompt: str) -> None:
        """Compile and allocate before anything is timed."""
        for engine in (self.plain, self.trie):
            engine.generate(prompt, max_new_tokens=WARM_UP_TOKENS, do_sample=False)
        self._forget()

    def _forget(self) -> None:
        """Drop all that the engine learned."""
        self.trie.set_drafter(TrieDrafter())

    def decode(self, prompt: DemoPrompt, bar: Progress, task: Any) -> Pair:
        """Decode a prompt both ways, in turns."""
        plain: list[Run] = []
        trie: list[Run] = []
        for _ in range(self.repeats):
            plain.append(self._once(self.plain, prompt))
            if not self.warm:
                self._forget()
            trie.append(self._once(self.trie, prompt))
            bar.advance(task)
        texts = {tuple(request.generated.tolist()) for request, _ in plain + trie}
        return Pair(prompt, self._timed(plain), self._timed(trie), len(texts) == 1)

    def _once(self, engine: Engine, prompt: DemoPrompt) -> Run:
        """The finished request, and its time in seconds, including preparation."""
        begin = time.perf_counter()
        limit = prompt["max_new_tokens"]
        result = engine.generate(prompt["prompt"], max_new_tokens=limit, do_sample=False)
        return result.requests[0], time.perf_counter() - begin

    def _timed(self, runs: Sequence[Run]) -> Timed:
        last, tokenizer = runs[-1][0], self.plain.tokenizer
        assert tokenizer is not None
        seconds = median(seconds for _, seconds in runs)
        return Timed(last.generated.tolist(), pieces_of(last, tokenizer), seconds, last.stats.tokens_per_step)


def pieces_of(request: Request, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The text of a finished request, in pieces."""
    detokenizer = Detokenizer(tokenizer, request.prompt.tolist())
    marked = zip(request.generated.tolist(), request.stats.drafted_mask(), strict=True)
    pieces = [piece for token, drafted in marked for piece in detokenizer.add(token, drafted)]
    return [*pieces, *detokenizer.flush()]


def run(options: DemoOptions) -> None:
    """Run the demo; exit status 1 if a text differs."""
    prompts = chosen(options)
    console = stderr()
    with quiet():
        with working(console, "loading the bundled model"):
            stage = make_stage(options)
            stage.warm_up(prompts[0]["prompt"])
        pairs = _decode_all(stage, prompts, console, None if options.json else stdout(options.color))
    if options.json:
        typer.echo(json.dumps(_as_json(options, pairs), ensure_ascii=False))
    if not all(pair.equal for pair in pairs):
        raise typer.Exit(DIFFERENT)


def chosen(options: DemoOptions) -> list[DemoPrompt]:
    """The prompts of the requested kinds, with the requested limit of tokens.

    Raises:
        ValueError: for an unknown kind.
    """
    prompts = demo_prompts()
    kinds = [prompt["kind"] for prompt in prompts]
    unknown = [kind for kind in options.kind or [] if kind not in kinds]
    if unknown:
        raise ValueError(f"--kind is {unknown[0]!r}; allowed are {', '.join(kinds)}")
    wanted = [prompt for prompt in prompts if prompt["kind"] in (options.kind or kinds)]
    for prompt in wanted:
        prompt["max_new_tokens"] = min(prompt["max_new_tokens"], options.max_new_tokens or prompt["max_new_tokens"])
    return wanted


def make_stage(options: DemoOptions) -> Stage:
    """The bundled model, loaded."""
    model, tokenizer = load(BUNDLED)
    engines = Engine(model, NoDrafter(), tokenizer=tokenizer), Engine(model, TrieDrafter(), tokenizer=tokenizer)
    return Stage(engines, options.warm, options.repeats)


def _decode_all(stage: Stage, prompts: Sequence[DemoPrompt], progress: Console, out: Console | None) -> list[Pair]:
    """Decode every prompt; show each when it is done, then the summary."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    pairs = []
    for prompt in prompts:
        with Progress(*columns, console=progress, transient=True, disable=not progress.is_terminal) as bar:
            task = bar.add_task(prompt["kind"], total=stage.repeats)
            pairs.append(stage.decode(prompt, bar, task))
        if out is not None:
            show_prompt(out, pairs[-1])
    if out is not None:
        show_summary(out, pairs, stage.repeats, stage.warm)
    return pairs


def _as_json(options: DemoOptions, pairs: Sequence[Pair]) -> dict[str, Any]:
    return {
        "forerun": __version__,
        "model": BUNDLED,
        "repeats": options.repeats,
        "warm": options.warm,
        "equal": all(pair.equal for pair in pairs),
        "speed_up": round(sum(p.plain.seconds for p in pairs) / sum(p.trie.seconds for p in pairs), 3),
        "prompts": [_pair_as_json(pair) for pair in pairs],
    }


def _pair_as_json(pair: Pair) -> dict[str, Any]:
    ways = {"plain": pair.plain, "trie": pair.trie}
    return {
        "kind": pair.prompt["kind"],
        "title": pair.prompt["title"],
        "text": "".join(piece.text for piece in pair.trie.pieces),
        "tokens": len(pair.trie.token_ids),
        "equal": pair.equal,
        "speed_up": round(pair.speed_up, 3),
        **{
            name: {
                "seconds": round(way.seconds, 6),
                "tokens_per_second": round(way.tokens_per_second, 2),
                "tokens_per_step": round(way.tokens_per_step, 4),
            }
            for name, way in ways.items()
        },
    }
