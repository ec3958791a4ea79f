"""The requests of one tokenizer worker, and the effect of each message on them. No sockets, no clock, no threads.

A request is `ENCODING`, then `SUBMITTED`, then `RUNNING`. At its end it is forgotten, so late messages about it match
no request and are ignored. Methods append messages for the scheduler and for the frontend, in the order in which they
must be sent; the caller takes them.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from msgspec import ValidationError
from msgspec.structs import replace

from minisgl.errors import GrammarError, PromptError
from minisgl.parsing.answer_format import PLAIN_ANSWERS, AnswerFormat
from minisgl.parsing.harmony import end_tokens
from minisgl.parsing.reasoning import ReasoningState
from minisgl.tokenizer.answer import Answer, EndReason
from minisgl.tokenizer.answer_constraints import AnswerConstraints, PreparedConstraints
from minisgl.tokenizer.answer_scanner import answer_scanner, reasoning_state
from minisgl.tokenizer.callable_tools import ignores_tools
from minisgl.tokenizer.logprobs import EchoLogprobs
from minisgl.tokenizer.pooling_prompts import PooledPrompt
from minisgl.tokenizer.prompt_encoder import BadWords, Prompt
from minisgl.tokenizer.step_texts import StepTexts
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import (
    FINISH_REASONS,
    Abort,
    Ack,
    AnswerConstraint,
    Failed,
    FirstTokenWait,
    ModelCard,
    Pool,
    Pooled,
    PromptLogprobs,
    SamplingParams,
    Submit,
    TokenLogprobs,
    Tokens,
)
from minisgl.wire.text import (
    NOT_TAKEN,
    Accepted,
    Cancel,
    Continued,
    Finished,
    FirstTokenFrom,
    FromTokenizer,
    Generate,
    ScoredToken,
    TextFailed,
    Texts,
)

_NOT_FINISHED: Final = FINISH_REASONS.index(None)
_END_REASONS: Final[dict[int, EndReason | None]] = {
    _NOT_FINISHED: None,
    FINISH_REASONS.index("stop"): "stop",
    FINISH_REASONS.index("length"): "length",
}
"""Codes of `Tokens.finish` whose rows contain a token of an answer; all others are failures."""


NO_PREDICTION: Final[Prompt] = array("i")

_SCORES_PER_MESSAGE: Final = 2048
"""Tokens of a prompt in one message: with twenty others each, a tenth of the largest message."""


class Progress(NamedTuple):
    """Part of an answer that a request has received."""

    tokens: bytes
    """int32 ids of its tokens; another engine continues behind them."""
    is_visible: bool
    """The frontend has output of it, so that the answer cannot begin again."""


class _Phase(Enum):
    ENCODING = auto()
    REENCODING = auto()
    """Submitted before, with the token ids of another tokenizer."""
    SUBMITTED = auto()
    RUNNING = auto()


@dataclass(slots=True, eq=False)
class _Request:
    generate: Generate
    phase: _Phase = _Phase.ENCODING
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    """Tokens sampled so far."""
    output: array[int] = field(default_factory=lambda: array("i"))
    """Their ids."""
    has_output: bool = False
    """Text or scored tokens of the answer were sent to the frontend."""
    wait: FirstTokenWait | None = None
    engine: str = ""
    """Name of the engine that has it, if it is recorded in a trace."""
    moved_because: str = ""
    """Why it left the engine before; empty: there was none."""
    preemptions: int = 0
    earlier_preemptions: int = 0
    """Those at engines that were lost."""
    predicted: tuple[int, int] = (0, 0)
    """Accepted and rejected tokens of the prediction."""
    earlier_predicted: tuple[int, int] = (0, 0)
    """Those at engines that were lost."""
    continued: int = 0
    """Number of times that another engine continued the answer."""
    prompt_ids: bytes = b""
    """int32, for requests with `return_token_ids`."""
    ignored: tuple[str, ...] = ()
    """See `Accepted.ignored`."""
    echo: EchoLogprobs | None = None
    prompt_scores: EchoLogprobs | None = None
    """For log-probabilities of a prompt that are not part of its echo."""
    prompt_scored: list[ScoredToken] = field(default_factory=list)
    """Those that have arrived; they are sent together with the first output."""
    answer: Answer = field(init=False)
    """Set when the prompt is encoded."""


class Session:
    """Takes requests between `open` and `close`."""

    def __init__(self, token_bytes: TokenBytes | None = None, answers: AnswerFormat = PLAIN_ANSWERS) -> None:
        """`token_bytes` may come later with `use`, which the caller calls before `open`."""
        self._to_scheduler: list[Submit | Pool | Abort] = []
        self._to_frontend: list[FromTokenizer] = []
        self._token_bytes = token_bytes
        self._answers = answers
        self._constraints = AnswerConstraints(answers)
        self._model: ModelCard | None = None
        """The model as the engines served it last; None before the first `open`."""
        self._open = False
        self._requests: dict[bytes, _Request] = {}
        self._random = random.SystemRandom()

    def __len__(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def use(self, token_bytes: TokenBytes, answers: AnswerFormat) -> None:
        """Set the tokenizer of prompts that are encoded from now on, and the format of their answers; running answers
        keep theirs."""
        self._token_bytes = token_bytes
        self._answers = answers
        self._constraints = AnswerConstraints(answers)

    def open(self, model: ModelCard) -> None:
        """Take requests for this model."""
        self._model = model
        self._open = True

    def close(self) -> None:
        """Refuse new requests for now; those that were taken continue."""
        self._open = False

    def begin(self, generate: Generate) -> bool:
        """Take a request, whose prompt is to be encoded next. False: it was refused."""
        if not self._open:
            self._fail(generate.id, NOT_TAKEN, "no engine is connected; retry")
            return False
        if generate.id in self._requests:
            self._fail(generate.id, "duplicate_request", "a request with this identifier is running already")
            return False
        if self._model is not None and (generate.pooling is None) != (self._model.task == "generate"):
            self._fail(generate.id, "wrong_task", f"the model is served for the task {self._model.task}")
            return False
        self._requests[generate.id] = _Request(generate)
        return True

    def begin_reencode(self, request_id: bytes) -> Generate | None:
        """Return a request that begins again with its prompt, because it has tokens without output or because other
        tokenizer files are in use; None if it has ended, or must end."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.echo is not None and request.phase is _Phase.RUNNING:
            # The echo was sent already; a new one could differ from it.
            self._abort_failed(request_id, "engine_unavailable", "the engine was lost after the prompt was echoed")
            return None
        assert request.phase is not _Phase.ENCODING and not request.has_output, "it was submitted and has no output"
        request.phase = _Phase.REENCODING
        request.tokens = 0
        request.output = array("i")
        return request.generate

    def deadline_ms(self, request_id: bytes) -> int:
        """Return the Unix time in ms after which a request ends in an error; 0: none, or the request has ended."""
        request = self._requests.get(request_id)
        return 0 if request is None else request.generate.deadline_ms

    def progress(self, request_id: bytes) -> Progress | None:
        """Return how far an answer has come; None when its request has ended.

        A sent echo is visible once there are tokens: the prompt would be encoded and echoed again.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        is_visible = request.has_output or (request.echo is not None and request.tokens > 0)
        return Progress(request.output.tobytes(), is_visible)

    def encoded(
        self,
        request_id: bytes,
        prompt: Prompt | PromptError,
        bad_words: BadWords = (),
        prepared: PreparedConstraints | None = None,
        prediction: Prompt = NO_PREDICTION,
    ) -> None:
        """Submit a request with its token ids, those of its bad words and of its prediction, or end it with the error
        of its prompt. It may have been cancelled meanwhile. `prepared`: its constraints, which are built here if they
        are missing or those of another end of the prompt, such as that of a prompt before it is truncated."""
        request = self._requests.get(request_id)
        if request is None:
            return
        try:
            if isinstance(prompt, PromptError):
                raise prompt
            if request.generate.pooling is not None:
                self._submit_pool(request, prompt)
                return
            prompt = self._truncated(request.generate, prompt)
            assert self._token_bytes is not None
            state = reasoning_state(request.generate, self._answers, self._token_bytes, prompt)
            constraint = self._constraints_of(request.generate, state, prepared)
            submit = self._submit(request, prompt, bad_words, constraint, prediction)
            self._begin_answer(request, prompt, state)
        except (PromptError, GrammarError) as error:
            if request.phase is _Phase.REENCODING:
                self._to_scheduler.append(Abort(request_id))
            param = error.param if isinstance(error, PromptError) else None
            self._end_failed(request_id, error.code, error.message, param)
            return
        request.phase = _Phase.SUBMITTED
        self._to_scheduler.append(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._abort(cancel.id)

    def placed(self, request_id: bytes, engine: str, moved_because: str) -> None:
        """A request is sent to an engine. `moved_because`: why it left the engine before; empty: there was none."""
        request = self._requests.get(request_id)
        if request is not None and request.generate.traced:
            request.engine, request.moved_because = engine, moved_because

    def receive(self, message: Ack | Failed | Tokens | Pooled | PromptLogprobs) -> None:
        """Handle a message of the scheduler. Raises ValidationError for one that cannot be read; it has changed
        nothing."""
        match message:
            case Tokens():
                self.tokens(message)
            case Pooled():
                self.pooled(message)
            case Ack():
                self.acked(message)
            case Failed():
                self.failed(message)
            case PromptLogprobs():
                self.prompt_scored(message)

    def acked(self, ack: Ack) -> None:
        """Report a request as accepted, with its echo; one that has tokens is continued."""
        request = self._requests.get(ack.id)
        if request is not None and request.tokens:
            request.continued += 1
            request.earlier_preemptions = request.preemptions
            request.earlier_predicted = request.predicted
            self._to_frontend.append(Continued(ack.id))
        elif request is not None:
            request.phase = _Phase.RUNNING
            self._to_frontend.append(Accepted(ack.id, request.prompt_tokens, request.prompt_ids, request.ignored))
            if (echo := request.echo) is not None:
                scored = echo.first() if _scores_echo(request.generate) else []
                self._to_frontend.append(_text_of(ack.id, echo.text, scored))

    def prompt_scored(self, message: PromptLogprobs) -> None:
        """Report or keep the scores of a prompt. Scores that do not fit the prompt fail its request."""
        request = self._requests.get(message.id)
        if request is None:
            return
        try:
            if request.prompt_scores is not None:
                request.prompt_scored += request.prompt_scores.scored(message.start, message.logprobs)
            elif request.echo is not None:
                scored = request.echo.scored(message.start, message.logprobs)
                self._to_frontend.append(_text_of(message.id, "", scored))
        except ValidationError as error:
            self._abort_failed(message.id, "engine_error", f"the engine sent invalid log-probabilities: {error}; retry")

    def failed(self, failed: Failed) -> None:
        if failed.id in self._requests:
            self._end_failed(failed.id, failed.code, failed.message)

    def tokens(self, tokens: Tokens) -> None:
        """Turn the tokens of a step into one message with the new texts of all requests, if there are any. A row with
        invalid content fails its request and no other. Raises ValidationError for columns of unequal length, before
        anything has changed."""
        rows = tokens.rows()
        step = StepTexts()
        for row, wait in tokens.waits.items():
            if (request := self._in_row(rows.ids, row)) is not None:
                request.wait = wait
                _note_first_token(step, request, wait)
        for row, preemptions in tokens.preemptions.items():
            if (request := self._in_row(rows.ids, row)) is not None:
                request.preemptions = request.earlier_preemptions + preemptions
        for row, (accepted, rejected) in tokens.predicted.items():
            if (request := self._in_row(rows.ids, row)) is not None:
                earlier_accepted, earlier_rejected = request.earlier_predicted
                request.predicted = earlier_accepted + accepted, earlier_rejected + rejected
        columns = (rows.ids, rows.index.tolist(), rows.token.tolist(), rows.finish.tolist(), rows.cached.tolist())
        for row, (request_id, index, token, code, cached) in enumerate(zip(*columns, strict=True)):
            request = self._requests.get(request_id)
            if request is None:
                continue
            if index != request.tokens:
                # A token that was delivered before is ignored, unless nothing can follow it. An answer with a missing
                # token must not look complete.
                if index > request.tokens:
                    problem = f"token {request.tokens} of the answer never arrived"
                    self._abort_failed(request_id, "tokens_lost", problem)
                elif code != _NOT_FINISHED:
                    problem = f"the engine ended the answer with token {index} again; retry"
                    self._abort_failed(request_id, "engine_error", problem)
                continue
            if not index:
                request.cached_tokens = cached
            request.tokens += 1
            request.output.append(token)
            answer = request.answer
            if code == _NOT_FINISHED and answer.is_plain:
                # Nearly every token. The code below would do the same, but more slowly (1.7 µs).
                if text := answer.step(token):
                    request.has_output = True
                    step.add_text(request_id, text, request.tokens)
                continue
            try:
                reason = _END_REASONS[code]
            except KeyError:
                self._end_failed(request_id, "engine_error", "the engine ended the request without a finish reason")
                continue
            if problem := _missing_logprobs(request, row, tokens.logprobs):
                self._abort_failed(request_id, "engine_error", problem)
                continue
            if request.prompt_scored:
                self._to_frontend += _scores_of(request_id, request.prompt_scored)
                request.prompt_scored = []
                request.has_output = True
            if request.generate.params.max_tokens == 0:
                # The engine generates at least one token, although none was asked for.
                request.tokens = 0
                step.finish(self._end(request_id, request, "length"))
                continue
            try:
                output = answer.push(token, request.tokens, reason, tokens.logprobs.get(row))
            except ValidationError as error:
                # The texts of the rows before this one are in `step` alone, and must reach their clients.
                problem = f"the engine sent invalid log-probabilities: {error}; retry"
                self._abort_failed(request_id, "engine_error", problem)
                continue
            if step.add(request_id, output, request.tokens):
                request.has_output = True
            if output.reason is not None:
                if reason is None:
                    self._to_scheduler.append(Abort(request_id))
                step.finish(self._end(request_id, request, output.reason, output.matched))
        if (message := step.message()) is not None:
            self._to_frontend.append(message)

    def pooled(self, pooled: Pooled) -> None:
        """End requests with their pooled outputs, in one message. Raises ValidationError for columns of unequal length,
        before anything has changed."""
        assert self._model is not None, "requests are taken only after `open`"
        step = StepTexts()
        for row, (request_id, cached, values) in enumerate(pooled.rows(self._model.output_size)):
            request = self._requests.pop(request_id, None)
            if request is None:
                continue
            wait = pooled.waits.get(row)
            if wait is not None:
                _note_first_token(step, request, wait)
            step.finish(
                Finished(
                    id=request_id,
                    reason="stop",
                    prompt_tokens=request.prompt_tokens,
                    cached_tokens=cached,
                    completion_tokens=0,
                    wait=wait,
                    values=values,
                )
            )
        if (message := step.message()) is not None:
            self._to_frontend.append(message)

    def abort_all(self) -> None:
        """End all requests: the frontend was lost, and nothing is sent to it."""
        for request_id in list(self._requests):
            self._abort(request_id)
        self._to_frontend.clear()

    def take_to_scheduler(self) -> Sequence[Submit | Pool | Abort]:
        messages, self._to_scheduler = self._to_scheduler, []
        return messages

    def take_to_frontend(self) -> Sequence[FromTokenizer]:
        messages, self._to_frontend = self._to_frontend, []
        return messages

    def _in_row(self, ids: list[bytes], row: int) -> _Request | None:
        """Return the request in a row of a message, unless it has ended or there is no such row."""
        return self._requests.get(ids[row]) if 0 <= row < len(ids) else None

    def _begin_answer(self, request: _Request, prompt: Prompt, state: ReasoningState) -> None:
        """Raises PromptError."""
        assert self._token_bytes is not None
        generate = request.generate
        request.prompt_tokens = len(prompt)
        if generate.options.return_token_ids:
            request.prompt_ids = prompt.tobytes()
        request.ignored = ("tools",) if ignores_tools(generate, self._answers) else ()
        if generate.options.echo:
            text = generate.prompt if generate.options.truncate_prompt_tokens is None else None
            request.echo = EchoLogprobs(self._token_bytes, prompt, text)
        if generate.params.prompt_logprobs is not None and not _scores_echo(generate):
            request.prompt_scores = EchoLogprobs(self._token_bytes, prompt, None)
            request.prompt_scored = request.prompt_scores.first()
        request.answer = Answer(
            generate,
            self._token_bytes,
            prompt,
            echo_length=len(request.echo.text) if request.echo else 0,
            scanner=answer_scanner(generate, self._answers, state),
        )

    @property
    def max_model_len(self) -> int | None:
        """Tokens of the longest sequence; None while no requests are taken."""
        return None if self._model is None else self._model.max_model_len

    def _truncated(self, generate: Generate, prompt: Prompt) -> Prompt:
        """Return the last or first tokens of the prompt, as many as the request wants to keep."""
        assert self._model is not None, "requests are taken only after `open`"
        keep = generate.options.truncate_prompt_tokens
        if keep is None:
            return prompt
        if keep == -1:
            # At least one, so that a request which fits in no case gets the error with its numbers.
            keep = max(1, self._model.max_model_len - _least_tokens(generate.params, generate.options.soft_limits))
        return prompt[-keep:] if generate.options.truncation_side == "left" else prompt[:keep]

    def _constraints_of(
        self, generate: Generate, state: ReasoningState, prepared: PreparedConstraints | None
    ) -> AnswerConstraint:
        if prepared is not None and prepared.state is state:
            return prepared.take()
        return self._constraints.of(generate, state)

    def _submit(
        self,
        request: _Request,
        prompt: Prompt,
        bad_words: BadWords,
        constraint: AnswerConstraint,
        prediction: Prompt,
    ) -> Submit:
        assert self._model is not None, "requests are taken only after `open`"
        vocab_size = self._model.vocab_size
        generate = _within_vocabulary(request.generate, vocab_size)
        params = generate.params
        _check_tokens(prompt, vocab_size, "prompt")
        _check_tokens(params.stop_token_ids, vocab_size, "stop_token_ids")
        _check_tokens(params.logit_bias, vocab_size, "logit_bias")
        _check_tokens(params.allowed_token_ids, vocab_size, "allowed_token_ids")
        _check_tokens(params.logprob_token_ids, vocab_size, "logprob_token_ids")
        return submit_message(
            self._with_ends(generate),
            prompt.tobytes(),
            max_tokens=_max_tokens(len(prompt), params, self._model.max_model_len, generate.options.soft_limits),
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            # The engine can sample no token outside of its vocabulary.
            bad_words=tuple(word for word in bad_words if max(word) < vocab_size),
            constraint=constraint,
            # No more than a hint: the engine can sample none of these tokens.
            prediction=prediction.tobytes() if max(prediction, default=0) < vocab_size else b"",
        )

    def _submit_pool(self, request: _Request, prompt: Prompt) -> None:
        """Raises PromptError."""
        assert self._model is not None, "requests are taken only after `open`"
        generate, limit = request.generate, self._model.max_model_len
        _check_tokens(prompt, self._model.vocab_size, "input")
        if len(prompt) > limit:
            raise PromptError(
                "context_length_exceeded",
                f"This model's maximum context length is {limit} tokens. The text has {len(prompt)} tokens: shorten "
                "it, or have it cut with truncate_prompt_tokens",
            )
        request.prompt_tokens = len(prompt)
        request.phase = _Phase.SUBMITTED
        self._to_scheduler.append(
            Pool(
                id=generate.id,
                prompt=prompt.tobytes(),
                second_text=prompt.second_text if isinstance(prompt, PooledPrompt) else 0,
                priority=generate.options.priority,
                cache_salt=generate.options.cache_salt.encode("utf-8", "replace"),
                tenant=generate.tenant,
            )
        )

    def _with_ends(self, generate: Generate) -> Generate:
        """Return the request with the tokens that end its answer, where config.json does not name all of them."""
        params = generate.params
        if not self._answers.in_channels or generate.messages is None or params.ignore_eos:
            return generate
        assert self._model is not None, "requests are taken only after `open`"
        known = {*self._model.eos_token_ids, *params.stop_token_ids}
        ends = tuple(t for t in end_tokens(self._answers) if t not in known and t < self._model.vocab_size)
        return replace(generate, params=replace(params, stop_token_ids=(*params.stop_token_ids, *ends)))

    def _end(
        self, request_id: bytes, request: _Request, reason: EndReason, matched: str | int | None = None
    ) -> Finished:
        del self._requests[request_id]
        return Finished(
            id=request_id,
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.tokens,
            wait=request.wait,
            matched_stop=matched,
            preemptions=request.preemptions,
            continued=request.continued,
            tool_calls=request.answer.tool_calls,
            reasoning_tokens=request.answer.reasoning_tokens,
            accepted_prediction_tokens=request.predicted[0],
            rejected_prediction_tokens=request.predicted[1],
        )

    def _abort_failed(self, request_id: bytes, code: str, message: str) -> None:
        """End a request with an error, also at its engine."""
        self._to_scheduler.append(Abort(request_id))
        self._end_failed(request_id, code, message)

    def _end_failed(self, request_id: bytes, code: str, message: str, param: str | None = None) -> None:
        del self._requests[request_id]
        self._fail(request_id, code, message, param)

    def _fail(self, request_id: bytes, code: str, message: str, param: str | None = None) -> None:
        self._to_frontend.append(TextFailed(id=request_id, code=code, message=message, param=param))

    def _abort(self, request_id: bytes) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.phase is not _Phase.ENCODING:
            self._to_scheduler.append(Abort(request_id))


def _note_first_token(step: StepTexts, request: _Request, wait: FirstTokenWait) -> None:
    """Report the first token of an engine, if the request is recorded in a trace."""
    if request.generate.traced:
        step.first_tokens[request.generate.id] = FirstTokenFrom(request.engine, wait, request.moved_because)


def _text_of(request_id: bytes, text: str, scored: list[ScoredToken]) -> Texts:
    """Return a message with text of one request that does not come from a step."""
    return Texts(ids=request_id, texts=[text], finished=[], counts=[0], scored={0: scored} if scored else {})


def _scores_of(request_id: bytes, scored: list[ScoredToken]) -> list[Texts]:
    """Return messages with the log-probabilities of a prompt."""
    parts = [scored[first : first + _SCORES_PER_MESSAGE] for first in range(0, len(scored), _SCORES_PER_MESSAGE)]
    return [Texts(ids=request_id, texts=[""], finished=[], counts=[0], prompt_scored={0: part}) for part in parts]


def _scores_echo(generate: Generate) -> bool:
    """Return whether the echoed prompt has log-probabilities, as the answer has."""
    params = generate.params
    return generate.options.echo and params.logprobs is not None and params.prompt_logprobs is not None


def _missing_logprobs(request: _Request, row: int, logprobs: dict[int, TokenLogprobs]) -> str:
    """Return an error if requested log-probabilities are missing, because the answer would be incomplete; else ""."""
    params = request.generate.params
    scores = request.prompt_scores or (request.echo if params.prompt_logprobs is not None else None)
    if scores is not None and scores.missing:
        return "the engine sent no log-probabilities of the prompt"
    if params.logprobs is not None and row not in logprobs:
        return "the engine sent no log-probabilities"
    return ""


def _within_vocabulary(generate: Generate, vocab_size: int) -> Generate:
    """Leave out stop tokens that the model cannot generate, which are those of other checkpoints of its family. The
    frontend names them in its response."""
    params = generate.params
    if max(params.stop_token_ids, default=0) < vocab_size:
        return generate
    stops = tuple(token for token in params.stop_token_ids if token < vocab_size)
    return replace(generate, params=replace(params, stop_token_ids=stops))


def _check_tokens(tokens: Collection[int], vocab_size: int, param: str) -> None:
    lowest, highest = min(tokens, default=0), max(tokens, default=0)
    if lowest < 0 or highest >= vocab_size:
        raise PromptError(
            "invalid_token",
            f"token id {lowest if lowest < 0 else highest} is outside the model's vocabulary, which has {vocab_size} "
            f"tokens: 0..{vocab_size - 1}",
            param,
        )


def submit_message(
    generate: Generate,
    prompt: bytes,
    *,
    max_tokens: int,
    seed: int,
    constraint: AnswerConstraint,
    bad_words: BadWords = (),
    prediction: bytes = b"",
) -> Submit:
    """The scheduler's message for `generate`; `prompt` holds the int32 token ids of its prompt, `prediction` those of
    its prediction, and `constraint` is that of its answer, but for bad words."""
    options = generate.options
    return Submit(
        id=generate.id,
        prompt=prompt,
        params=replace(
            generate.params,
            max_tokens=max_tokens,
            seed=seed,
            top_k=max(generate.params.top_k, 0),
            stop=(),
            include_stop_str_in_output=False,
        ),
        constraint=replace(constraint, bad_words=bad_words) if bad_words else constraint,
        priority=options.priority,
        cache_salt=options.cache_salt.encode("utf-8", "replace"),
        tenant=generate.tenant,
        stream=options.stream,
        prediction=prediction,
    )


def _max_tokens(prompt_tokens: int, params: SamplingParams, max_model_len: int, fit: bool) -> int:
    """Return the most tokens that may be generated. `fit`: at most those that the context leaves. Raises PromptError,
    in whose text client libraries look for "maximum context length"."""
    left = max_model_len - prompt_tokens
    least = _least_tokens(params, fit)
    if least <= left:
        return left if params.max_tokens is None else min(max(1, params.max_tokens), left)
    raise PromptError(
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens. The prompt has {prompt_tokens} tokens and "
        f"{'at least ' if fit or params.max_tokens is None else ''}{least} more were requested: shorten the prompt or "
        "lower max_tokens",
    )


def _least_tokens(params: SamplingParams, fit: bool) -> int:
    """Return the number of tokens for which the context must have room behind the prompt."""
    return max(1, params.min_tokens if fit or params.max_tokens is None else params.max_tokens)
