"""A condition of an InferenceModel, and texts that several conditions share."""

from __future__ import annotations

from typing import Literal, NamedTuple

from minisgl_operator.api.conditions import Reason
from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.text import quote
from minisgl_operator.facts.facts import Facts
from minisgl_operator.facts.pods import added_container, component, failing_container, last_terminations, unknown_flags
from minisgl_operator.render import names

ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(NamedTuple):
    """`message` explains the reason and names the next step. It contains no times, counters or generated names: it
    changes only when the state does, as each changed message writes the status."""

    status: ConditionStatus
    reason: Reason
    message: str


def suspended(facts: Facts) -> Condition:
    """The condition of a model without replicas."""
    if facts.is_idle:
        message = "The model is idle and has no engine pods. The next request starts it."
        return Condition("False", Reason.SCALED_TO_ZERO, message)
    if facts.model.spec.suspend:
        message = "spec.suspend is true: the model has no engine pods until it is set to false."
    else:
        message = f"spec.replicas is 0: `kubectl scale imodel/{facts.model.name} --replicas=1` starts the model."
    return Condition("False", Reason.SUSPENDED, message)


def shortened(items: list[str]) -> str:
    """The first three items and the number of the others."""
    shown = ", ".join(items[:3])
    return shown if len(items) <= 3 else f"{shown} and {len(items) - 3} more"


def pod_title(pod: Manifest) -> str:
    """The name of an engine pod. Names of other pods are generated, and would change the message."""
    part = component(pod)
    return f"Pod {pod['metadata']['name']}" if part == names.ENGINE else f"A {part} pod"


def crash_message(pod: Manifest) -> str:
    """Exit code and last output of a container that keeps terminating."""
    failing = failing_container(pod)
    added = "" if failing is None else added_container(pod, failing)
    how, remedy = "", "See its log; correct the spec."
    if added:
        remedy = f"See its log. {not_ours(added)}"
    for ended in last_terminations(pod)[:1]:
        reason = f" ({ended['reason']})" if ended.get("reason") else ""
        output = quote(str(ended.get("message") or ""))
        if flags := unknown_flags(str(ended.get("message") or "")):
            remedy = f"Correct spec.{component(pod)}.args. {older_image(flags, component(pod) or '')}"
        how = f" with exit code {ended.get('exitCode')}{reason}" + (f": {output}" if output else "")
    where = f' in container "{added}"' if added else ""
    return f"{pod_title(pod)} keeps terminating{where}{how}. {remedy}"


def frontends_stuck(failure: str) -> str:
    """The message of a rollout of frontends that has stopped. `failure` is the Deployment's."""
    return (
        f"New frontend pods did not become ready in time, so the old ones stay: {failure}. See FrontendReady and "
        "Scheduled, and the log of the new pods; correct the last change of spec.frontend or of the operator."
    )


def webhook_unavailable(refused: str, webhook: str, problem: str) -> Condition:
    """`refused`: what the API server does not do. `webhook`: its name. `problem` is in the API server's words."""
    message = (
        f'The API server {refused} because the admission webhook "{webhook}" does not answer: {problem}. Repair what '
        "serves the webhook, or exclude this namespace in its configuration, or set its failurePolicy to Ignore. It is "
        "tried again without further action."
    )
    return Condition("False", Reason.WEBHOOK_UNAVAILABLE, message)


def not_ours(container: str) -> str:
    """The remedy for a container that is not the operator's."""
    return (
        f'The operator does not set container "{container}": correct what adds it to the pod, such as the injection of '
        "a service mesh or another admission webhook."
    )


def older_image(flags: str, component: str) -> str:
    """The remedy where a component's image does not know `flags`."""
    return (
        f"If the operator has set {quote(flags)}, the image is of an earlier version than the operator: set "
        f"spec.{component}.image to one of the operator's version, or remove it."
    )
