"""Log-probabilities of a step, reduced to the number that each request wants, as messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from minisgl.scheduler.request import Completed, Phase, RequestTable
from minisgl.wire.messages import PromptLogprobs, TokenLogprobs
from minisgl.wire.plan import LogprobColumns, PromptLogprobPart, RowLogprobs

MESSAGE_TOKENS: Final = 2048
"""Prompt tokens in one message: with the largest `prompt_logprobs`, an eighth of the largest message."""


def row_logprobs(table: RequestTable, reported: RowLogprobs, done: Completed) -> dict[int, TokenLogprobs]:
    """Messages by row of `done`, the tokens that clients receive."""
    row_of = {row: index for index, row in enumerate(done.rows.tolist())}
    messages = {}
    for i, row in enumerate(reported.rows.tolist()):
        index = row_of.get(row)
        if index is not None:
            tops = table.request(int(done.slots[index])).params.logprobs
            messages[index] = _message(reported.columns[i : i + 1], tops)
    return messages


def prompt_logprobs(table: RequestTable, parts: tuple[PromptLogprobPart, ...]) -> Iterator[tuple[int, PromptLogprobs]]:
    """Client and message for the prompt tokens of a step, each token once. Call it before the step's tokens are
    collected."""
    for part in parts:
        request = table.request(part.slot)
        if table.phase[part.slot] == Phase.ENDING:
            continue
        assert part.start == request.prompt_logprobs_from, "log-probabilities of a prompt are out of order"
        count = len(part.columns.chosen)
        request.prompt_logprobs_from += count
        for first in range(0, count, MESSAGE_TOKENS):
            columns = part.columns[first : first + MESSAGE_TOKENS]
            message = _message(columns, request.params.prompt_logprobs)
            yield request.client, PromptLogprobs(request.id, part.start + first, message)


def _message(columns: LogprobColumns, tops: int | None) -> TokenLogprobs:
    return TokenLogprobs(columns.chosen.tobytes(), columns.top_ids[:, :tops].tobytes(), columns.top[:, :tops].tobytes())
