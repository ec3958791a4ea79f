"""A worker between a frontend and the replicas of a model, each a pod with its own address."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.router import discovery
from minisgl.router.config import EngineDiscovery, TokenizerConfig
from minisgl.router.worker import Worker
from minisgl.wire.messages import Abort, Ack, EndDrain, Failed, Flush, Flushed, FromScheduler, SamplingParams, Submit
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import NOT_TAKEN, Accepted, Cancel, RequestsWait, Texts, WorkerState
from support.cluster.fake_pods import Pod, Pods
from support.frontend.fake_frontend import FakeFrontend
from support.frontend.fake_scheduler import WAIT_SECONDS, answer_with, row
from support.tiny_tokenizers import CHATML, byte_level, write_directory

TOKENIZER = byte_level()
OTHER = byte_level(("<|im_start|>", "<|im_end|>"))
NEXT_EPOCH = (1_700_000_000_000, 2)


def answering(text: str) -> Callable[[Submit], list[FromScheduler]]:
    return answer_with(TOKENIZER.encode(text).ids)


def accept_only(submit: Submit) -> list[FromScheduler]:
    return [Ack(submit.id)]


class Cluster:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        write_directory(self.model, TOKENIZER, chat_template=CHATML)
        self.pods = Pods()
        self.frontend = FakeFrontend(f"ipc://{path}/frontend")
        self.worker: Worker | None = None
        self._thread: threading.Thread | None = None

    def start_worker(self, **changes: Any) -> None:
        engines = EngineDiscovery(
            host="chat-leaders",
            scheduler_port=self.pods.scheduler_port,
            control_port=self.pods.control_port,
            cache=str(self.path / "cache"),
        )
        config = TokenizerConfig(engines=engines, frontend_address=f"ipc://{self.path}/frontend", **changes)
        self.worker = Worker(config, self.pods.resolve)
        self._thread = threading.Thread(target=self.worker.serve)
        self._thread.start()

    def wait_for(self, matches: Callable[[WorkerState], bool]) -> WorkerState:
        return self.frontend.wait_for(WorkerState, matches)

    def wait_until_routable(self, *numbers: int) -> WorkerState:
        """Exactly these replicas can take requests."""
        wanted = {f"chat-r{number}" for number in numbers}
        return self.wait_for(lambda state: {one.replica for one in state.replicas if one.routable} == wanted)

    def close(self) -> None:
        if self.worker is not None and self._thread is not None:
            self.worker.stop()
            self._thread.join(WAIT_SECONDS)
            assert not self._thread.is_alive()
        self.frontend.close()
        self.pods.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 0.05)
    made = Cluster(tmp_path)
    yield made
    made.close()


def state_of(state: WorkerState, number: int) -> ReplicaView:
    return next(one for one in state.replicas if one.replica == f"chat-r{number}")


def test_replicas_are_discovered_and_their_tokenizer_files_fetched_once(cluster: Cluster) -> None:
    cluster.start_worker(names=("a", "b"))
    unresolved = cluster.wait_for(lambda state: "cannot be resolved" in state.reason)
    assert (unresolved.model, unresolved.replicas, unresolved.no_engines) == (None, (), True)
    pods = [cluster.pods.start(number, cluster.model, answering("xyz")) for number in (0, 1)]
    state = cluster.wait_until_routable(0, 1)
    assert state.model is not None and not state.no_engines
    assert (state.model.card.name, state.model.names) == ("a", ("a", "b"))
    first = state_of(state, 0)
    assert (first.address, first.revision, first.epoch) == (pods[0].address, "0123456789", (1_700_000_000_000, 1))
    names = {f"/files/{name}" for name in pods[0].model.tokenizer_hashes}
    assert {path for pod in pods for path in pod.files.requests} == names
    assert sum(len(pod.files.requests) for pod in pods) == len(names)
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(1))[0] == "xyz"


@pytest.mark.parametrize(
    ("error", "none"), [(socket.EAI_NONAME, True), (socket.EAI_NODATA, True), (socket.EAI_AGAIN, False)]
)
def test_only_an_answer_of_the_name_server_says_that_there_is_no_engine(error: int, none: bool) -> None:
    def resolve(_: str) -> frozenset[str]:
        raise socket.gaierror(error, "said")

    with pytest.raises(OSError, match="chat-leaders cannot be resolved") as raised:
        discovery.look_up("chat-leaders", 1, resolve)
    assert isinstance(raised.value, discovery.NoEngines) == none


def test_without_any_engine_requests_are_not_taken(cluster: Cluster) -> None:
    cluster.start_worker()
    cluster.wait_for(lambda state: state.model is None)
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(1))[1].code == NOT_TAKEN


def test_a_missing_dns_record_closes_no_connection(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, answering("xyz"))
    cluster.start_worker()
    cluster.wait_until_routable(0)
    cluster.pods.addresses.clear()
    assert cluster.pods.looked_up_in_vain.wait(WAIT_SECONDS)
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(1))[0] == "xyz"
    pod.kill_engine()
    cluster.wait_for(lambda state: not state.replicas)


def test_the_load_is_spread(cluster: Cluster) -> None:
    pods = [cluster.pods.start(number, cluster.model, accept_only) for number in range(3)]
    cluster.start_worker()
    cluster.wait_until_routable(0, 1, 2)
    for number in range(9):
        cluster.frontend.generate(number)
        cluster.frontend.wait_for(Accepted)
    assert [len(pod.scheduler.received(Submit)) for pod in pods] == [3, 3, 3]


def test_prompts_with_one_prefix_go_to_one_replica(cluster: Cluster) -> None:
    pods = [cluster.pods.start(number, cluster.model, answering("x")) for number in range(3)]
    cluster.start_worker()
    cluster.wait_until_routable(0, 1, 2)
    for number in range(6):
        request = cluster.frontend.generate(number, "a long beginning that all have in common " * 4 + str(number))
        cluster.frontend.wait_for_end(request)
    assert sorted(len(pod.scheduler.received(Submit)) for pod in pods) == [0, 0, 6]


def start_two_replicas(cluster: Cluster) -> tuple[Pod, Pod, bytes, bytes]:
    """The first replica has two requests, one without and one with output; the second answers every request with
    "xyz"."""
    first = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    silent, streaming = cluster.frontend.generate(1), cluster.frontend.generate(2)
    submits = {submit.id: submit for submit in first.scheduler.wait_for(Submit, 2)}
    first.scheduler.send(row(streaming, 0, TOKENIZER.encode("x").ids[0]), to=submits[streaming])
    cluster.frontend.wait_for(Texts)
    second = cluster.pods.start(1, cluster.model, answering("xyz"))
    cluster.wait_until_routable(0, 1)
    return first, second, silent, streaming


def test_after_a_loss_requests_go_on_at_another_replica(cluster: Cluster) -> None:
    first, second, silent, streaming = start_two_replicas(cluster)
    first.kill_engine()
    ends = cluster.frontend.wait_for_ends(silent, streaming)
    assert (ends[streaming][1].completion_tokens, ends[streaming][1].continued) == (3, 1)
    assert (ends[silent][0], ends[silent][1].continued) == ("xyz", 0)
    # Each attempt has its own identifier, so messages of the first replica cannot be mixed up with those of the second.
    assert second.scheduler.received(Submit)[0].id != silent
    assert cluster.wait_for(lambda state: state.retried > 1).retried == 2


def start_one_replica(cluster: Cluster) -> tuple[Pod, bytes]:
    """It has a request without output."""
    first = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    first.scheduler.wait_for(Submit)
    return first, request


def test_after_a_loss_a_replica_that_was_not_known_yet_is_looked_up_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 3600.0)
    first, request = start_one_replica(cluster)
    cluster.pods.start(1, cluster.model, answering("xyz"))
    first.kill_engine()
    assert cluster.frontend.wait_for_end(request)[0] == "xyz"


def test_addresses_are_looked_up_until_a_waiting_request_has_a_replica(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "LOOKUP_SECONDS", 3600.0)
    monkeypatch.setattr(discovery, "SOON_SECONDS", 0.01)
    first, request = start_one_replica(cluster)
    cluster.pods.addresses.clear()
    first.kill_engine()
    assert cluster.pods.looked_up_in_vain.wait(WAIT_SECONDS)
    cluster.pods.start(1, cluster.model, answering("xyz"))
    assert cluster.frontend.wait_for_end(request)[0] == "xyz"


def test_messages_sent_before_a_connection_was_lost_are_read(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, answering("xyz"), max_model_len=2048)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1, params=SamplingParams(max_tokens=1500))
    pod.scheduler.wait_for(Submit)
    pod.scheduler.close(linger_ms=10_000)
    text, end = cluster.frontend.wait_for_end(request)
    assert (text, end.reason) == ("xyz" * 500, "length")


def test_a_request_waits_for_the_next_epoch_and_is_accepted_once(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    cluster.frontend.wait_for(Accepted)
    pod.kill_engine()
    cluster.wait_until_routable()
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(2))[1].code == NOT_TAKEN
    pod.start_engine(answering("xyz"), NEXT_EPOCH)
    assert cluster.frontend.wait_for_end(request)[0] == "xyz"
    assert not cluster.frontend.accepted


def test_a_new_epoch_on_an_open_connection_resubmits_earlier_requests(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    cluster.frontend.wait_for(Accepted)
    pod.scheduler.answer = answering("xyz")
    pod.scheduler.send(msgspec.structs.replace(pod.scheduler.welcome, epoch=NEXT_EPOCH))
    assert cluster.frontend.wait_for_end(request)[0] == "xyz"


def test_a_worker_that_an_engine_has_dropped_connects_again(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    cluster.frontend.wait_for(Accepted)
    pod.scheduler.answer = answering("xyz")
    pod.scheduler.send(Failed(b"", "client_dropped", "it does not read what it asked for"))
    assert cluster.frontend.wait_for_end(request)[0] == "xyz"


def test_a_request_waits_no_longer_than_the_queue_timeout(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker(queue_seconds=0.2)
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    cluster.frontend.wait_for(Accepted)
    pod.kill_engine()
    _, failed = cluster.frontend.wait_for_end(request)
    assert (failed.code, failed.message) == ("engine_unavailable", "no engine could take the request for 0.2 s; retry")


@pytest.mark.parametrize("code", ["queue_full", "draining"])
def test_a_refused_request_is_resubmitted_to_another_replica(cluster: Cluster, code: str) -> None:
    refused = threading.Event()

    def refuse_first(submit: Submit) -> list[FromScheduler]:
        if refused.is_set():
            return list(answering("xyz")(submit))
        refused.set()
        return [Failed(submit.id, code, "not here")]

    pods = [cluster.pods.start(number, cluster.model, refuse_first) for number in (0, 1)]
    cluster.start_worker()
    cluster.wait_until_routable(0, 1)
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(1))[0] == "xyz"
    assert [len(pod.scheduler.received(Submit)) for pod in pods] == [1, 1]


def test_a_request_fails_when_all_queues_are_full(cluster: Cluster) -> None:
    for number in (0, 1):
        cluster.pods.start(number, cluster.model, lambda submit: [Failed(submit.id, "queue_full", "too many")])
    cluster.start_worker()
    cluster.wait_until_routable(0, 1)
    _, failed = cluster.frontend.wait_for_end(cluster.frontend.generate(1))
    assert (failed.code, failed.message) == ("queue_full", "too many")


def test_a_draining_replica_keeps_requests_with_output_and_loses_those_without(cluster: Cluster) -> None:
    first, _, silent, streaming = start_two_replicas(cluster)
    first.drain()
    assert cluster.frontend.wait_for_end(silent)[0] == "xyz"
    assert first.scheduler.wait_for(Abort) == [Abort(silent)]
    # Tokens that it computed before the abort arrived are ignored.
    first.scheduler.send(row(silent, 0, 5), row(streaming, 1, TOKENIZER.encode("y").ids[0], "stop"))
    assert cluster.frontend.wait_for_end(streaming)[1].completion_tokens == 2
    assert state_of(cluster.wait_until_routable(1), 0).reason == "it is draining"


def test_a_single_draining_replica_finishes_its_requests(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    (submit,) = pod.scheduler.wait_for(Submit)
    pod.drain()
    cluster.wait_until_routable()
    pod.scheduler.send(row(submit.id, 0, TOKENIZER.encode("x").ids[0], "length"))
    assert cluster.frontend.wait_for_end(request)[1].completion_tokens == 1


def test_a_drain_ends_early_if_requests_wait_for_the_next_replica(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.router.drain_ends.END_DRAIN_SECONDS", 0.1)
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    (submit,) = pod.scheduler.wait_for(Submit)
    pod.scheduler.send(row(submit.id, 0, TOKENIZER.encode("x").ids[0]))
    pod.drain()
    cluster.wait_until_routable()
    cluster.frontend.send(RequestsWait(True))
    pod.scheduler.wait_for(EndDrain)
    pod.kill()
    cluster.pods.start(1, cluster.model, answering("xyz"))
    _, end = cluster.frontend.wait_for_end(request)
    assert (end.completion_tokens, end.continued) == (3, 1)
    assert len(pod.scheduler.received(EndDrain)) == 1


def test_a_request_that_kills_engines_is_not_sent_to_a_third_one(cluster: Cluster) -> None:
    pods = [cluster.pods.start(number, cluster.model, accept_only) for number in range(3)]
    cluster.start_worker()
    cluster.wait_until_routable(0, 1, 2)
    request = cluster.frontend.generate(1)
    for _ in range(2):
        owner = _wait_for_owner(pods)
        owner.kill_engine()
        pods.remove(owner)
    _, failed = cluster.frontend.wait_for_end(request)
    assert "second engine to be lost" in failed.message
    assert not pods[0].scheduler.received(Submit)


def _wait_for_owner(pods: list[Any]) -> Any:
    deadline = threading.Event()
    for _ in range(int(WAIT_SECONDS / 0.01)):
        for pod in pods:
            if pod.scheduler.received(Submit):
                return pod
        deadline.wait(0.01)
    raise AssertionError("no replica has received the request")


def test_a_silent_replica_gets_no_new_requests(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.router.engine_source.STALE_SECONDS", 0.5)
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.pods.start(1, cluster.model, answering("xyz"))
    cluster.start_worker()
    cluster.wait_until_routable(0, 1)
    pod.scheduler.sends_status = False
    state = cluster.wait_until_routable(1)
    assert "sent nothing" in state_of(state, 0).reason
    pod.scheduler.sends_status = True
    cluster.wait_until_routable(0, 1)


def test_a_stalled_replica_loses_its_requests(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker(stall_seconds=2.0)
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1)
    (submit,) = pod.scheduler.wait_for(Submit)
    pod.scheduler.send(row(submit.id, 0, TOKENIZER.encode("x").ids[0]))
    cluster.frontend.wait_for(Texts)
    pod.scheduler.sends_status = False
    assert cluster.frontend.wait_for_end(request)[1].code == "engine_stalled"


def test_tokenizer_files_are_switched_when_no_replica_has_those_in_use(cluster: Cluster) -> None:
    other = cluster.path / "other"
    write_directory(other, OTHER, chat_template=CHATML)
    old = cluster.pods.start(0, cluster.model, answering("old"))
    cluster.start_worker()
    cluster.wait_until_routable(0)
    new = cluster.pods.start(1, other, answer_with(OTHER.encode("new").ids))
    state = cluster.wait_for(lambda state: any(one.waits_for_files for one in state.replicas))
    assert "tokenizer files differ" in state_of(state, 1).reason
    assert cluster.frontend.wait_for_end(cluster.frontend.generate(1))[0] == "old"
    assert not new.scheduler.received(Submit)
    # A request without output is encoded again when its replica is lost.
    old.scheduler.answer = accept_only
    request = cluster.frontend.generate(2, "<think>")
    old.scheduler.wait_for(Submit, 2)
    old.kill()
    cluster.wait_until_routable(1)
    assert cluster.frontend.wait_for_end(request)[0] == "new"
    (submit,) = new.scheduler.received(Submit)
    assert array("i", submit.prompt).tolist() == OTHER.encode("<think>").ids != TOKENIZER.encode("<think>").ids


def test_files_of_most_replicas_are_switched_to_and_other_replicas_finish_their_requests(cluster: Cluster) -> None:
    other = cluster.path / "other"
    write_directory(other, OTHER, chat_template=CHATML)
    old = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    streaming, silent = cluster.frontend.generate(1), cluster.frontend.generate(2, "<think>")
    submits = {submit.id: submit for submit in old.scheduler.wait_for(Submit, 2)}
    old.scheduler.send(row(streaming, 0, TOKENIZER.encode("x").ids[0]), to=submits[streaming])
    cluster.frontend.wait_for(Texts)
    new = [cluster.pods.start(number, other, answer_with(OTHER.encode("new").ids)) for number in (1, 2)]
    state = cluster.wait_until_routable(1, 2)
    assert state_of(state, 0).waits_for_files
    old.scheduler.send(row(streaming, 1, TOKENIZER.encode("y").ids[0], "length"), to=submits[streaming])
    assert cluster.frontend.wait_for_end(streaming)[1].completion_tokens == 2
    assert not [submit for pod in new for submit in pod.scheduler.received(Submit)]
    # Its request without output is encoded again.
    old.kill()
    assert cluster.frontend.wait_for_end(silent)[0] == "new"
    (submit,) = (submit for pod in new for submit in pod.scheduler.received(Submit))
    assert array("i", submit.prompt).tolist() == OTHER.encode("<think>").ids != TOKENIZER.encode("<think>").ids


def test_files_that_cannot_be_fetched_do_not_block_those_of_fewer_replicas(cluster: Cluster) -> None:
    other = cluster.path / "other"
    write_directory(other, OTHER, chat_template=CHATML)
    for number in (0, 1):
        cluster.pods.start(number, cluster.model).files.fails = True
    cluster.pods.start(2, other)
    cluster.start_worker()
    state = cluster.wait_until_routable(2)
    assert not any(one.waits_for_files for one in state.replicas)


def test_files_that_cannot_be_fetched_are_retried(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.router.router.FETCH_AGAIN_SECONDS", 0.1)
    pod = cluster.pods.start(0, cluster.model, answering("xyz"))
    pod.files.fails = True
    cluster.start_worker()
    state = cluster.wait_for(lambda state: "HTTP status 503" in state.reason)
    assert state.model is None
    pod.files.fails = False
    cluster.wait_until_routable(0)


def test_a_cancelled_request_is_aborted_at_its_replica(cluster: Cluster) -> None:
    pod = cluster.pods.start(0, cluster.model, accept_only)
    cluster.start_worker()
    cluster.wait_until_routable(0)
    request = cluster.frontend.generate(1, params=SamplingParams())
    cluster.frontend.wait_for(Accepted)
    cluster.frontend.send(Cancel(request))
    assert pod.scheduler.wait_for(Abort) == [Abort(request)]


def test_a_flush_reports_the_pages_of_all_replicas(cluster: Cluster) -> None:
    pods = [cluster.pods.start(number, cluster.model) for number in (0, 1)]
    cluster.start_worker()
    cluster.wait_until_routable(0, 1)
    flush = Flush(b"f" * 16)
    cluster.frontend.send(flush)
    for pages, pod in enumerate(pods, 3):
        pod.scheduler.wait_for(Flush)
        pod.scheduler.send(Flushed(flush.id, pages))
    assert cluster.frontend.wait_for(Flushed).pages == 7


def test_the_latest_start_of_a_replica_counts(cluster: Cluster) -> None:
    cluster.pods.start(0, cluster.model, replica="chat-r0")
    later = cluster.pods.start(1, cluster.model, answering("xyz"), replica="chat-r0", epoch=NEXT_EPOCH)
    cluster.start_worker()
    state = cluster.wait_for(lambda state: len([one for one in state.replicas if one.replica]) == 2)
    state = cluster.wait_for(lambda state: any(one.routable for one in state.replicas))
    assert [one.address for one in state.replicas if one.routable] == [later.address]
