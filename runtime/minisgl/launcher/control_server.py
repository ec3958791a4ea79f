"""The control port of an engine pod: probes, status and tokenizer files over HTTP.

It has threads of its own and answers from the status board, which the launcher's main thread writes: no request waits
for an engine, and none can block the launcher.
"""

from __future__ import annotations

import hashlib
import logging
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from minisgl.launcher.listener import listen_on_all
from minisgl.wire.status import SECRET_HEADER
from minisgl.wire.web_pages import WebPageError, check_control_request

logger = logging.getLogger(__name__)

_MAX_CONNECTIONS: Final = 32
_REQUEST_SECONDS: Final = 5.0
_FILE_SECONDS: Final = 60.0
_HUNG_SECONDS: Final = 60.0
"""Time without a published status after which the main thread counts as hung; it publishes at least every second."""


class StatusBoard:
    """Data that the main thread writes and requests read. Attributes are replaced as a whole, never modified."""

    def __init__(self) -> None:
        self.status: msgspec.Struct | None = None
        self.not_ready = "starting"
        """Reason why the pod is not ready; empty when it is."""
        self.files: Mapping[str, tuple[Path, str]] = {}
        """Name → path and sha256 of each file that clients may fetch."""
        self._published_at = time.monotonic()

    def publish(self, status: msgspec.Struct, not_ready: str) -> None:
        self.status, self.not_ready, self._published_at = status, not_ready, time.monotonic()

    @property
    def is_hung(self) -> bool:
        return time.monotonic() - self._published_at > _HUNG_SECONDS


class ControlServer(socketserver.ThreadingTCPServer):
    """Serves `board` on `port` while it is open. `drain` is called for each request of /drain, on another thread."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        port: int,
        board: StatusBoard,
        drain: Callable[[], None],
        require_secret: Callable[[], None] = lambda: None,
    ) -> None:
        """`require_secret` is called for each request with SECRET_HEADER, as `drain` is. Raises LauncherError
        `address_unavailable`."""
        listener = listen_on_all("control", port)
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.board = board
        self.drain = drain
        self.require_secret = require_secret
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="control-server", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a control request was aborted", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection, as in HTTP/1.0. The base class limits lines and headers; bodies are not read."""

    server: ControlServer
    timeout = _REQUEST_SECONDS
    server_version = "minisgl"
    sys_version = ""

    def parse_request(self) -> bool:
        """Return whether the request is to be served; otherwise it is answered."""
        if not super().parse_request():
            return False
        try:
            check_control_request(lambda name: self.headers.get_all(name, []), self.connection.getsockname()[0])
        except WebPageError as error:
            self._send(403, msgspec.json.encode({"error": error.message, "code": error.code}))
            return False
        return True

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        board = self.server.board
        match path:
            case "/startup":
                self._send_ready("")
            case "/live":
                self._send_ready("the main thread of the launcher hangs" if board.is_hung else "")
            case "/ready":
                self._send_ready(board.not_ready)
            case "/status" if board.status is not None:
                if self.headers.get(SECRET_HEADER) == "required":
                    self.server.require_secret()
                self._send(200, msgspec.json.encode(board.status))
            case "/status":
                self._send_ready(board.not_ready)
            case "/drain":
                self.do_POST()
            case _ if (file := board.files.get(path.removeprefix("/files/"))) is not None:
                self._send_file(*file)
            case _:
                self._send_error(404, f"no such path: {path[:200]!r}; use /status")

    def do_POST(self) -> None:
        if self.path.partition("?")[0] != "/drain":
            self._send_error(405, "method POST not allowed; only /drain accepts it")
            return
        self.server.drain()
        self._send(202, b'{"draining":true}')

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: probes come every second."""

    def _send_ready(self, problem: str) -> None:
        self._send(503 if problem else 200, msgspec.json.encode({"ready": not problem, "reason": problem}))

    def _send_error(self, status: int, message: str) -> None:
        self._send(status, msgspec.json.encode({"error": message}))

    def _send_file(self, path: Path, sha256: str) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            self._send_error(503, f"{path.name} cannot be read: {error.strerror}")
            return
        if hashlib.sha256(content).hexdigest() != sha256:
            self._send_error(503, f"{path.name} has changed since the engine started: delete the pods to restart them")
            return
        self.connection.settimeout(_FILE_SECONDS)
        self._send(200, content, "application/octet-stream")

    def _send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
