"""The dispatcher against replicas that come, go, drain and refuse in every order."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from minisgl.router.dispatcher import MAX_UNANSWERED, Dispatcher
from minisgl.tokenizer.session import Progress
from minisgl.wire.messages import (
    FEATURES,
    WIRE_VERSION,
    Abort,
    Ack,
    EndDrain,
    Failed,
    FinishReason,
    Pool,
    Pooled,
    PromptLogprobs,
    Submit,
    Thinking,
    Tokens,
    Welcome,
)
from support.frontend.fake_scheduler import card, row
from support.messages import status_of, submit_of

FILE_SETS = ({"tokenizer.json": "a" * 64}, {"tokenizer.json": "b" * 64})
PROMPTS = (b"\0" * 512, b"\1" * 512)
"""One prompt in the token ids of each tokenizer."""
CONSTRAINTS = {"grammar", "allowed_token_ids", "bad_words"}
"""Features of some engines."""
RETRY_SECONDS, STALL_SECONDS, DRAIN_SECONDS = 10.0, 15.0, 25.0
WITH_TEXT, WITHOUT_TEXT = 5, 6
"""Token ids."""
REPLICAS = 3

STATUS = status_of()


class Server:
    """The true state of a replica: its requests that have not ended."""

    def __init__(self, number: int) -> None:
        self.address = f"10.0.0.{number}"
        self.name = f"chat-r{number}"
        self.epoch = 0
        self.up = False
        self.draining = False
        self.is_silent = False
        """It has sent nothing for so long that it gets no new requests."""
        self.kind = 0
        """Index of its tokenizer files in FILE_SETS."""
        self.revision = "r1"
        self.knows_constraints = False
        self.can_end_drain = False
        """It knows the message, and was not told yet."""
        self.requests: dict[bytes, int] = {}
        """Index of the next token, by identifier on the wire."""
        self.aborted: set[bytes] = set()

    @property
    def model(self) -> tuple[int, str]:
        return self.kind, self.revision

    def welcome(self) -> Welcome:
        unknown = set() if self.knows_constraints else CONSTRAINTS
        unknown = unknown if self.can_end_drain else {*unknown, "end_drain"}
        return Welcome(
            version=WIRE_VERSION,
            epoch=(1, self.epoch),
            model=card(tokenizer_hashes=FILE_SETS[self.kind], revision=self.revision),
            replica=self.name,
            features=tuple(name for name in FEATURES if name not in unknown),
        )


class Dispatching(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        continues=st.booleans(), started=st.integers(0, REPLICAS), unanswered=st.sampled_from([1, 2, MAX_UNANSWERED])
    )
    def begin(self, continues: bool, started: int, unanswered: int) -> None:
        self.dispatcher = Dispatcher(
            RETRY_SECONDS,
            STALL_SECONDS,
            deliver=self.on_delivered,
            send=self.on_sent,
            reencode=self.on_reencode,
            progress=self.progress,
            continues=continues,
            drain_seconds=DRAIN_SECONDS,
            max_unanswered=unanswered,
        )
        self.unanswered = unanswered
        self.continues = continues
        self.kind = 0
        self.dispatcher.set_files_in_use(FILE_SETS[0])
        self.servers = [Server(number) for number in range(REPLICAS)]
        for server in self.servers:
            self.dispatcher.add(server.address)
        self.count = 0
        self.given: dict[bytes, list[int]] = {}
        """Tokens that were delivered to each request."""
        self.have_output: set[bytes] = set()
        """Requests to which a token with text was delivered."""
        self.models: dict[bytes, tuple[int, str]] = {}
        """Model of each request's tokens."""
        self.losses: dict[bytes, int] = {}
        """Losses of engines that count against each request."""
        self.at_loss: dict[bytes, int] = {}
        """Tokens of each request at its last loss."""
        self.ends: dict[bytes, str] = {}
        self.acks: dict[bytes, int] = {}
        self.cancelled: set[bytes] = set()
        self.constrained: set[bytes] = set()
        self.encoding: set[bytes] = set()
        """Requests whose prompts are being encoded again."""
        for number in range(started):
            self.start(number, 0, "r1", knows_constraints=False, can_end_drain=True)

    # Actions of the dispatcher.

    def progress(self, request_id: bytes) -> Progress | None:
        if request_id in self.ends or request_id in self.cancelled:
            return None
        tokens = np.array(self.given[request_id], "<i4").tobytes()
        return Progress(tokens, request_id in self.have_output)

    def on_delivered(self, message: Ack | Failed | Tokens | PromptLogprobs) -> None:
        match message:
            case Ack():
                assert message.id not in self.acks or self.given[message.id], "accepted again without tokens"
                self.acks[message.id] = self.acks.get(message.id, 0) + 1
            case Failed():
                assert message.id not in self.ends and message.id not in self.cancelled
                self.check_failure(message)
                self.ends[message.id] = message.code
            case Tokens():
                rows = message.rows()
                columns = (rows.ids, rows.index.tolist(), rows.token.tolist(), rows.finish.tolist())
                for request_id, index, token, finish in zip(*columns, strict=True):
                    # The session has forgotten requests that ended: late tokens have no effect.
                    if request_id in self.given and request_id not in self.cancelled | self.ends.keys():
                        assert index == len(self.given[request_id]), "a hole, or a token given twice"
                        if token == WITH_TEXT:
                            self.have_output.add(request_id)
                        self.given[request_id].append(token)
                        if finish:
                            self.ends[request_id] = "finished"

    def check_failure(self, failed: Failed) -> None:
        """Each error has its reason."""
        if failed.code == "unsupported_by_engine":
            assert failed.id in self.constrained
            assert not any(server.up and server.knows_constraints for server in self.servers)
        elif failed.code == "model_changed":
            assert failed.id in self.have_output
            assert not any(server.up and server.model == self.models[failed.id] for server in self.servers)
        elif "second engine" in failed.message:
            assert self.losses[failed.id] >= 2
        elif failed.message in ("lost", "draining") or failed.code == "engine_stalled":
            assert not self.continues and failed.id in self.have_output
        elif failed.code == "queue_full":
            assert not self.given[failed.id] or not self.continues, "an answer that goes on waits for a full queue"

    def on_sent(self, address: str, message: Submit | Abort | EndDrain) -> None:
        server = next(one for one in self.servers if one.address == address)
        assert server.up, "sent to a replica that is not there"
        if isinstance(message, Abort):
            del server.requests[message.id]
            server.aborted.add(message.id)
            return
        if isinstance(message, EndDrain):
            assert server.draining and server.can_end_drain
            assert self.continues and self.dispatcher.requests_wait
            assert not any(one.up and not one.draining and not one.is_silent for one in self.servers)
            server.can_end_drain = False
            return
        assert not server.draining and not server.is_silent, "sent to one that gets no new requests"
        assert message.prompt == PROMPTS[server.kind], "token ids of another tokenizer"
        assert server.knows_constraints or not message.is_constrained, "sent to one that would ignore constraints"
        assert message.id not in server.requests
        request_id = self.dispatcher._session_ids.get(message.id, message.id)
        output = np.frombuffer(message.output, "<i4").tolist()
        assert output == self.given[request_id], "it goes on behind the tokens that were delivered"
        if output:
            assert server.model == self.models[request_id], "another model would go on"
        else:
            waiting = self.dispatcher._refused.values()
            assert not any(address in one.refused_by for one in waiting), "ahead of a request with tokens"
            self.models[request_id] = server.model
        server.requests[message.id] = len(output)

    def on_reencode(self, request_id: bytes) -> None:
        assert request_id not in self.have_output and request_id not in self.encoding
        self.given[request_id].clear()
        self.encoding.add(request_id)

    # Events.

    def server(self, number: int) -> Server:
        return self.servers[number]

    @rule(target=requests, is_constrained=st.booleans())
    def submit(self, is_constrained: bool) -> Any:
        self.count += 1
        request_id = b"%016d" % self.count
        if is_constrained:
            self.constrained.add(request_id)
        self.given[request_id] = []
        self.send(request_id)
        return multiple(request_id)

    def send(self, request_id: bytes) -> None:
        # Of several tenants.
        fields = {"allowed_token_ids": (1,) if request_id in self.constrained else (), "tenant": request_id[-1:]}
        prompt = PROMPTS[self.kind]
        self.dispatcher.submit(submit_of(id=request_id, prompt=prompt, max_tokens=100, seed=1, **fields))

    @rule(kind=st.integers(0, 1))
    def use_files(self, kind: int) -> None:
        self.kind = kind
        self.dispatcher.set_files_in_use(FILE_SETS[kind])

    @rule()
    def flush(self) -> None:
        """The end of a turn of the worker's loop."""
        self.dispatcher.send_waiting()
        unanswered = sum(request.is_unanswered for request in self.dispatcher._requests.values())
        assert not self.dispatcher._waiting or unanswered >= self.unanswered

    @rule()
    def encode(self) -> None:
        encoded, self.encoding = self.encoding, set()
        for request_id in sorted(encoded):
            self.send(request_id)

    @rule(request_id=consumes(requests))
    def cancel(self, request_id: bytes) -> None:
        if request_id not in self.ends:
            self.cancelled.add(request_id)
        self.encoding.discard(request_id)
        self.dispatcher.abort(request_id)
        # Those that waited behind it go with the next status, which comes within a tenth of a second.
        self.dispatcher.dispatch_parked()

    @rule(
        number=st.integers(0, REPLICAS - 1),
        kind=st.sampled_from([0, 0, 1]),
        revision=st.sampled_from(["r1", "r1", "r2"]),
        knows_constraints=st.booleans(),
        can_end_drain=st.booleans(),
    )
    def start(self, number: int, kind: int, revision: str, knows_constraints: bool, can_end_drain: bool) -> None:
        """Start a replica, or restart it while its connection stays open."""
        server = self.server(number)
        if server.up:
            self.lose(server)
        server.kind, server.revision, server.knows_constraints = kind, revision, knows_constraints
        server.can_end_drain = can_end_drain
        server.up, server.draining, server.is_silent, server.aborted = True, False, False, set()
        server.epoch += 1
        self.dispatcher.welcome(server.address, server.welcome())

    def lose(self, server: Server) -> None:
        for wire_id in server.requests:
            request_id = self.dispatcher._session_ids.get(wire_id, wire_id)
            if not server.draining:
                self.count_loss(request_id)
        server.up, server.requests, server.aborted = False, {}, set()

    def count_loss(self, request_id: bytes) -> None:
        tokens = len(self.given[request_id])
        self.losses[request_id] = self.losses.get(request_id, 0) + (tokens - self.at_loss.get(request_id, 0) < 16)
        self.at_loss[request_id] = tokens

    @rule(number=st.integers(0, REPLICAS - 1))
    def die(self, number: int) -> None:
        server = self.server(number)
        self.lose(server)
        self.dispatcher.lost(server.address, "engine_unavailable", "lost")

    @rule(wait=st.booleans())
    def new_requests_wait(self, wait: bool) -> None:
        self.dispatcher.requests_wait = wait

    @rule(number=st.integers(0, REPLICAS - 1), draining=st.booleans())
    def status(self, number: int, draining: bool) -> None:
        server = self.server(number)
        if server.up:
            server.draining = server.draining or draining
            server.is_silent = False
            self.dispatcher.status(
                server.address, msgspec.structs.replace(STATUS, draining=server.draining, running=len(server.requests))
            )

    def pick(self, number: int, data: st.DataObject) -> tuple[Server, bytes] | None:
        server = self.server(number)
        if not server.requests:
            return None
        return server, list(server.requests)[data.draw(st.integers(0, len(server.requests) - 1))]

    @rule(number=st.integers(0, REPLICAS - 1), data=st.data())
    def ack(self, number: int, data: st.DataObject) -> None:
        if (picked := self.pick(number, data)) is not None:
            self.dispatcher.acked(picked[0].address, Ack(picked[1]))

    @rule(
        number=st.integers(0, REPLICAS - 1),
        data=st.data(),
        token=st.sampled_from([WITH_TEXT, WITHOUT_TEXT]),
        count=st.sampled_from([1, 1, 20]),
        finish=st.sampled_from([None, None, "stop"]),
    )
    def tokens(self, number: int, data: st.DataObject, token: int, count: int, finish: FinishReason | None) -> None:
        if (picked := self.pick(number, data)) is not None:
            server, wire_id = picked
            for left in reversed(range(count)):
                index = server.requests[wire_id]
                server.requests[wire_id] += 1
                if finish and not left:
                    del server.requests[wire_id]
                self.dispatcher.tokens(server.address, row(wire_id, index, token, None if left else finish))

    @rule(number=st.integers(0, REPLICAS - 1), data=st.data())
    def broken_tokens(self, number: int, data: st.DataObject) -> None:
        """A message that cannot be read has no effect, whatever it says of the end of an answer."""
        if (picked := self.pick(number, data)) is not None:
            server, wire_id = picked
            message = row(wire_id, server.requests[wire_id], WITH_TEXT, "stop")
            with pytest.raises(msgspec.ValidationError):
                self.dispatcher.tokens(server.address, msgspec.structs.replace(message, cached=b""))

    @rule(
        number=st.integers(0, REPLICAS - 1),
        data=st.data(),
        code=st.sampled_from(["queue_full", "draining", "deadline_exceeded"]),
    )
    def refuse(self, number: int, data: st.DataObject, code: str) -> None:
        if (picked := self.pick(number, data)) is not None:
            server, wire_id = picked
            del server.requests[wire_id]
            server.draining = server.draining or code == "draining"
            self.dispatcher.failed(server.address, Failed(wire_id, code, code))

    @rule(number=st.integers(0, REPLICAS - 1), index=st.integers(0, 3))
    def late_tokens(self, number: int, index: int) -> None:
        """Tokens of aborted requests, computed before the abort arrived."""
        server = self.server(number)
        for wire_id in server.aborted:
            self.dispatcher.tokens(server.address, row(wire_id, index, 7))

    @rule(seconds=st.sampled_from([0.1, 6.0, 20.0]), silent=st.sampled_from([None, None, *range(REPLICAS)]))
    def time_passes(self, seconds: float, silent: int | None) -> None:
        """All replicas but one send their status."""
        self.dispatcher.replicas.now += seconds
        for number, server in enumerate(self.servers):
            if server.up and number == silent:
                server.is_silent = self.dispatcher.replicas.is_stale(self.dispatcher.replicas[server.address])
            elif server.up:
                self.status(number, False)
        # As the dispatcher will see it: those that stall are lost, others may lose their requests to a third one.
        held = {server.address: dict(server.requests) for server in self.servers}
        losses, at_loss = dict(self.losses), dict(self.at_loss)
        if silent is not None and not self.servers[silent].draining:
            address = self.servers[silent].address
            silence = self.dispatcher.replicas.silence(self.dispatcher.replicas[address])
            for wire_id in held[address]:
                request_id = self.dispatcher._session_ids.get(wire_id, wire_id)
                # One without tokens may move without a loss, until its replica counts as lost.
                if silence > STALL_SECONDS or self.given[request_id]:
                    self.count_loss(request_id)
        kept = {
            self.dispatcher._session_ids.get(wire_id, wire_id): wire_id
            for requests in held.values()
            for wire_id in requests
        }
        for address in self.dispatcher.tick():
            server = next(one for one in self.servers if one.address == address)
            server.up, server.requests, server.aborted = False, {}, set()
        for server in self.servers:
            for wire_id in server.requests:
                request_id = self.dispatcher._session_ids.get(wire_id, wire_id)
                if kept.get(request_id) == wire_id:
                    # It was not moved.
                    for now, before in ((self.losses, losses), (self.at_loss, at_loss)):
                        now.pop(request_id, None)
                        if request_id in before:
                            now[request_id] = before[request_id]

    @rule(number=st.integers(0, REPLICAS - 1))
    def hang_in_a_drain(self, number: int) -> None:
        self.status(number, True)
        self.time_passes(6.0, number)

    # Invariants.

    @invariant()
    def every_request_is_somewhere(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        live = {request_id for request_id in self.given if request_id not in self.ends} - self.cancelled
        assert set(self.dispatcher._requests) == live
        for request_id, request in self.dispatcher._requests.items():
            assert request.losses == self.losses.get(request_id, 0), "drains do not count"
        at_servers = sum(len(server.requests) for server in self.servers)
        waiting = len(self.dispatcher._parked) + len(self.dispatcher._waiting)
        assert at_servers + waiting + len(self.encoding) == len(live)
        unanswered = sum(request.is_unanswered for request in self.dispatcher._requests.values())
        assert self.dispatcher._unanswered == unanswered <= at_servers
        for server in self.servers:
            assert self.dispatcher.replicas[server.address].in_flight == len(server.requests)
        takes = [server for server in self.servers if server.up and not server.draining and not server.is_silent]
        good = [server for server in takes if server.kind == self.kind]
        assert bool(good) == bool(self.dispatcher.replicas.routable)
        refused, parked = self.dispatcher._refused.keys(), self.dispatcher._parked.keys()
        assert refused <= parked
        for request_id in parked - refused:
            able = [server for server in takes if server.knows_constraints or request_id not in self.constrained]
            if self.given[request_id]:
                assert not any(server.model == self.models[request_id] for server in able)
            elif not refused:
                assert not any(server in good for server in able)
        assert len(self.dispatcher._session_ids) <= 2 * len(live)

    def teardown(self) -> None:
        if not hasattr(self, "dispatcher"):
            return
        # In the end no request is left waiting.
        self.encode()
        for number in range(REPLICAS):
            self.die(number)
        self.flush()
        self.encode()
        self.flush()
        self.time_passes(max(RETRY_SECONDS, DRAIN_SECONDS) + 1, None)
        assert not self.dispatcher._requests
        assert not self.dispatcher._session_ids
        assert self.ends.keys() | self.cancelled == self.given.keys(), "each has one whole answer or one error"


Dispatching.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestDispatching = Dispatching.TestCase


def test_a_replica_that_refuses_a_request_with_output_counts_as_draining() -> None:
    given: list[Any] = []
    dispatcher = Dispatcher(
        RETRY_SECONDS,
        60.0,
        deliver=given.append,
        send=lambda *_: None,
        reencode=lambda _: None,
        progress=lambda _: Progress(b"\5\0\0\0", True),
        continues=False,
    )
    dispatcher.set_files_in_use(FILE_SETS[0])
    server, request_id = Server(0), b"%016d" % 1
    dispatcher.add(server.address)
    dispatcher.welcome(server.address, server.welcome())
    dispatcher.submit(submit_of(id=request_id, prompt=PROMPTS[0], max_tokens=8, seed=1))
    dispatcher.tokens(server.address, row(request_id, 0, 5))
    dispatcher.failed(server.address, Failed(request_id, "draining", "it ends"))
    assert given[-1] == Failed(request_id, "draining", "it ends"), "it is not resubmitted"
    assert not dispatcher.replicas.routable


def test_a_silent_replica_that_drains_counts_as_no_loss() -> None:
    given: list[Any] = []
    sent: list[tuple[str, Submit | Abort]] = []
    dispatcher = Dispatcher(
        RETRY_SECONDS,
        60.0,
        deliver=given.append,
        send=lambda address, message: sent.append((address, message)),
        reencode=lambda _: None,
        progress=lambda _: Progress(b"\5\0\0\0", True),
    )
    dispatcher.set_files_in_use(FILE_SETS[0])
    servers = [Server(number) for number in range(3)]
    for server in servers:
        dispatcher.add(server.address)
    dispatcher.welcome(servers[0].address, servers[0].welcome())
    dispatcher.submit(submit_of(id=b"%016d" % 1, prompt=PROMPTS[0], max_tokens=8, seed=1))
    dispatcher.tokens(servers[0].address, row(b"%016d" % 1, 0, 5))
    for before, after in ((0, 1), (1, 2)):
        # Each replica drains, is silent, and loses the request to the next one.
        dispatcher.status(servers[before].address, msgspec.structs.replace(STATUS, draining=True))
        dispatcher.replicas.now += 6
        dispatcher.welcome(servers[after].address, servers[after].welcome())
        dispatcher.tick()
        address, submit = sent[-1]
        assert (address, type(submit)) == (servers[after].address, Submit)
    dispatcher.lost(servers[2].address, "engine_unavailable", "lost")
    assert not any(isinstance(message, Failed) for message in given), "it was the first loss"


def test_a_request_goes_only_to_an_engine_that_knows_its_parameters() -> None:
    given: list[Any] = []
    sent: list[tuple[str, bytes]] = []
    dispatcher = Dispatcher(
        RETRY_SECONDS,
        60.0,
        deliver=given.append,
        send=lambda address, message: sent.append((address, message.id)),
        reencode=lambda _: None,
        progress=lambda _: Progress(b"", False),
    )
    dispatcher.set_files_in_use(FILE_SETS[0])
    old, new = Server(0), Server(1)
    new.knows_constraints = True

    def submit(number: int, **options: Any) -> bytes:
        request_id = b"%016d" % number
        dispatcher.submit(submit_of(id=request_id, prompt=PROMPTS[0], max_tokens=8, seed=1, **options))
        return request_id

    dispatcher.add(old.address)
    dispatcher.welcome(old.address, old.welcome())
    refused = submit(1, grammar="{}", allowed_token_ids=(1,))
    assert [(failed.id, failed.code) for failed in given] == [(refused, "unsupported_by_engine")]
    assert given[0].message == "no connected engine knows allowed_token_ids, grammar; update the engines"
    # A prediction changes no answer: engines that do not know it ignore it.
    plain = submit(2, temperature=0.5, thinking=Thinking(start=(1,), end=(2,)), prediction=PROMPTS[0])
    dispatcher.add(new.address)
    dispatcher.welcome(new.address, new.welcome())
    constrained = submit(3, bad_words=((4,),))
    assert sent == [(old.address, plain), (new.address, constrained)]
    # The one that constrains is lost: the request waits for its return, while others can be served.
    dispatcher.lost(new.address, "engine_unavailable", "lost")
    assert submit(4, allowed_token_ids=(1,)) in dispatcher._parked and len(given) == 1
    dispatcher.welcome(new.address, new.welcome())
    assert not dispatcher._parked and [address for address, _ in sent[2:]] == [new.address] * 2


def test_a_text_begins_again_whole_at_an_engine_that_can_pool() -> None:
    given: list[Any] = []
    sent: list[tuple[str, Any]] = []
    dispatcher = Dispatcher(
        RETRY_SECONDS,
        60.0,
        deliver=given.append,
        send=lambda address, message: sent.append((address, message)),
        reencode=lambda _: None,
        progress=lambda _: Progress(b"", False),
    )
    dispatcher.set_files_in_use(FILE_SETS[0])
    first, second, old = Server(0), Server(1), Server(2)
    text = Pool(id=b"%016d" % 1, prompt=PROMPTS[0], second_text=3)
    dispatcher.add(old.address)
    known = old.welcome()
    dispatcher.welcome(
        old.address, msgspec.structs.replace(known, features=tuple(n for n in known.features if n != "pool"))
    )
    dispatcher.submit(Pool(id=b"%016d" % 2, prompt=PROMPTS[0]))
    assert [(failed.code, failed.message) for failed in given] == [
        ("unsupported_by_engine", "no connected engine knows pool; update the engines")
    ]
    for server in (first, second):
        dispatcher.add(server.address)
    dispatcher.welcome(first.address, first.welcome())
    dispatcher.submit(text)
    assert sent == [(first.address, text)]
    dispatcher.welcome(second.address, second.welcome())
    dispatcher.lost(first.address, "engine_unavailable", "lost")
    address, again = sent[-1]
    assert address == second.address and again == msgspec.structs.replace(text, id=again.id)
    late = Pooled(ids=text.id, cached=bytes(4), values=b"late")
    dispatcher.pooled(first.address, late)
    dispatcher.pooled(second.address, Pooled(ids=again.id, cached=bytes(4), values=b"four"))
    # A late output has the identifier of no request.
    assert [message.ids for message in given[1:]] == [bytes(16), text.id]
    assert not dispatcher._requests and not dispatcher._session_ids
