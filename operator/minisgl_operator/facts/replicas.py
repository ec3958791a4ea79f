"""What is observed of each replica: its StatefulSet, its pods, what its launcher says and who routes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from minisgl_operator.facts.observed import Manifest, Observed, controller_uid
from minisgl_operator.render import names

_STARTING_PHASES: Final = frozenset({"Waiting", "Rendezvous", "Loading"})
# A container in one of these states never ran, or does not stay up.
HOPELESS_WAITING: Final = frozenset(
    {
        "CrashLoopBackOff",
        "CreateContainerConfigError",
        "CreateContainerError",
        "ErrImageNeverPull",
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "RunContainerError",
    }
)


def component(manifest: Manifest) -> str | None:
    return (manifest["metadata"].get("labels") or {}).get(names.COMPONENT_LABEL)


def condition(manifest: Manifest, kind: str) -> Mapping[str, Any] | None:
    """The condition of this type in an object's status."""
    for found in (manifest.get("status") or {}).get("conditions") or ():
        if found["type"] == kind:
            return dict(found)
    return None


def holds(manifest: Manifest, kind: str) -> bool:
    found = condition(manifest, kind)
    return found is not None and found["status"] == "True"


def deleting(manifest: Manifest) -> bool:
    return manifest["metadata"].get("deletionTimestamp") is not None


def containers(pod: Manifest) -> tuple[Mapping[str, Any], ...]:
    """Statuses of the pod's containers; none before the kubelet has seen it."""
    return tuple((pod.get("status") or {}).get("containerStatuses") or ())


def waiting_reason(pod: Manifest) -> str:
    """Why a container of the pod does not run, "" when nothing is said."""
    for container in containers(pod):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting is not None:
            return str(waiting.get("reason") or "")
    return ""


def unschedulable(pod: Manifest) -> bool:
    found = condition(pod, "PodScheduled")
    return found is not None and found["status"] == "False" and found.get("reason") == "Unschedulable"


def revision_of(labelled: Mapping[str, Any]) -> str | None:
    """The revision in the labels of a pod or of a pod template."""
    found = (labelled["metadata"].get("labels") or {}).get(names.REVISION_LABEL)
    return None if found is None else str(found)


class Routing:
    """Which replicas the frontends route to, by what they say themselves."""

    def __init__(self, observed: Observed) -> None:
        frontends = [pod for pod in observed.pods if component(pod) == names.FRONTEND and not deleting(pod)]
        reports = [report for pod in frontends if (report := observed.report(pod)) is not None]
        answering = [report for report in reports if not report.get("draining") and _routes(report)]
        self._routes = [_routes(report) for report in answering]
        self._usable = [_routes(report) | _waiting_for_files(report) for report in answering]
        self.reported = bool(reports)
        self.some_ready = any(holds(pod, "Ready") for pod in frontends)

    def by_any(self, replica: str, revision: str | None) -> bool | None:
        """Whether a request can get to the replica; None when no frontend says."""
        if not self.reported:
            return None
        return any((replica, revision) in routes for routes in self._routes)

    def by_all(self, replica: str, revision: str | None) -> bool | None:
        """Whether every frontend that can answer requests at all can send them to the replica."""
        if not self.reported:
            return None
        return bool(self._routes) and all((replica, revision) in routes for routes in self._routes)

    def usable_by_all(self, replica: str, revision: str | None) -> bool:
        """Whether every frontend that can answer requests at all can send them to the replica, or could at once if its
        tokenizer files were those in use. A frontend uses one set of files at a time: that of most replicas."""
        return bool(self._usable) and all((replica, revision) in usable for usable in self._usable)


def _routes(report: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return _replicas_that(report, "routable")


def _waiting_for_files(report: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    return _replicas_that(report, "waits_for_files")


def _replicas_that(report: Mapping[str, Any], what: str) -> frozenset[tuple[str, str]]:
    """Names and revisions of those of which a frontend says so."""
    return frozenset(
        (str(entry.get("replica")), str(entry.get("revision")))
        for entry in report.get("replicas") or ()
        if entry.get(what)
    )


@dataclass(frozen=True)
class Replica:
    """One replica as it is observed."""

    index: int
    name: str
    stateful_set: Manifest | None
    pods: tuple[Manifest, ...]
    report: Mapping[str, Any] | None
    routed_by_any: bool | None
    routed_by_all: bool | None
    usable_by_all: bool
    frontend_ready: bool

    @cached_property
    def revision(self) -> str | None:
        """The revision that its pods are made from now."""
        return None if self.stateful_set is None else revision_of(self.stateful_set["spec"]["template"])

    @cached_property
    def size(self) -> int:
        """How many pods its own template asks for; the present spec may want another number."""
        return 0 if self.stateful_set is None else int(self.stateful_set["spec"]["replicas"])

    @cached_property
    def up(self) -> bool:
        """All ranks serve, as the kubelet sees it: known without asking any pod."""
        if self.stateful_set is None or deleting(self.stateful_set):
            return False
        up = [pod for pod in self.pods if not deleting(pod) and holds(pod, "Ready")]
        return 0 < self.size <= len(up) and all(revision_of(pod) == self.revision for pod in self.pods)

    @cached_property
    def ready(self) -> bool:
        """All ranks serve, and rank 0's launcher, where it answers, says so too. Of kubelet and launcher either may
        be the one that was asked last; what is said of ranks comes from the launcher and has to fit."""
        return self.up and (self.report is None or _all_ranks_serve(self.report))

    @cached_property
    def routable(self) -> bool | None:
        """Whether a request can reach it; None when no frontend says."""
        return self.ready and self.routed_by_any

    @cached_property
    def serving(self) -> bool:
        """Every frontend routes to it. Where no frontend is ready nothing can be asked and no request can come, so the
        pods' word is enough."""
        if not self.ready:
            return False
        return bool(self.routed_by_all) or (self.routed_by_all is None and not self.frontend_ready)

    @cached_property
    def waits_for_files(self) -> bool:
        """It could serve, but not every frontend uses its tokenizer files yet: those of other replicas, which are of
        another revision, are in use. All frontends have loaded its files, so they can be used."""
        return self.ready and self.usable_by_all and not self.routed_by_all

    @cached_property
    def came_up(self) -> bool:
        """Whether a rollout may count on it."""
        return self.serving or self.waits_for_files

    @cached_property
    def left_alone(self) -> bool:
        """It is up, and no frontend sends requests there: frontends say so."""
        return self.ready and self.routed_by_any is False

    @cached_property
    def without_service(self) -> bool:
        """It has not served since its pods were made, or cannot serve any more without being replaced. One that was
        up and is on its way back is neither, and neither is one that cannot be asked."""
        if self.up:
            return False
        if any(waiting_reason(pod) in HOPELESS_WAITING or unschedulable(pod) for pod in self.pods):
            return True
        if self.report is None:
            # So it is, too, when there are none.
            return all((pod.get("status") or {}).get("phase", "Pending") == "Pending" for pod in self.pods)
        phase = self.report.get("phase")
        return phase == "Failed" or (phase in _STARTING_PHASES and not self.report.get("restarts"))


def _all_ranks_serve(report: Mapping[str, Any]) -> bool:
    return bool(report.get("ready")) and report.get("ready_ranks") == report.get("tensor")


def replicas_of(model: str, observed: Observed, indices: range) -> tuple[Replica, ...]:
    """The replicas with these indices, whether anything of them exists or not."""
    routing = Routing(observed)
    pods: dict[str, list[Manifest]] = {}
    for pod in observed.pods:
        if component(pod) == names.ENGINE:
            pods.setdefault(pod["metadata"]["labels"].get(names.REPLICA_LABEL, ""), []).append(pod)
    return tuple(_replica(model, observed, routing, pods, index) for index in indices)


def _replica(
    model: str, observed: Observed, routing: Routing, pods: Mapping[str, list[Manifest]], index: int
) -> Replica:
    name = names.replica(model, index)
    stateful_set = observed.child("StatefulSet", name)
    if stateful_set is not None and controller_uid(stateful_set) not in (None, observed.raw["metadata"]["uid"]):
        stateful_set = None
    own = tuple(sorted(pods.get(name, ()), key=lambda pod: str(pod["metadata"]["name"])))
    revision = None if stateful_set is None else revision_of(stateful_set["spec"]["template"])
    return Replica(
        index=index,
        name=name,
        stateful_set=stateful_set,
        pods=own,
        report=_launcher_report(name, own, observed),
        routed_by_any=routing.by_any(name, revision),
        routed_by_all=routing.by_all(name, revision),
        usable_by_all=routing.usable_by_all(name, revision),
        frontend_ready=routing.some_ready,
    )


def _launcher_report(replica: str, pods: tuple[Manifest, ...], observed: Observed) -> Mapping[str, Any] | None:
    """What rank 0's launcher says of the whole replica."""
    for pod in pods:
        if pod["metadata"]["name"] == f"{replica}-0" and (report := observed.report(pod)) is not None:
            return report
    return None


def started(pod: Manifest) -> bool:
    """All its containers run and have passed their startup probe."""
    found = containers(pod)
    return bool(found) and all(container.get("started") for container in found)


def is_asked(pod: Manifest) -> bool:
    """Whether it runs and knows something: of an engine replica only the pod with rank 0 does."""
    if (pod.get("status") or {}).get("phase") != "Running":
        return False
    return component(pod) != names.ENGINE or pod["metadata"]["labels"].get(names.POD_INDEX_LABEL) == "0"
