"""Who might be an engine: the addresses behind a name, asked for again and again."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

logger = logging.getLogger(__name__)

RESOLVE_SECONDS: Final = 2.0
MAX_ADDRESSES: Final = 1024

Resolve: TypeAlias = "Callable[[str], frozenset[str]]"
"""From a name to addresses. Raises OSError."""


def resolve_host(host: str) -> frozenset[str]:
    """Numeric IPv4 and IPv6 addresses. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return frozenset(str(address[0]) for *_, address in found)


class Discovery:
    """Asks in a thread of its own, because the system's resolver may take seconds. After each answer `changed` is
    called in that thread, whether or not anything has changed."""

    def __init__(self, host: str, changed: Callable[[], None], resolve: Resolve) -> None:
        self.addresses: frozenset[str] = frozenset()
        """The last answer. A name that is not known, or cannot be asked for, has none."""
        self.problem = f"the name {host} has not been looked up yet"
        """Why there is no address."""
        self._host = host
        self._changed = changed
        self._resolve = resolve
        self._stop = threading.Event()
        self._calling = threading.Lock()
        """Held while `changed` runs."""
        self._thread = threading.Thread(target=self._run, name="discovery", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """`changed` is not called any more. An answer that is being waited for is not waited for here."""
        with self._calling:
            self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                found = self._resolve(self._host)
                problem = f"no engine is found behind the name {self._host}" if not found else ""
            except (OSError, UnicodeError) as error:
                found, problem = frozenset(), f"the name {self._host} cannot be resolved: {error}"
            if len(found) > MAX_ADDRESSES:
                logger.error("%s has %d addresses; %d of them are used", self._host, len(found), MAX_ADDRESSES)
                found = frozenset(sorted(found)[:MAX_ADDRESSES])
            with self._calling:
                if self._stop.is_set():
                    return
                if found != self.addresses:
                    logger.info("%s is now %s", self._host, ", ".join(sorted(found)) or problem)
                self.addresses, self.problem = found, problem
                self._changed()
            self._stop.wait(RESOLVE_SECONDS)


def host_in_url(address: str) -> str:
    """The address as it stands before `:port`."""
    return f"[{address}]" if ":" in address else address
