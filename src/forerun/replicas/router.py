"""A Ray Serve router that prefers the replica with the longest prefilled prefix; Ray's interface is alpha."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.replicas.prefix_index import PrefixReaders, preferred


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """A router by ``PrefixReaders``; without an indexed prefix, it takes the less busy of two random replicas."""

    def initialize_state(self, rows: int) -> None:
        """Receive from Ray the number of requests that a replica decodes at once."""
        self._rows = rows
        self._readers: PrefixReaders[ReplicaID] = PrefixReaders()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        candidates = {replica.replica_id: replica for replica in candidate_replicas}
        chosen = preferred(_beginnings(pending_request), candidates, self._readers, self._load, self._rows)
        others = random.sample(list(candidates), min(2, len(candidates)))
        return [*([candidates[each]] for each in chosen), [candidates[each] for each in others]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._readers.remember(_beginnings(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._readers.keep(replica.replica_id for replica in replicas)

    def _load(self, replica: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica) or 0


def _beginnings(pending: PendingRequest | None) -> list[bytes]:
    return [] if pending is None or not pending.args else list(getattr(pending.args[0], "beginnings", ()))
