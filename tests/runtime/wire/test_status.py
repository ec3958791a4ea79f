"""Bodies of /status are decoded by their kind."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from minisgl.wire.status import EngineStatus, FetchStatus, FrontendStatus, ReplicaView, decode_status

ENGINE = EngineStatus(
    model="qwen",
    replica="qwen-r0",
    pod="qwen-r0-0",
    pod_index=0,
    revision="5f3c9d2b71",
    epoch=(1763860957123, 7),
    phase="Waiting",
    progress="waiting for qwen-r0-1",
    ready=False,
    ranks=(),
    ready_ranks=0,
    tensor=2,
    transport="",
    timings={},
    standbys=0,
    restarts=0,
    max_restarts=5,
    last_failure=None,
    card=None,
)
VIEW = ReplicaView(
    replica="qwen-r0", revision="r", epoch=(1, 2), address="10.0.0.7", routable=True, reason="", running=3, waiting=1
)


@pytest.mark.parametrize(
    "status",
    [
        ENGINE,
        FrontendStatus(pod="qwen-frontend-0", ready=True, draining=False, replicas=[VIEW]),
        FetchStatus(phase="Downloading", percent=42),
    ],
)
def test_a_body_is_decoded_to_what_was_encoded(status: EngineStatus | FrontendStatus | FetchStatus) -> None:
    assert decode_status(msgspec.json.encode(status)) == status


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"kind":"other"}', '{"kind":"engine"}', '{"level":"info"}'])
def test_anything_else_is_rejected(body: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_status(body)


def test_fields_of_later_versions_are_ignored() -> None:
    assert decode_status('{"kind":"fetch","percent":7,"added_later":1}') == FetchStatus(percent=7)


def test_the_operator_can_import_the_module_without_numpy() -> None:
    code = "import sys, minisgl.wire.status; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
