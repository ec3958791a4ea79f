"""A draining scheduler finishes accepted requests and rejects new ones."""

from __future__ import annotations

import threading
from pathlib import Path

from minisgl.config import EngineConfig
from minisgl.engine.interface import EngineLimits
from minisgl.scheduler.process import SchedulerProcessConfig, run
from support.frontend.scheduler_client import SchedulerClient
from support.numerics.kv_engine import KvEngine
from support.scheduling import EOS, VOCAB

LIMITS = EngineLimits(num_pages=512, page_size=4, max_running=2, max_model_len=900, vocab_size=VOCAB, eos_token_ids=EOS)
ANSWER = 800


def test_accepted_requests_finish_and_new_ones_are_rejected(tmp_path: Path) -> None:
    config = SchedulerProcessConfig(
        engine=EngineConfig(model="", max_step_tokens=32),
        address=f"ipc://{tmp_path}/s",
        model_name="tiny",
        replica="chat-r0",
        replica_revision="abc",
        epoch=(5, 1),
    )
    draining = threading.Event()
    thread = threading.Thread(
        target=run,
        args=(config, lambda: KvEngine(LIMITS)),
        kwargs={"ready": lambda address, card: None, "stop": threading.Event(), "draining": draining},
    )
    thread.start()
    client = SchedulerClient(config.address)
    assert (client.welcome.replica, client.welcome.revision) == ("chat-r0", "abc")
    # Long enough to run until the last request has arrived.
    taken = [client.submit(list(range(20, 30)), ANSWER) for _ in range(4)]
    client.read_until(lambda: all(client.tokens[each] for each in taken[:2]) and client.accepted.issuperset(taken))
    draining.set()
    client.read_until(lambda: client.status is not None and client.status.draining)
    late = client.submit([1, 2, 3], 4)
    client.read_until(lambda: late in client.failed)
    assert client.failed[late].code == "draining"
    client.read_until(lambda: all(each in client.finish for each in taken))
    assert [len(client.tokens[each]) for each in taken] == [ANSWER] * 4
    assert {client.finish[each] for each in taken} == {"length"}
    thread.join(60)
    assert not thread.is_alive()
    client.close()
