"""Kill each process of a loaded server in turn, and check the answers of its clients.

Run `python -m support.launcher.kill_matrix --rounds 20`.

A round starts 8 streams and 2 plain requests, waits until at least 6 streams have tokens with most of the answer to
come, and kills one process with SIGKILL. After the death of a rank each client must receive its whole answer, after
that of another process that or an error; the server must become ready again without help; after the death of the
launcher nothing may be left. Exits with 1 where that does not hold.

With `--queued`, a round kills a rank of `--tp 2 --max-running 4` while 16 requests are queued, in turn when the first
and when all running ones have tokens: each request must be answered whole by the next epoch.

On GPUs with a model of real size: `minisgl models dummy qwen3-14b DIR`, and
`python -m support.launcher.kill_matrix --rounds 3 --victims rank0 rank1 --model DIR -- --dummy-weights`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import httpx
import msgspec

from minisgl.toy.tiny import write_tiny_checkpoint
from support.frontend.served import Served, eventually, metric_sum
from support.tiny_checkpoint import tiny_checkpoint

STREAMS: Final = 8
PLAIN: Final = 2
STARTED: Final = 6
"""Streams that must have tokens before the kill."""
TOKENS: Final = 400
"""Tokens of each answer; the tiny server's pool holds all of them."""
_CLIENT_SECONDS: Final = 300
MOST_CHUNKS: Final = 100
"""Most chunks of a stream that counts as one with most of its answer to come at the kill. A chunk is a token, or a few
when the client reads slowly."""

_SSL: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Not used, but creating one for each request would take longer than the request."""

VICTIMS: Final = ("rank0", "tokenizer0", "frontend", "rank1", "launcher")

RUNNING: Final = 4
QUEUED_STREAMS: Final = 12
QUEUED_PLAIN: Final = 4
RUNNING_TOKENS: Final = 500
QUEUED_TOKENS: Final = 40
LONG_PROMPT: Final = "Count on " * 200
"""Prompt of the running requests. Its prefill takes many steps of STEP_TOKENS, so that a kill meets it."""
STEP_TOKENS: Final = 16
_RESUBMITTED: Final = "minisgl:requests_retried_total"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of one kill."""

    victim: str
    started: int
    """Streams that had some chunks, and not more than MOST_CHUNKS, when the process was killed."""
    outcomes: Counter[str]
    not_ready_seconds: float
    """Time from the kill to the first other answer of /v1/models than 200; 0 where no process can answer, infinite
    where it was 200 all the time."""
    back_seconds: float
    """Time from the kill to the next 200 of it, infinite without one; for a launcher, until no process and no file
    of it is left."""

    @property
    def faults(self) -> list[str]:
        bad = [name for name in self.outcomes if name.startswith("BAD")]
        if self.started < STARTED:
            bad.append(f"only {self.started} streams had tokens out")
        if self.victim.startswith("rank"):
            bad += [f"{count} x {name}" for name, count in self.outcomes.items() if name != "whole"]
        elif self.outcomes["whole"] > STREAMS + PLAIN - self.started:
            bad.append("streams with most of their answer to come were whole")
        if self.victim not in ("frontend", "launcher") and self.outcomes["connection broken"]:
            bad.append("clients got no reason")
        if math.isinf(self.not_ready_seconds):
            bad.append("a model was served all the time")
        elif math.isinf(self.back_seconds):
            bad.append("it did not become ready again")
        return bad

    def late(self, slack: float = 1.0) -> list[str]:
        """Promised times that were exceeded, each multiplied by `slack`."""
        late = []
        if 1.0 * slack < self.not_ready_seconds < math.inf:
            late.append(f"a model was served for {self.not_ready_seconds:.2f} s")
        if (10.0 if self.victim == "launcher" else 60.0) * slack < self.back_seconds < math.inf:
            late.append(f"it took {self.back_seconds:.1f} s")
        return late


class QueuedRound(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of the death of an engine with running and queued requests."""

    victim: str
    prefilling: int
    """Running requests without a token when the process was killed."""
    with_output: Counter[str]
    """Outcomes of requests that had received a token before."""
    without_output: Counter[str]
    resubmitted: int
    """By the counter of the server."""
    back_seconds: float

    @property
    def faults(self) -> list[str]:
        bad = [f"{name} without output" for name in self.without_output if name != "whole"]
        bad += [f"{name} with output" for name in self.with_output if name != "whole"]
        if self.without_output.total() < QUEUED_STREAMS + QUEUED_PLAIN:
            bad.append("queued requests had output before the kill")
        if self.resubmitted != self.without_output.total() + self.with_output.total():
            bad.append(f"{self.resubmitted} requests were counted as resubmitted")
        if math.isinf(self.back_seconds):
            bad.append("it did not become ready again")
        return bad


class Client(threading.Thread):
    """One request and its outcome: `whole`, a kind of failure, or `BAD …` for an answer that only looks whole."""

    def __init__(self, url: str, model: str, *, stream: bool, tokens: int = TOKENS, prompt: str = "Count") -> None:
        super().__init__(daemon=True)
        self.chunks = 0
        self.outcome = "BAD no end"
        self.error = ""
        """Message of the event that ends a stream early."""
        self._url = url
        self._stream = stream
        self._tokens = tokens
        self._body = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        }
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._read_stream() if self._stream else self._read_plain()
        except httpx.TransportError:
            self.outcome = "connection broken"

    def _read_plain(self) -> str:
        answer = httpx.post(f"{self._url}/v1/chat/completions", json=self._body, timeout=_CLIENT_SECONDS, verify=_SSL)
        if answer.status_code == 200:
            return "whole" if answer.json()["usage"]["completion_tokens"] == self._tokens else "BAD truncated success"
        code = answer.json()["error"]["code"]
        return f"{answer.status_code} {code}" if answer.status_code == 503 else f"BAD {answer.status_code} {code}"

    def _read_stream(self) -> str:
        finish, tokens, done, error = None, 0, False, ""
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=_CLIENT_SECONDS, verify=_SSL
            ) as answer:
                if answer.status_code != 200:
                    return f"{answer.status_code} {json.loads(answer.read())['error']['code']}"
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            error, self.error = event["error"]["code"], event["error"]["message"]
                            continue
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                        for choice in event["choices"]:
                            finish = choice["finish_reason"] or finish
                            self.chunks += bool(choice["delta"].get("content"))
        except httpx.TransportError:
            if done:
                return "BAD broken after [DONE]"
            return f"{error} event, connection broken" if error else "connection broken"
        if (finish, tokens, done, error) == ("length", self._tokens, True, ""):
            return "whole"
        return f"BAD clean end: {finish=} {tokens=} {done=} {error=}"


def _watch_readiness(url: str, killed_at: float, *, not_ready: bool) -> tuple[float, float]:
    """Seconds from the kill to the first answer of /v1/models that is not 200, and to the first 200 after that. With
    `not_ready` no process can answer at first: requests wait in the launcher's socket."""
    not_ready_seconds = 0.0 if not_ready else math.inf
    while time.monotonic() < killed_at + 120:
        asked = time.monotonic()
        try:
            ready = httpx.get(f"{url}/v1/models", timeout=10, verify=_SSL).status_code == 200
        except httpx.TransportError:
            ready = False
        if not ready:
            not_ready_seconds = min(not_ready_seconds, asked - killed_at)
        elif not_ready_seconds < math.inf:
            return not_ready_seconds, time.monotonic() - killed_at
        # Only the first time is measured closely: a server that starts needs the cores.
        time.sleep(0.005 if not_ready_seconds == math.inf else 0.1)
    return not_ready_seconds, math.inf


def kill_one(served: Served, victim: str) -> Round:
    """Run one round on a ready server. Afterwards it is ready again, or has exited when the launcher was killed."""
    model = _model(served)
    # Found before the requests start: answers continue during the search.
    pid = served.popen.pid if victim == "launcher" else served.children()[victim]
    streams = [Client(served.url, model, stream=True) for _ in range(STREAMS)]
    plain = [Client(served.url, model, stream=False) for _ in range(PLAIN)]
    eventually(lambda: sum(client.chunks > 0 for client in streams) >= STARTED, 60)
    chunks = [client.chunks for client in streams]
    killed_at = time.monotonic()
    if victim == "launcher":
        served.kill()
        eventually(lambda: not served.children() and not served.leftovers(), 30)
        not_ready, back = 0.0, time.monotonic() - killed_at
    else:
        os.kill(pid, signal.SIGKILL)
        if victim == "frontend":
            eventually(lambda: pid not in served.children().values())
        not_ready, back = _watch_readiness(served.url, killed_at, not_ready=victim == "frontend")
    for client in (*streams, *plain):
        client.join(60)
    return Round(
        victim=victim,
        started=sum(0 < count <= MOST_CHUNKS for count in chunks),
        outcomes=Counter(client.outcome for client in (*streams, *plain)),
        not_ready_seconds=not_ready,
        back_seconds=back,
    )


def run(
    victims: Sequence[str], rounds: int, folder: Path, model: Path | None = None, flags: Sequence[str] = ()
) -> list[Round]:
    """Run `rounds` of each victim. All but the launcher are killed in turn in one server; rank1 needs one with two
    ranks. `model` and `flags` are those of `serve`; None: a tiny model."""
    model = model or tiny_checkpoint()
    done: list[Round] = []
    for turn, ranks in (
        ([victim for victim in victims if victim not in ("rank1", "launcher")], ()),
        ([victim for victim in victims if victim == "rank1"], ("--tp", "2")),
    ):
        if not turn:
            continue
        served = _start(folder, model, *flags, *ranks)
        try:
            for victim in turn * rounds:
                done.append(_show(kill_one(served, victim)))
                assert _whole_answer(served), "the server does not answer after its restart"
            served.popen.send_signal(signal.SIGTERM)
            assert served.popen.wait(60) == 0, served.log.read_text()
            assert not served.children() and not served.leftovers()
        finally:
            served.kill()
    for victim in [victim for victim in victims if victim == "launcher"] * rounds:
        served = _start(folder, model, *flags)
        try:
            done.append(_show(kill_one(served, victim)))
        finally:
            served.kill()
    return done


def kill_queued(served: Served, victim: str, *, started: int) -> QueuedRound:
    """Kill a rank when `started` of the running requests have tokens, and more than can run are queued."""
    model, pid = _model(served), served.children()[victim]
    resubmitted = _metric(served, _RESUBMITTED)
    running = [
        # Each prompt is new, so that no prefix cache shortens its prefill.
        Client(served.url, model, stream=True, tokens=RUNNING_TOKENS, prompt=f"{pid}.{number} {LONG_PROMPT}")
        for number in range(RUNNING)
    ]
    eventually(lambda: _in_engine(served) >= RUNNING)
    queued = [
        Client(served.url, model, stream=number < QUEUED_STREAMS, tokens=QUEUED_TOKENS)
        for number in range(QUEUED_STREAMS + QUEUED_PLAIN)
    ]
    eventually(lambda: _in_engine(served) == len(running) + len(queued))
    eventually(lambda: sum(client.chunks > 0 for client in running) >= started)
    had_output = [client.chunks > 0 for client in (*running, *queued)]
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _, back = _watch_readiness(served.url, killed_at, not_ready=False)
    for client in (*running, *queued):
        client.join(_CLIENT_SECONDS)
    outcomes: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for client, had in zip((*running, *queued), had_output, strict=True):
        outcomes[had][client.outcome] += 1
    return QueuedRound(
        victim=victim,
        prefilling=outcomes[False].total() - len(queued),
        with_output=outcomes[True],
        without_output=outcomes[False],
        resubmitted=_metric(served, _RESUBMITTED) - resubmitted,
        back_seconds=back,
    )


def run_queued(
    victims: Sequence[str], rounds: int, folder: Path, model: Path | None = None, flags: Sequence[str] = ()
) -> list[QueuedRound]:
    """Run `rounds` kills of each victim in one server of two ranks."""
    limits = ("--max-running", str(RUNNING), "--max-step-tokens", str(STEP_TOKENS), "--queue-timeout", "300")
    model = model or write_tiny_checkpoint(folder / "model", "qwen3", max_position=8192)
    served = _start(folder, model, *flags, *limits, "--num-pages", "4096", "--tp", "2")
    done: list[QueuedRound] = []
    try:
        for number in range(rounds):
            for victim in victims:
                done.append(kill_queued(served, victim, started=(1, RUNNING)[number % 2]))
                print(_queued_line(victim, done[-1:]), flush=True)
        served.popen.send_signal(signal.SIGTERM)
        assert served.popen.wait(60) == 0, served.log.read_text()
        assert not served.children() and not served.leftovers()
    finally:
        served.kill()
    return done


def _queued_line(victim: str, rounds: Sequence[QueuedRound]) -> str:
    with_output = sum((round.with_output for round in rounds), Counter[str]())
    without_output = sum((round.without_output for round in rounds), Counter[str]())
    return (
        f"{victim}: {len(rounds)} kills; without output {without_output.total()} requests "
        f"({sum(round.prefilling for round in rounds)} of them in prefill): {_listed(without_output)}; "
        f"with output {with_output.total()}: {_listed(with_output)}; "
        f"resubmitted {sum(round.resubmitted for round in rounds)}; "
        f"back after {max(round.back_seconds for round in rounds):.1f} s at most"
    )


def _listed(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(outcomes.items())) or "none"


def _metric(served: Served, name: str) -> int:
    page = httpx.get(f"{served.url}/metrics", timeout=60, verify=_SSL).text
    return int(metric_sum(page, name))


def _in_engine(served: Served) -> int:
    return _metric(served, "vllm:num_requests_running") + _metric(served, "vllm:num_requests_waiting")


def _start(folder: Path, model: Path, *flags: str) -> Served:
    served = Served(model, folder, "--max-restarts", "1000", *flags)
    served.wait_until_ready()
    return served


def _whole_answer(served: Served) -> bool:
    client = Client(served.url, _model(served), stream=True, tokens=100)
    client.join(60)
    return client.outcome == "whole"


def _model(served: Served) -> str:
    """Name of the served model."""
    return str(httpx.get(f"{served.url}/v1/models", timeout=60, verify=_SSL).json()["data"][0]["id"])


def _show(round: Round) -> Round:
    print(
        f"{round.victim:<11} {round.started} of {STREAMS} running streams; "
        f"not ready after {round.not_ready_seconds:.3f} s, back after {round.back_seconds:.2f} s; "
        f"{_listed(round.outcomes)}",
        flush=True,
    )
    return round


def table(rounds: Sequence[Round]) -> str:
    """One line of a table for each victim."""
    lines = [
        "| killed | rounds | not ready after (most) | back after (median, most) | truncated successes |",
        "|---|---|---|---|---|",
    ]
    for victim in dict.fromkeys(round.victim for round in rounds):
        of_victim = [round for round in rounds if round.victim == victim]
        back = [round.back_seconds for round in of_victim]
        bad = sum(count for round in of_victim for name, count in round.outcomes.items() if name.startswith("BAD"))
        lines.append(
            f"| {victim} | {len(of_victim)} | {max(round.not_ready_seconds for round in of_victim):.2f} s | "
            f"{statistics.median(back):.1f} s, {max(back):.1f} s | {bad} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="kill_matrix")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--victims", nargs="+", choices=VICTIMS)
    parser.add_argument("--queued", action="store_true", help="kill ranks while requests are queued")
    parser.add_argument("--model", type=Path)
    parser.add_argument("flags", nargs="*", help="further flags of serve, behind --")
    args = parser.parse_args()
    faults: list[str] = []
    with tempfile.TemporaryDirectory(prefix="killed-") as folder:
        if args.queued:
            victims = args.victims or ("rank0", "rank1")
            queued = run_queued(victims, args.rounds, Path(folder), args.model, args.flags)
            for victim in victims:
                print(_queued_line(victim, [round for round in queued if round.victim == victim]))
            faults += [f"{round.victim}: {fault}" for round in queued for fault in round.faults]
        else:
            rounds = run(args.victims or VICTIMS, args.rounds, Path(folder), args.model, args.flags)
            print(table(rounds))
            faults += [f"{round.victim}: {fault}" for round in rounds for fault in round.faults + round.late()]
        faults += [f"left behind: {path}" for path in Path(folder).glob("minisgl-*")]
    print("\n".join(faults) if faults else "no faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
