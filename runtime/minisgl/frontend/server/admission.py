"""How much may wait here. One request more is told at once when to come again, instead of waiting for ever."""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from typing import Final

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError

_STARTS: Final = 64
"""First tokens that the estimate of the waiting time looks back on."""
_LONGEST_RETRY_SECONDS: Final = 60
"""openai-python does not retry at all when told to wait for more than two minutes."""


class Admission:
    """Counts requests from their admission to their first token, and those of each API key to their end."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self.waiting = 0
        """Choices without a token yet."""
        self.waiting_tokens = 0
        """Of their prompts."""
        self.rejections: Counter[str] = Counter()
        """By reason, since start."""
        self._of_key: Counter[str] = Counter()
        self._starts: deque[float] = deque(maxlen=_STARTS)

    def enter(self, key: str) -> None:
        """A request that the holder of `key` sends; before its body is read. Raises ApiError."""
        limit = self._limits.in_flight_per_key
        if limit is not None and self._of_key[key] >= limit:
            raise self._reject("key_limit", "too_many_requests", f"this key has {limit} requests under way already")
        if self._of_key.total() >= self._limits.in_flight:
            raise self._reject("in_flight", "too_many_requests", "too many requests are under way already")
        self._of_key[key] += 1

    def leave(self, key: str) -> None:
        self._of_key[key] -= 1
        if not self._of_key[key]:
            del self._of_key[key]

    def admit(self, choices: int, tokens: int) -> None:
        """Let so many choices wait, with prompts of about so many tokens together. Raises ApiError."""
        if self.waiting and self.waiting + choices > self._limits.waiting:
            raise self._reject("waiting", "queue_full", f"{self.waiting} requests are waiting already")
        if self.waiting and self.waiting_tokens + tokens > self._limits.waiting_tokens:
            raise self._reject(
                "waiting_tokens", "queue_full", f"prompts of {self.waiting_tokens} tokens are waiting already"
            )
        self.waiting += choices
        self.waiting_tokens += tokens

    def corrected(self, tokens: int) -> None:
        """The prompts that wait have so many tokens more than was thought."""
        self.waiting_tokens += tokens

    def started(self, tokens: int) -> None:
        """A choice with a prompt of so many tokens has its first token."""
        self._starts.append(time.monotonic())
        self.gone(1, tokens)

    def gone(self, choices: int, tokens: int) -> None:
        """So many choices wait no more."""
        self.waiting -= choices
        self.waiting_tokens -= tokens
        assert self.waiting >= 0 and self.waiting_tokens >= 0, "more has left the queue than was in it"

    def rejected_below(self, error: ApiError) -> None:
        """The scheduler's own limit: its answer gets our estimate."""
        self.rejections["scheduler"] += 1
        error.headers.update(self._retry_headers())

    def _reject(self, reason: str, code: str, message: str) -> ApiError:
        self.rejections[reason] += 1
        return ApiError(429, code, f"{message}: try again later", headers=self._retry_headers())

    def _retry_headers(self) -> dict[str, str]:
        seconds = self._expected_wait() * random.uniform(0.8, 1.2)
        # Without the jitter, everybody who was turned away comes back at the same time.
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}

    def _expected_wait(self) -> float:
        """Seconds until those who wait now have started, at the pace of late."""
        if len(self._starts) < 2:
            return 1.0
        pace = (len(self._starts) - 1) / max(time.monotonic() - self._starts[0], 1e-3)
        return min(max(self.waiting / pace, 0.5), _LONGEST_RETRY_SECONDS / 1.2)
