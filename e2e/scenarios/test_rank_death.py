"""A rank's engine dies while it streams."""

from __future__ import annotations

import json
import time

import pytest
from openai import APIError

from cluster.tools import say
from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.models import cpu_model
from harness.namespace import Namespace

BACK_SECONDS = 10
SLACK = 3
"""The machine that runs this is shared."""
KILL = (
    "import os, pathlib, signal; "
    "pids = [p.name for p in pathlib.Path('/proc').iterdir() if p.name.isdigit() "
    "and b'minisgl.launcher.child\\0rank1' in (p / 'cmdline').read_bytes()]; "
    "assert len(pids) == 1, pids; os.kill(int(pids[0]), signal.SIGKILL)"
)


def test_a_killed_rank_fails_the_stream_loudly_and_comes_back_in_its_pod(
    namespace: Namespace, client: ClientPod
) -> None:
    namespace.apply(cpu_model("demo", tensor=2))
    namespace.wait_for_condition("demo", "Ready", seconds=300)
    pods = {p["metadata"]["uid"] for p in namespace.pods("demo", "engine")}
    openai = client.openai("demo")
    namespace.wait("a standby for each rank", lambda: _standbys(namespace) >= 1, 120)
    stream = openai.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        max_tokens=1500,
        extra_body={"ignore_eos": True},
    )
    pieces = iter(stream)
    next(pieces)
    namespace.kubectl("exec", "demo-r0-1", "--", "python3", "-c", KILL)
    killed = time.monotonic()
    with pytest.raises(APIError):
        for _ in pieces:
            pass
    namespace.wait("an answer", lambda: _answer(client) == ANSWER, BACK_SECONDS * SLACK)
    say(f"rank killed, and the next answer after {time.monotonic() - killed:.1f} s")

    def reported() -> dict[str, object]:
        (replica,) = namespace.status("demo")["replicaStatuses"]
        failure: dict[str, object] = replica.get("lastFailure") or {}
        return failure if replica["phase"] == "Ready" else {}

    failure = namespace.wait("the failure in the status", reported, 30)
    assert (failure["rank"], failure["pod"], failure["exitCode"]) == (1, "demo-r0-1", -9)
    assert failure["message"]
    after = namespace.pods("demo", "engine")
    assert {p["metadata"]["uid"] for p in after} == pods
    assert all(s["restartCount"] == 0 for p in after for s in p["status"]["containerStatuses"])
    say(json.dumps(namespace.status("demo")["replicaStatuses"][0]["timings"]))


def _answer(client: ClientPod) -> str:
    try:
        return ask(client.openai("demo"), "demo")
    except APIError:
        return ""


def _standbys(namespace: Namespace) -> int:
    """How many standby processes have imported what they need, as rank 0's launcher says."""
    fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/status').read().decode())"
    said = json.loads(namespace.kubectl("exec", "demo-r0-0", "--", "python3", "-c", fetch))
    standbys: int = said.get("standbys", 0)
    return standbys
