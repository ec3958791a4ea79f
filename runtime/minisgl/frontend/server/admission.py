"""Limits on requests that wait here. A request above a limit is rejected immediately, with the time to retry after.

A tenant, which is an API key or an address without one, that has less than its share of a full limit is not rejected:
others cannot keep it out.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from minisgl.frontend.config import RequestLimits
from minisgl.frontend.errors import ApiError
from minisgl.scheduler.shares import has_share

_STARTS: Final = 64
"""First tokens from which the waiting time is estimated."""
_MAX_RETRY_SECONDS: Final = 60
"""openai-python does not retry at all if it has to wait for more than two minutes."""


class Admission:
    """Counts choices from their admission to their first token, and those of each API key to the end of their
    request."""

    def __init__(self, limits: RequestLimits, rejections: Counter[str]) -> None:
        """`rejections`: counts rejected requests by reason."""
        self._limits = limits
        self._rejections = rejections
        self.waiting = 0
        """Choices without a token yet."""
        self.waiting_tokens = 0
        """Tokens of their prompts."""
        self._checking = 0
        """Requests whose constraints are checked, or wait for that."""
        self._reading_of: Counter[str] = Counter()
        """Bytes of bodies that have arrived in part, by tenant."""
        self._asked_of: Counter[str] = Counter()
        """Bytes of questions to tokenizer workers by tenant."""
        self._waiting_of: Counter[str] = Counter()
        """Choices by tenant, as `waiting`."""
        self._tokens_of: Counter[str] = Counter()
        """Tokens by tenant, as `waiting_tokens`."""
        self._in_flight = 0
        """HTTP requests."""
        self._in_flight_of: Counter[str] = Counter()
        """HTTP requests by tenant."""
        self._in_flight_by_key: Counter[str] = Counter()
        """Their choices."""
        self._starts: deque[float] = deque(maxlen=_STARTS)

    def begin_request(self, key_name: str, tenant: str) -> None:
        """Count a tenant's request with this API key, before its body is read. Raises ApiError."""
        limit = self._limits.in_flight_per_key
        if limit is not None and self._in_flight_by_key[key_name] >= limit:
            raise self._reject("key_limit", "too_many_requests", f"this key has {limit} choices in progress")
        most, own = self._limits.in_flight, self._in_flight_of.get(tenant, 0)
        if self._in_flight >= most and not has_share(own, 1, self._in_flight, most, self._in_flight_of):
            raise self._reject("in_flight", "too_many_requests", "too many concurrent requests")
        self._in_flight += 1
        self._in_flight_of[tenant] += 1
        self._in_flight_by_key[key_name] += 1

    def recount(self, key_name: str, counted: int, choices: int) -> None:
        """Count a request with this API key as `choices` instead of `counted`. A request alone is not rejected. Raises
        ApiError."""
        limit, others = self._limits.in_flight_per_key, self._in_flight_by_key[key_name] - counted
        if limit is not None and others > 0 and others + choices > limit:
            message = f"this key has {others} of {limit} choices in progress, and the request has {choices}"
            raise self._reject("key_limit", "too_many_requests", message)
        self._in_flight_by_key[key_name] = others + choices

    def end_request(self, key_name: str, tenant: str, choices: int = 1) -> None:
        self._in_flight -= 1
        self._in_flight_of[tenant] -= 1
        if not self._in_flight_of[tenant]:
            del self._in_flight_of[tenant]
        self._in_flight_by_key[key_name] -= choices
        if not self._in_flight_by_key[key_name]:
            del self._in_flight_by_key[key_name]

    @contextmanager
    def checking(self, *, was_held: bool = False) -> Iterator[None]:
        """Count a request while its constraints are checked. One that was held is not rejected. Raises ApiError."""
        if self._checking >= self._limits.checking and not was_held:
            raise self._reject("constraints", "queue_full", f"{self._checking} constraints wait for a check")
        self._checking += 1
        try:
            yield
        finally:
            self._checking -= 1

    def read(self, size: int, tenant: str) -> None:
        """Count `size` bytes of a tenant's body in part. The caller must `forget` them. Raises ApiError."""
        most, own, reading = self._limits.reading_bytes, self._reading_of[tenant], self._reading_of.total()
        if reading + size > most and not has_share(own, size, reading, most, +self._reading_of):
            error = self._reject("reading_bytes", "queue_full", f"{reading} bytes of incomplete bodies have arrived")
            # The rest of the body is not read, so the connection cannot be used again.
            error.headers["connection"] = "close"
            raise error
        self._reading_of[tenant] += size

    def forget(self, size: int, tenant: str) -> None:
        """The body has arrived as a whole, or is not read any more."""
        self._reading_of[tenant] -= size
        if not self._reading_of[tenant]:
            del self._reading_of[tenant]

    @contextmanager
    def asking(self, size: int, tenant: str) -> Iterator[None]:
        """Count a tenant's question of `size` bytes to a tokenizer worker until it is answered: workers keep questions,
        and clients may leave before. One alone is not rejected. Raises ApiError."""
        most, own, asked = self._limits.asked_bytes, self._asked_of[tenant], self._asked_of.total()
        if asked and asked + size > most and not has_share(own, size, asked, most, +self._asked_of):
            raise self._reject("asked_bytes", "queue_full", f"texts of {asked} bytes wait for their tokens")
        self._asked_of[tenant] += size
        try:
            yield
        finally:
            self._asked_of[tenant] -= size
            if not self._asked_of[tenant]:
                del self._asked_of[tenant]

    def hold(self, has_room: bool, tenant: str) -> None:
        """Let a tenant's request wait for an engine. `has_room`: there is room for its body. Raises ApiError."""
        if not has_room:
            raise self._reject("held_bytes", "queue_full", "no engine is connected, and many requests wait for one")
        self.check_waiting(1, tenant)
        self.waiting += 1
        self._waiting_of[tenant] += 1

    def check_waiting(self, choices: int, tenant: str) -> None:
        """Raises ApiError when a tenant's choices have no place among those that wait."""
        most, own = self._limits.waiting, self._waiting_of[tenant]
        if self.waiting + choices > most and not has_share(own, choices, self.waiting, most, +self._waiting_of):
            raise self._reject("waiting", "queue_full", f"{self.waiting} requests are waiting")

    def has_room(self, tokens: int) -> bool:
        """Return whether a prompt of about `tokens` tokens may wait besides those that do."""
        return not self.waiting_tokens or self.waiting_tokens + tokens <= self._limits.waiting_tokens

    def admit(
        self, choices: int, tokens: int, tenant: str = "", *, was_held: bool = False, by_tokens: bool = False
    ) -> None:
        """Let `choices` choices of a tenant wait, with prompts of about `tokens` tokens together. A request that was
        held had its place before, and is not rejected. `by_tokens`: only the tokens count, since they are all the work
        there is, and a program that fills an index sends thousands of short texts at once. Raises ApiError."""
        if self.waiting and not was_held:
            if not by_tokens:
                self.check_waiting(choices, tenant)
            most, own, waiting = self._limits.waiting_tokens, self._tokens_of[tenant], self.waiting_tokens
            if waiting + tokens > most and not has_share(own, tokens, waiting, most, +self._waiting_of):
                raise self._reject("waiting_tokens", "queue_full", f"prompts of {waiting} tokens are waiting")
        self.waiting += choices
        self.waiting_tokens += tokens
        self._waiting_of[tenant] += choices
        self._tokens_of[tenant] += tokens

    def correct_tokens(self, difference: int, tenant: str = "") -> None:
        """Add the difference between the real and the estimated tokens of a waiting prompt."""
        self.waiting_tokens += difference
        self._tokens_of[tenant] += difference

    def start(self, prompt_tokens: int, tenant: str = "") -> None:
        """Count a choice as started: it has its first token."""
        self._starts.append(time.monotonic())
        self.leave_queue(prompt_tokens, tenant)

    def leave_queue(self, prompt_tokens: int, tenant: str = "") -> None:
        """Count a choice as waiting no longer."""
        self.waiting -= 1
        self.waiting_tokens -= prompt_tokens
        self._waiting_of[tenant] -= 1
        self._tokens_of[tenant] -= prompt_tokens
        if not self._waiting_of[tenant]:
            del self._waiting_of[tenant], self._tokens_of[tenant]
        assert self.waiting >= 0 and self.waiting_tokens >= 0, "more has left the queue than was in it"

    def add_retry_after(self, error: ApiError) -> None:
        """Add our estimate to a rejection by the scheduler, which has a limit of its own."""
        self._rejections["scheduler"] += 1
        error.headers.update(self._retry_headers())

    def _reject(self, reason: str, code: str, message: str) -> ApiError:
        self._rejections[reason] += 1
        return ApiError(429, code, f"{message}; retry later", headers=self._retry_headers())

    def _retry_headers(self) -> dict[str, str]:
        # Without the jitter, all rejected clients would return at the same time.
        seconds = self._expected_wait() * random.uniform(0.8, 1.2)
        return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}

    def _expected_wait(self) -> float:
        """Estimate the seconds until all waiting choices have started, from the recent rate of starts."""
        if len(self._starts) < 2:
            return 1.0
        rate = (len(self._starts) - 1) / max(time.monotonic() - self._starts[0], 1e-3)
        return min(max(self.waiting / rate, 0.5), _MAX_RETRY_SECONDS / 1.2)
