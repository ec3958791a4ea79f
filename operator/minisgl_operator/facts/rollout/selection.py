"""The replicas that stay when there are more than the spec asks for, and the indices of new ones.

The set of replicas is observed, not counted from zero: after a scale-down the replicas that serve remain, whatever
their indices are. A rollout in place removes no replica that serves, and none that may still prove the new revision:
otherwise the last one that serves could be replaced by a revision that does not start. A rollout with surge adds one
replica of the new revision, and removes an old one for each new one that is available.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, islice
from typing import Final, Literal

from minisgl_operator.api.objects import Ref
from minisgl_operator.facts.observed import Observed
from minisgl_operator.facts.pods import is_unschedulable
from minisgl_operator.facts.replicas import Existing, Replica, replica_at
from minisgl_operator.facts.routing import Routing

# The first to keep first.
_SERVES, _UNKNOWN, _MAY_SERVE_AGAIN, _OUT_OF_SERVICE, _EMPTY = range(5)
Rollout = Literal["", "Surge", "Recreate", "NoRoom"]
"""How replicas that may serve get the current revision; "": not at all; NoRoom: in place, as nothing more
fits."""
_NEVER: Final = "9"
"""Sorts after every creationTimestamp."""


@dataclass(frozen=True)
class Selection:
    """`wanted`: the replicas that the spec asks for, by index, whether they exist or not; during a rollout also those
    that it adds, or that a scale-down leaves for now. `surplus`: existing replicas to remove, and those that are being
    removed, in the order of their removal."""

    wanted: tuple[Replica, ...]
    surplus: tuple[Replica, ...]


def select(
    model: str,
    observed: Observed,
    routing: Routing,
    existing: Existing,
    wanted: int,
    current_revision: str,
    rollout: Rollout,
) -> Selection:
    """The replicas that stay, those to create, and those to remove.

    Keep replicas in this order: those that serve, those that might, the others; among equals those of the current
    revision; then the oldest. New ones take the lowest free indices. A replica that is being removed is never kept, so
    that its successor does not wait for its pods."""
    ranked = sorted(existing.replicas, key=_rank)
    staying = [replica for replica in ranked if not _is_leaving(replica, observed)]
    kept = staying[:wanted]
    size = wanted
    if any(replica.has_old_template and replica.serves is not False for replica in kept):
        if rollout in ("Recreate", "NoRoom"):
            # A quota may leave no room for any pod.
            stays = [each for each in staying if rollout == "Recreate" or each.pods or each.pods_refused]
            proving = [each for each in stays if _is_proving(each)]
            kept += [replica for replica in staying[wanted:] if replica.serves is not False or replica in proving]
        elif rollout == "Surge":
            kept, size = _with_surge(staying, wanted)
    free = islice((index for index in count() if index not in existing.taken), max(0, size - len(kept)))
    new = [replica_at(index, model, observed, routing, current_revision) for index in free]
    result = sorted((*kept, *new), key=lambda replica: replica.index)
    indices = {replica.index for replica in result}
    return Selection(tuple(result), tuple(replica for replica in reversed(ranked) if replica.index not in indices))


def _with_surge(staying: list[Replica], wanted: int) -> tuple[list[Replica], int]:
    """The replicas that stay in a rollout with surge, and how many there shall be."""
    # The Service of a replica that was removed is none.
    existing = [replica for replica in staying if replica.stateful_set is not None or replica.pods]
    new = [replica for replica in existing if not replica.has_old_template][:wanted]
    old = [replica for replica in staying if replica.has_old_template]
    needed = wanted - sum(replica.available for replica in new)
    kept = new + old[:needed]
    if any(replica.serves is False for replica in kept):
        # A scale-down waits: none that serves goes while one that does not stays.
        kept += [replica for replica in old[needed:] if replica.serves is not False]
    # One that has never served is replaced in place, and proves the revision as well.
    proves = any(not replica.available for replica in new) or any(replica.out_of_service for replica in kept)
    complete = proves or len(new) == wanted or len(kept) > wanted
    return kept, wanted if complete else max(wanted, len(kept) + 1)


def _is_leaving(replica: Replica, observed: Observed) -> bool:
    """True if it is being removed, or cannot be created because another owner's StatefulSet has its name."""
    ref = Ref("StatefulSet", replica.name)
    has_other_owner = replica.stateful_set is None and (ref in observed.children or ref in observed.conflicting)
    return replica.being_removed or has_other_owner


def _is_proving(replica: Replica) -> bool:
    """True if it may become ready with the current revision. One that fits on no node may need the room of others."""
    current = replica.stateful_set is not None and not replica.has_old_template
    return current and not any(map(is_unschedulable, replica.pods))


def _rank(replica: Replica) -> tuple[int, bool, bool, str, int]:
    if replica.serves:
        state = _SERVES
    elif replica.serves is None:
        state = _UNKNOWN
    elif not replica.out_of_service:
        state = _MAY_SERVE_AGAIN
    else:
        state = _EMPTY if replica.stateful_set is None else _OUT_OF_SERVICE
    created = _NEVER if replica.stateful_set is None else str(replica.stateful_set["metadata"]["creationTimestamp"])
    return state, not replica.ready, replica.outdated, created, replica.index
