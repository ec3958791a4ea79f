"""The pod template of a revision, which all replicas share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minisgl_operator.api.objects import copy_of
from minisgl_operator.api.types import Recovery
from minisgl_operator.render import names


@dataclass(frozen=True)
class EngineTemplate:
    """A pod template as the replica with index 0 has it, with the default `spec.recovery`; `revision` is its hash.

    Whatever may differ between pods of one revision is set by `for_replica`, also in a template that another version of
    the operator wrote.
    """

    revision: str
    body: dict[str, Any]

    @cached_property
    def pods(self) -> int:
        """Number of pods of a replica."""
        return int(self._argument("--tp")) // int(self._argument("--ranks-per-pod"))

    @property
    def cache_key(self) -> str | None:
        """The directory of the cache that the pods load; None for a model that is not fetched."""
        found = (self.body["metadata"].get("annotations") or {}).get(names.CACHE_KEY_ANNOTATION)
        return None if found is None else str(found)

    def for_replica(self, name: str, recovery: Recovery) -> dict[str, Any]:
        """The template of the replica's StatefulSet, with the current limit of restarts."""
        result = copy_of(self.body)
        result["metadata"]["labels"] |= {names.REPLICA_LABEL: name, names.REVISION_LABEL: self.revision}
        arguments = result["spec"]["containers"][0]["args"]
        values = {
            "--replica": name,
            "--peer-domain": name,
            "--max-restarts": str(recovery.max_restarts),
            "--restart-window": str(recovery.window_seconds),
        }
        for flag, value in values.items():
            if flag in arguments:
                arguments[arguments.index(flag) + 1] = value
        return result

    def _argument(self, flag: str) -> str:
        arguments = self.body["spec"]["containers"][0]["args"]
        return str(arguments[arguments.index(flag) + 1])
