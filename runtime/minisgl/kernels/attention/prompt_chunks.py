"""Chunks of the prompts of a step, which the kernels of recurrent states compute together. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch

from minisgl.wire.plan import IntArray

CHUNK: Final = 64
"""Most tokens of a chunk. Chunks end where the number of tokens of the sequence is a multiple of it, so that their
results do not depend on how a prompt was cut into steps."""
NO_CHECKPOINT: Final = -1


class Segment(NamedTuple):
    """Consecutive tokens of one prompt in a step."""

    slot: int
    start: int
    """Position of the first one."""
    length: int


class PromptChunks(NamedTuple):
    """On a device, for all prompts of a step. Tokens are numbered from the first one of a prompt."""

    chunks: torch.Tensor
    """[5, C] int32: first token, number of tokens, tokens of its segment before it, slot, and the checkpoint that gets
    the state behind it or `NO_CHECKPOINT`. Chunks of padding have no tokens."""
    ends: torch.Tensor
    """[P + 1] int32: the chunks of segment p are those from ends[p] up to ends[p + 1]."""
    num_tokens: int


def most_chunks(tokens: int, segments: int) -> int:
    """Most chunks of so many tokens in so many segments, if states are saved at multiples of `CHUNK` only."""
    return tokens // CHUNK + 2 * segments


def chunks_of(
    segments: Sequence[Segment], saves: Mapping[int, Sequence[tuple[int, int]]], size: int | None = None
) -> tuple[IntArray, IntArray]:
    """`PromptChunks.chunks` and `ends` of the segments. `saves`: by slot, numbers of tokens behind which a state is
    saved, and the checkpoints that get it. `size`: number of chunks with padding."""
    columns: list[tuple[int, int, int, int, int]] = []
    ends = [0]
    token = 0
    for slot, start, length in segments:
        saved = dict(saves.get(slot, ()))
        end = start + length
        places = sorted({*range((start // CHUNK + 1) * CHUNK, end, CHUNK), *saved} | ({end} if length else set()))
        begin = start
        for place in places:
            assert start < place <= end, "a state is saved in the step of its last token"
            before = begin - start
            columns.append((token + before, place - begin, before, slot, saved.get(place, NO_CHECKPOINT)))
            begin = place
        token += length
        ends.append(len(columns))
    if size is not None:
        assert len(columns) <= size
        columns += [(0, 0, 0, 0, NO_CHECKPOINT)] * (size - len(columns))
    return np.array(columns, np.int32).reshape(-1, 5).T, np.array(ends, np.int32)
