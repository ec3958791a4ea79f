"""A token that peers must know to connect to a socket, checked by ZeroMQ's PLAIN mechanism.

libzmq closes the connections of all others, before anything that they send is delivered. The token travels as it is.
"""

from __future__ import annotations

import hmac
import logging
import threading
from typing import Any, Final

import zmq

logger = logging.getLogger(__name__)

_HANDSHAKE_MS: Final = 5000
"""Time in which a connection must show the token."""
_POLL_MS: Final = 100
"""Interval at which the thread checks whether it must end."""
_USER: Final = b"minisgl"
_REQUESTS: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks about connections, by RFC 27."""
_MECHANISM: Final = 5
_PASSWORD: Final = 7


def show_token(socket: Any, token: str) -> None:
    """Have a socket that is not connected yet show `token`, of 1 to 255 bytes, to its peers."""
    socket.setsockopt(zmq.PLAIN_USERNAME, _USER)
    socket.setsockopt(zmq.PLAIN_PASSWORD, token.encode())


class TokenGate:
    """Answers libzmq's questions about the connections of a socket, on a thread, because the receiver may be busy for
    minutes. There is one in a context. It ends with `close`."""

    def __init__(self, guarded: Any, token: str) -> None:
        """`guarded`: a socket that is not bound yet."""
        self._token = token.encode()
        # Without anybody to ask, libzmq would let everybody in.
        self._requests = guarded.context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(_REQUESTS)
        guarded.setsockopt(zmq.PLAIN_SERVER, 1)
        guarded.setsockopt_string(zmq.ZAP_DOMAIN, "minisgl")
        guarded.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer_all, name="token-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _answer_all(self) -> None:
        with self._requests:
            while not self._ended.is_set():
                if self._requests.poll(_POLL_MS):
                    self._answer(self._requests.recv_multipart())

    def _answer(self, request: list[bytes]) -> None:
        version, number = request[:2]
        knows = request[_MECHANISM] == b"PLAIN" and hmac.compare_digest(request[_PASSWORD], self._token)
        if not knows:
            logger.warning("a connection was closed: its token is another one")
        self._requests.send_multipart([version, number, b"200" if knows else b"400", b"", b"", b""])
