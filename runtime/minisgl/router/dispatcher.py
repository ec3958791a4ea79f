"""Between the requests of a worker and several replicas: which of them gets each, and what becomes of a request whose
replica is lost, drains or refuses it. No sockets, no clock.

A request that has given nothing yet is tried again elsewhere, or waits until a replica is there. One that has given
something fails: what another replica would give need not go on where this one ended. Every attempt has an identifier
of its own on the wire, so whatever an earlier one still says finds nobody.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from minisgl.router.replicas import STALE_SECONDS, Replica, Replicas
from minisgl.router.routing import Candidate, choose, prefix_blocks
from minisgl.wire.messages import (
    REQUEST_ID_BYTES,
    Abort,
    Ack,
    Failed,
    PromptLogprobs,
    Status,
    Submit,
    Tokens,
    Welcome,
)

logger = logging.getLogger(__name__)

MOST_LOSSES: Final = 2
"""Replicas that may be lost with a request in them. One that kills whatever computes it must not kill them all."""

QUEUE_FULL: Final = "queue_full"
DRAINING: Final = "draining"
"""The codes of refusals that another replica need not share."""

UNAVAILABLE: Final = "engine_unavailable"
_NOBODY: Final = bytes(REQUEST_ID_BYTES)
"""In the place of an earlier attempt's identifier."""


class _Attempt:
    """One request, and where it is."""

    __slots__ = (
        "acked",
        "chain",
        "files",
        "give_up_at",
        "id",
        "losses",
        "refusal",
        "refused_by",
        "replica",
        "submit",
        "wire_id",
    )

    def __init__(self, submit: Submit) -> None:
        self.id = submit.id
        self.submit: Submit | None = submit
        """None: it has given something, and is not tried again."""
        self.files: Mapping[str, str] | None = None
        """Hashes of the tokenizer files that its token ids are of."""
        self.wire_id = submit.id
        self.chain: tuple[int, ...] | None = None
        """Of its prompt; None: not needed yet."""
        self.replica: str | None = None
        """Address; None: it waits for one."""
        self.acked = False
        self.losses = 0
        self.refused_by: set[str] = set()
        """Addresses of those whose queues are full."""
        self.refusal: Failed | None = None
        """What the last of them said."""
        self.give_up_at: float | None = None
        """Counted from when nobody could take it; None: somebody has."""


class Dispatcher:
    """`give` gets what the requests' side is to know, under the identifiers that it knows; `send` what a replica is,
    by its address."""

    def __init__(
        self,
        retry_seconds: float,
        stall_seconds: float,
        *,
        give: Callable[[Ack | Failed | Tokens | PromptLogprobs], None],
        send: Callable[[str, Submit | Abort], None],
        encode_again: Callable[[bytes], None],
    ) -> None:
        """A request waits for a replica at most `retry_seconds`; one that has been silent for `stall_seconds` counts
        as lost. `encode_again` gets requests that have given nothing and whose token ids are of tokenizer files that
        are not in use any more: they must be submitted again."""
        self.replicas = Replicas()
        self._retry_seconds = retry_seconds
        self._stall_seconds = stall_seconds
        self._give = give
        self._send = send
        self._encode_again = encode_again
        self._requests: dict[bytes, _Attempt] = {}
        """Under the identifiers that the session knows."""
        self._attempts: dict[str, dict[bytes, _Attempt]] = {}
        """By replica, then under the identifiers on the wire."""
        self._parked: dict[bytes, _Attempt] = {}
        self._aliases: dict[bytes, bytes] = {}
        """From identifiers on the wire to the session's, where they differ."""
        self._random = random.SystemRandom()
        self.retried = 0
        """How often a request was tried again."""

    def add(self, address: str) -> None:
        self.replicas.add(address)
        self._attempts[address] = {}

    def remove(self, address: str) -> None:
        """The replica was lost before."""
        self.replicas.remove(address)
        assert not self._attempts.pop(address)

    def welcome(self, address: str, welcome: Welcome) -> None:
        """It starts to serve, or serves anew: then nothing of before is left of what it had."""
        if self.replicas[address].welcome is not None:
            self.lost(address, UNAVAILABLE, "the engine was started again")
        self.replicas.welcome(address, welcome)
        self.retry()

    def status(self, address: str, status: Status) -> None:
        drains = status.draining and not self.replicas[address].draining
        self.replicas.status(address, status)
        if drains:
            self._move(address)
        self.retry()

    def lost(self, address: str, code: str, message: str) -> None:
        """Its requests go elsewhere, or fail with `code` where they have given something."""
        attempts = self._attempts[address]
        self._attempts[address] = {}
        self.replicas.lost(address, message)
        for attempt in attempts.values():
            attempt.losses += 1
            attempt.replica = None
            if attempt.submit is None:
                self._fail(attempt, code, message)
            elif attempt.losses >= MOST_LOSSES:
                self._fail(attempt, code, f"{message}; it was the second engine to be lost with this request")
            else:
                self._renew(attempt)
                self._place(attempt)

    def submit(self, submit: Submit) -> None:
        """Of a request that is known already: with the token ids of the tokenizer files that are in use now."""
        attempt = self._requests.get(submit.id)
        if attempt is None:
            attempt = self._requests[submit.id] = _Attempt(submit)
        else:
            assert attempt.replica is None
            attempt.submit, attempt.chain = submit, None
        attempt.files = self.replicas.files
        self._place(attempt)

    def abort(self, request_id: bytes) -> None:
        if (attempt := self._requests.get(request_id)) is not None:
            self._withdraw(attempt)
            self._forget(attempt)

    def acked(self, address: str, ack: Ack) -> None:
        attempt = self._attempts[address].get(ack.id)
        if attempt is None:
            return
        attempt.give_up_at = None
        if not attempt.acked:
            attempt.acked = True
            self._give(Ack(attempt.id))

    def failed(self, address: str, failed: Failed) -> None:
        attempt = self._attempts[address].get(failed.id)
        if attempt is None:
            return
        self._leave(attempt)
        if failed.code == DRAINING:
            self.replicas.refuses(address)
        if attempt.submit is None or failed.code not in (QUEUE_FULL, DRAINING):
            self._fail(attempt, failed.code, failed.message)
            return
        if failed.code == QUEUE_FULL:
            attempt.refused_by.add(address)
            attempt.refusal = failed
        self._renew(attempt)
        self._place(attempt)

    def prompt_scored(self, address: str, message: PromptLogprobs) -> None:
        attempt = self._attempts[address].get(message.id)
        if attempt is not None:
            attempt.submit = None
            self._give(msgspec.structs.replace(message, id=attempt.id))

    def tokens(self, address: str, tokens: Tokens) -> None:
        """Raises ValidationError for a message whose columns differ in length."""
        if len(tokens.ids) != len(tokens.finish) * REQUEST_ID_BYTES:
            raise msgspec.ValidationError("the columns of a tokens message differ in length")
        attempts = self._attempts[address]
        ids = [tokens.ids[i : i + REQUEST_ID_BYTES] for i in range(0, len(tokens.ids), REQUEST_ID_BYTES)]
        if self._aliases:
            renamed = b"".join([self._aliases.get(wire_id, wire_id) for wire_id in ids])
            self._give(msgspec.structs.replace(tokens, ids=renamed))
        else:
            self._give(tokens)
        for wire_id, finish in zip(ids, tokens.finish, strict=True):
            if (attempt := attempts.get(wire_id)) is not None:
                attempt.submit = None
                if finish:
                    self._leave(attempt)
                    self._forget(attempt)

    def tick(self) -> list[str]:
        """Time has passed. Returns the addresses of those that count as lost by it."""
        self.replicas.tick()
        stalled = []
        for replica in list(self.replicas):
            if replica.welcome is None:
                continue
            silence = self.replicas.silence(replica)
            if silence > self._stall_seconds and self._attempts[replica.address]:
                self.lost(replica.address, "engine_stalled", f"the engine has said nothing for {silence:.0f} s")
                stalled.append(replica.address)
            elif silence > STALE_SECONDS:
                self._move(replica.address)
        for attempt in list(self._parked.values()):
            if attempt.give_up_at is not None and self.replicas.now >= attempt.give_up_at:
                self._fail(attempt, UNAVAILABLE, f"no engine could take the request for {self._retry_seconds:g} s")
        self.retry()
        return stalled

    def retry(self) -> None:
        """Send off what waits for a replica, as far as there is one."""
        if self._parked and self.replicas.routable:
            for attempt in list(self._parked.values()):
                self._place(attempt)

    def use_files(self, hashes: Mapping[str, str]) -> None:
        """The tokenizer files in use from now on. What a replica has already stays there."""
        self.replicas.use_files(hashes)
        for attempt in list(self._parked.values()):
            self._place(attempt)

    def _place(self, attempt: _Attempt) -> None:
        """Send it to a replica, or let it wait for one, or for the token ids that replicas understand now."""
        if attempt.files is not self.replicas.files:
            self._parked.pop(attempt.id, None)
            self._encode_again(attempt.id)
            return
        routable = self.replicas.routable
        open_ones = [replica for replica in routable if replica.address not in attempt.refused_by]
        if open_ones:
            self._send_to(self._best(open_ones, attempt), attempt)
        elif routable:
            assert attempt.refusal is not None, "only refusals keep a request from a replica that can take it"
            self._fail(attempt, attempt.refusal.code, attempt.refusal.message)
        else:
            attempt.refused_by.clear()
            if attempt.give_up_at is None:
                attempt.give_up_at = self.replicas.now + self._retry_seconds
            self._parked[attempt.id] = attempt

    def _best(self, replicas: list[Replica], attempt: _Attempt) -> Replica:
        if len(replicas) == 1 and len(self._attempts) == 1:
            # Nothing to choose now, nor to remember for later.
            attempt.chain = ()
            return replicas[0]
        submit = attempt.submit
        assert submit is not None
        if attempt.chain is None:
            attempt.chain = prefix_blocks(submit.prompt, submit.cache_salt)
        by_name = {replica.name: replica for replica in replicas}
        candidates = [Candidate(name, one.load, one.seen.matched(attempt.chain)) for name, one in by_name.items()]
        return by_name[choose(candidates, submit.prompt)]

    def _send_to(self, replica: Replica, attempt: _Attempt) -> None:
        self._parked.pop(attempt.id, None)
        attempt.replica = replica.address
        self._attempts[replica.address][attempt.wire_id] = attempt
        replica.sent(attempt.chain or ())
        assert attempt.submit is not None
        renamed = attempt.wire_id != attempt.id
        submit = msgspec.structs.replace(attempt.submit, id=attempt.wire_id) if renamed else attempt.submit
        self._send(replica.address, submit)

    def _move(self, address: str) -> None:
        """What has given nothing there goes elsewhere, if there is anybody else: it might wait there in vain."""
        others = [replica for replica in self.replicas.routable if replica.address != address]
        if not others:
            return
        for attempt in [one for one in self._attempts[address].values() if one.submit is not None]:
            self._withdraw(attempt)
            self._renew(attempt)
            self._place(attempt)

    def _withdraw(self, attempt: _Attempt) -> None:
        if attempt.replica is not None:
            self._send(attempt.replica, Abort(attempt.wire_id))
            self._leave(attempt)

    def _leave(self, attempt: _Attempt) -> None:
        """The replica has nothing more to do with it."""
        assert attempt.replica is not None
        del self._attempts[attempt.replica][attempt.wire_id]
        self.replicas[attempt.replica].in_flight -= 1
        attempt.replica = None

    def _renew(self, attempt: _Attempt) -> None:
        """The next attempt gets an identifier of its own."""
        self.retried += 1
        if attempt.wire_id != attempt.id:
            self._aliases.pop(attempt.wire_id)
        else:
            self._aliases[attempt.id] = _NOBODY
        attempt.wire_id = self._random.randbytes(REQUEST_ID_BYTES)
        self._aliases[attempt.wire_id] = attempt.id

    def _fail(self, attempt: _Attempt, code: str, message: str) -> None:
        self._forget(attempt)
        self._give(Failed(attempt.id, code, message))

    def _forget(self, attempt: _Attempt) -> None:
        del self._requests[attempt.id]
        self._parked.pop(attempt.id, None)
        if attempt.wire_id != attempt.id:
            del self._aliases[attempt.id], self._aliases[attempt.wire_id]
