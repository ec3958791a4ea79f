"""Messages between a frontend and its tokenizer workers, encoded as msgpack: text in, text out.

A worker connects to one address and serves a single frontend. It sends its state (`WorkerState`) several times a second
and at every change, so a frontend that starts late or restarts needs no handshake. Request identifiers are the 16
random bytes of `wire.messages`; a request stays with one worker, so its cancellation cannot overtake it.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from minisgl.wire.messages import REQUEST_ID_BYTES, FirstTokenWait, Flush, Flushed, ModelCard, SamplingParams, Status
from minisgl.wire.status import ReplicaView

TEXT_WIRE_VERSION: Final = 1

NOT_TAKEN: Final = "not_taken"
"""Code of `TextFailed` for a request that a worker did not take because no engine is routable. The frontend holds
it."""

THINKING_VARIABLES: Final = ("enable_thinking", "thinking")
"""Variables of chat templates that let the model reason, or not: checkpoints have one or the other."""

BUDGET_VARIABLE: Final = "thinking_budget"
"""Variable of chat templates that tell the model how many tokens it may reason; 0: not at all."""

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation, its content parts joined to one text."""

    role: Role
    content: str | None
    """None only in messages of the assistant that consist of tool calls or reasoning."""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Any] | None = None
    """In the form that chat templates expect: `{"id", "type", "function": {"name", "arguments": object}}`."""
    reasoning: str | None = None
    """Reasoning of an earlier answer of the assistant."""
    custom_role: str = ""
    """Role that the template gets in place of `role`, for templates with other roles; empty: `role`."""


ConstraintKind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


class StructuredOutput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Constraint on the text of an answer."""

    kind: ConstraintKind
    value: str
    """`json`: the JSON text of a schema; `choice`: a JSON list of strings; `grammar`: Lark, or EBNF as in GBNF;
    `structural_tag`: the JSON text of its definition."""
    compact: bool = False
    """JSON without whitespace between its tokens."""


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tools that the model may call."""

    definitions: tuple[dict[str, Any], ...]
    """In the form that chat templates expect: `{"type": "function", "function": {"name", "description", "parameters",
    "strict"}}`."""
    choice: Literal["none", "auto", "required", "named"] = "auto"
    """`none`: the template gets the definitions, but no call is parsed; `required`: at least one call and no other
    text; `named`: one call of the tool `name`."""
    name: str = ""
    parallel: bool = True
    """The answer may contain several calls."""


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True):
    """New output of one tool call. The first delta of a call has its whole name."""

    index: int
    """Number of the call in its choice, from 0."""
    id: str
    """Identifier of the call in its first delta; otherwise empty."""
    name: str
    """Name of the function in the first delta; otherwise empty."""
    arguments: str
    """Next piece of the arguments, whose concatenation is a JSON object."""


class Rendering(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a conversation or text becomes the token ids of a prompt."""

    template_variables: dict[str, Any] = {}
    """Additional variables of the chat template."""
    thinking: bool | None = None
    """Whether the template lets the model reason; None: its default."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the template."""
    add_generation_prompt: bool = True
    """The prompt ends with the beginning of the assistant's message."""
    continue_final_message: bool = False
    """The prompt ends within the last message, which the answer continues."""
    add_special_tokens: bool = True
    """The prompt begins with the tokens that the tokenizer prepends by default."""


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Fields of a request that all of its choices have in common, beside their sampling parameters."""

    rendering: Rendering = Rendering()
    tools: ToolOptions | None = None
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens of the prompt; −1: as many as the context allows; None: all."""
    truncation_side: Literal["left", "right"] = "left"
    """Where the others are left out: `left` keeps the last tokens, `right` the first ones."""
    echo: bool = False
    """The answer begins with the prompt's text."""
    priority: int = 0
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    stream: bool = True
    """The client receives text as it is generated; false: only the whole answer."""
    structured_output: StructuredOutput | None = None
    separate_reasoning: bool = True
    """Reasoning is reported apart from the text, where the model has markers for it. Only for `messages`."""
    thinking_budget: int | None = None
    """Most tokens of reasoning; None: no limit."""
    bad_words: tuple[str, ...] = ()
    """Texts that the answer does not contain."""
    stop_regex: tuple[str, ...] = ()
    """Regular expressions that end the answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    return_token_ids: bool = False
    """Report the token ids of prompt and answer, and log-probabilities also of tokens that are not part of its text."""
    soft_limits: bool = False
    """Agents send limits with every request: `max_tokens` may be more than the context leaves, and `thinking_budget`
    has no effect on a model that does not mark its reasoning; false: both are errors."""
    prediction: str = ""
    """Text that the client expects in the answer."""


class Pooling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a text that is to be pooled becomes a prompt."""

    second_text: str | None = None
    """Second text of a pair, such as the document that is scored for the query `Generate.prompt`; None: one text."""
    second_text_tokens: int = 0
    """Most tokens of the second text, which is cut to them; 0: no limit."""
    prompt_name: str = ""
    """Name of a prompt of the checkpoint (config_sentence_transformers.json) that precedes the text; empty: the default
    one, if there is any."""
    instruction: str | None = None
    """Instruction in place of the checkpoint's own, for models that take one."""


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag="generate", omit_defaults=True):
    """A request for text: one choice, or for the pooled output of a text. Exactly one of `messages`, `prompt` and
    `tokens` is given."""

    id: bytes
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    tokens: bytes | None = None
    """int32"""
    params: SamplingParams = SamplingParams()
    options: RequestOptions = RequestOptions()
    pooling: Pooling | None = None
    """None: text is generated. Otherwise `params` has no effect, and `Finished.values` is the answer."""
    deadline_ms: int = 0
    """Unix time in ms after which the request ends in an error; 0: none."""
    tenant: bytes = b""
    """Whose request it is: a digest of the API key's name or the client's address."""
    traced: bool = False
    """The request is recorded in a trace: `Texts.first_tokens` are wanted."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client has disconnected: no more messages about the request are sent. Unknown ids are ignored."""

    id: bytes


class RequestsWait(msgspec.Struct, frozen=True, tag="requests_wait"):
    """Whether requests wait, in the frontend or its workers, because no engine is routable, and one shall come for
    them: false also while the frontend drains, or its model is suspended. At first it is false; sent when it changes.
    """

    waits: bool


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of sampling parameters, from the checkpoint's generation_config.json."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def fewest_tokens(text: str, longest_token: int) -> int:
    """Return a number of tokens that the text has at least. `longest_token` is that of `ServedModel`."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // longest_token) if longest_token else 0


def too_long_message(max_model_len: int, prompt_tokens: int) -> str:
    """Return the text of `context_length_exceeded` for a prompt that has at least this many tokens. Client libraries
    look for its first sentence."""
    limit = f"This model's maximum context length is {max_model_len} tokens."
    return f"{limit} The prompt has at least {prompt_tokens} tokens: shorten the prompt"


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, described by the scheduler and by the worker's tokenizer files."""

    card: ModelCard
    epoch: tuple[int, int]
    """The latest epoch of all replicas."""
    defaults: SamplingDefaults
    names: tuple[str, ...] = ()
    """Names that requests may use for the model; empty: only the card's name."""
    longest_token: int = 0
    """Most bytes of UTF-8 text that one token can stand for; 0: not known."""
    capabilities: tuple[str, ...] | None = None
    """What requests can ask of the model: `chat`, it has a chat template; `tools`, it calls tools; `reasoning`, its
    answers may begin with marked reasoning; `reasoning_switch`, a request can switch that on and off. None: not
    known."""

    @property
    def all_names(self) -> tuple[str, ...]:
        """At least one name; answers to requests without a model name use the first."""
        return self.names or (self.card.name,)


class WorkerState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """State of a worker. `model` is None until a scheduler has sent its `Welcome`; `reason` explains why."""

    version: int
    at: float
    """Time of sending, on the clock that all processes of a machine share (`time.monotonic`)."""
    model: ServedModel | None
    status: Status | None
    """Last status of the scheduler; the sum over several schedulers."""
    reason: str = ""
    replicas: tuple[ReplicaView, ...] = ()
    """All replicas that the worker knows."""
    retried: int = 0
    """Requests resubmitted to another engine, or to a later epoch of the same one, since the worker started."""
    parked: int = 0
    """Choices that the worker has taken and that wait for a routable engine."""
    no_engines: bool = False
    """The engines were looked up, and there is none."""


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The scheduler has queued the request, which will end with `Finished` or `TextFailed`."""

    id: bytes
    prompt_tokens: int
    prompt_token_ids: bytes = b""
    """int32, for requests with `return_token_ids`."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that have no effect on this model."""


class Continued(msgspec.Struct, frozen=True, tag="continued"):
    """The engine of an answer with tokens was lost, and a scheduler has queued the rest of the answer."""

    id: bytes


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """End of an answer."""

    id: bytes
    reason: Literal["stop", "length"]
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    completion_tokens: int
    """Sampled tokens, including the one that ended the answer."""
    wait: FirstTokenWait | None = None
    """None: not reported by the scheduler."""
    tool_calls: int = 0
    """Number of tool calls in the answer."""
    reasoning_tokens: int = 0
    """Sampled tokens of the reasoning, its markers included."""
    matched_stop: str | int | None = None
    """Stop string, or id of the stop token, that ended the answer; None: the model's own end or a limit."""
    preemptions: int = 0
    """Number of times that the request was preempted."""
    continued: int = 0
    """Number of times that the answer went on at another engine, or at a later start of the same one."""
    accepted_prediction_tokens: int = 0
    """Tokens of the request's prediction that the engine tried and that the answer has."""
    rejected_prediction_tokens: int = 0
    """Tokens of the prediction that the engine tried and that the answer does not have."""
    values: bytes = b""
    """float32 numbers of a pooled output."""


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of an answer or an echoed prompt, with its log-probability."""

    name: bytes
    """Name in the vocabulary: the bytes of the token, or the text of a special token."""
    text: bytes
    """Bytes that the token adds to the text, none for a special token; concatenated they are the text in UTF-8."""
    offset: int
    """Number of complete characters of the choice's text before the token."""
    logprob: float | None
    """None for the first token of a prompt, which has no context."""
    top: list[tuple[bytes, float]]
    """Names and log-probabilities of the most likely tokens, best first."""
    token_id: int = -1
    top_ids: list[int] = []
    """Ids of the tokens in `top`."""


class FirstTokenFrom(msgspec.Struct, frozen=True, array_like=True):
    """An engine has given its first token of an answer, or a pooled output."""

    engine: str
    wait: FirstTokenWait
    cause: str = ""
    """Why the request left the engine before; empty: there was none."""


class Texts(msgspec.Struct, frozen=True, kw_only=True, tag="texts", omit_defaults=True):
    """Texts of one step for the requests of a frontend; the last text of a request is sent with its end. Echoed prompts
    are the first texts of their answers."""

    ids: bytes
    """16 bytes for each text."""
    texts: list[str]
    finished: list[Finished]
    counts: list[int]
    """Number of tokens that each request has sampled so far."""
    scored: dict[int, list[ScoredToken]] = {}
    """Tokens of the texts by row, for requests with log-probabilities."""
    reasoning: dict[int, str] = {}
    """New reasoning by row; it precedes the row's text."""
    tool_calls: dict[int, list[ToolCallDelta]] = {}
    """New output of tool calls by row; it follows the row's text."""
    token_ids: dict[int, bytes] = {}
    """int32 ids of new tokens by row, for requests with `return_token_ids`."""
    prompt_scored: dict[int, list[ScoredToken]] = {}
    """Next tokens of the prompt by row, in the first rows of a request with `prompt_logprobs`, unless the prompt is
    echoed with log-probabilities: then they are in `scored`."""

    first_tokens: dict[bytes, FirstTokenFrom] = {}
    """By request, for those that are recorded in a trace; its text may come later."""

    def rows(self) -> list[tuple[bytes, str]]:
        """Request and text of each row. Raises ValidationError when the columns differ in length."""
        if len(self.ids) != len(self.texts) * REQUEST_ID_BYTES or len(self.counts) != len(self.texts):
            raise msgspec.ValidationError("the columns of a texts message differ in length")
        if any(len(token_ids) % 4 for token_ids in self.token_ids.values()):
            raise msgspec.ValidationError("token ids of a texts message are not int32")
        ids = [self.ids[start : start + REQUEST_ID_BYTES] for start in range(0, len(self.ids), REQUEST_ID_BYTES)]
        return list(zip(ids, self.texts, strict=True))


class TextFailed(msgspec.Struct, frozen=True, kw_only=True, tag="text_failed"):
    """A request ended without a complete answer, or was not accepted. `code` is stable, see docs/api.md."""

    id: bytes
    code: str
    message: str
    param: str | None = None
    """Field of the request that caused the error, in OpenAI's spelling."""


class Encode(msgspec.Struct, frozen=True, kw_only=True, tag="encode", omit_defaults=True):
    """Query for the token ids of a text or a conversation; exactly one of the two is set."""

    id: bytes
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    tools: ToolOptions | None = None
    rendering: Rendering = Rendering()


class Encoded(msgspec.Struct, frozen=True, kw_only=True, tag="encoded"):
    """Answer to Encode."""

    id: bytes
    tokens: bytes
    """int32"""
    names: list[bytes]
    """Name of each token in the vocabulary."""


class Decode(msgspec.Struct, frozen=True, kw_only=True, tag="decode"):
    """Query for the text of token ids, including special tokens."""

    id: bytes
    tokens: bytes
    """int32"""


class Decoded(msgspec.Struct, frozen=True, kw_only=True, tag="decoded"):
    """Answer to Decode."""

    id: bytes
    text: str


class Describe(msgspec.Struct, frozen=True, kw_only=True, tag="describe"):
    """Query for the properties of the tokenizer that clients need to use it themselves."""

    id: bytes


class Described(msgspec.Struct, frozen=True, kw_only=True, tag="described"):
    """Answer to Describe."""

    id: bytes
    special_tokens: dict[str, str]
    """Special tokens by role (`bos_token`, `eos_token`, …), without those that the model does not define."""
    chat_template: str | None
    add_bos_token: bool


class CheckConstraints(msgspec.Struct, frozen=True, kw_only=True, tag="check_constraints"):
    """Query whether an engine could apply constraints. The answer may take a second, and needs no engine."""

    id: bytes
    constraints: tuple[StructuredOutput, ...]


class ConstraintProblem(msgspec.Struct, frozen=True):
    """Why no engine can apply a constraint. `code` is stable, see docs/api.md."""

    code: str
    message: str


class CheckedConstraints(msgspec.Struct, frozen=True, kw_only=True, tag="checked_constraints"):
    """Answer to CheckConstraints."""

    id: bytes
    problems: tuple[ConstraintProblem | None, ...]
    """Of each constraint in turn, up to the first one that has any."""


Question = Encode | Decode | Describe
Reply = Encoded | Decoded | Described

ToTokenizer = Generate | Cancel | Encode | Decode | Describe | CheckConstraints | Flush | RequestsWait
FromTokenizer = WorkerState | Accepted | Continued | Texts | TextFailed | Reply | CheckedConstraints | Flushed
