"""Messages of external processing, with what the protocol of endpoint pickers has in them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from minisgl.gateway.endpoint_picker.definitions import ProcessingResponse
from minisgl.gateway.endpoint_picker.endpoints import parse_endpoint

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
NAMESPACE: Final = "envoy.lb"
HINT_NAMESPACE: Final = "envoy.lb.subset_hint"
"""Namespaces of metadata."""

NONE: Final = 0
STREAMED: Final = 1
BUFFERED: Final = 2
FULL_DUPLEX: Final = 4
"""Modes in which bodies are sent."""

_OVERWRITE_OR_ADD: Final = 2
"""What happens to the header of the same name."""
_PIECE_BYTES: Final = 60 << 10
"""Most bytes of a body in one message. Proxies limit them to 64 KiB."""


def body_modes(request: Any) -> tuple[int, int]:
    """Return how the bodies of request and response are sent, as the first message of a stream says. A proxy that does
    not say it is taken for one that follows the protocol."""
    if not request.HasField("protocol_config"):
        return FULL_DUPLEX, FULL_DUPLEX
    return request.protocol_config.request_body_mode, request.protocol_config.response_body_mode


def headers_of(message: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers of a message, names in lower case."""
    return [(each.key.lower().encode(), each.raw_value or each.value.encode()) for each in message.headers.headers]


def subset_hint(request: Any) -> frozenset[str] | None:
    """Return the endpoints that may be picked; None: the message does not say. What is no endpoint is left out."""
    value = _metadata(request, HINT_NAMESPACE, SUBSET)
    if value is None:
        return None
    listed = value.list_value.values if value.WhichOneof("kind") == "list_value" else ()
    return frozenset(found for each in listed if (found := parse_endpoint(each.string_value)) is not None)


def served_endpoint(request: Any) -> str | None:
    """Return the endpoint that serves the request; None: the message does not say."""
    value = _metadata(request, NAMESPACE, SERVED)
    return None if value is None else parse_endpoint(value.string_value)


def picked_with_headers(endpoints: Sequence[str], headers: Mapping[str, str], removed: Iterable[str]) -> Any:
    """Make the answer to the headers of a request: its endpoints in order, and changes of its headers."""
    response = ProcessingResponse()
    _mutate(response.request_headers.response, {**headers, DESTINATION: ",".join(endpoints)}, removed)
    _add_destination(response, endpoints)
    return response


def picked_with_body(
    endpoints: Sequence[str], headers: Mapping[str, str], removed: Iterable[str], changed: bytes | None
) -> Any:
    """Make the answer to the whole body of a request. `changed`: its other body; None: it stays as it is."""
    response = ProcessingResponse()
    own = {**headers, DESTINATION: ",".join(endpoints)}
    if changed is not None:
        own["content-length"] = str(len(changed))
        response.request_body.response.body_mutation.body = changed
    _mutate(response.request_body.response, own, removed)
    _add_destination(response, endpoints)
    return response


def unchanged_headers() -> Any:
    """Make the answer to headers of a request whose body decides about it."""
    response = ProcessingResponse()
    response.request_headers.SetInParent()
    return response


def body_pieces(body: bytes, *, ends: bool) -> Iterator[Any]:
    """Make the messages with which a request's body goes on, one after the other. `ends`: no trailers follow."""
    starts = range(0, len(body), _PIECE_BYTES) or (0,)
    for start in starts:
        response = ProcessingResponse()
        streamed = response.request_body.response.body_mutation.streamed_response
        streamed.body = body[start : start + _PIECE_BYTES]
        streamed.end_of_stream = ends and start == starts[-1]
        yield response


def request_trailers() -> Any:
    """Make the answer to a request's trailers, which stay as they are."""
    response = ProcessingResponse()
    response.request_trailers.SetInParent()
    return response


def response_headers(headers: Mapping[str, str], removed: Iterable[str]) -> Any:
    """Make the answer to the headers of a response."""
    response = ProcessingResponse()
    response.response_headers.SetInParent()
    _mutate(response.response_headers.response, headers, removed)
    return response


def response_body(given: Any, passed: bytes, mode: int) -> Any:
    """Make the answer to a piece of a response's body, of which the client gets `passed`."""
    response = ProcessingResponse()
    response.response_body.SetInParent()
    if mode == FULL_DUPLEX:
        streamed = response.response_body.response.body_mutation.streamed_response
        streamed.body, streamed.end_of_stream = passed, given.end_of_stream
    elif passed != given.body:
        mutation = response.response_body.response.body_mutation
        if passed:
            mutation.body = passed
        else:
            mutation.clear_body = True
    return response


def rest_of_response(rest: bytes) -> Any:
    """Make a last piece of a response's body, in a full-duplex stream, before the trailers that end it."""
    response = ProcessingResponse()
    response.response_body.response.body_mutation.streamed_response.body = rest
    return response


def response_trailers() -> Any:
    """Make the answer to a response's trailers, which stay as they are."""
    response = ProcessingResponse()
    response.response_trailers.SetInParent()
    return response


def immediate(status: int, headers: Mapping[str, str], body: bytes, details: str) -> Any:
    """Make the answer that ends a request. `details`: for the proxy's log."""
    response = ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = details
    for name, value in headers.items():
        _set(answer.headers, name, value)
    return response


def _metadata(request: Any, namespace: str, name: str) -> Any:
    for entry in request.metadata_context.filter_metadata:
        if entry.key == namespace and name in entry.value.fields:
            return entry.value.fields[name]
    return None


def _add_destination(response: Any, endpoints: Sequence[str]) -> None:
    response.dynamic_metadata.update({NAMESPACE: {DESTINATION: ",".join(endpoints)}})


def _mutate(common: Any, headers: Mapping[str, str], removed: Iterable[str]) -> None:
    for name, value in headers.items():
        _set(common.header_mutation, name, value)
    common.header_mutation.remove_headers.extend(removed)


def _set(mutation: Any, name: str, value: str) -> None:
    header = mutation.set_headers.add()
    header.header.key, header.header.raw_value = name, value.encode()
    header.append_action = _OVERWRITE_OR_ADD
