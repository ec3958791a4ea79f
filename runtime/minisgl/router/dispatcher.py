"""Decides which replica gets each request of a worker, and retries the request when that replica is lost, drains or
refuses it. No sockets, no clock.

A request whose replica is lost is resubmitted to another replica, with the tokens that it has received, or waits until
one can take it. Its answer goes on behind these tokens: only a replica with the same model can continue it. Every
attempt has an identifier of its own on the wire, so late messages about an earlier attempt match no request.

An engine takes some tens of messages between two steps. What is sent to it waits in its socket in the order of sending,
so while several tenants are here only as many new requests are sent as it takes soon. The others wait here, in turns.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec
import numpy as np

from minisgl.router.continuation import model_difference
from minisgl.router.drain_ends import DrainEnds
from minisgl.router.replicas import STALE_SECONDS, FileHashes, Replica, Replicas
from minisgl.router.routing import Candidate, pick_replica, prefix_blocks
from minisgl.router.turns import Turns
from minisgl.tokenizer.session import Progress
from minisgl.wire.messages import (
    REQUEST_ID_BYTES,
    Abort,
    Ack,
    EndDrain,
    Failed,
    ModelCard,
    Pool,
    Pooled,
    PromptLogprobs,
    Status,
    Submit,
    Tokens,
    Welcome,
)

MAX_ENGINE_LOSSES: Final = 2
"""Engines that may be lost with a request in them. One that kills every engine that runs it must not kill them all."""
PROGRESS_TOKENS: Final = 16
"""A loss does not count against a request that has received this many tokens since the one before."""

MAX_UNANSWERED: Final = 16
"""New requests for each engine that it has not answered yet while several tenants are here: a further one waits for
these alone."""
UNANSWERED_OF_ONE: Final = 256
"""The same for one tenant."""
SHARED_SECONDS: Final = 30.0
"""Time after which a tenant counts as gone."""

QUEUE_FULL: Final = "queue_full"
DRAINING: Final = "draining"
"""Codes of refusals that another replica need not share."""

Columns = TypeVar("Columns", Tokens, Pooled)
"""A message with a row for each of several requests."""

UNAVAILABLE: Final = "engine_unavailable"
UNSUPPORTED: Final = "unsupported_by_engine"
MODEL_CHANGED: Final = "model_changed"
_EXPIRED_ID: Final = bytes(REQUEST_ID_BYTES)
"""Replaces the identifier of an earlier attempt."""


@dataclass(slots=True, eq=False)
class _Request:
    """One request, and the replica that has it."""

    id: bytes
    submit: Submit | Pool
    """With `output` as of the end of its last attempt."""
    files: FileHashes | None
    """Tokenizer files that its token ids belong to."""
    attempt_id: bytes
    """Identifier on the wire; the request's own for the first attempt."""
    blocks: tuple[int, ...] | None = None
    """Hashes of its prompt's blocks; None: not computed yet."""
    replica: str | None = None
    """Address; None: it waits for a replica."""
    model: ModelCard | None = None
    """Model that its tokens belong to; None: it was never sent to a replica."""
    is_visible: bool = False
    """Its client has output, as of the end of its last attempt: the answer cannot begin again."""
    acked: bool = False
    is_unanswered: bool = False
    """The replica has it, and will say soon whether it takes it."""
    losses: int = 0
    """Those that count."""
    tokens_at_loss: int = 0
    """Tokens at the last loss."""
    refused_by: set[str] = field(default_factory=set)
    """Addresses of replicas whose queues are full."""
    refusal: Failed | None = None
    """The last refusal."""
    moved_because: str = ""
    """Why its last attempt ended; empty: it has had none."""
    deadline: float | None = None
    """On the clock of `Replicas.now`; None: no deadline."""
    expires_at: float | None = None
    """End of its wait, counted from when no replica could take it; None: one has taken it."""
    wait_seconds: float | None = None
    """Longest wait: the rest of the drain of the replica that was lost with it; None: the queue timeout, or it has not
    begun to wait."""

    def fits(self, replica: Replica) -> bool:
        """Return whether a replica understands all of the request."""
        return not replica.lacks or replica.lacks.isdisjoint(self.submit.features)

    def difference(self, replica: Replica) -> str:
        """Return why a replica, now or before it was lost, cannot continue the answer; empty: it can, or is unknown."""
        if self.model is None or replica.known is None:
            return ""
        answer = self.submit.params.max_tokens if isinstance(self.submit, Submit) else 0
        length = len(self.submit.prompt) // 4 + (answer or 0)
        return model_difference(self.model, replica.known.model, length)

    @property
    def is_answered_soon(self) -> bool:
        """Whether a replica gives it a row soon after it reads it: a grammar is compiled first, and texts that are
        pooled take no row, and go into a step by hundreds."""
        return isinstance(self.submit, Submit) and not self.submit.constraint.grammar

    @property
    def tokens(self) -> int:
        """Tokens that it had received at the end of its last attempt."""
        return len(self.submit.output) // 4

    @property
    def next_losses(self) -> int:
        """Value of `losses` after a loss now."""
        return self.losses + (self.tokens - self.tokens_at_loss < PROGRESS_TOKENS)

    def count_loss(self) -> None:
        self.losses, self.tokens_at_loss = self.next_losses, self.tokens


class Dispatcher:
    """Owns all requests of a worker from `submit` to their end. `deliver` receives the engines' messages under the
    identifiers of the session, `send` a message for the replica at an address."""

    def __init__(
        self,
        queue_seconds: float,
        stall_seconds: float,
        *,
        deliver: Callable[[Ack | Failed | Tokens | Pooled | PromptLogprobs], None],
        send: Callable[[str, Submit | Pool | Abort | EndDrain], None],
        reencode: Callable[[bytes], None],
        progress: Callable[[bytes], Progress | None],
        placed: Callable[[bytes, str, str], None] = lambda request_id, engine, moved_because: None,
        stale_seconds: float = STALE_SECONDS,
        continues: bool = True,
        drain_seconds: float = 0.0,
        max_unanswered: int = MAX_UNANSWERED,
    ) -> None:
        """A request waits for a replica for at most `queue_seconds`. A replica with requests that has sent nothing for
        `stall_seconds` counts as lost; after `stale_seconds` it gets no new requests. `reencode` receives requests
        without visible output whose token ids belong to tokenizer files that are no longer in use: submit them again.
        `progress` returns the part of a request's answer that was delivered, None for one that has ended. `placed` is
        told the name of the engine to which a request is sent, and why it left the one before. `continues`:
        False fails requests with visible output when their replica is lost, and ends no drain early. `drain_seconds`:
        longest drain; requests of a replica whose drain ends earlier may wait for the rest of it. `max_unanswered`: see
        MAX_UNANSWERED."""
        self.replicas = Replicas(stale_seconds)
        self.requests_wait = False
        """Requests wait for a replica that have not been submitted yet, or are parked, and one shall come for them; set
        by the caller."""
        self._drain_ends = DrainEnds(queue_seconds, drain_seconds)
        self._queue_seconds = queue_seconds
        self._stall_seconds = stall_seconds
        self._deliver = deliver
        self._send = send
        self._reencode = reencode
        self._progress = progress
        self._placed = placed
        self._continues = continues
        self._requests: dict[bytes, _Request] = {}
        """Requests by the session's identifiers."""
        self._attempts: dict[str, dict[bytes, _Request]] = {}
        """Requests of each replica, by the identifiers of their attempts."""
        self._parked: dict[bytes, _Request] = {}
        self._refused: dict[bytes, _Request] = {}
        """Parked requests with tokens that full queues have refused: new requests wait behind them."""
        self._waiting: Turns[_Request] = Turns()
        """New requests that were not sent to a replica yet."""
        self._max_unanswered = max_unanswered
        self._unanswered = 0
        self._last_tenant: bytes | None = None
        self._shared_until = -math.inf
        """Until then several tenants are here."""
        self._session_ids: dict[bytes, bytes] = {}
        """The session's identifier of each attempt that has another one."""
        self._random = random.SystemRandom()
        self.unix_ms = 0
        """Unix time, which the caller sets together with `replicas.now`: deadlines of new requests refer to it."""
        self.resubmitted = 0
        """Counts the attempts after the first one of a request."""

    @property
    def num_parked(self) -> int:
        """Number of requests that wait because no replica is routable."""
        return 0 if self.replicas.routable else len(self._parked)

    @property
    def awaits_replica(self) -> bool:
        """True while a request waits that no known replica can take."""
        return bool(self._parked)

    def add(self, address: str) -> None:
        self.replicas.add(address)
        self._attempts[address] = {}

    def remove(self, address: str) -> None:
        """Forget a replica that was lost before."""
        self.replicas.remove(address)
        assert not self._attempts.pop(address)

    def welcome(self, address: str, welcome: Welcome) -> None:
        """A replica begins to serve, or has restarted: then it has forgotten its earlier requests."""
        if self.replicas[address].welcome is not None:
            self.lost(address, UNAVAILABLE, "the engine was restarted")
        self.replicas.welcome(address, welcome)
        self.dispatch_parked()

    def status(self, address: str, status: Status) -> None:
        begins_to_drain = status.draining and not self.replicas[address].draining
        self.replicas.status(address, status)
        if begins_to_drain:
            self._move_unstarted(address, "the engine drains")
        self.dispatch_parked()

    def lost(self, address: str, code: str, message: str) -> None:
        """Resubmit the requests of a replica, unless this is the last loss that they may survive: these fail with
        `code`. The end of a drain is no such loss; after an early one requests may wait as long as they could have run.
        """
        attempts = self._attempts[address]
        self._attempts[address] = {}
        counts = not self.replicas[address].draining
        wait_seconds = self._drain_ends.wait_seconds(self.replicas[address], self.replicas.now)
        self.replicas.lost(address, message)
        for request in attempts.values():
            request.replica = None
            self._note_answer(request)
            if not self._take_progress(request):
                continue
            if counts:
                request.count_loss()
            if request.is_visible and not self._continues:
                self._fail(request, code, message)
            elif counts and request.losses >= MAX_ENGINE_LOSSES:
                self._fail(request, code, f"{message}; it was the second engine to be lost with this request")
            else:
                if request.expires_at is None:
                    request.wait_seconds = wait_seconds
                self._resubmit(request, message)

    def submit(self, submit: Submit | Pool, deadline_ms: int = 0) -> None:
        """Send a new request to a replica, or a known one with token ids of the tokenizer files that are in use now.
        `deadline_ms`: Unix time in ms after which it ends in an error; 0: none."""
        request = self._requests.get(submit.id)
        if request is None:
            request = _Request(submit.id, submit, self.replicas.files, submit.id)
            if deadline_ms:
                request.deadline = self.replicas.now + (deadline_ms - self.unix_ms) / 1000
            self._requests[submit.id] = request
        else:
            assert request.replica is None
            request.submit, request.blocks, request.files = submit, None, self.replicas.files
        if submit.tenant != self._last_tenant:
            if self._last_tenant is not None:
                self._shared_until = self.replicas.now + SHARED_SECONDS
            self._last_tenant = submit.tenant
        self._waiting.add(submit.tenant, request.id, request)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send new requests, one of each tenant in turn, as many as replicas answer soon. Call it after messages of
        replicas."""
        is_shared = self.replicas.now < self._shared_until
        most = self._max_unanswered if is_shared else max(self._max_unanswered, UNANSWERED_OF_ONE)
        while self._waiting and self._unanswered < most * max(len(self.replicas.accepting), 1):
            self._dispatch(self._waiting.take())

    def abort(self, request_id: bytes) -> None:
        if (request := self._requests.get(request_id)) is not None:
            self._abort_attempt(request)
            self._forget(request)

    def acked(self, address: str, ack: Ack) -> None:
        request = self._attempts[address].get(ack.id)
        if request is None:
            return
        request.expires_at = request.wait_seconds = None
        self._note_answer(request)
        if not request.acked or request.submit.output:
            request.acked = True
            self._deliver(Ack(request.id))

    def failed(self, address: str, failed: Failed) -> None:
        request = self._attempts[address].get(failed.id)
        if request is None:
            return
        self._end_attempt(request)
        if failed.code == DRAINING:
            self.replicas.mark_draining(address)
        if not self._take_progress(request):
            return
        if failed.code not in (QUEUE_FULL, DRAINING) or (request.is_visible and not self._continues):
            self._fail(request, failed.code, failed.message)
            return
        if failed.code == QUEUE_FULL:
            request.refused_by.add(address)
            request.refusal = failed
        self._resubmit(request, failed.message)

    def prompt_scored(self, address: str, message: PromptLogprobs) -> None:
        request = self._attempts[address].get(message.id)
        if request is not None:
            self._deliver(msgspec.structs.replace(message, id=request.id))

    def tokens(self, address: str, tokens: Tokens) -> None:
        """Raises ValidationError for a message whose columns differ in length."""
        self._deliver(self._for_session(tokens))
        # Nearly every token is not the last of its answer: those cost nothing here.
        self._end_rows(address, tokens.ids, np.flatnonzero(np.frombuffer(tokens.finish, np.uint8)).tolist())

    def pooled(self, address: str, pooled: Pooled) -> None:
        """Raises ValidationError for a message whose columns differ in length."""
        self._deliver(self._for_session(pooled))
        self._end_rows(address, pooled.ids, range(len(pooled.ids) // REQUEST_ID_BYTES))

    def _for_session(self, message: Columns) -> Columns:
        """The message with the identifiers of the session."""
        if not self._session_ids:
            return message
        starts = range(0, len(message.ids), REQUEST_ID_BYTES)
        attempt_ids = [message.ids[start : start + REQUEST_ID_BYTES] for start in starts]
        session_ids = b"".join([self._session_ids.get(attempt_id, attempt_id) for attempt_id in attempt_ids])
        return msgspec.structs.replace(message, ids=session_ids)

    def _end_rows(self, address: str, ids: bytes, rows: Iterable[int]) -> None:
        """Forget the requests in these rows of a message with identifiers `ids`: they have ended."""
        attempts = self._attempts[address]
        for row in rows:
            if (request := attempts.get(ids[row * REQUEST_ID_BYTES : (row + 1) * REQUEST_ID_BYTES])) is not None:
                self._end_attempt(request)
                self._forget(request)

    def tick(self) -> list[str]:
        """Time has passed. Returns the addresses of replicas that were silent for so long that they count as lost. Call
        it about twice a second."""
        self.replicas.tick()
        stalled = []
        for replica in list(self.replicas):
            if replica.welcome is None:
                continue
            silence = self.replicas.silence(replica)
            if silence > self._stall_seconds and self._attempts[replica.address]:
                self.lost(replica.address, "engine_stalled", f"the engine has sent nothing for {silence:.0f} s")
                stalled.append(replica.address)
            elif self.replicas.is_stale(replica):
                cause = f"the engine has sent nothing for {silence:.0f} s"
                self._move_unstarted(replica.address, cause)
                self._move_silent(replica.address, cause)
        for request in list(self._parked.values()):
            if request.deadline is not None and request.deadline <= self.replicas.now:
                self._fail(request, "deadline_exceeded", "the request's deadline passed before an engine could take it")
            elif request.expires_at is not None and self.replicas.now >= request.expires_at:
                seconds = round(request.wait_seconds or 0.0, 1)
                self._fail(request, UNAVAILABLE, f"no engine could take the request for {seconds:g} s; retry")
        for request in self._refused.values():
            request.refused_by.clear()
        self.dispatch_parked()
        self._end_drain()
        return stalled

    def dispatch_parked(self) -> None:
        """Send waiting requests to replicas that can take them, those with tokens first."""
        if self._parked and self.replicas.accepting:
            for request in sorted(self._parked.values(), key=lambda request: not request.tokens):
                self._dispatch(request)

    def set_files_in_use(self, hashes: FileHashes) -> None:
        """Use these tokenizer files for new requests. Requests that a replica has already stay there."""
        self.replicas.set_files_in_use(hashes)
        for request in list(self._parked.values()):
            self._dispatch(request)

    def _dispatch(self, request: _Request) -> None:
        """Send a request to a replica, or park it until there is one, or until it has token ids of the files in use."""
        able = self._able(request)
        if request.tokens and not able and (difference := self._difference(request)):
            if request.is_visible:
                self._fail(request, MODEL_CHANGED, f"no engine can continue the answer: {difference}")
                return
            # Nobody has seen anything of it: it begins again, with the model that is served now.
            request.submit = msgspec.structs.replace(request.submit, output=b"")
            self._begin_again(request)
            return
        if not request.tokens and request.files is not self.replicas.files:
            self._begin_again(request)
            return
        avoided = request.refused_by if request.tokens else request.refused_by.union(*self._full_for_continued())
        candidates = [replica for replica in able if replica.address not in avoided]
        if candidates:
            self._send_to(self._pick(candidates, request), request)
        elif not request.tokens and self.replicas.routable and not any(map(request.fits, self.replicas)):
            unknown = frozenset().union(*(replica.lacks for replica in self.replicas.routable))
            names = ", ".join(sorted(request.submit.features & unknown))
            self._fail(request, UNSUPPORTED, f"no connected engine knows {names}; update the engines")
        elif able and not request.tokens and request.refusal is not None:
            self._fail(request, request.refusal.code, request.refusal.message)
        else:
            if able and request.tokens:
                self._refused[request.id] = request
            else:
                request.refused_by.clear()
            if request.expires_at is None:
                request.wait_seconds = request.wait_seconds or self._queue_seconds
                request.expires_at = self.replicas.now + request.wait_seconds
            self._parked[request.id] = request

    def _begin_again(self, request: _Request) -> None:
        """Have the prompt encoded with the tokenizer files in use."""
        self._unpark(request)
        request.files = None
        self._reencode(request.id)

    def _able(self, request: _Request) -> list[Replica]:
        """Replicas that can take a request now, unless they refuse it."""
        if request.tokens:
            able = [replica for replica in self.replicas.accepting if not request.difference(replica)]
        else:
            able = self.replicas.routable
        return [replica for replica in able if request.fits(replica)]

    def _difference(self, request: _Request) -> str:
        """Return why no replica that is known can ever continue an answer; empty: one may."""
        reason = ""
        for replica in self.replicas:
            if not (reason := request.difference(replica)):
                return ""
        return reason

    def _full_for_continued(self) -> list[set[str]]:
        """Addresses of replicas whose full queues have refused requests with tokens, which go first."""
        return [request.refused_by for request in self._refused.values()]

    def _unpark(self, request: _Request) -> None:
        self._waiting.remove(request.submit.tenant, request.id)
        self._parked.pop(request.id, None)
        self._refused.pop(request.id, None)

    def _pick(self, replicas: list[Replica], request: _Request) -> Replica:
        if len(replicas) == 1 and len(self._attempts) == 1:
            # No choice now, and no prefixes to remember for a later one.
            request.blocks = ()
            return replicas[0]
        submit = request.submit
        if request.blocks is None:
            request.blocks = prefix_blocks(submit.prompt, submit.cache_salt)
        by_name = {replica.name: replica for replica in replicas}
        candidates = [
            Candidate(name, one.load, one.prefixes.matched_blocks(request.blocks)) for name, one in by_name.items()
        ]
        return by_name[pick_replica(candidates, submit.prompt)]

    def _send_to(self, replica: Replica, request: _Request) -> None:
        self._unpark(request)
        request.replica = replica.address
        assert replica.welcome is not None, "only replicas that serve get requests"
        if not request.tokens:
            request.model = replica.welcome.model
        self._attempts[replica.address][request.attempt_id] = request
        request.is_unanswered = request.is_answered_soon
        self._unanswered += request.is_unanswered
        replica.sent(request.blocks or ())
        submit = request.submit
        if request.attempt_id != request.id:
            self.resubmitted += 1
            submit = msgspec.structs.replace(submit, id=request.attempt_id)
        if request.deadline is not None:
            remaining_ms = max(round((request.deadline - self.replicas.now) * 1000), 1)
            submit = msgspec.structs.replace(submit, remaining_ms=remaining_ms)
        self._placed(request.id, replica.name, request.moved_because)
        self._send(replica.address, submit)

    def _move_unstarted(self, address: str, cause: str) -> None:
        """Resubmit requests without tokens if another replica can take them: they might wait long at this one."""
        others = [replica for replica in self.replicas.routable if replica.address != address]
        if others:
            for request in list(self._attempts[address].values()):
                progress = self._progress(request.id)
                if progress is not None and not progress.tokens and any(map(request.fits, others)):
                    self._abort_attempt(request)
                    self._resubmit(request, cause)

    def _move_silent(self, address: str, cause: str) -> None:
        """Resubmit requests with tokens from a replica that is silent, if another one can continue them. This is a
        loss, unless it would be one too many: then the request stays. At a replica that drains it is none."""
        if not self._continues or not self.replicas.accepting:
            return
        counts = not self.replicas[address].draining
        for request in list(self._attempts[address].values()):
            if not self._take_progress(request) or not request.tokens:
                continue
            if (not counts or request.next_losses < MAX_ENGINE_LOSSES) and self._able(request):
                if counts:
                    request.count_loss()
                self._abort_attempt(request)
                self._resubmit(request, cause)

    def _end_drain(self) -> None:
        """Have a replica end its drain early if requests wait for its successor; it is lost soon after."""
        waits = self.requests_wait and self._continues
        if (replica := self._drain_ends.next_replica(self.replicas, requests_wait=waits)) is not None:
            replica.ends_drain = True
            self._send(replica.address, EndDrain())

    def _take_progress(self, request: _Request) -> bool:
        """Add the tokens that a request has received to its next attempt. False: it has ended, and is forgotten."""
        progress = self._progress(request.id)
        if progress is None:
            self._abort_attempt(request)
            self._forget(request)
            return False
        request.is_visible = progress.is_visible
        if progress.tokens != request.submit.output:
            request.submit = msgspec.structs.replace(request.submit, output=progress.tokens)
        return True

    def _abort_attempt(self, request: _Request) -> None:
        if request.replica is not None:
            self._send(request.replica, Abort(request.attempt_id))
            self._end_attempt(request)

    def _end_attempt(self, request: _Request) -> None:
        """The replica has nothing more to do with the request."""
        assert request.replica is not None
        del self._attempts[request.replica][request.attempt_id]
        self.replicas[request.replica].in_flight -= 1
        request.replica = None
        self._note_answer(request)

    def _note_answer(self, request: _Request) -> None:
        self._unanswered -= request.is_unanswered
        request.is_unanswered = False

    def _resubmit(self, request: _Request, cause: str) -> None:
        """Begin another attempt, with an identifier of its own. `cause`: why the last one ended."""
        request.moved_because = cause
        if request.attempt_id != request.id:
            self._session_ids.pop(request.attempt_id)
        else:
            self._session_ids[request.id] = _EXPIRED_ID
        request.attempt_id = self._random.randbytes(REQUEST_ID_BYTES)
        self._session_ids[request.attempt_id] = request.id
        self._dispatch(request)

    def _fail(self, request: _Request, code: str, message: str) -> None:
        self._forget(request)
        self._deliver(Failed(request.id, code, message))

    def _forget(self, request: _Request) -> None:
        del self._requests[request.id]
        self._unpark(request)
        if request.attempt_id != request.id:
            del self._session_ids[request.id], self._session_ids[request.attempt_id]
