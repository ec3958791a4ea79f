"""Users of pods as OpenShift's SecurityContextConstraints restricted-v2 assign them, by admission policies.

Pods of a namespace run as one user of its range, which images do not know, in group 0. A pod that asks for a user or
group of its own is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from cluster.control_plane import kubectl
from harness.namespace import Namespace

USER: Final = 1000650000

_GIVEN: Final = (
    "has(object.spec.securityContext) && "
    "(has(object.spec.securityContext.runAsUser) || has(object.spec.securityContext.runAsGroup) || "
    "has(object.spec.securityContext.fsGroup))"
)
_ASSIGN: Final = (
    f"Object{{spec: Object.spec{{securityContext: Object.spec.securityContext{{runAsUser: {USER}, fsGroup: {USER}}}}}}}"
)
_ASSIGNED: Final = (
    f"object.spec.securityContext.runAsUser == {USER} && object.spec.securityContext.fsGroup == {USER} && "
    "!has(object.spec.securityContext.runAsGroup)"
)
_MESSAGE: Final = f"unable to validate against any security context constraint: must be in the range {USER} to {USER}"


@contextmanager
def restricted_v2(namespace: Namespace) -> Iterator[None]:
    """Apply the constraints to pods that are created in this namespace."""
    name = f"restricted-v2-{namespace.name}"
    objects = list(_policies(name, namespace.name))
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    kubectl("apply", "-f", "-", stdin=text)
    namespace.wait("the admission of users", lambda: _is_enforced(namespace))
    yield
    kubectl("delete", "-f", "-", stdin=text)


def _policies(name: str, namespace: str) -> Iterator[dict[str, Any]]:
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"], "operations": ["CREATE"]}]
    match = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "resourceRules": rules,
    }
    assign = {
        "matchConstraints": match,
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "matchConditions": [{"name": "no-user", "expression": f"!({_GIVEN})"}],
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": _ASSIGN}}],
    }
    require = {
        "matchConstraints": match,
        "failurePolicy": "Fail",
        "validations": [{"expression": _ASSIGNED, "message": _MESSAGE}],
    }
    for kind, spec, binding in (
        ("MutatingAdmissionPolicy", assign, {"policyName": name}),
        ("ValidatingAdmissionPolicy", require, {"policyName": name, "validationActions": ["Deny"]}),
    ):
        for each, body in ((kind, spec), (f"{kind}Binding", binding)):
            metadata = {"name": name}
            yield {"apiVersion": "admissionregistration.k8s.io/v1", "kind": each, "metadata": metadata, "spec": body}


def _is_enforced(namespace: Namespace) -> bool:
    """True if a pod without a user gets the assigned one, and one with a user is rejected."""
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tried"},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "tried",
                    "image": "tried",
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    dry_run = ("create", "--dry-run=server", "-o", "jsonpath={.spec.securityContext.runAsUser}", "-f", "-")
    if namespace.kubectl(*dry_run, check=False, stdin=json.dumps(pod)) != str(USER):
        return False
    pod["spec"]["securityContext"]["runAsUser"] = 65532
    return namespace.kubectl(*dry_run, check=False, stdin=json.dumps(pod)) == ""
