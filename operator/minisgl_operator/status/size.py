"""The size of a status: etcd stores no object above 1.5 MiB, and a status that is refused says nothing at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

MAX_BYTES: Final = 900_000
"""As JSON with escapes. The spec, the metadata and the fields' managers have the rest of the object."""

_JSON: Final = json.JSONEncoder(separators=(",", ":"))
_Replica = dict[str, Any]


def bounded(status: Mapping[str, Any]) -> dict[str, Any]:
    """The status with shorter texts about its replicas, as far as it would be too large. Names, phases, counts and what
    the next status follows from stay."""
    result = dict(status)
    for shorten in _STEPS:
        if _size(result) <= MAX_BYTES:
            break
        result["replicaStatuses"] = [shorten(replica) for replica in result["replicaStatuses"]]
    return result


def _size(value: object) -> int:
    return len(_JSON.encode(value))


def _limits(message: int, errors: int, nodes: int | None, *dropped: str) -> Callable[[_Replica], _Replica]:
    """A step that leaves so many bytes of a message, the last `errors` of a retry, and the first `nodes`."""

    def shorten(replica: _Replica) -> _Replica:
        found = {name: value for name, value in replica.items() if name not in dropped}
        if "nodes" in found:
            found["nodes"] = found["nodes"][:nodes]
        if (failure := found.get("lastFailure")) is not None:
            found["lastFailure"] = failure | dict(_shortened(failure, message, "message", "reason", "pod", "node"))
        if (retry := found.get("retry")) is not None and "errors" in retry:
            kept = [each | dict(_shortened(each, message, "error")) for each in retry["errors"][-errors:]]
            found["retry"] = retry | {"errors": kept}
        return found

    return shorten


def _shortened(texts: Mapping[str, Any], limit: int, *names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        if name in texts:
            yield name, shortened_text(texts[name], limit)


def shortened_text(text: str, limit: int) -> str:
    """The beginning of a text, in at most `limit` bytes of JSON with escapes."""
    if (size := _size(text) - 2) <= limit:
        return text
    kept = text[: max(limit * len(text) // size, 1)]
    while _size(kept) - 2 > limit - 6:
        kept = kept[: len(kept) * 9 // 10]
    return f"{kept}…"


_STEPS: Final = (
    _limits(400, 4, None),
    _limits(200, 2, 16, "timings"),
    _limits(64, 1, 1, "timings", "dataTypes", "transport"),
)
