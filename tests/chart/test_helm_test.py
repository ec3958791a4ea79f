"""The pod of `helm test`: one request to the model, and a failure without an answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from support.cluster.chart import NAMESPACE, of_kind, rendered

HOST = f"http://demo.{NAMESPACE}.svc"


@contextmanager
def _model(finish_reason: str, asked: list[tuple[str, str | None]]) -> Iterator[str]:
    """A proxy that plays the endpoint for every host; `asked` records paths and credentials."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, body: dict[str, Any]) -> None:
            asked.append((self.path, self.headers["Authorization"]))
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._answer({"data": [{"id": "served"}]})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert request["model"] == "served"
            choice = {"finish_reason": finish_reason, "message": {"content": "Hello."}}
            self._answer({"choices": [choice], "usage": {"completion_tokens": 2}})

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def _run(proxy: str, **environment: str) -> subprocess.CompletedProcess[str]:
    [pod] = of_kind(rendered({"test": {"model": "demo"}}), "Pod")
    [container] = pod["spec"]["containers"]
    assert container["command"] == ["python3", "-c"]
    command = [sys.executable, "-I", "-c", *container["args"]]
    return subprocess.run(
        command, check=False, text=True, capture_output=True, env={"http_proxy": proxy, **environment}, timeout=180
    )


@pytest.mark.parametrize(("keys", "sent"), [({}, None), ({"API_KEYS": "sk-one alice\nsk-two\n"}, "Bearer sk-one")])
def test_it_sends_a_request_to_the_models_service(keys: dict[str, str], sent: str | None) -> None:
    asked: list[tuple[str, str | None]] = []
    with _model("stop", asked) as proxy:
        done = _run(proxy, **keys)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served answers: 'Hello.'\n"
    assert asked == [(f"{HOST}/v1/models", sent), (f"{HOST}/v1/chat/completions", sent)]


def test_a_truncated_answer_fails_the_test() -> None:
    with _model("error", []) as proxy:
        assert _run(proxy).returncode != 0


def test_an_unreachable_service_fails_the_test() -> None:
    assert _run("http://127.0.0.1:9").returncode != 0


def test_without_a_model_no_test_pod_is_rendered() -> None:
    assert not of_kind(rendered({}), "Pod")
