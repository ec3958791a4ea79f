"""Requests that are sent to a model without a pause while something happens to its nodes, pods or versions."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx

from harness.asking import ANSWER, QUESTION

_PAUSE: Final = 0.5
"""Seconds between requests of one thread: they share two cores with everything else."""
_GIVE_UP: Final = 240.0
"""Seconds after which a request that is retried counts as not answered."""
_TIMEOUT: Final = httpx.Timeout(60, connect=10)
_TOKENS: Final = 800
_LONG: Final = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": _TOKENS, "ignore_eos": True}
_SHORT: Final = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}


class _Broken(Exception):
    """A frontend ended a stream after its first token with an error, or before the answer was whole."""


class _Cut(Exception):
    """The connection of a stream broke after its first token."""


class _Unanswered(Exception):
    """A request ended with an error before its first token."""


@dataclass
class Traffic:
    """Results of requests. All of them are streamed, so that a first token is seen when it is there.

    `broken` are errors after a first token that a frontend reported, `cut` connections that broke after one, and
    `unanswered` errors before it, by the body's kind ("short" or "long").
    """

    url: str
    threads: int
    """Most requests at a time."""
    retry: bool
    """Retry requests without a token, as clients do, which a frontend on a lost node cannot answer."""
    answered: list[float] = field(default_factory=list)
    """Seconds that each answered request took."""
    retried: int = 0
    broken: list[tuple[str, str]] = field(default_factory=list)
    cut: list[tuple[str, str]] = field(default_factory=list)
    unanswered: list[tuple[str, str]] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self, kind: str) -> None:
        while not self._end.is_set():
            self._send(kind)
            self._end.wait(_PAUSE)

    def stop(self) -> None:
        self._end.set()

    def _send(self, kind: str) -> None:
        began = time.monotonic()
        while True:
            try:
                text = self._answer(_LONG if kind == "long" else _SHORT)
                break
            except _Broken as error:
                self.broken.append((kind, str(error)))
                return
            except _Cut as error:
                self.cut.append((kind, str(error)))
                return
            except _Unanswered as error:
                if not self.retry or time.monotonic() - began > _GIVE_UP:
                    self.unanswered.append((kind, f"after {time.monotonic() - began:.1f} s: {error}"))
                    return
                self.retried += 1
                self._end.wait(_PAUSE)
        assert kind == "long" or text == ANSWER, text
        self.answered.append(time.monotonic() - began)

    def _answer(self, body: dict[str, object]) -> str:
        """Text of a streamed answer; at the end, a long one is not read to its end.

        Raises _Broken, _Cut, _Unanswered.
        """
        found: list[str] = []
        tokens, finished = 0, False
        try:
            request = {"model": "demo", "stream": True, "temperature": 0, **body}
            request["stream_options"] = {"include_usage": True}
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=request, timeout=_TIMEOUT) as response:
                if response.status_code != 200:
                    raise _Unanswered(f"{response.status_code} {response.read().decode()}")
                for line in response.iter_lines():
                    if found and body is _LONG and self._end.is_set():
                        return ""
                    if not line.startswith("data: {"):
                        finished = finished or line == "data: [DONE]"
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise (_Broken if found else _Unanswered)(json.dumps(event["error"]))
                    found += [c["delta"]["content"] for c in event["choices"] if c["delta"].get("content")]
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except httpx.HTTPError as error:
            raise (_Cut if found else _Unanswered)(f"{type(error).__name__} {error}") from error
        if not finished:
            raise (_Broken if found else _Unanswered)("the stream ended without [DONE]")
        if body is _LONG and tokens != _TOKENS:
            raise _Broken(f"the answer ended after {tokens} of {_TOKENS} tokens")
        return "".join(found)

    def wait_for_answers(self, count: int = 3) -> None:
        """Wait until this many more requests were answered. Raises TimeoutError."""
        goal, end = len(self.answered) + count, time.monotonic() + 2 * _GIVE_UP
        while len(self.answered) < goal:
            if time.monotonic() > end:
                raise TimeoutError(f"requests are not answered: {self.summary()}")
            self._end.wait(_PAUSE)

    def check(self, *, frontend_lost: bool = False) -> None:
        """Every answer was whole. With `frontend_lost`, a frontend died once, with its node: its connections broke, at
        most one of each thread. What the other frontends answered was whole all the same."""
        assert not self.unanswered, self.summary()
        assert not self.broken, self.summary()
        assert len(self.cut) <= (self.threads if frontend_lost else 0), self.summary()

    def summary(self) -> str:
        slowest = max(self.answered, default=0.0)
        words = f"{len(self.answered)} requests answered, the slowest after {slowest:.1f} s; {self.retried} retries"
        broken = [*self.broken, *self.cut]
        return f"{words}; {len(broken)} broken streams {broken}; unanswered {self.unanswered}"


@contextmanager
def traffic(url: str, *, short: int = 2, long: int = 1, retry: bool = False) -> Iterator[Traffic]:
    """Send requests to the model "demo" from this many threads while the block runs. The first requests are answered
    before the block begins, and others after it has ended."""
    sent = Traffic(url, short + long, retry)
    with ThreadPoolExecutor(short + long) as pool:
        running = [pool.submit(sent.run, kind) for kind in ["short"] * short + ["long"] * long]
        try:
            sent.wait_for_answers()
            yield sent
            sent.wait_for_answers()
        finally:
            sent.stop()
        for each in running:
            each.result()
