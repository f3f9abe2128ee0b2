"""The affinity policy as Ray Serve asks for it: the request router of each model's deployment.

Ray probes replicas, counts what they have in hand, drops those that are gone and sends again what
was sent to one of them. Only the order in which replicas are tried is decided here.
"""

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    ReplicaResult,
    RequestRouter,
    RunningReplica,
)

from soloist.deploy.affinity import Affinity
from soloist.deploy.calls import Asked
from soloist.deploy.prefix import Wish


class AffinityRouter(RequestRouter):
    """Tries replicas in the order of `Affinity`; one router lives beside each user of a handle."""

    def initialize_state(self, columns: int, imbalance: int) -> None:
        """Called by Ray, with `request_router_kwargs`."""
        self._affinity = Affinity(columns, imbalance)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Every replica is a rank of its own."""
        there = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        told = self.replica_queue_len_cache
        loads = {name: told.get(replica.replica_id) or 0 for name, replica in there.items()}
        if pending_request is None:
            return [[there[name]] for name in sorted(loads, key=lambda name: loads[name])]
        request_id = pending_request.metadata.internal_request_id
        ordered = self._affinity.order(request_id, _wish(pending_request), loads)
        return [[there[name]] for name in ordered]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """A replica took it."""
        super().on_request_routed(pending_request, replica_id, result)
        request_id = pending_request.metadata.internal_request_id
        self._affinity.routed(request_id, _wish(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It is over."""
        super().on_request_completed(replica_id, internal_request_id)
        self._affinity.ended(internal_request_id)


def _wish(pending: PendingRequest) -> Wish:
    asked = pending.args[0] if pending.args else None
    return asked.wish if isinstance(asked, Asked) else Wish()
