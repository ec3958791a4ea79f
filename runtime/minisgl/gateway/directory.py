"""The models that the gateway knows now, kept by a source: a cluster's API server, or servers on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from minisgl.gateway.models import Key, Model
from minisgl.gateway.routing import Table


class Source(Protocol):
    """Keeps a directory up to date."""

    async def run(self) -> None:
        """Run until cancelled."""
        ...


class Directory:
    """The table, and who wants to know of changes. All methods belong to the event loop."""

    def __init__(self) -> None:
        self.table = Table()
        self.problem = "the models have not been listed yet"
        """Why the table is not complete; empty: it is."""
        self._on_change: list[Callable[[Key], None]] = []

    def on_change(self, call: Callable[[Key], None]) -> None:
        """Call this with the key of each model that changes, appears or goes."""
        self._on_change.append(call)

    def put(self, model: Model) -> None:
        if self.table.get(model.key) != model:
            self.table.put(model)
            self._changed(model.key)

    def remove(self, key: Key) -> None:
        self.table.remove(key)
        self._changed(key)

    def replace(self, models: Iterable[Model], among: Callable[[Key], bool]) -> None:
        """Replace all models whose key is `among` those of a source."""
        found = {model.key: model for model in models}
        for key in [model.key for model in self.table if among(model.key) and model.key not in found]:
            self.remove(key)
        for model in found.values():
            self.put(model)

    def _changed(self, key: Key) -> None:
        for call in self._on_change:
            call(key)
