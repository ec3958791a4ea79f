"""Messages between a frontend and its tokenizer workers, encoded as msgpack: text in, text out.

A worker connects to one address of its frontend and serves it alone. It tells its state (`WorkerState`) several times
a second and at every change, so a frontend that starts late or anew needs no handshake. Request identifiers are the
16 random bytes of `wire.messages`; a request stays with one worker, so its cancellation cannot overtake it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from minisgl.wire.messages import REQUEST_ID_BYTES, ModelCard, SamplingParams, Status

TEXT_WIRE_VERSION: Final = 1

Role = Literal["system", "developer", "user", "assistant"]


class ChatMessage(msgspec.Struct, frozen=True):
    """One turn of a conversation, its content parts joined to one text."""

    role: Role
    content: str


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """A request for text. Exactly one of `messages`, `prompt` and `tokens` is given."""

    id: bytes
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    tokens: bytes | None = None
    """int32"""
    params: SamplingParams
    priority: int = 0
    deadline_ms: int = 0
    """Unix time in ms after which the request ends in an error; 0: none."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client is gone. Nothing more is said of the request; unknown ids are ignored."""

    id: bytes


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint's generation_config.json recommends where a request leaves a parameter out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the worker sees it: what the scheduler says, and what its own files say."""

    card: ModelCard
    epoch: tuple[int, int]
    defaults: SamplingDefaults


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Where the worker stands. `model` is None while no scheduler has welcomed it: `reason` says why."""

    version: int
    model: ServedModel | None
    status: Status | None
    """The scheduler's last word."""
    reason: str = ""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The scheduler has queued the request: from now on it ends in `Finished` or `TextFailed`."""

    id: bytes
    prompt_tokens: int


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of an answer."""

    id: bytes
    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    completion_tokens: int
    """Sampled tokens, with the one that ended the answer."""


class Texts(msgspec.Struct, frozen=True, kw_only=True, tag="texts"):
    """What one step gave to the requests of this frontend; an ended request's last text comes with its end."""

    ids: bytes
    """16 bytes for each text."""
    texts: list[str]
    finished: list[Finished]

    def rows(self) -> list[tuple[bytes, str]]:
        if len(self.ids) != len(self.texts) * REQUEST_ID_BYTES:
            raise msgspec.ValidationError("the columns of a texts message differ in length")
        step = REQUEST_ID_BYTES
        return [(self.ids[i * step : (i + 1) * step], text) for i, text in enumerate(self.texts)]


class TextFailed(msgspec.Struct, frozen=True, kw_only=True, tag="text_failed"):
    """A request that ended without a full answer, or was never accepted. `code` is stable, see docs."""

    id: bytes
    code: str
    message: str
    param: str | None = None
    """The field of the request that is to blame, in OpenAI's spelling."""


ToTokenizer = Generate | Cancel
FromTokenizer = WorkerState | Accepted | Texts | TextFailed
