"""One answer: from its sampled tokens to the output that is safe to send.

The tokens pass a pipeline: detokenizer, stop strings, scanner. A stop string is searched for in the whole text of the
tokens, so the scanner only receives text that is certainly part of the answer; it separates reasoning and tool calls
from the rest.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

from minisgl.parsing.incremental import IncrementalScanner
from minisgl.parsing.output import Event, Text
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.logprobs import AnswerLogprobs
from minisgl.tokenizer.marked_text import MarkedText
from minisgl.tokenizer.stop_patterns import StopPatterns
from minisgl.tokenizer.stop_strings import StopStrings
from minisgl.tokenizer.token_bytes import TokenBytes
from minisgl.wire.messages import TokenLogprobs
from minisgl.wire.text import Generate, ScoredToken

logger = logging.getLogger(__name__)

EndReason = Literal["stop", "length"]


class Output(NamedTuple):
    """Output of one token."""

    events: Sequence[Event]
    """Text, reasoning and tool calls, in the order of the answer."""
    scored: Sequence[ScoredToken]
    """Tokens that begin in the text, for requests with log-probabilities."""
    reason: EndReason | None
    """Reason why the answer ended with this token; None: it continues."""
    token_ids: Sequence[int] = ()
    """Tokens that were not reported before, for requests with `return_token_ids`."""
    matched: str | int | None = None
    """See `Finished.matched_stop`."""


class Answer:
    """Pipeline of one answer. `push` receives its tokens in order; `step` is a fast path for some of them. The
    constructor raises PatternError."""

    def __init__(
        self,
        generate: Generate,
        token_bytes: TokenBytes,
        prompt: array[int],
        *,
        echo_length: int = 0,
        scanner: IncrementalScanner | None = None,
    ) -> None:
        """`echo_length` is the number of characters of the echoed prompt before the answer. `scanner`: None for an
        answer that is only text."""
        params, options = generate.params, generate.options
        self._min_tokens = params.min_tokens
        self._includes_stop = params.include_stop_str_in_output
        self._stop_token_ids = frozenset(params.stop_token_ids)
        self._returns_ids = options.return_token_ids
        self._detokenizer = Detokenizer(token_bytes, prompt, options.skip_special_tokens)
        self.step = self._detokenizer.step
        """Returns the text of a token that is not the last. Only while `is_plain`; does what `push` does."""
        self._stops: StopStrings | StopPatterns
        if options.stop_regex:
            self._stops = StopPatterns(params.stop, options.stop_regex, params.include_stop_str_in_output)
        else:
            self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._scored = AnswerLogprobs(token_bytes, echo_length) if params.logprobs is not None else None
        self._scanner = scanner
        self._marked = MarkedText()
        self._by_token = {} if scanner is None else scanner.by_token
        self._is_text_only = (
            not params.stop
            and not options.stop_regex
            and params.logprobs is None
            and params.prompt_logprobs is None
            and params.max_tokens != 0
            and not options.return_token_ids
        )
        self.is_plain = self._is_text_only and scanner is None
        """Until its last token, the output is the text of the tokens and nothing else: `step` may take them."""
        self.tool_calls = 0
        """Tool calls so far."""
        self.reasoning_tokens = 0
        """Tokens of the reasoning so far, with its markers."""
        self._text_tokens = 0
        """Tokens of texts before or between reasoning."""

    def push(self, token: int, count: int, reason: EndReason | None, logprobs: TokenLogprobs | None) -> Output:
        """Return the output that is safe to send after token number `count`, counted from 1. `reason` is that of the
        engine to end the answer. Raises ValidationError for log-probabilities that are not those of one token."""
        piece, added = "", b""
        # A token that ended the answer (EOS) is counted, but is not part of its text.
        if reason != "stop" or self._includes_stop:
            piece, added = self._detokenizer.step_bytes(token)
            if (marker := self._by_token.get(token)) is not None:
                self._marked.add_marker(marker, piece)
        in_text = added or reason != "stop" or self._returns_ids
        if (scores := self._scored) is not None and logprobs is not None and in_text:
            scores.add(token, added, logprobs)
        if reason is not None:
            piece += self._detokenizer.finish()
        text = self._stops.push(piece, may_stop=count >= self._min_tokens)
        stopped = self._stops.stopped
        if reason is not None and not stopped:
            text += self._stops.finish()
        scored: Sequence[ScoredToken] = ()
        if scores is not None:
            scores.sampled(len(piece))
            whole = (reason is not None or stopped) and (self._returns_ids or not stopped)
            scored = scores.deliver(len(text), whole=whole)
        matched: str | int | None = self._stops.matched
        if matched is None and reason == "stop" and token in self._stop_token_ids:
            matched = token
        ids = (token,) if self._returns_ids else ()
        end: EndReason | None = "stop" if stopped else reason
        if self._scanner is None:
            return Output((Text(text),) if text else (), scored, end, ids, matched)
        self._marked.add(len(piece))
        is_cut = stopped or reason == "length"
        events = self._scan(self._scanner, text, count, is_end=end is not None, is_cut=is_cut)
        return Output(events, scored, end, ids, matched)

    def _scan(
        self, scanner: IncrementalScanner, text: str, count: int, *, is_end: bool, is_cut: bool
    ) -> Sequence[Event]:
        """Return the output of text that is certainly part of the answer."""
        was_reasoning = scanner.in_reasoning
        try:
            self._marked.pass_on(text, scanner, is_end=is_end)
            if is_end:
                scanner.finish(is_cut=is_cut)
            events = scanner.scan()
        except Exception:  # a bug there must not end the worker with all of its requests
            logger.exception("an answer could not be scanned; its rest is returned as text")
            self._by_token, self._scanner = {}, None
            return [*scanner.abandon(), *((Text(rest),) if (rest := self._marked.rest()) else ())]
        self.tool_calls = scanner.tool_calls
        if scanner.in_reasoning or was_reasoning or (scanner.has_reasoning and not self.reasoning_tokens):
            self.reasoning_tokens = count - self._text_tokens
        elif scanner.in_text:
            self._text_tokens = count - self.reasoning_tokens
        if scanner.is_plain and self._marked.is_empty:
            self._by_token, self._scanner = {}, None
            self.is_plain = self._is_text_only
        return events
