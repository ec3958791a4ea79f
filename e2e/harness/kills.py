"""Kills of ranks, pods and replicas while eight answers are in the middle, and the pauses that their clients see."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import httpx

from harness.mixed_load import KINDS, Answer, Failed, read_whole

STREAMS: Final = 8
STARTED: Final = 6
"""Answers that must be in the middle at a kill."""
_BETWEEN: Final = 16
"""Tokens that an answer must get between two losses, or the second one ends it."""
_EDGE: Final = 0.2
"""Part at the beginning and at the end of an answer in which it does not count as in the middle."""
_PATIENCE: Final = 300.0
_LONGEST: Final = 8
"""Pauses that a summary tells."""
_BACK_SECONDS: Final = 0.5
"""Between two looks whether the killed one is back, which take CPU time from the pods whose pauses are measured."""
_KINDS: Final = ("long", "penalties", "top-p", "two choices")
"""Kinds whose answers can be that long; the others follow in turn, as short as they are."""


@dataclass(frozen=True)
class Undisturbed:
    """Answers without a kill. `tokens`: length of the long ones."""

    tokens: int
    answers: dict[str, tuple[Answer, int]]
    """Answer of each kind, and the number of its chunks."""


@dataclass(frozen=True, order=True)
class Pause:
    """The longest pause of an answer around a kill. `begin`: seconds from the kill to the last chunk before it.
    `waits`: seconds in which tasks of this machine waited, from the kill until the killed one was back."""

    seconds: float
    begin: float
    kill: int
    kind: str
    waits: dict[str, float] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.seconds:.2f} s of {self.kind}, {self.begin:+.2f} s from kill {self.kill} (waits {self.waits})"


@dataclass
class _Stream:
    """One answer that a client is reading. `times`: arrival of each chunk."""

    kind: str
    length: int
    times: list[float] = field(default_factory=list)
    at_last_kill: int = 0
    """Number of chunks at the last kill, or at the begin."""

    @property
    def in_the_middle(self) -> bool:
        return self.length * _EDGE < len(self.times) < self.length * (1 - _EDGE)


@dataclass
class Kills:
    """Results. `pauses`: for each kill and each answer in its middle, the longest pause between two chunks, from the
    last chunk before the kill until the killed one is back and all these answers have gone on."""

    url: str
    undisturbed: Undisturbed
    began: float = field(default_factory=time.monotonic)
    kills: int = 0
    requests: int = 0
    pauses: list[Pause] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _end: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Read one answer after the other, until stopped."""
        kinds = (*_KINDS, *(kind for kind in KINDS if kind not in _KINDS))
        turn = number
        while not self._end.is_set():
            # Three of four answers are long.
            kind = _KINDS[turn % len(_KINDS)] if turn % 4 else kinds[turn // 4 % len(kinds)]
            turn += 1
            self.requests += 1
            expected, length = self.undisturbed.answers[kind]
            stream = self._streams[number] = _Stream(kind, length)
            try:
                found = stream_answer(self.url, kind, self.undisturbed.tokens, stream.times)
            except Failed as error:
                self.failed.append(f"{kind}: {error}")
                continue
            if not found.equals(expected):
                self.changed.append(f"{kind}: {found} instead of {expected}")

    def kill(self, victim: Callable[[], object], back: Callable[[], Any]) -> None:
        """Kill while most answers are in the middle; wait until `back` is true and those answers go on."""
        _wait("answers in the middle", lambda: len(self._in_the_middle()) >= STARTED and self._have_gone_on())
        before = self._in_the_middle()
        counts = {id(stream): len(stream.times) for stream in before}
        for stream in self._reading():
            stream.at_last_kill = len(stream.times)
        began, waited = time.monotonic(), _waited()
        victim()
        self.kills += 1
        _wait("the killed one", back, _BACK_SECONDS)
        # An answer may have ended in time, or failed.
        _wait("the next chunks", lambda: all(len(s.times) > counts[id(s)] for s in before if s in self._reading()))
        waits = {what: round(seconds - waited[what], 2) for what, seconds in _waited().items()}
        for stream in before:
            times = stream.times[counts[id(stream)] - 1 :]
            pauses = [Pause(b - a, a - began, self.kills, stream.kind, waits) for a, b in pairwise(times)]
            if pauses:
                self.pauses.append(max(pauses))

    def stop(self) -> None:
        self._end.set()

    def result(self) -> dict[str, Any]:
        gaps = sorted(pause.seconds for pause in self.pauses)
        return {
            "kills": self.kills,
            "requests": self.requests,
            "failed": len(self.failed),
            "changed_tokens": len(self.changed),
            "gap_p50_s": round(gaps[len(gaps) // 2], 3),
            "gap_p99_s": round(gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)], 3),
            "seconds": round(time.monotonic() - self.began, 1),
        }

    def summary(self) -> str:
        longest = [str(pause) for pause in sorted(self.pauses, reverse=True)[:_LONGEST]]
        return f"{self.result()}; failed {self.failed[:3]}; changed {self.changed[:3]}; longest pauses {longest}"

    def _reading(self) -> list[_Stream]:
        return list(self._streams.values())

    def _have_gone_on(self) -> bool:
        """True if each answer that is being read has got enough since the last kill. A short one soon ends."""
        return all(len(stream.times) >= stream.at_last_kill + _BETWEEN for stream in self._reading())

    def _in_the_middle(self) -> list[_Stream]:
        return [stream for stream in self._reading() if stream.in_the_middle]


def stream_answer(url: str, kind: str, tokens: int, times: list[float]) -> Answer:
    """A streamed answer, of so many tokens if its kind can be that long; the time of each chunk is added to `times`.
    Raises Failed."""
    path, fields = KINDS[kind]
    body = {"model": "demo", "stream": True, **fields}
    if kind in _KINDS:
        # Each token gives text: these answers go on behind tokens that end them, often dozens of them in a row, and a
        # client that does not see those would take them for a pause.
        body |= {"max_tokens": tokens, "skip_special_tokens": False}
    lines: list[str] = []
    try:
        with httpx.stream("POST", url + path, json=body, timeout=_PATIENCE) as response:
            if response.status_code != 200:
                raise Failed(f"{response.status_code} {response.read().decode()}")
            for line in response.iter_lines():
                lines.append(line)
                if line.startswith("data: {"):
                    times.append(time.monotonic())
    except httpx.HTTPError as error:
        raise Failed(f"{type(error).__name__} {error} after {len(times)} chunks") from error
    return read_whole(path, lines)


def undisturbed(url: str, tokens: int) -> Undisturbed:
    """Read an answer of each kind, all at the same time: a step of the model takes hardly longer for all than for
    one."""

    def read(kind: str) -> tuple[Answer, int]:
        times: list[float] = []
        return stream_answer(url, kind, tokens, times), len(times)

    with ThreadPoolExecutor(len(KINDS)) as pool:
        return Undisturbed(tokens, dict(zip(KINDS, pool.map(read, KINDS), strict=True)))


@contextmanager
def kills(url: str, expected: Undisturbed) -> Iterator[Kills]:
    """Read eight answers at any time while the block kills."""
    found = Kills(url, expected)
    with ThreadPoolExecutor(STREAMS) as pool:
        reading = [pool.submit(found.run, number) for number in range(STREAMS)]
        try:
            yield found
        finally:
            found.stop()
        for each in reading:
            each.result()


def _waited() -> dict[str, float]:
    """Return the seconds since the boot in which some task waited for a CPU and for I/O (pressure stall information);
    empty where the kernel counts none."""
    try:
        files = {what: Path("/proc/pressure", what).read_text(encoding="utf-8") for what in ("cpu", "io")}
    except OSError:
        return {}
    return {what: int(text.splitlines()[0].rpartition("total=")[2]) / 1e6 for what, text in files.items()}


def _wait(what: str, probe: Callable[[], Any], between: float = 0.02) -> None:
    end = time.monotonic() + _PATIENCE
    while not probe():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {_PATIENCE:.0f} s for {what}")
        time.sleep(between)
