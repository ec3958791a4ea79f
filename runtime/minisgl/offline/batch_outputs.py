"""Collect the sampled tokens of a call, step by step, into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from minisgl.offline.outputs import Logprob, Output, Usage
from minisgl.scheduler.step_output import StepOutput
from minisgl.wire.messages import FINISH_REASONS, Submit, TokenLogprobs
from minisgl.wire.plan import IntArray
from minisgl.wire.text import Finished

_CHUNK: Final = 1 << 16
"""Tokens by which the memory for sampled tokens grows."""


class BatchOutputs:
    """Sampled tokens of all requests of a call, stored without a loop over rows, in memory that grows with them.

    A request's number is its index in the call; the scheduler keeps it as the request's client.
    """

    def __init__(self, submits: Sequence[Submit]) -> None:
        self._prompts = [np.frombuffer(submit.prompt, "<i4") for submit in submits]
        params = [submit.params for submit in submits]
        self._logprobs: dict[int, list[Logprob]] = {i: [] for i, one in enumerate(params) if one.logprobs is not None}
        self._prompt_logprobs: dict[int, list[Logprob]] = {
            i: [] for i, one in enumerate(params) if one.prompt_logprobs is not None
        }
        self._log: list[IntArray] = []
        """Each [3, _CHUNK]: number of the request, index in its answer, token. The last one has `_filled` columns."""
        self._filled = _CHUNK
        self._answers: tuple[NDArray[np.int64], IntArray] | None = None
        """Once all requests have finished: start of each answer, and the tokens of all answers."""
        self._count = np.zeros(len(submits), np.int64)
        self._cached = np.zeros(len(submits), np.int64)
        self._finish = np.zeros(len(submits), np.uint8)
        self._errors: dict[int, str] = {}

    def take(self, output: StepOutput) -> None:
        """Store the tokens, logprobs and errors of one step."""
        rows = output.client
        self._append(np.stack((rows, output.index, output.tokens)))
        self._count[rows] = output.index + 1
        self._cached[rows] = output.cached
        self._finish[rows] = output.finish
        self._errors.update((failure.client, failure.message) for failure in output.failures)
        for row, logprobs in output.logprobs.items():
            self._logprobs[int(rows[row])] += _logprobs(output.tokens[row : row + 1], logprobs)
        for number, prompt in output.prompt_logprobs:
            tokens = self._prompts[number][prompt.start :]
            self._prompt_logprobs[number] += _logprobs(tokens[: len(prompt.logprobs.chosen) // 4], prompt.logprobs)

    def output(self, number: int, text: str = "", ended: Finished | None = None) -> Output:
        """Return the output of a finished request. `ended`: the end of its text, which a stop string moves before the
        end that the scheduler knows; None without a tokenizer."""
        if self._answers is None:
            self._answers = self._sort()
        starts, tokens = self._answers
        count = int(self._count[number]) if ended is None else ended.completion_tokens
        start = int(starts[number])
        error = self._errors.get(number, "")
        reason = "error" if error else FINISH_REASONS[self._finish[number]] if ended is None else ended.reason
        assert reason in ("stop", "length", "error"), "every request of a call has finished"
        return Output(
            text=text,
            token_ids=tokens[start : start + count].tolist(),
            finish_reason=cast(Literal["stop", "length", "error"], reason),
            usage=Usage(
                prompt_tokens=len(self._prompts[number]),
                cached_tokens=int(self._cached[number]),
                completion_tokens=count,
            ),
            error=error,
            logprobs=self._logprobs[number][:count] if number in self._logprobs else None,
            prompt_logprobs=self._prompt_logprobs.get(number),
        )

    def _append(self, columns: IntArray) -> None:
        """Store columns [3, N] at the end of the log."""
        while columns.shape[1]:
            if self._filled == _CHUNK:
                self._log.append(np.empty((3, _CHUNK), np.int32))
                self._filled = 0
            part = columns[:, : _CHUNK - self._filled]
            self._log[-1][:, self._filled : self._filled + part.shape[1]] = part
            self._filled += part.shape[1]
            columns = columns[:, part.shape[1] :]

    def _sort(self) -> tuple[NDArray[np.int64], IntArray]:
        """`_answers`; frees the log."""
        starts = np.cumsum(self._count) - self._count
        tokens = np.empty(int(self._count.sum()), np.int32)
        while self._log:
            requests, index, token = self._log.pop()[:, : self._filled]
            self._filled = _CHUNK
            tokens[starts[requests] + index] = token
        return starts, tokens


def _logprobs(tokens: NDArray[np.int32], columns: TokenLogprobs) -> list[Logprob]:
    count = len(tokens)
    chosen = np.frombuffer(columns.chosen, "<f4").tolist()
    ids = np.frombuffer(columns.top_ids, "<i4").reshape(count, -1).tolist()
    values = np.frombuffer(columns.top, "<f4").reshape(count, -1).tolist()
    tops = [dict(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    return [Logprob(*each) for each in zip(tokens.tolist(), chosen, tops, strict=True)]
