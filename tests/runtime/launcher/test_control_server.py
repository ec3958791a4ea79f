"""The control port answers from the status board, without the main thread."""

from __future__ import annotations

import hashlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from minisgl.errors import LauncherError
from minisgl.launcher.control_server import ControlServer, StatusBoard
from minisgl.wire.status import SECRET_HEADER
from support.launcher.ports import free_port


class _Body(msgspec.Struct):
    phase: str


class Served:
    def __init__(self, port: int) -> None:
        self.port = port
        self.board = StatusBoard()
        self.drains: list[None] = []
        self.demands: list[None] = []

    def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(free_port())
    drain, require = (lambda: served.drains.append(None)), (lambda: served.demands.append(None))
    with ControlServer(served.port, served.board, drain, require):
        yield served


def test_probes_report_what_is_on_the_board(served: Served) -> None:
    assert served.get("/startup") == (200, b'{"ready":true,"reason":""}')
    assert served.get("/live")[0] == 200
    assert served.get("/status")[0] == 503
    assert served.get("/ready") == (503, b'{"ready":false,"reason":"starting"}')
    served.board.publish(_Body("Loading"), "Loading: rank 1: weights 40%")
    assert served.get("/status") == (200, b'{"phase":"Loading"}')
    assert served.get("/ready") == (503, b'{"ready":false,"reason":"Loading: rank 1: weights 40%"}')
    served.board.publish(_Body("Ready"), "")
    assert served.get("/ready?verbose") == (200, b'{"ready":true,"reason":""}')


def test_the_operator_demands_the_secret_of_the_pods_with_a_header(served: Served) -> None:
    served.board.publish(_Body("Ready"), "")
    for headers in ({}, {SECRET_HEADER: "a word of a later version"}):
        served.get("/status", **headers)
    assert not served.demands
    assert served.get("/status", **{SECRET_HEADER: "required"}) == (200, b'{"phase":"Ready"}')
    assert len(served.demands) == 1


def test_a_launcher_whose_main_thread_hangs_is_not_live(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.launcher.control_server._HUNG_SECONDS", -1.0)
    assert served.get("/live")[0] == 503


def test_only_files_with_the_published_hash_are_served(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    served.board.files = {"tokenizer.json": (path, hashlib.sha256(b"{}").hexdigest())}
    assert served.get("/files/tokenizer.json") == (200, b"{}")
    for other in ("/files/model.safetensors", "/files/../tokenizer.json", "/files/", "/tokenizer", "/"):
        assert served.get(other)[0] == 404
    path.write_bytes(b"[]")
    assert served.get("/files/tokenizer.json")[0] == 503
    path.unlink()
    assert served.get("/files/tokenizer.json")[0] == 503


def test_drain_accepts_get_and_post_and_other_paths_only_get(served: Served) -> None:
    assert served.get("/drain")[0] == served.get("/drain", "POST")[0] == 202
    assert len(served.drains) == 2
    assert served.get("/status", "POST")[0] == 405
    assert served.get("/status", "DELETE")[0] == 501


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Origin": "https://a.example"}, "origin_not_allowed"),
        ({"Sec-Fetch-Site": "cross-site"}, "origin_not_allowed"),
        ({"Host": "a.example:8080"}, "host_not_allowed"),
    ],
)
def test_web_pages_are_refused(served: Served, method: str, headers: dict[str, str], code: str) -> None:
    for path in ("/drain", "/status"):
        status, body = served.get(path, method, **headers)
        assert (status, msgspec.json.decode(body)["code"]) == (403, code)
    assert not served.drains


def test_other_clients_on_this_machine_are_served(served: Served) -> None:
    assert served.get("/live", Host="localhost:8080")[0] == 200
    assert served.get("/drain", "POST", **{"Sec-Fetch-Site": "none"})[0] == 202


def test_hostile_connections_do_not_block_other_clients(served: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(8)]
    with socket.create_connection(("127.0.0.1", served.port)) as long_line:
        long_line.sendall(b"GET /" + b"x" * 70_000)
        assert b"414" in long_line.recv(100)
    assert served.get("/live")[0] == 200
    for connection in idle:
        connection.close()


def test_connections_above_the_limit_are_closed_immediately(served: Served) -> None:
    held = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(33)]
    assert held[-1].recv(1) == b""
    for connection in held:
        connection.close()


def test_a_port_in_use_is_an_error_that_names_the_flag() -> None:
    with socket.create_server(("", 0)) as taken, pytest.raises(LauncherError, match="--control-port"):
        ControlServer(taken.getsockname()[1], StatusBoard(), lambda: None)
