"""Send requests at their times and keep the answers as they arrive.

Nothing but that happens while requests run: bodies are encoded before and answers parsed afterwards, so that the times
are those of the server. The lag of the event loop shows how far that holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from minisgl.bench.http_client import Endpoint, HttpError
from minisgl.bench.progress import Progress
from minisgl.bench.samples import Answer

_PROBE_SECONDS: Final = 0.005


class TimedRequest(msgspec.Struct, frozen=True):
    due: float
    """Seconds since the beginning."""
    body: bytes
    """JSON text."""


class Client(msgspec.Struct, frozen=True):
    """Load of the client itself during a run."""

    seconds: float
    """Duration of the run."""
    cpu_share: float
    """Processor time of this process, as a share of one core."""
    lag_ms_p99: float
    """Delay of timers in the event loop; arrival times are as inexact. The loop's clock alone adds up to 1 ms."""


async def send_all(
    endpoint: Endpoint, path: str, requests: Sequence[TimedRequest], max_concurrency: int | None, what: str = "requests"
) -> tuple[list[Answer], Client]:
    """Send each request at its time; returns the answers in the same order. `what`: their name in the progress."""
    limiter = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    lags: list[float] = []
    probe = asyncio.create_task(_probe(lags))
    progress = Progress(what, len(requests))
    shown = asyncio.create_task(progress.show())
    began, cpu = time.perf_counter(), time.process_time()
    with _no_garbage_collection():
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request in requests:
                if (wait := began + request.due - time.perf_counter()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(group.create_task(_send(endpoint, path, request.body, limiter, progress)))
        seconds = time.perf_counter() - began
    probe.cancel()
    shown.cancel()
    await asyncio.wait([shown])
    lag = float(np.percentile(lags, 99)) * 1000 if lags else 0.0
    return [task.result() for task in tasks], Client(seconds, (time.process_time() - cpu) / seconds, lag)


async def _send(
    endpoint: Endpoint,
    path: str,
    body: bytes,
    limiter: contextlib.AbstractAsyncContextManager[None],
    progress: Progress,
) -> Answer:
    async with limiter:
        progress.sent += 1
        sent_at = time.perf_counter()
        try:
            async with endpoint.request("POST", path, body) as response:
                sent_at = response.sent_at
                chunks = await response.all_chunks()
                response.raise_for_status(b"".join(chunk for _, chunk in chunks))
                progress.answered += 1
                return Answer(sent_at, chunks)
        except HttpError as error:
            progress.failed += 1
            return Answer(sent_at, [], str(error))


async def _probe(lags: list[float]) -> None:
    """Collect how late each timer fires, in seconds."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _PROBE_SECONDS
        await asyncio.sleep(_PROBE_SECONDS)
        lags.append(max(0.0, loop.time() - due))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Context without pauses of the collector, which take longer with each answer that is kept."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
