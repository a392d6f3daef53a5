"""Start and stop replicas on Ray: on the cluster at ``RAY_ADDRESS``, or else on this machine."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from forerun.engine.engine import Engine
from forerun.replicas.exchange import Exchange
from forerun.replicas.front import ForwardedRequest, Front, ResponseHead
from forerun.replicas.replica import Replica
from forerun.server.app import guarded
from forerun.server.settings import ServerSettings

log = logging.getLogger(__name__)

RAY_APP, RAY_REPLICA, RAY_EXCHANGE = "forerun", "Replica", "forerun-exchange"
RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # send no usage statistics
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # Ray's default of 5 is too short on a busy machine
}
"""Defaults for variables that the environment does not set."""
PROCESSOR_PARTS = 10_000
"""Ray counts processors in units of 1 / 10,000."""


class Resources(NamedTuple):
    """Processors and GPUs of one machine or one replica."""

    processors: float
    gpus: int


def check(settings: ServerSettings) -> None:
    """Raise ValueError for a setting that replicas do not support."""
    if settings.index is not None:
        raise ValueError("index is for a single server: replicas exchange what they index, and keep no folder")
    if settings.port == 0:
        raise ValueError("port is 0; replicas need a fixed port")
    if ":" in settings.device:
        raise ValueError(f"device is {settings.device}; Ray assigns each replica its GPU: use cuda")


def serve(settings: ServerSettings, build: Callable[[ServerSettings], Engine]) -> None:
    """Serve until Ctrl-C or SIGTERM; replicas import ``build``, which makes their engine. Raise ValueError if the
    cluster is too small, or already serves something else."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    import ray.serve

    ready, ended = threading.Event(), threading.Event()
    with suppress(KeyboardInterrupt), _signals(ready, ended), _joined(settings) as resources:
        ray.serve.start(http_options={"host": settings.host, "port": settings.port})
        ray.serve.run(_application(settings, build, resources), name=RAY_APP, route_prefix="/")
        log.info("%d replicas answer at http://%s:%d", settings.replicas, settings.host, settings.port)
        ready.set()
        ended.wait()


@contextmanager
def _joined(settings: ServerSettings) -> Iterator[Resources]:
    """Join the cluster that the environment names, or start one; yield each replica's resources; then stop serving."""
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
                f"the cluster already serves {', '.join(served)}: both would share one address, and stop together"
            )
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        nodes = [Resources(each.get("CPU", 0.0), int(each.get("GPU", 0))) for each in alive]
        resources = shared_resources(nodes, settings.replicas, settings.device)
        try:
            yield resources
        finally:
            ray.serve.shutdown()
    finally:
        ray.shutdown()


def _application(settings: ServerSettings, build: Callable[[ServerSettings], Engine], resources: Resources) -> Any:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    lasting = {"name": RAY_EXCHANGE, "namespace": RAY_APP, "max_restarts": -1, "get_if_exists": True}
    exchange = ray.remote(Exchange).options(num_cpus=0, **lasting).remote()
    replica = serve.deployment(Replica).options(
        name=RAY_REPLICA,
        num_replicas=settings.replicas,
        # no limit here: the scheduler refuses requests with a reason
        max_ongoing_requests=settings.rows + settings.waiting + settings.connections,
        ray_actor_options={"num_cpus": resources.processors, "num_gpus": resources.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="forerun.replicas.router:PrefixRouter", request_router_kwargs={"rows": settings.rows}
        ),
        graceful_shutdown_timeout_s=settings.drain + 5,
    )
    front = serve.deployment(serve.ingress(lambda: _front(settings))()).options(
        name="Front", num_replicas=1, max_ongoing_requests=settings.connections, ray_actor_options={"num_cpus": 0}
    )
    return front.bind(replica.bind(settings, build, exchange))


def _front(settings: ServerSettings) -> ASGIApp:
    import ray
    from ray import serve

    handle = serve.get_deployment_handle(RAY_REPLICA, app_name=RAY_APP).options(stream=True)

    async def forward(request: ForwardedRequest) -> AsyncIterator[str | ResponseHead | bytes]:
        response = handle.answer.remote(request)
        try:
            async for part in response:
                yield part
        finally:
            response.cancel()

    async def metrics() -> Mapping[str, str]:
        exchange = ray.get_actor(RAY_EXCHANGE, namespace=RAY_APP)
        return await exchange.metrics.remote()  # type: ignore[no-any-return]

    return guarded(Front(forward, metrics, lost_errors()), settings)


def lost_errors() -> tuple[type[BaseException], ...]:
    """Return Ray's errors for a lost replica, process or machine."""
    from ray import exceptions
    from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

    return (
        exceptions.RayActorError, exceptions.WorkerCrashedError, exceptions.NodeDiedError,
        exceptions.LocalRayletDiedError, exceptions.ObjectLostError, exceptions.OutOfMemoryError,
        exceptions.RaySystemError, ReplicaUnavailableError, DeploymentUnavailableError,
    )  # fmt: skip


def shared_resources(nodes: Sequence[Resources], replicas: int, device: str) -> Resources:
    """Return the most processors that each replica can have while all fit; above one, an integer. ``device`` auto uses
    GPUs if there are any. Raise ValueError if the replicas do not fit."""
    gpus = int(device == "cuda" or (device == "auto" and any(node.gpus for node in nodes)))
    if gpus and (there := sum(node.gpus for node in nodes)) < replicas:
        raise ValueError(
            f"replicas is {replicas} and the cluster has {there} GPUs; each takes one, unless device is cpu"
        )
    sizes = {_allotted(node.processors / count) for node in nodes for count in range(1, replicas + 1)}
    fitting = [size for size in sizes if size and sum(_count(node, size, gpus) for node in nodes) >= replicas]
    if not fitting:
        raise ValueError(f"replicas is {replicas}; the cluster has too few processors")
    return Resources(max(fitting), gpus)


def _count(node: Resources, processors: float, gpus: int) -> int:
    by_processors = int(node.processors / processors + 1 / PROCESSOR_PARTS)
    return min(by_processors, node.gpus) if gpus else by_processors


def _allotted(processors: float) -> float:
    if processors >= 1:
        return math.floor(processors)
    return math.floor(processors * PROCESSOR_PARTS) / PROCESSOR_PARTS


@contextmanager
def _signals(ready: threading.Event, ended: threading.Event) -> Iterator[None]:
    """Let SIGINT and SIGTERM set ``ended``; the first also interrupts what runs before ``ready``."""

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
