"""The state of each replica, from its StatefulSet, its pods, its leader's report and the frontends' reports.

docs/glossary.md defines the states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Final, Literal, get_args

from minisgl.wire.status import EnginePhase
from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest, condition_of, controller_uid, has_condition, is_deleting, parse_time
from minisgl_operator.facts.ended_pods import EndedPod, ended_pod_of_replica
from minisgl_operator.facts.observed import Observed, Report
from minisgl_operator.facts.pod_failures import PodFailure, refusal_of
from minisgl_operator.facts.pods import (
    cannot_run,
    component,
    containers_started,
    lost_process,
    replica_name,
    revision_of,
    waiting_reason,
)
from minisgl_operator.facts.routing import Routing
from minisgl_operator.render import names

_STARTING_PHASES: Final = frozenset({"Waiting", "Rendezvous", "Loading"})

Phase = EnginePhase | Literal["Pending", "Unknown"]
_REPORTED_PHASES: Final[tuple[EnginePhase, ...]] = get_args(EnginePhase)


@dataclass(frozen=True)
class Replica:
    """One replica, which may not exist yet.

    `report` is the leader's. `unreachable`: a pod has started, and its launcher did not answer the last probe.
    `current_revision` is the revision that the spec asks for; `revision` is the replica's own. `refusal`: the reason
    why missing pods cannot be created. `ended`: the pod that its node ended last, if its successor does not run.
    """

    index: int
    name: str
    current_revision: str
    stateful_set: Manifest | None
    pods: tuple[Manifest, ...]
    report: Report | None
    unreachable: bool
    refusal: PodFailure | None
    routing: Routing
    ended: EndedPod | None = None

    @cached_property
    def revision(self) -> str | None:
        """The revision of the StatefulSet's pod template."""
        return None if self.stateful_set is None else revision_of(self.stateful_set["spec"]["template"])

    @property
    def pods_refused(self) -> bool:
        """True if pods are missing because the API server refuses them, for another reason than a full quota."""
        return self.refusal is not None and self.refusal.reason != Reason.QUOTA_EXCEEDED

    @property
    def exceeded_quota(self) -> str:
        """The quota that has no room for missing pods, in the API server's words; empty without one."""
        return self.refusal.message if self.refusal is not None and not self.pods_refused else ""

    @cached_property
    def size(self) -> int:
        """Number of pods that the StatefulSet asks for; the current spec may ask for another number."""
        return 0 if self.stateful_set is None else int(self.stateful_set["spec"]["replicas"])

    @cached_property
    def phase(self) -> Phase:
        """Phase that the leader reports; without a report, the one that Kubernetes shows."""
        if self.stateful_set is None or any(revision_of(pod) != self.revision for pod in self.pods):
            return "Draining" if self.pods else "Pending"
        if any(waiting_reason(pod) == "CrashLoopBackOff" for pod in self.pods):
            return "Restarting"
        if self.report is not None:
            reported = self.report.get("phase")
            return next((phase for phase in _REPORTED_PHASES if phase == reported), "Unknown")
        if self.ready:
            return "Ready"
        return "Unknown" if self.unreachable else "Pending"

    @property
    def last_failure(self) -> Report | None:
        """The last end of a rank that the leader reports."""
        failure = None if self.report is None else self.report.get("last_failure")
        return failure if isinstance(failure, Mapping) else None

    @property
    def last_failure_at(self) -> datetime | None:
        """Time of the last end of a rank, by the clock of its node; None without a valid one."""
        failure = self.last_failure
        try:
            found = None if failure is None else parse_time(str(failure.get("at")))
        except ValueError:
            return None
        return found if found is not None and found.tzinfo is not None else None

    @cached_property
    def pods_ready(self) -> bool:
        """True if all ranks serve according to the kubelet, which needs no probe."""
        if self.stateful_set is None or is_deleting(self.stateful_set):
            return False
        ready = [pod for pod in self.pods if not is_deleting(pod) and has_condition(pod, "Ready")]
        return 0 < self.size <= len(ready) and all(revision_of(pod) == self.revision for pod in self.pods)

    @cached_property
    def ready(self) -> bool:
        """True if all ranks serve according to the kubelet and to the leader's report, where there is one. Either may
        be the older one; the status shows the ranks of the report, so both must agree."""
        return self.pods_ready and (self.report is None or _all_ranks_serve(self.report))

    @cached_property
    def ready_since(self) -> datetime | None:
        """Time since which all ranks serve without a restart, by the clocks of their nodes; None while not all do, or
        without a report of the leader, which alone knows of restarts."""
        if not self.ready or self.report is None:
            return None
        stamps = ((condition_of(pod, "Ready") or {}).get("lastTransitionTime") for pod in self.pods)
        times = [parse_time(stamp) for stamp in stamps if stamp is not None]
        # Ranks may restart between two probes of the kubelet: then the pods stay Ready.
        if times and self.last_failure_at is not None:
            times.append(self.last_failure_at)
        return max(times, default=None)

    @cached_property
    def routable(self) -> bool | None:
        """True if requests can reach it; None when no frontend reports."""
        return self.ready and self.routable_from_any

    @cached_property
    def routable_from_any(self) -> bool | None:
        return self.routing.from_any(self.name, self.revision)

    @cached_property
    def available(self) -> bool:
        """True if every frontend can send it requests. Without a report and without a ready frontend no request can
        arrive, so `ready` is enough."""
        if not self.ready:
            return False
        routable = self.routing.from_all(self.name, self.revision)
        return bool(routable) or (routable is None and not self.routing.any_frontend_ready)

    @cached_property
    def awaiting_files(self) -> bool:
        """True if it could serve, but frontends use the tokenizer files of other replicas, of another revision. All
        frontends have loaded its files and can switch to them."""
        return (
            self.ready
            and self.routing.usable_from_all(self.name, self.revision)
            and not self.routing.from_all(self.name, self.revision)
        )

    @cached_property
    def rollout_ready(self) -> bool:
        """True if the rollout may go on to the next replica."""
        return self.available or self.awaiting_files

    @cached_property
    def unrouted(self) -> bool:
        """True if it is ready, and frontends report that none sends it requests."""
        return self.ready and self.routable_from_any is False

    @cached_property
    def out_of_service(self) -> bool:
        """True if it has never served since its pods were created, or cannot serve again without being replaced.
        False for a replica that restarts, and for one whose state is unknown."""
        if self.pods_ready:
            return False
        if self.ended is not None or any(cannot_run(pod) for pod in self.pods):
            return True
        if self.report is None:
            # Without pods this is True as well.
            return all((pod.get("status") or {}).get("phase", "Pending") == "Pending" for pod in self.pods)
        phase = self.report.get("phase")
        return phase == "Failed" or (phase in _STARTING_PHASES and not self.report.get("restarts"))

    @cached_property
    def serves(self) -> bool | None:
        """True if it is ready and no frontend reports the opposite; None if it is unknown: the kubelet and the leader
        contradict each other, or a launcher that has started does not answer."""
        if self.ready:
            return not self.unrouted
        return None if self.pods_ready or self.phase == "Unknown" else False

    @cached_property
    def being_removed(self) -> bool:
        """True if its StatefulSet is being deleted, or is gone and its last pods terminate."""
        if self.stateful_set is not None:
            return is_deleting(self.stateful_set)
        return bool(self.pods) and all(is_deleting(pod) for pod in self.pods)

    @property
    def lost_process(self) -> bool:
        """True if it starts again because a rank or the first process of a pod has exited with an error. False as soon
        as its leader reports that all ranks serve."""
        if self.phase == "Draining" or (self.report is not None and _all_ranks_serve(self.report)):
            return False
        if self.report is not None and self.report.get("restarts"):
            return True
        return any(lost_process(pod) for pod in self.pods if not is_deleting(pod))

    @cached_property
    def failing(self) -> bool:
        """True if it is not ready, and neither starting for the first time nor being replaced."""
        if self.ready:
            return False
        if self.ended is not None or self.lost_process:
            return True
        return self.phase in ("Failed", "Restarting", "Unknown") or any(
            cannot_run(pod) and not is_deleting(pod) for pod in self.pods
        )

    @property
    def starting(self) -> bool:
        return not self.ready and not self.failing

    @property
    def has_old_template(self) -> bool:
        return self.stateful_set is not None and self.revision != self.current_revision

    @cached_property
    def outdated(self) -> bool:
        """True if it has pods of another revision than the current one, or would create such pods."""
        return self.has_old_template or (
            self.stateful_set is not None and any(revision_of(pod) != self.current_revision for pod in self.pods)
        )


def _all_ranks_serve(report: Report) -> bool:
    return bool(report.get("ready")) and report.get("ready_ranks") == report.get("tensor")


@dataclass(frozen=True)
class Existing:
    """The replicas of which a StatefulSet, a Service or a pod exists, and the indices that a new one cannot take. These
    include indices whose objects belong to another owner."""

    replicas: tuple[Replica, ...]
    taken: frozenset[int]


def existing_replicas(model: str, observed: Observed, routing: Routing, current_revision: str) -> Existing:
    """Existing replicas, compared with the current revision."""
    pods: dict[int, list[Manifest]] = {}
    for pod in sorted(observed.pods, key=lambda pod: str(pod["metadata"]["name"])):
        index = names.replica_index(model, replica_name(pod) or "")
        if component(pod) == names.ENGINE and index is not None:
            pods.setdefault(index, []).append(pod)
    taken, owned = set(pods), set(pods)
    for ref in (*observed.children, *observed.conflicting):
        index = names.replica_index(model, ref.name)
        if index is None or ref.kind not in ("StatefulSet", "Service"):
            continue
        taken.add(index)
        live = observed.children.get(ref)
        if live is not None and _is_owned(live, observed):
            owned.add(index)
    replicas = (
        replica_at(index, model, observed, routing, current_revision, tuple(pods.get(index, ())))
        for index in sorted(owned)
    )
    return Existing(tuple(replicas), frozenset(taken))


def replica_at(
    index: int,
    model: str,
    observed: Observed,
    routing: Routing,
    current_revision: str,
    pods: tuple[Manifest, ...] = (),
) -> Replica:
    name = names.replica(model, index)
    live = observed.child("StatefulSet", name)
    stateful_set = live if live is not None and _is_owned(live, observed) else None
    revision = None if stateful_set is None else revision_of(stateful_set["spec"]["template"])
    return Replica(
        index=index,
        name=name,
        current_revision=current_revision,
        stateful_set=stateful_set,
        pods=pods,
        report=_leader_report(name, pods, observed),
        unreachable=any(
            containers_started(pod) and observed.was_probed(pod) and observed.report(pod) is None for pod in pods
        ),
        refusal=None if stateful_set is None else refusal_of(stateful_set, len(pods), observed.events_of(stateful_set)),
        routing=routing,
        ended=ended_pod_of_replica(name, revision, pods, observed.model_object.get("status") or {}),
    )


def _is_owned(manifest: Manifest, observed: Observed) -> bool:
    """False for an object of an earlier model of the same name."""
    return controller_uid(manifest) in (None, observed.model_object["metadata"]["uid"])


def _leader_report(replica: str, pods: tuple[Manifest, ...], observed: Observed) -> Report | None:
    """The report of pod 0, which covers the whole replica."""
    leader = next((pod for pod in pods if pod["metadata"]["name"] == f"{replica}-0"), None)
    return None if leader is None else observed.report(leader)
