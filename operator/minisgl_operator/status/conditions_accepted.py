"""Accepted: whether the spec can be served, as far as only the cluster and the model's files can show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.text import quote
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.observed import Rejection
from minisgl_operator.facts.pod_failures import PodFailure, unavailable_webhook
from minisgl_operator.facts.replicas import Replica
from minisgl_operator.status.condition import Condition, webhook_unavailable

# Rejections by admission (LimitRange, policies) are Forbidden too, and have nothing to do with the operator's role.
_MISSING_PERMISSION: Final = re.compile(r'User ".*" cannot |cannot set blockOwnerDeletion|role lacks the verb')
# It counts first what a new one limits; pods beyond it are reported as not scheduled.
_OF_A_QUOTA: Final = re.compile(r"exceeded quota|status unknown for quota")

# Errors in a model's files that neither a restart nor time corrects, by the reason that the leader reports.
_MODEL_REJECTIONS: Final[Mapping[str, tuple[Reason, str]]] = {
    "InvalidModel": (
        Reason.INVALID_MODEL,
        "Set spec.model.source to a complete model of a supported architecture.",
    ),
    "TensorDoesNotDivideHeads": (
        Reason.TENSOR_DOES_NOT_DIVIDE_HEADS,
        "Set spec.parallelism.tensor to one of these numbers.",
    ),
}


def accepted(facts: Facts) -> Condition:
    for ref, owner in sorted(facts.conflicts.items()):
        message = (
            f'{ref.kind} "{ref.name}" already exists and is not owned by this InferenceModel ({owner}). Delete it, or '
            "rename the InferenceModel."
        )
        return Condition("False", Reason.CONFLICT, message)
    for rejection in facts.observed.rejections:
        if (found := _rejected_request(rejection)) is not None:
            return found
    for replica in facts.replicas:
        if (found := model_rejection(replica)) is not None:
            return found
    if failure := facts.pod_failure(Reason.REJECTED):
        return _resize_failed(failure.subject, failure.message)
    if failure := facts.pod_failure(Reason.SECRET_NOT_FOUND, Reason.CONFIG_MAP_NOT_FOUND, Reason.CLAIM_NOT_FOUND):
        return Condition("False", failure.reason, _missing_object(failure))
    return Condition("True", Reason.ACCEPTED, "The spec is valid.")


def model_rejection(replica: Replica) -> Condition | None:
    """The error in the model's files that the leader reports; None for pods of an older spec."""
    failure = replica.last_failure
    if failure is None or replica.report is None or replica.report.get("phase") != "Failed" or replica.outdated:
        return None
    if failure.get("reason") not in _MODEL_REJECTIONS:
        return None
    reason, remedy = _MODEL_REJECTIONS[str(failure["reason"])]
    return Condition("False", reason, f"{quote(str(failure.get('message') or failure['reason']))}. {remedy}")


def _rejected_request(rejection: Rejection) -> Condition | None:
    """None for a rejection that another condition reports, or that a retry cures."""
    message = quote(rejection.message)
    if rejection.reason == Reason.NAMESPACE_TERMINATING.value:
        message = "The namespace is being deleted, and this InferenceModel with it."
        return Condition("False", Reason.NAMESPACE_TERMINATING, message)
    if rejection.ref.kind == "PersistentVolumeClaim" and "can be resized" in rejection.message:
        return _resize_failed(rejection.ref.name, message)
    if rejection.status == 403 and _MISSING_PERMISSION.search(rejection.message):
        message = f"The operator lacks a permission on {rejection.ref.kind}: {message}. Add it to the operator's role."
        return Condition("False", Reason.FORBIDDEN, message)
    if rejection.status == 403 and not _OF_A_QUOTA.search(rejection.message):
        message = (
            f"A policy of the cluster or of the namespace rejects {rejection.ref}: {message}. Change the spec or the "
            "policy."
        )
        return Condition("False", Reason.REJECTED, message)
    if rejection.status in (400, 422):
        message = f"The API server rejects {rejection.ref}: {message}. Correct the field of the spec that sets it."
        return Condition("False", Reason.REJECTED, message)
    # The client has tried several times.
    if rejection.status == 429 or rejection.status >= 500:
        if (webhook := unavailable_webhook(rejection.message)) is not None:
            return webhook_unavailable(f"does not accept {rejection.ref}", *webhook)
        message = (
            f"The API server answers {rejection.ref} with status {rejection.status}: {message}. It is tried again with "
            "growing delays. If this lasts, see the health of the API server and of what it depends on."
        )
        return Condition("Unknown", Reason.API_SERVER_ERROR, message)
    return None


def _resize_failed(pvc: str, message: str) -> Condition:
    return Condition(
        "False",
        Reason.REJECTED,
        f'PersistentVolumeClaim "{pvc}" cannot be expanded to spec.model.cache.size: {message}. Set '
        "allowVolumeExpansion: true in its StorageClass if the driver can expand volumes; otherwise delete the "
        "InferenceModel and create it again. Until then the claim keeps its size.",
    )


def _missing_object(failure: PodFailure) -> str:
    if failure.key:
        problem = f'has no key "{failure.key}": add it'
    elif failure.message == "is being deleted":
        problem = "is being deleted: create it again"
    else:
        problem = "does not exist in this namespace: create it"
    return f"{failure.subject} {problem}, or name another one in the spec."
