"""Turns of the tenants whose prompts wait to be encoded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl.router.encode_queue import BATCH, BATCH_BYTES, MOST_CHOICES, EncodeQueue
from minisgl.wire.text import Encode, Generate
from support.messages import generate_of


def request(tenant: str, number: int, prompt: str | None = None) -> Generate:
    name = f"{tenant} {number}"
    return generate_of(id=name.encode().ljust(16), prompt=prompt or name, tenant=tenant.encode())


def test_a_tenant_waits_for_one_message_of_another_that_has_many() -> None:
    queue = EncodeQueue()
    for number in range(1000):
        queue.add(100, request("flood", number))
    queue.take_batch()
    queue.add(100, request("other", 0))
    queue.add(100, Encode(id=b"question".ljust(16)))
    batch = queue.take_batch()
    assert len(batch) == BATCH
    assert [getattr(message, "tenant", b"") for message in batch[:3]] == [b"flood", b"other", b""]


def test_choices_of_one_prompt_stay_together() -> None:
    queue = EncodeQueue()
    for number in range(MOST_CHOICES + 1):
        queue.add(10, request("many", number, "the same"))
    queue.add(10, request("many", MOST_CHOICES + 1))
    assert [len(queue.take_batch()) for _ in range(2)] == [MOST_CHOICES, 2]
    assert not queue


def test_a_batch_ends_behind_a_long_message() -> None:
    queue = EncodeQueue()
    for number in range(3):
        queue.add(BATCH_BYTES, request("long", number))
    assert [len(queue.take_batch()) for _ in range(3)] == [1, 1, 1]
    assert queue.only() is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, BATCH_BYTES)), max_size=100))
def test_nothing_is_lost_and_each_tenant_is_served_in_order(added: list[tuple[str, int]]) -> None:
    queue = EncodeQueue()
    expected: dict[bytes, list[Generate]] = {}
    for number, (tenant, size) in enumerate(added):
        message = request(tenant, number)
        queue.add(size, message)
        expected.setdefault(message.tenant, []).append(message)
    taken: dict[bytes, list[Generate]] = {}
    while queue:
        for message in queue.take_batch():
            assert isinstance(message, Generate)
            taken.setdefault(message.tenant, []).append(message)
    assert taken == expected
