"""What follows from an observation, once for all conditions."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Final, Literal

from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.fetch_status import Fetch, fetch_of
from minisgl_operator.facts.lost_nodes import seems_lost
from minisgl_operator.facts.observed import Manifest, Observed, Outcome, Ref, Unreachable, controller_uid
from minisgl_operator.facts.pod_failures import refused_pods, trouble_of
from minisgl_operator.facts.replicas import (
    HOPELESS_WAITING,
    Replica,
    Routing,
    component,
    condition,
    deleting,
    holds,
    is_asked,
    replicas_of,
    revision_of,
    started,
    unschedulable,
    waiting_reason,
)
from minisgl_operator.plan.plan import cached, conflicts
from minisgl_operator.render import model_files, names, revision, wanted_replicas
from minisgl_operator.render.defaults import Defaults
from minisgl_operator.status.conditions import Condition, Kind, Reason, quoted

# What a claim says of an expansion that its volume's driver could not do.
_GROWTH_FAILED: Final = ("ControllerResizeError", "NodeResizeError")

Phase = Literal["Pending", "Waiting", "Rendezvous", "Loading", "Ready", "Restarting", "Draining", "Failed", "Unknown"]


@dataclass(frozen=True)
class Facts:
    model: InferenceModel
    observed: Observed
    env: Defaults
    outcome: Outcome
    now: datetime

    @cached_property
    def title(self) -> str:
        """The model's source in words."""
        source = self.model.spec.model.source
        if source.hugging_face is not None:
            return f"{source.hugging_face.repo}@{source.hugging_face.revision}"
        if source.pvc is not None:
            return f"{source.pvc.claim_name}/{source.pvc.path}".rstrip("/")
        assert source.image is not None
        return f"{source.image.reference}/{source.image.path}".rstrip("/")

    @cached_property
    def url(self) -> str:
        return f"http://{self.model.name}.{self.model.metadata.namespace}.svc/v1"

    @cached_property
    def revision(self) -> str:
        """The revision that replicas shall have."""
        return revision(self.model, self.env)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """The wanted ones, whether they exist or not."""
        return replicas_of(self.model.name, self.observed, range(wanted_replicas(self.model)))

    @cached_property
    def routing(self) -> Routing:
        return Routing(self.observed)

    @cached_property
    def fetch(self) -> Fetch | None:
        """None for a model that is not fetched."""
        return None if model_files.cache_key(self.model) is None else fetch_of(self.model, self.observed)

    @cached_property
    def lost_with_fetch(self) -> str | None:
        """The node that does not say that the fetch pod has ended, which was told to."""
        job = self.observed.child("Job", names.fetch(self.model.name, model_files.cache_key(self.model)))
        if job is None:
            return None
        for pod in self.observed.pods:
            if controller_uid(pod) == job["metadata"]["uid"] and seems_lost(pod, self.now):
                return str(pod["spec"].get("nodeName"))
        return None

    @cached_property
    def cached(self) -> bool:
        return cached(self.model, self.observed)

    @cached_property
    def conflicts(self) -> dict[Ref, str]:
        return conflicts(self.model, self.observed, self.env)

    @cached_property
    def routable(self) -> int:
        """Replicas that requests can reach."""
        return sum(replica.routable is True for replica in self.replicas)

    @cached_property
    def frontend(self) -> Manifest | None:
        return self.observed.child("Deployment", names.frontend(self.model.name))

    @cached_property
    def ready_frontends(self) -> int:
        return 0 if self.frontend is None else int((self.frontend.get("status") or {}).get("readyReplicas") or 0)

    @cached_property
    def leaving(self) -> bool:
        """Whether pods of replicas that are no longer wanted are still there."""
        wanted = {replica.name for replica in self.replicas}
        return any(
            component(pod) == names.ENGINE and pod["metadata"]["labels"].get(names.REPLICA_LABEL) not in wanted
            for pod in self.observed.pods
        )

    @cached_property
    def troubles(self) -> tuple[Condition, ...]:
        """What keeps pods from running or from being made, engines first."""
        return tuple(self._troubles())

    def trouble(self, kind: Kind) -> Condition | None:
        return next((trouble for trouble in self.troubles if trouble.kind is kind), None)

    def phase(self, replica: Replica) -> Phase:
        """Where a replica is: what its launcher says, and before that what Kubernetes says."""
        if replica.stateful_set is None or any(revision_of(pod) != replica.revision for pod in replica.pods):
            return "Draining" if replica.pods else "Pending"
        if any(waiting_reason(pod) == "CrashLoopBackOff" for pod in replica.pods):
            return "Restarting"
        if replica.report is not None:
            said = replica.report.get("phase")
            known: tuple[Phase, ...] = ("Waiting", "Rendezvous", "Loading", "Ready", "Restarting", "Draining", "Failed")
            return next((phase for phase in known if phase == said), "Unknown")
        if replica.ready:
            return "Ready"
        asked = any(
            started(pod) and isinstance(self.observed.reports.get(pod["metadata"]["uid"]), Unreachable)
            for pod in replica.pods
        )
        return "Unknown" if asked else "Pending"

    def failing(self, replica: Replica) -> bool:
        """It does not serve, and not because it is on its way up, or about to be replaced."""
        if replica.ready:
            return False
        if self.phase(replica) in ("Failed", "Restarting", "Unknown"):
            return True
        return any(_is_stuck(pod) for pod in replica.pods)

    @cached_property
    def failing_frontends(self) -> bool:
        return any(component(pod) == names.FRONTEND and _is_stuck(pod) for pod in self.observed.pods)

    def outdated(self, replica: Replica) -> bool:
        """It still has pods of another revision, or would make such."""
        return replica.stateful_set is not None and (
            replica.revision != self.revision or any(revision_of(pod) != self.revision for pod in replica.pods)
        )

    def not_asked_yet(self, told_before: Collection[str]) -> bool:
        """Whether a pod that can answer was not asked so far: so it is after a start of the operator. `told_before`
        are replicas whose launcher had something to tell, be it that it has failed and is not ready."""

        def can_answer(pod: Manifest) -> bool:
            # One that has ended is never asked again, whatever its conditions say.
            if deleting(pod) or not is_asked(pod):
                return False
            silent = (
                component(pod) == names.ENGINE and pod["metadata"]["labels"].get(names.REPLICA_LABEL) not in told_before
            )
            return holds(pod, "Ready") or (started(pod) and not silent)

        return any(
            can_answer(pod) and pod["metadata"]["uid"] not in self.observed.reports for pod in self.observed.pods
        )

    def _troubles(self) -> Iterator[Condition]:
        # First, for of the pods that wait for it the scheduler says less.
        if found := self._unbound_claim() or self._claim_that_does_not_grow():
            yield found
        gpu = self.model.spec.engine.gpu_resource_name
        ranking = {names.ENGINE: 0, names.FETCH: 1, names.FRONTEND: 2}
        pods = sorted(self.observed.pods, key=lambda pod: (ranking.get(component(pod) or "", 3), _name(pod)))
        for pod in pods:
            if deleting(pod) or holds(pod, "Ready"):
                continue
            found = trouble_of(pod, self.observed.events.get(pod["metadata"]["uid"], ()), gpu)
            if found is not None:
                yield found
        if found := refused_pods(self._refusals()):
            yield found

    def _refusals(self) -> Iterator[str]:
        """What the controllers that make pods complain of, as long as they lack pods."""
        for refusal in self.outcome.refusals:
            if refusal.status == 403 and "exceeded quota" in refusal.message:
                yield refusal.message
        short = [
            replica.stateful_set
            for replica in self.replicas
            if replica.stateful_set is not None and len(replica.pods) < replica.stateful_set["spec"]["replicas"]
        ]
        jobs = [live for ref, live in self.observed.children.items() if ref.kind == "Job" and not _has_run(live)]
        for controller in (*short, *jobs):
            for event in self.observed.events.get(controller["metadata"]["uid"], ()):
                if event.reason == "FailedCreate":
                    yield event.message
        if self.frontend is not None:
            failure = condition(self.frontend, "ReplicaFailure")
            if failure is not None and failure["status"] == "True":
                yield str(failure.get("message") or "")

    def _unbound_claim(self) -> Condition | None:
        claim = self.observed.child("PersistentVolumeClaim", names.cache(self.model.name))
        if claim is None or (claim.get("status") or {}).get("phase") != "Pending":
            return None
        for event in reversed(self.observed.events.get(claim["metadata"]["uid"], ())):
            if event.reason in ("ProvisioningFailed", "FailedBinding"):
                return Condition(
                    Kind.SCHEDULED,
                    "False",
                    Reason.NO_STORAGE_CLASS,
                    f'PersistentVolumeClaim "{claim["metadata"]["name"]}" gets no volume: {event.message}. Delete the '
                    "InferenceModel and create it again with spec.model.cache.storageClassName set to one that "
                    f"`kubectl get storageclass` lists and that offers {self.model.spec.model.hub_cache.access_mode}, "
                    "or make a PersistentVolume for the claim.",
                )
        return None

    def _claim_that_does_not_grow(self) -> Condition | None:
        claim = self.observed.child("PersistentVolumeClaim", names.cache(self.model.name))
        if claim is None:
            return None
        for kind in _GROWTH_FAILED:
            found = condition(claim, kind)
            if found is not None and found["status"] == "True":
                return cannot_grow(claim["metadata"]["name"], str(found.get("message") or kind))
        return None


def cannot_grow(claim: str, said: str) -> Condition:
    return Condition(
        Kind.ACCEPTED,
        "False",
        Reason.REJECTED,
        f'PersistentVolumeClaim "{claim}" cannot grow to spec.model.cache.size: {quoted(said)}. Set '
        "allowVolumeExpansion: true in its StorageClass if the driver can expand volumes; if it cannot, delete the "
        "InferenceModel and create it again. Until then the claim is as large as it was.",
    )


def _is_stuck(pod: Manifest) -> bool:
    return not deleting(pod) and (waiting_reason(pod) in HOPELESS_WAITING or unschedulable(pod))


def _has_run(job: Manifest) -> bool:
    status = job.get("status") or {}
    return any(status.get(count) for count in ("active", "succeeded", "failed"))


def _name(pod: Manifest) -> str:
    return str(pod["metadata"]["name"])
