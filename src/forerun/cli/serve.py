"""``forerun serve``: an OpenAI-compatible server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import signal
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import typer

from forerun.cli.models import settings
from forerun.cli.options import LongOptions
from forerun.cli.ranks import followed, leading, ranks
from forerun.cli.serve_options import ServeOptions
from forerun.cli.terminal import stderr, working
from forerun.drafting.recipes import check_drafter
from forerun.engine.engine import BUDGET, Engine
from forerun.models.loading.load import load, quiet

if TYPE_CHECKING:
    from forerun.server.settings import ServerSettings

log = logging.getLogger(__name__)
NEEDED = ("fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "llguidance")
FAILED = 1


def run(options: ServeOptions) -> None:
    """Serve until told to end.

    Raises:
        ValueError: for wrong settings, or if what a server needs is not installed.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"forerun serve needs {', '.join(missing)}; install them by: pip install 'forerun[serve]'")
    from forerun.server.settings import free_disk, read_settings
    from forerun.server.warming import check_files

    told = read_settings(options.flags(), options.config)
    check_drafter(told.drafter)
    check_files(told.warm, told.namespaces)
    if not told.api_keys and not _loopback(told.host):
        log.warning("%s is open to other computers, and there are no API keys: anybody may use it", told.host)
    if told.ray:
        _serve_replicas(told)
        return
    if told.replicas > 1:
        raise ValueError(f"replicas is {told.replicas}, which needs --ray")
    if told.kv_folder is not None:
        free_disk(told.kv_folder)  # before the model is loaded
    if followed(lambda: build_engine(told.model_copy(update={"drafter": "none", "draft_model": None}))):
        return
    with quiet(), closing(build_engine(told)) as engine, leading(engine):
        _serve(engine, told)


def _serve_replicas(told: ServerSettings) -> None:
    if ranks() > 1:
        raise ValueError(f"--ray starts its own processes, and torchrun has started {ranks()}; do without one of them")
    if importlib.util.find_spec("ray") is None:
        raise ValueError("--ray needs Ray Serve; install it by: pip install 'forerun[ray]'")
    from forerun.replicas import cluster

    cluster.check(told)
    cluster.serve(told, build_engine)


def build_engine(told: ServerSettings) -> Engine:
    """The engine that settings describe."""
    with working(stderr(), f"loading {told.model}"):
        model, tokenizer = load(
            told.model, told.dtype, device=told.device, trust_remote_code=told.trust_remote_code, ranks=ranks()
        )
        built = settings(
            LongOptions(draft_model=told.draft_model),
            told.model,
            [told.drafter],
            model,
            tokenizer,
            told.trust_remote_code,
        )
        return Engine(
            model,
            told.drafter,
            settings=built,
            tokenizer=tokenizer,
            budget=BUDGET if told.budget is None else told.budget,
            prefix_cache=int(told.prefix_cache),
            kv_store=told.kv_store,
            kv_store_limit=None if told.kv_store_limit is None else int(told.kv_store_limit),
            kv_memory=told.tiers(model.device),
        )


def _serve(engine: Engine, told: ServerSettings) -> None:
    """Serve until a signal comes."""
    from forerun.server.app import create_app
    from forerun.server.drain import DrainingServer

    limits = told.limits(engine.target.device)
    log.info("%s as %r: %s rows, %s", told.model, told.served_name, limits.rows, _memory(engine, limits.memory))
    if engine.tiers is not None and (told.prefix_cache or told.kv_store):
        log.warning("texts that are not on the device as a whole share no beginnings: each reads its whole prompt")
    server = DrainingServer(create_app(engine, told, limits), told.host, told.port, told.drain, told.connections)
    # uvicorn ends by itself, and then raises the signal again for those who were there before it
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with suppress(KeyboardInterrupt):
            server.run()
    finally:
        signal.signal(signal.SIGTERM, previous)
    if server.failed:
        raise typer.Exit(FAILED)


def _memory(engine: Engine, device: int) -> str:
    """How much there is for keys and values."""
    if engine.tiers is None:
        return f"{device} bytes for keys and values"
    memory = engine.tiers.memory
    told = f"for keys and values {memory.device} bytes on the device, {memory.host} in the host's memory"
    return told if memory.folder is None else f"{told}, {memory.file} in files in {memory.folder}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
