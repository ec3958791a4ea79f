"""Proofs that a connection comes from a pod of the same model, by tokens that all of its pods know.

Whoever knows a token can make the proof of a greeting, and nobody else. Nothing is encrypted: who can read the traffic
between pods can read proofs, too.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import time
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from minisgl.options import option

logger = logging.getLogger(__name__)

SECRET_DIRECTORY: Final = "/var/run/minisgl/peers"
"""Where the operator mounts the tokens."""
SecretDirectory = Annotated[
    str,
    option(
        "directory of tokens by which pods of the same model know one another; it need not exist",
        metavar="DIR",
    ),
]
_REQUIRED_SECONDS: Final = 45.0
"""Time after which the demand for proofs must be renewed. After a return to a version that does not know of them,
requests wait for it at the frontends of that version, so it is shorter than the queue timeout. An operator that is
replaced is back sooner."""
_MAX_TOKENS: Final = 3
"""Files that are read, the first by name: two, and one that a user may add."""
_MAX_BYTES: Final = 4096
_OF_OPERATOR: Final = re.compile(rb"([0-9]{1,15})\.[0-9a-f]{64}")
"""Token of the operator: its public part, and a random rest."""

Proof = Annotated[str, Meta(max_length=_MAX_TOKENS * 65)]
"""Proofs of a greeting: 64 hexadecimal digits for each token, separated by spaces; empty: none."""


class PeerSecret:
    """The mounted tokens. Their files are read for each greeting: they change while the pod runs, one at a time."""

    def __init__(self, directory: str, demand: Path | None = None) -> None:
        """`directory` may be missing; an empty name is none. `demand`: file whose age tells the processes of a pod
        whether greetings need proofs; None: they never do."""
        self._directory = Path(directory) if directory else None
        self._demand = demand

    def proof(self, *greeting: str) -> str:
        """The proofs of a greeting, one for each token: the other side may know only one of them yet."""
        return " ".join(_proof(token, greeting) for token in self._known().values())

    def refuses(self, proof: str, *greeting: str) -> bool:
        """Whether a greeting with these proofs, a `Proof`, must be refused."""
        if not self.is_required():
            return False
        expected = [_proof(token, greeting).encode() for token in self._known().values()]
        return not any([hmac.compare_digest(given, each) for given in proof.encode().split() for each in expected])

    def is_required(self) -> bool:
        """Whether greetings need proofs now. A pod without a token lets all others in; one that cannot read its tokens
        lets nobody in."""
        if not self._is_demanded():
            return False
        try:
            return bool(self._read())
        except OSError:
            return True

    def require(self) -> None:
        """Demand proofs for the next 45 s."""
        if self._demand is None:
            return
        try:
            file = os.open(self._demand, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                # Nobody sets this clock, and all processes of a pod have the same.
                os.utime(file, (now := time.monotonic(), now))
            finally:
                os.close(file)
        except OSError as error:
            logger.warning("pods without a token are let in, as %s cannot be written: %s", self._demand, error)

    def fingerprints(self) -> dict[str, str]:
        """File → a hash of its token, behind the public part of one that the operator wrote and a dot. Pods with an
        equal one in any file know a common token."""
        return {name: _fingerprint(token) for name, token in self._known().items()}

    def _is_demanded(self) -> bool:
        if self._demand is None:
            return False
        try:
            # After a restart of the machine an old demand is in the future.
            return 0 <= time.monotonic() - self._demand.stat().st_mtime < _REQUIRED_SECONDS
        except OSError:
            return False

    def _known(self) -> dict[str, bytes]:
        """File → token; none if they cannot be read."""
        try:
            return self._read()
        except OSError as error:
            logger.warning("the tokens of the model's pods cannot be read: %s", error)
            return {}

    def _read(self) -> dict[str, bytes]:
        """Raises OSError, but not for files that are missing."""
        found: dict[str, bytes] = {}
        if self._directory is None:
            return found
        with contextlib.suppress(FileNotFoundError):
            # The kubelet's own entries begin with a dot.
            names = sorted(name for name in os.listdir(self._directory) if not name.startswith("."))
            for name in names[:_MAX_TOKENS]:
                with Path(self._directory, name).open("rb") as file:
                    if token := file.read(_MAX_BYTES).strip():
                        found[name] = token
        return found


NO_SECRET: Final = PeerSecret("")


def _proof(token: bytes, greeting: tuple[str, ...]) -> str:
    # Lengths, so that no two greetings give the same text.
    text = "".join(f"{len(part)}:{part}" for part in greeting)
    return hmac.digest(token, text.encode(), "sha256").hex()


def _fingerprint(token: bytes) -> str:
    hashed = _proof(token, ("fingerprint",))[:16]
    of_operator = _OF_OPERATOR.fullmatch(token)
    return hashed if of_operator is None else f"{of_operator[1].decode()}.{hashed}"
