"""The engines of a model in a cluster: found by name, coming and going, with the tokenizer files that they give out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from minisgl.router.config import TokenizerConfig
from minisgl.router.discovery import Discovery, Resolve, host_in_url
from minisgl.router.dispatcher import UNAVAILABLE, Dispatcher
from minisgl.router.flushes import Flushes
from minisgl.router.link import Link
from minisgl.router.model_download import obtain
from minisgl.tokenizer.errors import TokenizerError
from minisgl.tokenizer.loaded import LoadedTokenizer, load
from minisgl.tokenizer.session import Session
from minisgl.wire.messages import (
    WIRE_VERSION,
    Abort,
    Ack,
    Failed,
    Flush,
    Flushed,
    FromScheduler,
    Hello,
    PromptLogprobs,
    Status,
    Submit,
    Tokens,
    Welcome,
)
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
TELL_SECONDS: Final = 0.1
"""Between two accounts of the same state with other figures."""
FETCH_AGAIN_SECONDS: Final = 2.0
_NAMED: Final = 3
"""Engines in the reason why none can take a request."""


class Router:
    """One link for each address that the name has, or that an engine is still connected from."""

    wait_ms: Final = int(TICK_SECONDS * 1000)

    def __init__(
        self,
        context: zmq.Context[Any],
        config: TokenizerConfig,
        session: Session,
        *,
        tell: Callable[[FromTokenizer], None],
        wake: Callable[[], None],
        encode_again: Callable[[Generate], None],
        resolve: Resolve,
    ) -> None:
        """`wake` ends the caller's wait, from any thread. `encode_again` gets requests whose prompts were encoded with
        tokenizer files that are not in use any more."""
        assert config.engines is not None
        self.tokenizer: LoadedTokenizer | None = None
        """The one in use."""
        self._config = config.engines
        self._context = context
        self._session = session
        self._tell = tell
        self._wake = wake
        self._encode_again = encode_again
        self._links: dict[str, Link] = {}
        self._discovery = Discovery(config.engines.host, wake, resolve)
        self._dispatcher = Dispatcher(
            config.engines.retry_seconds,
            config.engines.stall_seconds,
            give=self._give,
            send=self._send,
            encode_again=self._again,
        )
        self._replicas = self._dispatcher.replicas
        self._flushes = Flushes(tell)
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._hello = Hello(WIRE_VERSION, config.name)
        self._loader = ThreadPoolExecutor(1, "tokenizer-files")
        self._loading: Future[LoadedTokenizer] | None = None
        self._loaded: list[LoadedTokenizer] = []
        """Of the files that engines have: those that come up with others wait for them to be in use."""
        self._fetch_at: dict[frozenset[tuple[str, str]], float] = {}
        """When files may be asked for again that could not be loaded, by their hashes."""
        self._files_problem = ""
        self._followed_changes = -1
        self._next_tick = 0.0
        self._tell_at = 0.0
        self._told_changes = -1

    def start(self) -> None:
        self._discovery.start()
        self._tell_state()

    def register(self, poller: zmq.Poller) -> None:
        for link in self._links.values():
            link.register(poller)

    def turn(self, ready: Mapping[Any, int]) -> None:
        """Deal with what has come."""
        self._replicas.now = time.monotonic()
        self._follow_discovery()
        for address, link in self._links.items():
            for frame in link.receive(ready):
                self._on_frame(address, frame)

    def after_turn(self) -> None:
        """When everything else that has come was dealt with."""
        for address, link in list(self._links.items()):
            if link.take_lost():
                for frame in link.receive_rest():
                    self._on_frame(address, frame)
                self._lose(address, UNAVAILABLE, "the connection to the engine was lost")
        if self._replicas.now >= self._next_tick:
            self._next_tick = self._replicas.now + TICK_SECONDS
            for address in self._dispatcher.tick():
                self._connect_again(address)
        self._follow_files()
        self._tell_state()

    def send(self, message: Submit | Abort) -> None:
        if isinstance(message, Submit):
            self._dispatcher.submit(message)
        else:
            self._dispatcher.abort(message.id)

    def ask_to_flush(self, flush: Flush) -> None:
        addresses = [replica.address for replica in self._replicas if replica.welcome is not None]
        for address in addresses:
            self._links[address].send(flush)
        self._flushes.begin(flush.id, addresses)

    def flush(self) -> None:
        """Send what is waiting, as far as it can be sent."""
        for link in self._links.values():
            link.flush()

    def close(self) -> None:
        self._discovery.stop()
        self._loader.shutdown(wait=True, cancel_futures=True)
        for link in self._links.values():
            link.close()

    def _follow_discovery(self) -> None:
        found = self._discovery.addresses
        for address in found - self._links.keys():
            link = Link(self._context, f"tcp://{host_in_url(address)}:{self._config.scheduler_port}")
            self._links[address] = link
            self._dispatcher.add(address)
            link.send(self._hello)
        for address in self._links.keys() - found:
            # Who is connected goes on: a name that cannot be resolved for a moment is no reason to end an answer.
            if self._replicas[address].welcome is None:
                self._links.pop(address).close()
                self._dispatcher.remove(address)

    def _on_frame(self, address: str, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
            match message:
                case Tokens():
                    self._dispatcher.tokens(address, message)
                case PromptLogprobs():
                    self._dispatcher.prompt_scored(address, message)
                case Ack():
                    self._dispatcher.acked(address, message)
                case Failed() if message.id:
                    self._dispatcher.failed(address, message)
                case Failed():
                    # It speaks of this connection as a whole.
                    self._on_refused(address, message)
                case Status():
                    # One that comes before the welcome is of a start that we do not know.
                    if self._replicas[address].welcome is not None:
                        self._dispatcher.status(address, message)
                case Flushed():
                    self._flushes.flushed(address, message)
                case Welcome():
                    self._dispatcher.welcome(address, message)
        except (WireError, msgspec.ValidationError) as error:
            # Tokens may have been in it, so no answer can be trusted any more.
            self._lose(address, "engine_error", f"the engine sent a message that cannot be understood: {error}")

    def _on_refused(self, address: str, refused: Failed) -> None:
        if refused.code == "wire_version":
            # Asked again it would say the same; another version of it comes with another connection.
            self._dispatcher.lost(address, UNAVAILABLE, refused.message)
        else:
            self._lose(address, refused.code, refused.message)

    def _lose(self, address: str, code: str, message: str) -> None:
        if self._replicas[address].welcome is not None:
            logger.warning("engine %s at %s: %s", self._replicas[address].name, address, message)
        self._dispatcher.lost(address, code, message)
        self._connect_again(address)

    def _connect_again(self, address: str) -> None:
        self._flushes.lost(address)
        self._links[address].reconnect()
        self._links[address].send(self._hello)

    def _send(self, address: str, message: Submit | Abort) -> None:
        self._links[address].send(message)

    def _give(self, message: Ack | Failed | Tokens | PromptLogprobs) -> None:
        match message:
            case Tokens():
                self._session.tokens(message)
            case Ack():
                self._session.acked(message)
            case Failed():
                self._session.failed(message)
            case PromptLogprobs():
                self._session.prompt_scored(message)

    def _again(self, request_id: bytes) -> None:
        if (request := self._session.again(request_id)) is not None:
            self._encode_again(request)

    def _follow_files(self) -> None:
        """Load the tokenizer files that engines have, and change to others when more engines can be served so. They
        are loaded before they are needed: no request waits for that, and files that cannot be used are found out while
        those before them still serve."""
        if self._loading is not None and self._loading.done():
            loading, self._loading = self._loading, None
            self._take_files(loading)
        if self._replicas.changes == self._followed_changes:
            return
        self._forget_files()
        wanted = self._replicas.wanted_files()
        if wanted is not None:
            self._use_files(next(one for one in self._loaded if one.hashes == wanted))
        if self._loading is None:
            self._load_files()
        self._followed_changes = self._replicas.changes

    def _load_files(self) -> None:
        for hashes in self._replicas.missing_files():
            key = frozenset(hashes.items())
            if self._replicas.now >= self._fetch_at.get(key, 0.0):
                addresses = self._replicas.with_files(hashes)
                sources = [(address, self._config.control_port) for address in addresses]
                self._fetch_at[key] = self._replicas.now + FETCH_AGAIN_SECONDS
                self._loading = self._loader.submit(_fetch, dict(hashes), sources, Path(self._config.cache))
                self._loading.add_done_callback(lambda _: self._wake())
                return

    def _take_files(self, loading: Future[LoadedTokenizer]) -> None:
        try:
            tokenizer = loading.result()
        except (TokenizerError, OSError) as error:
            self._files_problem = str(error)
            logger.error("%s; trying again", error)
            return
        logger.info("the tokenizer files are loaded")
        self._files_problem = ""
        self._fetch_at.pop(frozenset(tokenizer.hashes.items()), None)
        self._keep_files([*self._loaded, tokenizer])

    def _forget_files(self) -> None:
        """Those that no engine has any more, and that are not in use."""
        needed = [one for one in self._loaded if one is self.tokenizer or self._replicas.with_files(one.hashes)]
        if len(needed) < len(self._loaded):
            self._keep_files(needed)

    def _keep_files(self, loaded: list[LoadedTokenizer]) -> None:
        self._loaded = loaded
        self._replicas.have_loaded([one.hashes for one in loaded])

    def _use_files(self, tokenizer: LoadedTokenizer) -> None:
        logger.info("the tokenizer files of most engines are in use from now on")
        self.tokenizer = tokenizer
        self._session.use(tokenizer.token_bytes)
        self._dispatcher.use_files(tokenizer.hashes)

    def _tell_state(self) -> None:
        """At once when something has changed, else now and then."""
        replicas = self._replicas
        if replicas.changes == self._told_changes and replicas.now < self._tell_at:
            return
        self._told_changes = replicas.changes
        self._tell_at = replicas.now + TELL_SECONDS
        states = replicas.states()
        served = replicas.card()
        if served is None or self.tokenizer is None:
            self._session.close()
            model, reason = None, self._why_not(states)
        else:
            card, epoch = served
            self._session.welcome(card)
            names = self._config.names or (card.name,)
            card = msgspec.structs.replace(card, name=names[0])
            model = ServedModel(card=card, epoch=epoch, defaults=self.tokenizer.defaults, names=names)
            reason = ""
        self._tell(
            WorkerState(
                version=TEXT_WIRE_VERSION,
                at=time.monotonic(),
                model=model,
                status=replicas.total_status(),
                reason=reason,
                replicas=states,
                retried=self._dispatcher.retried,
            )
        )

    def _why_not(self, states: Sequence[ReplicaView]) -> str:
        """Why nobody can take a request."""
        if not states:
            return self._discovery.problem or "no engine is connected yet"
        if self._files_problem:
            return self._files_problem
        problems = [f"{state.replica or state.address}: {state.reason}" for state in states]
        more = f"; and {len(states) - _NAMED} more" if len(states) > _NAMED else ""
        return f"no engine can take a request: {'; '.join(problems[:_NAMED])}{more}"


def _fetch(hashes: Mapping[str, str], sources: Sequence[tuple[str, int]], cache: Path) -> LoadedTokenizer:
    """In a thread. Raises TokenizerError, OSError."""
    return load(obtain(hashes, sources, cache))
