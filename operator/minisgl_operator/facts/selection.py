"""The replicas that stay when there are more than the spec asks for, and the indices of new ones.

The set of replicas is observed, not counted from zero: after a scale-down the replicas that serve remain, whatever
their indices are. During a rollout a scale-down removes none that serves, and none that may still prove the new
revision: otherwise the last replica that serves could be replaced by a revision that does not start.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import Final

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import Observed
from minisgl_operator.facts.pods import is_unschedulable
from minisgl_operator.facts.replicas import Replica, existing_replicas, replica_at
from minisgl_operator.facts.routing import Routing

# The first to keep first.
_SERVES, _UNKNOWN, _MAY_SERVE_AGAIN, _OUT_OF_SERVICE, _EMPTY = range(5)
_NEVER: Final = "9"
"""Sorts after every creationTimestamp."""


@dataclass(frozen=True)
class Selection:
    """`wanted`: the replicas that the spec asks for, by index, whether they exist or not; during a rollout also those
    that a scale-down leaves for now. `surplus`: existing replicas to remove, and those that are being removed, in the
    order of their removal."""

    wanted: tuple[Replica, ...]
    surplus: tuple[Replica, ...]


def select(
    model: str, observed: Observed, routing: Routing, wanted: int, current_revision: str, *, rolls_out: bool
) -> Selection:
    """`rolls_out`: replicas that serve may be replaced by ones of the current revision.

    Keep replicas in this order: those that serve, those that might, the others; among equals those of the current
    revision; then the oldest. New ones take the lowest free indices. A replica that is being removed is never kept, so
    that its successor does not wait for its pods."""
    existing, taken = existing_replicas(model, observed, routing, current_revision)
    ranked = sorted(existing, key=_rank)
    staying = [replica for replica in ranked if not _is_leaving(replica, observed)]
    kept = staying[:wanted]
    if rolls_out and any(replica.has_old_template and replica.serves is not False for replica in kept):
        kept += [replica for replica in staying[wanted:] if replica.serves is not False or _is_proving(replica)]
    free = islice((index for index in count() if index not in taken), max(0, wanted - len(kept)))
    new = [replica_at(index, model, observed, routing, current_revision) for index in free]
    result = sorted((*kept, *new), key=lambda replica: replica.index)
    indices = {replica.index for replica in result}
    return Selection(tuple(result), tuple(replica for replica in reversed(ranked) if replica.index not in indices))


def _is_leaving(replica: Replica, observed: Observed) -> bool:
    """True if it is being removed, or cannot be created because another owner's StatefulSet has its name."""
    ref = Ref("StatefulSet", replica.name)
    has_other_owner = replica.stateful_set is None and (ref in observed.children or ref in observed.conflicting)
    return replica.being_removed or has_other_owner


def _is_proving(replica: Replica) -> bool:
    """True if it may become ready with the current revision. One that fits on no node may need the room of others."""
    current = replica.stateful_set is not None and not replica.has_old_template
    return current and not any(map(is_unschedulable, replica.pods))


def _rank(replica: Replica) -> tuple[int, bool, str, int]:
    if replica.serves:
        state = _SERVES
    elif replica.serves is None:
        state = _UNKNOWN
    elif not replica.out_of_service:
        state = _MAY_SERVE_AGAIN
    else:
        state = _EMPTY if replica.stateful_set is None else _OUT_OF_SERVICE
    created = _NEVER if replica.stateful_set is None else str(replica.stateful_set["metadata"]["creationTimestamp"])
    return state, replica.outdated, created, replica.index
