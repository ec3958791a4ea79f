"""Verification of drafts by the sampled tokens, and the search for new ones.

A draft is accepted if it equals the token that is sampled in its place, with the noise that belongs to its position:
the text is the one without drafts, greedy or not. New drafts continue an earlier occurrence of the last tokens (prompt
lookup, Saxena 2023): the longest one; of these one in the text that the request predicts; of these the one that the
last drafts came from, or else the newest.
"""

from __future__ import annotations

import numpy as np
import torch

from minisgl.kernels.speculation.row_text_tables import NO_TOKEN, RowTextTables
from minisgl.kernels.speculation.step_rows import SampledRows
from minisgl.wire.messages import MOST_DRAFTS
from minisgl.wire.plan import IntArray
from minisgl.wire.row_texts import LEAST_MATCHED, MATCHED_TOKENS


def verify_drafts(
    tables: RowTextTables, rows: SampledRows, tokens: torch.Tensor, sample_positions: torch.Tensor
) -> torch.Tensor:
    """Append the sampled tokens that count to the texts, with new drafts behind them. `tokens` and `sample_positions`
    [S] int32 are those of the step; a negative token ends its row.

    Returns int32 [4, R], the fields of `VerifiedRows`."""
    if tokens.is_cuda:
        from minisgl.kernels.speculation.verify_drafts_triton import verify_drafts_cuda

        return verify_drafts_cuda(tables, rows, tokens, sample_positions)
    report = np.zeros((4, len(rows.slots)), np.int32)
    texts, origins, sources = tables.texts.numpy(), tables.origin.numpy(), tables.source.numpy()
    columns = (each.tolist() for each in rows)
    for row, (slot, first, width) in enumerate(zip(*columns, strict=True)):
        position = int(sample_positions[first])
        origin, source = int(origins[slot]), int(sources[slot])
        begin = origin + position
        sampled, old = tokens[first : first + width].numpy(), texts[slot, begin : begin + MOST_DRAFTS]
        is_draft = old != NO_TOKEN
        offered = len(old) if is_draft.all() else int(is_draft.argmin())
        # The place of a missing draft does not match a token that is negative.
        matches = is_draft[: width - 1] & (sampled[: width - 1] == old[: width - 1])
        accepted = width - 1 if matches.all() else int(matches.argmin())
        # Tokens behind the last one of the sequence are those of the dummy slot.
        count = max(min(1 + accepted, int(tables.limit[slot]) - position), 1)
        report[:, row] = count, offered, offered > 0 and sampled[0] == old[0], 0 < source < origin
        texts[slot, begin : begin + count] = sampled[:count]
        tables.next_position[slot] = position + count - 1
        expected = source + count if source else 0
        drafts, sources[slot] = find_drafts(texts[slot, : begin + count], origin, expected)
        behind = texts[slot, begin + count : begin + count + MOST_DRAFTS]
        behind[:] = drafts[: len(behind)]
    return torch.from_numpy(report)


def find_drafts(text: IntArray, predicted: int, expected: int) -> tuple[IntArray, int]:
    """Drafts [MOST_DRAFTS] of the tokens behind `text`, whose first `predicted` tokens are predicted, and the index in
    it at which they begin. `expected`: that behind the source of the last drafts; 0: there were none.

    NO_TOKEN, and the end of the text, if its last tokens have not occurred before, unless a predicted text is expected
    to go on: a token was replaced in it."""
    end = len(text)
    length, places = 0, np.arange(1, end)
    while length < min(MATCHED_TOKENS, end - 1):
        before = places[places > length]
        longer = before[text[before - 1 - length] == text[end - 1 - length]]
        if not len(longer):
            break
        length, places = length + 1, longer
    if length < LEAST_MATCHED:
        if not 0 < expected < predicted:
            return np.full(MOST_DRAFTS, NO_TOKEN, np.int32), end
        start = expected
    else:
        in_predicted = places[places < predicted]
        best = in_predicted if len(in_predicted) else places
        start = expected if expected in best else int(best[-1])
    # Behind the end the text is taken to go on as it does since `start`.
    return text[start + np.arange(MOST_DRAFTS) % (end - start)], start
