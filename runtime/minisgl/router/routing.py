"""Picks the replica for a prompt. Pure.

The least loaded replica, but among those whose load is near the least the one that has seen most of the prompt: its
prefix cache saves that much of the work. A replica has seen the prompts that were sent to it from here. They are kept
as chains of hashes of whole blocks: two prompts have as many hashes in common as they have leading blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 64
"""Tokens of a block: as many as a page holds on a GPU, because nothing shorter can be shared."""
MAX_BLOCKS: Final = 512
"""Blocks of one prompt that are compared; prompts share their beginning."""
REMEMBERED_BLOCKS: Final = 1 << 14
"""Blocks that are remembered of one replica: a million tokens, more than most KV pools hold."""

LOAD_MARGIN_REQUESTS: Final = 8
LOAD_MARGIN_FRACTION: Final = 0.25
"""Replicas may have this many requests, and this share of the least load, more than the least loaded one."""


class Candidate(NamedTuple):
    """A replica that can take the prompt."""

    name: str
    load: int
    """Requests that run or wait there."""
    matched_blocks: int
    """Leading blocks of the prompt that it has seen."""


def prefix_blocks(prompt: bytes, salt: bytes = b"") -> tuple[int, ...]:
    """Return the hash of every prefix of whole blocks of a prompt of int32 token ids. Requests with different salts
    share nothing."""
    size = BLOCK_TOKENS * array("i").itemsize
    chain: list[int] = []
    last = hash(salt)
    for start in range(0, min(len(prompt) // size, MAX_BLOCKS) * size, size):
        last = hash((last, prompt[start : start + size]))
        chain.append(last)
    return tuple(chain)


class PrefixIndex:
    """The latest blocks that were sent to one replica, at most REMEMBERED_BLOCKS."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def matched_blocks(self, chain: Sequence[int]) -> int:
        """Number of leading hashes of the chain that are known."""
        # Binary search: blocks behind an unknown one are unknown too, because `add` renews a chain from its end to its
        # beginning, so that no block is forgotten before those behind it.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in self._blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def add(self, chain: Sequence[int]) -> None:
        for block in reversed(chain):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > REMEMBERED_BLOCKS:
            self._blocks.popitem(last=False)


def pick_replica(candidates: Sequence[Candidate], prompt: bytes) -> str:
    """Return the name of the replica that gets the prompt; there is at least one. Frontends that know the same
    candidates, and have sent no prompt with this beginning, pick the same one."""
    assert candidates, "there must be a candidate"
    least = min(candidate.load for candidate in candidates)
    near = [one for one in candidates if within_load_margin(one.load, least)]
    best = min((-one.matched_blocks, one.load) for one in near)
    tied = [one for one in near if (-one.matched_blocks, one.load) == best]
    # Highest random weight (Thaler and Ravishankar, 1998): a replica that comes or goes moves only its own prompts.
    beginning = prompt[: BLOCK_TOKENS * array("i").itemsize]
    return max(tied, key=lambda one: (blake2b(beginning, key=_weight_key(one.name), digest_size=8).digest(), one)).name


def within_load_margin(load: int, least: int) -> bool:
    return load <= least + LOAD_MARGIN_REQUESTS + least * LOAD_MARGIN_FRACTION


def _weight_key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()
