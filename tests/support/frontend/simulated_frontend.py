"""A frontend as the operator sees it, with the runtime's own code for the states of replicas."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from minisgl.router.replicas import Replicas
from minisgl.wire.messages import FEATURES, WIRE_VERSION, Welcome
from support.frontend.fake_scheduler import card


class SimulatedFrontend:
    def __init__(self) -> None:
        self._replicas = Replicas()
        self._loaded: list[Mapping[str, str]] = []

    def look(self, serving: Mapping[str, tuple[str, str]], unusable: Collection[str]) -> None:
        """Discover the serving replicas: revision and tokenizer files of each. `unusable` files cannot be loaded."""
        for replica in self._replicas:
            if replica.welcome is not None and serving.get(replica.address) != _said(replica.welcome):
                self._replicas.lost(replica.address, "it is lost")
        for name, (revision, files) in serving.items():
            if name not in self._replicas:
                self._replicas.add(name)
            if self._replicas[name].welcome is None:
                model = card(tokenizer_hashes={"tokenizer.json": files})
                welcome = Welcome(
                    version=WIRE_VERSION,
                    epoch=(1, 1),
                    model=model,
                    replica=name,
                    revision=revision,
                    features=FEATURES,
                )
                self._replicas.welcome(name, welcome)
        missing = [hashes for hashes in self._replicas.files_to_load() if hashes["tokenizer.json"] not in unusable]
        self._loaded += missing
        self._replicas.set_loaded_files(self._loaded)
        if (wanted := self._replicas.files_to_switch_to()) is not None:
            self._replicas.set_files_in_use(wanted)

    def report(self) -> dict[str, Any]:
        """Return the body of GET /status."""
        replicas = [msgspec.to_builtins(state) for state in self._replicas.views()]
        return {"kind": "frontend", "ready": bool(self.routes()), "draining": False, "replicas": replicas}

    def routes(self) -> set[str]:
        """Return the replicas that requests are sent to."""
        return {replica.name for replica in self._replicas.routable}


def _said(welcome: Welcome) -> tuple[str, str]:
    return welcome.revision, welcome.model.tokenizer_hashes["tokenizer.json"]
