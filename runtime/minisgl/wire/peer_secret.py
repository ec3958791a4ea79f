"""Proofs that a connection comes from a pod of the same model, by tokens that all of its pods know.

Whoever knows a token can make the proof of a greeting, and nobody else. Nothing is encrypted: who can read the traffic
between pods can read proofs, too.
"""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path
from typing import Annotated, Final

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
_REQUIRED_SECONDS: Final = 120.0
"""Time after which the demand for proofs must be renewed: an operator that does not know of them lets pods without a
token in again."""
_MAX_BYTES: Final = 4096


class PeerSecret:
    """The mounted tokens. Their files are read for each greeting: they change while the pod runs, one at a time."""

    def __init__(self, directory: str, demand: Path | None = None) -> None:
        """`directory` may be missing; an empty name is none. `demand`: file whose age tells the processes of a pod
        whether greetings need proofs; None: they never do."""
        self._directory = Path(directory) if directory else None
        self._demand = demand

    def proof(self, *greeting: str) -> str:
        """The proofs of a greeting, one for each token: the other side may know only one of them yet."""
        return " ".join(_proof(token, greeting) for token in self._tokens().values())

    def refuses(self, proof: str, *greeting: str) -> bool:
        """Whether a greeting with these proofs must be refused."""
        tokens = self._tokens()
        if not tokens or not self._is_required():
            return False
        expected = [_proof(token, greeting).encode() for token in tokens.values()]
        return not any([hmac.compare_digest(given, each) for given in proof.encode().split() for each in expected])

    def require(self) -> None:
        """Demand proofs for the next two minutes."""
        if self._demand is not None:
            try:
                self._demand.touch()
            except OSError as error:
                logger.warning("pods without a token are let in, as %s cannot be written: %s", self._demand, error)

    def fingerprints(self) -> dict[str, str]:
        """File → the public part of its token (up to the first dot), a dot, and a hash of the token. Pods with an equal
        one in any file know a common token."""
        return {
            name: f"{token.partition(b'.')[0].decode(errors='replace')}.{_proof(token, ('fingerprint',))[:16]}"
            for name, token in self._tokens().items()
        }

    def _is_required(self) -> bool:
        if self._demand is None:
            return False
        try:
            return time.time() - self._demand.stat().st_mtime < _REQUIRED_SECONDS
        except OSError:
            return False

    def _tokens(self) -> dict[str, bytes]:
        """File → token."""
        found: dict[str, bytes] = {}
        if self._directory is None:
            return found
        try:
            # The kubelet's own entries begin with a dot.
            for path in sorted(self._directory.glob("[!.]*")):
                with path.open("rb") as file:
                    if token := file.read(_MAX_BYTES).strip():
                        found[path.name] = token
        except OSError as error:
            # The kubelet replaces all files at once, so one may be gone.
            logger.warning("a token of the model's pods cannot be read: %s", error)
        return found


NO_SECRET: Final = PeerSecret("")


def _proof(token: bytes, greeting: tuple[str, ...]) -> str:
    # Lengths, so that no two greetings give the same text.
    text = "".join(f"{len(part)}:{part}" for part in greeting)
    return hmac.digest(token, text.encode(), "sha256").hex()
