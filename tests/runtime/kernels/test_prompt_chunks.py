"""Chunks of the prompts of a step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minisgl.kernels.attention.prompt_chunks import CHUNK, NO_CHECKPOINT, Segment, chunks_of, most_chunks


@given(
    sizes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 300)), max_size=5),
    data=st.data(),
)
def test_chunks_are_all_tokens_in_order_and_end_where_states_are_saved(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    segments = [Segment(slot, start, length) for slot, (start, length) in enumerate(sizes)]
    saves = {}
    for slot, start, length in segments:
        blocks = range((start // CHUNK + 1) * CHUNK, start + length + 1, CHUNK)
        if blocks and data.draw(st.booleans()):
            saves[slot] = [(data.draw(st.sampled_from(blocks)), slot + 10)]
    size = most_chunks(sum(each.length for each in segments), len(segments))
    chunks, ends = chunks_of(segments, saves, size)
    assert chunks.shape == (5, size)
    assert not chunks[1, ends[-1] :].any()
    token = 0
    for segment, first, last in zip(segments, ends, ends[1:], strict=False):
        before = 0
        for begin, length, offset, slot, saved in chunks[:, first:last].T.tolist():
            assert (begin, offset, slot) == (token, before, segment.slot)
            assert 0 < length <= CHUNK
            token, before = token + length, before + length
            end = segment.start + before
            assert end % CHUNK == 0 or before == segment.length
            expected = [place for tokens, place in saves.get(slot, []) if tokens == end]
            assert saved == (expected or [NO_CHECKPOINT])[0]
        assert before == segment.length
