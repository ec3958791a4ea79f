"""Requests to the API server with plain dicts. No other file calls the kubernetes client.

The client's model classes are not used: they lose every field that they do not know. Its retries never cover PATCH, and
its `call_api` raises nothing for error statuses; both are done here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from minisgl_operator.api.objects import Manifest
from minisgl_operator.api.undeclared import undeclared_fields
from minisgl_operator.render.names import FIELD_MANAGER
from minisgl_operator.shell.resources import Resource
from minisgl_operator.shell.server_clock import ServerClock

Connection: TypeAlias = Configuration
"""Address of the API server, and credentials."""

_log = logging.getLogger(__name__)

MANAGER: Final = FIELD_MANAGER
# Separate field managers, so that applying a model's status never changes fields of the others.
STATUS_MANAGER: Final = "minisgl-operator-status"
REPLACE_LISTS_MANAGER: Final = "minisgl-operator-repair"

_NAMESPACE_TERMINATING: Final = "NamespaceTerminating"
_ATTEMPTS: Final = 4
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_FIRST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 2.0
_LONGEST_RETRY_AFTER: Final = 5.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=15, sock_connect=5)
_MAX_RESPONSE: Final = 64 * 2**20
_BUSY_SECONDS: Final = 0.1
# One request that waits for a webhook does not make the server a busy one.
_LONGEST_COUNTED: Final = 0.5
_AVERAGED: Final = 16
_WATCH_SECONDS: Final = 300
# Bookmarks come every minute, unless no object of the kind has changed since the API server started.
_WATCH_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=90)
_PAGE: Final = 500


class ApiError(Exception):
    """The API server rejected a request or did not answer. `status` is the HTTP status, 0 without a response; `reason`
    and `message` are the server's, `retry_after` is in seconds. The reason is NamespaceTerminating where that is the
    cause."""

    code = "api_error"

    def __init__(self, status: int, reason: str, message: str, retry_after: float = 0) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NoConnection(Exception):
    """Address or credentials of the API server are missing."""

    code = "no_connection"


@dataclass(frozen=True)
class Page:
    """One part of a list. All parts of one list have the same `resource_version`."""

    items: list[Manifest]
    resource_version: str


async def connection(kubeconfig: Path | None = None) -> Connection:
    """Address and credentials: of the given file, else of the service account, else those that kubectl uses.

    Raises NoConnection.
    """
    found = Connection()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=found)
        else:
            path = None if kubeconfig is None else str(kubeconfig)
            await load_kube_config(config_file=path, client_configuration=found)
        # By default each request reads ~/.netrc and the proxy variables, each in a thread. The watches use neither; a
        # proxy for both is the kubeconfig's proxy-url.
        found.client_session_kwargs = {"trust_env": False}
    except (ConfigException, OSError) as error:
        raise NoConnection(
            f"no address or credentials of the API server: {error}. Set --kubeconfig, or run in a pod with the token "
            "of its service account."
        ) from error
    return found


class Client:
    """Requests with time limits, size limits and retries."""

    def __init__(self, connection: Connection, on_response: Callable[[str, int], None] | None = None) -> None:
        """`on_response` is called with method and status of every attempt."""
        self._api = ApiClient(connection)
        self._api.user_agent = MANAGER
        self._on_response = on_response
        self._clock = ServerClock()
        self._latency = 0.0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    def now(self) -> datetime:
        """The time by the API server's clock."""
        return self._clock.now()

    @property
    def server_is_busy(self) -> bool:
        """True if the last requests took the API server long. Sending more at a time would make everyone wait."""
        return self._latency > _BUSY_SECONDS

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Manifest | None:
        """The object; None if it does not exist."""
        try:
            return await self.request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def pages(
        self,
        resource: Resource,
        namespace: str | None,
        label_selector: str = "",
        field_selector: str = "",
        limit: int = _PAGE,
    ) -> AsyncIterator[Page]:
        """The list in parts of `limit` objects. The caller restarts it when its continuation has expired (410)."""
        query = {"limit": str(limit), "labelSelector": label_selector, "fieldSelector": field_selector}
        query = {name: value for name, value in query.items() if value}
        while True:
            response = await self.request("GET", resource.path(namespace), query)
            metadata = response["metadata"]
            # Items of a list have no kind.
            items = [{"apiVersion": resource.api_version, "kind": resource.kind} | item for item in response["items"]]
            yield Page(items, metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def watch(self, resource: Resource, resource_version: str) -> AsyncIterator[bytes]:
        """Changes of the whole cluster since that version, each one line of JSON, until the server ends the watch or is
        silent for long, as a lost connection is.

        Not retried. Raises ApiError, with status 410 when the version has expired.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        path = resource.path(None)
        response = await self._open("GET", path, query, None, "application/json", _WATCH_TIMEOUT)
        try:
            if response.status >= 400:
                raise _error(response, await _read(response))
            rest = b""
            async for part in response.content.iter_any():
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    yield line
                if len(rest) > _MAX_RESPONSE:
                    raise aiohttp.ClientPayloadError(f"an event is larger than {_MAX_RESPONSE} bytes")
        except TimeoutError:
            return
        except (aiohttp.ClientError, OSError) as error:
            raise _no_answer("GET", path, error) from error
        finally:
            response.close()

    async def apply(
        self,
        resource: Resource,
        manifest: Manifest,
        subresource: str | None = None,
        manager: str = MANAGER,
    ) -> Manifest:
        """Server-side apply, which is idempotent: it is safe to send it again after a lost response.

        With strict validation, a field that the server does not know is an error instead of being dropped.
        """
        metadata = manifest["metadata"]
        return await self.request(
            "PATCH",
            resource.path(metadata["namespace"], metadata["name"], subresource),
            {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"},
            manifest,
            "application/apply-patch+yaml",
        )

    async def create(self, resource: Resource, namespace: str, body: Manifest) -> Manifest:
        return await self.request("POST", resource.path(namespace), {"fieldManager": MANAGER}, body)

    async def dry_run(self, resource: Resource, namespace: str, body: Manifest) -> Manifest:
        """Let the API server check the creation of an object, including admission, without creating it. Not retried: a
        webhook may take its whole time limit."""
        query = {"fieldManager": MANAGER, "dryRun": "All"}
        return await self._once("POST", resource.path(namespace), query, body, "application/json")

    async def replace(self, resource: Resource, namespace: str, name: str, body: Manifest) -> Manifest:
        """Raises ApiError with status 409 when the object has changed since `body` was read."""
        return await self.request("PUT", resource.path(namespace, name), {"fieldManager": MANAGER}, body)

    async def merge(
        self, resource: Resource, namespace: str, name: str, body: Manifest, manager: str = MANAGER
    ) -> Manifest:
        """Merge patch: lists are replaced as a whole, whichever manager owns their items."""
        return await self.request(
            "PATCH",
            resource.path(namespace, name),
            {"fieldManager": manager},
            body,
            "application/merge-patch+json",
        )

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        propagation: str = "Background",
        grace: int | None = None,
    ) -> Manifest | None:
        """Delete the object with this uid; return it while it terminates, None when it does not exist any more.

        `grace`: seconds to terminate; None: the object's own grace period; 0: removed immediately, even if its
        containers still run.
        """
        options: Manifest = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            "preconditions": {"uid": uid},
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            response = await self.request("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status in (404, 409):
                return None
            raise
        return None if response.get("kind") == "Status" else response

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = "application/json",
    ) -> Manifest:
        """The decoded response. Raises ApiError when the server rejects the request, or after `_ATTEMPTS` failures."""
        wait = _FIRST_WAIT
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._once(method, path, query, body, content_type)
            except ApiError as error:
                if attempt == _ATTEMPTS or error.status not in (0, *_RETRIED) or undeclared_fields(error.message):
                    raise
                pause = wait * random.uniform(0.8, 1.2)
                await asyncio.sleep(max(pause, min(error.retry_after, _LONGEST_RETRY_AFTER)))
                wait = min(4 * wait, _LONGEST_WAIT)
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Manifest | None, content_type: str
    ) -> Manifest:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            response = await self._open(method, path, query, body, content_type, _TIMEOUT)
        finally:
            self._latency += (min(clock() - began, _LONGEST_COUNTED) - self._latency) / _AVERAGED
        try:
            raw = await _read(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(method, path, error) from error
        if response.status >= 400:
            raise _error(response, raw)
        decoded = _decoded(raw)
        assert isinstance(decoded, dict)
        return decoded

    async def _open(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Manifest | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        """Send a request; return the response with an unread body. Raises ApiError without a response."""
        status, sent = 0, time.monotonic()
        try:
            # The body bypasses param_serialize, which would copy it.
            method, url, headers, _, _ = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                auth_settings=["BearerToken"],
            )
            found = await self._api.call_api(method, url, headers, body, _request_timeout=timeout)
            status = found.status
            response: aiohttp.ClientResponse = found.response
            self._clock.observe(response.headers.get("Date"), sent)
            return response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _no_answer(method, path, error) from error
        finally:
            if self._on_response is not None:
                self._on_response(method, status)


def _no_answer(method: str, path: str, error: Exception) -> ApiError:
    return ApiError(0, "NoAnswer", f"{method} {path}: {error or type(error).__name__}")


def _decoded(raw: bytes) -> object:
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        # The response of a proxy need not be JSON.
        return {"message": raw[:200].decode(errors="replace")}


def _error(response: aiohttp.ClientResponse, raw: bytes) -> ApiError:
    """The server's rejection of a request."""
    decoded = _decoded(raw)
    details = decoded if isinstance(decoded, dict) else {}
    message = details.get("message") or f"HTTP {response.status}"
    return ApiError(response.status, _reason(details), message, _seconds(response.headers.get("Retry-After")))


def _reason(status: Mapping[str, Any]) -> str:
    """The server's reason; for a terminating namespace the cause, as the reason is only Forbidden."""
    causes = (status.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == _NAMESPACE_TERMINATING for cause in causes):
        return _NAMESPACE_TERMINATING
    return str(status.get("reason") or "Unknown")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _MAX_RESPONSE:
            response.close()
            raise aiohttp.ClientPayloadError(f"the response is larger than {_MAX_RESPONSE} bytes")
        parts.append(part)
    return b"".join(parts)


def _seconds(header: str | None) -> float:
    """Value of Retry-After, which the API server always gives in seconds."""
    try:
        return max(float(header or 0), 0)
    except ValueError:
        return 0
