"""The gRPC server of an endpoint picker: external processing, and the health of the process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from minisgl.frontend.errors import ApiError, ClientDisconnected
from minisgl.frontend.server.listeners import ServerError
from minisgl.gateway.config import MAX_BODY_BYTES
from minisgl.gateway.endpoint_picker.certificate import self_signed
from minisgl.gateway.endpoint_picker.definitions import (
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from minisgl.gateway.endpoint_picker.messages import SERVICE, immediate
from minisgl.gateway.endpoint_picker.picker import Picker
from minisgl.gateway.endpoint_picker.stream import BadStream, Stream, StreamTimeout
from minisgl.gateway.models import Address

logger = logging.getLogger(__name__)

_HEALTH: Final = "grpc.health.v1.Health"
_SERVING: Final = 1
_NOT_SERVING: Final = 2
_LIVE: Final = frozenset({"", "liveness"})
_READY: Final = frozenset({"readiness", SERVICE})
"""Services whose health a client may ask for."""
_MAX_STREAMS: Final = 10_000
"""More than requests in progress, which have limits of their own."""
_FULL: Final = ApiError(429, "queue_full", f"{_MAX_STREAMS} requests are in progress; retry later")
_OPTIONS: Final = (
    # A port that is taken must be an error.
    ("grpc.so_reuseport", 0),
    # A whole body comes in one message, and so does nothing larger.
    ("grpc.max_receive_message_length", MAX_BODY_BYTES + (1 << 20)),
    # What a proxy may send before a stream reads it. Otherwise it grows with the speed of the network.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # A node that is lost closes no connections: without these, its streams would be there until their time limit.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Proxies do the same.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
)


class PickerServer:
    """Construct and `start` in the event loop."""

    def __init__(self, picker: Picker, problem: Callable[[], str]) -> None:
        """`problem` returns why no request can be processed; empty: it can."""
        self._picker = picker
        self._problem = problem
        self._streams = 0
        self.port = 0

    async def start(self, host: str, port: int, *, plaintext: bool) -> None:
        """Listen. Raises ServerError."""
        self._server = grpc.aio.server(options=_OPTIONS)
        self._server.add_generic_rpc_handlers(self._handlers())
        address = Address(host, port).netloc
        try:
            if plaintext:
                self.port = self._server.add_insecure_port(address)
            else:
                credentials = grpc.ssl_server_credentials([self_signed()])
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            message = f"cannot listen on {address}: {error}; choose another --endpoint-picker-port"
            raise ServerError("cannot_listen", message) from error
        await self._server.start()
        logger.info("endpoint picker at %s, %s", address, "without TLS" if plaintext else "with TLS")

    async def stop(self, seconds: float) -> None:
        """Accept no more streams, and end those that are left after `seconds`. A second call can only end them
        earlier."""
        await self._server.stop(seconds)

    def _handlers(self) -> tuple[Any, ...]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
        )
        return (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(_HEALTH, {"Check": check}),
        )

    async def _process(self, _: Any, context: Any) -> None:
        if self._streams >= _MAX_STREAMS:
            headers = {**_FULL.headers, "content-type": "application/json"}
            await context.write(immediate(_FULL.status, headers, _FULL.body(), f"minisgl_{_FULL.code}"))
            return
        self._streams += 1
        try:
            await Stream(self._picker, _reader(context), context.write).run()
        except BadStream as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except StreamTimeout as error:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(error))
        except ClientDisconnected:
            await context.abort(grpc.StatusCode.CANCELLED, "the stream ended before an endpoint was picked")
        except Exception:
            if context.cancelled():
                # The proxy, or its client, has left.
                return
            logger.exception("a stream of external processing failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error; see the gateway's log")
        finally:
            self._streams -= 1

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service in _LIVE:
            return HealthCheckResponse(status=_SERVING)
        if request.service in _READY:
            return HealthCheckResponse(status=_NOT_SERVING if self._problem() else _SERVING)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service[:64]!r}")
        return None


def _reader(context: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a function that returns the next message of a stream; None: there is none."""

    async def read() -> Any:
        """Raises BadStream."""
        try:
            message = await context.read()
        except DecodeError as error:
            raise BadStream(f"what was sent is no message: {error}") from None
        return None if message is grpc.aio.EOF else message

    return read
