"""The engine of a server on one machine: one scheduler at an address that never changes, with its files at hand."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
import zmq

from minisgl.router.config import TokenizerConfig
from minisgl.router.link import Link
from minisgl.tokenizer.loaded import LoadedTokenizer
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
from minisgl.wire.text import TEXT_WIRE_VERSION, FromTokenizer, ServedModel, WorkerState

logger = logging.getLogger(__name__)


class OneEngine:
    """Requests fail with the connection."""

    wait_ms: Final = None
    """Nothing happens here that is not an event."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: TokenizerConfig,
        tokenizer: LoadedTokenizer,
        session: Session,
        tell: Callable[[FromTokenizer], None],
    ) -> None:
        self.tokenizer = tokenizer
        session.use(tokenizer.token_bytes)
        self._session = session
        self._tell = tell
        self._link = Link(context, config.scheduler_address)
        self._codec: Codec[FromScheduler] = Codec(FromScheduler)
        self._hello = Hello(WIRE_VERSION, config.name)
        self._names = config.names
        self._model: ServedModel | None = None
        self._status: Status | None = None
        self._reason = "the scheduler has not answered yet"

    def start(self) -> None:
        self._link.send(self._hello)
        self._tell_state()

    def register(self, poller: zmq.Poller) -> None:
        self._link.register(poller)

    def turn(self, ready: Mapping[Any, int]) -> None:
        """Deal with what has come."""
        for frame in self._link.receive(ready):
            self._on_frame(frame)

    def after_turn(self) -> None:
        """When everything else that has come was dealt with."""
        if self._link.take_lost():
            for frame in self._link.receive_rest():
                self._on_frame(frame)
            self._lose("engine_unavailable", "the connection to the engine was lost")

    def send(self, message: Submit | Abort) -> None:
        self._link.send(message)

    def ask_to_flush(self, flush: Flush) -> None:
        self._link.send(flush)

    def flush(self) -> None:
        """Send what is waiting, as far as it can be sent."""
        self._link.flush()

    def close(self) -> None:
        self._link.close()

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._codec.decode(frame)
            match message:
                case Tokens():
                    self._session.tokens(message)
                case PromptLogprobs():
                    self._session.prompt_scored(message)
                case Ack():
                    self._session.acked(message)
                case Failed():
                    self._on_failed(message)
                case Status():
                    self._status = message
                    self._tell_state()
                case Welcome():
                    self._on_welcome(message)
                case Flushed():
                    self._tell(message)
        except (WireError, msgspec.ValidationError) as error:
            # Tokens may have been in it, so no answer can be trusted any more.
            self._lose("engine_error", f"the engine sent a message that cannot be understood: {error}")

    def _on_failed(self, failed: Failed) -> None:
        if failed.id:
            self._session.failed(failed)
        else:
            # It speaks of this connection as a whole. A new one helps, but not against another version.
            self._lose(failed.code, failed.message, reconnect=failed.code != "wire_version")

    def _on_welcome(self, welcome: Welcome) -> None:
        theirs = welcome.model.tokenizer_hashes
        ours = self.tokenizer.hashes
        differing = sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name))
        if welcome.version not in (WIRE_VERSION, WIRE_VERSION - 1):
            problem = f"it speaks wire version {welcome.version}, not {WIRE_VERSION}: update the older side"
        elif theirs and differing:
            problem = f"its tokenizer files differ from ours ({', '.join(differing)}): use the same checkpoint"
        else:
            self._model = ServedModel(
                card=welcome.model, epoch=welcome.epoch, defaults=self.tokenizer.defaults, names=self._names
            )
            self._reason = ""
            self._session.welcome(welcome.model)
            self._tell_state()
            return
        logger.error("the scheduler cannot be used: %s", problem)
        self._lose("engine_unavailable", problem, reconnect=False)

    def _lose(self, code: str, message: str, *, reconnect: bool = True) -> None:
        logger.warning("%s; %d requests fail", message, len(self._session))
        self._session.lost(code, message)
        self._model = self._status = None
        self._reason = message
        if reconnect:
            self._link.reconnect()
            self._link.send(self._hello)
        else:
            self._link.close()
        self._tell_state()

    def _tell_state(self) -> None:
        self._tell(
            WorkerState(
                version=TEXT_WIRE_VERSION,
                at=time.monotonic(),
                model=self._model,
                status=self._status,
                reason=self._reason,
            )
        )
