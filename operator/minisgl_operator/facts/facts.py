"""Facts about one model, computed once from the observed state. Plan and status are computed from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.defaults import Defaults
from minisgl_operator.api.objects import (
    Manifest,
    Ref,
    condition_of,
    controller_of,
    controller_uid,
    has_condition,
    is_deleting,
    ref_of,
    true_condition,
)
from minisgl_operator.api.route import ParentReference
from minisgl_operator.api.text import quote
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts import fetch_status as fetches
from minisgl_operator.facts.autoscaling import Decision, Load, look_again_after, scale_down_at
from minisgl_operator.facts.cache_use import directories_in_use, unused_are_obsolete
from minisgl_operator.facts.drains import BlockedDrain, blocked_drain
from minisgl_operator.facts.ended_pods import EndedPod, ended_pod
from minisgl_operator.facts.gateway import Demand, addresses, demand_of
from minisgl_operator.facts.load import load_of
from minisgl_operator.facts.lost_nodes import Ending, ending, next_ending
from minisgl_operator.facts.observed import DryRun, Observed
from minisgl_operator.facts.peer_secret import PeerSecret, peer_secret_of
from minisgl_operator.facts.pod_failures import PodFailure, creation_failure, failure_of_pod
from minisgl_operator.facts.pods import cannot_run, component, containers_started, replica_name, serves_status
from minisgl_operator.facts.replicas import Existing, Replica, existing_replicas
from minisgl_operator.facts.rollout.admission import Admission, admission_of
from minisgl_operator.facts.rollout.gang import GangStarts, is_placed_together
from minisgl_operator.facts.rollout.history import History
from minisgl_operator.facts.rollout.order import replicas_to_replace, revision_has_failed, rollout_blockers
from minisgl_operator.facts.rollout.progress import Progress, progress_of
from minisgl_operator.facts.rollout.retries import Retry, forgotten_at, retry_of
from minisgl_operator.facts.rollout.selection import Rollout, Selection, select
from minisgl_operator.facts.rollout.surge import Strategy, auto_strategy, surge_end
from minisgl_operator.facts.rollout.upgrade import Templates, Upgrade, upgrade_of
from minisgl_operator.facts.rollout.waves import Turn
from minisgl_operator.facts.route import members
from minisgl_operator.facts.routing import Routing
from minisgl_operator.facts.silent_frontends import SilentFrontend, next_left_out, silent_frontends
from minisgl_operator.facts.wanted import autoscaled, takes_requests, wanted_replicas
from minisgl_operator.render import engine, frontend, model_files, names, render, route
from minisgl_operator.render.engine_template import EngineTemplate
from minisgl_operator.render.pruning import Pruning, pruning

# Conditions of a PVC whose volume driver could not expand the volume.
_RESIZE_FAILED: Final = ("ControllerResizeError", "NodeResizeError")
_COMPONENTS: Final = (names.ENGINE, names.FETCH, names.FRONTEND)
# Computed facts that `Facts.seen_again` keeps.
_OF_SPEC: Final = ("spec_template", "frontend_revision")
_NOT_OF_TURN: Final = ("_existing", "progress", "routing", "history", "load", "autoscaling", "wanted")


@dataclass(frozen=True)
class Facts:
    model: InferenceModel
    observed: Observed
    defaults: Defaults
    now: datetime
    turn: Turn | None = None
    """The model's turn in an upgrade in waves; None if it has none."""

    @property
    def next_change(self) -> datetime | None:
        """Time at which plan or status change without an event; None if they do not. Now, if a dry run or a new attempt
        is due that was not made."""
        due = (max(each, self.now) for each in (self.next_check, self.next_retry) if each is not None)
        coming = (
            None if self.turn is None else self.turn.opens_at,
            self.deadline,
            self.strategy_changes_at,
            self.gang.next_change,
            self.next_forgotten,
            self.next_fetch,
            self.scale_down_at,
            next_left_out(self.silent_frontends, self.now),
            next_ending(self.observed.pods, self.observed.nodes, self.now),
        )
        moments = (*due, *(each for each in coming if each is not None and each > self.now))
        return min(moments, default=None)

    def seen_again(self, observed: Observed, turn: Turn | None, now: datetime | None = None) -> Facts:
        """Facts about the same spec from this observation. What follows from the spec alone is not computed again, nor
        what follows from the same observation without the turn."""
        later = replace(self, observed=observed, turn=turn, now=now or self.now)
        same = _OF_SPEC if observed is not self.observed or later.now != self.now else (*_OF_SPEC, *_NOT_OF_TURN)
        later.__dict__.update({name: self.__dict__[name] for name in same if name in self.__dict__})
        return later

    @cached_property
    def desired(self) -> dict[Ref, Manifest]:
        """Manifests of all children that the spec asks for, with the replicas that stay."""
        indices = [replica.index for replica in self.replicas]
        has_route = self.parents and self.observed.routes_served
        manifests = render(
            *(self.model, self.defaults, indices, self.template),
            gateway_addresses=self.gateway_addresses if self.leads_to_gateway else None,
            group=members(self.model, self.observed.model_object, self.observed.group) if has_route else (),
        )
        return {ref_of(manifest): manifest for manifest in manifests}

    @property
    def parents(self) -> tuple[ParentReference, ...]:
        """Gateways that shall lead to the model; without any it has no route."""
        return route.parents(self.model, self.defaults)

    @cached_property
    def conflicts(self) -> dict[Ref, str]:
        """Names of wanted children that are taken by other owners' objects, with a text that names the owner."""
        found = dict(self.observed.conflicting)
        for ref, live in self.observed.children.items():
            controller = controller_of(live)
            if controller is not None and controller["uid"] != self.model.metadata.uid:
                found[ref] = f"{controller['kind']} {controller['name']}"
        return {ref: owner for ref, owner in found.items() if ref in self.desired}

    @cached_property
    def title(self) -> str:
        """The model's source for messages and `status.model.name`."""
        source = self.model.spec.model.source
        if source.hugging_face is not None:
            return f"{source.hugging_face.repo}@{source.hugging_face.revision}"
        if source.s3 is not None:
            return source.s3.uri
        if source.pvc is not None:
            return f"{source.pvc.claim_name}/{source.pvc.path}".rstrip("/")
        assert source.image is not None
        return f"{source.image.reference}/{source.image.path}".rstrip("/")

    @cached_property
    def url(self) -> str:
        return f"http://{self.model.name}.{self.model.metadata.namespace}.svc/v1"

    @cached_property
    def revision(self) -> str:
        """The current revision."""
        return self.template.revision

    @cached_property
    def template(self) -> EngineTemplate:
        """The pod template that replicas should have: the spec's, unless that was given up or must wait."""
        wanted, stable = self.spec_template, self.stable_template
        waits = self.keeps_engines or (self.progress.failure_recorded and self.model.spec.rollout.auto_rollback)
        return stable if waits and stable is not None else wanted

    @cached_property
    def spec_template(self) -> EngineTemplate:
        return engine.current_template(self.model, self.defaults)

    @cached_property
    def frontend_revision(self) -> str:
        """The revision of the frontends that the spec asks for."""
        return frontend.revision(self.model, self.defaults)

    @cached_property
    def stable_template(self) -> EngineTemplate | None:
        """The template of the last revision that served, if it is another one than the spec's and was recorded."""
        stable = self.progress.stable
        return None if stable in (None, self.spec_template.revision) else self.history.templates.get(str(stable))

    @property
    def is_paused(self) -> bool:
        return self.model.spec.rollout.paused

    @cached_property
    def upgrade(self) -> Upgrade | None:
        """The model's upgrade to the templates of this operator; None if these apply at once."""
        if self.defaults.models.rollout is None and self.model.spec.rollout.upgrade != "Never":
            return None
        templates = Templates(
            frontend_revision=self.frontend_revision,
            engine_revision=self.spec_template.revision,
            frontend=self.frontend,
            replicas=self._existing_replicas,
            stable=self.progress.stable,
        )
        return upgrade_of(
            self.model,
            self.observed.model_object,
            templates,
            self.progress.failure,
            admitted=self.turn is not None and self.turn.admitted,
            wanted=self.wanted,
        )

    @property
    def keeps_engines(self) -> bool:
        """True if no existing replica is replaced, and new ones get the last revision that served."""
        return self.is_paused or (self.upgrade is not None and self.upgrade.holds_engines)

    @property
    def keeps_frontends(self) -> bool:
        """True if the frontends stay as they are. Without any there is nothing to keep."""
        upgrade, live = self.upgrade, self.frontend
        held = upgrade is not None and upgrade.holds_frontends and live is not None and bool(live["spec"]["replicas"])
        return held and not self.frontends_at_zero

    @property
    def rolled_back(self) -> bool:
        """True if replicas get an older revision because the spec's was given up."""
        return self.progress.failure_recorded and self.template is not self.spec_template

    @cached_property
    def progress(self) -> Progress:
        """Progress of the rollout of the spec's revision."""
        settings = self.model.spec.rollout
        revision = self.spec_template.revision
        before, after = (self._admission_of(revision, answer) for answer in (None, self.observed.dry_run))
        refusal = after.message if after.refused else "" if before.refused else None
        return progress_of(
            revision,
            self._recorded_rollout,
            self._existing_replicas,
            settings,
            self.now,
            refusal,
            wanted=self.wanted,
            suspended=self.model.spec.suspend,
        )

    @property
    def _existing_replicas(self) -> tuple[Replica, ...]:
        """Existing replicas, compared with the spec's revision."""
        return self._existing.replicas

    @cached_property
    def _existing(self) -> Existing:
        return existing_replicas(self.model.name, self.observed, self.routing, self.spec_template.revision)

    @cached_property
    def admission(self) -> Admission:
        """What dry runs have shown about pods of the current revision."""
        return self._admission_of(self.revision, self.observed.dry_run)

    def _admission_of(self, revision: str, answer: DryRun | None) -> Admission:
        return admission_of(revision, self._recorded_rollout, answer, self.now)

    @cached_property
    def replica_to_check(self) -> Replica | None:
        """A replica that serves and that the rollout must not drain before a dry run has shown that the API server
        accepts its new pods; None if nothing waits for that."""
        if not self.startable or self.keeps_engines or self.admission.allows:
            return None
        serving = [each for each in self.replicas if each.has_old_template and not each.out_of_service]
        no_room = self.model.spec.rollout.strategy == "Auto" and auto_strategy(self.replicas, self.now) == "NoRoom"
        # Without room for an additional replica, one that serves would be drained next.
        waits = no_room or any(not each.out_of_service for each in self._replaceable)
        return next(iter(serving), None) if waits else None

    @property
    def next_check(self) -> datetime | None:
        """Time of the next dry run; None if none is needed, or the first one is due."""
        return None if self.replica_to_check is None else self.admission.retry_at

    @property
    def deadline(self) -> datetime | None:
        """Time at which the spec's revision is given up; None if there is no limit."""
        return self.progress.deadline(self.model.spec.rollout)

    @property
    def startable(self) -> bool:
        """True if the files that the current revision loads are there. An older one has served with its own."""
        return self.cached or self.template is not self.spec_template

    @cached_property
    def history(self) -> History:
        return History.of(self.observed)

    @cached_property
    def revisions_in_use(self) -> frozenset[str]:
        """Revisions of existing replicas, and the current one."""
        live = (replica.revision for replica in (*self.replicas, *self.surplus))
        found = (self.revision, self.progress.stable, *live)
        return frozenset(revision for revision in found if revision is not None)

    @cached_property
    def strategy_changes_at(self) -> datetime | None:
        """Time at which an additional replica has waited too long for nodes; None if none waits."""
        if self.model.spec.rollout.strategy != "Auto" or self.strategy != "Surge":
            return None
        old = any(replica.has_old_template for replica in self.replicas)
        return surge_end(self.replicas, self.now) if old else None

    @cached_property
    def peer_secret(self) -> PeerSecret:
        return peer_secret_of(self.observed)

    @cached_property
    def routing(self) -> Routing:
        return Routing(self.observed)

    @cached_property
    def replicas(self) -> tuple[Replica, ...]:
        """The wanted replicas by index, whether they exist or not."""
        return self._selection.wanted

    @property
    def is_idle(self) -> bool:
        """True if the autoscaler has removed all replicas, and a request starts one."""
        return not self.replicas and self.model.spec.autoscaling is not None and not self.model.spec.suspend

    @cached_property
    def surplus(self) -> tuple[Replica, ...]:
        """Existing replicas that are not wanted, in the order of their removal."""
        return self._selection.surplus

    @cached_property
    def _selection(self) -> Selection:
        # Before the model is cached no replica is replaced, so a scale-down need not wait for the download.
        # An additional replica may still prove the revision until the deadline.
        known = self._is_known_to_fail or self.admission.refused
        failed = known and (self.strategy != "Surge" or self.progress.failure_recorded)
        rollout: Rollout = self.strategy if self.startable and not failed and not self.keeps_engines else ""
        existing = self._existing
        if self.revision != self.spec_template.revision:
            existing = existing_replicas(self.model.name, self.observed, self.routing, self.revision)
        return select(self.model.name, self.observed, self.routing, existing, self.wanted, self.revision, rollout)

    @cached_property
    def wanted(self) -> int:
        """Number of replicas that the model shall have."""
        return wanted_replicas(self.model, self.autoscaling)

    @cached_property
    def load(self) -> Load:
        left_out = [each.pod for each in self.silent_frontends if each.is_left_out(self.now)]
        return load_of(self.observed, self.demand, left_out)

    @cached_property
    def demand(self) -> Demand:
        """Requests of the model in the gateway. One that keeps its frontends need not know all of them: these hold its
        requests too, and an outage of the gateway says nothing about them."""
        name = f"{self.model.metadata.namespace}/{self.model.name}"
        found = demand_of(self.observed.gateway or (), name, self.now)
        return found if self.relies_on_gateway else replace(found, complete=True)

    @property
    def gateway_addresses(self) -> tuple[str, ...]:
        """Pods of the gateway that take requests."""
        return addresses(self.observed.gateway or ())

    @property
    def relies_on_gateway(self) -> bool:
        """True if the model has no frontends at zero, so that the gateway holds its requests."""
        own, scaling = self.model.spec.frontend.min_replicas, self.model.spec.autoscaling
        least = self.defaults.models.frontend.min_replicas if own is None else own
        return least == 0 and self.defaults.gateway is not None and scaling is not None and scaling.min_replicas == 0

    @cached_property
    def frontends_at_zero(self) -> bool:
        """True if the model shall have no frontends now. The last ones leave only where a gateway takes their place;
        its outage later must not start those of all idle models."""
        if not self.relies_on_gateway or not self.is_idle:
            return False
        has_none = self.frontend is not None and not self.frontend["spec"]["replicas"]
        return has_none or bool(self.gateway_addresses)

    @property
    def leads_to_gateway(self) -> bool:
        """True if the model's Service has the pods of the gateway as endpoints: while no frontend takes requests."""
        alone = self.frontends_at_zero or not self.ready_frontends
        return self.relies_on_gateway and alone and takes_requests(self.observed.model_object)

    @cached_property
    def silent_frontends(self) -> tuple[SilentFrontend, ...]:
        """Frontends that do not answer the operator."""
        return silent_frontends(self.observed, self.now)

    @cached_property
    def autoscaling(self) -> Decision | None:
        """The autoscaler's decision; None without spec.autoscaling."""
        uid = self.model.metadata.uid
        sets = (live for ref, live in self.observed.children.items() if ref.kind == "StatefulSet")
        existing = sum(controller_uid(live) == uid and not is_deleting(live) for live in sets)
        return autoscaled(self.model, self.observed.model_object.get("status") or {}, existing, self.load, self.now)

    @property
    def scale_down_at(self) -> datetime | None:
        """Time at which the autoscaler removes replicas unless the load grows; None if it does not."""
        settings, decision = self.model.spec.autoscaling, self.autoscaling
        if settings is None or decision is None or self.model.spec.suspend:
            return None
        return scale_down_at(settings, decision)

    @property
    def next_look(self) -> datetime | None:
        """Time at which the autoscaler must look at the load again, as another load is no event; None if it need not.
        Without a new report of the load nothing has changed then."""
        settings, decision = self.model.spec.autoscaling, self.autoscaling
        if settings is None or decision is None or self.model.spec.suspend:
            return None
        after = look_again_after(settings, decision, self.load)
        return None if after is None else self.now + after

    @cached_property
    def strategy(self) -> Strategy:
        """The way in which replicas that serve get the current revision."""
        wanted = self.model.spec.rollout.strategy
        if wanted != "Auto":
            return wanted
        before = self._recorded_rollout
        known = before.get("strategy") if before.get("revision") == self.spec_template.revision else None
        return "NoRoom" if known == "NoRoom" else "Surge"

    @cached_property
    def next_strategy(self) -> Strategy:
        """The strategy to record. NoRoom takes effect once it is recorded: it removes the replica that shows it."""
        if self.model.spec.rollout.strategy != "Auto" or self.strategy == "NoRoom":
            return self.strategy
        found = auto_strategy(self.replicas, self.now)
        return "Surge" if found == "NoRoom" and not self.admission.allows else found

    @property
    def _recorded_rollout(self) -> Mapping[str, Any]:
        """`status.rollout` as it was last written."""
        return (self.observed.model_object.get("status") or {}).get("rollout") or {}

    @cached_property
    def routable(self) -> int:
        """Number of routable replicas."""
        return sum(replica.routable is True for replica in self.replicas)

    @cached_property
    def replicas_to_replace(self) -> tuple[Replica, ...]:
        """Replicas that get the current template in place now."""
        allowed = self.admission.allows or all(replica.out_of_service for replica in self._replaceable)
        return self._replaceable if allowed else ()

    @cached_property
    def _replaceable(self) -> tuple[Replica, ...]:
        """Replicas whose turn it is, whether or not the API server accepts their pods."""
        failed = self.revision_has_failed or self.keeps_engines
        return replicas_to_replace(self.replicas, failed, surge=self.strategy == "Surge")

    @property
    def _is_known_to_fail(self) -> bool:
        """Whether the last status names the current revision as failed. The replica that showed it may be gone."""
        return bool((self.observed.model_object.get("status") or {}).get("failedRevision") == self.revision)

    @cached_property
    def revision_has_failed(self) -> bool:
        """True if the current revision does not start, while an older one serves."""
        return revision_has_failed(self.replicas, self._is_known_to_fail)

    @property
    def failed_revision(self) -> str | None:
        """The revision that does not start while an older one serves, or that was rolled back."""
        if self.rolled_back:
            return self.spec_template.revision
        return self.revision if self.revision_has_failed else None

    @cached_property
    def rollout_blockers(self) -> tuple[Replica, ...]:
        return rollout_blockers(self.replicas)

    @cached_property
    def retries(self) -> Mapping[str, Retry]:
        """Failures of replicas that have used up their restarts, by the replica's name."""
        before = self.observed.replica_statuses
        found = (
            (each.name, retry_of(each, before.get(each.name, {}), self._recovery_window, self.now))
            for each in self.replicas
        )
        return {name: retry for name, retry in found if retry is not None}

    @property
    def _recovery_window(self) -> timedelta:
        return timedelta(seconds=self.model.spec.recovery.window_seconds)

    @property
    def next_retry(self) -> datetime | None:
        """Time at which a failed replica gets its next attempt; None without one."""
        return min((retry.retry_at for retry in self.retries.values() if retry.waits), default=None)

    @property
    def next_forgotten(self) -> datetime | None:
        """Time at which the failures of a replica that serves again are forgotten; None without any."""
        retries = ((each, self.retries.get(each.name)) for each in self.replicas)
        ends = (
            forgotten_at(retry, replica, self._recovery_window, self.now)
            for replica, retry in retries
            if retry is not None and not retry.waits
        )
        return min((end for end in ends if end is not None), default=None)

    @cached_property
    def gang(self) -> GangStarts:
        """Starts of replicas with several pods."""
        engines = [pod for replica in self.replicas for pod in replica.pods]
        managed = not is_placed_together(self.template.body, engines)
        uid = self.model.metadata.uid
        return GangStarts(self.replicas, self.template.pods, managed, uid, self.now, self.revision_has_failed)

    @cached_property
    def scaling_down(self) -> bool:
        """True if pods of replicas that are no longer wanted exist."""
        return any(replica.pods for replica in self.surplus)

    @cached_property
    def frontend(self) -> Manifest | None:
        return self.observed.child("Deployment", names.frontend(self.model.name))

    @cached_property
    def wanted_frontends(self) -> int:
        """Number of frontend pods: the spec's, or else the one that the Deployment has, which others may change."""
        if self.frontends_at_zero:
            return 0
        count = self.model.spec.frontend.replicas
        live = None if self.frontend is None else self.frontend["spec"]["replicas"]
        found = next((int(each) for each in (count, live) if each is not None), 1)
        # Those of a model that wakes are about to be created.
        return max(found, 1) if self.relies_on_gateway else found

    @cached_property
    def ready_frontends(self) -> int:
        return 0 if self.frontend is None else int((self.frontend.get("status") or {}).get("readyReplicas") or 0)

    @property
    def frontend_rollout_failure(self) -> str:
        """The Deployment's message that new frontends do not become ready, or cannot be created; "" if they do. Those
        of a model that takes no requests are never ready."""
        progress = None if self.frontend is None else condition_of(self.frontend, "Progressing")
        if progress is None or progress["status"] != "False" or not takes_requests(self.observed.model_object):
            return ""
        return quote(str(progress.get("message") or progress.get("reason") or "it makes no progress"))

    @cached_property
    def failing_frontends(self) -> bool:
        return any(each.component == names.FRONTEND for each in self.ended_pods) or any(
            component(pod) == names.FRONTEND and cannot_run(pod) and not is_deleting(pod) for pod in self.observed.pods
        )

    @cached_property
    def ended_pods(self) -> tuple[EndedPod, ...]:
        """Pods that their nodes refused or ended, and without which something is missing, those of engines first. Of a
        Deployment and of a Job such pods stay as a record; they say nothing once others have done their work."""
        engines = [replica.ended for replica in self.replicas if replica.ended is not None and not replica.ready]
        missing = set() if self.ready_frontends >= self.wanted_frontends else {names.FRONTEND}
        youngest = None if self.fetch_job is None else fetches.youngest_pod(self.fetch_job, self.observed)
        others = [pod for pod in self.observed.pods if component(pod) in missing]
        if youngest is not None and not self.cached:
            others.append(youngest)
        return (*engines, *(found for pod in others if (found := ended_pod(pod)) is not None))

    @cached_property
    def fetch_job(self) -> Manifest | None:
        return fetches.fetch_job(self.model, self.observed)

    @cached_property
    def fetch(self) -> fetches.FetchStatus | None:
        """None for a model that is not fetched."""
        return fetches.fetch_status(self.fetch_job, self.observed) if model_files.is_fetched(self.model) else None

    @property
    def next_fetch(self) -> datetime | None:
        """Time at which a fetch that failed permanently is tried again; None without one."""
        return None if self.fetch_job is None else fetches.retry_time(self.fetch_job)

    @cached_property
    def cached(self) -> bool:
        return fetches.is_cached(self.model, self.observed)

    @property
    def fetch_has_failed(self) -> bool:
        """Whether the model is not cached, and its fetch has failed for good."""
        return self.fetch is not None and self.fetch.failed and not self.cached

    @cached_property
    def blocked_drain(self) -> BlockedDrain | None:
        return blocked_drain(self.model.name, self.observed, self.replicas)

    def ending(self, pod: Manifest) -> Ending | None:
        """Reason why a deleted pod has not terminated; None for other pods, and while that is no surprise."""
        return ending(pod, self.observed.nodes, self.now)

    @cached_property
    def other_fetch_exists(self) -> bool:
        """True if the Job of another source exists. The next one waits for its end: a fetch may remove what another one
        finds, and a complete Job vouches for files that the next one may remove."""
        return any(ref.kind == "Job" and ref not in self.desired for ref in self.observed.children)

    @cached_property
    def pruning(self) -> Pruning | None:
        """What a fetch Job that is created now may remove; None for nothing."""
        in_use = directories_in_use(self.model, self.observed, self.history, self.revisions_in_use)
        return pruning(self.model, in_use, others_obsolete=unused_are_obsolete(self.replicas, self.observed))

    def awaits_first_report(self, reported_before: Collection[str]) -> bool:
        """True if a pod that can answer has not been probed yet, as after its start, or the operator's.
        `reported_before` names replicas whose leader has reported earlier: it is waited for even while its pod is not
        ready."""

        def can_answer(pod: Manifest) -> bool:
            # A pod that has ended is never probed again, whatever its conditions are.
            if is_deleting(pod) or not serves_status(pod):
                return False
            silent = component(pod) == names.ENGINE and replica_name(pod) not in reported_before
            return has_condition(pod, "Ready") or (containers_started(pod) and not silent)

        return any(can_answer(pod) and not self.observed.was_probed(pod) for pod in self.observed.pods)

    def pod_failure(self, *reasons: Reason) -> PodFailure | None:
        """The first failure with one of these reasons."""
        return next((failure for failure in self._pod_failures if failure.reason in reasons), None)

    @cached_property
    def _pod_failures(self) -> tuple[PodFailure, ...]:
        """Failures that keep pods from being created or from running, those of engines first."""
        return tuple(self._find_pod_failures())

    def _find_pod_failures(self) -> Iterator[PodFailure]:
        # The PVC comes first: for pods that wait for it the scheduler gives no cause.
        if found := self._pvc_failure():
            yield found
        pods = [pod for pod in self.observed.pods if not is_deleting(pod) and not has_condition(pod, "Ready")]
        for pod in sorted(pods, key=_by_component_and_name):
            if found := failure_of_pod(pod, self.observed.events_of(pod), self.model.spec.engine):
                yield found
        if found := creation_failure(self._creation_messages()):
            yield found

    def _pvc_failure(self) -> PodFailure | None:
        pvc = self.observed.child("PersistentVolumeClaim", names.cache(self.model.name))
        if pvc is None:
            return None
        name = str(pvc["metadata"]["name"])
        if (pvc.get("status") or {}).get("phase") == "Lost":
            return PodFailure(Reason.CLAIM_LOST, str(pvc["spec"].get("volumeName") or ""), subject=name)
        if (pvc.get("status") or {}).get("phase") == "Pending":
            for event in reversed(self.observed.events_of(pvc)):
                if event.reason in ("ProvisioningFailed", "FailedBinding"):
                    return PodFailure(Reason.NO_STORAGE_CLASS, event.message, subject=name)
        for type in _RESIZE_FAILED:
            if (found := true_condition(pvc, type)) is not None:
                return PodFailure(Reason.REJECTED, quote(str(found.get("message") or type)), subject=name)
        return None

    def _creation_messages(self) -> Iterator[str]:
        """Messages of the API server and of controllers that could not create pods."""
        for rejection in self.observed.rejections:
            if rejection.status == 403 and "exceeded quota" in rejection.message:
                yield rejection.message
        short_of_pods = [
            replica.stateful_set
            for replica in self.replicas
            if replica.stateful_set is not None and len(replica.pods) < replica.size
        ]
        jobs = [live for ref, live in self.observed.children.items() if ref.kind == "Job" and not _has_run(live)]
        for controller in (*short_of_pods, *jobs):
            for event in self.observed.events_of(controller):
                if event.reason == "FailedCreate":
                    yield event.message
        if self.frontend is not None and (failure := true_condition(self.frontend, "ReplicaFailure")) is not None:
            yield str(failure.get("message") or "")


def _has_run(job: Manifest) -> bool:
    status = job.get("status") or {}
    return any(status.get(count) for count in ("active", "succeeded", "failed"))


def _by_component_and_name(pod: Manifest) -> tuple[int, str]:
    part = component(pod)
    return _COMPONENTS.index(part) if part in _COMPONENTS else len(_COMPONENTS), str(pod["metadata"]["name"])
