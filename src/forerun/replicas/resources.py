"""What each replica gets of a cluster: as many processors as all of them can have, and a GPU if there are any."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PARTS = 10_000
"""Ray counts a processor in so many parts."""


class Node(NamedTuple):
    """A machine of the cluster."""

    processors: float
    gpus: int

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> Node:
        """From what Ray tells of it."""
        return cls(resources.get("CPU", 0.0), int(resources.get("GPU", 0)))


class Resources(NamedTuple):
    """Of one replica."""

    processors: float
    gpus: int


def share(nodes: Sequence[Node], replicas: int, device: str) -> Resources:
    """The most processors that each replica can have while all of them find room. Above one, Ray gives whole ones.

    Args:
        nodes: at least one.
        replicas: at least one.
        device: ``auto`` is the GPUs if there is one at all.

    Raises:
        ValueError: if there is no room for so many.
    """
    gpus = int(device == "cuda" or (device == "auto" and any(node.gpus for node in nodes)))
    if gpus and (there := sum(node.gpus for node in nodes)) < replicas:
        raise ValueError(
            f"replicas is {replicas} and the cluster has {there} GPUs; each takes one, unless device is cpu"
        )
    sizes = {_whole(node.processors / count) for node in nodes for count in range(1, replicas + 1)}
    fitting = [size for size in sizes if size and sum(_count(node, size, gpus) for node in nodes) >= replicas]
    if not fitting:
        raise ValueError(f"replicas is {replicas}, and the cluster has no processors for so many")
    return Resources(max(fitting), gpus)


def _count(node: Node, processors: float, gpus: int) -> int:
    """Replicas that a machine can hold."""
    by_processors = int(node.processors / processors + 1 / PARTS)
    return min(by_processors, node.gpus) if gpus else by_processors


def _whole(processors: float) -> float:
    """Downwards to what Ray can give."""
    return math.floor(processors) if processors >= 1 else math.floor(processors * PARTS) / PARTS
