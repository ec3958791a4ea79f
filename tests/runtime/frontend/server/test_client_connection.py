"""Parts that are written straight to the connection equal those sent by ASGI."""

from __future__ import annotations

import asyncio
import logging

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from minisgl.frontend.server.client_connection import ClientConnection

START = {"type": "http.response.start", "status": 200, "headers": []}


class Line(asyncio.Transport):
    """Records what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def cycle(line: Line) -> RequestResponseCycle:
    return RequestResponseCycle(
        scope={"method": "POST"},  # type: ignore[typeddict-item]
        transport=line,
        flow=FlowControl(line),
        logger=logging.getLogger(),
        access_logger=logging.getLogger(),
        access_log=False,
        default_headers=[],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )


def client_of(cycle: RequestResponseCycle) -> ClientConnection:
    async def wait_flushed() -> None:
        return

    return ClientConnection(cycle, wait_flushed)


@pytest.mark.parametrize("part", [b"a", b"data: {}\n\n" * 100])
async def test_a_direct_write_has_the_same_bytes_as_a_sent_part(
    line: Line, cycle: RequestResponseCycle, part: bytes
) -> None:
    await cycle.send(START)  # type: ignore[arg-type]
    await cycle.send({"type": "http.response.body", "body": part, "more_body": True})
    assert client_of(cycle).write(str.encode, part.decode())
    _, sent, written = line.written
    assert written == sent


async def test_a_part_that_would_have_to_wait_is_not_written(line: Line, cycle: RequestResponseCycle) -> None:
    client = client_of(cycle)
    assert not client.write(str.encode, "a"), "the headers were not sent"
    await cycle.send(START)  # type: ignore[arg-type]
    cycle.flow.pause_writing()
    assert not client.write(str.encode, "a"), "the client does not read"
    cycle.flow.resume_writing()
    line.closing = True
    assert not client.write(str.encode, "a"), "the client has left"
    assert len(line.written) == 1


async def test_output_without_a_part_does_not_end_the_body(line: Line, cycle: RequestResponseCycle) -> None:
    await cycle.send(START)  # type: ignore[arg-type]
    await cycle.send({"type": "http.response.body", "body": b"a", "more_body": True})
    before = len(line.written)
    assert client_of(cycle).write(lambda _: b"", 5)
    assert len(line.written) == before
