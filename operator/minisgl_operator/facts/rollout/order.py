"""The order of a rollout: which replicas are replaced now, and which ones it waits for. Nothing is stored."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.pods import cannot_run, is_unschedulable
from minisgl_operator.facts.replicas import Replica


def revision_has_failed(replicas: tuple[Replica, ...], known: bool) -> bool:
    """True if no replica of the current revision is rollout-ready, older ones serve, and a replica of the current
    revision cannot start. `known`: this was seen before, and that replica may have been removed since. Then it also
    holds while the older ones restart, or start on another node: the revision would not serve in their place."""
    current = [replica for replica in replicas if replica.revision == replica.current_revision]
    if any(replica.rollout_ready for replica in current):
        return False
    older = [replica for replica in replicas if replica.has_old_template]
    serving = any(replica.serves is not False for replica in older)
    if known:
        return serving or any(replica.size > 0 and not _cannot_start(replica) for replica in older)
    return serving and any(map(_cannot_start, current))


def _cannot_start(replica: Replica) -> bool:
    """True if it has failed for another reason than a lack of nodes, a full quota or a webhook that is down."""
    if replica.refusal is not None and replica.pods_refused and replica.refusal.reason != Reason.WEBHOOK_UNAVAILABLE:
        return True
    if replica.report is not None and replica.report.get("phase") == "Failed":
        return True
    return any(cannot_run(pod) and not is_unschedulable(pod) for pod in replica.pods)


def replicas_to_replace(replicas: tuple[Replica, ...], failed: bool, surge: bool) -> tuple[Replica, ...]:
    """Replicas with an old template whose turn it is to get the current one in place.

    A replica that serves, or that restarts after it has served, is replaced only when all others are rollout-ready: so
    at most one is down, and a revision that does not become ready stops at the first replica. A replica that has never
    served is replaced immediately, as nothing is lost, unless a replica of the current revision is not rollout-ready:
    the current revision may be broken, and then the old one is the better one to keep. With `failed` it is known to be.

    With `surge` new replicas take the place of those that serve, unless frontends send a new one no requests because
    they use the tokenizer files of the old ones: only a replacement changes that.
    """
    if failed:
        return ()
    old = [replica for replica in replicas if replica.has_old_template]
    unproven = any(replica.revision == replica.current_revision and not replica.rollout_ready for replica in replicas)
    if not unproven and (idle := [replica for replica in old if replica.out_of_service]):
        return tuple(idle)
    awaiting_files = any(replica.awaiting_files and not replica.has_old_template for replica in replicas)
    if surge and any(replica.serves is not False for replica in old) and not awaiting_files:
        return ()
    blockers = rollout_blockers(replicas)
    for replica in sorted(old, key=lambda replica: (replica.available, replica.index)):
        if all(blocker is replica for blocker in blockers):
            return (replica,)
    return ()


def rollout_blockers(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
    """Replicas that must become rollout-ready before another one is replaced. A ready replica with an old template
    that gets no requests, because frontends use other tokenizer files or cannot use its own, is not waited for: only
    its replacement changes that."""
    return tuple(
        replica
        for replica in replicas
        if not replica.rollout_ready and not (replica.has_old_template and replica.unrouted)
    )
