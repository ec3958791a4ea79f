"""Progressing: whether a rollout, a change of scale or a start is in progress."""

from __future__ import annotations

from minisgl_operator.api.conditions import Reason
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.rollout.admission import Admission
from minisgl_operator.render import names
from minisgl_operator.status.admission import refusal
from minisgl_operator.status.condition import Condition, frontends_stuck, shortened, suspended
from minisgl_operator.status.upgrade import upgrade_failed, upgrade_waiting


def progressing(facts: Facts) -> Condition:
    if (failed := upgrade_failed(facts)) is not None:
        return failed
    outdated = [replica.name for replica in facts.replicas if replica.outdated]
    if facts.is_paused and outdated:
        return paused(facts)
    if facts.upgrade is not None and facts.upgrade.holds_engines and facts.upgrade.state == "Upgrading":
        message = "Frontend pods get the operator's new version. Engines follow when all frontends are ready."
        return Condition("True", Reason.ROLLING_OUT, message)
    waiting = upgrade_waiting(facts)
    if waiting is not None and outdated:
        return waiting
    if outdated:
        message = f"Replicas with an old revision: {shortened(outdated)}. {_rollout_blocker_message(facts)}"
        if facts.replica_to_check is not None and facts.admission.refused:
            return Condition("False", Reason.POD_REFUSED, message)
        if len(facts.replicas) > facts.wanted:
            message += " Replicas beyond the wanted number are removed when the others have the current revision."
        return Condition("True", Reason.ROLLING_OUT, message)
    if _frontends_roll_out(facts) and (failure := facts.frontend_rollout_failure):
        return Condition("False", Reason.PROGRESS_DEADLINE_EXCEEDED, frontends_stuck(failure))
    if _frontends_roll_out(facts):
        message = "Frontend pods are being replaced; engines are not changed."
        return Condition("True", Reason.ROLLING_OUT, message)
    if facts.scaling_down:
        message = "Pods of replicas that are no longer wanted finish their running requests."
        return Condition("True", Reason.SCALING, message)
    if not facts.replicas:
        return suspended(facts)
    starting = [replica.name for replica in facts.replicas if replica.starting]
    if starting:
        reason = Reason.SCALING if facts.routable else Reason.STARTING
        return Condition("True", reason, f"Replicas that are starting: {shortened(starting)}.")
    if facts.rolled_back:
        return Condition("False", Reason.ROLLED_BACK, _rolled_back_message(facts))
    if facts.is_paused and facts.template is not facts.spec_template:
        return paused(facts)
    return waiting or Condition("False", Reason.UP_TO_DATE, "No change is in progress.")


def paused(facts: Facts) -> Condition:
    message = (
        f"spec.rollout.paused is true: replicas keep their revision until it is set to false, and then get "
        f"{facts.spec_template.revision}."
    )
    return Condition("False", Reason.PAUSED, message)


def _rolled_back_message(facts: Facts) -> str:
    return (
        f"Revision {facts.spec_template.revision} was given up: {facts.progress.failure}. Replicas have revision "
        f"{facts.revision} again. Correct the spec, or try again with any edit of spec.engine."
    )


def _rollout_blocker_message(facts: Facts) -> str:
    """The state that the rollout waits for."""
    if facts.rolled_back:
        return _rolled_back_message(facts)
    if not facts.cached:
        return "The rollout begins when the model is cached."
    if facts.revision_has_failed:
        return (
            "The current revision does not start, so replicas that serve keep theirs: see EngineReady and Scheduled. "
            "Correct the spec, or add a replica with `kubectl scale` to try the revision again."
        )
    if facts.replica_to_check is not None:
        return _admission_message(facts.admission)
    blockers = facts.rollout_blockers
    if blockers and not facts.replicas_to_replace:
        first = min(blockers, key=lambda replica: (replica.outdated, replica.index))
        if not first.ready:
            return f"The rollout continues when {first.name} is ready."
        if not facts.routing.any_report:
            return (
                "The rollout continues when the frontends report to the operator which replicas they reach. Check the "
                "NetworkPolicies."
            )
        return (
            f"The rollout continues when every frontend can send requests to {first.name}. If that takes long, see "
            f"`kubectl logs deployment/{names.frontend(facts.model.name)}`: frontends may be unable to reach it or to "
            "use its tokenizer files."
        )
    awaiting_files = [replica.name for replica in facts.replicas if replica.awaiting_files and not replica.outdated]
    if awaiting_files:
        return (
            f"One replica is replaced at a time. New ones with other tokenizer files ({shortened(awaiting_files)}) get "
            "requests as soon as they are the majority."
        )
    skipped = facts.admission.result == "Skipped"
    return f"One replica is replaced at a time.{_skipped_message(facts.admission) if skipped else ''}"


def _admission_message(admission: Admission) -> str:
    """The dry run that the rollout waits for."""
    if admission.refused:
        author, remedy = refusal(admission.message)
        return (
            f"{author} refuses pods of the current revision, so no replica that serves is drained for it: "
            f"{admission.message}. {remedy} The check is repeated, at least every 5 minutes."
        )
    failed = f" The last attempt failed: {admission.message}." if admission.message else ""
    return f"The rollout continues when the API server has checked a pod of the current revision in a dry run.{failed}"


def _skipped_message(admission: Admission) -> str:
    return (
        f" It was not checked before whether admission accepts their pods: {admission.message}. If it does not, they "
        "fail after the old ones were drained."
    )


def _frontends_roll_out(facts: Facts) -> bool:
    if facts.frontend is None:
        return False
    status = facts.frontend.get("status") or {}
    updated, existing = int(status.get("updatedReplicas") or 0), int(status.get("replicas") or 0)
    return existing > 0 and updated < existing
