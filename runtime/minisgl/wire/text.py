"""Messages between a frontend and its tokenizer workers, encoded as msgpack: text in, text out.

A worker connects to one address of its frontend and serves it alone. It tells its state (`WorkerState`) several times
a second and at every change, so a frontend that starts late or anew needs no handshake. Request identifiers are the
16 random bytes of `wire.messages`; a request stays with one worker, so its cancellation cannot overtake it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from minisgl.wire.messages import REQUEST_ID_BYTES, FirstTokenWait, Flush, Flushed, ModelCard, SamplingParams, Status
from minisgl.wire.status import ReplicaView

TEXT_WIRE_VERSION: Final = 1

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn of a conversation, its content parts joined to one text."""

    role: Role
    content: str | None
    """None only where an assistant's turn consists of tool calls."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    """As chat templates expect them: `{"id", "type", "function": {"name", "arguments": object}}`."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """A request for text. Exactly one of `messages`, `prompt` and `tokens` is given."""

    id: bytes
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    tokens: bytes | None = None
    """int32"""
    template_variables: dict[str, Any] = {}
    """For the chat template, beside its own."""
    echo: bool = False
    """The answer begins with the prompt's text."""
    params: SamplingParams
    priority: int = 0
    deadline_ms: int = 0
    """Unix time in ms after which the request ends in an error; 0: none."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client is gone. Nothing more is said of the request; unknown ids are ignored."""

    id: bytes


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the checkpoint's generation_config.json recommends where a request leaves a parameter out."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The model as the worker sees it: what the scheduler says, and what its own files say."""

    card: ModelCard
    epoch: tuple[int, int]
    """Of several replicas, the latest."""
    defaults: SamplingDefaults
    names: tuple[str, ...] = ()
    """By which requests may call it; empty: by the card's alone."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """At least one; the first is the answer's where the request names none."""
        return self.names or (self.card.name,)


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """Where the worker stands. `model` is None while no scheduler has welcomed it: `reason` says why."""

    version: int
    at: float
    """When it was said, on the clock that all processes of a machine share (`time.monotonic`)."""
    model: ServedModel | None
    status: Status | None
    """The scheduler's last word; of several, their sums."""
    reason: str = ""
    replicas: tuple[ReplicaView, ...] = ()
    """Where engines are found by name: all that were found."""
    retried: int = 0
    """How often a request was tried again with another engine, or a later epoch of it; since the worker's start."""


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
    wait: FirstTokenWait | None = None
    """None: the scheduler did not say."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer or an echoed prompt, with its log-probability."""

    name: bytes
    """What the vocabulary calls it: its bytes, or the text of a special token."""
    text: bytes
    """What it adds to the text: nothing for a special token. All of them together are the text in UTF-8."""
    offset: int
    """Characters of the choice's text that are complete before it."""
    logprob: float | None
    """None: the first token of a prompt has nothing that it could follow from."""
    top: list[tuple[bytes, float]]
    """Names of the likeliest tokens, best first."""


class Texts(msgspec.Struct, frozen=True, kw_only=True, tag="texts", omit_defaults=True):
    """What one step gave to the requests of this frontend; an ended request's last text comes with its end. Echoed
    prompts come as the first texts of their answers."""

    ids: bytes
    """16 bytes for each text."""
    texts: list[str]
    finished: list[Finished]
    counts: list[int]
    """Tokens that each request has sampled so far."""
    scored: dict[int, list[ScoredToken]] = {}
    """Of the rows that asked for log-probabilities, by row: the tokens whose text is given."""

    def rows(self) -> list[tuple[bytes, str]]:
        if len(self.ids) != len(self.texts) * REQUEST_ID_BYTES or len(self.counts) != len(self.texts):
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


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode", omit_defaults=True):
    """Ask for the token ids of a text or a conversation; exactly one of the two is given."""

    id: bytes
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    template_variables: dict[str, Any] = {}
    add_special_tokens: bool = True
    """Put the tokens before a text that the tokenizer has there by default."""
    add_generation_prompt: bool = True
    """Begin the assistant's turn behind the messages."""


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """Answer to Encode."""

    id: bytes
    tokens: bytes
    """int32"""
    names: list[bytes]
    """What the vocabulary calls each token."""


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Ask for the text of token ids, special tokens included."""

    id: bytes
    tokens: bytes
    """int32"""


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """Answer to Decode."""

    id: bytes
    text: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Ask what clients that use the tokenizer themselves must know of it."""

    id: bytes


class Described(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """Answer to Describe."""

    id: bytes
    special_tokens: dict[str, str]
    """`bos_token`, `eos_token` …; absent where the model has none."""
    chat_template: str | None
    add_bos_token: bool


Question = Encode | Decode | Describe
Reply = Encoded | Decoded | Described

ToTokenizer = Generate | Cancel | Encode | Decode | Describe | Flush
FromTokenizer = WorkerState | Accepted | Texts | TextFailed | Encoded | Decoded | Described | Flushed
