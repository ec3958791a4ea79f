"""Write requests of the operators, from the API server's audit log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from cluster.control_plane import PLANE
from harness.installation import NAMESPACE

_ACCOUNT: Final = f"system:serviceaccount:{NAMESPACE}:"
_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"


@dataclass(frozen=True)
class Write:
    """One write request of an operator. `code` is the HTTP status; 201 means that the object was created."""

    pod: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int


def position() -> int:
    """Current end of the log, in bytes."""
    return PLANE.audit_log.stat().st_size


def of_operators(since: int) -> Iterator[Write]:
    """Write requests after a position of the log, in order."""
    with PLANE.audit_log.open() as log:
        log.seek(since)
        for line in log:
            if not line.endswith("}\n"):
                # An incomplete line is still being written.
                return
            event = json.loads(line)
            user, where = event["user"], event.get("objectRef", {})
            if user["username"].startswith(_ACCOUNT) and event["verb"] in _VERBS:
                yield Write(
                    pod=user.get("extra", {}).get(_POD_NAME, [""])[0],
                    verb=event["verb"],
                    resource="/".join(part for part in (where.get("resource"), where.get("subresource")) if part),
                    namespace=where.get("namespace", ""),
                    name=where.get("name", ""),
                    code=event.get("responseStatus", {}).get("code", 0),
                )
