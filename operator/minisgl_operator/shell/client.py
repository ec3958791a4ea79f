"""The API server, in plain dicts. Nothing else calls the kubernetes client.

Models of that client are not used: a response that passes through one loses every field that it does not know.
The client's own retries never cover PATCH, and its `call_api` raises nothing for an error's status; both are done here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from minisgl_operator.shell.resources import Resource

Object = dict[str, Any]
Connection: TypeAlias = Configuration
"""Where the API server is, and who calls it."""

_log = logging.getLogger(__name__)

MANAGER: Final = "minisgl-operator"
# A second name, so that applying a model's status never touches what the first one owns.
STATUS_MANAGER: Final = "minisgl-operator-status"
REPAIR_MANAGER: Final = "minisgl-operator-repair"

_NAMESPACE_TERMINATING: Final = "NamespaceTerminating"
_ATTEMPTS: Final = 4
_RETRIED: Final = frozenset({429, 500, 502, 503, 504})
_FIRST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 2.0
_LONGEST_RETRY_AFTER: Final = 5.0
_TIMEOUT: Final = aiohttp.ClientTimeout(total=15, sock_connect=5)
_MAX_RESPONSE: Final = 64 * 2**20
_PAGE: Final = 500


class ApiError(Exception):
    """The API server refused or did not answer. `status` is that of HTTP, 0 without an answer; `reason` and
    `message` are the server's own; that a namespace is being deleted is a reason of its own, NamespaceTerminating."""

    code = "api_error"

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class NoConnection(Exception):
    """Nothing says where the API server is and who calls."""

    code = "no_connection"


@dataclass(frozen=True)
class Page:
    """One part of a list. All parts of one list are of the same `resource_version`."""

    items: list[Object]
    resource_version: str


async def connection(kubeconfig: Path | None = None) -> Connection:
    """Who and where to call: the given file, else the pod's service account, else what kubectl would use.

    Raises NoConnection.
    """
    found = Connection()
    try:
        if kubeconfig is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=found)
        else:
            path = None if kubeconfig is None else str(kubeconfig)
            await load_kube_config(config_file=path, client_configuration=found)
        # By default each request looks for ~/.netrc and for proxies in the environment, in a thread for either. The
        # watches know neither; a proxy for both is the kubeconfig's proxy-url.
        found.client_session_kwargs = {"trust_env": False}
    except (ConfigException, OSError) as error:
        raise NoConnection(
            f"Cannot find out where the API server is: {error}. Give --kubeconfig, or run in a pod that has the token "
            "of its service account."
        ) from error
    return found


class Client:
    """Requests with time limits, size limits and retries."""

    def __init__(self, connection: Connection, on_answer: Callable[[str, int], None] | None = None) -> None:
        """`on_answer` hears the method and status of every attempt."""
        self._api = ApiClient(connection)
        self._api.user_agent = MANAGER
        self._on_answer = on_answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

    async def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """None when there is no such object."""
        try:
            return await self.request("GET", resource.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def pages(
        self, resource: Resource, namespace: str | None, label_selector: str = "", field_selector: str = ""
    ) -> AsyncIterator[Page]:
        """The list in parts. An expired continuation (410) is the caller's to begin again."""
        query = {"limit": str(_PAGE), "labelSelector": label_selector, "fieldSelector": field_selector}
        query = {name: value for name, value in query.items() if value}
        while True:
            answer = await self.request("GET", resource.path(namespace), query)
            metadata = answer["metadata"]
            # A list's items do not say what they are.
            items = [{"apiVersion": resource.api_version, "kind": resource.kind} | item for item in answer["items"]]
            yield Page(items, metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            query["continue"] = metadata["continue"]

    async def apply(
        self,
        resource: Resource,
        manifest: Object,
        subresource: str | None = None,
        manager: str = MANAGER,
    ) -> Object:
        """Server-side apply, so the same call may be sent twice: a lost answer is no trouble.

        Strict validation turns a field that the server does not know into an error instead of dropping it.
        """
        metadata = manifest["metadata"]
        return await self.request(
            "PATCH",
            resource.path(metadata["namespace"], metadata["name"], subresource),
            {"fieldManager": manager, "force": "true", "fieldValidation": "Strict"},
            manifest,
            "application/apply-patch+yaml",
        )

    async def create(self, resource: Resource, namespace: str, body: Object) -> Object:
        return await self.request("POST", resource.path(namespace), {"fieldManager": MANAGER}, body)

    async def replace(self, resource: Resource, namespace: str, name: str, body: Object) -> Object:
        """409 when the object changed since `body` was read."""
        return await self.request("PUT", resource.path(namespace, name), {"fieldManager": MANAGER}, body)

    async def merge(
        self, resource: Resource, namespace: str, name: str, body: Object, manager: str = MANAGER
    ) -> Object:
        """A merge patch: lists are replaced as a whole, whoever owns their items."""
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
    ) -> Object | None:
        """What is left of the object: None when it is gone, was gone, or is another one by now. `grace`: seconds that
        it gets to end; None: what it asks for itself, 0: gone at once, whatever still runs."""
        options: Object = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": propagation,
            "preconditions": {"uid": uid},
        }
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            answer = await self.request("DELETE", resource.path(namespace, name), body=options)
        except ApiError as error:
            if error.status in (404, 409):
                return None
            raise
        return None if answer.get("kind") == "Status" else answer

    async def request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """The decoded answer. Raises ApiError once the server said no, or failed `_ATTEMPTS` times in a row."""
        wait = _FIRST_WAIT
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._once(method, path, query, body, content_type)
            except _Failure as failure:
                if attempt == _ATTEMPTS or failure.error.status not in (0, *_RETRIED):
                    raise failure.error from None
                pause = wait * random.uniform(0.8, 1.2)
                await asyncio.sleep(max(pause, min(failure.retry_after, _LONGEST_RETRY_AFTER)))
                wait = min(4 * wait, _LONGEST_WAIT)
        raise AssertionError("unreachable")

    async def _once(
        self, method: str, path: str, query: Mapping[str, str] | None, body: Object | None, content_type: str
    ) -> Object:
        status = 0
        try:
            # The body goes past param_serialize, which would copy it.
            method, url, headers, _, _ = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(method, url, headers, body, _request_timeout=_TIMEOUT)
            status = response.status
            raw = await _read(response.response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Failure(ApiError(0, "NoAnswer", f"{method} {path}: {error or type(error).__name__}")) from error
        finally:
            if self._on_answer is not None:
                self._on_answer(method, status)
        try:
            answer = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            # A proxy in between speaks no JSON.
            answer = {"message": raw[:200].decode(errors="replace")}
        if status < 400:
            assert isinstance(answer, dict)
            return answer
        refusal = answer if isinstance(answer, dict) else {}
        refused = ApiError(status, _reason(refusal), refusal.get("message") or f"HTTP {status}")
        raise _Failure(refused, _seconds(response.headers.get("Retry-After")))


class _Failure(Exception):
    """One attempt's end."""

    def __init__(self, error: ApiError, retry_after: float = 0) -> None:
        super().__init__(error)
        self.error = error
        self.retry_after = retry_after


def _reason(refusal: Mapping[str, Any]) -> str:
    """The server's reason; for a namespace that is being deleted, which is Forbidden like much else, the cause."""
    causes = (refusal.get("details") or {}).get("causes") or ()
    if any(cause.get("reason") == _NAMESPACE_TERMINATING for cause in causes):
        return _NAMESPACE_TERMINATING
    return str(refusal.get("reason") or "Unknown")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _MAX_RESPONSE:
            response.close()
            raise aiohttp.ClientPayloadError(f"the answer is larger than {_MAX_RESPONSE} bytes")
        parts.append(part)
    return b"".join(parts)


def _seconds(header: str | None) -> float:
    """Retry-After; the API server always writes seconds."""
    try:
        return max(float(header or 0), 0)
    except ValueError:
        return 0
