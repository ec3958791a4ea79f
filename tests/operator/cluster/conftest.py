"""One control plane for all tests of a worker process. Each test uses its own namespaces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.cluster.control_plane import LocalControlPlane, control_plane_or_skip


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalControlPlane]:
    with control_plane_or_skip(tmp_path_factory.mktemp("control-plane")) as running:
        yield running
