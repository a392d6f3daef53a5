"""``python -m benchmarks server load``: servers under load."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial

import typer
from transformers import PreTrainedTokenizerBase

from benchmarks.long_context.texts import Texts
from benchmarks.reporting.delivery import Delivery
from benchmarks.reporting.tables import Report
from benchmarks.server import levels, servers
from benchmarks.server import load_rows as rows
from benchmarks.server.client import Door
from benchmarks.server.load_bench import Round, ServeBench
from benchmarks.server.load_options import DEFAULT, TRANSFORMERS, ServingOptions
from benchmarks.server.load_report import fill
from benchmarks.server.load_requests import Ask, mixed
from benchmarks.server.servers import ServedModel, ServerContestant
from benchmarks.tasks.questions import Files
from benchmarks.tasks.task_prompts import LackingError, Tasks, check_names
from benchmarks.tasks.task_sets import tasks_for
from forerun.bench.journal import Journal, Turn, about
from forerun.bench.machine import plain_values
from forerun.bench.prompts_file import TemplateEncoder, check_length
from forerun.cli.models import encoder as plain_encoder
from forerun.cli.terminal import say, stderr, working
from forerun.drafting.recipes import check_drafter
from forerun.models.forward.inputs import position_limit
from forerun.models.loading.load import find, load
from forerun.models.loading.stored_weights import dtype_name

NEEDED = ("httpx", "matplotlib", "fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "llguidance")
LEFT_OUT = ("copy",)
"""Tasks that are not asked unless they are named: to repeat a passage is no typical use."""
FAILED = 1


def run(options: ServingOptions) -> None:
    """Measure, print the tables, and write JSON, Markdown and plots; exit status 1 if load changed a text.

    Raises:
        ValueError: for what cannot be asked or served.
        ServerError: if a server does not start, or answers nothing.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"server load needs {', '.join(missing)}; install them by: pip install 'forerun[serve,bench]'")
    for name in options.drafters:
        if name not in (DEFAULT, TRANSFORMERS):
            check_drafter(name)
    subject, rounds = _prepared(options)
    report = Report("Servers under load", plain_values(options) | {"dtype": subject.dtype})
    delivery = Delivery(report, options.out, "serve", options.json)

    def save(turns: Sequence[Turn], whole: bool) -> None:
        fill(report, turns, rounds, whole)
        delivery.save()

    shared = about(options.model, subject.dtype, subject.device)
    journal = Journal(options.out / "serve-turns.jsonl", shared, options.resume)
    contestants = _contestants(options, subject)

    def start(contestant: ServerContestant) -> AbstractContextManager[Door]:
        log = options.out / "logs" / f"{contestant.name.replace(' ', '-')}.log"
        return servers.started(contestant, subject.chats, log)

    turns = ServeBench(contestants, rounds, start, journal, say, save).run()
    delivery.end()
    if found := rows.wrong(rows.text_rows(turns, rounds)):
        say("\n".join(found))
        raise typer.Exit(FAILED)


def _prepared(options: ServingOptions) -> tuple[ServedModel, list[Round]]:
    """What is served, and all that is asked; the model is read to be checked, and forgotten."""
    with working(stderr(), "loading"):
        model, tokenizer = load(
            options.model, options.dtype, device=options.device, trust_remote_code=options.trust_remote_code
        )
    encoder = TemplateEncoder(tokenizer, options.raw)
    subject = ServedModel(
        options.model,
        find(options.model),
        dtype_name(model),
        str(model.device),
        encoder.chats,
        options.trust_remote_code,
    )
    limit = position_limit(model)
    del model
    gc.collect()
    return subject, _rounds(options, encoder, limit)


def _rounds(options: ServingOptions, encoder: TemplateEncoder, limit: int | None) -> list[Round]:
    """Each round has requests of its own: none is known from an earlier one."""
    warm = max([1, *options.clients])
    of_each = warm + levels.needed(options.clients, options.arrivals, options.requests)
    longs = _longs(options, encoder.tokenizer, limit)
    asks = _asks(options, encoder, limit, of_each * options.rounds)
    found = []
    for number in range(options.rounds):
        mine = asks[number * of_each : (number + 1) * of_each]
        seed = options.seed + number
        built = levels.build(options.clients, options.arrivals, options.requests, mine[warm:], seed)
        # the first request says how transformers serve samples
        first = [Ask(ask.task, ask.prompt, ask.tokens, 0.0, ask.seed) for ask in mine[:warm]]
        found.append(Round(first, built, longs[number] if longs else None, options.checks))
    return found


def _asks(options: ServingOptions, encoder: TemplateEncoder, limit: int | None, count: int) -> list[Ask]:
    """So many requests; tasks that lack something are left out, and named.

    Raises:
        ValueError: for an unknown task, if none is left, or for a prompt that is too long for the model.
    """
    tasks = tasks_for(encoder, Files(options.books, options.maths, options.code))
    default = [name for name in tasks if name not in LEFT_OUT]
    names = default if options.tasks is None else [name.strip() for name in options.tasks.split(",")]
    check_names(names, tasks)
    can = [name for name in names if _can(name, tasks)]
    if not can:
        raise ValueError("no task is left; --tasks names some that need no file, such as json or rag")
    prompts = {name: _drawn(name, tasks, -(-count // len(can))) for name in can}
    lengths = [int(each) for each in options.lengths.split(",")]
    for name, found in prompts.items():
        for prompt in found:
            _check(f"task {name}", len(encoder(prompt)), limit, max(lengths))
    return mixed(prompts, lengths, options.temperature, options.seed)


def _can(name: str, tasks: Tasks) -> bool:
    try:
        tasks[name](1)
    except LackingError as lacking:
        say(f"skipped {name}: {lacking}")
        return False
    return True


def _drawn(name: str, tasks: Tasks, count: int) -> list[str]:
    try:
        return [str(prompt) for prompt in tasks[name](count)]
    except ValueError as error:
        raise ValueError(f"task {name}: {error} (or --requests, --rounds)") from None


def _longs(options: ServingOptions, tokenizer: PreTrainedTokenizerBase, limit: int | None) -> list[Ask]:
    """A long prompt for each round, if one is wanted."""
    if not options.long:
        return []
    _check("--long", options.long, limit, 2)
    texts = Texts.read([options.books] if options.books else (), plain_encoder(tokenizer))
    texts.check(options.rounds, options.long)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    return [
        Ask("long", str(decode(texts.tokens(number, options.long))), 2, 0.0, options.seed)
        for number in range(options.rounds)
    ]


def _check(what: str, tokens: int, limit: int | None, new: int) -> None:
    try:
        check_length(tokens, limit, new)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _contestants(options: ServingOptions, subject: ServedModel) -> list[ServerContestant]:
    """In the order of the options."""
    found = []
    for name in options.drafters:
        if name != TRANSFORMERS:
            found.append(servers.forerun(subject, None if name == DEFAULT else name))
        else:
            found.append(servers.transformers(subject))
    return found
