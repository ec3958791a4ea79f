"""Which replica a prompt goes to. Pure.

The least loaded one, but among those whose load is near the least the one that has seen most of the prompt: its
prefix cache saves it that much of the work. What a replica has seen is what was sent to it from here, as a chain of
hashes of whole blocks, so that two prompts have as many hashes in common as they have blocks.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

BLOCK_TOKENS: Final = 64
"""As many as a page holds on a GPU: less can never be shared."""
MAX_BLOCKS: Final = 512
"""Of one prompt that are looked at; what is shared by many is at the beginning."""
REMEMBERED_BLOCKS: Final = 1 << 14
"""Of one replica: a million tokens, more than most KV pools hold."""

NEAR_REQUESTS: Final = 8
NEAR_SHARE: Final = 0.25
"""A load is near the least up to so many requests more, and so much of it."""


class Candidate(NamedTuple):
    """A replica that could take the prompt."""

    name: str
    load: int
    """Requests that it runs or that wait there."""
    matched: int
    """Blocks of the prompt, from its beginning, that it has seen."""


def prefix_blocks(prompt: bytes, salt: bytes = b"") -> tuple[int, ...]:
    """The hash of every prefix of whole blocks of a prompt, given as int32 token ids. Requests of different salts
    share nothing."""
    size = BLOCK_TOKENS * array("i").itemsize
    chain: list[int] = []
    last = hash(salt)
    for start in range(0, min(len(prompt) // size, MAX_BLOCKS) * size, size):
        last = hash((last, prompt[start : start + size]))
        chain.append(last)
    return tuple(chain)


class PrefixIndex:
    """The blocks that were sent to one replica, the latest so many of them."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def matched_blocks(self, chain: Sequence[int]) -> int:
        """How many hashes from the beginning of the chain are known."""
        # What follows an unknown block is unknown as well, but for blocks that were forgotten before those behind
        # them: `add` renews a chain from its end to its beginning, so that does not happen.
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
    """The name of the one that gets it; there is at least one. Frontends that know of the same candidates and have
    seen nothing like this prompt choose the same one."""
    assert candidates, "nobody to choose from"
    if len(candidates) == 1:
        return candidates[0].name
    least = min(candidate.load for candidate in candidates)
    near = [one for one in candidates if is_near(one.load, least)]
    best = min((-one.matched, one.load) for one in near)
    tied = [one for one in near if (-one.matched, one.load) == best]
    if len(tied) == 1:
        return tied[0].name
    # Highest random weight (Thaler and Ravishankar, 1998): a replica that comes or goes moves only its own prompts.
    beginning = prompt[: BLOCK_TOKENS * array("i").itemsize]
    return max(tied, key=lambda one: (blake2b(beginning, key=_weight_key(one.name), digest_size=8).digest(), one)).name


def is_near(load: int, least: int) -> bool:
    return load <= least + NEAR_REQUESTS + least * NEAR_SHARE


def _weight_key(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=32).digest()
