"""Messages between a frontend's tokenizer and the scheduler on rank 0, encoded as msgpack.

Columns (one value per row of a step) travel as packed little-endian arrays: one message per step and client,
whatever the number of rows. Request identifiers are 16 random bytes made by the frontend.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

WIRE_VERSION: Final = 1
"""A peer with this version or the one before it is accepted."""

REQUEST_ID_BYTES: Final = 16

FinishReason = Literal["stop", "length", "abort", "error"]
FINISH_REASONS: Final[tuple[FinishReason | None, ...]] = (None, "stop", "length", "abort", "error")
"""Index = the code in `Tokens.finish`."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the next token and when to end. Ranges are checked where it comes in and by the scheduler."""

    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the context leaves."""
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or −1: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """int64; the same seed and prompt give the same tokens, whatever else is in the batch."""
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    """Strings that end the answer; the tokenizer looks for them in the text."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    """No EOS, stop token or stop string ends the answer before so many tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated already."""
    frequency_penalty: float = 0.0
    """The same, times how often."""
    repetition_penalty: float = 1.0
    """Logits of tokens of prompt and answer are divided by it where positive, multiplied where negative."""
    logit_bias: dict[int, float] = {}
    """Added to the logits, by token id."""
    logprobs: int | None = None
    """Report the log-probability of each chosen token, and of the so many likeliest; 0: of the chosen one only."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed without the prefix cache."""


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit", omit_defaults=True):
    """A request for tokens. `output` holds tokens that an earlier epoch has already given: generation goes on
    behind them, with the same indices, positions and therefore samples."""

    id: bytes
    prompt: bytes
    """int32, at least one token."""
    output: bytes = b""
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int = -1
    """Log-probabilities of the so many likeliest tokens beside the chosen one's; −1: none at all."""
    prompt_logprobs: int = -1
    priority: int = 0
    """Higher goes first."""
    deadline_ms: int = 0
    """Unix time in ms after which the request ends in an error; 0: none."""
    cache_salt: bytes = b""
    """Requests share cached prefixes only with requests of the same salt."""

    @staticmethod
    def with_params(
        params: SamplingParams,
        *,
        id: bytes,
        prompt: bytes,
        priority: int = 0,
        deadline_ms: int = 0,
        cache_salt: bytes = b"",
    ) -> Submit:
        """A request with flat `params`, whose `max_tokens` and `seed` are set. Stop strings are left out."""
        flat = {name: getattr(params, name) for name in _TOKEN_PARAMS}
        flat |= {name: -1 for name in _LOGPROBS if flat[name] is None}
        flat["top_k"] = max(params.top_k, 0)
        return Submit(id=id, prompt=prompt, priority=priority, deadline_ms=deadline_ms, cache_salt=cache_salt, **flat)

    @property
    def params(self) -> SamplingParams:
        """The flat fields as one struct."""
        nested = {name: getattr(self, name) for name in _TOKEN_PARAMS}
        nested |= {name: None for name in _LOGPROBS if nested[name] == -1}
        return SamplingParams(**nested)


_TOKEN_PARAMS: Final = tuple(name for name in SamplingParams.__struct_fields__ if name in Submit.__struct_fields__)
"""Parameters that reach the scheduler; the tokenizer applies the others to the text."""
_LOGPROBS: Final = ("logprobs", "prompt_logprobs")
"""None in `SamplingParams` is −1 in `Submit`."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """The client is gone or has seen a stop string. Unknown ids are ignored: the request may just have ended."""

    id: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a client."""

    version: int
    client: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a frontend must know of the model that is served."""

    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_hashes: dict[str, str]
    """File name → sha256 of each tokenizer file: frontends must use the same ones."""


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag="welcome"):
    """Answer to Hello. `epoch` orders engine starts: boot time of the launcher in ms, then a counter."""

    version: int
    epoch: tuple[int, int]
    model: ModelCard
    replica: str = ""
    """Name of the group of ranks, `chat-r0`; empty where there is only one."""
    revision: str = ""
    """Of what the replica runs from: image, flags, environment. That of the weights is in `model`."""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """The scheduler has queued the request: from now on it ends in a finish reason or in `Failed`."""

    id: bytes


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request that ended without a full answer, or was never accepted. `code` is stable, see docs."""

    id: bytes
    code: str
    message: str


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the raw distribution (before temperature, penalties and bias) at some positions in a row:
    N of one request, with K likeliest tokens each, best first."""

    chosen: bytes
    """float32 [N]"""
    top_ids: bytes
    """int32 [N, K]"""
    top: bytes
    """float32 [N, K]"""


class FirstTokenWait(msgspec.Struct, frozen=True, array_like=True):
    """What a request waited for; seconds."""

    queue: float
    """A place in the batch."""
    prefill: float
    """From then on, its first token."""


class PromptLogprobs(msgspec.Struct, frozen=True, tag="prompt_logprobs"):
    """Of prompt tokens `start`, `start + 1`, …, given those before them. All of them come, in order, before the
    request's first token. The first token of a prompt has none: `start` is at least 1."""

    id: bytes
    start: int
    logprobs: TokenLogprobs


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens", omit_defaults=True):
    """The tokens of one step for one client, in columns of equal length."""

    ids: bytes
    """16 bytes a row."""
    index: bytes
    """int32: 0 for the first token of the answer."""
    token: bytes
    """int32"""
    finish: bytes
    """uint8, index into FINISH_REASONS; the row's last message when not 0."""
    cached: bytes
    """int32: prompt tokens that came from the prefix cache."""
    logprobs: dict[int, TokenLogprobs] = {}
    """Of the rows that asked for them, by row; N is 1."""
    waits: dict[int, FirstTokenWait] = {}
    """Of the rows with the first token that the scheduler gave for a request, by row."""

    def rows(self) -> TokenRows:
        n = len(self.finish)
        if len(self.ids) != n * REQUEST_ID_BYTES or not len(self.index) == len(self.token) == len(self.cached) == 4 * n:
            raise msgspec.ValidationError("the columns of a tokens message differ in length")
        return TokenRows(
            [self.ids[i : i + REQUEST_ID_BYTES] for i in range(0, len(self.ids), REQUEST_ID_BYTES)],
            np.frombuffer(self.index, "<i4"),
            np.frombuffer(self.token, "<i4"),
            np.frombuffer(self.finish, np.uint8),
            np.frombuffer(self.cached, "<i4"),
        )


class TokenRows(msgspec.Struct, frozen=True):
    """`Tokens`, unpacked."""

    ids: list[bytes]
    index: NDArray[np.int32]
    token: NDArray[np.int32]
    finish: NDArray[np.uint8]
    cached: NDArray[np.int32]


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Forget what the prefix cache holds for nobody."""

    id: bytes


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    """Answer to Flush: so many pages are free now that were not."""

    id: bytes
    pages: int


QUEUE_TIME_EDGES: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
"""Seconds; those that vLLM's dashboards expect."""


STEP_TOKENS_EDGES: Final = tuple(float(2**power) for power in (0, *range(3, 15)))
"""Tokens of a step: 1, 8, 16, 32, … 16384, as vLLM has them."""


class Status(msgspec.Struct, frozen=True, kw_only=True, tag="status"):
    """The scheduler's state, sent to every client a few times a second; counters are since start."""

    waiting: int
    running: int
    used_pages: int
    """Pages that requests hold; cached pages that can be evicted do not count."""
    num_pages: int
    page_size: int = 0
    """Tokens; 0: not said."""
    queue_times: tuple[int, ...] = ()
    """How many requests waited for their first row at most as long as each of QUEUE_TIME_EDGES but longer than the one
    before; then those that waited longer than all. Empty: not said."""
    queue_seconds: float = 0.0
    """All of their waiting together."""
    step_sizes: tuple[int, ...] = ()
    """How many steps had at most as many tokens as each of STEP_TOKENS_EDGES but more than the one before; then those
    that had more than all. Empty: not said."""
    step_tokens: int = 0
    """All of their tokens together: computed ones of prompts, and one for each row that decodes."""
    steps: int
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    generated_tokens: int
    preemptions: int = msgspec.field(name="retractions")
    finished: int
    start_seconds: dict[str, float] = {}
    """Of each phase of the engine's start, see `EngineStats.start_seconds`. Empty: not said."""
    draining: bool = False
    """What is under way goes on; a new request is refused with `draining`."""


ToScheduler = Hello | Submit | Abort | Flush
FromScheduler = Welcome | Ack | Failed | PromptLogprobs | Tokens | Status | Flushed
