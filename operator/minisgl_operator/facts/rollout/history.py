"""The templates that the model's ControllerRevisions hold."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from minisgl_operator.api.objects import Manifest, controller_uid, is_deleting
from minisgl_operator.facts.observed import Observed
from minisgl_operator.render.engine_template import EngineTemplate
from minisgl_operator.render.history import recorded_template

KEPT: Final = 3
"""Number of templates that a model keeps."""


@dataclass(frozen=True)
class History:
    """The model's own ControllerRevisions."""

    records: tuple[Manifest, ...]

    @classmethod
    def of(cls, observed: Observed) -> History:
        uid = observed.model_object["metadata"]["uid"]
        found = [
            live
            for ref, live in observed.children.items()
            if ref.kind == "ControllerRevision" and controller_uid(live) == uid and not is_deleting(live)
        ]
        return cls(tuple(sorted(found, key=lambda live: int(live["revision"]), reverse=True)))

    @cached_property
    def templates(self) -> dict[str, EngineTemplate]:
        """Templates by revision, the newest first."""
        found = (recorded_template(record) for record in self.records)
        return {template.revision: template for template in found if template is not None}

    def number_of(self, revision: str, name: str) -> int | None:
        """Number of the record of this revision and name, which must be the highest one; None if that holds already.

        A record that was edited keeps its name, and cannot be repaired: None as well."""
        newest = int(self.records[0]["revision"]) if self.records else 0
        record = next((each for each in self.records if each["metadata"]["name"] == name), None)
        if record is not None and (int(record["revision"]) == newest or revision not in self.templates):
            return None
        return newest + 1

    def obsolete(self, current: str, in_use: frozenset[str]) -> tuple[Manifest, ...]:
        """Records beyond the newest ones whose template no object uses. The name `current` is one of those to keep,
        also before it exists."""
        others = [record for record in self.records if record["metadata"]["name"] != current]
        return tuple(
            record
            for record in others[KEPT - 1 :]
            if (template := recorded_template(record)) is None or template.revision not in in_use
        )
