"""Kill ranks of a loaded server many times, and compare each answer with that of an uninterrupted run.

Run `python -m support.launcher.continuity --kills 350 --tp 1 2`.

A round starts 8 streams and 2 requests that are not streamed, of all KINDS in turn, waits until at least 6 streams are
in the middle of their answers, and kills one rank with SIGKILL. Each client must receive its whole answer, with the
tokens of an uninterrupted run. The next kill comes when the standbys can take over. Writes its figures to
`benchmarks/results/continuity.json`; exits with 1 where an answer failed or differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from minisgl.toy.tiny import write_tiny_checkpoint
from support.agent_markers import add_markers
from support.continuity_results import check_pauses, record
from support.frontend.served import Served, eventually
from support.launcher.kill_matrix import PLAIN, STARTED, STREAMS

TOKENS: Final = 400
SEEDS: Final = 3
"""Answers of each kind."""
LOGPROB_TOLERANCE: Final = 1e-4
_CLIENT_SECONDS: Final = 300

_OBJECT: Final = {
    "type": "object",
    "properties": {"rows": {"type": "array", "items": {"type": "integer"}, "minItems": 120}},
    "required": ["rows"],
    "additionalProperties": False,
}
_TOOL: Final = {"type": "function", "function": {"name": "store", "description": "Store rows", "parameters": _OBJECT}}
_SCHEMA: Final = {"type": "json_schema", "json_schema": {"name": "rows", "schema": _OBJECT}}
_FREE: Final = {"ignore_eos": True}

KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": _FREE,
    "penalties": {
        **_FREE,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "min_tokens": TOKENS // 2,
    },
    "stop": {**_FREE, "stop": ["e", "th"], "min_tokens": TOKENS - 60},
    "logprobs": {**_FREE, "logprobs": True, "top_logprobs": 2},
    "n": {**_FREE, "n": 2},
    "top_p": {**_FREE, "top_p": 0.9, "top_k": 50},
    "schema": {"response_format": _SCHEMA},
    "tools": {"tools": [_TOOL], "tool_choice": "required"},
    "thinking": {**_FREE, "thinking_token_budget": TOKENS // 2, "enable_thinking": True},
    "responses": {"temperature": 0},
}
"""Fields of the requests of each kind, beside model, prompt, seed and number of tokens."""


class Answer(msgspec.Struct):
    """Output of one request, in a form that does not depend on how its events were cut."""

    parts: dict[int, list[tuple[str, str]]] = {}
    """Reasoning, text and calls by choice, in their order: kind and text of each."""
    finish: dict[int, str] = {}
    logprobs: list[float] = []
    usage: dict[str, int] = {}
    """Tokens of prompt and answer."""

    def add(self, index: int, part: str, piece: str | None) -> None:
        """Append a piece to a part of a choice."""
        if piece:
            parts = self.parts.setdefault(index, [])
            earlier = parts.pop()[1] if parts and parts[-1][0] == part else ""
            parts.append((part, earlier + piece))

    def differs(self, other: Answer) -> str:
        """Return how it differs from the answer of an uninterrupted run; empty: it does not."""
        if self.parts != other.parts:
            return f"{self.parts}, not {other.parts}"
        if (self.finish, self.usage) != (other.finish, other.usage):
            return f"{self.finish} {self.usage}, not {other.finish} {other.usage}"
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        worst = max((abs(mine - its) for mine, its in pairs), default=0.0)
        return f"log-probabilities differ by {worst:.1e}" if worst > LOGPROB_TOLERANCE else ""


class Request(threading.Thread):
    """One request, in a thread."""

    def __init__(self, url: str, kind: str, seed: int, *, stream: bool) -> None:
        super().__init__(daemon=True)
        self.kind, self.seed = kind, seed
        self.answer = Answer()
        self.failure = ""
        self.times: list[float] = []
        """Times of events with output."""
        self.continued = 0
        self._url = url
        self._stream = stream
        self.start()

    @property
    def is_in_the_middle(self) -> bool:
        return bool(self.times) and self.is_alive()

    def gap(self, killed_at: float) -> float | None:
        """Longest time without output that ends after the kill; None: it was not in the middle then."""
        if not self.times or not self.times[0] < killed_at < self.times[-1]:
            return None
        return max(now - before for before, now in zip(self.times, self.times[1:], strict=False) if now > killed_at)

    def run(self) -> None:
        path, body = _body(self.kind, self.seed, self._stream)
        try:
            with httpx.Client(timeout=_CLIENT_SECONDS, trust_env=False) as client:
                if self._stream:
                    self._read_stream(client, path, body)
                else:
                    self._read_whole(client, path, body)
        except httpx.TransportError as error:
            self.failure = self.failure or f"connection broken: {error!r}"

    def _read_whole(self, client: httpx.Client, path: str, body: Mapping[str, Any]) -> None:
        response = client.post(self._url + path, json=body)
        if response.status_code != 200:
            self.failure = f"{response.status_code} {response.text}"
            return
        self.continued = int(response.headers.get("x-minisgl-continued", 0))
        answer = response.json()
        if path.endswith("responses"):
            self._take_response(answer)
            return
        for choice in answer["choices"]:
            self._take(choice["index"], choice["message"], choice)
        self._take_usage(answer["usage"])

    def _read_stream(self, client: httpx.Client, path: str, body: Mapping[str, Any]) -> None:
        done = False
        with client.stream("POST", self._url + path, json=body) as response:
            if response.status_code != 200:
                self.failure = f"{response.status_code} {response.read().decode()}"
                return
            for line in response.iter_lines():
                self.continued += line == ": continued"
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    done |= self._on_event(json.loads(line.removeprefix("data: ")))
        if not done:
            self.failure = self.failure or "no end"

    def _on_event(self, event: Mapping[str, Any]) -> bool:
        """Handle an event; returns whether it ends a stream of /v1/responses."""
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            self.failure = json.dumps(event)
        elif event.get("type") == "response.output_text.delta":
            self.times.append(time.monotonic())
        elif event.get("type") in ("response.completed", "response.incomplete"):
            self._take_response(event["response"])
            return True
        for choice in event.get("choices", ()):
            if any(choice["delta"].get(part) for part in ("content", "reasoning_content", "tool_calls")):
                self.times.append(time.monotonic())
            self._take(choice["index"], choice["delta"], choice)
        if event.get("usage"):
            self._take_usage(event["usage"])
        return False

    def _take(self, index: int, message: Mapping[str, Any], choice: Mapping[str, Any]) -> None:
        self.answer.add(index, "reasoning", message.get("reasoning_content"))
        self.answer.add(index, "text", message.get("content"))
        for call in message.get("tool_calls") or ():
            self.answer.add(index, "call", call["function"].get("name"))
            self.answer.add(index, "call", call["function"].get("arguments"))
        for scored in (choice.get("logprobs") or {}).get("content") or ():
            self.answer.logprobs += [scored["logprob"], *(top["logprob"] for top in scored["top_logprobs"])]
        if choice.get("finish_reason"):
            self.answer.finish[index] = choice["finish_reason"]

    def _take_response(self, response: Mapping[str, Any]) -> None:
        for item in response["output"]:
            for part in item.get("content") or ():
                self.answer.add(0, item["type"], part.get("text"))
        self.answer.finish[0] = response["status"]
        usage = response["usage"]
        self.answer.usage = {"prompt": usage["input_tokens"], "completion": usage["output_tokens"]}

    def _take_usage(self, usage: Mapping[str, Any]) -> None:
        self.answer.usage = {"prompt": usage["prompt_tokens"], "completion": usage["completion_tokens"]}


class Figures(msgspec.Struct):
    """Figures of one test."""

    kills: int = 0
    requests: int = 0
    in_the_middle: int = 0
    """Streams with tokens, and more to come, at the kills."""
    continued: int = 0
    failed: int = 0
    changed_tokens: int = 0
    """Answers whose tokens differ from those of the uninterrupted run."""
    gap_p50_s: float = 0.0
    gap_p99_s: float = 0.0
    gap_most_s: float = 0.0
    seconds: float = 0.0


def _body(kind: str, seed: int, stream: bool) -> tuple[str, dict[str, Any]]:
    prompt = f"Count {kind} {seed}"
    if kind == "responses":
        return "/v1/responses", {
            "model": "tiny",
            "input": prompt,
            "max_output_tokens": TOKENS,
            "stream": stream,
            **KINDS[kind],
        }
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "seed": seed,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
        **KINDS[kind],
    }
    return "/v1/chat/completions", body


def checkpoint(folder: Path) -> Path:
    """Write a tiny model in float32 whose vocabulary has markers of reasoning and calls, and whose template opens the
    reasoning of requests that enable it."""
    write_tiny_checkpoint(folder, "qwen3", vocab=584, dtype="float32", max_position=4096)
    assert add_markers(folder) <= 584
    return folder


def uninterrupted(url: str, seeds: int) -> dict[tuple[str, int], Answer]:
    """Answers of all requests of an undisturbed server."""
    answers = {}
    for seed in range(seeds):
        requests = [Request(url, kind, seed, stream=False) for kind in KINDS]
        for request in requests:
            request.join(_CLIENT_SECONDS)
            assert not request.failure, f"{request.kind}: {request.failure}"
            answers[request.kind, seed] = request.answer
    return answers


def _are_in_the_middle(streams: Sequence[Request]) -> bool:
    return sum(stream.is_in_the_middle for stream in streams) >= STARTED


def kill_ranks(
    served: Served, kills: int, ranks: int, figures: Figures, choose: random.Random, seeds: int
) -> list[str]:
    """Run `kills` rounds on a ready server. Returns what was wrong."""
    expected = uninterrupted(served.url, seeds)
    faults: list[str] = []
    gaps: list[float] = []
    kinds = list(KINDS)
    began = time.monotonic()
    victims = [f"rank{rank}" for rank in range(ranks)]
    for number in range(kills):
        eventually(lambda: "standby-engine" in served.standing_by(), _CLIENT_SECONDS)
        eventually(lambda: set(victims) <= served.children().keys(), _CLIENT_SECONDS)
        pid = served.children()[choose.choice(victims)]
        picked = [kinds[(number + at) % len(kinds)] for at in range(STREAMS + PLAIN)]
        requests = [
            Request(served.url, kind, choose.randrange(seeds), stream=at < STREAMS) for at, kind in enumerate(picked)
        ]
        eventually(partial(_are_in_the_middle, requests[:STREAMS]), _CLIENT_SECONDS)
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for request in requests:
            request.join(_CLIENT_SECONDS)
        figures.kills += 1
        for request in requests:
            figures.requests += 1
            figures.continued += request.continued
            if (gap := request.gap(killed_at)) is not None:
                figures.in_the_middle += 1
                gaps.append(gap)
            if request.failure or request.is_alive():
                figures.failed += 1
                faults.append(f"kill {number}, {request.kind} {request.seed}: {request.failure or 'no end'}")
            elif problem := request.answer.differs(expected[request.kind, request.seed]):
                figures.changed_tokens += 1
                faults.append(f"kill {number}, {request.kind} {request.seed}: {problem}")
        print(f"kill {number}: {figures.failed} failed, {figures.changed_tokens} changed", flush=True)
    figures.seconds = round(time.monotonic() - began, 1)
    if len(gaps) > 1:
        hundredths = statistics.quantiles(gaps, n=100, method="inclusive")
        figures.gap_p50_s, figures.gap_p99_s = round(hundredths[49], 3), round(hundredths[98], 3)
        figures.gap_most_s = round(max(gaps), 3)
    return faults


def run(kills: int, ranks: int, folder: Path, seed: int = 0, *, seeds: int = SEEDS) -> tuple[Figures, list[str]]:
    """Kill ranks of a server with `ranks` ranks; `seeds`: different answers of each kind."""
    figures = Figures()
    flags = ("--tp", str(ranks)) if ranks > 1 else ()
    served = Served(
        checkpoint(folder / "model"),
        folder,
        *("--served-model-name", "tiny", "--max-restarts", "1000", "--num-pages", "1024"),
        *flags,
    )
    try:
        served.wait_until_ready()
        faults = kill_ranks(served, kills, ranks, figures, random.Random(seed), seeds)
        served.popen.send_signal(signal.SIGTERM)
        assert served.popen.wait(60) == 0, served.log.read_text()
    finally:
        served.kill()
    return figures, faults


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="continuity")
    parser.add_argument("--kills", type=int, default=350, help="for each number of ranks")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    faults: list[str] = []
    measured: list[dict[str, Any]] = []
    for ranks in args.tp:
        with tempfile.TemporaryDirectory(prefix="killed-") as folder:
            figures, found = run(args.kills, ranks, Path(folder), args.seed)
        measured.append({"killed": "ranks", "replicas": 1, **msgspec.to_builtins(figures)})
        record(f"serve --tp {ranks}, seed {args.seed}", measured[-1])
        print(f"serve --tp {ranks}: {msgspec.json.encode(figures).decode()}", flush=True)
        faults += [f"tp {ranks}: {fault}" for fault in found]
    print("\n".join(faults) if faults else "no faults")
    for each in measured:
        check_pauses(each)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
