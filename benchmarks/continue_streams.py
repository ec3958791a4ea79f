"""Kill the engine of a server under many greedy streams, and measure when each gives its next token.

    python benchmarks/continue_streams.py [--streams 64] [--tokens 400] MODEL [-- FLAGS OF SERVE]

Runs all streams three times: twice undisturbed, which shows how often greedy answers differ by batching alone, and once
with a kill -9 of rank 0 when all of them have tokens. Prints one JSON object: `gap_p50_s` and `gap_most_s`, the longest
time without a token of each stream; `differ`, the share of answers that differ from the first run;
`differ_undisturbed`, the same of the second run; `failed`. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

KILL_TOKENS: Final = 50
"""Events that each stream has before the kill."""


class Stream(threading.Thread):
    """One greedy stream."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.times: list[float] = []
        self.is_whole = False
        body = {"model": "m", "prompt": f"Story number {number}: ", "max_tokens": tokens, "temperature": 0}
        data = json.dumps(body | {"stream": True, "ignore_eos": True}).encode()
        headers = {"content-type": "application/json"}
        self._request = urllib.request.Request(f"{url}/v1/completions", data, headers)
        self.start()

    def run(self) -> None:
        with urllib.request.urlopen(self._request, timeout=300) as response:
            for line in response:
                if line == b"data: [DONE]\n":
                    self.is_whole = True
                elif line.startswith(b"data: "):
                    event: dict[str, Any] = json.loads(line[6:])
                    self.times.append(time.monotonic())
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))

    @property
    def gap(self) -> float:
        return max((after - before for before, after in zip(self.times, self.times[1:], strict=False)), default=0.0)


def run_streams(url: str, count: int, tokens: int, rank: int | None = None) -> list[Stream]:
    """Run all streams to their end; `rank`: process to kill when all have tokens."""
    streams = [Stream(url, number, tokens) for number in range(count)]
    if rank is not None:
        while min(len(stream.times) for stream in streams) < KILL_TOKENS:
            time.sleep(0.01)
        os.kill(rank, signal.SIGKILL)
    for stream in streams:
        stream.join(300)
    return streams


def child(launcher: int, name: str) -> int | None:
    """Find a rank of a launcher or its `standby-engine`; None while there is none. Forks have the command line of their
    standby, but a title of their own."""
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            words = (process / "cmdline").read_text().split("\0")
            title = (process / "comm").read_text().strip()
        except OSError:
            continue
        if "minisgl.launcher.child" in words:
            found, _, parent = words[words.index("minisgl.launcher.child") + 1 :][:3]
            if title.startswith("minisgl-rank"):
                found = title.removeprefix("minisgl-")
            if int(parent) == launcher and found == name:
                return int(process.name)
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--port", type=int, default=18765)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    url = f"http://127.0.0.1:{args.port}"
    command = [sys.executable, "-m", "minisgl", "serve", args.model, "--port", str(args.port)]
    server = subprocess.Popen([*command, "--served-model-name", "m", *args.flags], stdout=sys.stderr)
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5)
                break
            except OSError:
                assert server.poll() is None, "the server did not start"
                time.sleep(0.2)
        first, second = (run_streams(url, args.streams, args.tokens) for _ in range(2))
        while child(server.pid, "standby-engine") is None:
            time.sleep(0.2)
        killed = run_streams(url, args.streams, args.tokens, child(server.pid, "rank0"))
    finally:
        server.terminate()
        server.wait(60)
    pairs = list(zip(first, killed, strict=True))
    gaps = [stream.gap for stream in killed]
    result = {
        "streams": args.streams,
        "failed": sum(not stream.is_whole for stream in killed),
        "gap_p50_s": round(statistics.median(gaps), 3),
        "gap_most_s": round(max(gaps), 3),
        "differ": sum(a.text != b.text for a, b in pairs) / args.streams,
        "differ_undisturbed": sum(a.text != b.text for a, b in zip(first, second, strict=True)) / args.streams,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
