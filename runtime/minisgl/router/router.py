"""The engines of a model, on this machine or in a cluster: one connection to each, with the tokenizer files that they
use."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import msgspec
import zmq

from minisgl.errors import TokenizerError
from minisgl.router.cache_flushes import CacheFlushes
from minisgl.router.config import TokenizerConfig
from minisgl.router.discovery import Discovery
from minisgl.router.dispatcher import UNAVAILABLE, Dispatcher
from minisgl.router.engine_source import EngineSource
from minisgl.router.link import Link
from minisgl.router.replicas import FileHashes
from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.tokenizer.session import Session
from minisgl.wire.messages import (
    WIRE_VERSION,
    Abort,
    Ack,
    EndDrain,
    Failed,
    Flush,
    Flushed,
    FromScheduler,
    Hello,
    Pool,
    Pooled,
    PromptLogprobs,
    Status,
    Submit,
    Tokens,
    Welcome,
)
from minisgl.wire.peer_secret import PeerSecret
from minisgl.wire.sockets import Codec, WireError
from minisgl.wire.status import ReplicaView
from minisgl.wire.text import (
    TEXT_WIRE_VERSION,
    FromTokenizer,
    Generate,
    ServedModel,
    WorkerState,
)

logger = logging.getLogger(__name__)

TICK_SECONDS: Final = 0.5
STATE_SECONDS: Final = 0.1
"""Between two reports of the same state with other figures."""
FETCH_AGAIN_SECONDS: Final = 2.0
_MAX_NAMED: Final = 3
"""Engines that are named in the reason why none can take a request."""


class Router:
    """Keeps one link for each address that discovery finds, or that an engine is still connected from."""

    wait_ms: Final = int(TICK_SECONDS * 1000)

    def __init__(
        self,
        context: zmq.Context[Any],
        config: TokenizerConfig,
        source: EngineSource,
        session: Session,
        *,
        send_to_frontend: Callable[[FromTokenizer], None],
        wake: Callable[[], None],
        reencode: Callable[[Generate], None],
    ) -> None:
        """`wake` ends the caller's wait, from any thread. `reencode` receives requests whose prompts were encoded with
        tokenizer files that are no longer in use."""
        self.tokenizer: LoadedTokenizer | None = None
        """The one in use."""
        self._names = config.names
        self._parsers = config.parsers
        self._source = source
        self._context = context
        self._session = session
        self._send_to_frontend = send_to_frontend
        self._wake = wake
        self._reencode = reencode
        self._links: dict[str, Link] = {}
        self._discovery = Discovery(source.sockets, source.find, wake)
        self._dispatcher = Dispatcher(
            config.queue_seconds,
            source.stall_seconds,
            deliver=session.receive,
            send=self._send,
            reencode=self._on_reencode,
            progress=session.progress,
            placed=session.placed,
            stale_seconds=source.stale_seconds,
            continues=config.continues,
            drain_seconds=config.drain_seconds,
        )
        self._replicas = self._dispatcher.replicas
        self._flushes = CacheFlushes(send_to_frontend)
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._name = config.name
        self._secret = PeerSecret(config.peer_secret)
        self._greeted: dict[str, int] = {}
        """Wire version of the last greeting, by address."""
        self._loader = ThreadPoolExecutor(1, "tokenizer-files")
        self._loading: Future[LoadedTokenizer] | None = None
        self._loaded: list[LoadedTokenizer] = []
        """The tokenizer in use, and those of files that other engines have."""
        self._fetch_at: dict[frozenset[tuple[str, str]], float] = {}
        """Times of the next attempt to load files that could not be loaded, by their hashes."""
        self._files_problem = ""
        self._next_tick = 0.0
        self._files_changes = -1
        """`changes` of the replicas at the last look at their files."""
        self._serving = False
        """A model was in the last report to the frontend."""
        self._next_state_at = 0.0
        self._sent_changes = self._sent_statuses = -1
        if source.tokenizer is not None:
            self._set_loaded([source.tokenizer])
            self._use(source.tokenizer)

    def start(self) -> None:
        self._discovery.start()
        self._send_state()

    def register(self, poller: zmq.Poller) -> None:
        for link in self._links.values():
            link.register(poller)

    def run_once(self, ready: Mapping[Any, int]) -> None:
        """Handle all messages that have arrived, and time that has passed."""
        self._replicas.now, self._dispatcher.unix_ms = time.monotonic(), time.time_ns() // 1_000_000
        self._update_addresses()
        for address, link in self._links.items():
            for frame in link.receive(ready):
                self._on_frame(address, frame)
            if link.take_lost():
                for frame in link.receive_rest():
                    self._on_frame(address, frame)
                self._lose(address, UNAVAILABLE, "the connection to the engine was lost")
        if is_tick := self._replicas.now >= self._next_tick:
            self._next_tick = self._replicas.now + TICK_SECONDS
            for address in self._dispatcher.tick():
                self._reconnect(address)
        if self._dispatcher.awaits_replica:
            self._discovery.look_up_soon()
        if is_tick or self._loading is not None or self._replicas.changes != self._files_changes:
            self._update_files()
        self._send_state()

    def send(self, message: Submit | Pool | Abort) -> None:
        if not isinstance(message, Abort):
            self._dispatcher.submit(message, self._session.deadline_ms(message.id))
        else:
            self._dispatcher.abort(message.id)

    def set_requests_wait(self, waits: bool) -> None:
        """Take the frontend's word whether requests wait for an engine."""
        self._dispatcher.requests_wait = waits

    def flush_prefix_caches(self, flush: Flush) -> None:
        addresses = [replica.address for replica in self._replicas if replica.welcome is not None]
        for address in addresses:
            self._links[address].send(flush)
        self._flushes.begin(flush.id, addresses)

    def flush(self) -> None:
        """Send waiting requests, as many as engines answer soon, and messages, as far as the sockets take them."""
        self._dispatcher.send_waiting()
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        self._discovery.stop()
        self._loader.shutdown(wait=True, cancel_futures=True)
        for link in self._links.values():
            link.close()

    def _update_addresses(self) -> None:
        found = self._discovery.sockets
        for address in found.keys() - self._links.keys():
            self._links[address] = Link(self._context, found[address])
            self._greet(address, WIRE_VERSION)
            self._dispatcher.add(address)
        for address in self._links.keys() - found.keys():
            # A connected engine stays: a name that cannot be resolved for a moment is no reason to end an answer.
            if self._replicas[address].welcome is None:
                self._links.pop(address).close()
                self._dispatcher.remove(address)

    def _on_frame(self, address: str, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
            match message:
                case Tokens():
                    self._dispatcher.tokens(address, message)
                case Pooled():
                    self._dispatcher.pooled(address, message)
                case PromptLogprobs():
                    self._dispatcher.prompt_scored(address, message)
                case Ack():
                    self._dispatcher.acked(address, message)
                case Failed() if message.id:
                    self._dispatcher.failed(address, message)
                case Failed(code="wire_version"):
                    self._dispatcher.lost(address, UNAVAILABLE, message.message)
                    if self._greeted[address] == WIRE_VERSION:
                        # An older engine knows the version before. Another refusal would repeat itself; an engine of
                        # another version comes with another connection.
                        self._greet(address, WIRE_VERSION - 1)
                case Failed():
                    # It is about this connection as a whole.
                    self._lose(address, message.code, message.message)
                case Status():
                    # One that comes before the welcome belongs to an unknown start.
                    if self._replicas[address].welcome is not None:
                        self._dispatcher.status(address, message)
                case Flushed():
                    self._flushes.flushed(address, message)
                case Welcome():
                    self._dispatcher.welcome(address, message)
        except (WireError, msgspec.ValidationError) as error:
            # It has changed nothing, but may have contained tokens: each answer goes on behind those before it.
            self._lose(address, "engine_error", f"the engine sent an invalid message: {error}")

    def _lose(self, address: str, code: str, message: str) -> None:
        if self._replicas[address].welcome is not None:
            logger.warning("engine %s: %s", self._replicas[address].name, message)
        self._dispatcher.lost(address, code, message)
        self._reconnect(address)

    def _reconnect(self, address: str) -> None:
        self._flushes.lost(address)
        self._links[address].reconnect()
        self._greet(address, WIRE_VERSION)

    def _greet(self, address: str, version: int) -> None:
        self._greeted[address] = version
        link = self._links[address]
        link.send(Hello(version, self._name, self._secret.proof("scheduler", link.identity.hex())))

    def _send(self, address: str, message: Submit | Pool | Abort | EndDrain) -> None:
        if isinstance(message, EndDrain):
            logger.info("engine %s ends its drain early: requests wait for its successor", self._replicas[address].name)
        self._links[address].send(message)

    def _on_reencode(self, request_id: bytes) -> None:
        if (request := self._session.begin_reencode(request_id)) is not None:
            self._reencode(request)

    def _update_files(self) -> None:
        """Load the tokenizer files that engines have, and switch when more engines can serve with other ones.

        They are loaded before they are needed: no request waits for that, and files that cannot be used are found
        while those before them still serve."""
        if self._loading is not None and self._loading.done():
            loading, self._loading = self._loading, None
            self._on_files_loaded(loading)
        replicas = self._replicas
        needed = [one for one in self._loaded if one is self.tokenizer or replicas.addresses_with_files(one.hashes)]
        if len(needed) < len(self._loaded):
            self._set_loaded(needed)
        if (hashes := replicas.files_to_switch_to()) is not None:
            self._use(next(one for one in self._loaded if one.hashes == hashes))
        if self._loading is None:
            self._load_files()
        self._files_changes = replicas.changes

    def _load_files(self) -> None:
        for hashes in self._replicas.files_to_load():
            key = frozenset(hashes.items())
            if self._replicas.now >= self._fetch_at.get(key, 0.0):
                self._fetch_at[key] = self._replicas.now + FETCH_AGAIN_SECONDS
                self._loading = self._loader.submit(self._load, hashes, self._replicas.addresses_with_files(hashes))
                self._loading.add_done_callback(lambda _: self._wake())
                return

    def _load(self, hashes: FileHashes, addresses: Sequence[str]) -> LoadedTokenizer:
        """Runs in a thread. Raises TokenizerError, OSError."""
        return load(self._source.files(hashes, addresses), self._parsers)

    def _on_files_loaded(self, loading: Future[LoadedTokenizer]) -> None:
        try:
            tokenizer = loading.result()
        except (TokenizerError, OSError) as error:
            if str(error) != self._files_problem:
                logger.error("%s; retrying every %g s", error, FETCH_AGAIN_SECONDS)
            self._files_problem = str(error)
            return
        logger.info("the tokenizer files are loaded")
        self._files_problem = ""
        self._fetch_at.pop(frozenset(tokenizer.hashes.items()), None)
        self._set_loaded([*self._loaded, tokenizer])

    def _set_loaded(self, loaded: list[LoadedTokenizer]) -> None:
        self._loaded = loaded
        self._replicas.set_loaded_files([one.hashes for one in loaded])

    def _use(self, tokenizer: LoadedTokenizer) -> None:
        if self.tokenizer is not None:
            logger.info("switching to the tokenizer files of most engines")
        self.tokenizer = tokenizer
        self._session.use(tokenizer.token_bytes, tokenizer.answers)
        self._dispatcher.set_files_in_use(tokenizer.hashes)

    def _send_state(self) -> None:
        """Report the state immediately after a change, else every STATE_SECONDS. While a model is served, nothing is
        reported without a new status: the frontend must notice that the engines are silent."""
        replicas = self._replicas
        is_news = not self._serving or replicas.statuses != self._sent_statuses
        if replicas.changes == self._sent_changes and (replicas.now < self._next_state_at or not is_news):
            return
        self._sent_changes, self._sent_statuses = replicas.changes, replicas.statuses
        self._next_state_at = replicas.now + STATE_SECONDS
        views = replicas.views()
        served = replicas.engine_info()
        if served is None or self.tokenizer is None:
            self._session.close()
            model, reason = None, self._unavailable_reason(views)
        else:
            card, epoch = served
            self._session.open(card)
            names = self._names or (card.name,)
            card = msgspec.structs.replace(card, name=names[0])
            model = ServedModel(
                card=card,
                epoch=epoch,
                defaults=self.tokenizer.defaults,
                names=names,
                longest_token=self.tokenizer.encoder.longest_token,
                capabilities=self.tokenizer.capabilities,
            )
            reason = ""
        self._serving = model is not None
        self._send_to_frontend(
            WorkerState(
                version=TEXT_WIRE_VERSION,
                at=time.monotonic(),
                model=model,
                status=replicas.aggregate_status(),
                reason=reason,
                replicas=views,
                retried=self._dispatcher.resubmitted,
                parked=self._dispatcher.num_parked,
                no_engines=self._discovery.found_none and not views,
            )
        )

    def _unavailable_reason(self, views: Sequence[ReplicaView]) -> str:
        """Why no engine can take a request."""
        if not views:
            return self._discovery.problem or "no engine is connected yet"
        if self._files_problem:
            return self._files_problem
        problems = [f"{view.replica or view.address}: {view.reason}" for view in views]
        more = f"; and {len(views) - _MAX_NAMED} more" if len(views) > _MAX_NAMED else ""
        return f"no engine can take a request: {'; '.join(problems[:_MAX_NAMED])}{more}"
