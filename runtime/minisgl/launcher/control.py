"""Messages between the launcher and one of its children: JSON lines on a socket pair.

The end of the stream is a message too: the peer has exited.
"""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from minisgl.wire.status import DataTypes

STACKS_SIGNAL: Final = signal.SIGQUIT
"""Has a child write the stacks of its threads to stderr."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First line to a child: its name and its work. `target` is `module:function`, called with (config as JSON,
    Control)."""

    name: str
    target: str
    config: msgspec.Raw
    log_level: str
    heartbeats: bool = False
    """The launcher reads `Heartbeat`."""


class Fork(msgspec.Struct, frozen=True):
    """Request to a standby for a process, which then gets `Start`. Two descriptors come with it: the process's end of
    its control channel, and its stdout and stderr."""

    pid_residue: tuple[int, int] = (0, 1)
    """See `ProcessSpec`."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """First line on the channel of a process that a standby has forked, from the standby: then the process begins."""

    pid: int


class Imported(msgspec.Struct, frozen=True, tag="imported"):
    """A standby has done its imports."""


class GaveUp(msgspec.Struct, frozen=True, tag="gave_up"):
    """The launcher stops all processes because of `message`. End the requests of clients with an error, then exit."""

    message: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Step of a child's start, for human readers: `weights 40 %`."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child has started. Only rank 0 fills in the fields."""

    transport: str = ""
    """Transport of the collectives, as `TensorParallel.transport`."""
    max_model_len: int = 0
    """Longest sequence in tokens; the size of the KV pool limits it too."""
    vocab_size: int = 0
    task: str = ""
    """As in `ModelCard`."""
    attention: dict[str, str] = {}
    """Attention backends, see `EngineStats.attention`."""
    data_types: DataTypes | None = None


class StartError(msgspec.Struct, frozen=True, tag="refused"):
    """The child cannot run because of an error with a stable code; its exit follows."""

    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent every second by a child that runs steps, once it is ready."""

    step_age: float
    """Seconds since the begin of the current step; 0 while there is none."""


ToChild = Start | GaveUp
FromChild = Progress | Ready | StartError | Heartbeat | Forked | Imported

to_child: Final[msgspec.json.Decoder[ToChild]] = msgspec.json.Decoder(ToChild)
from_child: Final[msgspec.json.Decoder[FromChild]] = msgspec.json.Decoder(FromChild)
to_standby: Final[msgspec.json.Decoder[Fork]] = msgspec.json.Decoder(Fork)


def encode(message: ToChild | FromChild | Fork) -> bytes:
    return msgspec.json.encode(message) + b"\n"
