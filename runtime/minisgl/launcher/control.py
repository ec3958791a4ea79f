"""What the launcher and one of its children say to each other, as JSON lines on a socket pair.

The end of the stream is a message too: to the launcher, that the child is gone; to a child, that the launcher is.
"""

from __future__ import annotations

from typing import Final

import msgspec

STANDING_BY: Final = "standing by"
"""Progress of a standby that has done its imports."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First line to a child: who it is, and what it does. `target` is `module:function`, called with (config as JSON,
    Control)."""

    name: str
    target: str
    config: msgspec.Raw
    log_level: str


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """The launcher ends everything, because of what `message` says. End what clients wait for with an error, then
    exit."""

    message: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """What a child does until it is ready, for people: `weights 40 %`."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child does its work from now on. The fields are rank 0's to fill."""

    transport: str = ""
    """What carries the ranks' collectives."""
    max_model_len: int = 0
    """Tokens; what the KV pool holds counts too."""
    vocab_size: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The child ends because of something the user can act on; its exit follows."""

    code: str
    message: str


ToChild = Start | GaveUp
FromChild = Progress | Ready | Refused

to_child: Final[msgspec.json.Decoder[ToChild]] = msgspec.json.Decoder(ToChild)
from_child: Final[msgspec.json.Decoder[FromChild]] = msgspec.json.Decoder(FromChild)


def encode(message: ToChild | FromChild) -> bytes:
    return msgspec.json.encode(message) + b"\n"
