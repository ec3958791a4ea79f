"""An object store with the protocol of S3, which can be configured to fail.

Implements what a download uses: ListObjectsV2 with pages, GetObject with Range and If-Match, and HeadObject, with the
bucket in the path and not in the host name. Requests need a signature of a known key, which is not computed again.
"""

from __future__ import annotations

import base64
import hashlib
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

KEY: Final = "AKIATEST"
_SIGNED: Final = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/]+)/\d{8}/([^/]+)/s3/aws4_request, SignedHeaders=.+")


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"'


@dataclass
class ObjectStore:
    """Objects by bucket and key, and what was asked of them."""

    buckets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    page_size: int = 1000
    empty_pages: bool = False
    """Whether lists have pages without objects, and no end."""
    page: bytes = b""
    """Answer to each list, as of a server that is no object store; empty: none."""
    broken_downloads: int = 0
    """Number of downloads whose connection closes in the middle."""
    refused: list[tuple[int, str]] = field(default_factory=list)
    """Status and code of the next answers."""
    denies: bool = False
    """Whether the key may read nothing."""
    knows_conditions: bool = True
    """False: If-Match is ignored."""
    knows_ranges: bool = True
    on_download: Callable[[str], None] = lambda key: None
    """Called with the key before an object is sent."""
    requests: Counter[str] = field(default_factory=Counter)
    """By operation."""
    regions: set[str] = field(default_factory=set)
    """Those that requests were signed for."""
    tokens: set[str | None] = field(default_factory=set)
    """Session tokens of requests."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of content that were sent, by key."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, bucket: str, prefix: str, directory: Path) -> None:
        """Put the files of a directory."""
        objects = self.buckets.setdefault(bucket, {})
        for path in directory.rglob("*"):
            if path.is_file():
                objects[f"{prefix}{path.relative_to(directory)}"] = path.read_bytes()

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Serve on a free port; returns the URL."""
        server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            server.server_close()

    def take_break(self) -> bool:
        with self._lock:
            self.broken_downloads -= 1
            return self.broken_downloads >= 0

    def take_refusal(self) -> tuple[int, str] | None:
        with self._lock:
            return self.refused.pop(0) if self.refused else None

    def count(self, operation: str) -> None:
        with self._lock:
            self.requests[operation] += 1

    def count_bytes(self, key: str, number: int) -> None:
        with self._lock:
            self.sent[key] = self.sent.get(key, 0) + number


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that has read enough of an object closes its connection.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    store: ObjectStore
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).removeprefix("/").partition("/")
        signed = _SIGNED.fullmatch(self.headers.get("authorization") or "")
        if signed is None:
            return self._fail(403, "AccessDenied", "the request is not signed")
        self.store.regions.add(signed[2])
        self.store.tokens.add(self.headers.get("x-amz-security-token"))
        if signed[1] != KEY:
            return self._fail(403, "InvalidAccessKeyId", "the key does not exist")
        if (refusal := self.store.take_refusal()) is not None:
            return self._fail(*refusal, "refused")
        if bucket not in self.store.buckets:
            return self._fail(404, "NoSuchBucket", "the bucket does not exist")
        if self.store.denies:
            return self._fail(403, "AccessDenied", "Access Denied")
        if key:
            self.store.on_download(key)
            return self._object(key, self.store.buckets[bucket].get(key))
        self._list(bucket, {name: values[0] for name, values in parse_qs(url.query).items()})

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        self.store.count("list")
        if self.store.page:
            return self._send(200, self.store.page)
        prefix = query.get("prefix", "")
        after = base64.b64decode(query.get("continuation-token", "")).decode()
        objects = self.store.buckets[bucket]
        keys = [key for key in sorted(objects) if key.startswith(prefix) and key > after]
        page = keys[: self.store.page_size]
        more = ""
        if self.store.empty_pages:
            token = base64.b64encode(b"%d" % self.store.requests["list"]).decode()
            page, more = [], f"<NextContinuationToken>{token}</NextContinuationToken>"
        elif len(keys) > len(page):
            token = base64.b64encode(page[-1].encode()).decode()
            more = f"<NextContinuationToken>{token}</NextContinuationToken>"
        entries = "".join(
            f"<Contents><Key>{escape(quote(key))}</Key><Size>{len(objects[key])}</Size>"
            f"<ETag>{escape(etag(objects[key]))}</ETag></Contents>"
            for key in page
        )
        self._send_xml(
            200,
            f"<ListBucketResult><Name>{bucket}</Name><EncodingType>url</EncodingType><KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}</ListBucketResult>",
        )

    def _object(self, key: str, content: bytes | None) -> None:
        self.store.count("get" if self.command == "GET" else "head")
        if content is None:
            return self._fail(404, "NoSuchKey", "the key does not exist")
        if self.store.knows_conditions and self.headers.get("if-match", etag(content)) != etag(content):
            return self._fail(412, "PreconditionFailed", "the object is another one")
        first, end, status = 0, len(content), 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if asked and self.store.knows_ranges:
            first, end, status = int(asked[1]), min(end, int(asked[2] or end) + 1), 206
            if first >= len(content):
                return self._fail(416, "InvalidRange", "the range is not in the object")
        self.send_response(status)
        self.send_header("content-length", str(end - first))
        self.send_header("etag", etag(content))
        if status == 206:
            self.send_header("content-range", f"bytes {first}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        part = content[first:end]
        if len(part) > 1 and self.store.take_break():
            part = part[: len(part) // 2]
            self.close_connection = True
        self.store.count_bytes(key, len(part))
        self.wfile.write(part)

    def _fail(self, status: int, code: str, message: str) -> None:
        self.store.count(code)
        self._send_xml(status, f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>")

    def _send_xml(self, status: int, text: str) -> None:
        self._send(status, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode())

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/xml")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
