"""The cluster for all scenarios, and a namespace for each."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator, Iterator
from typing import Final

import pytest

from cluster import lifecycle
from cluster.tools import say
from harness import installation
from harness.client import ClientPod
from harness.namespace import Namespace

KEEP: Final = "E2E_KEEP"
"""Environment variable: leave the cluster, and the namespaces of failed tests, for a look afterwards."""
_reports: Final = pytest.StashKey[dict[str, pytest.TestReport]]()


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, str]]:
    """A cluster of two nodes with the operator in it. The references of the images: operator, frontend, engine."""
    references = installation.bring_up()
    installation.install(references)
    yield references
    if not os.environ.get(KEEP):
        lifecycle.down()


@pytest.fixture
def namespace(images: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace with restricted pods, and a claim "models" that holds the demo checkpoint in its directory demo."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    # Of its own: the last one with this name may still be on its way out.
    made = Namespace.create(f"{name}-{secrets.token_hex(2)}")
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    made.mount_directory("models", installation.MODELS)
    yield made
    failed = any(report.failed for report in request.node.stash.get(_reports, {}).values())
    if failed:
        say(made.report())
        say(installation.operator_report())
    if not (failed and os.environ.get(KEEP)):
        # The next test need not wait for its end.
        made.delete(wait=False)


@pytest.fixture
def client(images: dict[str, str], namespace: Namespace) -> ClientPod:
    return ClientPod.create(namespace, images["frontend"])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash.setdefault(_reports, {})[report.when or ""] = report
    return report
