"""Messages of external processing as proxies write and read them: bytes of the code that protoc generates from Envoy's
definitions."""

from __future__ import annotations

from typing import Any

import pytest

from minisgl.gateway.endpoint_picker import messages
from minisgl.gateway.endpoint_picker.definitions import HealthCheckRequest, HealthCheckResponse, ProcessingRequest

ENDPOINTS = ["10.0.0.1:8000"]


def decoded(text: str) -> Any:
    return ProcessingRequest.FromString(bytes.fromhex(text))


def test_headers_of_a_request_are_read_without_what_the_picker_does_not_know() -> None:
    """The message also has attributes, typed metadata and a third field of the protocol's configuration."""
    message = decoded(
        "12370a330a0f0a073a6d6574686f641a04504f53540a180a053a706174681a0f2f76312f636f6d706c6574696f6e730a060a01611201"
        "62180142730a670a14656e766f792e6c622e7375627365745f68696e74124f0a4d0a25782d676174657761792d64657374696e617469"
        "6f6e2d656e64706f696e742d737562736574122432220a0f1a0d31302e302e302e313a383030300a0f1a0d31302e302e302e323a3830"
        "303012080a017412030a01784a320a1b656e766f792e66696c746572732e687474702e6578745f70726f6312130a110a0a7265717565"
        "73742e696412031a01315a06080410021801"
    )
    assert message.WhichOneof("request") == "request_headers"
    found = messages.headers_of(message.request_headers)
    assert found == [(b":method", b"POST"), (b":path", b"/v1/completions"), (b"a", b"b")]
    assert message.request_headers.end_of_stream and not message.observability_mode
    assert messages.subset_hint(message) == {"10.0.0.1:8000", "10.0.0.2:8000"}
    assert messages.body_modes(message) == (messages.FULL_DUPLEX, messages.BUFFERED)


def test_the_endpoint_that_serves_is_read() -> None:
    message = decoded(
        "1a120a100a0e0a073a7374617475731a0332303042480a460a08656e766f792e6c62123a0a380a25782d676174657761792d64657374"
        "696e6174696f6e2d656e64706f696e742d736572766564120f1a0d31302e302e302e323a38303030"
    )
    assert messages.headers_of(message.response_headers) == [(b":status", b"200")]
    assert messages.served_endpoint(message) == "10.0.0.2:8000"
    assert messages.subset_hint(message) is None


def test_bodies_and_trailers_are_read() -> None:
    message = decoded("22060a027b7d10015001")
    assert (message.request_body.body, message.request_body.end_of_stream) == (b"{}", True)
    assert message.observability_mode
    assert messages.body_modes(message) == (messages.FULL_DUPLEX, messages.FULL_DUPLEX), "unless the proxy says"
    assert decoded("2a030a0178").response_body.body == b"x"
    assert decoded("32070a050a030a0174").WhichOneof("request") == "request_trailers"
    assert decoded("3a00").WhichOneof("request") == "response_trailers"


@pytest.mark.parametrize(
    ("message", "encoded"),
    [
        (
            messages.picked_with_headers(ENDPOINTS, {}, ["authorization"]),
            "0a480a4612440a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31302e302e302e31"
            "3a383030301802120d617574686f72697a6174696f6e42430a410a08656e766f792e6c6212352a330a310a1e782d676174657761"
            "792d64657374696e6174696f6e2d656e64706f696e74120f1a0d31302e302e302e313a38303030",
        ),
        (
            messages.picked_with_body(ENDPOINTS, {}, [], b"{}"),
            "1a580a56124e0a330a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0d31302e302e302e31"
            "3a3830303018020a170a130a0e636f6e74656e742d6c656e6774681a013218021a040a027b7d42430a410a08656e766f792e6c62"
            "12352a330a310a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e74120f1a0d31302e302e302e313a38"
            "303030",
        ),
        (next(messages.body_pieces(b"{}", ends=True)), "1a0c0a0a1a081a060a027b7d1001"),
        (messages.response_headers({"a": "b"}, ["c"]), "12130a11120f0a0a0a060a01611a01621802120163"),
        (messages.response_body(decoded("2a030a0178").response_body, b"", messages.STREAMED), "22060a041a021001"),
        (messages.request_trailers(), "2a00"),
        (messages.response_trailers(), "3200"),
        (
            messages.immediate(503, {"retry-after": "1"}, b"{}", "minisgl_x"),
            "3a2c0a0308f70312160a140a100a0b72657472792d61667465721a013118021a027b7d2a096d696e6973676c5f78",
        ),
    ],
)
def test_answers_are_written(message: Any, encoded: str) -> None:
    assert message.SerializeToString(deterministic=True).hex() == encoded


def test_health_checks_have_one_field_each() -> None:
    assert HealthCheckRequest.FromString(b"\x0a\x01x").service == "x"
    assert HealthCheckResponse(status=1).SerializeToString() == b"\x08\x01"


def test_a_long_body_goes_on_in_pieces() -> None:
    body = bytes(range(256)) * 1000
    answers = messages.body_pieces(body, ends=True)
    pieces = [each.request_body.response.body_mutation.streamed_response for each in answers]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) < 1 << 16 for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]
