"""Write requests of the operators, from the API server's audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from cluster.control_plane import PLANE
from harness.installation import NAMESPACE
from harness.namespace import Namespace

_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_QUIET_SECONDS: Final = 20
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"


@dataclass(frozen=True)
class Write:
    """One write request of an operator.

    code: the HTTP status; 201 means that the object was created.
    at: when the API server got it, in seconds since 1970.
    """

    pod: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    at: float = field(compare=False)


def position() -> int:
    """Current end of the log, in bytes."""
    return PLANE.audit_log.stat().st_size


def of_operators(since: int, release_namespace: str = NAMESPACE) -> Iterator[Write]:
    """Write requests after a position of the log, in order, by the operators of the releases in this namespace."""
    account = f"system:serviceaccount:{release_namespace}:"
    with PLANE.audit_log.open() as log:
        log.seek(since)
        for line in log:
            if not line.endswith("}\n"):
                # An incomplete line is still being written.
                return
            event = json.loads(line)
            user, where = event["user"], event.get("objectRef", {})
            if user["username"].startswith(account) and event["verb"] in _VERBS:
                yield Write(
                    pod=user.get("extra", {}).get(_POD_NAME, [""])[0],
                    verb=event["verb"],
                    resource="/".join(part for part in (where.get("resource"), where.get("subresource")) if part),
                    namespace=where.get("namespace", ""),
                    name=where.get("name", ""),
                    code=event.get("responseStatus", {}).get("code", 0),
                    at=datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp(),
                )


def until_quiet(namespace: Namespace) -> None:
    """Wait until the operators wrote nothing but their Lease for 20 seconds and the namespaces of earlier scenarios are
    deleted: draining pods delay their deletion, and the operator retries there with growing delays."""

    def deleted() -> bool:
        left = json.loads(namespace.kubectl("get", "namespaces", "-o", "json"))["items"]
        return not any("deletionTimestamp" in each["metadata"] for each in left)

    namespace.wait("the deletion of namespaces of earlier scenarios", deleted)
    began, since = position(), time.monotonic()

    def quiet() -> bool:
        nonlocal began, since
        written = list(of_operators(began))
        # Without an active operator, not even the Lease is written.
        if not written or any(write.resource != "leases" for write in written):
            began, since = position(), time.monotonic()
        return time.monotonic() - since > _QUIET_SECONDS

    namespace.wait("an idle operator", quiet)
