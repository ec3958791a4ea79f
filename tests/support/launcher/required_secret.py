"""A secret that the pods of a model share, and that each connection must prove to know."""

from __future__ import annotations

from pathlib import Path

from minisgl.wire.peer_secret import PeerSecret


def required_secret(folder: Path) -> PeerSecret:
    (folder / "peers").mkdir()
    (folder / "peers" / "a").write_text("1.s3cret\n")
    secret = PeerSecret(str(folder / "peers"), folder / "required")
    secret.require()
    return secret
