"""Whether a model keeps the pods of an earlier operator until its turn.

What differs between the templates of the children and those that this operator renders is an edit of the user's if the
spec has changed since the children got theirs; otherwise it is the operator that is new. `status.rollout.upgrade` has
the hash of the spec that tells one from the other, and whether the model has had its turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from minisgl_operator.api.objects import Manifest, condition_of
from minisgl_operator.api.types import InferenceModel
from minisgl_operator.facts.pods import revision_of
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.facts.rollout.waves import State
from minisgl_operator.facts.wanted import takes_requests
from minisgl_operator.render import names

_CHANGES_NO_PODS: Final = {
    "replicas",
    "autoscaling",
    "suspend",
    "recovery",
    "rollout",
    "availability",
    "network_policy",
    "route",
}


@dataclass(frozen=True)
class Templates:
    """Revisions of the templates that this operator renders for the spec, and of those that the children have.

    replicas: the existing ones, with the engine's revision of the spec as the current one.
    stable: the last revision of engines that served.
    """

    frontend_revision: str
    engine_revision: str
    frontend: Manifest | None
    replicas: tuple[Replica, ...]
    stable: str | None

    @property
    def target(self) -> str:
        return f"{self.frontend_revision}-{self.engine_revision}"

    @property
    def frontend_is_old(self) -> bool:
        return self.frontend is not None and revision_of(self.frontend) != self.frontend_revision

    @property
    def engines_are_old(self) -> bool:
        return any(each.has_old_template for each in self.replicas)

    @property
    def engines_have_begun(self) -> bool:
        return any(each.revision == self.engine_revision for each in self.replicas)

    @property
    def frontends_are_done(self) -> bool:
        """True if all frontends have the new template and are ready."""
        if self.frontend is None or self.frontend_is_old:
            return False
        status, wanted = self.frontend.get("status") or {}, int(self.frontend["spec"]["replicas"])
        if int(status.get("observedGeneration") or 0) < int(self.frontend["metadata"].get("generation") or 0):
            return False
        existing, updated, ready = (
            int(status.get(count) or 0) for count in ("replicas", "updatedReplicas", "readyReplicas")
        )
        return existing == updated and min(updated, ready) >= wanted

    @property
    def frontends_have_failed(self) -> bool:
        """True if new frontends have not become ready in the Deployment's time."""
        progress = None if self.frontend is None else condition_of(self.frontend, "Progressing")
        return progress is not None and progress["status"] == "False"


@dataclass(frozen=True)
class Upgrade:
    """`target`: hash of the templates that the model shall have in the end. `holds_frontends`, `holds_engines`: these
    keep the template that they have. `spec_hash`: the spec of the pods, None if it is not known."""

    state: State
    target: str
    spec_hash: str | None
    holds_frontends: bool = False
    holds_engines: bool = False


def spec_hash(model: InferenceModel) -> str:
    """Hash of the fields that can change pods. Defaults are left out: a newer version may have more of them."""
    frontend = model.spec.frontend.model_copy(update={"min_replicas": None})
    spec = model.spec.model_copy(update={"frontend": frontend})
    fields = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=_CHANGES_NO_PODS)
    return names.revision(fields)


def upgrade_of(
    model: InferenceModel, model_object: Manifest, templates: Templates, failure: str, *, admitted: bool, wanted: int
) -> Upgrade:
    """The state of the model's upgrade. `failure`: reason why engines of the new template were given up. `admitted`: it
    is the model's turn. `wanted`: number of replicas that it shall have now."""
    status: Mapping[str, Any] = model_object.get("status") or {}
    recorded = (status.get("rollout") or {}).get("upgrade") or {}
    current_hash, target = spec_hash(model), templates.target
    known_hash = recorded.get("specHash") or (current_hash if _was_up_to_date(model, status) else None)
    has_target = recorded.get("target") == target
    # Pods of the stable revision are created again when the model is no longer idle.
    idle = not templates.replicas and templates.stable not in (None, templates.engine_revision) and not has_target
    # Replicas that are being removed get no template.
    old = [each for each in templates.replicas if each.has_old_template and not each.being_removed]
    outdated = templates.frontend_is_old or bool(old) or idle
    policy = model.spec.rollout.upgrade
    if policy == "Immediate" or known_hash != current_hash:
        return Upgrade("Current", target, known_hash if outdated else current_hash)
    if policy == "Never" or model.spec.rollout.paused:
        return Upgrade("Excluded" if outdated else "Current", target, current_hash, outdated, outdated)
    if not takes_requests(model_object):
        return Upgrade("Current", target, current_hash)
    state = recorded.get("state")
    was_complete = state == "Upgraded" and has_target
    has_begun = state in ("Upgrading", "Failed") or was_complete
    if admitted and outdated and not has_begun:
        # The status first: an operator that stops between a child and the status would not know that the model has
        # begun, and leave it half-way if its turn, or the window, is over.
        return Upgrade("Upgrading", target, current_hash, True, True)
    if admitted or has_begun:
        waits_for_frontends = not (was_complete or templates.frontends_are_done or templates.engines_have_begun)
        # Only a request starts a model at zero, so no other model can wait until it serves.
        serves = wanted == 0 or _is_served(status)
        # Going to zero repairs nothing.
        has_failed = bool(failure) or (state == "Failed" and wanted == 0)
        now = _state_in_turn(templates, has_failed, serves, was_complete)
        return Upgrade(now, target, current_hash, holds_engines=waits_for_frontends)
    if not outdated:
        return Upgrade("Current", target, current_hash)
    return Upgrade("Waiting" if _is_served(status) else "Excluded", target, current_hash, True, True)


def _state_in_turn(templates: Templates, has_failed: bool, serves: bool, was_complete: bool) -> State:
    """`has_failed`: engines of the new template were given up. `serves`: the model is Ready or at zero.
    `was_complete`: all replicas have served with the new templates, and only `serves` counts since then."""
    new = (each for each in templates.replicas if each.revision == templates.engine_revision)
    if has_failed or templates.frontends_have_failed or any(each.phase == "Failed" for each in new):
        return "Failed"
    complete = was_complete or (
        templates.frontends_are_done and all(each.rollout_ready for each in templates.replicas)
    )
    complete &= not templates.engines_are_old
    return "Upgraded" if complete and serves else "Upgrading"


def _was_up_to_date(model: InferenceModel, status: Mapping[str, Any]) -> bool:
    """True if the last operator, which recorded no hash, had nothing left to do for this generation of the spec."""
    rollout = status.get("rollout") or {}
    return (
        status.get("observedGeneration") == model.metadata.generation
        and status.get("updatedReplicas") == status.get("replicas")
        and "failedRevision" not in status
        and rollout.get("stableRevision") == rollout.get("revision")
    )


def _is_served(status: Mapping[str, Any]) -> bool:
    """By the last condition Ready that was written, which is also True for models that are meant to have no replicas.
    The state now is not known yet when the operator has just started."""
    conditions = status.get("conditions") or ()
    return any((each["type"], each["status"], each["reason"]) == ("Ready", "True", "Ready") for each in conditions)
