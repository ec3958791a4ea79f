"""A proxy that asks an endpoint picker, as Envoy does: it writes the messages of one request and reads the answers; and
gateways that are pickers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from minisgl.gateway.endpoint_picker.definitions import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from support.gateway.running import WAIT_SECONDS, RunningGateway, gateway_of, until
from support.gateway.stub_frontend import StubFrontend

CHAT = "/v1/chat/completions"
BODY = {"model": "a", "messages": [{"role": "user", "content": "Hi"}]}
ELSEWHERE = "192.0.2.1:8000"
DESTINATION = "x-gateway-destination-endpoint"
_SERVED = "x-gateway-destination-endpoint-served"
_SUBSET, _SUBSET_HINT = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)
SERVING, NOT_SERVING = 1, 2


class Exchange:
    """One stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, message: Any) -> None:
        await self.call.write(message)

    async def read(self) -> Any:
        """Return the next answer; None: the stream has ended."""
        found = await self.call.read()
        return None if found is grpc.aio.EOF else found

    async def finish(self) -> None:
        """End the stream, and wait until the picker has, too."""
        await self.call.done_writing()
        assert await self.read() is None

    async def ask(self, body: Any, path: str = CHAT, subset: Any = None, **headers: Any) -> Any:
        """Send a request, and return the first answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(request_headers(path, subset=subset, **headers))
        await self.send(request_body(content, end=True))
        return await self.read()

    async def pick(self, body: Any, path: str = CHAT, subset: Any = None, **headers: Any) -> list[str]:
        """Send a request, and return its endpoints, once its body has come back."""
        first = await self.ask(body, path, subset, **headers)
        await self.whole_body()
        return picked(first)

    async def whole_body(self) -> bytes:
        """Read the request's body until its end."""
        found: list[bytes] = []
        while True:
            streamed = (await self.read()).request_body.response.body_mutation.streamed_response
            found.append(streamed.body)
            if streamed.end_of_stream:
                return b"".join(found)


class Proxy:
    """Connection to a picker."""

    def __init__(self, channel: Any) -> None:
        self.channel = channel
        self._process = channel.stream_stream(
            "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        self._check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )

    def exchange(self) -> Exchange:
        return Exchange(self._process(timeout=WAIT_SECONDS))

    async def health(self, service: str) -> int:
        return int((await self._check(HealthCheckRequest(service=service), timeout=WAIT_SECONDS)).status)


@contextlib.asynccontextmanager
async def picker_of(*stubs: StubFrontend, **options: Any) -> AsyncIterator[tuple[RunningGateway, Proxy]]:
    """Run a gateway that is a picker in front of these frontends, and connect to it."""
    options = {"endpoint_picker_port": 0, "endpoint_picker_plaintext": True, **options}
    async with gateway_of(*stubs, **options) as gateway, proxy_of(gateway) as proxy:
        yield gateway, proxy


@contextlib.asynccontextmanager
async def proxy_of(gateway: RunningGateway) -> AsyncIterator[Proxy]:
    """Connect to the picker of a gateway, which has no TLS."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.server.endpoint_picker_port}") as channel:
        yield Proxy(channel)


def request_headers(
    path: str = CHAT,
    *,
    method: str = "POST",
    subset: Any = None,
    end: bool = False,
    mode: int = FULL_DUPLEX,
    response_mode: int = FULL_DUPLEX,
    **headers: str,
) -> Any:
    message = ProcessingRequest()
    pseudo = {":method": method, ":path": path, ":authority": "models.example.com"}
    _fill(message.request_headers, pseudo | {name.replace("_", "-"): value for name, value in headers.items()})
    message.request_headers.end_of_stream = end
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = response_mode
    if subset is not None:
        _add(message.metadata_context, _SUBSET_HINT, _SUBSET, subset)
    return message


def request_body(body: bytes, *, end: bool, subset: Any = None) -> Any:
    message = ProcessingRequest()
    message.request_body.body, message.request_body.end_of_stream = body, end
    if subset is not None:
        _add(message.metadata_context, _SUBSET_HINT, _SUBSET, subset)
    return message


def request_trailers() -> Any:
    message = ProcessingRequest()
    message.request_trailers.SetInParent()
    return message


def response_headers(status: int = 200, served: str | None = None, *, end: bool = False, **headers: str) -> Any:
    message = ProcessingRequest()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    _fill(message.response_headers, {":status": str(status)} | named)
    message.response_headers.end_of_stream = end
    if served is not None:
        _add(message.metadata_context, "envoy.lb", _SERVED, served)
    return message


def response_body(body: bytes, *, end: bool = False, served: str | None = None) -> Any:
    message = ProcessingRequest()
    message.response_body.body, message.response_body.end_of_stream = body, end
    if served is not None:
        _add(message.metadata_context, "envoy.lb", _SERVED, served)
    return message


def response_trailers() -> Any:
    message = ProcessingRequest()
    message.response_trailers.SetInParent()
    return message


def set_headers(common: Any) -> dict[str, str]:
    """Return the headers that an answer sets."""
    return {each.header.key: each.header.raw_value.decode() for each in common.header_mutation.set_headers}


def picked(response: Any) -> list[str]:
    """Return the endpoints of an answer, which are the same in the header and in the metadata."""
    kind = response.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), response
    header = set_headers(getattr(response, kind).response)[DESTINATION]
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == header
    return header.split(",")


def refused(response: Any) -> tuple[int, str]:
    """Return status and code of an immediate response."""
    assert response.WhichOneof("response") == "immediate_response", response
    error = json.loads(response.immediate_response.body)["error"]
    return response.immediate_response.status.code, error["code"]


def _fill(message: Any, headers: dict[str, str]) -> None:
    for name, value in headers.items():
        header = message.headers.headers.add()
        header.key, header.raw_value = name, value.encode()


def _add(metadata: Any, namespace: str, name: str, value: str | Sequence[str]) -> None:
    metadata.filter_metadata.add(key=namespace).value.update({name: value})


def at(stub: StubFrontend) -> str:
    """Return a frontend's endpoint."""
    return f"127.0.0.1:{stub.port}"


async def gone(gateway: RunningGateway, stub: StubFrontend) -> None:
    """Stop a frontend, and wait until the gateway knows."""
    await stub.stop()

    async def is_known() -> bool:
        return bool((await gateway.get("/v1/models")).json["data"][0]["state"] == "starting")

    await until(is_known)


async def held(gateway: RunningGateway, count: int = 1) -> bool:
    """Return whether so many requests for the model `a` wait."""
    return bool(((await gateway.demand("a")) or {}).get("held") == count)


async def idle(gateway: RunningGateway) -> bool:
    """Return whether no request for the model `a` is in progress, after some."""
    found = await gateway.demand("a")
    return bool(found and found["held"] == 0 and found["idle_seconds"])


async def shows(gateway: RunningGateway, line: str) -> bool:
    """Return whether the metrics have this text."""
    return line in await gateway.metrics()
