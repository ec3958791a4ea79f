"""Folders of buckets in S3 and in stores with its protocol.

boto3 finds credentials, region, endpoint and certificates as for other programs: in variables, in the AWS
configuration, and at the service of a cloud or a cluster.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from minisgl.extras import require
from minisgl.hub.bucket_failures import classify_error
from minisgl.hub.fetch_error import ContentChanged, FetchError
from minisgl.hub.files import RemoteFile, is_in_checkpoint, missing_parts, servable_files
from minisgl.hub.origin import Content
from minisgl.version import __version__

SCHEME: Final = "s3://"
_URI: Final = re.compile(r"s3://(?P<bucket>[A-Za-z0-9][A-Za-z0-9._-]{1,254})(?:/(?P<prefix>[^\x00-\x1f\x7f]*))?")
_CHUNK_BYTES: Final = 1 << 20
_LARGE_BYTES: Final = 1 << 20
"""Size of objects that are linked from another checkpoint of the same bucket."""
_MOST_OBJECTS: Final = 100_000
"""Objects that are listed, in folders too; each is kept in memory."""
_TIMEOUT_SECONDS: Final = 30.0
"""To connect, and between two chunks."""
_CONNECTIONS: Final = 10
_RATE_LIMIT_SECONDS: Final = 15.0
_AWS: Final = (".amazonaws.com", ".amazonaws.com.cn")


class Bucket:
    """The objects under a prefix of a bucket, which are the files of a checkpoint: an Origin."""

    revision = ""

    def __init__(self, uri: str, endpoint: str | None = None, *, with_weights: bool = True) -> None:
        """`uri` is s3://BUCKET/PREFIX. `endpoint`: URL of the store; None: that of AWS_ENDPOINT_URL_S3 or
        AWS_ENDPOINT_URL, or AWS. Raises FetchError `NotFound` for a malformed URI."""
        require("frontend", ("boto3",))
        match = _URI.fullmatch(uri)
        if match is None:
            raise FetchError("NotFound", f"{uri!r} does not name a folder of a bucket; write s3://BUCKET/PREFIX")
        self._name: str = match["bucket"]
        folder = (match["prefix"] or "").strip("/")
        self._prefix = f"{folder}/" if folder else ""
        self._endpoint = endpoint
        self._with_weights = with_weights

    @property
    def repository(self) -> str:
        return f"{SCHEME}{self._name}/{self._prefix}".rstrip("/")

    @property
    def server(self) -> str:
        return self._endpoint or "the S3 endpoint"

    @property
    def address(self) -> str:
        """URI with the URL of the store. Raises errors that `failure` knows."""
        return f"{self._client.meta.endpoint_url}/{self._name}/{self._prefix}".rstrip("/")

    def listing(self) -> tuple[str, list[RemoteFile]]:
        found, listed_objects = [], 0
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=self._prefix):
            entries = page.get("Contents", ())
            # An empty page counts, too: a store could send them without end.
            listed_objects += max(len(entries), 1)
            if listed_objects > _MOST_OBJECTS:
                message = f"{self.repository} has more than {_MOST_OBJECTS} objects: name the folder of one checkpoint"
                raise FetchError("NotFound", message)
            for entry in entries:
                if is_in_checkpoint(name := entry["Key"].removeprefix(self._prefix)):
                    found.append(self._file(name, entry))
        if not found:
            raise FetchError("NotFound", f"{self.repository} has no objects: check the prefix, which ends at a folder")
        files = servable_files(self.repository, found)
        # On a Hub a commit is complete; here an upload may be in progress.
        if missing := missing_parts(file.name for file in files):
            raise FetchError(
                "NotFound",
                f"{self.repository} lacks {len(missing)} of its weight files, such as {missing[0]}: wait until the "
                "upload has ended, or upload them",
            )
        if not self._with_weights:
            files = [file for file in files if not file.name.endswith(".safetensors")]
        listed = msgspec.json.encode(sorted((file.name, file.size, file.digest) for file in files))
        return hashlib.sha256(listed).hexdigest()[:40], files

    @property
    def _place(self) -> str:
        """What follows an ETag, which alone says nothing about the objects of another bucket or store."""
        return f" in {self._client.meta.endpoint_url}/{self._name}"

    def _file(self, name: str, entry: Mapping[str, Any]) -> RemoteFile:
        size = entry["Size"]
        digest = f"{entry['ETag']}{self._place}"
        return RemoteFile(name=name, size=size, digest=digest, is_large=size >= _LARGE_BYTES, hashed=False)

    @contextmanager
    def open(self, commit: str, file: RemoteFile, first: int = 0, end: int | None = None) -> Iterator[Content]:
        """Raises ContentChanged, and errors of boto3."""
        from botocore.exceptions import ClientError

        etag = file.digest.removesuffix(self._place)
        asked: dict[str, str] = {"IfMatch": etag}
        if first or end is not None:
            asked["Range"] = f"bytes={first}-{'' if end is None else end - 1}"
        try:
            response = self._client.get_object(Bucket=self._name, Key=f"{self._prefix}{file.name}", **asked)
        except ClientError as error:
            if error.response["ResponseMetadata"].get("HTTPStatusCode") in (404, 412, 416):
                raise ContentChanged(f"{self.repository}/{file.name} changed") from error
            raise
        with closing(response["Body"]) as body:
            # Not every store knows the condition.
            if response.get("ETag", etag) != etag:
                raise ContentChanged(f"{self.repository}/{file.name} changed")
            is_part = response["ResponseMetadata"]["HTTPStatusCode"] == 206
            yield Content(first if is_part else 0, body.iter_chunks(_CHUNK_BYTES))

    def failure(self, error: Exception) -> FetchError | None:
        return classify_error(error, self.server, self._name, self.repository)

    def rate_limit_seconds(self, error: Exception) -> float:
        return _RATE_LIMIT_SECONDS

    @cached_property
    def _client(self) -> Any:
        import boto3
        from botocore.config import Config

        # At level debug they write the headers of requests, with the token of a session.
        for library in ("boto3", "botocore", "urllib3"):
            logging.getLogger(library).setLevel(logging.WARNING)
        bundle = os.environ.get("AWS_CA_BUNDLE")
        if bundle and not Path(bundle).is_file():
            raise FetchError("NotFound", f"AWS_CA_BUNDLE is {bundle}, which is not a file: correct or unset it")

        def client(**options: Any) -> Any:
            # The fetch itself tries again, and reports meanwhile why.
            config = Config(
                connect_timeout=_TIMEOUT_SECONDS,
                read_timeout=_TIMEOUT_SECONDS,
                max_pool_connections=_CONNECTIONS,
                retries={"total_max_attempts": 2, "mode": "standard"},
                user_agent_extra=f"minisgl/{__version__}",
                **options,
            )
            return session.client("s3", endpoint_url=self._endpoint, config=config)

        session = boto3.session.Session()
        found = client()
        host = urlsplit(found.meta.endpoint_url).hostname or ""
        if host.endswith(_AWS):
            return found
        # Few other stores have a host name for each bucket.
        return client(s3={"addressing_style": "path"})
