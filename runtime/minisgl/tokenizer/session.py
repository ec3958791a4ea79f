"""The requests of one tokenizer worker: what each message means for them. No sockets, no clock, no threads.

A request is `ENCODING` → `SUBMITTED` → `RUNNING` and then gone: at its end nothing of it is kept, so whatever arrives
late finds nobody and is ignored. Methods leave messages for both sides, in the order in which they must be
sent; the caller takes them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum, auto
from typing import Final, Literal

from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.errors import PromptError
from minisgl.tokenizer.prompt_encoder import Prompt
from minisgl.tokenizer.stop_strings import StopStrings
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import FINISH_REASONS, Abort, Ack, Failed, ModelCard, Submit, Tokens
from minisgl.wire.text import Accepted, Cancel, Finished, FromTokenizer, Generate, TextFailed, Texts

_EndReason = Literal["stop", "length"]
_END_REASONS: Final[dict[int, _EndReason | None]] = {
    FINISH_REASONS.index(None): None,
    FINISH_REASONS.index("stop"): "stop",
    FINISH_REASONS.index("length"): "length",
}
"""Codes of `Tokens.finish` under which a row carries a token of an answer; all others are failures."""


class _Phase(Enum):
    ENCODING = auto()
    SUBMITTED = auto()
    RUNNING = auto()


class _Request:
    __slots__ = ("cached_tokens", "detokenizer", "generate", "phase", "prompt_tokens", "stops", "tokens")

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.phase = _Phase.ENCODING
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.tokens = 0
        """Sampled so far."""
        self.detokenizer: Detokenizer
        self.stops: StopStrings


class Session:
    """`model` is what the scheduler said of itself; None until then and after its loss."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._to_scheduler: list[Submit | Abort] = []
        self._to_frontend: list[FromTokenizer] = []
        self._token_bytes = token_bytes
        self._model: ModelCard | None = None
        self._requests: dict[bytes, _Request] = {}
        self._random = random.SystemRandom()

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    def __contains__(self, request_id: bytes) -> bool:
        return request_id in self._requests

    def welcome(self, model: ModelCard) -> None:
        self._model = model

    def begin(self, generate: Generate) -> bool:
        """Take in a request, whose prompt is to be encoded next. False: it has failed at once."""
        if self._model is None:
            self._fail(generate.id, "engine_unavailable", "the engine is not there; try again in a moment")
            return False
        if generate.id in self._requests:
            self._fail(generate.id, "duplicate_request", "a request with this id is being served already")
            return False
        self._requests[generate.id] = _Request(generate)
        return True

    def encoded(self, request_id: bytes, prompt: Prompt | PromptError) -> None:
        """The prompt's token ids, or why there are none. The request may have been cancelled meanwhile."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if isinstance(prompt, PromptError):
            self._end_failed(request_id, prompt.code, prompt.message, prompt.param)
            return
        try:
            submit = self._submit(request, prompt)
        except PromptError as error:
            self._end_failed(request_id, error.code, error.message, error.param)
            return
        request.phase = _Phase.SUBMITTED
        request.prompt_tokens = len(prompt)
        request.detokenizer = Detokenizer(self._token_bytes, prompt)
        request.stops = StopStrings(request.generate.params.stop)
        self._to_scheduler.append(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._abort(cancel.id)

    def acked(self, ack: Ack) -> None:
        request = self._requests.get(ack.id)
        if request is not None:
            request.phase = _Phase.RUNNING
            self._to_frontend.append(Accepted(ack.id, request.prompt_tokens))

    def failed(self, failed: Failed) -> None:
        if failed.id in self._requests:
            self._end_failed(failed.id, failed.code, failed.message)

    def tokens(self, tokens: Tokens) -> None:
        """One step's tokens: at most one message with the new texts of all requests. Raises ValidationError."""
        rows = tokens.rows()
        ids: list[bytes] = []
        texts: list[str] = []
        finished: list[Finished] = []
        for request_id, index, token, code, cached in zip(
            rows.ids, rows.index.tolist(), rows.token.tolist(), rows.finish.tolist(), rows.cached.tolist(), strict=True
        ):
            request = self._requests.get(request_id)
            if request is None or index < request.tokens:
                # It has ended here already, or the token was given before.
                continue
            if index > request.tokens:
                # An answer with a hole must never look like one without.
                self._to_scheduler.append(Abort(request_id))
                self._end_failed(request_id, "tokens_lost", f"token {request.tokens} of the answer never arrived")
                continue
            request.tokens += 1
            request.cached_tokens = cached
            try:
                reason = _END_REASONS[code]
            except KeyError:
                self._end_failed(request_id, "engine_error", "the engine ended the request without an answer")
                continue
            text, reason = self._text(request_id, request, token, reason)
            if text:
                ids.append(request_id)
                texts.append(text)
            if reason is not None:
                finished.append(self._end(request_id, request, reason))
        if ids or finished:
            self._to_frontend.append(Texts(ids=b"".join(ids), texts=texts, finished=finished))

    def lost(self, code: str, message: str) -> None:
        """The scheduler is gone: every request fails."""
        self._model = None
        self._to_scheduler.clear()
        for request_id in list(self._requests):
            self._end_failed(request_id, code, message)

    def abandoned(self) -> None:
        """The frontend is gone: nobody waits for any request."""
        for request_id in list(self._requests):
            self._abort(request_id)
        self._to_frontend.clear()

    def take_to_scheduler(self) -> Sequence[Submit | Abort]:
        messages, self._to_scheduler = self._to_scheduler, []
        return messages

    def take_to_frontend(self) -> Sequence[FromTokenizer]:
        messages, self._to_frontend = self._to_frontend, []
        return messages

    def _submit(self, request: _Request, prompt: Prompt) -> Submit:
        assert self._model is not None, "without a model every request has failed"
        generate = request.generate
        params = generate.params
        _check_tokens(prompt, self._model.vocab_size)
        return Submit(
            id=generate.id,
            prompt=prompt.tobytes(),
            max_tokens=_max_tokens(len(prompt), params.max_tokens, self._model.max_model_len),
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self._random.getrandbits(63) if params.seed is None else params.seed,
            ignore_eos=params.ignore_eos,
            stop_token_ids=params.stop_token_ids,
            priority=generate.priority,
            deadline_ms=generate.deadline_ms,
        )

    def _text(
        self, request_id: bytes, request: _Request, token: int, reason: _EndReason | None
    ) -> tuple[str, _EndReason | None]:
        """The text that is safe to send after this token, and the reason to end, if any."""
        # A token that ended the answer (EOS) is counted, but is no part of its text.
        piece = "" if reason == "stop" else request.detokenizer.step(token)
        if reason is not None:
            piece += request.detokenizer.finish()
        text = request.stops.push(piece)
        if request.stops.stopped:
            if reason is None:
                self._to_scheduler.append(Abort(request_id))
            return text, "stop"
        if reason is not None:
            text += request.stops.finish()
        return text, reason

    def _end(self, request_id: bytes, request: _Request, reason: _EndReason) -> Finished:
        del self._requests[request_id]
        return Finished(
            id=request_id,
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=request.cached_tokens,
            completion_tokens=request.tokens,
        )

    def _end_failed(self, request_id: bytes, code: str, message: str, param: str | None = None) -> None:
        del self._requests[request_id]
        self._fail(request_id, code, message, param)

    def _fail(self, request_id: bytes, code: str, message: str, param: str | None = None) -> None:
        self._to_frontend.append(TextFailed(id=request_id, code=code, message=message, param=param))

    def _abort(self, request_id: bytes) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None and request.phase is not _Phase.ENCODING:
            self._to_scheduler.append(Abort(request_id))


def _check_tokens(prompt: Prompt, vocab_size: int) -> None:
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        raise PromptError(
            "invalid_token",
            f"token id {lowest if lowest < 0 else highest} is outside of the model's vocabulary, 0..{vocab_size - 1}",
            "prompt",
        )


def _max_tokens(prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
    """What may be generated. Both phrases of the error are what client libraries look for."""
    left = max_model_len - prompt_tokens
    if max_tokens is None and left >= 1:
        return left
    if max_tokens is not None and max_tokens <= left:
        return max_tokens
    asked = "at least 1" if max_tokens is None else str(max_tokens)
    raise PromptError(
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens. The prompt has {prompt_tokens} tokens and "
        f"{asked} more were asked for: shorten the prompt or lower max_tokens (context_length_exceeded)",
    )
