"""Starts replicas on Ray, and ends them. With ``RAY_ADDRESS`` they run on that cluster, else on this machine alone."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import ASGIApp

from forerun.engine.engine import Engine
from forerun.replicas.exchange import Exchange
from forerun.replicas.front import Front
from forerun.replicas.replica import Replica
from forerun.replicas.replica_messages import Asked, Start
from forerun.replicas.resources import Node, Resources, share
from forerun.server.gate import OPEN, Gate
from forerun.server.keys import Keys
from forerun.server.page import FILES
from forerun.server.settings import ServerSettings

log = logging.getLogger(__name__)

APP, REPLICA, EXCHANGE = "forerun", "Replica", "forerun-exchange"
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is reported to Ray's makers
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # by default 5 seconds, after which a busy machine's is killed
}
"""For Ray, where the environment does not say otherwise."""


def check(told: ServerSettings) -> None:
    """Refuse settings that replicas do not have.

    Raises:
        ValueError: says which.
    """
    if told.index is not None:
        raise ValueError("index is for one server: replicas bring what they learn to each other, and keep no folder")
    if told.port == 0:
        raise ValueError("port is 0; with replicas it must be named")
    if ":" in told.device:
        raise ValueError(f"device is {told.device}; Ray gives each replica a GPU of its own: name it cuda")


def serve(told: ServerSettings, build: Callable[[ServerSettings], Engine]) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        told: checked settings.
        build: makes a replica's engine; importable there.

    Raises:
        ValueError: if the cluster is too small, or something else is served there.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.serve

    ready, ended = threading.Event(), threading.Event()
    with suppress(KeyboardInterrupt), _signals(ready, ended), _joined(told):
        ray.serve.start(http_options={"host": told.host, "port": told.port})
        plain = ServerSettings.model_construct(**dict(told))  # its class may be one of this process alone
        ray.serve.run(_application(plain, build), name=APP, route_prefix="/")
        log.info("%d replicas answer at http://%s:%d", told.replicas, told.host, told.port)
        ready.set()
        ended.wait()


@contextmanager
def _joined(told: ServerSettings) -> Iterator[None]:
    """The cluster that the environment names, or one of this machine alone; at the end nothing is served there."""
    import ray
    import ray.serve

    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False)
    else:
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
    try:
        served = ray.serve.status().applications
        if served:
            raise ValueError(
                f"the cluster serves {', '.join(served)} already, whose address and end would be this one's"
            )
        _resources(told)
        try:
            yield
        finally:
            ray.serve.shutdown()
    finally:
        ray.shutdown()


def _resources(told: ServerSettings) -> Resources:
    import ray

    nodes = [Node.of(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    return share(nodes, told.replicas, told.device)


def _application(told: ServerSettings, build: Callable[[ServerSettings], Engine]) -> Any:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    lasting = {"name": EXCHANGE, "namespace": APP, "max_restarts": -1, "get_if_exists": True}
    exchange = ray.remote(Exchange).options(num_cpus=0, **lasting).remote()
    resources = _resources(told)
    replica = serve.deployment(Replica).options(
        name=REPLICA,
        num_replicas=told.replicas,
        max_ongoing_requests=told.rows + told.waiting + told.connections,  # the scheduler refuses, with its reason
        ray_actor_options={"num_cpus": resources.processors, "num_gpus": resources.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="forerun.replicas.router:BeginningRouter", request_router_kwargs={"rows": told.rows}
        ),
        graceful_shutdown_timeout_s=told.drain + 5,
    )
    front = serve.deployment(serve.ingress(lambda: _front(told))()).options(
        name="Front", num_replicas=1, max_ongoing_requests=told.connections, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replica.bind(told, build, exchange))


def _front(told: ServerSettings) -> ASGIApp:
    import ray
    from ray import serve
    from ray.exceptions import RayActorError

    handle = serve.get_deployment_handle(REPLICA, app_name=APP).options(stream=True)

    async def answer(asked: Asked) -> AsyncIterator[Start | bytes]:
        response = handle.answer.remote(asked)
        try:
            async for part in response:
                yield part
        finally:
            response.cancel()

    async def figures() -> Mapping[str, str]:
        exchange = ray.get_actor(EXCHANGE, namespace=APP)
        return await exchange.figures.remote()  # type: ignore[no-any-return]

    keys = Keys([key.get_secret_value() for key in told.api_keys])
    pages = FILES if told.page else {}
    return Gate(Front(answer, figures, (RayActorError,)), keys, told.request_bytes, (*OPEN, *pages))


@contextmanager
def _signals(ready: threading.Event, ended: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set ``ended``; the first one interrupts what is done before all is ``ready``."""

    def end(*_: object) -> None:
        interrupts = not (ready.is_set() or ended.is_set())
        ended.set()
        if interrupts:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
