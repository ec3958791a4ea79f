"""A real server with many streams: clients disconnect at any time, and then the server gets SIGTERM."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support.frontend.served import ONE_START, Served, eventually
from support.tiny_checkpoint import tiny_checkpoint

STREAMS = 200
SECONDS_TO_IDLE = 5.0
SLACK = 3
"""Factor on time limits: other tests use the processor too."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text("root-key\n")
        flags = (*ONE_START, "--max-running", "64", "--admin-port", "0", "--admin-keys", str(keys))
        server = Served(tiny_checkpoint(), Path(folder), *flags)
        server.wait_until_ready()
        yield server
        server.kill()


def metrics(served: Served) -> dict[str, float]:
    with urllib.request.urlopen(served.url + "/metrics", timeout=60) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {re.sub(r'model_name="[^"]*",engine="0",?', "", name): float(value) for name, value in map(_split, lines)}


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.rpartition(" ")
    return name, value


def freed_by_flush(served: Served) -> int:
    """Flush the prefix cache and return the number of freed pages."""
    lines = [line["message"] for line in served.lines() if "admin API listening" in line["message"]]
    url = f"http://{urlsplit(served.url).hostname}:{lines[0].rpartition(' ')[2]}/flush_cache"
    request = urllib.request.Request(url, method="POST", headers={"authorization": "Bearer root-key"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.loads(answer.read())["freed_pages"])


def address_of(served: Served) -> tuple[str, int]:
    url = urlsplit(served.url)
    assert url.hostname is not None and url.port is not None
    return url.hostname, url.port


async def one_stream(address: tuple[str, int], number: int, leave: random.Random) -> str:
    """Send a request and disconnect at a random point. Return where that was."""
    reader, writer = await asyncio.open_connection(*address)
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": f"{number} " * leave.choice((5, 200))}],
            "max_tokens": leave.choice((8, 300)),
            "ignore_eos": True,
            "stream": leave.random() < 0.75,
        }
    ).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    place = leave.choice(("head", "body", "at once", "soon", "headers", "tokens", "end"))
    seen = b""
    if place == "head":
        writer.write(request[:40])
    elif place == "body":
        writer.write(request[:-10])
    else:
        writer.write(request)
        await writer.drain()
    if place == "soon":
        await asyncio.sleep(leave.random())
    elif place in ("headers", "tokens"):
        wanted = b"\r\n\r\n" if place == "headers" else b'"content":"' * leave.randint(1, 5)
        while wanted[:11] not in seen and (data := await reader.read(4096)):
            seen += data
    elif place == "end":
        while b"[DONE]" not in seen and b'"usage"' not in seen and (data := await reader.read(4096)):
            seen += data
        assert b"[DONE]" in seen or b'"usage"' in seen, seen[-300:]
    writer.close()
    return place


def test_all_resources_are_free_after_disconnects(served: Served) -> None:
    address = address_of(served)

    async def all_streams() -> list[str]:
        leave = random.Random(20)
        return await asyncio.gather(*(one_stream(address, number, leave) for number in range(STREAMS)))

    places = Counter(asyncio.run(all_streams()))
    assert len(places) == 7 and sum(places.values()) == STREAMS

    def idle() -> bool:
        now = metrics(served)
        return (
            now["vllm:num_requests_running{}"] == now["vllm:num_requests_waiting{}"] == 0
            and now["vllm:kv_cache_usage_perc{}"] == 0
            and [now[f'minisgl:frontend_inflight{{phase="{phase}"}}'] for phase in ("tokenizing", "waiting")] == [0, 0]
            # The scrape itself.
            and now['minisgl:frontend_inflight{phase="reading"}'] == 1
            and now['minisgl:frontend_inflight{phase="generating"}'] == 0
        )

    eventually(idle, SLACK * SECONDS_TO_IDLE)
    final = metrics(served)
    left = sum(value for name, value in final.items() if name.startswith("minisgl:disconnects_total"))
    assert left > STREAMS / 4

    def aborted() -> list[dict[str, Any]]:
        return [line for line in served.lines() if line["message"].startswith("aborted")]

    # Log lines arrive through the launcher, which is slower.
    eventually(lambda: len(aborted()) >= left)
    assert len(aborted()) == left
    assert not [line for line in served.lines() if "traceback" in line or line["level"] in ("error", "critical")]
    assert all(line["extra"]["request_id"] and line["extra"]["phase"] for line in aborted())
    assert served.status("/ready") == 200
    assert freed_by_flush(served) > 0
    assert freed_by_flush(served) == 0


def test_every_stream_completes_after_sigterm(served: Served) -> None:
    address = address_of(served)

    async def all_streams() -> list[bytes]:
        begun = [asyncio.Event() for _ in range(50)]

        async def one(number: int) -> bytes:
            reader, writer = await asyncio.open_connection(*address)
            content = {"prompt": f"{number}", "max_tokens": 100, "ignore_eos": True, "stream": True}
            body = json.dumps(content).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            seen = await reader.readuntil(b'"text":"')
            begun[number].set()
            seen += await reader.read()
            writer.close()
            return seen

        streams = [asyncio.create_task(one(number)) for number in range(50)]
        for event in begun:
            await event.wait()
        served.popen.send_signal(signal.SIGTERM)
        return await asyncio.gather(*streams)

    for answer in asyncio.run(all_streams()):
        # The last chunk of a complete response is empty.
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-300:]
        assert answer.count(b'"finish_reason":"length"') == 1
    assert served.popen.wait(60) == 0
    assert served.children() == {} and served.leftovers() == []
