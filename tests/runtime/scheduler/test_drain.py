"""A draining scheduler finishes accepted requests and rejects new ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits
from minisgl.scheduler.process import SchedulerProcessConfig, run
from minisgl.wire.messages import EndDrain
from support.frontend.scheduler_client import SchedulerClient
from support.numerics.kv_engine import KvEngine
from support.scheduling import EOS, VOCAB

LIMITS = EngineLimits(
    num_pages=8192, page_size=4, max_running=2, max_model_len=9000, vocab_size=VOCAB, eos_token_ids=EOS
)
ANSWER, LONG = 800, 8900


class Drained:
    """A scheduler that drains once `draining` is set."""

    def __init__(self, path: Path) -> None:
        self.config = SchedulerProcessConfig(
            engine=EngineConfig(model="", max_step_tokens=32),
            address=f"ipc://{path}/s",
            model_name="tiny",
            replica="chat-r0",
            replica_revision="abc",
            epoch=(5, 1),
        )
        self.draining, self._stop = threading.Event(), threading.Event()
        self.thread = threading.Thread(
            target=run,
            args=(self.config, lambda: KvEngine(LIMITS)),
            kwargs={"ready": lambda address, card: None, "stop": self._stop, "draining": self.draining},
        )
        self.thread.start()

    def client(self) -> SchedulerClient:
        return SchedulerClient(self.config.address)

    def submit(self, client: SchedulerClient, count: int, max_tokens: int = ANSWER) -> list[bytes]:
        """Submit requests, long enough to run until the last message has arrived; all are accepted."""
        taken = [client.submit(list(range(20, 30)), max_tokens) for _ in range(count)]
        client.read_until(lambda: any(client.tokens[each] for each in taken) and client.accepted.issuperset(taken))
        return taken

    def close(self) -> None:
        self._stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Drained]:
    made = Drained(tmp_path)
    yield made
    made.close()


def test_accepted_requests_finish_and_new_ones_are_rejected(scheduler: Drained) -> None:
    client = scheduler.client()
    assert (client.welcome.replica, client.welcome.revision) == ("chat-r0", "abc")
    taken = scheduler.submit(client, 4)
    scheduler.draining.set()
    client.read_until(lambda: client.status is not None and client.status.draining)
    late = client.submit([1, 2, 3], 4)
    client.read_until(lambda: late in client.failed)
    assert client.failed[late].code == "draining"
    client.read_until(lambda: all(each in client.finish for each in taken))
    assert [len(client.tokens[each]) for each in taken] == [ANSWER] * 4
    assert {client.finish[each] for each in taken} == {"length"}
    scheduler.thread.join(60)
    assert not scheduler.thread.is_alive()
    client.close()


def test_a_client_may_end_the_drain_of_all(scheduler: Drained) -> None:
    client, other = scheduler.client(), scheduler.client()
    # Both rows are in use, and a third request waits.
    scheduler.submit(client, 2, LONG)
    waiting = other.submit(list(range(20, 30)), LONG)
    other.read_until(lambda: waiting in other.accepted)
    scheduler.draining.set()
    client.read_until(lambda: client.status is not None and client.status.draining)
    other.read_until(lambda: other.status is not None and other.status.draining)
    client.send(EndDrain())
    scheduler.thread.join(60)
    assert not scheduler.thread.is_alive()
    for each in (client, other):
        each.read_rest()
        assert not each.finish and not each.failed
        each.close()


def test_without_a_drain_none_ends(scheduler: Drained) -> None:
    client = scheduler.client()
    client.send(EndDrain())
    (taken,) = scheduler.submit(client, 1)
    client.read_until(lambda: taken in client.finish)
    assert len(client.tokens[taken]) == ANSWER
    client.close()
