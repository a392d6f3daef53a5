"""``forerun generate``: continue a prompt, and show the output while it is generated."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import typer

from forerun import __version__
from forerun.cli.commands import INTERRUPTED
from forerun.cli.generate_options import ChatOptions, GenerateOptions, WriterOptions
from forerun.cli.models import check_drafters, make_engine
from forerun.cli.prompt_input import check_text, read_prompt
from forerun.cli.rank_check import followed, leading
from forerun.cli.stats_tables import levels, stats_table
from forerun.cli.terminal import PrefillBar, TextWriter, stderr
from forerun.core.request import Request
from forerun.engine.conversation import ConversationTurn
from forerun.engine.engine import Engine
from forerun.engine.result import Commit
from forerun.models.loading.load import quiet
from forerun.models.text.detokenize import Detokenizer
from forerun.models.text.prompts import Prompts, encode, has_template

OptionsT = TypeVar("OptionsT", bound=WriterOptions)


@dataclass
class Output:
    """A request's output, shown by a writer as it grows; ``writer`` None shows nothing."""

    detokenizer: Detokenizer
    writer: TextWriter | None
    drafted: list[bool] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    interrupted: bool = False

    def extend(self, tokens: list[int], drafted: int) -> None:
        """Add tokens, of which the first ``drafted`` were accepted drafts."""
        for i, token in enumerate(tokens):
            self.drafted.append(i < drafted)
            self._show(self.detokenizer.add(token, i < drafted))

    def finish(self, request: Request) -> None:
        """Add tokens that an interrupted step committed but did not yield, and flush the detokenizer."""
        self.extend(request.generated[len(self.drafted) :].tolist(), 0)
        self._show(self.detokenizer.flush())

    def summary(self, request: Request) -> dict[str, Any]:
        return {
            "text": "".join(self.pieces),
            "token_ids": request.generated.tolist(),
            "drafted": self.drafted,
            "finish_reason": request.finish_reason or "interrupted",
            "seed": request.seed,
            "prompt_tokens": request.prompt_length,
            "stats": request.stats.summary(),
        }

    def _show(self, pieces: Iterator[Any]) -> None:
        for piece in pieces:
            self.pieces.append(piece.text)
            if self.writer is not None:
                self.writer.write(piece.text, piece.drafted)


def show_text(
    options: GenerateOptions | ChatOptions,
    engine: Engine,
    request: Request,
    commits: Generator[Commit, None, None] | ConversationTurn,
    bar: PrefillBar,
) -> Output:
    """Show an output while it is generated, to its end or until Ctrl-C; nothing with ``--json``."""
    writer = None if options.json else TextWriter(options.color)
    output = Output(Detokenizer(engine.tokenizer, request.prompt.tolist()), writer)
    try:
        with closing(commits):
            for commit in commits:
                bar.close()
                output.extend(commit.tokens, commit.drafted)
    except KeyboardInterrupt:
        output.interrupted = True
    finally:
        bar.close()
        output.finish(request)
    if writer is not None:
        writer.end()
    return output


def run(options: GenerateOptions) -> None:
    """Run the generation."""
    if followed(lambda: make_engine(following(options), lambda _: kept_texts(options))):
        return
    prompt = check_text(options.prompt) if options.prompt is not None else read_prompt(options.prompt_file or "-")
    check_drafters([options.drafter], options)
    prediction = None if options.prediction is None else read_prompt(str(options.prediction))
    known = [read_prompt(str(path)) for path in options.warm or []]
    kept = kept_texts(options)
    began = time.perf_counter()
    with quiet(), closing(make_engine(options, lambda _: kept)) as engine, leading(engine):
        loading = time.perf_counter() - began
        (ids,) = encode(_prompt(options, prompt, engine), engine.tokenizer)
        (request,) = engine.requests(ids[-(options.context or len(ids)) :], prediction=prediction, **sampling(options))
        with _trie_kept(options, engine):
            engine.warm(known, options.namespace)
            interrupted = _generate(options, engine, request, loading)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _prompt(options: GenerateOptions, text: str, engine: Engine) -> Prompts:
    """Return the prompt unchanged; for a chat model, as messages."""
    templated = has_template(engine.tokenizer)
    if not (templated if options.chat is None else options.chat):
        if options.system is not None:
            raise ValueError(f"--system is for chat models, and {options.model} has no chat template")
        return text
    if not templated:
        raise ValueError(f"{options.model} has no chat template; leave --chat out to continue the prompt unchanged")
    if options.context is not None:
        raise ValueError("--context would cut the chat template's beginning off; add --raw")
    system = options.system
    first = [] if system is None else [{"role": "system", "content": check_text(system, "--system")}]
    return [*first, {"role": "user", "content": text}]


def _generate(options: GenerateOptions, engine: Engine, request: Request, loading: float) -> bool:
    """Generate and print; return whether it was interrupted."""
    bar = PrefillBar(stderr())
    output = show_text(options, engine, request, engine.run([request], bar), bar)
    if options.stats:
        stderr().print(stats_table(request, options.drafter, engine.exactness.level, loading))
    elif request.stats.middle is not None and not options.json:
        stderr().print(levels(request.stats))
    if options.json:
        asked = {"forerun": __version__, "model": options.model, "drafter": options.drafter}
        typer.echo(json.dumps(asked | output.summary(request), ensure_ascii=False))
    return output.interrupted


def sampling(options: WriterOptions) -> dict[str, Any]:
    """Return the engine's options; the model's configuration supplies those not given."""
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "namespace": options.namespace,
        "verification": options.verification,
        "do_sample": options.temperature > 0,
        "repetition_penalty": options.repetition_penalty,
        "stop_strings": options.stop or None,
    }
    if options.temperature > 0:
        arguments |= {"temperature": options.temperature, "top_k": options.top_k or 0, "min_p": options.min_p}
        arguments |= {"top_p": 1.0 if options.top_p is None else options.top_p, "seed": options.seed}
    return {name: value for name, value in arguments.items() if value is not None}


def kept_texts(options: GenerateOptions) -> dict[str, Any]:
    """Return the engine's settings for keys and values."""
    return {"kv_store": options.kv_store, "kv_store_limit": options.kv_store_limit, "kv_memory": options.memory}


def following(options: OptionsT) -> OptionsT:
    """Return these options for a rank other than 0, which drafts nothing."""
    return replace(options, drafter="none", draft_model=None)


@contextmanager
def _trie_kept(options: GenerateOptions, engine: Engine) -> Iterator[None]:
    """Load the trie from its file on entry, and save it on any exit."""
    path = options.trie_file
    if path is None:
        yield
        return
    if path.exists():
        engine.load_trie(path)
    try:
        yield
    finally:
        engine.save_trie(path)
