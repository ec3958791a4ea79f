"""A rank is killed during a stream, which goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime

import httpx
import pytest
from openai import APIError, OpenAI

from harness.asking import ANSWER, ask
from harness.client import ClientPod
from harness.installation import kill_operator
from harness.models import cpu_model
from harness.namespace import Namespace
from harness.ranks import kill_rank, launcher_status, launcher_url

BACK_SECONDS = 10
SLACK = 3
"""Factor for a shared machine."""
# Parts of a restart, as the launcher of rank 0 reports them, with the state at the end of each.
PARTS = {
    "reap": "all ranks of the old epoch have exited",
    "join": "both pods have joined",
    "start": "the standbys have forked the ranks",
    "rendezvous": "the ranks are connected",
    "load": "weights are loaded",
    "serve": "the replica is ready",
}


@pytest.mark.soak
def test_a_killed_rank_restarts_in_its_pod_and_the_stream_goes_on(
    namespace: Namespace, client: ClientPod, measurement: Callable[[str], None]
) -> None:
    namespace.apply(cpu_model("demo", tensor=2, recovery={}))
    namespace.wait_for_condition("demo", "Ready")
    pods = {p["metadata"]["uid"] for p in namespace.pods("demo", "engine")}
    openai = client.openai("demo")
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "max_tokens": 600,
        "temperature": 0,
        "ignore_eos": True,
    }
    url = f"{client.service_url('demo')}/v1/chat/completions"
    whole = _text(httpx.post(url, json=body, timeout=600).text.splitlines())
    with httpx.stream("POST", url, json=body, timeout=600) as stream:
        read: list[str] = []
        lines = stream.iter_lines()
        while '"content":"' not in "".join(read):
            read.append(next(lines))
        killed = kill_rank(namespace, "demo-r0-1", 1)
        kill_operator()
        read += lines
    assert ": continued" in read, "it ended before the rank was killed"
    assert _text(read) == whole
    namespace.wait("the right answer", lambda: _answer(openai) == ANSWER)
    assert _ready_after(namespace, killed, time.time(), measurement) < BACK_SECONDS * SLACK

    def reported() -> dict[str, object]:
        (replica,) = namespace.status("demo")["replicaStatuses"]
        failure: dict[str, object] = replica.get("lastFailure") or {}
        return failure if replica["phase"] == "Ready" else {}

    failure = namespace.wait("the failure in the status", reported)
    assert (failure["rank"], failure["pod"], failure["exitCode"]) == (1, "demo-r0-1", -9)
    assert "killed by signal 9" in str(failure["message"])
    after = namespace.pods("demo", "engine")
    assert {p["metadata"]["uid"] for p in after} == pods
    assert all(s["restartCount"] == 0 for p in after for s in p["status"]["containerStatuses"])


def _ready_after(namespace: Namespace, killed: float, answered: float, measurement: Callable[[str], None]) -> float:
    """Seconds until all ranks serve again; prints their parts. All processes use the clock of one machine."""
    status = launcher_status(launcher_url(namespace, "demo-r0-0"))
    detected = datetime.fromisoformat(status["last_failure"]["at"]).timestamp()
    parts = [("the launchers detect it", detected - killed)]
    parts += [(what, status["timings"][part]) for part, what in PARTS.items()]
    ready = sum(seconds for _, seconds in parts)
    parts.append(("frontends route to it again and the next answer is complete", answered - killed - ready))
    measurement(f"kill -9 of a rank to the next answer: {answered - killed:.2f} s, of which")
    for what, seconds in parts:
        measurement(f"{seconds:8.2f} s until {what}")
    return ready


def _text(lines: list[str]) -> str:
    """Text of a stream, which must be whole."""
    assert "data: [DONE]" in lines, lines[-5:]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def _answer(openai: OpenAI) -> str:
    """Answer of the model, which must be the right one; "" if the request fails."""
    try:
        answer = ask(openai, "demo")
    except APIError:
        return ""
    assert answer == ANSWER
    return answer
