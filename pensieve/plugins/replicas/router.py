"""Which replica serves a turn: the routers of the simulated cluster, in the hooks of Ray Serve.

Ray Serve sends this module's code about as values, and sets the class anew whenever it hears of the deployment: what has to
stay is in pensieve.plugins.replicas.call_routing.
"""

from __future__ import annotations

from array import array
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pensieve.core.request import Length, Request
from pensieve.plugins.cluster.routing import ROUTERS, Fleet
from pensieve.plugins.replicas.call_routing import CallRouting, Candidate, numbers_of, register


class SessionRouter(RequestRouter):
    """Ray Serve makes one in each process that calls the replicas, and tells it which of them run. A turn waits for the
    replica that was chosen, however long its queue; if that one ends meanwhile, another is chosen."""

    def initialize_state(self, router: str = "affinity", seed: int = 0) -> None:
        """Called once, before any replica is known, with request_router_kwargs."""
        self._choose, self._seed = ROUTERS[router], seed
        self._numbers: dict[ReplicaID, int] = {}
        self._routed: dict[ReplicaID, set[str]] = {}
        register(self.app_name, self)

    @property
    def up(self) -> list[str]:
        """The ids of the replicas that run now; any thread may ask."""
        return [one.unique_id for one in list(self.curr_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        ids = sorted((one.replica_id for one in replicas), key=lambda one: str(one.unique_id))
        self._numbers = numbers_of(self._numbers, ids)
        self._routed = {one: self._routed.get(one, set()) for one in ids}
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # or it would be asked again at once, for ever
        routing: CallRouting = pending_request.args[0]
        if routing.to is not None:
            named = [one for one in candidate_replicas if one.replica_id.unique_id == routing.to]
            return [named or candidate_replicas]  # whoever is left knows nothing of it, and says so
        request = Request(0, routing.family, routing.turn, array("i"), Length(1))
        known = [self._known(one, routing) for one in candidate_replicas]
        chosen = self._choose(request, Fleet.of(known), self._seed)
        assert isinstance(chosen, Candidate)
        return [[chosen.replica]]

    def _known(self, replica: RunningReplica, routing: CallRouting) -> Candidate:
        one = replica.replica_id
        held = routing.held_tokens if one.unique_id == routing.home else 0
        return Candidate(replica, self._numbers[one], len(self._routed[one]), held)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._routed.setdefault(replica_id, set()).add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._routed.get(replica_id, set()).discard(internal_request_id)
