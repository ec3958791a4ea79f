"""Directories as repositories of a Hub.

Implements what clients use: GET /api/models/REPO[/revision/REVISION] and .../tree/REVISION, HEAD and GET of
/REPO/resolve/REVISION/FILE. Large files redirect to another path, which stands for the Hub's storage. Errors have the
header X-Error-Code.
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

LARGE: Final = 100_000
"""Minimum size in bytes of LFS objects, which are named by their SHA-256 and redirected."""
BLOCK: Final = 16_384


@dataclass
class Repository:
    """One repository, and how it is served."""

    directory: Path
    revisions: tuple[str, ...] = ("main",)
    """Names of its only commit."""
    token: str | None = None
    """Required bearer token; requests without it are answered with 401. None: public."""
    too_many_requests: int = 0
    """Number of requests that are answered with 429 before others succeed."""
    broken_downloads: int = 0
    """Number of downloads of large files whose connection closes in the middle."""
    bytes_per_second: float | None = None
    corrupt: bool = False
    """True: large files have the right size but wrong content."""

    @property
    def commit(self) -> str:
        digest = hashlib.sha1(str(self.directory).encode(), usedforsecurity=False)
        for name in self.names():
            digest.update(name.encode() + hashlib.sha256(self.file(name).read_bytes()).digest())
        return digest.hexdigest()

    def names(self) -> list[str]:
        return sorted(str(f.relative_to(self.directory)) for f in self.directory.rglob("*") if f.is_file())

    def file(self, name: str) -> Path:
        return self.directory / name


@dataclass
class FakeHub:
    """Repositories by name, and the number of requests by path."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    """Number of valid requests by `METHOD /path`."""
    storage_url: str = ""
    """URL of the storage while it serves."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _answers: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._answers.set()

    def downloads(self, repository: str) -> int:
        """Number of downloads of large files, complete or not."""
        with self._lock:
            return sum(n for path, n in self.requests.items() if path.startswith(f"GET /storage/{repository}/"))

    @contextmanager
    def serve(
        self, address: str, storage_address: str, place: Callable[[Callable[[], Any]], Any] = lambda call: call()
    ) -> Iterator[str]:
        """Serve on a free port of two addresses of one machine; returns the URL.

        `place` calls the function that creates the socket, for example in another network namespace.
        """
        handler = type("Handler", (_Handler,), {"hub": self})
        make, everywhere = (_Ipv6Server, "::") if ":" in address else (ThreadingHTTPServer, "0.0.0.0")
        server: ThreadingHTTPServer = place(lambda: make((everywhere, 0), handler))
        server.daemon_threads = True
        port = server.server_address[1]
        self.storage_url = f"http://{_in_url(storage_address)}:{port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{_in_url(address)}:{port}"
        finally:
            server.shutdown()
            server.server_close()

    def take(self, repository: Repository, counter: str) -> bool:
        """Decrement the counter of a failure; returns whether it was above zero."""
        with self._lock:
            left: int = getattr(repository, counter)
            setattr(repository, counter, max(0, left - 1))
            return left > 0

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Let all requests wait meanwhile."""
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    def wait_until_answering(self) -> None:
        self._answers.wait()

    def record(self, method: str, path: str) -> None:
        with self._lock:
            self.requests[f"{method} {path}"] += 1


class _Ipv6Server(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def _in_url(address: str) -> str:
    return f"[{address}]" if ":" in address else address


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: tests read the counted requests."""

    def _answer(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        self.hub.wait_until_answering()
        self.hub.record(self.command, f"/{path}")
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        storage = parts[0] == "storage"
        rest = parts[2:] if api else parts[1:] if storage else parts
        name = "/".join(rest[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            # Without a token, the Hub answers 401 both for private and for missing repositories.
            status = HTTPStatus.NOT_FOUND if "Authorization" in self.headers else HTTPStatus.UNAUTHORIZED
            return self._fail(status, "RepoNotFound", "Repository not found")
        if not self._allowed(repository, storage):
            return None
        what = rest[2:]
        if storage:
            return self._send_file(repository, "/".join(what))
        if api:
            return self._send_information(name, repository, what)
        if len(what) >= 3 and what[0] == "resolve":
            return self._resolve(name, repository, what[1], "/".join(what[2:]))
        return self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")

    def _allowed(self, repository: Repository, storage: bool) -> bool:
        if self.hub.take(repository, "too_many_requests"):
            self._fail(HTTPStatus.TOO_MANY_REQUESTS, "RateLimited", "We had to rate limit you", {"Retry-After": "1"})
            return False
        # The storage is another host, which must not receive the token: its URLs contain the permission.
        if not storage and repository.token not in (None, (self.headers.get("Authorization") or "")[len("Bearer ") :]):
            self._fail(HTTPStatus.UNAUTHORIZED, "GatedRepo", "Access to this model is restricted: log in")
            return False
        return True

    def _send_information(self, name: str, repository: Repository, what: list[str]) -> None:
        revision = what[1] if len(what) > 1 else "main"
        if not _knows(repository, revision):
            return self._fail(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = [_described(repository, file) for file in repository.names()]
        if what[:1] == ["tree"]:
            return self._send_json(files)
        siblings = [{"rfilename": file["path"], "size": file["size"]} for file in files]
        return self._send_json(
            {
                "id": name,
                "modelId": name,
                "sha": repository.commit,
                "private": repository.token is not None,
                "gated": False,
                "disabled": False,
                "siblings": siblings,
                "tags": [],
            }
        )

    def _resolve(self, name: str, repository: Repository, revision: str, file: str) -> None:
        if not _knows(repository, revision):
            return self._fail(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        if file not in repository.names():
            return self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        size, etag = _size_and_etag(repository.file(file))
        headers = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if size < LARGE:
            return self._send_file(repository, file, {**headers, "ETag": f'"{etag}"'})
        # To another host: a redirect on the same host means a renamed repository, and clients then expect these headers
        # in the next response.
        location = f"{self.hub.storage_url}/storage/{name}/{file}"
        headers |= {"X-Linked-Size": str(size), "X-Linked-Etag": f'"{etag}"', "Location": location}
        return self._send(HTTPStatus.FOUND, b"", headers)

    def _send_file(self, repository: Repository, file: str, headers: dict[str, str] | None = None) -> None:
        content = repository.file(file).read_bytes()
        if repository.corrupt and len(content) >= LARGE:
            content = bytes(len(content))
        part = _range(self.headers.get("Range"), len(content))
        status = HTTPStatus.OK if part is None else HTTPStatus.PARTIAL_CONTENT
        extra = dict(headers or {})
        if part is not None:
            extra["Content-Range"] = f"bytes {part.start}-{part.stop - 1}/{len(content)}"
        body = content if part is None else content[part.start : part.stop]
        self._send_head(status, {**extra, "Content-Length": str(len(body))})
        if self.command == "HEAD":
            return
        breaks = len(content) >= LARGE and self.hub.take(repository, "broken_downloads")
        self._send_body(body[: len(body) // 2] if breaks else body, repository.bytes_per_second)
        if breaks:
            self.close_connection = True

    def _send_body(self, body: bytes, bytes_per_second: float | None) -> None:
        for start in range(0, len(body), BLOCK):
            block = body[start : start + BLOCK]
            self.wfile.write(block)
            if bytes_per_second is not None:
                time.sleep(len(block) / bytes_per_second)

    def _send_json(self, value: object) -> None:
        self._send(HTTPStatus.OK, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: HTTPStatus, code: str, words: str, headers: dict[str, str] | None = None) -> None:
        error = {"X-Error-Code": code, "X-Error-Message": words, **(headers or {})}
        self._send(status, json.dumps({"error": words}).encode(), error)

    def _send(self, status: HTTPStatus, body: bytes, headers: dict[str, str]) -> None:
        self._send_head(status, {**headers, "Content-Length": str(len(body))})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _knows(repository: Repository, revision: str) -> bool:
    return revision in (*repository.revisions, repository.commit)


def _size_and_etag(file: Path) -> tuple[int, str]:
    """Size, and Git's blob id or, for a large file, its SHA-256."""
    content = file.read_bytes()
    if len(content) >= LARGE:
        return len(content), hashlib.sha256(content).hexdigest()
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return len(content), blob.hexdigest()


def _described(repository: Repository, name: str) -> dict[str, Any]:
    size, etag = _size_and_etag(repository.file(name))
    entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": etag}
    if size >= LARGE:
        entry["lfs"] = {"oid": etag, "size": size, "pointerSize": 134}
    return entry


def _range(header: str | None, size: int) -> range | None:
    """Bytes of a Range header `bytes=N-` or `bytes=N-M`, the forms that clients send, of a file with `size` bytes."""
    if header is None or not header.startswith("bytes="):
        return None
    first, _, last = header.removeprefix("bytes=").partition("-")
    return range(int(first), min(int(last) + 1, size) if last else size)
