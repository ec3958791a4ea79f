"""A Hub that pods can reach, and models from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.layout import CONTROL_IP, LAN_BITS, STORAGE_IP
from cluster.places import CONTROL, inside, run
from fake_hub import FakeHub, Repository
from harness import installation
from harness.models import cpu_model
from harness.namespace import Namespace


@dataclass(frozen=True)
class Hub:
    """Fake Hub, and the URL at which pods reach it."""

    fake: FakeHub
    url: str

    def add(self, name: str, **behaviour: Any) -> Repository:
        """Serve the demo checkpoint as another repository, with options of `Repository`."""
        repository = self.fake.repositories[name] = Repository(installation.ROOT / ".cache/demo", **behaviour)
        return repository

    def model(self, namespace: Namespace, name: str, repo: str = "org/demo", **source: Any) -> dict[str, Any]:
        """Model that is fetched from this Hub into a directory of the host, which all nodes mount."""
        directory = installation.MODELS.parent / f"cache-{namespace.name}-{name}"
        directory.mkdir(exist_ok=True)
        directory.chmod(0o777)
        return self.model_in(namespace, name, directory, repo, **source)

    def model_in(
        self, namespace: Namespace, name: str, directory: Path, repo: str = "org/demo", **source: Any
    ) -> dict[str, Any]:
        """Model that is fetched from this Hub into a directory of the nodes."""
        claim = f"{name}-files"
        namespace.mount_directory(claim, directory, writable=True)
        model = cpu_model(name)
        model["spec"]["model"] = {
            "source": {"huggingFace": {"repo": repo, "endpoint": self.url, **source}},
            "dtype": "float32",
            "cache": {"claimName": claim},
        }
        return model


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """Run a Hub with the demo checkpoint as org/demo."""
    fake = FakeHub()
    run(CONTROL, "ip", "addr", "replace", f"{STORAGE_IP}/{LAN_BITS}", "dev", "lan")
    with fake.serve(CONTROL_IP, STORAGE_IP, lambda make: inside(CONTROL, make)) as url:
        hub = Hub(fake, url)
        hub.add("org/demo", revisions=("main", "v1"))
        yield hub
