"""Engine pods are stopped while answers run and new requests arrive."""

from __future__ import annotations

import json
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from minisgl.frontend.config import FrontendConfig, RequestLimits
from minisgl.frontend.process import FrontendServer
from minisgl.router.config import EngineDiscovery, TokenizerConfig
from support.frontend.fake_scheduler import WAIT_SECONDS
from support.frontend.served import eventually
from support.launcher.engine_pods import Pods
from support.tiny_checkpoint import tiny_checkpoint

pytestmark = pytest.mark.timeout(600)

DRAIN_SECONDS = 600
QUEUE_SECONDS = 400.0
REQUEST: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3, "seed": 7, "ignore_eos": True}


class Stream:
    """A streamed answer, read in a thread."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = url
        self._body = {**REQUEST, "max_tokens": tokens, "stream": True}
        self.text = ""
        self.continued = 0
        self.is_complete = False
        self.failure = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=QUEUE_SECONDS) as response:
            for line in response.iter_lines():
                if line == ": continued":
                    self.continued += 1
                elif line == "data: [DONE]":
                    self.is_complete = True
                elif line.startswith('data: {"error"'):
                    self.failure = line
                    return
                elif line.startswith("data: "):
                    self.text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def wait(self) -> str:
        self._thread.join(QUEUE_SECONDS)
        assert self.is_complete, self.failure
        return self.text


@contextmanager
def frontend(folder: Path, pods: Pods, *, drain_seconds: float = DRAIN_SECONDS) -> Iterator[FrontendServer]:
    """Yields a frontend that is connected with the replica."""
    engines = EngineDiscovery(
        host="127.0.0.1",
        scheduler_port=pods.ports["scheduler"],
        control_port=pods.ports["control"],
        cache=str(folder / "cache"),
    )
    tokenizer = TokenizerConfig(
        engines=engines,
        queue_seconds=QUEUE_SECONDS,
        drain_seconds=drain_seconds,
        frontend_address=f"ipc://{folder}/text",
    )
    server = FrontendServer(
        FrontendConfig(
            port=0,
            control_port=0,
            tokenizer_addresses=(tokenizer.frontend_address,),
            tokenizer=tokenizer,
            limits=RequestLimits(queue_seconds=QUEUE_SECONDS),
            ready_before_engine=True,
        )
    )
    listening = threading.Event()
    thread = threading.Thread(target=server.run, args=(lambda _: listening.set(),))
    thread.start()
    assert listening.wait(WAIT_SECONDS)
    try:
        yield server
    finally:
        server.stop()
        server.stop()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()


@pytest.mark.parametrize(("count", "tokens"), [(1, 1000), (2, 600)])
def test_a_held_request_gets_the_next_pods_and_no_answer_changes(
    count: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.router.drain_ends.END_DRAIN_SECONDS", 0.1)
    with ExitStack() as stack:
        # Not pytest's own directory: its path is too long for a socket below it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pods-")))
        flags = ("--tp", str(count), "--ranks-per-pod", "1", "--drain-timeout", str(DRAIN_SECONDS))
        pods = Pods(folder, tiny_checkpoint(), *flags, "--served-model-name", "tiny")
        stack.callback(pods.close)
        leader, *_ = [pods.add() for _ in range(count)]
        leader.wait_for(phase="Ready")
        urls = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            urls.append(f"http://127.0.0.1:{stack.enter_context(frontend(folder / name, pods)).port}")
            eventually(lambda: httpx.get(f"{urls[-1]}/v1/models").status_code == 200)
        expected = Stream(urls[0], tokens).wait()
        short = httpx.post(f"{urls[0]}/v1/completions", json=REQUEST, timeout=QUEUE_SECONDS).json()["choices"]

        streams = [Stream(url, tokens) for url in urls]
        eventually(lambda: all(len(stream.text) > 10 for stream in streams))
        for pod in pods.all:
            pod.popen.send_signal(signal.SIGTERM)
        eventually(lambda: all(httpx.get(f"{url}/v1/models").status_code == 503 for url in urls))
        # Only one frontend gets a new request.
        pool = ThreadPoolExecutor(1)
        # The frontend ends a request that is still held.
        stack.callback(pool.shutdown, wait=False)
        held = pool.submit(httpx.post, f"{urls[1]}/v1/completions", json=REQUEST, timeout=QUEUE_SECONDS)
        assert [pod.popen.wait(WAIT_SECONDS) for pod in pods.all] == [0] * count, leader.log.read_text()
        assert not any(stream.is_complete for stream in streams), "no drain ended by itself"
        log = leader.log.read_text()
        assert "the drain ends early; 2 requests go on elsewhere" in log
        for pod in pods.all:
            levels = {json.loads(line)["level"] for line in pod.log.read_text().splitlines() if line.startswith("{")}
            assert "error" not in levels and "restarting" not in pod.log.read_text(), pod.log.read_text()

        for pod in pods.all:
            pod.start()
        assert held.result().json()["choices"] == short
        assert [stream.wait() for stream in streams] == [expected] * 2
        assert [stream.continued for stream in streams] == [1, 1]
        status = leader.wait_for(phase="Ready")
        assert (status["restarts"], status["last_failure"]) == (0, None)


def _routable(server: FrontendServer) -> int:
    """Number of replicas that get requests."""
    status = httpx.get(f"http://127.0.0.1:{server.control_port}/status").json()
    return sum(replica["routable"] for replica in status["replicas"])


def test_answers_go_on_at_another_replica_when_the_time_to_drain_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        # Not pytest's own directory: its path is too long for a socket below it.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pods-")))
        flags = ("--tp", "1", "--drain-timeout", "0.1", "--served-model-name", "tiny")
        replicas = []
        for name in ("m-r0", "m-r1"):
            (folder / name).mkdir()
            program = "support.launcher.short_stops"
            pods = Pods(folder / name, tiny_checkpoint(), *flags, program=program, replica=name)
            stack.callback(pods.close)
            pods.add()
            replicas.append(pods)
        for pods in replicas:
            pods.all[0].wait_for(phase="Ready")
        stopped = replicas[0].all[0]
        # A name has one port for all its addresses, but both replicas are on this machine.
        schedulers = {f"127.0.0.{number}": pods.scheduler for number, pods in enumerate(replicas, 1)}
        monkeypatch.setattr("minisgl.router.engine_source.look_up", lambda *_: schedulers)
        server = stack.enter_context(frontend(folder, replicas[0], drain_seconds=0.1))
        url = f"http://127.0.0.1:{server.port}"
        eventually(lambda: _routable(server) == 2)
        expected = Stream(url, 1000).wait()

        streams = [Stream(url, 1000) for _ in range(2)]
        eventually(lambda: all(len(stream.text) > 10 for stream in streams))
        stopped.popen.send_signal(signal.SIGTERM)
        assert stopped.popen.wait(WAIT_SECONDS) == 0, stopped.log.read_text()
        assert [stream.wait() for stream in streams] == [expected] * 2
        assert sorted(stream.continued for stream in streams) == [0, 1]
        eventually(lambda: _routable(server) == 1)
