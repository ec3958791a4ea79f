"""Requests of all kinds at a fixed rate while something happens to a model, compared with undisturbed answers."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from cluster.relay_process import REFUSED

RATE: Final = 4.0
"""Requests per second."""
_WORKERS: Final = 400
"""Most requests at once: those of 100 s without an answer."""
_TIMEOUT: Final = httpx.Timeout(300, connect=10)
_TOLERANCE: Final = 1e-4
"""Largest difference of log-probabilities between runs in float32."""
_TOKENS: Final = 64
_SECONDS_AROUND: Final = 3
"""Seconds of load before and after an event."""

_SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
_TOOL: Final = {"type": "function", "function": {"name": "store", "parameters": _SCHEMA}}


def _chat(question: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": _TOKENS, "temperature": 0}
    return "/v1/chat/completions", {**body, **fields}


KINDS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "plain": _chat("What is minisgl?"),
    "long": _chat("Hello", ignore_eos=True),
    "penalties": _chat("Hello", frequency_penalty=0.5, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
    "stop": _chat("What is minisgl?", stop=["OpenAI"]),
    "logprobs": _chat("How do I run the tests?", logprobs=True, top_logprobs=2),
    "two choices": _chat("Write a poem about rain and iron.", n=2, temperature=0.8, seed=7, ignore_eos=True),
    "top-p": _chat("Write a poem about rain and iron.", temperature=0.9, top_p=0.8, seed=11, ignore_eos=True),
    "schema": _chat(
        "Count.", response_format={"type": "json_schema", "json_schema": {"name": "count", "schema": _SCHEMA}}
    ),
    "regex": _chat("Hello", structured_outputs={"regex": "[a-z]{20,60}\\.[0-9]{8}"}),
    "responses": ("/v1/responses", {"input": "What is minisgl?", "max_output_tokens": _TOKENS, "temperature": 0}),
    "tools": _chat("Store rows.", tools=[_TOOL], tool_choice="required"),
    "thinking": _chat("Hello", enable_thinking=True, thinking_token_budget=24, ignore_eos=True),
}
"""Path and body of each kind, without model and stream. Tools and thinking need `models.AGENT`."""


class Failed(Exception):
    """A request did not get a whole answer."""


@dataclass(frozen=True)
class Answer:
    """Texts and finish reasons of the choices, and log-probabilities of their tokens."""

    parts: tuple[str, ...]
    logprobs: tuple[float, ...] = ()

    def equals(self, other: Answer) -> bool:
        near = zip(self.logprobs, other.logprobs, strict=False)
        return (
            self.parts == other.parts
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(mine - theirs) <= _TOLERANCE for mine, theirs in near)
        )


@dataclass
class MixedLoad:
    """Results of requests, which are streamed in turn or not. `refusals_allowed`: requests that a model without
    replicas refuses are sent again instead of counted as failed. First it refuses them at once, with the time after
    which clients ask again; when Kubernetes has seen that no frontend is ready, the Service refuses connections."""

    url: str
    kinds: Sequence[str]
    expected: Mapping[str, Answer] = field(default_factory=dict)
    refusals_allowed: bool = False
    answered: int = 0
    refused: int = 0
    continued: int = 0
    """Answers that went on after a loss, as they say themselves."""
    failed: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    slowest: float = 0.0
    seconds: float = 0.0
    _end: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # A client that keeps connections would try one that its frontend has closed.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.Client(timeout=_TIMEOUT, limits=limits, verify=False)

    def run(self) -> None:
        """Send RATE requests per second until stopped, however long their answers take."""
        began = time.monotonic()
        with ThreadPoolExecutor(_WORKERS) as pool:
            sent: list[Future[None]] = []
            while not self._end.wait(max(0.0, began + len(sent) / RATE - time.monotonic())):
                turn, which = divmod(len(sent), len(self.kinds))
                sent.append(pool.submit(self._send, self.kinds[which], stream=turn % 2 == 0))
        for each in sent:
            each.result()
        self.seconds = time.monotonic() - began

    def stop(self) -> None:
        self._end.set()

    def _send(self, kind: str, *, stream: bool) -> None:
        began, how = time.monotonic(), f"{kind}{', streamed' if stream else ''}"
        try:
            answer = self.ask(kind, stream=stream)
            while answer is None:
                time.sleep(1)
                answer = self.ask(kind, stream=stream)
        except Failed as error:
            with self._lock:
                self.failed.append(f"{how}, after {time.monotonic() - began:.1f} s: {error}")
            return
        with self._lock:
            self.answered += 1
            self.slowest = max(self.slowest, time.monotonic() - began)
            if not answer.equals(self.expected[kind]):
                self.changed.append(f"{how}: {answer} instead of {self.expected[kind]}")

    def ask(self, kind: str, *, stream: bool) -> Answer | None:
        """The answer; None for a refusal that is allowed. Raises Failed."""
        path, fields = KINDS[kind]
        body = {"model": "demo", "stream": stream, **fields}
        try:
            with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    text = response.read().decode()
                    if response.status_code == 503 and self.refusals_allowed and "retry-after" in response.headers:
                        self._note_refusal()
                        return None
                    raise Failed(f"{response.status_code} {text}")
                if stream:
                    lines = list(response.iter_lines())
                    with self._lock:
                        self.continued += ": continued" in lines
                    return read_whole(path, lines)
                if "x-minisgl-continued" in response.headers:
                    with self._lock:
                        self.continued += 1
                return _whole(path, json.loads(response.read()))
        except httpx.HTTPError as error:
            if self.refused and REFUSED in str(error):
                self._note_refusal()
                return None
            raise Failed(f"{type(error).__name__} {error}") from error

    def _note_refusal(self) -> None:
        with self._lock:
            self.refused += 1

    def summary(self) -> str:
        kinds = Counter(each.split(":")[0] for each in self.failed)
        return (
            f"{self.answered} answered in {self.seconds:.0f} s, the slowest after {self.slowest:.1f} s; "
            f"{self.continued} continued; {self.refused} refused; {len(self.failed)} failed {dict(kinds)} "
            f"{self.failed[:3]}; {len(self.changed)} changed {self.changed[:3]}"
        )

    def result(self, seconds: float) -> dict[str, Any]:
        """Object of the scenario for the file of results; `seconds`: time of the event itself."""
        return {
            "requests": self.answered + len(self.failed),
            "failed": len(self.failed),
            "changed_tokens": len(self.changed),
            "continued": self.continued,
            "refused": self.refused,
            "slowest_s": round(self.slowest, 2),
            "seconds": round(seconds, 1),
        }


def read_whole(path: str, lines: Iterable[str]) -> Answer:
    """The answer in a stream's lines. Raises Failed for one that has no end, or ends with an error."""
    events: list[dict[str, Any]] = []
    done = False
    for line in lines:
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line.removeprefix("data: "))
            if event.get("error"):
                raise Failed(f"error event {event['error']}")
            events.append(event)
    if path == "/v1/responses":
        ends = [e["response"] for e in events if e["type"] in ("response.completed", "response.incomplete")]
        if not ends:
            raise Failed(f"no end after {len(events)} events, the last one {events[-1:]}")
        return _whole(path, ends[0])
    if not done:
        raise Failed(f"no [DONE] after {len(events)} events")
    return _joined(events)


def _whole(path: str, body: dict[str, Any]) -> Answer:
    if path == "/v1/responses":
        texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
        return Answer((*texts, body["status"]))
    events = [{"choices": [{**choice, "delta": choice["message"]} for choice in body["choices"]]}]
    return _joined(events)


def _joined(events: list[dict[str, Any]]) -> Answer:
    """The choices of a chat completion, from the deltas of its chunks."""
    texts: dict[int, dict[str, str]] = {}
    logprobs: list[float] = []
    for choice in (choice for event in events for choice in event["choices"]):
        found = texts.setdefault(choice["index"], {"reasoning": "", "content": "", "calls": "", "finish": ""})
        delta = choice["delta"]
        for call in delta.get("tool_calls") or ():
            found["calls"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
        found["content"] += delta.get("content") or ""
        found["reasoning"] += delta.get("reasoning_content") or ""
        found["finish"] = choice.get("finish_reason") or found["finish"]
        logprobs += [each["logprob"] for each in ((choice.get("logprobs") or {}).get("content") or ())]
    return Answer(tuple(json.dumps(texts[index]) for index in sorted(texts)), tuple(logprobs))


@contextmanager
def mixed_load(
    url: str, *, kinds: Sequence[str] = tuple(KINDS), refusals_allowed: bool = False
) -> Iterator[MixedLoad]:
    """Send requests of these kinds to the model "demo" while the block runs, and for some seconds before and after.
    Their answers are compared with those that an idle model gives before."""
    quiet = MixedLoad(url, kinds)
    expected = {kind: quiet.ask(kind, stream=False) for kind in kinds}
    load = MixedLoad(url, kinds, {kind: answer for kind, answer in expected.items() if answer}, refusals_allowed)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(load.run)
        try:
            time.sleep(_SECONDS_AROUND)  # the load of the calm model
            yield load
            time.sleep(_SECONDS_AROUND)
        finally:
            load.stop()
        running.result()
