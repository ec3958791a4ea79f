from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.router import routing
from minisgl.router.routing import (
    BLOCK_TOKENS,
    MAX_BLOCKS,
    Candidate,
    PrefixIndex,
    pick_replica,
    prefix_blocks,
    within_load_margin,
)

names = st.sampled_from([f"chat-r{number}" for number in range(12)])
loads = st.integers(0, 200)
candidate_lists = st.lists(
    st.builds(Candidate, names, loads, st.integers(0, 20)), min_size=1, max_size=12, unique_by=lambda one: one.name
)
prompts = st.lists(st.integers(0, 3), max_size=400).map(lambda ids: array("i", ids).tobytes())


def tokens(*ids: int) -> bytes:
    return array("i", ids).tobytes()


@given(candidate_lists, prompts)
def test_the_pick_is_within_the_load_margin_and_has_seen_most_of_the_prompt(
    candidates: list[Candidate], prompt: bytes
) -> None:
    chosen = next(one for one in candidates if one.name == pick_replica(candidates, prompt))
    least = min(one.load for one in candidates)
    assert within_load_margin(chosen.load, least)
    near = [one for one in candidates if within_load_margin(one.load, least)]
    assert chosen.matched_blocks == max(one.matched_blocks for one in near)
    assert chosen.load == min(one.load for one in near if one.matched_blocks == chosen.matched_blocks)


@given(candidate_lists, prompts)
def test_the_order_of_candidates_does_not_matter(candidates: list[Candidate], prompt: bytes) -> None:
    assert pick_replica(candidates, prompt) == pick_replica(candidates[::-1], prompt)


@given(st.lists(names, min_size=2, max_size=12, unique=True), st.data(), prompts)
def test_a_replica_that_leaves_moves_only_its_own_prompts(
    all_names: list[str], data: st.DataObject, prompt: bytes
) -> None:
    candidates = [Candidate(name, 0, 0) for name in all_names]
    before = pick_replica(candidates, prompt)
    leaves = data.draw(st.sampled_from(all_names))
    if leaves != before:
        assert pick_replica([one for one in candidates if one.name != leaves], prompt) == before


def test_equal_replicas_share_the_prompts() -> None:
    candidates = [Candidate(f"chat-r{number}", 0, 0) for number in range(4)]
    chosen = [pick_replica(candidates, tokens(*range(start, start + BLOCK_TOKENS))) for start in range(400)]
    assert all(60 < chosen.count(one.name) < 140 for one in candidates)


@pytest.mark.parametrize(("load", "least", "near"), [(8, 0, True), (9, 0, False), (133, 100, True), (134, 100, False)])
def test_load_margin(load: int, least: int, near: bool) -> None:
    assert within_load_margin(load, least) is near


@given(prompts, prompts, st.binary(max_size=2), st.binary(max_size=2))
def test_matched_blocks_equal_the_shared_prefix(a: bytes, b: bytes, salt: bytes, other: bytes) -> None:
    first, second = prefix_blocks(a, salt), prefix_blocks(b, other)
    size = 4 * BLOCK_TOKENS
    shared = 0
    while salt == other and len(a[: (shared + 1) * size]) == len(b[: (shared + 1) * size]) == (shared + 1) * size:
        if a[shared * size : (shared + 1) * size] != b[shared * size : (shared + 1) * size]:
            break
        shared += 1
    seen = PrefixIndex()
    seen.add(first)
    assert seen.matched_blocks(first) == len(first) == len(a) // size
    assert seen.matched_blocks(second) == shared


def test_only_the_beginning_of_a_long_prompt_is_hashed() -> None:
    assert len(prefix_blocks(tokens(*range(BLOCK_TOKENS * (MAX_BLOCKS + 5))))) == MAX_BLOCKS


@given(st.lists(prompts, max_size=12), st.integers(1, 8))
def test_the_ends_of_the_oldest_prompts_are_forgotten_first(all_prompts: list[bytes], room: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "REMEMBERED_BLOCKS", room)
        seen = PrefixIndex()
        for prompt in all_prompts:
            chain = prefix_blocks(prompt)
            seen.add(chain)
            assert len(seen._blocks) <= room
            # The known part of a chain is always its beginning: the binary search relies on that.
            for known in map(prefix_blocks, all_prompts):
                flags = [block in seen._blocks for block in known]
                assert flags == sorted(flags, reverse=True)
                assert seen.matched_blocks(known) == sum(flags)
            assert seen.matched_blocks(chain) == min(len(chain), room)
