"""``forerun serve``: an OpenAI-compatible server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import signal
import socket
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING

import typer

from forerun.cli.commands import FAILED
from forerun.cli.log import server_log
from forerun.cli.models import check_drafters, make_engine
from forerun.cli.rank_check import followed, leading, ranks
from forerun.cli.serve_options import ServeOptions
from forerun.core.install_command import install_command
from forerun.engine.engine import Engine
from forerun.models.loading.load import quiet

if TYPE_CHECKING:
    from forerun.server.settings import ServerSettings

log = logging.getLogger(__name__)
SERVE_PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "llguidance")


def run(options: ServeOptions) -> None:
    """Serve until a signal; raise ValueError for wrong settings or a missing package, OSError for a busy port."""
    missing = [name for name in SERVE_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"forerun serve needs {', '.join(missing)}; install them by: {install_command('serve')}")
    from forerun.server.index_files import check_files
    from forerun.server.settings import free_disk, read_settings

    settings = read_settings(options.flags(), options.config)
    with server_log(settings.log_json):
        check_drafters([settings.drafter], settings)
        settings.tenant_keys()  # fail before the model is loaded
        check_files(settings.warm, settings.namespaces)
        if not settings.api_keys and not _loopback(settings.host):
            log.warning("%s is open to other computers, and there are no API keys: anyone may use it", settings.host)
        if settings.ray:
            _serve_replicas(settings)
            return
        if settings.replicas > 1:
            raise ValueError(f"replicas is {settings.replicas}, which needs --ray")
        if settings.kv_folder is not None:
            free_disk(settings.kv_folder)  # before the model is loaded
        if followed(lambda: build_engine(settings.model_copy(update={"drafter": "none", "draft_model": None}))):
            return
        _serve(settings)


def _serve(settings: ServerSettings) -> None:
    from forerun.server.http_server import bound_sockets

    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bound_sockets(settings.host, settings.port)]
        stack.enter_context(quiet())
        engine = stack.enter_context(closing(build_engine(settings)))
        stack.enter_context(leading(engine))
        _serve_engine(engine, settings, sockets)


def _serve_replicas(settings: ServerSettings) -> None:
    if ranks() > 1:
        raise ValueError(f"--ray starts its own processes, and torchrun has started {ranks()}; drop one of them")
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f"--ray needs Ray Serve; install it by: {install_command('ray')}")
    from forerun.replicas import cluster
    from forerun.server.http_server import bound_sockets

    cluster.check(settings)
    for one in bound_sockets(settings.host, settings.port):  # fail before anything is started
        one.close()
    cluster.serve(settings, build_engine)


def build_engine(settings: ServerSettings) -> Engine:
    """Make the engine that the settings describe."""
    limit, key = settings.kv_store_limit, settings.kv_store_key
    return make_engine(
        settings,
        lambda device: {
            "prefix_cache": settings.prefix_limit(device),
            "kv_store": settings.kv_store,
            "kv_store_limit": None if limit is None else int(limit),
            "kv_store_expiry": settings.kv_store_expiry,
            "kv_store_key": None if key is None else key.get_secret_value().encode(),
            "kv_memory": settings.tiers(device),
        },
    )


def _serve_engine(engine: Engine, settings: ServerSettings, sockets: list[socket.socket]) -> None:
    from forerun.server.app import create_app
    from forerun.server.http_server import DrainingServer

    limits = settings.limits(engine.target.device)
    memory = _memory(engine, limits.memory)
    log.info("%s as %r: %s rows, %s", settings.model, settings.served_name, limits.rows, memory)
    if engine.tiers is not None and (settings.prefix_cache != 0 or settings.kv_store):
        log.warning(
            "requests whose keys and values are not all on the device share no prefixes: each prefills its whole prompt"
        )
    app = create_app(engine, settings, limits)
    server = DrainingServer(app, settings.drain, settings.connections, settings.page)
    # uvicorn raises the signal again, for the earlier handler, after it has stopped
    previous = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with suppress(KeyboardInterrupt):
            server.serve_on(sockets)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if app.state.service.scheduler.failed:
        raise typer.Exit(FAILED)


def _memory(engine: Engine, device: int) -> str:
    """Describe the memory for keys and values."""
    if engine.tiers is None:
        return f"{_size(device)} for keys and values"
    memory = engine.tiers.memory
    text = f"for keys and values {_size(memory.device)} on the device, {_size(memory.host)} in the host's memory"
    return text if memory.folder is None else f"{text}, {_size(memory.file)} in files in {memory.folder}"


def _size(size: int | None) -> str:
    if size is None:
        return "all there is"
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
