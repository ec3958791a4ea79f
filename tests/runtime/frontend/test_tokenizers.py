"""Links to tokenizer workers, with fake workers."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.frontend.server.request_record import RequestRecord
from minisgl.frontend.server.request_tracker import RequestTracker
from minisgl.frontend.server.response_stream import ResponseStream
from minisgl.frontend.tokenizers import TokenizerPool
from minisgl.wire.messages import SamplingParams
from minisgl.wire.sockets import MAX_MESSAGE_BYTES, open_socket
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    Accepted,
    Cancel,
    Finished,
    Generate,
    RequestsWait,
    SamplingDefaults,
    ServedModel,
    Texts,
    ToolCallDelta,
    WorkerState,
)
from support.frontend.fake_scheduler import STATUS, WAIT_SECONDS, card
from support.messages import generate_of

READY = WorkerState(
    version=TEXT_WIRE_VERSION,
    at=time.monotonic(),
    model=ServedModel(card=card(), epoch=(1, 1), defaults=SamplingDefaults()),
    status=None,
)


class FakeWorker:
    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self._socket = open_socket(context, zmq.DEALER)
        self._socket.connect(address)

    async def send(self, *messages: msgspec.Struct | bytes) -> None:
        for message in messages:
            await self._socket.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    async def receive(self) -> Generate | Cancel | RequestsWait:
        frame = await asyncio.wait_for(self._socket.recv(), WAIT_SECONDS)
        return msgspec.msgpack.decode(frame, type=Generate | Cancel | RequestsWait)  # type: ignore[arg-type]

    def disconnect(self) -> None:
        self._socket.close(linger=0)


class Links:
    def __init__(self, tokenizers: TokenizerPool, context: zmq.asyncio.Context, addresses: list[str]) -> None:
        self.tokenizers = tokenizers
        self._context, self._addresses = context, addresses
        self.workers = [self.connect(number) for number in range(len(addresses))]

    def connect(self, number: int) -> FakeWorker:
        return FakeWorker(self._context, self._addresses[number])

    async def submit(self) -> ResponseStream:
        record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0)
        request = generate_of(id=secrets.token_bytes(16), prompt="a", params=SamplingParams())
        return await self.tokenizers.submit(record, [request], 1)

    async def submit_many(self, prompts: list[str], tenant: str = "flood") -> ResponseStream:
        record = RequestRecord(request_id="r", method="POST", path="/", started_at=0.0, key_name=tenant)
        requests = [generate_of(id=secrets.token_bytes(16), prompt=prompt) for prompt in prompts]
        return await self.tokenizers.submit(record, requests, 1)

    async def until(self, ready: bool) -> str | None:
        async with asyncio.timeout(WAIT_SECONDS):
            while (self.tokenizers.not_ready_reason() is None) != ready:
                await asyncio.sleep(0)
        return self.tokenizers.not_ready_reason()


@pytest.fixture
async def links(tmp_path: Path) -> AsyncIterator[Links]:
    addresses = [f"ipc://{tmp_path}/{n}" for n in range(2)]
    tokenizers = TokenizerPool(addresses, 60, RequestTracker(RequestLimits()))
    tokenizers.start()
    context = zmq.asyncio.Context()
    made = Links(tokenizers, context, addresses)
    yield made
    for worker in made.workers:
        worker.disconnect()
    context.term()
    await tokenizers.close()


async def test_one_available_worker_is_enough(links: Links) -> None:
    with pytest.raises(ApiError) as raised:
        await links.submit()
    assert (raised.value.status, raised.value.code) == (503, "engine_unavailable")
    await links.workers[1].send(READY)
    await links.until(True)
    await links.submit()
    assert isinstance(await links.workers[1].receive(), Generate)


async def test_the_load_is_known_with_an_engine_or_without_any_until_the_worker_is_lost(links: Links) -> None:
    async def until(knows: bool) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while links.tokenizers.knows_load != knows:
                await asyncio.sleep(0)

    starting = msgspec.structs.replace(READY, model=None, reason="the engine loads")
    # A worker that has only begun to look engines up, and one whose engines do not answer, know nothing.
    await links.workers[0].send(starting)
    await links.workers[1].send(READY)
    await links.until(True)
    assert not links.tokenizers.knows_load
    await links.workers[0].send(msgspec.structs.replace(starting, no_engines=True))
    await until(True)
    await links.workers[0].send(READY)
    while links.tokenizers._links[0].model is None:
        await asyncio.sleep(0)
    assert links.tokenizers.knows_load, "it stays known"
    links.workers[0].disconnect()
    await until(False)
    await links.workers[1].send(msgspec.structs.replace(READY, status=STATUS))
    await until(True)


async def test_requests_are_balanced_and_stay_with_their_worker(links: Links) -> None:
    for worker in links.workers:
        await worker.send(READY)
    while not all(link.model for link in links.tokenizers._links):
        await asyncio.sleep(0)
    streams = [await links.submit() for _ in range(4)]
    received = [[(await worker.receive()).id for _ in range(2)] for worker in links.workers]
    for stream in streams:
        links.tokenizers.release(stream)
        links.tokenizers.release(stream)
    cancelled = [[await worker.receive() for _ in range(2)] for worker in links.workers]
    assert [[message.id for message in messages] for messages in cancelled] == received
    assert all(isinstance(message, Cancel) for messages in cancelled for message in messages)


async def test_deltas_are_joined_until_they_are_taken(links: Links) -> None:
    worker = links.workers[0]
    await worker.send(READY)
    await links.until(True)
    stream = await links.submit()
    request_id = (await worker.receive()).id
    end = Finished(id=request_id, reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=3)
    call = ToolCallDelta(0, "call_1", "f", "{}")
    await worker.send(
        Accepted(request_id, 1),
        Texts(ids=request_id, texts=[""], finished=[], counts=[1], reasoning={0: "why"}, token_ids={0: b"\7\0\0\0"}),
        Texts(ids=request_id, texts=["a"], finished=[], counts=[2]),
        Texts(ids=request_id, texts=["b"], finished=[end], counts=[3], tool_calls={0: [call]}),
        Texts(ids=request_id, texts=["late"], finished=[], counts=[4]),
    )
    await stream.accepted()
    while stream.is_open:
        await asyncio.sleep(0)
    assert stream.has_more
    (news,) = await stream.deltas()
    assert (news.text, news.tokens, news.finished) == ("ab", 3, end)
    assert (news.reasoning, news.tool_calls, news.token_ids) == ("why", (call,), (7,))
    assert not stream.has_more
    assert [choice.prompt_tokens for choice in stream.choices] == [1]


async def test_other_tasks_run_within_a_step_of_many_texts(links: Links) -> None:
    worker = links.workers[0]
    await worker.send(READY)
    await links.until(True)
    streams = [await links.submit() for _ in range(100)]
    received = [(await worker.receive()).id for _ in streams]
    given: list[str] = []

    def take(text: str) -> bool:
        given.append(text)
        return True

    handlers = [asyncio.create_task(stream.deltas(take)) for stream in streams]
    texts = [str(number) for number in range(100)]
    await worker.send(Texts(ids=b"".join(received), texts=texts, finished=[], counts=[1] * 100))
    seen = set()
    async with asyncio.timeout(WAIT_SECONDS):
        while len(given) < 100:
            seen.add(len(given))
            await asyncio.sleep(0)
    assert seen & set(range(1, 100))
    assert given == texts
    for handler in handlers:
        handler.cancel()


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xc1", "invalid message"),
        (Texts(ids=b"short", texts=["a"], finished=[], counts=[1]), "invalid message"),
        (Texts(ids=b"r" * 16, texts=[""], finished=[], counts=[1], token_ids={0: b"odd"}), "invalid message"),
        (msgspec.structs.replace(READY, version=TEXT_WIRE_VERSION + 7), "version"),
        (None, "was lost"),
    ],
    ids=["noise", "columns", "token ids", "version", "disconnect"],
)
async def test_a_broken_link_fails_its_requests(links: Links, message: Any, reason: str) -> None:
    worker = links.workers[0]
    await worker.send(READY)
    await links.until(True)
    stream = await links.submit()
    await worker.receive()
    if message is None:
        worker.disconnect()
    else:
        await worker.send(message)
    with pytest.raises(ApiError, match=reason) as raised:
        await stream.accepted()
    assert raised.value.status == 503
    assert reason in (await links.until(False) or "")


async def test_late_messages_of_a_lost_worker_are_ignored(links: Links) -> None:
    worker = links.workers[0]
    await worker.send(READY)
    await links.until(True)
    (link, _) = links.tokenizers._links
    late = msgspec.structs.replace(READY, at=time.monotonic())
    worker.disconnect()
    await links.until(False)
    link._on_state(late)
    assert "was lost" in (links.tokenizers.not_ready_reason() or "")
    await links.workers[1].send(msgspec.structs.replace(READY, at=time.monotonic()))
    await links.until(True)


async def test_requests_wait_anew_as_long_as_their_worker_has_no_engine(links: Links) -> None:
    """The engine that others have reported says nothing about them."""
    await links.workers[0].send(READY)
    await links.until(True)
    stream = await links.submit()
    (link, _) = links.tokenizers._links
    waited = []
    for model in (READY.model, None, None, READY.model, READY.model):
        stream.queued_since = stream.last_progress_at = 0.0
        link._on_state(msgspec.structs.replace(READY, at=time.monotonic(), model=model))
        assert stream.queued_since == stream.last_progress_at
        waited.append(stream.queued_since > 0)
    assert waited == [False, True, True, True, False]


async def test_resubmitted_requests_of_all_workers_are_counted(links: Links) -> None:
    metrics = links.tokenizers.requests.metrics
    first, second = links.tokenizers._links
    counts = []
    for link, retried in ((first, 2), (second, 1), (first, 5), (first, 5), (first, 1)):
        # The last one is from a restarted worker.
        link._on_state(msgspec.structs.replace(READY, at=time.monotonic(), retried=retried))
        counts.append(metrics.resubmitted.value)
    assert counts == [2, 3, 6, 6, 7]


async def test_a_draining_frontend_is_not_ready_and_still_serves(links: Links) -> None:
    await links.workers[0].send(READY)
    await links.until(True)
    links.tokenizers.start_draining("draining")
    assert links.tokenizers.not_ready_reason() == "draining"
    assert links.tokenizers.is_draining
    await links.submit()
    assert isinstance(await links.workers[0].receive(), Generate)


async def test_the_best_state_of_a_replica_among_workers_counts(links: Links) -> None:
    def states(routable: str, waiting: str) -> tuple[ReplicaView, ...]:
        return tuple(
            ReplicaView(
                replica=f"chat-{name}",
                revision="1",
                epoch=(1, 1),
                address=name,
                routable=name == routable,
                reason="",
                waits_for_files=name == waiting,
                running=0,
                waiting=0,
            )
            for name in ("r2", "r1", "r0")
        )

    for worker, replicas in zip(links.workers, (states("r0", "r1"), states("r1", "r2")), strict=True):
        await worker.send(msgspec.structs.replace(READY, replicas=replicas))
    while len([link for link in links.tokenizers._links if link.replicas]) < 2:
        await asyncio.sleep(0)
    found = [(one.replica, one.routable, one.waits_for_files) for one in links.tokenizers.replicas()]
    assert found == [("chat-r0", True, False), ("chat-r1", True, False), ("chat-r2", False, True)]


async def test_only_one_task_may_wait_for_a_stream(links: Links) -> None:
    await links.workers[0].send(READY)
    await links.until(True)
    stream = await links.submit()
    first = asyncio.create_task(stream.accepted())
    await asyncio.sleep(0)
    with pytest.raises(AssertionError, match="only the handler"):
        await stream.accepted()
    first.cancel()


def waiting(requests: int) -> WorkerState:
    """State of a worker without an engine, in which this many requests are parked."""
    return msgspec.structs.replace(READY, at=time.monotonic(), model=None, parked=requests)


async def test_workers_are_told_whether_requests_wait_for_an_engine(links: Links) -> None:
    first, second = links.workers
    await first.send(waiting(0), waiting(0))
    held = links.tokenizers.requests.held.hold(10, "address 127.0.0.1")
    await first.send(waiting(0), waiting(0))
    assert await first.receive() == RequestsWait(True)
    links.tokenizers.requests.held.release(held)
    await first.send(waiting(0))
    assert await first.receive() == RequestsWait(False)
    # Those in one worker wait for an engine that another one may find.
    await second.send(waiting(1))
    assert [await first.receive(), await second.receive()] == [RequestsWait(True)] * 2


@pytest.mark.parametrize("reason", ["it drains", "its model is suspended"])
async def test_no_engine_need_come_for_a_frontend_that_stops(links: Links, reason: str) -> None:
    worker = links.workers[0]
    await worker.send(waiting(1))
    assert await worker.receive() == RequestsWait(True)
    if reason == "it drains":
        links.tokenizers.start_draining("it stops")
    else:
        links.tokenizers.set_serving(False)
    await worker.send(waiting(1))
    assert await worker.receive() == RequestsWait(False)


async def test_a_restarted_worker_is_told_again(links: Links) -> None:
    await links.workers[0].send(waiting(1))
    assert await links.workers[0].receive() == RequestsWait(True)
    links.workers[0].disconnect()
    async with asyncio.timeout(WAIT_SECONDS):
        while links.tokenizers.num_held:
            await asyncio.sleep(0)
    links.workers[0] = links.connect(0)
    await links.workers[0].send(waiting(1))
    assert await links.workers[0].receive() == RequestsWait(True)


async def test_a_request_waits_for_a_few_choices_of_another_tenant_that_submits_a_thousand(links: Links) -> None:
    [worker, _] = links.workers
    await worker.send(READY)
    await links.until(True)
    floods = [asyncio.create_task(links.submit_many([f"{body} {n}" for n in range(128)])) for body in range(8)]
    await asyncio.sleep(0)
    await links.submit_many(["other"], "other")
    await asyncio.gather(*floods)
    received = [await worker.receive() for _ in range(8 * 128 + 1)]
    prompts = [message.prompt for message in received if isinstance(message, Generate)]
    assert prompts.index("other") <= 32
    assert [prompt for prompt in prompts if prompt != "other"] == [
        f"{body} {n}" for body in range(8) for n in range(128)
    ]


async def test_nothing_of_a_request_is_sent_that_has_a_choice_which_is_too_large(links: Links) -> None:
    [*_, worker] = links.workers
    await worker.send(READY)
    await links.until(True)
    with pytest.raises(ApiError, match="exceeds"):
        await links.submit_many([*map(str, range(100)), "a" * (MAX_MESSAGE_BYTES + 1)])
    # The next request of the tenant has its turn.
    await links.submit_many(["next"] * 20)
    received = await worker.receive()
    assert isinstance(received, Generate) and received.prompt == "next"
    assert links.tokenizers.requests.admission.waiting == 20


async def test_a_worker_that_is_lost_fails_a_request_that_is_submitted_in_part(links: Links) -> None:
    [worker, _] = links.workers
    await worker.send(READY)
    await links.until(True)
    begun = [asyncio.create_task(links.submit_many(["a"] * 128)) for _ in range(2)]
    while not links.tokenizers._links[0].load:
        await asyncio.sleep(0)
    links.tokenizers.fail_all("engine_unavailable", "lost")
    for task in begun:
        with pytest.raises(ApiError, match="lost"):
            await task
    assert links.tokenizers.requests.admission.waiting == 0


@pytest.mark.parametrize("kind", ["accepted", "finished"])
async def test_other_tasks_run_between_the_messages_of_a_worker_about_many_choices(links: Links, kind: str) -> None:
    [worker, _] = links.workers
    await worker.send(READY)
    await links.until(True)
    stream = await links.submit_many(["a"] * 256)
    ids = [choice.request_id for choice in stream.choices]
    ends = [Finished(id=one, reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1) for one in ids]
    if kind == "accepted":
        await worker.send(*(Accepted(one, 777) for one in ids))
    else:
        await worker.send(Texts(ids=b"".join(ids), texts=["a"] * 256, counts=[1] * 256, finished=ends))
    seen = [0]
    async with asyncio.timeout(WAIT_SECONDS):
        while seen[-1] < 256:
            await asyncio.sleep(0)
            done = sum(c.prompt_tokens == 777 if kind == "accepted" else c.finished is not None for c in stream.choices)
            seen.append(done)
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 32
