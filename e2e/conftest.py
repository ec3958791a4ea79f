"""Fixtures of the scenarios: one cluster for all scenarios of a process, and a namespace for each of them."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Final

import pytest

from cluster import lifecycle
from cluster.tools import say
from harness import installation, nodes
from harness.agent_checkpoint import write_agent_checkpoint
from harness.client import ClientPod
from harness.hub import Hub, serving_hub
from harness.namespace import Namespace

KEEP: Final = "E2E_KEEP"
"""Environment variable: keep the cluster and the namespaces of failed tests, to inspect them."""
_LONGEST: Final = ("test_kills", "test_changes", "test_nodes", "test_bad_input", "test_rank_death", "test_operators")
"""Files whose scenarios take longest: they begin first, so that none is left alone at the end."""
_MEASURED: Final = "measured"
"""Property of a test's report: a line that is printed at the end."""
_reports: Final = pytest.StashKey[dict[str, pytest.TestReport]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, str]]:
    """Image references by name (operator, frontend, engine), with a cluster of two nodes that runs the operator."""
    references = installation.bring_up()
    installation.install(references)
    yield references
    if not os.environ.get(KEEP):
        lifecycle.down()


@pytest.fixture
def namespace(images: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """Namespace with restricted pods, and with a claim "models" that has the demo checkpoint in its directory demo, and
    in agent the same with tools and thinking."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower())[:40].strip("-")
    # A unique name: a namespace of an earlier run of this test may still be terminating.
    made = Namespace.create(f"{name}-{secrets.token_hex(2)}")
    installation.publish_checkpoint("demo", installation.ROOT / ".cache/demo")
    if not (installation.MODELS / "agent").exists():
        with tempfile.TemporaryDirectory() as folder:
            agent = write_agent_checkpoint(installation.ROOT / ".cache/demo", Path(folder) / "agent")
            installation.publish_checkpoint("agent", agent)
    made.mount_directory("models", installation.MODELS)
    yield made
    failed = any(report.failed for report in request.node.stash.get(_reports, {}).values())
    if failed:
        say(made.report())
        say(installation.operator_report())
    if not (failed and os.environ.get(KEEP)):
        # The next test does not need to wait until it is deleted.
        made.delete(wait=False)


@pytest.fixture
def client(images: dict[str, str], namespace: Namespace) -> ClientPod:
    return ClientPod.create(namespace, images["frontend"])


@pytest.fixture
def victim(images: dict[str, str]) -> str:
    """Node without the operator, to which something happens."""
    return nodes.other_than(nodes.of_operator())


@pytest.fixture
def hub(images: dict[str, str]) -> Iterator[Hub]:
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def measurement(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Function that takes a line with a measurement; all of them are printed at the end, also those of passed tests."""
    return lambda line: request.node.user_properties.append((_MEASURED, line))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [one for outcome in ("passed", "failed") for one in terminalreporter.getreports(outcome)]
    lines = [line for report in reports for name, line in report.user_properties if name == _MEASURED]
    if lines:
        terminalreporter.section("measured")
        for line in dict.fromkeys(lines):
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash.setdefault(_reports, {})[report.when or ""] = report
    return report
