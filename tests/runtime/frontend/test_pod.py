"""`minisgl frontend` as a pod runs it: discovery of engines, probes, and shutdown."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from minisgl.frontend.config import FrontendConfig
from minisgl.frontend.process import FrontendServer
from minisgl.router.config import EngineDiscovery, TokenizerConfig
from minisgl.wire.messages import Ack, FromScheduler, Submit
from support.cluster.fake_pods import Pod, Pods
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with, row
from support.frontend.served import eventually, launched_by
from support.launcher.ports import free_port
from support.tiny_tokenizers import CHATML, byte_level, write_directory

TOKENIZER = byte_level()
CHAT = {"model": "b", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
UNNAMED = {key: value for key, value in CHAT.items() if key != "model"}


def saying(text: str) -> Callable[[Submit], list[FromScheduler]]:
    return answer_with(TOKENIZER.encode(text).ids)


def token(text: str) -> int:
    (found,) = TOKENIZER.encode(text).ids
    return found


class FrontendPod:
    def __init__(self, path: Path) -> None:
        self.pods = Pods()
        self.model = write_directory(path / "model", TOKENIZER, chat_template=CHATML)
        self.log = path / "frontend.log"
        control_port = free_port()
        flags = {
            "--engines": "127.0.0.2",
            "--scheduler-port": self.pods.scheduler_port,
            "--engine-control-port": self.pods.control_port,
            "--host": "127.0.0.1",
            "--port": 0,
            "--control-port": control_port,
            "--drain-timeout": 30,
            "--leave-timeout": 1,
            "--queue-timeout": 5,
            "--log-format": "json",
        }
        arguments = [str(part) for flag in flags.items() for part in flag]
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "minisgl", "frontend", *arguments, "--served-model-name", "a", "b"],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(__file__).parents[3] / "runtime"),
                    "TMPDIR": str(path),
                    "MINISGL_POD_NAME": "chat-frontend-x",
                },
            )
        self.control = httpx.Client(base_url=f"http://127.0.0.1:{control_port}", timeout=WAIT_SECONDS)
        eventually(lambda: " at http" in self.log.read_text(), 180)
        (started,) = [line for line in self.lines() if " at http" in line["message"]]
        url = started["message"].partition(" at ")[2].removesuffix("/v1")
        self.http = httpx.Client(base_url=url, timeout=WAIT_SECONDS)

    def lines(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def start_engine(self, answer: Callable[[Submit], list[FromScheduler]]) -> Pod:
        pod = self.pods.start(0, self.model, answer)
        eventually(lambda: any(replica["routable"] for replica in self.control.get("/status").json()["replicas"]))
        return pod

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.pods.close()
        self.http.close()
        self.control.close()


@pytest.fixture
def frontend(tmp_path: Path) -> Iterator[FrontendPod]:
    made = FrontendPod(tmp_path)
    yield made
    made.close()


def test_life_of_a_frontend_pod(frontend: FrontendPod) -> None:
    assert frontend.control.get("/live").json() == {"ready": True, "reason": ""}
    assert frontend.control.get("/startup").status_code == 200
    # It is ready without an engine, because it holds requests.
    eventually(lambda: frontend.control.get("/ready").json() == {"ready": True, "reason": ""})
    eventually(lambda: "127.0.0.2" in frontend.http.get("/model_info").json()["error"]["message"])
    idle = frontend.http.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in idle] == [("a", None), ("b", None)]
    assert frontend.http.post("/v1/chat/completions", json={**CHAT, "model": "tiny"}).status_code == 404
    refused = frontend.http.post("/v1/chat/completions", json=CHAT)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(refused.headers["retry-after"]) >= 1
    assert frontend.control.get("/nothing").status_code == 404

    engine = frontend.start_engine(saying("xyz"))
    assert [model["id"] for model in frontend.http.get("/v1/models").json()["data"]] == ["a", "b"]
    answer = frontend.http.post("/v1/chat/completions", json=CHAT).json()
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("b", "xyz")
    assert frontend.http.post("/v1/chat/completions", json=UNNAMED).json()["model"] == "a"
    assert frontend.http.post("/v1/chat/completions", json={**CHAT, "model": "tiny"}).status_code == 404
    # The first status of the engine may come after its first answer.
    eventually(lambda: frontend.control.get("/status").json()["replicas"][0]["kv_usage"] is not None)
    status = frontend.control.get("/status").json()
    (replica,) = status.pop("replicas")
    assert status.pop("idle_seconds") >= 0
    assert status == {
        "kind": "frontend",
        "pod": "chat-frontend-x",
        "ready": True,
        "draining": False,
        "held": 0,
        "running": 0,
        "peer_secret": {},
    }
    assert replica == {
        "replica": "chat-r0",
        "revision": "0123456789",
        "epoch": [1_700_000_000_000, 1],
        "address": "127.0.0.2",
        "routable": True,
        "reason": "",
        "waits_for_files": False,
        "running": 0,
        "waiting": 0,
        "queue_ms": 0.0,
        "kv_usage": 0.0,
    }

    # The engine restarts while a request waits: the client does not notice.
    engine.scheduler.reset()
    engine.scheduler.answer = lambda submit: [Ack(submit.id)]
    with frontend.http.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
        lines = stream.iter_lines()
        next(lines)
        engine.kill_engine()
        engine.start_engine(lambda submit: [Ack(submit.id), row(submit.id, 0, token("x"))], (1_700_000_000_000, 2))
        while '"content":"x"' not in next(lines):
            continue
        (submit,) = engine.scheduler.wait_for(Submit)

        # After SIGTERM it is not ready immediately.
        frontend.popen.send_signal(signal.SIGTERM)
        eventually(lambda: frontend.control.get("/ready").status_code == 503)
        assert frontend.control.get("/status").json()["draining"] is True

        # Five seconds later new requests are rejected, and the stream continues to its end.
        def is_refused() -> bool:
            try:
                httpx.get(f"{frontend.http.base_url}/health", timeout=WAIT_SECONDS)
            except httpx.ConnectError:
                return True
            except httpx.TransportError:
                # The listener closed under a connection that it had not accepted yet.
                return False
            return False

        eventually(is_refused)
        assert frontend.popen.poll() is None
        engine.scheduler.send(row(submit.id, 1, token("y"), "length"), to=submit)
        rest = "".join(lines)
        assert '"content":"y"' in rest and "[DONE]" in rest
    assert frontend.popen.wait(WAIT_SECONDS) == 0


def test_a_killed_tokenizer_is_restarted_with_the_files_in_use(frontend: FrontendPod) -> None:
    engine = frontend.start_engine(saying("xyz"))
    fetched = len(engine.files.requests)
    killed = launched_by(frontend.popen.pid)["tokenizer0"]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: launched_by(frontend.popen.pid).get("tokenizer0", killed) != killed)
    # For a moment the loss may be unnoticed.
    eventually(lambda: frontend.http.post("/v1/chat/completions", json=CHAT).status_code == 200)
    assert frontend.control.get("/ready").status_code == 200
    assert len(engine.files.requests) == fetched


class InThread:
    """The same server in this process, with a shorter shutdown."""

    def __init__(
        self,
        path: Path,
        answer: Callable[[Submit], list[FromScheduler]],
        leave_seconds: float = 0.5,
        queue_seconds: float = 60.0,
    ) -> None:
        (path / "peers").mkdir()
        (path / "peers" / "a").write_text("1." + "5e" * 32)
        self.pods = Pods()
        self.pod = self.pods.start(0, write_directory(path / "model", TOKENIZER, chat_template=CHATML), answer)
        engines = EngineDiscovery(
            host="127.0.0.2",
            scheduler_port=self.pods.scheduler_port,
            control_port=self.pods.control_port,
            cache=str(path / "cache"),
        )
        tokenizer = TokenizerConfig(engines=engines, frontend_address=f"ipc://{path}/text", queue_seconds=queue_seconds)
        self._server = FrontendServer(
            FrontendConfig(
                port=0,
                control_port=0,
                peer_secret=str(path / "peers"),
                tokenizer_addresses=(tokenizer.frontend_address,),
                tokenizer=tokenizer,
                leave_seconds=leave_seconds,
            )
        )
        listening = threading.Event()
        self._thread = threading.Thread(target=self._server.run, args=(lambda _: listening.set(),))
        self._thread.start()
        assert listening.wait(WAIT_SECONDS)
        self.control = httpx.Client(base_url=f"http://127.0.0.1:{self._server.control_port}", timeout=WAIT_SECONDS)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self._server.port}", timeout=WAIT_SECONDS)
        eventually(lambda: self.control.get("/ready").status_code == 200)

    def stop(self) -> None:
        """Stop as after SIGTERM."""
        self._server.stop()

    def close(self) -> None:
        self.http.close()
        self.control.close()
        self._server.stop()
        self._server.stop()
        self._thread.join(WAIT_SECONDS)
        assert not self._thread.is_alive()
        self.pods.close()


@pytest.fixture(scope="module")
def limited_frontend() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Process and URL of a frontend whose log cannot be written, and that was started with few open files."""
    port = free_port()
    flags = ("--host", "127.0.0.1", "--port", str(port), "--control-port", "0", "--scheduler-port", str(free_port()))
    command = [sys.executable, "-m", "minisgl", "frontend", "--engines", "127.0.0.2", *flags, "--leave-timeout", "1"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "runtime")}
    limited = ["/bin/sh", "-c", 'ulimit -Sn 256; exec "$@" 2>/dev/full', "sh", *command]
    with subprocess.Popen(limited, env=environment) as popen:
        try:
            yield popen, f"http://127.0.0.1:{port}"
        finally:
            popen.kill()


def test_a_frontend_serves_although_its_log_cannot_be_written(
    limited_frontend: tuple[subprocess.Popen[bytes], str],
) -> None:
    popen, url = limited_frontend
    eventually(lambda: popen.poll() is not None or _lost_lines(url) > 0, 180)
    assert popen.poll() is None, "the launcher exited"
    # The access log of this request is lost, too.
    lost = _lost_lines(url)
    httpx.get(f"{url}/v1/nothing", timeout=WAIT_SECONDS)
    eventually(lambda: _lost_lines(url) > lost)


def test_idle_connections_beyond_the_soft_limit_of_open_files_shut_nobody_out(
    limited_frontend: tuple[subprocess.Popen[bytes], str],
) -> None:
    popen, url = limited_frontend
    eventually(lambda: popen.poll() is not None or _lost_lines(url) > 0, 180)
    port = httpx.URL(url).port
    assert port is not None
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_SECONDS))
        assert httpx.get(f"{url}/health", timeout=WAIT_SECONDS).status_code in (200, 503)


def _lost_lines(url: str) -> float:
    """Number that /metrics reports; 0 before the server listens."""
    try:
        page = httpx.get(f"{url}/metrics", timeout=WAIT_SECONDS).text
    except httpx.TransportError:
        return 0
    return float(re.search(r"^minisgl:log_lines_lost_total\S* (\S+)$", page, re.MULTILINE)[1])  # type: ignore[index]


def test_drain_by_http_keeps_running_requests(tmp_path: Path) -> None:
    server = InThread(tmp_path, saying("xyz"))
    assert server.control.get("/status").json()["peer_secret"]["a"].startswith("1.")
    assert server.control.get("/drain").status_code == 202
    assert server.control.post("/drain").json() == {"draining": True}
    assert server.control.get("/ready").json() == {"ready": False, "reason": "the server is shutting down"}
    eventually(lambda: server.http.post("/v1/chat/completions", json=UNNAMED).status_code == 503)
    assert server.control.get("/live").status_code == 200
    assert server.control.get("/status").json()["draining"] is True
    server.close()


def test_web_pages_cannot_use_the_control_port(tmp_path: Path) -> None:
    server = InThread(tmp_path, saying("xyz"))
    for headers, code in (
        ({"origin": str(server.control.base_url)}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),
        ({"host": "a.example"}, "host_not_allowed"),
    ):
        for method, path in (("GET", "/drain"), ("POST", "/drain"), ("GET", "/status"), ("GET", "/")):
            answer = server.control.request(method, path, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, code)
    assert server.control.get("/status", headers={"host": "localhost"}).json()["draining"] is False
    server.close()


def test_requests_that_arrive_during_leave_time_are_served(tmp_path: Path) -> None:
    server = InThread(tmp_path, saying("xyz"), leave_seconds=600)
    server.stop()
    eventually(lambda: server.control.get("/ready").status_code == 503)
    answer = server.http.post("/v1/chat/completions", json=UNNAMED)
    assert answer.json()["choices"][0]["message"]["content"] == "xyz"
    server.close()


def test_a_stream_whose_engine_is_lost_ends_in_an_error(tmp_path: Path) -> None:
    # It waits that long for another engine.
    server = InThread(tmp_path, lambda submit: [Ack(submit.id), row(submit.id, 0, token("x"))], queue_seconds=5)
    with server.http.stream("POST", "/v1/chat/completions", json={**UNNAMED, "stream": True}) as stream:
        lines = stream.iter_lines()
        while '"content":"x"' not in next(lines):
            continue
        server.pod.kill_engine()
        got: list[str] = []
        with pytest.raises(httpx.TransportError):
            got.extend(lines)
    assert "[DONE]" not in "".join(got)
    assert not any(replica["routable"] for replica in server.control.get("/status").json()["replicas"])
    server.close()
